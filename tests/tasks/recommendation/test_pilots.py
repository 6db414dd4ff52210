"""Pilots: first of a workload that nobody measured or that is known by its facts, then where the choice is open."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from models.campaign.value_of_information import ChoiceSet
from models.domain.cluster import Cluster, InstanceType, Offer
from models.domain.workload import Goal, Mode, Workload
from models.step_time.dataset import TrainingData
from models.step_time.model import StepTimeModel, fit
from tasks.recommendation import pilots as module
from tasks.recommendation.pilots import pilots_for
from tasks.recommendation.recommend import Case, plan_one
from tasks.reporting import tables as printing
from tasks.training.registry import Champion
from tasks.workspace.settings import IMPORTED
from tasks.workspace.workspace import Workspace
from tests.benchmarks import synthetic_market as synthetic
from tests.installed import NOON, DescribedMachines, champion, install
from tests.models.guessing import FLOPS, asked, data, seconds
from warehouse import append


def pilots_of(
    here: Workspace, champion: Champion, workload: Workload, *, count: int
) -> dict[str, Any]:
    sold = here.provider.offers(NOON)
    case = Case.of(here, champion, workload, sold)
    return pilots_for(case, plan_one(case, pd.DataFrame()), buyable=sold, count=count)


DEADLINE = (Goal(goal="cheapest_within_deadline", hours=1.5),)


def test_a_new_workload_is_profiled_first_at_a_price_and_nothing_is_promised(
    tmp_path: Path,
) -> None:
    here = install(tmp_path, "conv", "new_workload")
    (_, new_workload) = here.workloads
    found = pilots_of(here, champion(), replace(new_workload, goals=DEADLINE), count=3)
    assert found["regret"] is None and not found["settled"]
    assert [one["kind"] for one in found["runs"]] == ["profile"] * 3
    assert (
        len({one["cluster"] for one in found["runs"]}) == 3
    )  # a machine of each kind, not one again and again
    assert all(
        one["usd"] > 0 and one["seconds"] > 0 and one["market"] == "spot" for one in found["runs"]
    )
    assert {one["layout"] for one in found["runs"]} == {"1"} and found["reason"] == ""


def test_a_new_workload_is_profiled_in_each_precision_that_it_tolerates(tmp_path: Path) -> None:
    here = install(tmp_path, "conv", "new_workload")
    (_, new_workload) = here.workloads
    found = pilots_of(
        here,
        champion(),
        replace(new_workload, goals=DEADLINE, modes=(Mode(), Mode("bf16"))),
        count=20,
    )
    assert {one["precision"] for one in found["runs"] if one["kind"] == "profile"} == {
        "fp32",
        "bf16",
    }


def test_pilots_are_runs_that_nobody_made_on_few_machines(tmp_path: Path) -> None:
    here = install(tmp_path)
    (conv, _) = here.workloads
    found = pilots_of(here, champion(), replace(conv, goals=DEADLINE), count=4)
    assert found["regret"] >= 0
    runs = {
        (one["cluster"], one["batch_per_device"], one["accumulation_steps"])
        for one in found["runs"]
    }
    assert len(runs) in (0, 4)


def test_where_nothing_is_for_sale_there_are_no_pilots(tmp_path: Path) -> None:
    names = frozenset(one.name for one in DescribedMachines().instance_types())
    here = install(tmp_path, "conv", "new_workload", provider=DescribedMachines(unpriced=names))
    for workload in here.workloads:
        asked = replace(workload, goals=DEADLINE)
        found = pilots_of(here, champion(), asked, count=3)
        assert (found["settled"], found["regret"], found["runs"]) == (None, None, [])
        assert found["reason"].startswith("no pilots can be named: nothing on offer has a price")


class DearSpot(DescribedMachines):
    """As AWS without an account: list prices came with the package, spot prices did not."""

    def offers(self, now: datetime) -> list[Offer]:
        return [
            one if one.market == "on-demand" else replace(one, usd_per_hour=None)
            for one in super().offers(now)
        ]


def test_where_the_campaigns_market_has_no_price_pilots_are_priced_in_the_other(
    tmp_path: Path,
) -> None:
    here = install(tmp_path, "conv", "new_workload", provider=DearSpot())
    assert here.settings.campaign.market == "spot"
    for workload in here.workloads:
        found = pilots_of(here, champion(), replace(workload, goals=DEADLINE), count=3)
        assert found["runs"] or found["settled"] is not False
        assert all(one["market"] == "on-demand" and one["usd"] > 0 for one in found["runs"])
    assert found["runs"], "of the new workload"


@pytest.fixture
def weighed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[ChoiceSet, pd.DataFrame]]:
    """The choice sets and the candidates among which pilots are chosen, a pair for each choice."""
    seen: list[tuple[ChoiceSet, pd.DataFrame]] = []
    choose = module.choose_pilots

    def noted(choice_set: ChoiceSet, frame: pd.DataFrame, *rest: Any, **more: Any) -> Any:
        seen.append((choice_set, frame))
        return choose(choice_set, frame, *rest, **more)

    monkeypatch.setattr(module, "choose_pilots", noted)
    return seen


def test_a_candidate_is_weighed_as_a_pilot_however_dear_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weighed: list[tuple[ChoiceSet, pd.DataFrame]]
) -> None:
    here = install(tmp_path)
    (conv, _) = here.workloads
    monkeypatch.setattr(module, "_MOST_CANDIDATES", 3)
    fastest = replace(conv, goals=(Goal(goal="fastest"),))
    pilots_of(here, champion(), fastest, count=1)
    ((choice_set, frame),) = weighed
    keys = {(one.row()["cluster"], one.row()["batch_per_device"]) for one in choice_set.setups}
    assert (
        len(frame) == 3
        and set(zip(frame["cluster"], frame["batch_per_device"], strict=True)) <= keys
    )


FACTS = {"workload": "new", "digest": "", "parameters": 50_000_000, "gradient_bytes": 200_000_000}
TYPES = synthetic.types()[:5]  # three with one device, one with four, one with eight


@dataclass
class Gpus(DescribedMachines):
    """Of EC2, four at once."""

    name: str = "ec2"

    def instance_types(self) -> list[InstanceType]:
        return TYPES

    def offers(self, now: datetime) -> list[Offer]:
        return [replace(one, price_as_of=now) for one in synthetic.offers(TYPES)]

    def fits(self, cluster: Cluster) -> str:
        return "" if len(cluster.members) <= 4 else "too many"


NAMES = (
    "name",
    "devices",
    "device",
    "cores",
    "bandwidth_gbps",
    "memory_gib",
    "device_memory_gib",
    "device_tflops",
)


def measured() -> TrainingData:
    """Four networks, on one device of every type."""
    rows = [
        asked(name, f"1x{one.name}", batch).assign(
            layout="1", step_s=seconds(flops, batch, float(one.device_tflops or 0))
        )
        for name, flops in FLOPS.items()
        for one in TYPES
        for batch in (8, 32, 128)
    ]
    types = [{name: getattr(one, name) for name in NAMES} | {"digest": one.digest} for one in TYPES]
    return replace(
        data(), runs=pd.concat(rows, ignore_index=True), instance_types=pd.DataFrame(types)
    )


@cache
def model() -> StepTimeModel:
    return fit(measured(), seed=1)


def new_workload(
    *, hours: float = 12.0, batch: int = 256, p_required: float | None = None
) -> Workload:
    goal = Goal(goal="cheapest_within_deadline", hours=hours, p_required=p_required)
    return Workload(
        name="new",
        digest=IMPORTED,
        samples=5_000_000,
        global_batch_least=batch,
        global_batch_most=batch,
        goals=(goal,),
    )


def home(folder: Path, *, flops: float | None = 1.5e10) -> Workspace:
    """Where the facts of a network were imported, and no measurement of it."""
    here = install(folder, "conv", provider=Gpus())
    facts = FACTS if flops is None else FACTS | {"flops_per_sample": flops}
    with here.warehouse.transact() as connection:
        append.note_workloads(connection, [facts], provider="ec2", noted_at=NOON)
    return here


def pilots(
    here: Workspace, workload: Workload, champion: StepTimeModel | None = None, count: int = 3
) -> dict[str, Any]:
    offers = here.provider.offers(NOON)
    asked_of = Champion(version=1, model=champion or model())
    case = Case.of(here, asked_of, workload, offers)
    found = plan_one(case, pd.DataFrame())
    answer = pilots_for(case, found, buyable=offers, count=count)
    printing.print_recommendations([found.rows[0] | {"frontier": [], "pilots": answer}])
    return answer


def test_a_guessed_workload_gets_pilots_by_the_guesss_own_doubt(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = pilots(home(tmp_path), new_workload())
    assert found["settled"] is False and len(found["runs"]) == 3 and found["reason"] == ""
    after = [one["regret_after"] for one in found["runs"]]
    assert found["regret"] > max(after), "they tell something"
    assert after[0] < 0.8 * found["regret"], (
        "what a guess is off by is shared by the types: one run tells most of it"
    )
    assert all(
        one["usd"] > 0 and one["seconds"] > 0 and one["kind"] == "train" for one in found["runs"]
    )
    shown = capsys.readouterr().out
    assert "these 3 runs tell most and cost $" in shown and found["runs"][0]["cluster"] in shown


def test_one_device_alone_is_among_the_candidates_of_machines_with_several(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weighed: list[tuple[ChoiceSet, pd.DataFrame]]
) -> None:
    several = [one for one in TYPES if one.devices > 1]
    monkeypatch.setattr(Gpus, "offers", lambda self, now: synthetic.offers(several))
    pilots(home(tmp_path), new_workload())
    ((_, frame),) = weighed
    alone = frame[frame["layout"] == "1"]
    assert set(alone["cluster"]) == {f"1x{one.name}" for one in several}
    assert not alone.duplicated().any() and set(alone["accumulation_steps"]) == {1}


def test_a_deadline_that_the_guess_cannot_promise_may_be_met_after_a_pilot_and_one_beyond_hope_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here = home(tmp_path)
    offers = here.provider.offers(NOON)
    found = plan_one(
        Case.of(here, Champion(version=1, model=model()), new_workload(), offers), pd.DataFrame()
    )
    fastest = next(row for row in found.rows if row["goal"] == "fastest")
    doubtful = pilots(here, new_workload(hours=fastest["hours"] * 1.05, p_required=0.9))
    assert (
        "infeasible" in capsys.readouterr().out
        and doubtful["runs"]
        and doubtful["settled"] is False
    )
    hopeless = pilots(here, new_workload(hours=0.01, p_required=0.9))
    assert not hopeless["runs"] and "would meet a deadline of" in hopeless["reason"]
    assert capsys.readouterr().out.count("would meet a deadline of") == 2, "in the row and below"
    weighed = pilots(here, new_workload(hours=0.01))
    assert (
        not weighed["runs"]
        and weighed["settled"] is None
        and "anything else on offer" in weighed["reason"]
    )
    said = " ".join(capsys.readouterr().out.split())
    assert "note: new: the choice for 36.0 s meets it with 0% probability only" in said


@pytest.mark.parametrize(
    ("flops", "peak", "says"),
    [
        (
            None,
            True,
            r"its flops_per_sample \(`srift import FILE --workloads FILE`\).* or an entrypoint under \[workloads.new\]",
        ),
        (
            1.5e10,
            False,
            "its flops_per_sample is known, but the peak rate of no measured device on offer is",
        ),
    ],
)
def test_where_nothing_can_be_said_one_sentence_says_why_and_what_would_help(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flops: float | None, peak: bool, says: str
) -> None:
    champion = model()
    if not peak:
        alone = replace(champion.facts.alone, sheets={})
        champion = replace(champion, facts=replace(champion.facts, alone=alone))
    found = pilots(home(tmp_path, flops=flops), new_workload(), champion)
    assert (found["settled"], found["regret"], found["runs"]) == (None, None, [])
    assert re.match(f"no pilots can be named: .*{says}", found["reason"])
    shown = " ".join(capsys.readouterr().out.split())
    assert found["reason"] in shown


def test_a_batch_that_no_machine_can_share_is_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    several = [one for one in TYPES if one.devices > 1]
    monkeypatch.setattr(Gpus, "offers", lambda self, now: synthetic.offers(several))
    found = pilots(home(tmp_path), new_workload(batch=102))
    assert not found["runs"] and "a global batch of 100 or 104 would do" in found["reason"]


STRANGERS = [
    replace(TYPES[0], name="g6.one", device="L4", device_tflops=30.3, device_memory_gib=22.4),
    replace(TYPES[0], name="z9.one", device="Z9", device_tflops=None),
]


@dataclass
class WithStrangers(Gpus):
    """And two devices that nothing was ever measured on: one with a data sheet."""

    def instance_types(self) -> list[InstanceType]:
        return [*TYPES, *STRANGERS]

    def offers(self, now: datetime) -> list[Offer]:
        more = [
            replace(one, instance_type=kind, usd_per_hour=(one.usd_per_hour or 0.0) / 4)
            for kind in STRANGERS
            for one in synthetic.offers([TYPES[0]])
        ]
        return [replace(one, price_as_of=now) for one in [*synthetic.offers(TYPES), *more]]


def test_a_device_never_measured_is_compared_by_its_data_sheet_and_one_run_on_it_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here = install(tmp_path, "conv", provider=WithStrangers())
    known = model()
    described = pd.DataFrame(
        [{name: getattr(one, name) for name in NAMES} | {"digest": one.digest} for one in STRANGERS]
    )
    every = pd.concat([measured().instance_types, described], ignore_index=True)
    met = fit(replace(measured(), instance_types=every), seed=1)
    asked_of = replace(new_workload(), name="b", digest=known.workload_digests.get("b", ""))
    met = replace(met, workload_digests={**met.workload_digests, "b": asked_of.digest})
    offers = here.provider.offers(NOON)
    case = Case.of(here, Champion(version=1, model=met), asked_of, offers)
    assert (list(case.by_data_sheet), list(case.left_out)) == (["L4"], ["Z9"])
    plan = plan_one(case, pd.DataFrame(), top=9)
    found = pilots_for(case, plan, buyable=offers, count=3)
    rows = [row for row in plan.rows if row["cluster"]]
    on_it = [row for row in rows if "g6.one" in row["cluster"]]
    assert on_it and not any("z9.one" in row["cluster"] for row in rows)
    marked = [
        row
        for row in rows
        if "by its data sheet alone, since nothing was ever measured on L4" in row["reason"]
    ]
    assert marked == on_it
    others = [row for row in rows if "x" + TYPES[0].name in row["cluster"] and row not in on_it]
    width = [
        min(row["step_high_s"] / row["step_low_s"] for row in some) for some in (on_it, others)
    ]
    assert width[0] > 2 * width[1], "its interval says how little is known"
    first = rows[0]["reason"]
    assert (
        "compared by data sheet alone: L4" in first
        and "not compared, since neither" in first
        and "Z9" in first
    )
    (run,) = found["kinds"]
    assert run["device"] == "L4" and run["cluster"].endswith("xg6.one") and 0 < run["p_best"] <= 1
    assert run["usd"] > 0 and run["seconds"] > 0 and 0 <= run["regret_after"] < found["regret"]
    printing.print_recommendations([plan.rows[0] | {"frontier": [], "pilots": found}])
    shown = capsys.readouterr().out
    assert "compared by data sheet alone; one run on each" in shown and "L4" in shown
