"""The EC2 provider from tick to table in the emulated world: `srift refresh` as an operator runs
it, and judged.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import duckdb

from tests.wheels import wheel
from tests.world import World

TYPES = ("g4dn.xlarge", "g5.xlarge", "g6.xlarge")
UNEQUAL = ("g4dn.xlarge", "g4dn.12xlarge")  # one device and four: a cluster of both is mixed
_SRIFT = [sys.executable, "-c", "from flows.cli import main; main()"]
_OURS = ("SRIFT_", "PREFECT_", "MLFLOW_", "AWS_", "COVERAGE", "PYTEST")
_REPOSITORY = Path(__file__).resolve().parents[2]
_EXAMPLE = _REPOSITORY / "examples" / "own-repository"
_STATES = """
[campaign]
max_hosts = {most}
seed = 7
market = "{market}"

[ec2]
regions = ["{region}"]
instance_types = {types}
bucket = "{bucket}"
instance_profile = "{profile}"
python = "{python}"
emulated = true
max_hosts = {most}
max_minutes = {minutes}

"""
_SINE = """[workloads.sine]
{code}
samples = 2_000_000
global_batch = 256
goals = [{{ goal = "cheapest_within_deadline", hours = 2.0 }}]
"""
_FILE = 'entrypoint = "sine.py:build"'
_REPOSITORY_OF_SINE = """\
path = "repo"
entrypoint = "train.sine:build"
requirements = "requirements.txt"
env = { WIDTH = "256" }"""
_PARTS = {
    "train/__init__.py": "",
    "train/sine.py": """
import os
import width  # of a wheel that the machines install
from . import parts

def build():
    return parts.build(width.of(os.environ))
""",
    "requirements.txt": "--no-index\n--find-links wheels\nwidth\n",
}
# A batch whose samples, not its fixed overhead, take the time: else noise decides whether the
# slower machine of two gets a share at all, and no mixed cluster is a candidate.
_WORKLOAD = '''
import torch
from torch import nn


def build(width: int = 256):
    """Fit a sine with a small network."""
    hidden = [nn.Linear(32, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh()]
    model = nn.Sequential(*hidden, nn.Linear(width, 1))

    def make_batch(size):
        x = torch.randn(size, 32)
        return x, torch.sin(x.sum(dim=1, keepdim=True))

    return model, nn.MSELoss(), make_batch, torch.optim.Adam(model.parameters())
'''


@dataclass(frozen=True, slots=True, kw_only=True)
class Campaign:
    """One refresh of a new workload: a cluster of at most so many machines, bought in one market.

    `code`: what they train is one plain file; a repository with a wheel to install and a variable;
    or what `examples/own-repository` has, a ResNet-50 with its requirements and a folder of photos.
    """

    market: str
    machines: int
    types: tuple[str, ...] = TYPES[:1]
    code: Literal["file", "repository", "example"] = "file"

    def minutes(self, usual: float) -> float:
        """That its refresh may measure: five ranks to start instead of two, or a network of 23
        million weights.
        """
        return usual * (2 if self.types == UNEQUAL else 4 if self.code == "example" else 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """A folder with a srift.toml of the emulated account, and the command run in it as from a
    shell.
    """

    folder: Path
    world: World

    @property
    def home(self) -> Path:
        return self.folder / "state"

    def settle_in(self, campaign: Campaign, minutes: float) -> None:
        account = {
            "bucket": self.world.bucket,
            "profile": self.world.profile,
            "region": self.world.region,
        }
        bought = {
            "market": campaign.market,
            "most": campaign.machines,
            "types": json.dumps(campaign.types),
        }
        settings = _STATES.format(**account, **bought, minutes=minutes, python=sys.executable)
        if campaign.code == "example":
            self._copy_example(settings)
            return
        repository = campaign.code == "repository"
        workload = _SINE.format(code=_REPOSITORY_OF_SINE if repository else _FILE)
        files = {"srift.toml": settings + workload, "sine.py": _WORKLOAD}
        if repository:
            files |= {f"repo/{name}": part for name, part in _PARTS.items()} | {
                "repo/train/parts.py": _WORKLOAD
            }
            wheel(
                self.folder / "repo" / "wheels",
                "width",
                "1.0",
                "def of(variables): return int(variables['WIDTH'])\n",
            )
        for name, content in files.items():
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / name).write_text(content)

    def _copy_example(self, settings: str) -> None:
        """`examples/own-repository` as it stands, photos made, but for where it is measured."""
        shutil.copytree(_EXAMPLE, self.folder)
        make = [sys.executable, "make_photos.py", "photos", "--count", "100"]
        subprocess.run(make, cwd=self.folder, check=True, capture_output=True)
        file = self.folder / "srift.toml"
        own = file.read_text()
        file.write_text(settings + own[own.index("[workloads.") :])

    def environment(self) -> dict[str, str]:
        """Of a shell in that folder, with the emulated account's credentials."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(_OURS)}
        ours = {
            "SRIFT_HOME": str(self.home),
            "PREFECT_HOME": str(self.folder / "prefect"),
            "PYTHONPATH": str(_REPOSITORY),
        }
        return kept | ours | self.world.environment()

    def srift(
        self, *words: str, within_s: float = 600.0, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*_SRIFT, *words],
            cwd=self.folder,
            env=self.environment() | variables,
            capture_output=True,
            text=True,
            timeout=within_s,
        )

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        return _asked(self.home / "warehouse.duckdb", query)

    def published(self) -> list[tuple[Any, ...]]:
        """Rows of the published table that are about EC2: workload, cluster, status."""
        query = "select workload, cluster, status from recommendations where provider = 'ec2'"
        return _asked(self._table, query) if self._table.exists() else []

    def publications(self) -> int:
        query = "select count(distinct publication_id) from recommendation_history"
        return int(_asked(self._table, query)[0][0]) if self._table.exists() else 0

    @property
    def _table(self) -> Path:
        return self.home / "published" / "recommendations.duckdb"


