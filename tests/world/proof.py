"""The EC2 provider from tick to table in the emulated world: `srift refresh` as an operator runs it, and judged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import duckdb

from tests.world import World

TYPES = ("g4dn.xlarge", "g5.xlarge", "g6.xlarge")
MARKETS = ("spot", "on-demand")
_SRIFT = [sys.executable, "-c", "from flows.cli import main; main()"]
_OURS = ("SRIFT_", "PREFECT_", "MLFLOW_", "AWS_", "COVERAGE", "PYTEST")
_REPOSITORY = Path(__file__).resolve().parents[2]
_STATES = """
[campaign]
max_hosts = {most}
seed = 7
market = "spot"

[ec2]
regions = ["{region}"]
instance_types = {types}
bucket = "{bucket}"
instance_profile = "{profile}"
python = "{python}"
max_hosts = {most}
max_minutes = {minutes}

[workloads.sine]
entrypoint = "sine.py:build"
samples = 2_000_000
global_batch = 32
goals = [{{ goal = "cheapest_within_deadline", hours = 2.0 }}]
"""
_WORKLOAD = '''
import torch
from torch import nn


def build(width: int = 256):
    """Fit a sine with a small network."""
    model = nn.Sequential(nn.Linear(32, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1))

    def make_batch(size):
        x = torch.randn(size, 32)
        return x, torch.sin(x.sum(dim=1, keepdim=True))

    return model, nn.MSELoss(), make_batch, torch.optim.Adam(model.parameters())
'''


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """A folder with a srift.toml of the emulated account, and the command run in it as from a shell."""

    folder: Path
    world: World

    @property
    def home(self) -> Path:
        """Where Srift keeps what it learns."""
        return self.folder / "state"

    def settle_in(self, *, most: int, minutes: float, types: tuple[str, ...] = TYPES) -> None:
        """Write srift.toml and a workload."""
        told = {"bucket": self.world.bucket, "profile": self.world.profile, "region": self.world.region}
        text = _STATES.format(most=most, minutes=minutes, types=json.dumps(types), python=sys.executable, **told)
        (self.folder / "srift.toml").write_text(text)
        (self.folder / "sine.py").write_text(_WORKLOAD)

    def srift(self, *words: str, within_s: float = 600.0, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run the command; what it says is in the answer."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(_OURS)}
        ours = {
            "SRIFT_HOME": str(self.home),
            "PREFECT_HOME": str(self.folder / "prefect"),
            "PYTHONPATH": str(_REPOSITORY),
        }
        return subprocess.run(
            [*_SRIFT, *words],
            cwd=self.folder,
            env=kept | ours | self.world.environment() | variables,
            capture_output=True,
            text=True,
            timeout=within_s,
        )

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        """From the warehouse, as it is now."""
        return _asked(self.home / "warehouse.duckdb", query)

    def published(self) -> list[tuple[Any, ...]]:
        """Rows of the published table that are about EC2: workload, cluster, status."""
        file = self.home / "published" / "recommendations.duckdb"
        query = "select workload, cluster, status from recommendations where provider = 'ec2'"
        return _asked(file, query) if file.exists() else []


@dataclass(slots=True)
class Proof:
    """What was seen, and what should have been seen and was not."""

    launched: Counter[tuple[str, int]] = field(default_factory=Counter)  # (market, machines) -> clusters
    records: Counter[tuple[str, str]] = field(default_factory=Counter)  # (kind, status)
    leases: list[tuple[str, str, float, str]] = field(default_factory=list)  # cluster, market, dollars, outcome
    table: int = 0
    seconds: float = 0.0
    wrong: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """For a person."""
        clusters = [f"{count} of {machines} ({market})" for (market, machines), count in sorted(self.launched.items())]
        records = [f"{count} {kind} {status}" for (kind, status), count in sorted(self.records.items())]
        usd = sum(usd or 0.0 for _, _, usd, _ in self.leases)
        return [
            f"launches, by machines: {', '.join(clusters) or 'none'}",
            f"runs: {', '.join(records) or 'none'}",
            f"leases: {len(self.leases)}, {usd:.4f} dollars at list and drawn prices",
            f"published rows about ec2: {self.table}",
            f"seconds: {self.seconds:.0f}",
            *(f"WRONG: {one}" for one in self.wrong),
        ]


def refreshed(operator: Operator, *, max_usd: float, markets: tuple[str, ...] = MARKETS, say: Any = None) -> Proof:
    """Refresh once in each market, and judge. Nothing is raised: what is wrong stands in the proof."""
    proof, began = Proof(), time.monotonic()
    for market in markets:
        done = operator.srift("refresh", "--provider", "ec2", "--max-usd", str(max_usd), SRIFT_CAMPAIGN__MARKET=market)
        if say is not None:
            say(f"--- srift refresh --provider ec2 --max-usd {max_usd:g} ({market})\n{done.stdout}{done.stderr}")
        if done.returncode != 0:
            proof.wrong.append(f"{market}: exit status {done.returncode}: {(done.stderr or done.stdout)[-2000:]}")
    proof.seconds = time.monotonic() - began
    _judge(operator, proof, markets)
    return proof


def _judge(operator: Operator, proof: Proof, markets: tuple[str, ...]) -> None:
    world = operator.world
    for one in world.launches:
        proof.launched[one.market, len(one.ids)] += 1
    if world.alive():
        proof.wrong.append(f"still alive: {', '.join(world.alive())}")
    for market in markets:
        if not any(launch.market == market for launch in world.launches):
            proof.wrong.append(f"no {market} launch")
    if not (operator.home / "warehouse.duckdb").exists():
        proof.wrong.append("there is no warehouse")
        return
    proof.records.update(
        (str(kind), str(status)) for kind, status in operator.rows("select kind, status from raw_records")
    )
    proof.leases += operator.rows("select cluster, market, usd, outcome from raw_leases")
    proof.table = len(operator.published())
    if not proof.records["train", "measured"]:
        proof.wrong.append("nothing was trained on the machines")
    odd = {status for _, status in proof.records} - {"measured"}
    if odd:
        proof.wrong.append(f"runs that were not measured: {proof.records}; {_reasons(operator)}")
    if not proof.leases or any(outcome != "released" for *_, outcome in proof.leases):
        proof.wrong.append(f"leases that were not released: {proof.leases}")
    if not proof.table:
        proof.wrong.append("nothing was published about ec2")


def _asked(file: Path, query: str) -> list[tuple[Any, ...]]:
    with duckdb.connect(str(file), read_only=True) as connection:
        return connection.execute(query).fetchall()


def _reasons(operator: Operator) -> list[Any]:
    return operator.rows("select body ->> '$.reason' from raw_records where status <> 'measured' limit 5")
