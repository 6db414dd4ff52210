"""A campaign with a model buys what may change a choice, groups it, counts the minimum, and stops by itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest

from models.appraisal import Appraisal
from models.campaign import Launch, Model, shopping_list
from models.cloud import Cluster
from models.contenders import contenders_of
from models.planner import candidates
from models.ranking import recommend
from models.wants import Costs, train_wants
from models.workload import Goal, Workload
from models.worth import Belief, choice
from tests.models.planning import (
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
from tests.models.test_campaign import measured, shop

GOALS = (Goal(goal="cheapest_within_deadline", hours=2.0), Goal(goal="fastest_within_budget", usd=0.1))
JOBS = [replace(one, goals=GOALS) for one in WORKLOADS]
PROFILES = measured(shop())[1]
ALL = frozenset(CORES)


def model(line: LineModel, jobs: Sequence[Workload] = JOBS, types: frozenset[str] = ALL, **changes: Any) -> Model:
    """Who contends by a model of one line, all of whose setups err by `line.own` each."""
    sold = [one for one in offers() if one.instance_type.name in types]
    found = {}
    for job in jobs:
        setups = candidates(job, sold, max_hosts=4, fits=cores_fit, line=lambda name: line.compute_line("", name))
        found[job.name] = contenders_of(job, setups, line.predict(frame(setups)))
    values: dict[str, Any] = {"contenders": found, "joint": line.joint, "types": types, "fresh": NOTHING}
    return Model(**(values | changes))


def buy(known: Model | None, **changes: Any) -> list[Launch]:
    asked: dict[str, Any] = {"max_usd": 1.0, "max_seconds": 450.0, "max_hosts": 4, "fits": cores_fit, "seed": 7}
    frames = changes.pop("frames", (NOTHING, PROFILES, NOTHING))
    return shopping_list(JOBS, changes.pop("sold", offers()), *frames, model=known, **(asked | changes))


SURE, UNSURE = LineModel(own=1e-4, shared=0.0), LineModel(own=0.15)


def test_the_campaign_stops_when_nothing_would_change_a_choice() -> None:
    assert buy(None), "without a model it measures for variety"
    assert buy(model(SURE)) == []
    assert buy(model(UNSURE)) != []


def test_every_line_says_which_choice_it_may_change_and_the_caps_hold() -> None:
    launches = buy(model(UNSURE))
    items = [item for launch in launches for item in launch.items]
    assert items and all("expected to change the choice of" in item.reason for item in items)
    assert any("fastest_within_budget in " in item.reason or "cheapest in " in item.reason for item in items)
    assert {item.kind for item in items} == {"train"}
    assert sum(launch.est_s for launch in launches) <= 450 and sum(launch.est_usd for launch in launches) <= 1.0
    assert buy(model(UNSURE)) == launches
    dear = buy(model(UNSURE), max_usd=0.0005)
    assert sum(launch.est_usd for launch in dear) <= 0.0005


def test_what_was_measured_since_the_model_was_fitted_is_told_to_it() -> None:
    known = model(UNSURE)
    first = buy(known)
    runs, _, _ = measured(first)
    expected = UNSURE.predict(runs)["step_s"].to_numpy()
    told = replace(known, fresh=runs.assign(step_s=expected))
    again = buy(told, frames=(runs, PROFILES, NOTHING))
    count = [sum(len(launch.items) for launch in launches) for launches in (first, again)]
    untold = buy(known, frames=(runs, PROFILES, NOTHING))
    assert count[1] < count[0] and again != untold


def test_a_workload_or_type_that_the_model_has_not_met_is_measured_for_variety_beside() -> None:
    met = [job for job in JOBS if job.name != "lm"]
    launches = buy(model(SURE, met))
    assert {item.workload for launch in launches for item in launch.items if item.kind == "train"} == {"lm"}
    without = model(SURE, types=ALL - {"whole"})
    launches = buy(without)
    trains = [(launch, item) for launch in launches for item in launch.items if item.kind == "train"]
    assert trains
    for launch, item in trains:
        assert "whole" in {launch.cluster.members[node].instance_type.name for node in item.nodes}
    unprofiled = PROFILES[PROFILES["workload"] != "lm"]
    first = buy(model(SURE, met), frames=(NOTHING, unprofiled, NOTHING))[0]
    assert "profile" in {item.kind for item in first.items}


def test_a_minimum_bill_is_counted_and_makes_launches_fewer_and_larger() -> None:
    sold = offers("spot")
    by_second, by_minute = (
        buy(model(UNSURE), sold=sold, max_usd=0.004, max_seconds=3600.0, costs=Costs(minimum_s=minimum))
        for minimum in (0.0, 120.0)
    )
    for launch in by_minute:
        assert launch.est_usd == pytest.approx(max(launch.est_s, 120.0) / 3600 * (launch.cluster.usd_per_hour or 0))
    assert sum(launch.est_usd for launch in by_minute) <= 0.004
    runs = [np.mean([len(launch.items) for launch in launches]) for launches in (by_second, by_minute)]
    assert runs[1] > runs[0]
    assert buy(model(UNSURE), sold=sold, max_usd=1e-4, costs=Costs(minimum_s=120.0)) == []


def test_contenders_are_the_best_of_each_cluster_and_the_choice_is_that_of_the_table() -> None:
    job = workload("mlp", 64, None, *GOALS)
    setups = candidates(job, offers(), max_hosts=4, fits=cores_fit, line=lambda name: UNSURE.compute_line("", name))
    predicted = UNSURE.predict(frame(setups))
    found = contenders_of(job, setups, predicted)
    assert [one.name for one in found.questions] == [
        "cheapest_within_deadline", "fastest_within_budget", "cheapest", "fastest"
    ]  # fmt: skip
    spread = np.log(1.1 / 0.9) / 2 / 1.645
    random = np.random.default_rng(1).standard_normal((len(setups), 400))
    table = recommend(job, setups, predicted, predicted["step_s"].to_numpy()[:, None] * np.exp(spread * random))
    mean, _, _ = UNSURE.joint(frame(found.setups))
    alone = Belief(mean=mean, covariance=spread**2 * np.eye(len(mean)), noise=np.full(len(mean), 1e-9))
    for asked in found.questions:
        assert 2 <= len(asked.places) <= 40
        first = next(row for row in table if row["goal"] == asked.name)
        mine = found.setups[asked.places[choice(asked, alone)]]
        assert mine.cluster.name == first["cluster"], asked.name
    hopeless = workload("mlp", 64, None, Goal(goal="cheapest_within_deadline", hours=1e-6))
    assert [one.name for one in contenders_of(hopeless, setups, predicted).questions] == ["cheapest", "fastest"]
    assert contenders_of(job, [], predicted.iloc[:0]).questions == ()


def test_a_launch_values_less_what_it_has_told_already_and_the_next_one_starts_from_there() -> None:
    known = model(replace(UNSURE, own=0.1, shared=0.3))
    clusters = [Cluster(members=(offer(name, "spot"),)) for name in CORES]
    wants = train_wants(JOBS, clusters, PROFILES, batches={}, expected_step=UNSURE.predict, costs=Costs())
    layouts = {name: machine(name).devices for name in CORES}
    judge = Appraisal.of(known.contenders, wants.values(), known.joint, types=ALL, layouts=layouts, fresh=NOTHING)
    valued = sorted((one for one in wants.values() if judge.value(one) > 0), key=judge.value, reverse=True)
    assert len(valued) >= 2
    first = valued[0]
    before = {one: judge.value(one) for one in valued}
    trial = judge.copy()
    trial.add(first)
    assert all(trial.value(one) <= before[one] for one in valued) and trial.value(first) < 0.1 * before[first]
    assert judge.value(first) == before[first], "a trial left its mark"
    trial.again()
    assert trial.value(first) == 0.0
    stranger = replace(first, members=("elsewhere",))
    assert judge.judges(first) and not judge.judges(stranger) and not judge.judges(replace(first, workload="new"))
    assert judge.value(replace(first, global_batch=7)) == 0.0  # not weighed


def test_runs_of_no_worth_are_never_bought_even_where_they_cost_nothing() -> None:
    launches = buy(model(UNSURE), costs=Costs(minimum_s=400.0))
    assert launches and all("expected to change" in item.reason for launch in launches for item in launch.items)
    assert pd.Series([launch.est_s for launch in launches]).max() < 400
