"""A small installation whose past is synthetic: a srift.toml, machines that are only described, a
fitted champion.

`furnished()` is a home with registry, prices and a published table, made once a session: only read
what is in it.
"""

import fcntl
import os
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import pandas as pd

from models.domain.cluster import InstanceType, Offer
from models.step_time.model import fit
from tasks.market import offers as prices
from tasks.providers.base import (
    NotSwept,
    Provider,
    ProviderError,
)
from tasks.recommendation import publication as publish
from tasks.recommendation import table
from tasks.training import registry
from tasks.training.registry import Champion, Provenance
from tasks.workspace.settings import load_settings
from tasks.workspace.sources import Source
from tasks.workspace.workspace import Workspace
from tests.models.planning import cores_fit
from tests.models.synthetic import TYPES, World
from tests.warehouse.builders import NOON, fresh

USD = {"s.small": 0.030, "s.medium": 0.055, "n.medium": 0.078, "s.large": 0.125, "s.whole": 0.175}
SAMPLES = {"conv": 200_000, "lm": 100_000}
BATCH = {"conv": 48, "lm": 24}
_BUILD = "def build():\n    raise AssertionError('runs on nodes only')\n"
_WORKLOAD = """
[workloads.{name}]
entrypoint = "work.py:build"
samples = {samples}
global_batch = {batch}
goals = [
    {{ goal = "cheapest_within_deadline", hours = 4.0 }},
    {{ goal = "fastest_within_budget", usd = 0.3 }},
]
"""


@dataclass
class DescribedMachines(Provider):
    """A provider of the synthetic world's types that starts nothing. `unpriced` types have no
    price.
    """

    name: str = "local"
    unpriced: frozenset = frozenset()
    down: str = ""
    held: Sequence = ()
    over: Sequence = ()
    reaped: list = field(default_factory=list)
    unswept: Mapping = field(default_factory=dict)

    def instance_types(self):
        return [
            InstanceType(
                name=name,
                provider=self.name,
                devices=1,
                device="cpu",
                cores=cores,
                memory_gib=4.0,
                device_memory_gib=4.0,
                bandwidth_gbps=gbps,
            )
            for name, (cores, gbps) in TYPES.items()
        ]

    def offers(self, now):
        if self.down:
            raise ProviderError(self.down)
        return [
            Offer(
                instance_type=kind,
                market=market,
                zone="a",
                region="here",
                usd_per_hour=None
                if kind.name in self.unpriced
                else USD[kind.name] * (0.4 if market == "spot" else 1.0),
                interruptions_per_hour=0.2 if market == "spot" else 0.0,
                price_as_of=now,
            )
            for kind in self.instance_types()
            for market in ("on-demand", "spot")
        ]

    def limits(self):
        return []

    def fits(self, cluster):
        return cores_fit(cluster)

    @contextmanager
    def acquire(self, cluster, *, lease_id, deadline_s, seed, max_usd_per_hour):
        raise AssertionError("a test of words and tables wanted machines")
        yield

    def leases(self):
        return self.held

    def ended(self):
        return self.over

    def reap(self, now):
        self.reaped.append(now)
        if self.unswept:
            raise NotSwept(self.name, self.unswept, ["machine i-1: it was ended"])
        return []


_CAMPAIGN = """[campaign]
max_hosts = 2
max_minutes = 5.0
stale_after_days = 36500  # the described runs are all of one noon
"""


def write_project(folder, *workloads):
    """A srift.toml with `workloads` (conv and lm unless named) and the file that they name."""
    (folder / "work.py").write_text(_BUILD)
    named = workloads or tuple(SAMPLES)
    blocks = [
        _WORKLOAD.format(name=name, samples=SAMPLES.get(name, 1000), batch=BATCH.get(name, 16))
        for name in named
    ]
    (folder / "srift.toml").write_text(_CAMPAIGN + "".join(blocks))
    return folder / "srift.toml"


def install(folder, *workloads, provider=None):
    """An installation in `folder` with an empty warehouse; nothing is registered or published."""
    settings = load_settings(write_project(folder, *workloads)).model_copy(
        update={"home": folder / "state"}
    )
    settings.home.mkdir()
    return Workspace(
        settings=settings, warehouse=fresh(settings.home), provider=provider or DescribedMachines()
    )


def priced(folder, provider=None):
    """An installation with definitions, and with prices of noon."""
    here = install(folder, provider=provider)
    prices.note_definitions(here, NOON)
    prices.snapshot_offers(here, "refresh-1", NOON)
    return here


def changed(here, section, **values):
    """An installation whose settings have these values in a section."""
    updated = getattr(here.settings, section).model_copy(update=values)
    return replace(here, settings=here.settings.model_copy(update={section: updated}))


def digests():
    """Of the described types, by name."""
    return {kind.name: kind.digest for kind in DescribedMachines().instance_types()}


@cache
def measured():
    """What the synthetic world's runs left behind, of the workloads conv and lm, all measured at
    noon.
    """
    data = World(3).data(90)
    frames = {name: getattr(data, name) for name in ("runs", "profiles", "buckets", "workloads")}
    frames = {
        name: frame[frame["workload"].isin(SAMPLES)].reset_index(drop=True)
        for name, frame in frames.items()
    }
    frames["runs"] = frames["runs"].assign(measured_at=pd.Timestamp(NOON).tz_localize(None))
    digest = Source(files={}, entry="").digest({"": _BUILD.encode()}, "build", {})
    frames["workloads"] = frames["workloads"].assign(digest=digest)
    types = data.instance_types.assign(digest=data.instance_types["name"].map(digests()))
    return replace(data, **frames, instance_types=types)


@cache
def model():
    """Fitted once a session."""
    return fit(measured(), seed=1)


def champion(version=3):
    return Champion(version=version, model=model())


def scores():
    row = {
        "split": "workload",
        "rows": 20,
        "mean_error": 0.05,
        "median_error": 0.04,
        "p90_error": 0.1,
        "coverage_90": 0.9,
        "median_width": 0.2,
    }
    return pd.DataFrame([row | {"group": group} for group in ("conv", "all")])


def log_challenger(home, provider):
    from_here = Provenance(
        training_digest="d1", training_rows=90, code_commit="abc", seed=1, refresh_id="refresh-1"
    )
    return registry.log_challenger(
        home, provider, model(), scoreboard=scores(), card="# a card", provenance=from_here
    )


def log_champion(home, provider="local"):
    """Register a model and promote it; its version."""
    version = log_challenger(home, provider)
    registry.promote(home, provider, version, "better")
    return version


@cache
def furnished():
    """A project's folder whose state/ has the model registered as champion, prices of noon, and a
    published table.

    Made by the first process of a run that asks for it, for all of them.
    """
    folder = Path(os.environ["PYTEST_RUN_OF_SRIFT"]) / "furnished"
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.exists():
            return folder
        folder.mkdir()
        here = priced(folder)
        here.home.chmod(0o700)  # as the command makes a new one
        version = log_champion(here.home)
        known = registry.load_champion(here.home, "local")
        rows = table.recommend_all(here, known, prices.current_offers(here), measured().runs)
        publish.store_publication(here, rows, champion(version), "refresh-1", NOON)
        publish.export_copies(here)
    return folder
