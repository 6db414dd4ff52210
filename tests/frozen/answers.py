"""What is asked of two homes, EC2's fitted on imported rows and a stored local one, and how answers are compared.

Nearly all of it by commands, and by flows called as plain functions: names that outlive the modules behind them.
"""

from __future__ import annotations

import json
import math
import os
import re
import sqlite3
import tarfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from decimal import Decimal
from pathlib import Path
from typing import Any
from unittest import mock

import duckdb
import pandas as pd
from prefect import Task
from typer.testing import CliRunner

from flows.cli import app
from flows.market import market
from flows.retrain import retrain
from tasks.market.offers import current_offers
from tasks.recommendation.recommend import recommend_all
from tasks.training.registry import load_champion
from tasks.workspace.workspace import open_workspace
from warehouse.reads import mart

FOLDER = Path(__file__).parent
DATA = FOLDER.parents[2] / "shared" / "data"
ROWS = 240  # of the T4's 4,853: fitted in seconds
PACKED_AT = "/srift-frozen"  # where the stored registry's paths say that its home lies
# The same fit on another processor, whose BLAS sums in another order, ends up to 1.3e-4 away.
RELATIVE, ABSOLUTE = 1e-3, 1e-9
CHANCE = 0.0076  # three of 400 draws, of which the last digits decide
DIGITS = 9
VOLATILE = {"requests"}  # of a dry run: they hold a moment and the digest of the node's code

EC2 = """
[campaign]
max_hosts = 4
seed = 5
stale_after_days = 30000
market = "spot"

[ec2]
regions = ["us-east-1"]
instance_types = ["g4dn.xlarge", "g4dn.2xlarge", "g4dn.12xlarge", "g4dn.metal", "g5.12xlarge"]
bucket = "nobodys-bucket"
max_hosts = 8

[ec2.prices]
"g4dn.xlarge" = { on_demand_usd_per_hour = 0.526 }
"g4dn.2xlarge" = { on_demand_usd_per_hour = 0.752, spot_usd_per_hour = 0.26 }
"g4dn.12xlarge" = { on_demand_usd_per_hour = 3.912 }
"g4dn.metal" = { on_demand_usd_per_hour = 7.824 }

[workloads.resnet18-cifar10]
entrypoint = "work.py:build"
samples = 40_000_000
global_batch = [512, 2048]
goals = [{ goal = "cheapest_within_deadline", hours = 4.0 }, { goal = "fastest_within_budget", usd = 6.0 }]

[workloads.never-measured]
entrypoint = "work.py:build"
arguments = { width = 2 }
samples = 1_000_000
global_batch = 64
goals = [{ goal = "cheapest_within_deadline", hours = 10.0 }]

[workloads.resnet50-imagenet]
samples = 40_000_000
global_batch = 768
goals = [{ goal = "cheapest_within_deadline", hours = 24.0 }, { goal = "fastest_within_budget", usd = 40.0 }]
"""
# the last is known by this alone; operations are rough, as a user's would be
FACTS = """workload,parameters,gradient_bytes,flops_per_sample
bert-base-squad,109000000,436000000,2.5e11
resnet18-cifar10,11200000,44800000,3.3e9
resnet50-imagenet,25600000,102400000,2.5e10
neumf-movielens,1600000,6400000,1e7
by-its-flops,60000000,240000000,5e10
"""
# the package knows no spot prices: two zones, of which the cheaper interrupts more often
SPOT = """
insert into raw_offers by name
select raw_offers.* replace (
    'spot' as market,
    zones.zone as zone,
    raw_offers.usd_per_hour * zones.part as usd_per_hour,
    zones.interruptions as interruptions_per_hour,
    'as the test states' as interruption_source
)
from raw_offers, (values ('us-east-1a', 0.38, 0.09), ('us-east-1b', 0.42, 0.01)) as zones(zone, part, interruptions)
where raw_offers.provider = 'ec2'
"""
# the stored home knows nothing of it
WIDER = """
[workloads.wider]
entrypoint = "jobs/mine.py:build"
arguments = { width = 512 }
samples = 1_000_000
global_batch = 64
goals = [{ goal = "cheapest_within_deadline", hours = 1.0 }]
"""
EC2_QUESTIONS = {
    "bert within a deadline": "bert-base-squad --deadline 12h --samples 3000000 --batch 96",
    "resnet18 within a budget, spot": "resnet18-cifar10 --budget 8 --market spot",
    "resnet50 within a deadline": "resnet50-imagenet --deadline 20h --top 3",
    "neumf within a budget": "neumf-movielens --budget 3 --samples 200000000 --batch 4096 --top 2",
    "a first guess": "by-its-flops --deadline 10h --samples 2000000 --batch 64 --top 2",
    "what nothing meets": "resnet50-imagenet --budget 0.5 --top 2",
}
LOCAL_QUESTIONS = {
    "mine within a deadline": "mine --deadline 1.6h",
    "mine within a budget": "mine --budget 0.15 --market spot",
    "broader within a deadline": "broader --deadline 75m --top 3",
    "broader within a budget": "broader --budget 0.2 --batch 128 --top 3",
}


