"""A campaign keeps to its caps, covers everything first, and buys what may change a choice."""

from collections import Counter
from dataclasses import replace
from datetime import timedelta
from functools import cache

import pandas as pd
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from models.campaign.candidates import Costs, Model, profiled_lines, training_runs
from models.campaign.run_value import Knowledge, Past
from models.campaign.shopping_list import (
    CampaignLimits,
    elastic_launch,
    learning_launches,
    shopping_list,
)
from models.campaign.value_of_information import choice_set_of
from models.domain.cluster import Cluster
from models.domain.setup_table import row_key
from models.domain.workload import Goal, Mode
from models.planner.candidates import Supply
from models.planner.planner import candidates
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

LIMITS = CampaignLimits(max_usd=1.0, max_seconds=450.0, max_hosts=4, fits=cores_fit)
NONE = (NOTHING, NOTHING, NOTHING)


def shop(frames=NONE, *, jobs=WORKLOADS, sold=None, known=None, history=None, **limits):
    """`history` is the rest of the past, `limits` differ from LIMITS."""
    runs, profiles, probes = frames
    past = Past(runs=runs, profiles=profiles, probes=probes, **(history or {}))
    sold = offers() if sold is None else sold
    return list(shopping_list(replace(LIMITS, **limits), jobs, sold, past, model=known))


@cache
def first_list():
    """Before anything was measured."""
    return shop()


def runs_of(launches, kind="train"):
    """Runs of a kind, checked to be on machines of their types."""
    for launch in launches:
        for run in launch.items:
            if run.kind == kind:
                names = [launch.cluster.members[node].instance_type.name for node in run.nodes]
                assert tuple(names) == run.members
                yield run


def measured(launches):
    """The frames after all of `launches` went well."""
    steps = {"step_s": 0.1, "measured_at": AS_OF}
    runs = [run.row() | steps for run in runs_of(launches)]
    profiles = [
        {
            "workload": run.workload,
            "instance_type": run.members[0],
            "batch": batch,
            "forward_s": 0.004 + 0.001 * batch / CORES[run.members[0]],
            "backward_s": 0.006 + 0.001 * batch / CORES[run.members[0]],
        }
        for run in runs_of(launches, "profile")
        for batch in run.batches
    ]
    probes = [
        {"cluster": run.cluster, "bytes": size, "seconds": 0.01}
        for run in runs_of(launches, "probe")
        for size in run.message_bytes
    ]
    return pd.DataFrame(runs), pd.DataFrame(profiles), pd.DataFrame(probes)


def keys(launches):
    return [row_key(run.row(), {}) for run in runs_of(launches)]


@settings(max_examples=15, deadline=None)
@given(
    max_usd=st.floats(0.0, 0.02),
    max_seconds=st.floats(0.0, 900.0),
    max_hosts=st.integers(1, 4),
)
@example(max_usd=0.015625, max_seconds=30.0, max_hosts=2)  # takes all of the time
def test_caps_are_kept_and_clusters_fit(max_usd, max_seconds, max_hosts):
    launches = shop(max_usd=max_usd, max_seconds=max_seconds, max_hosts=max_hosts)
    assert sum(launch.est_usd for launch in launches) <= max_usd * (1 + 1e-9)
    assert sum(launch.est_s for launch in launches) <= max_seconds * (1 + 1e-9)
    for launch in launches:
        members = launch.cluster.members
        assert not cores_fit(launch.cluster) and len(members) <= max_hosts
        alone = [0.0] * len(members)  # runs of one machine go side by side
        for run in launch.items:
            if len(run.nodes) == 1:
                alone[run.nodes[0]] += run.est_s
        together = sum(run.est_s for run in launch.items if len(run.nodes) > 1)
        assert launch.est_s == pytest.approx(Costs().launch_s + max(alone) + together)
        usd_per_s = (launch.cluster.usd_per_hour or 0) / 3600
        assert launch.est_usd == pytest.approx(launch.est_s * usd_per_s)
    assert len(keys(launches)) == len(set(keys(launches)))