@dataclass(slots=True)
class Proof:
    """What was seen, and in `wrong` what should have been seen and was not."""

    clusters: Counter[tuple[str, int]] = field(
        default_factory=Counter
    )  # (market, machines) -> leases
    records: Counter[tuple[str, str]] = field(default_factory=Counter)  # (kind, status)
    leases: list[tuple[str, float | None, str]] = field(
        default_factory=list
    )  # cluster, dollars, outcome
    table: int = 0
    seconds: float = 0.0
    wrong: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        clusters = [
            f"{count} x {machines} {market}"
            for (market, machines), count in sorted(self.clusters.items())
        ]
        records = [
            f"{count} {kind} {status}" for (kind, status), count in sorted(self.records.items())
        ]
        usd = sum(usd or 0.0 for _, usd, _ in self.leases)
        return [
            f"clusters, by machines and market: {', '.join(clusters) or 'none'}",
            f"runs: {', '.join(records) or 'none'}",
            f"leases: {len(self.leases)}, {usd:.4f} dollars",
            f"published rows about ec2: {self.table}",
            f"seconds: {self.seconds:.0f}",
            *(f"WRONG: {one}" for one in self.wrong),
        ]


def prove(
    world: World,
    folder: Path,
    campaigns: Sequence[Campaign],
    *,
    minutes: float,
    max_usd: float = 5.0,
    say: Callable[[str], None] = lambda _: None,
) -> Proof:
    """Refresh once for each campaign, each in a home of its own, and judge. What is wrong is in the
    proof.
    """
    proof, began = Proof(), time.monotonic()
    for place, one in enumerate(campaigns):
        operator = Operator(folder=folder / f"{place}-{one.machines}-{one.market}", world=world)
        operator.settle_in(one, one.minutes(minutes))
        launched = len(world.launches)
        done = operator.srift("refresh", "--provider", "ec2", "--max-usd", f"{max_usd:g}")
        say(f"--- {one.machines} {one.market}: srift refresh --provider ec2 --max-usd {max_usd:g}")
        say(done.stdout + done.stderr)
        if done.returncode != 0:
            said = (done.stderr or done.stdout)[-3000:]
            proof.wrong.append(f"{one}: exit status {done.returncode}: {said}")
            continue
        _judge(operator, one, proof, launched)
    proof.seconds = time.monotonic() - began
    return proof