@contextmanager
def standing_in(folder: Path) -> Iterator[Path]:
    """The working directory of a project without an account, whose state lies in `state`; two cores; flows' steps are
    plain functions, without a server of Prefect."""
    cores, before = os.sched_getaffinity(0), Path.cwd()
    state = {
        "SRIFT_HOME": str(folder / "state"),
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": str(folder / "none"),
        "AWS_SHARED_CREDENTIALS_FILE": str(folder / "none"),
    }
    with (
        mock.patch.dict(os.environ, state),
        mock.patch.object(Task, "__call__", lambda self, *a, **k: self.fn(*a, **k)),
    ):
        for name in (
            "AWS_PROFILE",
            "AWS_ACCESS_KEY_ID",
            "AWS_SECRET_ACCESS_KEY",
            "AWS_SESSION_TOKEN",
        ):
            os.environ.pop(name, None)
        os.chdir(folder)
        os.sched_setaffinity(0, sorted(cores)[:2])  # local clusters are those that fit two cores
        try:
            yield folder / "state"
        finally:
            os.sched_setaffinity(0, cores)
            os.chdir(before)


def said(*words: str) -> str:
    """What the command `srift` prints. Raises AssertionError where it fails."""
    ended = CliRunner().invoke(app, words)
    assert ended.exit_code == 0, f"srift {' '.join(words)}: {ended.output} {ended.exception!r}"
    return ended.stdout


def asked(*words: str) -> Any:
    """The same as JSON."""
    return json.loads(said(*words, "--json"))


def ec2_answers(folder: Path) -> dict[str, Any]:
    """Imported T4 rows, retrained on, over stated prices."""
    (folder / "srift.toml").write_text(EC2)
    (folder / "work.py").write_text(
        "def build(width=1):\n    raise AssertionError('runs on nodes only')\n"
    )
    (folder / "facts.csv").write_text(FACTS)
    runs = pd.read_csv(DATA / "training_runs.csv")
    runs.sample(ROWS, random_state=3).sort_index().to_csv(folder / "rows.csv", index=False)
    with standing_in(folder) as home:
        imported = said("import", "rows.csv", "--workloads", "facts.csv").splitlines()[:5]
        market.fn("ec2", "frozen", republish=False)
        with closing(duckdb.connect(str(home / "warehouse.duckdb"))) as connection:
            connection.execute(SPOT)
        promotion = retrain.fn("frozen", "ec2")
        return {
            "imported": imported,
            "promotion": promotion,
            "offers": offers(home, "ec2"),
            **of_model(home, "ec2", ec2_setups()),
            "table": table("ec2"),
            **{
                name: asked("recommend", *words.split(), "--provider", "ec2")
                for name, words in EC2_QUESTIONS.items()
            },
            "shopping list": asked("refresh", "--provider", "ec2", "--dry-run", "--max-usd", "8"),
        }