def test_the_first_campaign_covers_everything_early():
    launches = first_list()
    everything = {(job.name, name) for job in WORKLOADS for name in CORES}
    profiles = [(run.workload, run.members[0]) for run in runs_of(launches, "profile")]
    assert sorted(profiles) == sorted(everything)
    assert not list(runs_of(launches[2:], "profile"))
    trains = list(runs_of(launches))
    assert len(trains) >= 70 and {len(run.members) for run in trains} == {1, 2, 3, 4}
    assert min(Counter(run.workload for run in trains).values()) >= 12
    mixed = sum(len(set(run.members)) > 1 for run in trains)
    assert mixed >= 15 and len(trains) - mixed >= 15
    assert {2, 3, 4} <= {len(run.members) for run in runs_of(launches, "probe")}


COMPILED = Mode("bf16", "fsdp", "compile+offload")


@pytest.mark.parametrize(
    "mode, device, profiled",
    [
        (Mode(strategy="fsdp"), "cpu", Mode()),
        (COMPILED, "A10G", Mode("bf16", "ddp", "compile")),
        (Mode("bf16"), "A10G", Mode("bf16")),
        (Mode("bf16"), "T4", None),
        (COMPILED, "cpu", None),  # a processor has nothing to offload to
    ],
)
def test_sharded_modes_are_profiled_unsharded_and_trained_as_tolerated(mode, device, profiled):
    jobs = [replace(workload("mlp", 64), modes=(mode,))]
    kinds = [replace(machine(name), device=device) for name in ("large", "whole")]
    sold = [replace(offer(kind.name), instance_type=kind) for kind in kinds]
    launches = shop(jobs=jobs, sold=sold, market=sold[0].market, max_usd=10.0, max_seconds=4000.0)
    found = [(run.mode, run.members[0]) for run in runs_of(launches, "profile")]
    expected = [] if profiled is None else [(profiled, name) for name in ("large", "whole")]
    assert sorted(found) == expected
    assert {run.mode for run in runs_of(launches)} == ({mode} if profiled else set())


SINGLE = {
    "max_seconds": 300.0,
    "max_hosts": 1,
    "sold": [offer("large", "spot")],
    "jobs": [workload("mlp", 64)],
}


@pytest.mark.parametrize("stale_days, again", [(1, 3), (-1, 0)])
def test_stale_setups_come_again(stale_days, again):
    first = shop(**SINGLE)
    history = {"stale_before": AS_OF + timedelta(days=stale_days)}
    found = shop(measured(first), history=history, **SINGLE)
    assert len(keys(first)) == 3 and len(set(keys(found)) & set(keys(first))) == again
    assert not list(runs_of(found, "profile"))


def test_what_is_bought_depends_on_no_order_and_has_a_price_in_the_market():
    assert shop(sold=offers()[::-1]) == first_list()
    assert shop(max_usd=0.0) == shop(max_seconds=5.0) == []
    unpriced = [offer(name, "spot", usd_per_hour=None) for name in CORES] + offers("on-demand")
    assert shop(sold=unpriced) == []
    bought = shop(sold=unpriced, market="on-demand")
    assert {offer.market for launch in bought for offer in launch.cluster.members} == {"on-demand"}


@pytest.mark.parametrize("kind", ["profile", "train", "probe"])
def test_what_failed_twice_is_not_bought_a_third_time(kind):
    run = next(runs_of(first_list(), kind))
    row = run.row()

    def is_bought(failures):
        launches = shop(history={"failures": pd.DataFrame([row] * failures)})
        same = (other.row() == run.row() for other in runs_of(launches, kind))
        return any(same)

    assert is_bought(1) and not is_bought(2)


GOALS = (
    Goal(goal="cheapest_within_deadline", hours=2.0),
    Goal(goal="fastest_within_budget", usd=0.1),
    Goal(goal="cheapest"),
    Goal(goal="fastest"),
)
JOBS = [replace(workload, goals=GOALS) for workload in WORKLOADS]
PROFILES = measured(first_list())[1]
PROFILED = (NOTHING, PROFILES, NOTHING)
ALL = frozenset(CORES)
SURE, UNSURE = LineModel(setup_sd=1e-4, shared=0.0), LineModel(setup_sd=0.15)


