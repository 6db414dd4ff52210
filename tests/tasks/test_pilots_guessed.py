"""Pilots of a network that is known by its facts alone: by the first guess's own doubt, one device among them."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from models.cloud import Cluster, InstanceType, Offer
from models.step_time import StepTimeModel, fit
from models.workload import Goal, Workload
from tasks import imagined, printing
from tasks.installation import Installation
from tasks.pilots import pilots_for
from tasks.recommend import plan_one
from tasks.registry import Champion
from tasks.settings import IMPORTED
from tests.installed import NOON, DescribedMachines, install
from tests.models.guessing import FLOPS, asked, data, seconds
from warehouse import append

FACTS = {"workload": "new", "digest": "", "parameters": 50_000_000, "gradient_bytes": 200_000_000}
TYPES = imagined.types()[:5]  # three with one device, one with four, one with eight


@dataclass
class Gpus(DescribedMachines):
    """Of EC2, four at once."""

    name: str = "ec2"

    def instance_types(self) -> list[InstanceType]:
        return TYPES

    def offers(self, now: datetime) -> list[Offer]:
        return [replace(one, price_as_of=now) for one in imagined.offers(TYPES)]

    def fits(self, cluster: Cluster) -> str:
        return "" if len(cluster.members) <= 4 else "too many"


@cache
def model() -> StepTimeModel:
    """Four networks, on one device of every type."""
    rows = [
        asked(name, f"1x{one.name}", batch).assign(
            layout="1", step_s=seconds(flops, batch, float(one.device_tflops or 0))
        )
        for name, flops in FLOPS.items()
        for one in TYPES
        for batch in (8, 32, 128)
    ]
    names = ("name", "devices", "device", "cores", "bandwidth_gbps", "memory_gib", "device_memory_gib", "device_tflops")
    types = [{name: getattr(one, name) for name in names} | {"digest": one.digest} for one in TYPES]
    return fit(replace(data(), runs=pd.concat(rows, ignore_index=True), instance_types=pd.DataFrame(types)), seed=1)


def newcomer(*, hours: float = 12.0, batch: int = 256) -> Workload:
    goal = Goal(goal="cheapest_within_deadline", hours=hours)
    return Workload(
        name="new", digest=IMPORTED, samples=5_000_000, global_batch_least=batch, global_batch_most=batch, goals=(goal,)
    )


def home(folder: Path, *, flops: float | None = 1.5e10) -> Installation:
    """Where the facts of a network were imported, and no measurement of it."""
    here = install(folder, "conv", provider=Gpus())
    facts = FACTS if flops is None else FACTS | {"flops_per_sample": flops}
    with here.warehouse.transact() as connection:
        append.note_workloads(connection, [facts], provider="ec2", noted_at=NOON)
    return here


def pilots(
    here: Installation, workload: Workload, champion: StepTimeModel | None = None, count: int = 3
) -> dict[str, Any]:
    offers = here.provider.offers(NOON)
    asked_of = Champion(version=1, model=champion or model())
    found = plan_one(here, asked_of, workload, offers, pd.DataFrame())
    told = pilots_for(here, asked_of, workload, offers, buyable=offers, count=count, found=found)
    printing.print_recommendations([found.rows[0] | {"frontier": [], "pilots": told}])
    return told


def test_a_guessed_workload_gets_pilots_by_the_guesss_own_doubt(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = pilots(home(tmp_path), newcomer())
    assert found["settled"] is False and len(found["runs"]) == 3 and found["reason"] == ""
    after = [one["regret_after"] for one in found["runs"]]
    assert found["regret"] > max(after), "they tell something"
    assert after[0] < 0.8 * found["regret"], "what a guess is off by is shared by the types: one run tells most of it"
    assert all(one["usd"] > 0 and one["seconds"] > 0 and one["kind"] == "train" for one in found["runs"])
    shown = capsys.readouterr().out
    assert "these 3 runs tell most and cost $" in shown and found["runs"][0]["cluster"] in shown


def test_one_device_alone_is_among_the_candidates_of_machines_with_several(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    several = [one for one in TYPES if one.devices > 1]
    monkeypatch.setattr(Gpus, "offers", lambda self, now: imagined.offers(several))
    seen: list[pd.DataFrame] = []
    choose = pilots_for.__globals__["choose_pilots"]

    def spied(contenders: Any, frame: pd.DataFrame, *rest: Any, **more: Any) -> Any:
        seen.append(frame)
        return choose(contenders, frame, *rest, **more)

    monkeypatch.setattr("tasks.pilots.choose_pilots", spied)
    pilots(home(tmp_path), newcomer())
    (frame,) = seen
    alone = frame[frame["layout"] == "1"]
    assert set(alone["cluster"]) == {f"1x{one.name}" for one in several}
    assert not alone.duplicated().any() and set(alone["accumulation_steps"]) == {1}


def test_a_deadline_that_the_guess_cannot_promise_may_be_met_after_a_pilot_and_one_beyond_hope_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here = home(tmp_path)
    offers = here.provider.offers(NOON)
    found = plan_one(here, Champion(version=1, model=model()), newcomer(), offers, pd.DataFrame())
    fastest = next(row for row in found.rows if row["goal"] == "fastest")
    doubtful = pilots(here, newcomer(hours=fastest["hours"] * 1.05))
    assert "infeasible" in capsys.readouterr().out and doubtful["runs"] and doubtful["settled"] is False
    hopeless = pilots(here, newcomer(hours=0.01))
    assert not hopeless["runs"] and "would meet a deadline of" in hopeless["reason"]
    assert capsys.readouterr().out.count("would meet a deadline of") == 2, "in the row and below"


@pytest.mark.parametrize(
    ("flops", "peak", "says"),
    [
        (
            None,
            True,
            r"its flops_per_sample \(`srift import FILE --workloads FILE`\).* or an entrypoint under \[workloads.new\]",
        ),
        (1.5e10, False, "its flops_per_sample is known, but the peak rate of no measured device on offer is"),
    ],
)
def test_where_nothing_can_be_said_one_sentence_says_why_and_what_would_help(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flops: float | None, peak: bool, says: str
) -> None:
    champion = model()
    if not peak:
        machines = {name: replace(one, device_tflops=None) for name, one in champion.machines.items()}
        physics = champion.physics
        physics = replace(physics, machines=machines, compute=replace(physics.compute, machines=machines))
        champion = replace(champion, physics=physics)
    found = pilots(home(tmp_path, flops=flops), newcomer(), champion)
    assert (found["settled"], found["regret"], found["runs"]) == (None, None, [])
    assert re.match(f"no pilots can be named: .*{says}", found["reason"])
    shown = " ".join(capsys.readouterr().out.split())
    assert found["reason"] in shown


def test_a_batch_that_no_machine_can_share_is_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    several = [one for one in TYPES if one.devices > 1]
    monkeypatch.setattr(Gpus, "offers", lambda self, now: imagined.offers(several))
    found = pilots(home(tmp_path), newcomer(batch=102))
    assert not found["runs"] and "a global batch of 100 or 104 would do" in found["reason"]