def ec2_setups() -> pd.DataFrame:
    """Measured and unmeasured sizes, types that were never measured, mixed clusters, micro-steps."""
    rows: list[tuple[object, ...]] = []
    sizes = {
        "bert-base-squad": 8,
        "resnet18-cifar10": 256,
        "resnet50-imagenet": 48,
        "neumf-movielens": 4096,
    }
    clusters = (
        "1xg4dn.xlarge",
        "1xg4dn.12xlarge",
        "2xg4dn.12xlarge",
        "5xg4dn.12xlarge",
        "16xg4dn.12xlarge",
        "3xg4dn.metal",
    )
    for workload, batch in sizes.items():
        rows += [
            (workload, cluster, None, str(batch), 1 + at % 2) for at, cluster in enumerate(clusters)
        ]
        rows += [
            (workload, "1xg4dn.12xlarge", "1", str(2 * batch), 1),
            (workload, "2xg4dn.12xlarge", "1+1", str(batch), 1),
            (workload, "2xg4dn.12xlarge", "4+2", str(batch // 2), 4),
            (workload, "1xg4dn.12xlarge+1xg4dn.xlarge", None, f"{batch}+{batch // 2}", 1),
        ]
    return pd.DataFrame(
        rows, columns=["workload", "cluster", "layout", "batch_per_device", "accumulation_steps"]
    )


def local_answers(folder: Path) -> dict[str, Any]:
    """The stored home, whose model is fitted anew by the code of today."""
    unpack(folder)
    with (folder / "srift.toml").open("a") as file:
        file.write(WIDER)
    with standing_in(folder) as home:
        return {
            "promotion of a refit": retrain.fn("frozen", "local"),
            "offers": offers(home, "local"),
            **of_model(home, "local", local_setups()),
            "table": table("local"),
            **{name: asked("recommend", *words.split()) for name, words in LOCAL_QUESTIONS.items()},
            "shopping list": asked("refresh", "--dry-run", "--max-usd", "0.2"),
            # without its runs: many have the same value but for what the last digits of a fit say
            "shopping list where all is stale": [
                {name: launch[name] for name in launch if name != "items"}
                for launch in shopping_list(SRIFT_CAMPAIGN__STALE_AFTER_DAYS="0.001")
            ],
            "first shopping list": shopping_list(SRIFT_HOME=str(folder / "empty")),
        }


def shopping_list(**environment: str) -> Any:
    """The local one under other settings."""
    with mock.patch.dict(os.environ, environment):
        return asked("refresh", "--dry-run", "--max-usd", "0.02")


def local_setups() -> pd.DataFrame:
    clusters = (
        "1xe.part",
        "1xe.whole",
        "2xe.part",
        "2xe.most",
        "1xe.most+1xe.part",
        "4xe.whole",
        "3xe.part+2xe.most",
    )
    rows = [
        (workload, cluster, str(batch), steps)
        for workload in ("mine", "broader")
        for cluster in clusters
        for batch, steps in ((8, 1), (32, 1), (64, 2))
    ]
    return pd.DataFrame(
        rows, columns=["workload", "cluster", "batch_per_device", "accumulation_steps"]
    )


def offers(home: Path, provider: str) -> list[list[Any]]:
    """The newest snapshot as the warehouse shows it."""
    with closing(duckdb.connect(str(home / "warehouse.duckdb"), read_only=True)) as connection:
        query = """
            select instance_type, market, zone, region, usd_per_hour, interruptions_per_hour, interruption_source
            from offers where provider = ? order by all
        """
        return [list(row) for row in connection.execute(query, [provider]).fetchall()]


def of_model(home: Path, provider: str, setups: pd.DataFrame) -> dict[str, Any]:
    """Predictions, drawn step times and the joint belief that campaigns go by."""
    champion = load_champion(home, provider)
    assert champion is not None
    mean, covariance, noise = champion.model.joint(setups.iloc[::6])
    return {
        "predictions": pd.concat([setups, champion.model.predict(setups)], axis=1).to_dict(
            "records"
        ),
        "draws": champion.model.draws(setups.iloc[::3], count=6, seed=3).tolist(),
        "joint": {
            "mean": mean.tolist(),
            "covariance": covariance.tolist(),
            "noise": noise.tolist(),
        },
    }


def table(provider: str) -> list[dict[str, Any]]:
    """What a publication would hold now: every workload of srift.toml by each goal."""
    here = open_workspace(provider)
    runs = mart(here.warehouse, "runs", provider=provider)
    return recommend_all(here, load_champion(here.home, provider), current_offers(here), runs)


def unpack(folder: Path) -> None:
    """The stored project; its registry's absolute paths are those of `folder`."""
    with tarfile.open(FOLDER / "home.tar.xz") as packed:
        packed.extractall(folder, filter="data")
    move_registry(folder / "state" / "mlflow.db", PACKED_AT, str(folder))


def move_registry(store: Path, old: str, new: str) -> None:
    """Replace `old` by `new` in every text of the SQLite file."""
    with closing(sqlite3.connect(store)) as connection, connection:
        for (name,) in connection.execute(
            "select name from sqlite_master where type = 'table'"
        ).fetchall():
            for _, column, *_ in connection.execute(f"pragma table_info('{name}')").fetchall():
                connection.execute(
                    f'update "{name}" set "{column}" = replace("{column}", ?, ?) where instr("{column}", ?)',
                    (old, new, old),
                )


def plain(value: Any) -> Any:
    """As JSON holds it: numbers to nine digits, moments as text, without what differs from day to day."""
    if isinstance(value, dict):
        return {str(key): plain(one) for key, one in value.items() if key not in VOLATILE}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
    return value if value is None or isinstance(value, bool | int | str) else str(value)


def differences(stored: Any, now: Any, at: str = "") -> Iterator[str]:
    """Where two answers differ: numbers beyond rounding, anything else at all."""
    if isinstance(stored, dict) and isinstance(now, dict):
        for key in sorted({*stored, *now}):
            if key not in stored or key not in now:
                yield f"{at}/{key}: only {'now' if key in now else 'stored'}"
            else:
                yield from differences(stored[key], now[key], f"{at}/{key}")
    elif isinstance(stored, list) and isinstance(now, list):
        if len(stored) != len(now):
            yield f"{at}: {len(now)} entries, not {len(stored)}"
        for place, (one, other) in enumerate(zip(stored, now, strict=False)):
            yield from differences(one, other, f"{at}/{place}")
    elif isinstance(stored, float) or isinstance(now, float):
        numbers = all(isinstance(one, int | float) for one in (stored, now))
        absolute = CHANCE if at.rpartition("/")[2].startswith("p_") else ABSOLUTE
        if not numbers or not math.isclose(stored, now, rel_tol=RELATIVE, abs_tol=absolute):
            yield f"{at}: {now}, not {stored}"
    elif stored != now and not _same_but_for_last_digits(stored, now):
        yield f"{at}: {now!r}, not {stored!r}"


def _same_but_for_last_digits(stored: Any, now: Any) -> bool:
    """Two texts whose percentages and decimals differ by 1 at most in the last place: figures have their own test."""
    if not isinstance(stored, str) or not isinstance(now, str):
        return False
    (*before,), (*after,) = (re.split(r"(\d+\.\d+|\d+(?= ?%))", one) for one in (stored, now))
    if before[::2] != after[::2]:
        return False
    pairs = [
        (Decimal(one), Decimal(other)) for one, other in zip(before[1::2], after[1::2], strict=True)
    ]
    return all(
        one.same_quantum(other)
        and abs(one - other) <= Decimal(1).scaleb(int(one.as_tuple().exponent))
        for one, other in pairs
    )


def as_text(answers: dict[str, Any]) -> str:
    """JSON with a line for each row of an answer."""
    return (
        "{\n"
        + ",\n".join(f"{json.dumps(name)}: {_lines(value)}" for name, value in answers.items())
        + "\n}\n"
    )


def _lines(value: Any) -> str:
    if not isinstance(value, list):
        return json.dumps(value)
    return "[\n" + ",\n".join(f" {json.dumps(one)}" for one in value) + "\n]"


ANSWERS = {"ec2": ec2_answers, "local": local_answers}