def model(line, jobs=JOBS, types=ALL):
    """A model of one line, all of whose setups err by `line.setup_sd` each."""
    sold = [offer for offer in offers() if offer.instance_type.name in types]
    found = {}
    for job in jobs:
        setups = candidates(job, Supply(offers=sold, max_hosts=4, fits=cores_fit), line)
        found[job.name] = choice_set_of(job, setups, line.predict(frame(setups)))
    return Model(
        choice_set=found,
        joint=line.joint,
        workloads=frozenset((job.name, mode) for job in jobs for mode in job.modes),
        types=types,
        fresh=NOTHING,
        predict=line.predict,
    )


def buy(known, frames=PROFILED, **limits):
    return shop(frames, jobs=JOBS, known=known, **limits)


@cache
def doubted():
    """An unsure model, and what is bought by it."""
    known = model(UNSURE)
    return known, buy(known)


def test_with_a_model_runs_are_bought_for_the_choice_they_may_change():
    known, launches = doubted()
    runs = [run for launch in launches for run in launch.items]
    assert {run.kind for run in runs} == {"train"}
    assert all("choice" in run.reason for run in runs)
    assert sum(launch.est_usd for launch in buy(known, max_usd=0.0005)) <= 0.0005


def test_runs_since_the_model_was_fitted_lower_the_value_of_more():
    known, first = doubted()
    runs, _, _ = measured(first)
    updated = known._replace(fresh=runs.assign(step_s=UNSURE.predict(runs)["step_s"].to_numpy()))
    again = buy(updated, (runs, PROFILES, NOTHING))
    assert len(list(runs_of(again))) < len(list(runs_of(first)))
    assert again != buy(known, (runs, PROFILES, NOTHING))


def test_unknown_workloads_and_types_are_measured_for_variety():
    others = model(SURE, [job for job in JOBS if job.name != "lm"])
    assert {run.workload for run in runs_of(buy(others))} == {"lm"}
    trains = list(runs_of(buy(model(SURE, types=ALL - {"whole"}))))
    assert trains and all("whole" in run.members for run in trains)


def test_a_launch_costs_at_least_the_minimum_bill():
    known = doubted()[0]
    caps = {"max_usd": 0.004, "max_seconds": 3600.0}
    for launch in buy(known, costs=Costs(minimum_s=120.0), **caps):
        usd_per_s = (launch.cluster.usd_per_hour or 0) / 3600
        assert launch.est_usd == pytest.approx(max(launch.est_s, 120.0) * usd_per_s)


def test_a_planned_run_lowers_the_value_of_what_it_shows():
    clusters = [Cluster(members=(offer(name, "spot"),)) for name in CORES]
    runs = training_runs(JOBS, clusters, PROFILES, costs=Costs())
    known = Knowledge.of(Past(runs=NOTHING, profiles=PROFILES, probes=NOTHING), {})
    known.learn(model(replace(UNSURE, setup_sd=0.1, shared=0.3)), runs)
    trial, first = known.copy(), max(runs, key=known.value)
    trial.add(first)
    assert all(trial.value(run) <= known.value(run) for run in runs)
    assert trial.value(first) < 0.1 * known.value(first)
    trial.revalue([first.workload])
    assert trial.value(first) == 0.0


@pytest.mark.parametrize("cause", ["drift", "age"])
def test_a_sure_model_buys_only_what_drifted_or_went_stale(cause):
    sure = model(SURE)
    runs, profiles, probes = measured(first_list())
    runs["measured_at"] = AS_OF - timedelta(hours=1)
    history = {"drifting": {"medium": AS_OF}}
    if cause == "age":
        assert buy(sure) == buy(sure, (runs, profiles, probes)) == []
        old = runs["cluster"].str.contains("medium")
        runs.loc[old, "measured_at"] = AS_OF - timedelta(hours=1000)
        history = {"stale_before": AS_OF - timedelta(hours=10)}
    bought = list(runs_of(buy(sure, (runs, profiles, probes), history=history)))
    assert bought and all("medium" in run.members for run in bought)


