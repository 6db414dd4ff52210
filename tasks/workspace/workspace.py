"""What a flow works on: the settings, the warehouse and one provider, opened together and refused together."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cache
from pathlib import Path
from uuid import uuid4

from models.domain.cluster import Cluster, Offer
from models.domain.suggestions import nearest_names
from models.domain.workload import Workload
from warehouse.database import Warehouse

from ..providers.base import Capabilities, Provider
from ..providers.ec2 import provider as ec2
from ..providers.ec2.snapshot import packaged
from ..providers.local import provider as local
from .settings import IMPORTED, Settings, SettingsError, load_settings
from .shared import open_warehouse

CAPABILITIES = {"local": local.CAPABILITIES, "ec2": ec2.CAPABILITIES}
PROVIDERS = tuple(CAPABILITIES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workspace:
    """One srift.toml, its state, and where its machines come from."""

    settings: Settings
    warehouse: Warehouse
    provider: Provider

    @property
    def home(self) -> Path:
        """SRIFT_HOME: everything that is written."""
        return self.settings.home

    @property
    def spends_money(self) -> bool:
        """See Capabilities."""
        return capabilities(self.provider.name).spends_money

    @property
    def simulated(self) -> bool:
        """See Capabilities."""
        return capabilities(self.provider.name).simulated

    @property
    def can_launch(self) -> bool:
        """Whether machines that are paid for have somewhere to report to."""
        return not self.spends_money or self.settings.ec2.bucket is not None

    @property
    def max_hosts(self) -> int:
        """Most machines of a cluster that is advised; what a campaign buys has a limit of its own."""
        return (self.settings.ec2 if self.spends_money else self.settings.campaign).max_hosts

    @property
    def max_minutes(self) -> float:
        """How long one campaign measures at most."""
        return (self.settings.ec2 if self.spends_money else self.settings.campaign).max_minutes

    @property
    def published(self) -> Path:
        """The copies that readers open."""
        return self.home / "published"

    @property
    def report_page(self) -> Path:
        """The page beside them, for a browser."""
        return self.published / "report.html"

    @property
    def workloads(self) -> list[Workload]:
        """Every workload of srift.toml, as its file is now."""
        return [self.settings.workload(name) for name in self.settings.workloads]

    @property
    def measurable(self) -> list[Workload]:
        """Those that can be run here: the others are known by imported measurements alone."""
        return [workload for workload in self.workloads if workload.digest != IMPORTED]

    def without(self, names: Collection[str]) -> Workspace:
        """The same, as if srift.toml had no workloads of those names."""
        kept = {name: one for name, one in self.settings.workloads.items() if name not in names}
        return (
            replace(self, settings=self.settings.model_copy(update={"workloads": kept}))
            if names
            else self
        )

    def fits(self, cluster: Cluster) -> str:
        """Why `cluster` can never be had here; empty where it can."""
        return self.provider.fits(cluster)

    def launches(self, cluster: Cluster) -> str:
        """Why a campaign would not buy `cluster`, though there may be measurements of it; empty where it would."""
        return self.provider.launches(cluster)


def open_workspace(provider: str = "local") -> Workspace:
    """Raises SettingsError where srift.toml, a variable or the provider's name is wrong. Starts nothing."""
    settings = load_settings()
    return Workspace(
        settings=settings,
        warehouse=open_warehouse(settings),
        provider=provider_of(settings, provider),
    )


def provider_of(settings: Settings, name: str) -> Provider:
    """The provider called `name`. Raises SettingsError on one that there is not."""
    capabilities(name)
    node_package = Path(__file__).parents[1] / "node"
    opened: dict[str, Callable[[], Provider]] = {
        "local": lambda: local.LocalProvider(
            settings.home, settings.local.instance_types, node_package, sys.executable
        ),
        "ec2": lambda: ec2.Ec2Provider(settings.ec2, home=settings.home, node_package=node_package),
    }
    return opened[name]()


def capabilities(name: str) -> Capabilities:
    """Of the provider called `name`. Raises SettingsError on one that there is not."""
    if name not in CAPABILITIES:
        raise SettingsError(f"unknown provider {name!r}; {nearest_names(name, PROVIDERS)}")
    return CAPABILITIES[name]


def known_devices(local_types: Iterable[str]) -> dict[str, dict[str, tuple[int, str]]]:
    """Provider -> type -> number and kind of its devices, of every type that is known without asking anybody."""
    return {
        "local": dict.fromkeys(local_types, (1, "cpu")),
        "ec2": {one.name: (one.devices, one.device) for one in packaged().instance_types},
    }


def refresh_command(provider: str, max_usd: str) -> str:
    """What to type for a refresh that may spend `max_usd`, where machines are paid for."""
    if not capabilities(provider).spends_money:
        return "srift refresh"
    return f"srift refresh --provider {provider} --max-usd {max_usd}"


def refuse_to_spend(provider: str, max_usd: float | None) -> None:
    """Where machines cost money nothing starts without a cap, nor with one above 0 where launching is not set up.

    Raises SettingsError naming what is missing. A cap of 0 measures nothing, and is always allowed.
    """
    if max_usd is not None and not 0 <= max_usd < float("inf"):
        raise SettingsError(f"--max-usd {max_usd} is no number of dollars that a cap can be")
    if not capabilities(provider).spends_money:
        return
    if max_usd is None:
        raise SettingsError(
            f"machines of {provider} cost money: say with --max-usd what a refresh may spend; 0 measures nothing"
        )
    if max_usd > 0 and load_settings().ec2.bucket is None:
        raise SettingsError(
            "machines of ec2 report through a bucket of S3, and none is named: set bucket under [ec2] in srift.toml and"
            " run `srift doctor --provider ec2`; with --max-usd 0 a refresh takes prices, learns from imported"
            " measurements and publishes"
        )


def new_refresh_id(now: datetime) -> str:
    """Sorts by time and is never given twice, on no machine of a team."""
    return f"{now:%Y%m%dT%H%M%S}-{uuid4().hex[:8]}"


def offers_of_market(offers: list[Offer], market: str) -> list[Offer]:
    """The offers of one market; "any" is all of them."""
    return [offer for offer in offers if market in ("any", offer.market)]


@cache
def code_commit() -> str:
    """Commit of the running code, with `-dirty` where the tree differs; "unknown" outside a checkout."""
    try:
        return subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12", "--match", ""],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
