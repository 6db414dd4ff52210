"""Run `srift refresh` on the emulated EC2 as an operator does, and check launches and tables."""

import json
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import duckdb

from tests.local.command import SRIFT, outside
from tests.wheels import wheel
from tests.world import World

TYPES = ("g4dn.xlarge", "g5.xlarge", "g6.xlarge")
REFRESH = ("refresh", "--provider", "ec2", "--max-usd", "5", "--month-spent", "0")
UNEQUAL = ("g4dn.xlarge", "g4dn.12xlarge")  # one device and four: a cluster of both is mixed
_REPOSITORY = Path(__file__).resolve().parents[2]
_SETTINGS = """
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
_FILES = {
    "repo/train/__init__.py": "",
    "repo/train/parts.py": _WORKLOAD,
    "repo/train/sine.py": """
import os
import width  # of a wheel that the machines install
from . import parts

def build():
    return parts.build(width.of(os.environ))
""",
    "repo/requirements.txt": "--no-index\n--find-links wheels\nwidth\n",
}
_WIDTH = "def of(variables): return int(variables['WIDTH'])\n"


@dataclass
class Campaign:
    """A refresh that measures a new workload on clusters of at most `machines` machines.

    `market` is "spot" or "on-demand", and `types` are the instance types. `code` is "file" (a
    single file) or "repository" (a repository that needs a wheel and an environment variable).
    """

    market: str
    machines: int
    types: tuple = TYPES[:1]
    code: str = "file"


@dataclass
class Operator:
    """An operator's folder with a srift.toml for the emulated account. `srift` runs in it."""

    folder: Path
    world: World

    def settle_in(self, campaign, minutes):
        settings = _SETTINGS.format(
            market=campaign.market,
            most=campaign.machines,
            types=json.dumps(campaign.types),
            region=self.world.region,
            bucket=self.world.bucket,
            profile=self.world.profile,
            python=sys.executable,
            minutes=minutes,
        )
        files, code = {}, _FILE
        if campaign.code == "repository":
            files, code = _FILES, _REPOSITORY_OF_SINE
            wheel(self.folder / "repo/wheels", "width", "1.0", _WIDTH)
        files = {**files, "sine.py": _WORKLOAD, "srift.toml": settings + _SINE.format(code=code)}
        for name, text in files.items():
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / name).write_text(text)

    def environment(self):
        """Return environment variables with a new SRIFT_HOME and the emulated credentials."""
        ours = {
            "SRIFT_HOME": f"{self.folder}/state",
            "PREFECT_HOME": f"{self.folder}/prefect",
            "PYTHONPATH": str(_REPOSITORY),
        }
        return outside("AWS_") | ours | self.world.environment()

    def srift(self, *words):
        return subprocess.run(
            [*SRIFT, *words],
            cwd=self.folder,
            env=self.environment(),
            capture_output=True,
            text=True,
            timeout=600.0,
        )

    def rows(self, query, file="warehouse.duckdb"):
        with duckdb.connect(self.folder / f"state/{file}", read_only=True) as connection:
            return connection.execute(query).fetchall()


@dataclass
class Proof:
    """Counts of what the refreshes launched and recorded, and in `wrong` a sentence per problem."""

    clusters: Counter = field(default_factory=Counter)  # by machines and market
    records: Counter = field(default_factory=Counter)  # by kind and status
    wrong: list = field(default_factory=list)

    def lines(self):
        return [
            f"clusters: {', '.join(f'{n} x {name}' for name, n in sorted(self.clusters.items()))}",
            f"runs: {', '.join(f'{n} {name}' for name, n in sorted(self.records.items()))}",
            *(f"WRONG: {problem}" for problem in self.wrong),
        ]


def prove(world, folder, campaigns, *, minutes):
    """Run a refresh for each campaign in its own SRIFT_HOME, check it, and return the Proof.

    `minutes` is the setting `max_minutes`, doubled for mixed clusters.
    """
    proof = Proof()
    for place, campaign in enumerate(campaigns):
        operator = Operator(folder=folder / f"{place}-{campaign.machines}", world=world)
        operator.settle_in(campaign, minutes * (2.0 if campaign.types == UNEQUAL else 1.0))
        launched = len(world.account.launches)
        done = operator.srift(*REFRESH)
        print(f"--- {campaign}", done.stdout, done.stderr, sep="\n", flush=True)
        if done.returncode != 0:
            proof.wrong.append(f"{campaign}: exit status {done.returncode}")
            continue
        problems = _judge(operator, campaign, proof, launched)
        proof.wrong += [f"{campaign}: {problem}" for problem in problems]
    return proof


def _judge(operator, campaign, proof, launched):
    """Yield a sentence for each problem of a refresh that exited with 0.

    `launched` is the number of launches before this refresh. Clusters and runs are counted in
    `proof`.
    """
    sizes = Counter()
    for launch in operator.world.account.launches[launched:]:
        sizes[launch.tags.get("srift:lease", "untagged")] += len(launch.ids)
        if launch.market != campaign.market:
            yield f"a launch {launch.market}"
    proof.clusters.update(f"{machines} {campaign.market}" for machines in sizes.values())
    if campaign.machines not in sizes.values():
        yield f"clusters of {sorted(sizes.values())} machines"
    if alive := operator.world.alive():
        yield f"still alive: {', '.join(alive)}"
    runs = operator.rows("select kind, status, reason from raw_runs")
    proof.records.update(f"{kind} {status}" for kind, status, _ in runs)
    if not any((kind, status) == ("train", "measured") for kind, status, _ in runs):
        yield "nothing was trained"
    if unmeasured := [run for run in runs if run[1] != "measured"]:
        yield f"not measured: {unmeasured[:5]}"
    leases = operator.rows("select cluster, usd, outcome from raw_leases where provider = 'ec2'")
    if len(leases) != len(sizes) or any(outcome != "released" for *_, outcome in leases):
        yield f"{len(sizes)} clusters were launched, leases {leases}"
    query = "select workload, cluster, status from recommendations where provider = 'ec2'"
    published = operator.rows(query, "published/recommendations.duckdb")
    if "recommended" not in {status for *_, status in published}:
        yield f"published {published}"
    if campaign.types == UNEQUAL:
        yield from _judge_unequal(operator)


def _judge_unequal(operator):
    """Yield a sentence if runs or answers lack multi-device machines or mixed clusters.

    A mixed cluster has two instance types.
    """
    measured = operator.rows("select distinct cluster, layout from runs where provider = 'ec2'")
    if not any("+" in cluster for cluster, _ in measured):
        yield f"no run on a mixed cluster: {measured}"
    if not any(int(devices) > 1 for _, layout in measured for devices in layout.split("+")):
        yield f"no run on several devices of a machine: {measured}"
    question = ("recommend", "sine", "--provider", "ec2", "--deadline", "2h")
    answer = operator.srift(*question, "--top", "200", "--json")
    rows = json.loads(answer.stdout) if answer.returncode == 0 else []
    if not any("+" in row["cluster"] for row in rows):
        yield f"no mixed cluster: {answer.stderr} {[row['cluster'] for row in rows]}"
    if not any(row["layout"] == "4" for row in rows):
        yield f"no machine's four devices are weighed: {[row['layout'] for row in rows]}"
