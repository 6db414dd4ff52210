"""Rows for every goal of every workload, from the champion or saying why not; prices that nobody knows stay unknown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from models.domain.cluster import Offer
from models.domain.workload import Mode
from models.job.cost import job_costs
from models.planner import planner, ranking, search
from models.planner.candidates import Supply
from models.step_time.model import fit
from tasks.market.offers import note_definitions, with_known_facts
from tasks.providers.base import ProviderError
from tasks.recommendation import recommend
from tasks.recommendation.recommend import Case, plan_one, recommend_all, recommend_one
from tasks.training.registry import Champion
from tasks.workspace.settings import IMPORTED
from tasks.workspace.workspace import Workspace
from tests.installed import NOON, DescribedMachines, champion, install, measured
from warehouse import append

GOALS = ["cheapest_within_deadline", "fastest_within_budget", "cheapest", "fastest"]


@pytest.fixture
def here(tmp_path: Path) -> Workspace:
    return install(tmp_path)


def rows_of(
    here: Workspace, offers: list[Offer] | None = None, asked: Champion | None = None
) -> list[Any]:
    return recommend_all(
        here, asked, here.provider.offers(NOON) if offers is None else offers, measured().runs
    )


def conv_rows(
    here: Workspace,
    offers: list[Offer] | None = None,
    runs: pd.DataFrame | None = None,
    *,
    top: int = 5,
    **changes: Any,
) -> list[Any]:
    """Of conv alone, its definition changed so."""
    (conv, _) = here.workloads
    sold = here.provider.offers(NOON) if offers is None else offers
    past = measured().runs if runs is None else runs
    return recommend_one(here, champion(), replace(conv, **changes), sold, past, top=top)


def firsts(rows: list[Any], workload: str) -> dict[str, Any]:
    return {row["goal"]: row for row in rows if row["workload"] == workload and row["rank"] == 1}


def test_every_goal_of_every_workload_has_a_row(here: Workspace) -> None:
    rows = rows_of(here, asked=champion(7))
    for workload in ("conv", "lm"):
        assert list(firsts(rows, workload)) == GOALS
        assert firsts(rows, workload)["fastest"]["status"] == "recommended"
    assert {row["model_version"] for row in rows} == {"7"}
    assert {row["price_as_of"] for row in rows} == {NOON}
    assert {row["newest_measurement_at"] for row in rows} == {NOON}, "with its zone"
    assert all(
        row["step_low_s"] < row["step_s"] < row["step_high_s"] for row in rows if row["cluster"]
    )


def test_without_a_champion_each_goal_says_that_it_cannot_be_met(here: Workspace) -> None:
    rows = rows_of(here, asked=None)
    assert [(row["workload"], row["goal"]) for row in rows] == [
        (w, g) for w in ("conv", "lm") for g in GOALS
    ]
    for row in rows:
        assert row["status"] == "infeasible" and row["reason"] and row["cluster"] is None
        assert row["usd"] is None and row["model_version"] is None


def test_a_workload_that_was_never_measured_leaves_the_others_alone(tmp_path: Path) -> None:
    here = install(tmp_path, "conv", "new_workload")
    rows = rows_of(here, asked=champion())
    assert {row["status"] for row in rows if row["workload"] == "new_workload"} == {"infeasible"}
    reasons = [row["reason"] for row in rows if row["workload"] == "new_workload"]
    assert all(
        "nothing is known of this workload on local machines" in one and "`srift refresh`" in one
        for one in reasons
    )
    assert [row["goal"] for row in rows if row["workload"] == "new_workload"] == GOALS
    assert all(row["reason"] for row in rows)
    assert all(
        row["newest_measurement_at"] is None for row in rows if row["workload"] == "new_workload"
    )
    assert firsts(rows, "conv")["cheapest"]["status"] == "recommended"


@cache
def knows_bf16() -> Champion:
    """Conv was measured in bf16 too, twice as fast."""
    data = measured()
    conv = {
        name: getattr(data, name)[lambda rows: rows["workload"] == "conv"]
        for name in ("runs", "profiles")
    }
    faster = {
        "forward_s": conv["profiles"]["forward_s"] / 2,
        "backward_s": conv["profiles"]["backward_s"] / 2,
    }
    profiles = conv["profiles"].assign(precision="bf16", **faster)
    runs = conv["runs"].assign(
        precision="bf16",
        step_s=conv["runs"]["step_s"] / 2,
        run_id=conv["runs"]["run_id"].astype(str) + "-bf16",
    )
    more = replace(
        data, runs=pd.concat([data.runs, runs]), profiles=pd.concat([data.profiles, profiles])
    )
    return Champion(version=4, model=fit(more, seed=1))


def in_precisions(here: Workspace, *precisions: str, **changes: Any) -> list[Any]:
    (conv, _) = here.workloads
    asked = replace(conv, modes=tuple(map(Mode, precisions)), **changes)
    return recommend_one(here, knows_bf16(), asked, here.provider.offers(NOON), measured().runs)


def test_the_table_chooses_among_the_precisions_that_are_tolerated_and_were_measured(
    here: Workspace,
) -> None:
    both = in_precisions(here, "fp32", "bf16", "fp16")
    assert {row["precision"] for row in both if row["rank"] == 1} == {"bf16"}, "it is twice as fast"
    assert all(
        "never measured in fp16, and not compared in it" in row["reason"]
        for row in both
        if row["rank"] == 1
    )
    plain = in_precisions(here, "fp32")
    assert {row["precision"] for row in plain if row["cluster"]} == {"fp32"}
    assert not any("never measured in" in row["reason"] for row in plain)


def test_no_other_precision_is_taken_instead_of_one_that_was_not_measured(here: Workspace) -> None:
    for facts in ({}, {"flops_per_sample": 1e9}):  # not even where a first guess could be made
        rows = in_precisions(here, "fp16", **facts)
        assert {row["status"] for row in rows} == {"infeasible"} and not any(
            row["cluster"] for row in rows
        )
        said = "measured in fp32, bf16 alone, and it tolerates fp16; `precisions`, `strategies` and `switches`"
        assert all(said in row["reason"] for row in rows)


def test_machines_that_the_champion_has_not_met_are_not_guessed_at(here: Workspace) -> None:
    offers = here.provider.offers(NOON)
    stranger = [
        replace(o, usd_per_hour=1e-6, instance_type=replace(o.instance_type, name="x.new"))
        for o in offers[:1]
    ]
    rows = rows_of(here, stranger + offers, asked=champion())
    assert not any("x.new" in row["cluster"] for row in rows if row["cluster"])
    lost = rows_of(here, stranger, asked=champion())
    assert {row["status"] for row in lost} == {"infeasible"}
    assert all("no local machine on offer was ever measured" in row["reason"] for row in lost)


def test_what_nobody_measured_on_ec2_is_answered_with_the_command_that_would(
    tmp_path: Path,
) -> None:
    bare = install(tmp_path, "conv", provider=DescribedMachines(name="ec2"))
    (measurable,) = bare.workloads
    settings = bare.settings.model_copy(
        update={"ec2": bare.settings.ec2.model_copy(update={"bucket": "mine-1"})}
    )
    imported = replace(measurable, digest=IMPORTED)
    for here, workload, command in (
        (
            replace(bare, settings=settings),
            measurable,
            "`srift refresh --provider ec2 --max-usd 25` measures it there",
        ),
        (
            bare,
            measurable,
            "`srift import FILE`",
        ),  # where nothing can be launched, nobody is asked to spend
        (bare, imported, "`srift import FILE`"),
    ):
        rows = recommend_one(
            here, None, workload, here.provider.offers(NOON), measured().runs.iloc[:0]
        )
        assert all("on ec2 machines" in row["reason"] and command in row["reason"] for row in rows)
        assert here is not bare or not any("--max-usd 25" in row["reason"] for row in rows)


def test_an_unknown_price_stays_unknown(tmp_path: Path) -> None:
    here = install(tmp_path, provider=DescribedMachines(unpriced=frozenset({"s.whole", "s.large"})))
    rows = rows_of(here, asked=champion())
    unpriced = [
        row
        for row in rows
        if row["cluster"] and ("s.whole" in row["cluster"] or "s.large" in row["cluster"])
    ]
    assert unpriced, "the fastest machines have no price and are still named for the goal fastest"
    assert {row["goal"] for row in unpriced} <= {"fastest", "cheapest_within_deadline"} - {
        "cheapest_within_deadline"
    }
    assert {(row["usd"], row["usd_p90"], row["usd_per_million_samples"]) for row in unpriced} == {
        (None, None, None)
    }
    assert all(row["usd"] > 0 for row in rows if row["cluster"] and row not in unpriced)


def test_measured_runs_count_the_runs_of_that_very_setup(here: Workspace) -> None:
    before = firsts(rows_of(here, asked=champion()), "conv")["cheapest"]
    run = {
        name: before[name]
        for name in ("workload", "cluster", "layout", "batch_per_device", "accumulation_steps")
    }
    run |= {
        "strategy": "ddp",
        "precision": "fp32",
        "switches": "none",
        "provider": "local",
        "measured_at": pd.Timestamp("2026-11-20"),
    }
    runs = pd.DataFrame([run, run, run | {"accumulation_steps": 64}, run | {"workload": "lm"}])
    found = conv_rows(here, runs=runs)
    assert firsts(found, "conv")["cheapest"]["measured_runs"] == 2
    assert {row["cluster"] for row in found if row["measured_runs"]} == {before["cluster"]}
    counted = pd.DataFrame(
        [run | {"runs": 2}, run | {"runs": 5, "layout": None}]
    )  # rows that stand for several
    found = conv_rows(here, runs=counted)
    assert firsts(found, "conv")["cheapest"]["measured_runs"] == 7


def test_top_limits_the_rivals_and_runs_of_an_unknown_day_leave_the_newest_measurement_unknown(
    here: Workspace,
) -> None:
    rows = conv_rows(here, top=2)
    assert rows == conv_rows(here, top=2) and max(row["rank"] for row in rows) == 2
    rows = conv_rows(here, runs=measured().runs.assign(measured_at=pd.NaT))
    assert {row["newest_measurement_at"] for row in rows} == {None}


def test_the_date_of_a_price_is_that_of_the_oldest_among_the_rows_own_machines(
    here: Workspace,
) -> None:
    day = {
        o.instance_type.name: NOON - timedelta(days=n)
        for n, o in enumerate(here.provider.offers(NOON))
    }
    offers = [replace(o, price_as_of=day[o.instance_type.name]) for o in here.provider.offers(NOON)]
    rows = rows_of(here, offers, asked=champion())
    assert len({row["price_as_of"] for row in rows}) > 1
    for row in rows:
        assert row["price_as_of"] == min(day[one["instance_type"]] for one in row["cluster_offers"])
    assert {row["price_as_of"] for row in rows_of(here, offers, asked=None)} == {min(day.values())}


def test_a_workload_that_is_another_now_is_not_answered_by_what_the_old_one_taught_and_the_answer_says_what_to_do(
    here: Workspace,
) -> None:
    rows = conv_rows(here, digest="edited")
    assert {row["status"] for row in rows} == {"infeasible"}
    assert all("srift refresh" in row["reason"] for row in rows)
    imported = conv_rows(here, digest=IMPORTED)
    assert {row["status"] for row in imported} == {"infeasible"}
    assert all("srift import" in row["reason"] for row in imported)


def test_a_type_that_was_defined_anew_is_not_offered_before_it_is_measured(here: Workspace) -> None:
    offers = [
        replace(
            one, instance_type=replace(one.instance_type, bandwidth_gbps=9.0), usd_per_hour=1e-6
        )
        if one.instance_type.name == "s.small"
        else one
        for one in here.provider.offers(NOON)
    ]
    rows = conv_rows(here, offers)
    assert rows[0]["status"] == "recommended"
    assert not any("s.small" in row["cluster"] for row in rows if row["cluster"])


def test_a_model_from_before_definitions_were_stored_has_met_nothing(here: Workspace) -> None:
    old = Champion(version=1, model=replace(champion().model, workload_digests={}, type_digests={}))
    assert {row["status"] for row in rows_of(here, asked=old)} == {"infeasible"}


def test_the_champions_answer_is_that_of_predicting_and_drawing_for_every_setup(
    here: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    (conv, _) = here.workloads
    wide, offers, model = (
        with_known_facts(here, replace(conv, global_batch_least=32, global_batch_most=96)),
        here.provider.offers(NOON),
        champion().model,
    )
    monkeypatch.setattr(
        ranking, "CLUSTERS_COMPARED", 5
    )  # so that most of this little world can be left out
    monkeypatch.setattr(search, "_TURN", 8)
    found = plan_one(Case.of(here, champion(), wide, offers), measured().runs)
    assert 0 < found.looked_at < 0.8 * found.candidates
    supply = Supply(offers=offers, max_hosts=here.settings.campaign.max_hosts, fits=here.fits)
    setups = planner.candidates(wide, supply, model)
    rows = pd.DataFrame([one.row() for one in setups])
    drawn = model.draws(rows, count=planner.DRAWS, seed=recommend.SEED)
    whole = ranking.recommend(
        wide, job_costs(wide, setups, model.predict(rows), drawn, seed=recommend.SEED)
    )
    for ours, theirs in zip(found.rows, whole, strict=True):
        for name, value in theirs.items():
            if name != "measured_runs":
                assert ours[name] == (
                    pytest.approx(value, rel=1e-9) if isinstance(value, float) else value
                ), name


def test_the_measured_size_of_a_gradient_counts_in_what_a_checkpoint_costs(
    here: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(
        planner,
        "plan",
        lambda workload, *rest, **named: seen.append(workload) or planner.nothing(workload),
    )
    (conv, _) = here.workloads
    with here.warehouse.transact() as connection:
        rows = [
            {
                "workload": "conv",
                "digest": conv.digest,
                "samples": 1,
                "gradient_bytes": 123,
                "parameters": 30,
            }
        ]
        append.note_workloads(connection, rows, provider="local", noted_at=NOON)
    rows_of(here, asked=champion())
    assert [(one.name, one.gradient_bytes, one.parameters) for one in seen] == [
        ("conv", 123, 30),
        ("lm", None, None),
    ]


def test_a_device_of_which_nothing_is_known_is_not_compared_and_the_first_row_says_so(
    here: Workspace,
) -> None:
    (conv, _) = here.workloads
    offers = here.provider.offers(NOON)
    gpu = replace(offers[0].instance_type, name="x.gpu", device="Z9")
    model = champion().model
    machines = model.machines | {
        "x.gpu": replace(model.machines["s.whole"], prior_speed=100.0, device="z9")
    }
    met = replace(
        model,
        facts=replace(model.facts, machines=machines),
        type_digests=model.type_digests | {"x.gpu": gpu.digest},
    )
    assert met.met_type(gpu)
    tempting = [*offers, replace(offers[0], instance_type=gpu, usd_per_hour=1e-6)]
    rows = recommend_one(here, Champion(version=1, model=met), conv, tempting, measured().runs)
    assert not any("x.gpu" in row["cluster"] for row in rows)
    assert all(
        ("their data sheet is known: Z9" in row["reason"]) == (row["rank"] == 1) for row in rows
    )
    assert "data sheet" not in conv_rows(here)[0]["reason"]


def test_a_new_workload_whose_flops_are_known_is_not_guessed_at_where_no_device_has_a_peak_rate(
    tmp_path: Path,
) -> None:
    here = install(tmp_path, "conv", "new_workload")
    note_definitions(here, NOON)
    facts = {
        "workload": "new_workload",
        "digest": "",
        "parameters": 10,
        "gradient_bytes": 40,
        "flops_per_sample": 1e9,
    }
    with here.warehouse.transact() as connection:
        append.note_workloads(connection, [facts], provider="local", noted_at=NOON)
    (_, new_workload) = here.workloads
    assert with_known_facts(here, new_workload).flops_per_sample == 1e9
    rows = [row for row in rows_of(here, asked=champion()) if row["workload"] == "new_workload"]
    assert {row["status"] for row in rows} == {"infeasible"}
    assert all(
        "nothing is known of this workload on local machines" in row["reason"] for row in rows
    )


@dataclass
class Scored(DescribedMachines):
    """Machines with a placement score; after `patience` questions nobody answers."""

    patience: int = 1000
    asked: list[tuple[str, tuple[str, ...], int]] = field(default_factory=list)

    def placement_scores(self, region: str, names: Sequence[str], count: int) -> dict[str, int]:
        self.asked.append((region, tuple(names), count))
        if len(self.asked) > self.patience:
            raise ProviderError("too many different questions")
        return {"a": 10 - count, "b": 1}


def spot_of_one_type(row: dict[str, Any]) -> bool:
    spot = [one for one in row["cluster_offers"] or () if one["market"] == "spot"]
    return len({one["instance_type"] for one in spot}) == 1


def test_each_row_on_spot_tells_the_score_of_its_own_request_and_each_is_asked_once(
    tmp_path: Path,
) -> None:
    machines = Scored()
    rows = rows_of(install(tmp_path, provider=machines), asked=champion())
    assert any(map(spot_of_one_type, rows)) and not all(map(spot_of_one_type, rows))
    for row in rows:
        spot = sum(one["count"] for one in row["cluster_offers"] or () if one["market"] == "spot")
        assert row["placement_score"] == (10 - spot if spot_of_one_type(row) else None)
    assert len(machines.asked) == len(set(machines.asked)) <= recommend.MOST_SCORES


@pytest.mark.parametrize(("patience", "most", "asked"), [(1, 20, 2), (1000, 1, 1)])
def test_no_more_scores_are_asked_for_than_aws_answers_and_the_others_stay_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, patience: int, most: int, asked: int
) -> None:
    monkeypatch.setattr(recommend, "MOST_SCORES", most)
    machines = Scored(patience=patience)
    rows = rows_of(install(tmp_path, provider=machines), asked=champion())
    assert len(machines.asked) == asked
    assert {row["placement_score"] for row in rows} > {None} and len(rows) > 8


def test_a_row_says_who_knows_its_risk_and_whose_prices_it_uses(
    here: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recommend, "spot_experience", lambda here: {"s.large": "own launches"})
    offers = [
        replace(
            one,
            interruption_source="Spot Advisor" if one.market == "spot" else "",
            own_price="own discount",
        )
        for one in here.provider.offers(NOON)
    ]
    rows = [row for row in conv_rows(here, offers, top=40) if row["cluster"]]
    said: dict[bool, set[str]] = {True: set(), False: set()}
    for row in rows:
        assert row["reason"].endswith("own discount")
        types = {one["instance_type"] for one in row["cluster_offers"] if one["market"] == "spot"}
        assert (
            (row["interruption_source"] is None) == (not types) == (row["interruption_risk"] == 0)
        )
        if len(types) == 1:
            said["s.large" in types].add(row["interruption_source"])
    assert said == {True: {"own launches"}, False: {"Spot Advisor"}}
    mixed = [
        row["interruption_source"]
        for row in rows
        if "s.large" in row["cluster"] and "+" in row["cluster"]
    ]
    assert any("s.large: own launches" in one and "Spot Advisor" in one for one in mixed if one)


def test_a_strategy_that_was_not_shown_to_learn_alike_is_vetoed_in_every_answer(
    here: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    supplies: list[Supply] = []
    monkeypatch.setattr(
        planner, "plan", lambda workload, supply, model, **_: supplies.append(supply)
    )
    sparse = Mode(strategy="ddp-mstopk")
    conv = replace(here.workloads[0], modes=(Mode(), sparse))
    case = Case.of(here, champion(), conv, here.provider.offers(NOON))
    assert case.model is not None
    recommend.planned(here, case.model, conv, case.known, conditions=case.conditions)
    assert (
        list(supplies[0].vetoes) == [sparse]
        and "not shown yet to learn" in supplies[0].vetoes[sparse]
    )