FOUR = offer("large", "spot", instance_type=replace(machine("large", devices=4), cores=0.8))
SMALL = offer("small", "spot")
JOB = workload("mlp", 64, 256)


def test_machines_are_measured_full_and_with_one_device():
    clusters = [Cluster(members=members) for members in ((FOUR,), (FOUR, FOUR), (FOUR, SMALL))]
    runs = training_runs([JOB], clusters, NOTHING, costs=Costs())
    assert {(run.cluster, run.devices) for run in runs} == {
        ("1xlarge", (4,)),
        ("1xlarge", (1,)),
        ("2xlarge", (4, 4)),
        ("1xlarge+1xsmall", (4, 1)),
    }
    full, single = ({run.batches for run in runs if run.devices == (n,)} for n in (4, 1))
    assert single <= full  # at the same batch a device


MODES = tuple(Mode(strategy=name) for name in ("ddp", "ddp-fp16", "ddp-mstopk"))
WANTED = [(replace(WORKLOADS[0], modes=MODES), mode, (3, 4)) for mode in MODES[1:]]


def test_learning_runs_take_the_cheapest_pair_and_two_thirds_of_the_caps():
    limits = replace(LIMITS, max_seconds=900.0)
    pairs = [Cluster.of((2, offer)) for offer in offers() if offer.market == "spot"]
    prices = {pair.name: pair.total_usd_per_hour for pair in pairs if not cores_fit(pair)}
    [launch] = learning_launches(limits, WANTED, offers())
    assert prices[launch.cluster.name] == min(map(float, filter(None, prices.values())))
    assert Counter(run.mode for run in launch.items) == dict.fromkeys(MODES, 2)
    assert {run.nodes for run in launch.items} == {(0, 1)}
    cheapest = launch.cluster.members[0]
    [fewer] = learning_launches(replace(limits, max_seconds=1.4 * launch.est_s), WANTED, [cheapest])
    assert {run.mode for run in fewer.items} == set(MODES[:2])
    assert (
        learning_launches(replace(limits, max_usd=0.9 * launch.est_usd), WANTED, [cheapest]) == []
    )


ROW = {
    "workload": "job",
    "cluster": f"2x{offers()[0].instance_type.name}",
    "layout": "1",
    "batch_per_device": "8",
    "accumulation_steps": 2,
    "step_s": 0.5,
    "precision": "bf16",
    "strategy": "ddp",
    "switches": "none",
}


def test_an_elastic_run_loses_a_machine_of_a_recommended_row():
    launch = elastic_launch(LIMITS, ROW, offers())
    assert [offer.market for offer in launch.cluster.members] == ["on-demand", "spot"]
    [run] = launch.items
    assert (run.kind, run.batches, run.accumulation_steps) == ("elastic", (8, 8), 2)
    assert run.steps == 10 * run.checkpoint_every == 60
    assert run.checkpoint_every * 0.5 < run.lose_after_s < 30
    assert launch.est_s == LIMITS.costs.billed_s(run.est_s) > 60 and launch.est_usd > 0
    assert elastic_launch(replace(LIMITS, fits=lambda _: "too large"), ROW, offers()) is None


@pytest.mark.parametrize(
    "change",
    [{"cluster": "1xsmall"}, {"cluster": float("nan")}, {"cluster": "2xnew"}, {"strategy": "fsdp"}],
)
def test_rows_that_cannot_lose_a_machine_have_no_elastic_run(change):
    assert elastic_launch(LIMITS, ROW | change, offers()) is None


def test_equal_seconds_at_all_batches_give_no_line():
    rows = pd.DataFrame({"batch": [16, 32, 64, 128], "forward_s": 0.1, "backward_s": 0.2})
    assert profiled_lines(rows.assign(workload="net", instance_type="small")) == {}
