"""A campaign keeps to its caps, covers everything first, repeats nothing known, and buys what may change a choice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import cache
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from models.campaign.campaign import (
    CampaignLimits,
    PlannedLaunch,
    elastic_launch,
    learning_launches,
    shopping_list,
)
from models.campaign.candidates import Costs, PlannedRun, training_runs
from models.campaign.run_value import Knowledge, Model, Past
from models.campaign.value_of_information import Belief, choice, choice_set_of
from models.domain.cluster import Cluster, Offer, cluster_name
from models.domain.setup_table import row_key, rows_of
from models.domain.workload import Goal, Mode, Workload, joined
from models.job.cost import job_costs
from models.planner.candidates import Supply
from models.planner.planner import candidates
from models.planner.ranking import recommend
from tests.models.planning import (
    AS_OF,
    CORES,
    NOTHING,
    WORKLOADS,
    LineModel,
    cores_fit,
    frame,
    machine,
    offer,
    offers,
    workload,
)

MODEL = LineModel()


def shop(
    runs: pd.DataFrame = NOTHING,
    profiles: pd.DataFrame = NOTHING,
    probes: pd.DataFrame = NOTHING,
    *,
    jobs: Sequence[Workload] = WORKLOADS,
    sold: Sequence[Offer] | None = None,
    model: Model | None = None,
    **changes: Any,
) -> list[PlannedLaunch]:
    """`changes` are of the campaign, or of what else is given of the past."""
    history = {
        name: changes.pop(name)
        for name in ("failures", "drifting", "stale_before")
        if name in changes
    }
    asked: dict[str, Any] = {
        "max_usd": 1.0,
        "max_seconds": 450.0,
        "max_hosts": 4,
        "fits": cores_fit,
        "seed": 7,
    }
    past = Past(runs=runs, profiles=profiles, probes=probes, **history)
    return shopping_list(
        CampaignLimits(**(asked | changes)),
        jobs,
        offers() if sold is None else sold,
        past,
        model=model,
    )


@cache
def first_list() -> list[PlannedLaunch]:
    """Before anything was measured."""
    return shop()


def lines(
    launches: Sequence[PlannedLaunch], kind: str
) -> Iterator[tuple[PlannedRun, tuple[str, ...]]]:
    """Items of a kind with the instance types that take part."""
    for launch in launches:
        for item in launch.items:
            if item.kind == kind:
                yield (
                    item,
                    tuple(launch.cluster.members[node].instance_type.name for node in item.nodes),
                )


def train_row(item: PlannedRun, members: tuple[str, ...]) -> dict[str, Any]:
    return {
        "kind": "train",
        "workload": item.workload,
        "cluster": cluster_name(members),
        "layout": joined(item.layout),
        "batch_per_device": joined(item.batches),
        "accumulation_steps": item.accumulation_steps,
        "strategy": "ddp",
        "precision": "fp32",
        "switches": "none",
    }


def measured(
    launches: Sequence[PlannedLaunch], *, spread: float = 0.02
) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """The frames after all of `launches` went well."""
    steps = {"step_s": 0.1, "step_spread": spread, "measured_at": AS_OF}
    runs = [train_row(item, members) | steps for item, members in lines(launches, "train")]
    profiles = [
        {
            "workload": item.workload,
            "instance_type": members[0],
            "batch": batch,
            "forward_s": 0.004 + 0.001 * batch / CORES[members[0]],
            "backward_s": 0.006 + 0.001 * batch / CORES[members[0]],
        }
        for item, members in lines(launches, "profile")
        for batch in item.batches
    ]
    probes = [
        {"cluster": cluster_name(members), "bytes": size, "seconds": 0.01}
        for item, members in lines(launches, "probe")
        for size in item.message_bytes
    ]
    return pd.DataFrame(runs), pd.DataFrame(profiles), pd.DataFrame(probes)


def keys(launches: Sequence[PlannedLaunch]) -> list[object]:
    runs = measured(launches)[0]
    return [row_key(row, {}) for row in runs.to_dict("records")]


@settings(max_examples=15, deadline=None)
@given(
    max_usd=st.floats(0.0, 0.02),
    max_seconds=st.floats(0.0, 900.0),
    max_hosts=st.integers(1, 4),
    seed=st.integers(0, 99),
)
@example(
    max_usd=0.015625, max_seconds=30.0, max_hosts=2, seed=0
)  # a launch takes all of the time, to the last digit
def test_caps_are_kept_and_clusters_fit(
    max_usd: float, max_seconds: float, max_hosts: int, seed: int
) -> None:
    launches = shop(max_usd=max_usd, max_seconds=max_seconds, max_hosts=max_hosts, seed=seed)
    assert sum(launch.est_usd for launch in launches) <= max_usd * (1 + 1e-9)
    assert sum(launch.est_s for launch in launches) <= max_seconds * (1 + 1e-9)
    for launch in launches:
        assert not cores_fit(launch.cluster) and len(launch.cluster.members) <= max_hosts
        assert {one.market for one in launch.cluster.members} == {"spot"}
        own = [0.0] * len(
            launch.cluster.members
        )  # runs of one machine go side by side, the others alone
        for item in launch.items:
            if len(item.nodes) == 1:
                own[item.nodes[0]] += item.est_s
        together = sum(item.est_s for item in launch.items if len(item.nodes) > 1)
        assert launch.est_s == pytest.approx(Costs().launch_s + max(own) + together)
        assert [len(item.nodes) > 1 for item in launch.items] == sorted(
            len(item.nodes) > 1 for item in launch.items
        )
        assert launch.est_usd == pytest.approx(
            launch.est_s / 3600 * (launch.cluster.usd_per_hour or 0)
        )
        assert launch.reason and all(item.reason for item in launch.items)
    assert len(keys(launches)) == len(set(keys(launches)))
    probed = [members for _, members in lines(launches, "probe")]
    assert len(probed) == len(set(probed))


def test_the_first_campaign_covers_everything_and_does_so_early() -> None:
    launches = first_list()
    trains = list(lines(launches, "train"))
    assert len(trains) >= 70
    everything = {(job.name, name) for job in WORKLOADS for name in CORES}
    assert {(i.workload, m[0]) for i, m in lines(launches[:2], "profile")} == everything, (
        "by the first two launches"
    )
    assert len(list(lines(launches, "profile"))) == len(everything)
    early = list(lines(launches[:2], "train"))
    assert {item.workload for item, _ in early} == {job.name for job in WORKLOADS}
    assert {name for _, members in early for name in members} == set(CORES)
    assert {len(members) for _, members in trains} == {1, 2, 3, 4}
    assert min(Counter(item.workload for item, _ in trains).values()) >= 12
    mixed = sum(len(set(members)) > 1 for _, members in trains)
    assert mixed >= 15 and len(trains) - mixed >= 15
    sizes = [size for item, _ in lines(launches, "probe") for size in item.message_bytes]
    assert (min(sizes), max(sizes)) == (4096, 8 * 2**20)
    assert {2, 3, 4} <= {len(members) for _, members in lines(launches, "probe")}


def profiles_bought(*modes: Mode, device: str = "cpu") -> tuple[set[tuple[str, str]], set[str]]:
    """(workload, instance type) profiled, and the workloads trained, where the mlp tolerates `modes` alone."""
    jobs = [replace(workload("mlp", 64), modes=modes)]
    kinds = [replace(machine(name), device=device) for name in ("large", "whole")]
    sold = [replace(offer(one.name), instance_type=one) for one in kinds]
    launches = shop(jobs=jobs, sold=sold, market=sold[0].market, max_usd=10.0, max_seconds=4000.0)
    bought = [(item.label, members[0]) for item, members in lines(launches, "profile")]
    assert len(bought) == len(set(bought)), "each once"
    return set(bought), {item.label for item, _ in lines(launches, "train")}


def test_a_workload_of_sharded_modes_alone_is_profiled_unsharded_and_trained_only_as_it_tolerates() -> (
    None
):
    ddp, fsdp, zero2 = (Mode(strategy=one) for one in ("ddp", "fsdp", "zero2"))
    on_both = {("mlp", "large"), ("mlp", "whole")}
    assert profiles_bought(ddp)[0] == profiles_bought(ddp, fsdp)[0] == on_both
    assert profiles_bought(fsdp) == (on_both, {"mlp in fp32 fsdp"})
    assert profiles_bought(fsdp, zero2) == (on_both, {"mlp in fp32 fsdp", "mlp in fp32 zero2"})
    compiled = Mode("bf16", "fsdp", "compile+offload")
    alone = {("mlp in bf16 compile", "large"), ("mlp in bf16 compile", "whole")}
    assert profiles_bought(compiled, device="A10G") == (alone, {f"mlp in {compiled}"})
    assert profiles_bought(compiled) == (set(), set()), "a processor has nothing to offload to"


def test_the_profile_of_one_device_serves_the_sharded_mode_and_is_not_bought_again() -> None:
    fsdp = [replace(workload("mlp", 64), modes=(Mode(strategy="fsdp"),))]
    profiles = measured(shop(jobs=fsdp))[1]
    assert set(profiles["workload"]) == {"mlp"}
    assert not list(lines(shop(profiles=profiles, jobs=fsdp), "profile"))


def test_training_runs_divide_a_batch_exactly_mostly_the_workloads_own() -> None:
    own = {job.name: (job.global_batch_least, job.global_batch_most) for job in WORKLOADS}
    inside = 0
    trains = list(lines(first_list(), "train"))
    for item, members in trains:
        assert len(item.batches) == len(members) and min(item.batches) >= 1
        total = sum(item.batches) * item.accumulation_steps
        least, most = own[item.workload]
        inside += least <= total <= most
        assert total in {least // 2, least, 2 * least, most}
    assert len(trains) / 2 < inside < len(trains)


def test_unequal_machines_share_by_cores_until_they_are_profiled() -> None:
    sold, jobs = [offer("large", "spot"), offer("small", "spot")], [workload("mlp", 100)]

    def shares(profiles: pd.DataFrame) -> set[tuple[int, ...]]:
        launches = shop(
            profiles=profiles, jobs=jobs, sold=sold, max_seconds=300.0, max_hosts=2, seed=1
        )
        return {
            i.batches
            for i, m in lines(launches, "train")
            if m == ("large", "small") and sum(i.batches) == 100
        }

    assert shares(NOTHING) == {(80, 20)}
    rows = [
        {
            "workload": "mlp",
            "instance_type": name,
            "batch": b,
            "forward_s": 0.0,
            "backward_s": 0.01 * b * factor,
        }
        for name, factor in (("large", 1), ("small", 3))
        for b in (10, 50, 100)
    ]
    assert shares(pd.DataFrame(rows)) == {(75, 25)}
    for strategy, equal in (("adasum", False), ("adasum-delta", True)):
        jobs = [replace(workload("mlp", 100), modes=(Mode(strategy=strategy),))]
        assert ((80, 20) not in shares(NOTHING)) is equal


def test_what_is_known_well_is_not_bought_again() -> None:
    first = first_list()
    runs, profiles, probes = measured(first)
    second = shop(runs, profiles, probes)
    assert len(list(lines(second, "train"))) >= 40
    assert not set(keys(first)) & set(keys(second))
    assert not list(lines(second, "profile"))
    assert not {m for _, m in lines(first, "probe")} & {m for _, m in lines(second, "probe")}


def test_what_is_unsteady_stale_or_failed_may_come_again() -> None:
    args: dict[str, Any] = {"max_seconds": 300.0, "max_hosts": 1, "seed": 1}
    args |= {"sold": [offer("large", "spot")], "jobs": [workload("mlp", 64)]}
    first = shop(**args)
    assert len(keys(first)) == 3

    def again(spread: float = 0.01, **changes: Any) -> set[object]:
        return set(keys(shop(*measured(first, spread=spread), **args, **changes)))

    assert again() == set()
    assert again(spread=float("nan")) == set()
    assert again(spread=0.5) == set(keys(first))
    assert again(stale_before=AS_OF + timedelta(days=1)) == set(keys(first))
    assert again(stale_before=AS_OF - timedelta(days=1)) == set()
    runs, profiles, probes = measured(first)
    failed = runs.iloc[1:]  # the first one failed: it left no row
    assert set(keys(shop(failed, profiles, probes, **args))) == {keys(first)[0]}


def test_the_same_question_gets_the_same_list_and_another_seed_another() -> None:
    assert shop(sold=offers()[::-1]) == first_list() != shop(seed=8)


def test_no_money_no_time_or_no_price_buys_nothing() -> None:
    assert shop(max_usd=0.0) == []
    assert shop(max_seconds=5.0) == []
    unpriced = [offer(name, "spot", usd_per_hour=None) for name in CORES] + offers("on-demand")
    assert shop(sold=unpriced) == []
    bought = shop(sold=unpriced, market="on-demand")
    assert bought and all(
        one.market == "on-demand" for launch in bought for one in launch.cluster.members
    )


def test_what_failed_twice_is_not_bought_a_third_time() -> None:
    kinds = ("profile", "train", "probe")
    (profile, where), (train, members), (_, probed) = (
        next(lines(first_list(), kind)) for kind in kinds
    )
    failed = [
        {"kind": "profile", "workload": profile.workload, "cluster": cluster_name(where)},
        train_row(train, members),
        {"kind": "probe", "workload": "", "cluster": cluster_name(probed)},
    ]

    def named(launches: list[PlannedLaunch]) -> set[tuple[object, ...]]:
        own = ((i, m) for kind in kinds for i, m in lines(launches, kind))
        return {(i.kind, i.workload, m, i.batches, i.accumulation_steps) for i, m in own}

    gone = {
        ("train", train.workload, members, train.batches, train.accumulation_steps),
        ("profile", profile.workload, where, profile.batches, 1),
        ("probe", "", probed, (), 1),
    }
    assert gone <= named(first_list()) and not gone & named(shop(failures=pd.DataFrame(failed * 2)))
    assert named(shop(failures=pd.DataFrame(failed))) == named(first_list()), (
        "failed once: tried again"
    )


GOALS = (
    Goal(goal="cheapest_within_deadline", hours=2.0),
    Goal(goal="fastest_within_budget", usd=0.1),
    Goal(goal="cheapest"),
    Goal(goal="fastest"),
)
JOBS = [replace(one, goals=GOALS) for one in WORKLOADS]
PROFILES = measured(first_list())[1]
ALL = frozenset(CORES)


def model(
    line: LineModel, jobs: Sequence[Workload] = JOBS, types: frozenset[str] = ALL, **changes: Any
) -> Model:
    """Who contends by a model of one line, all of whose setups err by `line.own` each."""
    sold = [one for one in offers() if one.instance_type.name in types]
    found = {}
    for job in jobs:
        setups = candidates(job, Supply(offers=sold, max_hosts=4, fits=cores_fit), line)
        found[job.name] = choice_set_of(job, setups, line.predict(frame(setups)))
    values: dict[str, Any] = {
        "choice_set": found,
        "joint": line.joint,
        "types": types,
        "fresh": NOTHING,
    }
    return Model(**(values | {"workloads": frozenset(variants(jobs))} | changes))


def variants(jobs: Sequence[Workload]) -> list[tuple[str, Mode]]:
    return [(job.name, mode) for job in jobs for mode in job.modes]


def buy(known: Model | None, **changes: Any) -> list[PlannedLaunch]:
    return shop(
        *changes.pop("frames", (NOTHING, PROFILES, NOTHING)), jobs=JOBS, model=known, **changes
    )


SURE, UNSURE = LineModel(own=1e-4, shared=0.0), LineModel(own=0.15)


@cache
def doubted() -> tuple[Model, list[PlannedLaunch]]:
    """A model that is unsure, and what is bought by it."""
    known = model(UNSURE)
    return known, buy(known)


def test_every_line_says_which_choice_it_may_change_and_the_caps_hold() -> None:
    known, launches = doubted()
    items = [item for launch in launches for item in launch.items]
    assert items and all("expected to change the choice of" in item.reason for item in items)
    assert any(
        "fastest_within_budget in " in item.reason or "cheapest in " in item.reason
        for item in items
    )
    assert {item.kind for item in items} == {"train"}
    assert (
        sum(launch.est_s for launch in launches) <= 450
        and sum(launch.est_usd for launch in launches) <= 1.0
    )
    assert buy(known) == launches
    dear = buy(known, max_usd=0.0005)
    assert sum(launch.est_usd for launch in dear) <= 0.0005


def test_what_was_measured_since_the_model_was_fitted_is_given_to_it() -> None:
    known, first = doubted()
    runs, _, _ = measured(first)
    expected = UNSURE.predict(runs)["step_s"].to_numpy()
    updated = replace(known, fresh=runs.assign(step_s=expected))
    again = buy(updated, frames=(runs, PROFILES, NOTHING))
    count = [sum(len(launch.items) for launch in launches) for launches in (first, again)]
    before = buy(known, frames=(runs, PROFILES, NOTHING))
    assert count[1] < count[0] and again != before


def test_a_workload_or_type_that_the_model_has_not_met_is_measured_for_variety_beside() -> None:
    met = [job for job in JOBS if job.name != "lm"]
    launches = buy(model(SURE, met))
    assert {
        item.workload for launch in launches for item in launch.items if item.kind == "train"
    } == {"lm"}
    without = model(SURE, types=ALL - {"whole"})
    launches = buy(without)
    trains = [
        (launch, item) for launch in launches for item in launch.items if item.kind == "train"
    ]
    assert trains
    for launch, item in trains:
        assert "whole" in {launch.cluster.members[node].instance_type.name for node in item.nodes}
    unprofiled = PROFILES[PROFILES["workload"] != "lm"]
    first = buy(model(SURE, met), frames=(NOTHING, unprofiled, NOTHING))[0]
    assert "profile" in {item.kind for item in first.items}


def test_a_minimum_bill_is_counted_and_makes_launches_fewer_and_larger() -> None:
    sold = offers("spot")
    by_second, by_minute = (
        buy(
            doubted()[0],
            sold=sold,
            max_usd=0.004,
            max_seconds=3600.0,
            costs=Costs(minimum_s=minimum),
        )
        for minimum in (0.0, 120.0)
    )
    for launch in by_minute:
        assert launch.est_usd == pytest.approx(
            max(launch.est_s, 120.0) / 3600 * (launch.cluster.usd_per_hour or 0)
        )
    assert sum(launch.est_usd for launch in by_minute) <= 0.004
    runs = [
        np.mean([len(launch.items) for launch in launches]) for launches in (by_second, by_minute)
    ]
    assert runs[1] > runs[0]
    assert buy(doubted()[0], sold=sold, max_usd=1e-4, costs=Costs(minimum_s=120.0)) == []
    large = buy(doubted()[0], costs=Costs(minimum_s=400.0))
    assert large and all(
        "expected to change" in item.reason for launch in large for item in launch.items
    )
    assert max(launch.est_s for launch in large) < 400, (
        "what has no value was bought since it cost nothing"
    )


def test_candidates_are_the_best_of_each_cluster_and_the_choice_is_that_of_the_table() -> None:
    job = workload("mlp", 64, None, *GOALS)
    setups = candidates(job, Supply(offers=offers(), max_hosts=4, fits=cores_fit), UNSURE)
    predicted = UNSURE.predict(frame(setups))
    found = choice_set_of(job, setups, predicted)
    assert [one.name for one in found.questions] == [
        "cheapest_within_deadline", "fastest_within_budget", "cheapest", "fastest"
    ]  # fmt: skip
    spread = np.log(1.1 / 0.9) / 2 / 1.645
    random = np.random.default_rng(1).standard_normal((len(setups), 400))
    draws = predicted["step_s"].to_numpy()[:, None] * np.exp(spread * random)
    table = recommend(job, job_costs(job, setups, predicted, draws))
    mean, _, _ = UNSURE.joint(frame(found.setups))
    alone = Belief(
        mean=mean, covariance=spread**2 * np.eye(len(mean)), noise=np.full(len(mean), 1e-9)
    )
    for asked in found.questions:
        assert 2 <= len(asked.places) <= 40
        first = next(row for row in table if row["goal"] == asked.name)
        mine = found.setups[asked.places[choice(asked, alone)]]
        assert mine.cluster.name == first["cluster"], asked.name
    hopeless = replace(job, goals=(Goal(goal="cheapest_within_deadline", hours=1e-6), *GOALS[2:]))
    assert [one.name for one in choice_set_of(hopeless, setups, predicted).questions] == [
        "cheapest",
        "fastest",
    ]
    assert choice_set_of(job, [], predicted.iloc[:0]).questions == ()


def test_a_planned_run_lowers_the_value_of_what_it_shows() -> None:
    clusters = [Cluster(members=(offer(name, "spot"),)) for name in CORES]
    runs = training_runs(
        JOBS, clusters, PROFILES, expected_step=UNSURE.predict, costs=Costs()
    ).values()
    past = Past(runs=NOTHING, profiles=PROFILES, probes=NOTHING)
    known = Knowledge.of(past, [], {})
    known.learn(model(replace(UNSURE, own=0.1, shared=0.3)), list(runs), past, {})
    valued = sorted((run for run in runs if known.value(run) > 0), key=known.value, reverse=True)
    before = {run: known.value(run) for run in valued}
    trial, first = known.copy(), valued[0]
    trial.add(first)
    assert all(trial.value(run) <= before[run] for run in valued[1:])
    assert trial.value(first) < 0.1 * before[first] == 0.1 * known.value(first)
    trial.revalue()
    assert trial.value(first) == 0.0
    assert known.value(replace(first, global_batch=7)) == 0.0  # not valued


HOUR = timedelta(hours=1)


def touching(launches: list[PlannedLaunch], name: str) -> float:
    """Part of the training runs that use machines called `name`."""
    uses = [name in members for _, members in lines(launches, "train")]
    return sum(uses) / len(uses)


def past(hours: float) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    runs, profiles, probes = measured(first_list())
    return runs.assign(measured_at=AS_OF + hours * HOUR), profiles, probes


def test_setups_on_a_drifting_type_come_to_the_head_with_the_reason() -> None:
    plain, moved = shop(*past(-1.0)), shop(*past(-1.0), drifting={"medium": AS_OF})
    assert "medium" in {offer.instance_type.name for offer in moved[0].cluster.members}
    assert touching(moved, "medium") > 1.3 * touching(plain, "medium")
    for item, members in lines(moved, "train"):
        assert ("medium drifted" in item.reason) == ("medium" in members)
    assert not [item for item, _ in lines(plain, "train") if "drifted" in item.reason]
    known, since = set(keys(first_list())), shop(*past(+1.0), drifting={"medium": AS_OF})
    assert not known & set(keys(plain)) and not known & set(keys(since)), (
        "measured since it was found to drift"
    )
    assert known & set(keys(moved))
    _, profiles, probes = past(-1.0)
    untried, small = (
        shop(NOTHING, profiles, probes, drifting=one) for one in ({}, {"small": AS_OF})
    )
    assert touching(small, "small") > 1.2 * touching(untried, "small"), (
        "more value than what was never tried elsewhere"
    )


def only_of(launches: list[PlannedLaunch], name: str) -> bool:
    runs = list(lines(launches, "train"))
    return bool(runs) and all(name in members for _, members in runs)


def test_a_model_that_is_sure_buys_only_what_drifted_or_went_stale() -> None:
    sure = model(SURE)
    assert buy(sure) == [] != buy(None), "without a model it measures for variety"
    runs, profiles, probes = frames = past(-1.0)
    assert buy(sure, frames=frames) == []
    assert only_of(buy(sure, frames=frames, drifting={"medium": AS_OF}), "medium")
    on_medium = runs["cluster"].str.contains("medium")
    aged = (
        runs.assign(measured_at=runs["measured_at"].where(~on_medium, AS_OF - 1000 * HOUR)),
        profiles,
        probes,
    )
    assert buy(sure, frames=aged) == []
    assert only_of(buy(sure, frames=aged, stale_before=AS_OF - 10 * HOUR), "medium")


FOUR = offer("large", "spot", instance_type=replace(machine("large", devices=4), cores=0.8))
ONE = offer("small", "spot")
JOB = workload("mlp", 64, 256)


def shop_devices(runs: pd.DataFrame = NOTHING) -> list[PlannedLaunch]:
    return shop(runs, jobs=[JOB], sold=[FOUR, ONE], max_usd=10.0, max_seconds=3000.0, max_hosts=2)


def test_full_machines_and_single_devices_are_both_to_be_had() -> None:
    clusters = [
        Cluster(members=(FOUR,)),
        Cluster(members=(FOUR, FOUR)),
        Cluster(members=(FOUR, ONE)),
    ]
    candidates = training_runs([JOB], clusters, NOTHING, expected_step=None, costs=Costs()).values()
    layouts = {(candidate.cluster, candidate.devices) for candidate in candidates}
    assert ("1xlarge", (4,)) in layouts and ("1xlarge", (1,)) in layouts
    assert ("2xlarge", (4, 4)) in layouts and ("1xlarge+1xsmall", (4, 1)) in layouts
    assert len(layouts) == 4
    whole = {candidate.batches for candidate in candidates if candidate.devices == (4,)}
    assert {one.batches for one in candidates if one.devices == (1,)} <= whole, (
        "at the same batch a device"
    )


def test_the_list_says_how_many_devices_and_what_was_measured_is_not_bought_again() -> None:
    launches = shop_devices()
    items = [(launch.cluster, item) for launch in launches for item in launch.items]
    trains = [(cluster, item) for cluster, item in items if item.kind == "train"]
    assert {item.devices for _, item in items if item.kind == "profile"} == {()}
    assert any(item.devices == (1,) for _, item in trains) and any(
        4 in item.devices for _, item in trains
    )
    for cluster, item in trains:
        own = [cluster.members[node].instance_type.devices for node in item.nodes]
        assert len(item.layout) == len(item.nodes) and all(
            used in (1, most) for used, most in zip(item.layout, own, strict=True)
        )
    devices = {"large": 4, "small": 1}
    rows = measured(launches, spread=0.01)[0]
    again = [train_row(*line) for line in lines(shop_devices(rows), "train")]
    assert {row_key(row, devices) for row in rows_of(rows)}.isdisjoint(
        row_key(row, devices) for row in again
    )


def test_learning_runs_are_bought_on_the_two_cheapest_machines_that_can_be_had_and_for_two_thirds_of_the_caps() -> (
    None
):
    modes = tuple(Mode(strategy=one) for one in ("ddp", "ddp-fp16", "ddp-mstopk"))
    job = replace(WORKLOADS[0], modes=modes)
    wanted = [(job, mode) for mode in modes[1:]]
    campaign = CampaignLimits(max_usd=1.0, max_seconds=900.0, max_hosts=4, fits=cores_fit, seed=7)
    sold = sorted(
        (one for one in offers() if one.market == campaign.market),
        key=lambda one: one.total_usd_per_hour or 0.0,
    )
    (launch,) = learning_launches(campaign, wanted, offers())
    cheapest = next(one for one in sold if not cores_fit(Cluster(members=(one, one))))
    assert launch.cluster.members == (cheapest, cheapest)
    assert Counter(one.mode for one in launch.items) == dict.fromkeys(modes, 2)
    left = campaign.after([launch])
    assert left.max_seconds == 900.0 - launch.est_s and left.max_usd == 1.0 - launch.est_usd
    other = replace(campaign, fits=lambda one: "no" if cheapest in one.members else cores_fit(one))
    assert cheapest not in learning_launches(other, wanted, offers())[0].cluster.members
    (fewer,) = learning_launches(
        replace(campaign, max_seconds=1.4 * launch.est_s), wanted, [cheapest]
    )
    assert {one.mode for one in fewer.items} == set(modes[:2])
    (dearer,) = learning_launches(
        replace(campaign, max_seconds=1.4 * launch.est_s), wanted, offers()
    )
    assert len(dearer.items) == len(launch.items) and cheapest not in dearer.cluster.members
    for less in (
        {"max_hosts": 1},
        {"max_seconds": 0.9 * launch.est_s},
        {"max_usd": 0.9 * launch.est_usd},
    ):
        assert learning_launches(replace(campaign, **less), wanted, [cheapest]) == []
    assert learning_launches(replace(campaign, max_seconds=1.6 * launch.est_s), wanted, offers())


def test_an_elastic_run_is_of_a_row_of_the_table_with_its_first_machine_on_demand() -> None:
    campaign = CampaignLimits(max_usd=1.0, max_seconds=900.0, max_hosts=4, fits=cores_fit, seed=7)
    name = offers()[0].instance_type.name
    row = {
        "workload": "job",
        "cluster": f"2x{name}",
        "layout": "1",
        "batch_per_device": "8",
        "accumulation_steps": 2,
    }
    row |= {"step_s": 0.5, "precision": "bf16", "strategy": "ddp", "switches": "none"}
    launch = elastic_launch(campaign, row, offers())
    assert launch is not None and [one.market for one in launch.cluster.members] == [
        "on-demand",
        "spot",
    ]
    (run,) = launch.items
    assert (run.kind, run.trained[0], run.batches, run.accumulation_steps) == (
        "elastic",
        "job",
        (8, 8),
        2,
    )
    assert run.steps == 10 * run.checkpoint_every == 60 and run.steps * 0.5 == 30
    assert run.lose_after_s is not None and run.checkpoint_every * 0.5 < run.lose_after_s < 30
    assert (
        run.est_s > 60 and launch.est_s == campaign.costs.billed_s(run.est_s) and launch.est_usd > 0
    )
    for other in (
        {"cluster": f"1x{name}"},
        {"cluster": float("nan"), "layout": float("nan")},
        {"cluster": "2xunknown"},
        {"strategy": "fsdp"},
        {"switches": "compile"},
    ):
        assert elastic_launch(campaign, row | other, offers()) is None
    assert elastic_launch(replace(campaign, fits=lambda _: "too large"), row, offers()) is None