def _judge(operator: Operator, campaign: Campaign, proof: Proof, launched: int) -> None:
    sizes: Counter[str] = Counter()
    for launch in operator.world.launches[launched:]:
        sizes[launch.tags.get("srift:lease", "untagged")] += len(launch.ids)
        if launch.market != campaign.market:
            proof.wrong.append(f"{campaign}: a launch {launch.market}")
    proof.clusters.update((campaign.market, machines) for machines in sizes.values())
    if campaign.machines not in sizes.values():
        proof.wrong.append(f"{campaign}: clusters of {sorted(sizes.values())} machines")
    if alive := operator.world.alive():
        proof.wrong.append(f"{campaign}: still alive: {', '.join(alive)}")
    kinds = Counter(
        (str(kind), str(status))
        for kind, status in operator.rows("select kind, status from raw_runs")
    )
    proof.records += kinds
    if not kinds["train", "measured"]:
        proof.wrong.append(f"{campaign}: nothing was trained")
    if {status for _, status in kinds} != {"measured"}:
        unmeasured = operator.rows(
            "select kind, status, reason from raw_runs where status <> 'measured'"
        )
        proof.wrong.append(f"{campaign}: not measured: {unmeasured[:5]}")
    if campaign.types == UNEQUAL:
        _judge_unequal(operator, campaign, proof)
    leases = operator.rows("select cluster, usd, outcome from raw_leases where provider = 'ec2'")
    proof.leases += leases
    if len(leases) != len(sizes) or any(outcome != "released" for *_, outcome in leases):
        proof.wrong.append(f"{campaign}: {len(sizes)} clusters were launched, leases {leases}")
    rows = operator.published()
    proof.table += len(rows)
    if "recommended" not in {status for *_, status in rows}:
        proof.wrong.append(f"{campaign}: published {rows}")


def _judge_unequal(operator: Operator, campaign: Campaign, proof: Proof) -> None:
    """Machines of several devices and clusters of two types, from the launch to the table."""
    leased = operator.rows("select cluster from raw_leases where provider = 'ec2'")
    measured = operator.rows("select distinct cluster, layout from runs where provider = 'ec2'")
    layouts = [[int(one) for one in str(layout).split("+")] for _, layout in measured]
    if not any("+" in str(cluster) for cluster, _ in measured):
        proof.wrong.append(f"{campaign}: no run on a mixed cluster: {measured}, leases {leased}")
    if not any(max(one) > 1 for one in layouts):
        proof.wrong.append(f"{campaign}: no run on several devices of a machine: {measured}")
    asked = operator.srift(
        "recommend", "sine", "--provider", "ec2", "--deadline", "2h", "--top", "200", "--json"
    )
    rows = json.loads(asked.stdout) if asked.returncode == 0 else []
    if not any("+" in str(row["cluster"]) for row in rows):
        proof.wrong.append(
            f"{campaign}: no mixed cluster: {asked.stderr} {[row['cluster'] for row in rows]}"
        )
    if not any(str(row["layout"]) == "4" for row in rows):
        proof.wrong.append(
            f"{campaign}: no machine's four devices are weighed: {[row['layout'] for row in rows]}"
        )


def _asked(file: Path, query: str) -> list[tuple[Any, ...]]:
    with duckdb.connect(str(file), read_only=True) as connection:
        return connection.execute(query).fetchall()
