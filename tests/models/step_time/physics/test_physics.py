"""The physics of a setup: its slopes, its fit to hidden parameters, and models of nothing but imported runs."""

from __future__ import annotations

from dataclasses import astuple, replace
from functools import cache
from zlib import crc32

import numpy as np
import pandas as pd
import pytest

from models.domain.numeric import FloatArray
from models.domain.setup_table import SetupArrays, read_setups
from models.step_time import serialization
from models.step_time.machine_specs import read_machines
from models.step_time.model import StepTimeModel, TrainingData, fit
from models.step_time.physics.compute import fit_compute
from models.step_time.physics.ddp_timeline import (
    PARAMETER_NAMES,
    PARAMETER_SD,
    Buckets,
    StepParameters,
    default_buckets,
    fit_collectives,
)
from models.step_time.physics.physics import Physics, fit_physics
from models.step_time.physics.step_formula import NAMES, OWN_SD, SD, TYPE_SD
from tests.models.step_time.test_model import sound
from tests.models.synthetic import World

# relative speed, gigabit/s; each has four devices
TYPES = {"g.small": (1.0, 10.0), "g.large": (2.5, 25.0), "g.wide": (2.5, 100.0)}
# seconds of a step without samples, of a sample, and gradient bytes
WORKLOADS = {"conv": (0.05, 0.004, 1e8), "lm": (0.02, 0.012, 4.4e8), "mlp": (0.01, 0.0005, 2.4e8)}
BATCHES = (8, 16, 32, 64)
NUMBERS = ["step_s", "step_low_s", "step_high_s", "compute_s", "communication_s", "exposed_communication_s"]
INSTANCE_TYPES = pd.DataFrame(
    [
        {"provider": "ec2", "name": name, "devices": 4, "device": "cuda", "device_tflops": speed, "cores": 32}
        | {"bandwidth_gbps": gbps}
        for name, (speed, gbps) in TYPES.items()
    ]
)
NONE = pd.DataFrame()


def truth(workload: str, types: list[str], layout: list[int], batch: int) -> float:
    """Not the model's form: devices of a machine slow each other a little, half of compute hides communication."""
    base, sample, size = WORKLOADS[workload]
    alone = [
        (base + sample * batch) / TYPES[name][0] * (1 + 0.02 * (n - 1)) for name, n in zip(types, layout, strict=True)
    ]
    ranks, machines = sum(layout), len(layout)
    rate = 0.6 * 1.25e8 * min(TYPES[name][1] for name in types) if machines > 1 else 6e9
    sent = 2 * (ranks - 1) / ranks * size / rate + 1e-3 * (machines - 1)
    return max(alone) + max(0.0, sent - 0.5 * max(alone))


def random_runs(count: int, seed: int, least: int = 1, most: int = 6) -> pd.DataFrame:
    """`count` runs of up to `most` machines, mostly of one type, often with unequal layouts; 2 % noise."""
    random = np.random.default_rng(seed)
    rows = []
    for at in range(count):
        workload = list(WORKLOADS)[at % 3]
        machines = int(random.integers(least, most + 1))
        kinds = [str(one) for one in random.choice(sorted(TYPES), 2)]
        types = sorted(kinds[int(random.random() < 0.1)] for _ in range(machines))
        even = random.random() < 0.5
        layout = [int(one) for one in ([random.integers(1, 5)] * machines if even else random.integers(1, 5, machines))]
        batch = int(random.choice(BATCHES))
        rows.append(
            {
                "run_id": f"run-{at}",
                "provider": "ec2",
                "workload": workload,
                "cluster": "+".join(f"1x{name}" for name in types),
                "layout": "+".join(str(one) for one in layout),
                "batch_per_device": str(batch),
                "step_s": truth(workload, types, layout, batch) * float(np.exp(random.normal(0, 0.02))),
                "gradient_bytes": WORKLOADS[workload][2],
            }
        )
    return pd.DataFrame(rows)


def setups(frame: pd.DataFrame) -> SetupArrays:
    return read_setups(frame, {})


@cache
def closed() -> Physics:
    """The closed form at its prior; its compute is known, on "g.wide" with some doubt."""
    machines = read_machines(INSTANCE_TYPES, [])
    measured = [
        (workload, name, batch, (base + sample * batch) / TYPES[name][0], 0.2 if name == "g.wide" else 0.03)
        for workload, (base, sample, _) in WORKLOADS.items()
        for name in TYPES
        for batch in BATCHES
    ]
    alone = pd.DataFrame(measured, columns=["workload", "instance_type", "batch", "seconds", "sd"])
    return Physics(
        compute=fit_compute(pd.DataFrame(), alone, machines),
        collectives=fit_collectives(pd.DataFrame(), machines),
        buckets={name: default_buckets(size) for name, (_, _, size) in WORKLOADS.items()},
        machines=machines,
        profiled=frozenset(),
    )


def elsewhere(seed: int, far: float = 0.7) -> Physics:
    """The closed form at parameters drawn around the prior, which nobody is told."""

    def drawn(whose: str, drawn_at_all: FloatArray) -> FloatArray:
        # by name: a parameter more changes no other's draw
        each = [np.random.default_rng([seed, crc32(f"{whose} {name}".encode())]).normal() for name in NAMES]
        return np.asarray(far * np.array(each) * (drawn_at_all > 0), dtype=float)

    own = {name: drawn(name, OWN_SD) for name in WORKLOADS}
    by_type = {name: drawn(name, TYPE_SD) for name in TYPES}
    return replace(closed(), closed=drawn("all", SD), own=own, by_type=by_type)


def log_step(physics: Physics, asked: SetupArrays) -> FloatArray:
    return np.log(physics.at(asked).times.step_s)


def test_slopes_of_the_closed_form_are_what_a_moved_parameter_does() -> None:
    here, asked = elsewhere(3), setups(random_runs(30, 3))
    found, first, far = here.at(asked), len(PARAMETER_NAMES), 1e-3
    for at, move in enumerate(np.eye(len(NAMES))):
        ends = [log_step(replace(here, closed=here.closed + far * side * move), asked) for side in (1, -1)]
        assert found.shared[:, first + at] == pytest.approx((ends[0] - ends[1]) / (2 * far), rel=2e-3, abs=2e-4)
        moved = [{name: one + far * side * move for name, one in here.own.items()} for side in (1, -1)]
        ends = [log_step(replace(here, own=one), asked) for one in moved]
        assert found.own[:, at] == pytest.approx((ends[0] - ends[1]) / (2 * far), rel=2e-3, abs=2e-4)
        moved = [{name: one + far * side * move for name, one in here.by_type.items()} for side in (1, -1)]
        ends = [log_step(replace(here, by_type=one), asked) for one in moved]
        assert found.by_type[:, at] == pytest.approx((ends[0] - ends[1]) / (2 * far), rel=2e-3, abs=2e-4)
    own = np.array([here.own[name] for name in asked.workloads])
    by_type = np.array([here.by_type[name] for name in here.link_types(asked)])
    expected = found.shared[:, first:] @ here.closed + (found.own * own + found.by_type * by_type).sum(axis=1)
    assert found.offset == pytest.approx(expected)
    assert (found.shared[:, :first] == 0).all()


def test_slopes_of_the_timeline_too_and_each_workload_goes_by_its_own_form() -> None:
    world = World(2)
    data = world.data(40)
    machines = read_machines(data.instance_types, [])
    none = pd.DataFrame({"workload": [], "instance_type": [], "batch": [], "seconds": []})
    here = replace(
        closed(),
        compute=fit_compute(data.profiles, none, machines),
        collectives=fit_collectives(data.probes, machines),
        buckets={name: Buckets(size_bytes=(6e6, 4e6), ready=(0.5, 1.0)) for name in ("conv", "lm", "mlp", "embed")},
        machines=machines,
        profiled=frozenset({"conv", "lm", "mlp"}),
        parameters=StepParameters(collective_scale=1.3, contention=0.8, jitter=0.02),
    )
    asked = setups(data.runs)
    found, told = here.at(asked), np.array([name != "embed" for name in asked.workloads])
    for at, name in enumerate(PARAMETER_NAMES):
        logs = [np.log(getattr(here.parameters, name)) + side * 1e-3 * PARAMETER_SD[at] for side in (1, -1)]
        moved = [replace(here.parameters, **{name: float(np.exp(one))}) for one in logs]
        ends = [log_step(replace(here, parameters=one), asked) for one in moved]
        assert found.shared[:, at] == pytest.approx((ends[0] - ends[1]) / 2e-3, rel=0.02, abs=1e-3)
    assert (found.shared[~told, : len(PARAMETER_NAMES)] == 0).all() and (found.shared[told, 0] > 0).any()
    assert (found.own[told] == 0).all() and (found.shared[told, len(PARAMETER_NAMES) :] == 0).all()
    z = (np.log(astuple(here.parameters)) - np.log(astuple(StepParameters()))) / PARAMETER_SD
    assert found.offset[told] == pytest.approx(found.shared[told, : len(z)] @ z)
    together, apart = here.at(asked).times, here.at(asked.take(np.flatnonzero(~told))).times
    assert together.step_s[~told] == pytest.approx(apart.step_s)


def test_what_answers_to_communication_and_what_to_compute_make_the_whole_step() -> None:
    asked = setups(random_runs(30, 5))
    curves = {pair: replace(one, optimizer_s=0.02) for pair, one in closed().compute.curves.items()}
    slower = {pair: replace(one.scaled(1.001), origin=one.origin) for pair, one in curves.items()}
    here, after = (
        replace(elsewhere(5), own={}, compute=replace(closed().compute, curves=one)) for one in (curves, slower)
    )
    answer = (log_step(after, asked) - log_step(here, asked)) / np.log(1.001)
    assert here.at(asked).exposed == pytest.approx(1 - answer, abs=2e-3)
    assert (here.at(asked).exposed[asked.ranks == 1] < 1e-6).all()
    speed = [[TYPES[name][0] for name in one] for one in asked.types]
    assert all(one[at] == min(one) for one, at in zip(speed, here.at(asked).times.slowest, strict=True))


def from_rows(runs: pd.DataFrame, profiles: pd.DataFrame = NONE, devices: int = 4) -> StepTimeModel:
    types = INSTANCE_TYPES.assign(devices=devices)
    data = TrainingData(runs=runs, profiles=profiles, buckets=NONE, probes=NONE, workloads=NONE, instance_types=types)
    return fit(data, seed=0)


FRESH = random_runs(90, 2)


@cache
def clean() -> tuple[pd.DataFrame, StepTimeModel]:
    runs = random_runs(75, 1)
    return runs, from_rows(runs)


def off(predicted: pd.DataFrame) -> FloatArray:
    return np.abs(np.log(predicted["step_s"].to_numpy(float) / FRESH["step_s"].to_numpy(float)))


def test_imported_runs_alone_predict_unequal_layouts_and_mixed_types() -> None:
    predicted = clean()[1].predict(FRESH.drop(columns="step_s"))
    unequal = np.array([len(set(one.split("+"))) > 1 for one in FRESH["layout"]])
    mixed = np.array([len(set(one.split("+"))) > 1 for one in FRESH["cluster"]])
    assert unequal.sum() > 20 and mixed.sum() > 5 and sound(predicted)
    assert np.median(off(predicted)) < 0.06 and np.median(off(predicted)[unequal]) < 0.06
    assert np.median(off(predicted)[mixed]) < 0.12
    inside = (predicted["step_low_s"] <= FRESH["step_s"]) & (FRESH["step_s"] <= predicted["step_high_s"])
    assert inside.mean() > 0.75
    one = {"workload": "lm", "cluster": "2xg.large+1xg.small", "layout": "1+3+4", "batch_per_device": "16"}
    asked = clean()[1].predict(pd.DataFrame([one])).iloc[0]
    assert asked["step_s"] == pytest.approx(truth("lm", ["g.large", "g.large", "g.small"], [1, 3, 4], 16), rel=0.2)


def test_a_workload_of_one_row_is_predicted_with_more_doubt() -> None:
    runs = clean()[0]
    several = runs["workload"] != "lm"
    few = from_rows(pd.concat([runs[several], runs[~several].iloc[:1]])).predict(FRESH)
    own, full = (FRESH["workload"] == "lm").to_numpy(), clean()[1].predict(FRESH)
    widths = [np.log(one["step_high_s"] / one["step_low_s"])[own] for one in (few, full)]
    assert sound(few) and np.median(widths[0]) > 1.3 * np.median(widths[1])
    assert np.median(off(few)[~own]) < 0.06


def test_rows_of_a_single_batch_leave_the_others_in_doubt() -> None:
    runs = clean()[0]
    runs = runs[runs["batch_per_device"] == "32"]
    predicted = from_rows(runs).predict(FRESH)
    width, at = np.log(predicted["step_high_s"] / predicted["step_low_s"]), FRESH["batch_per_device"]
    assert sound(predicted) and np.median(width[at == "8"]) > np.median(width[at == "32"])


def test_rows_that_contradict_each_other_are_met_in_between() -> None:
    runs = clean()[0]
    twice = runs.assign(run_id=runs["run_id"] + "-again", step_s=2 * runs["step_s"])
    predicted = from_rows(pd.concat([runs, twice])).predict(FRESH)
    assert sound(predicted)
    assert 1.2 < np.median(predicted["step_s"] / FRESH["step_s"]) < 1.8
    same = from_rows(pd.concat([runs, runs.assign(run_id=runs["run_id"] + "-again")])).predict(FRESH)
    widths = [np.log(one["step_high_s"] / one["step_low_s"]).median() for one in (predicted, same)]
    assert widths[0] > 2 * widths[1]


def test_outliers_of_a_factor_of_ten_move_little() -> None:
    runs = clean()[0].copy()
    runs.loc[[3, 30], "step_s"] *= 10
    runs.loc[[17, 52], "step_s"] /= 10
    predicted = from_rows(runs).predict(FRESH)
    assert sound(predicted) and np.median(off(predicted)) < 0.07
    moved = np.abs(np.log(predicted["step_s"] / clean()[1].predict(FRESH)["step_s"]))
    assert np.median(moved) < 0.03


def test_steps_that_are_no_times_are_left_out() -> None:
    runs = clean()[0]
    bad = runs.iloc[:5].assign(step_s=[0.0, -1.0, np.nan, np.inf, -np.inf])
    assert serialization.dump(from_rows(pd.concat([bad, runs]))) == serialization.dump(clean()[1])


@pytest.mark.parametrize("seed", range(5))
def test_a_wider_link_of_any_type_never_slows_a_step(seed: int) -> None:
    here, asked = elsewhere(seed), setups(random_runs(60, seed))
    for name, machine in here.machines.items():
        for gbps in sorted({one.bandwidth_gbps for one in here.machines.values()}):
            narrow, wide = (  # just below each other type's, and just beyond it
                replace(here, machines={**here.machines, name: replace(machine, bandwidth_gbps=part * gbps)})
                for part in (0.99, 1.01)
            )
            assert (wide.seconds(asked) <= narrow.seconds(asked) * (1 + 1e-12)).all()
        # faster than a few devices drive too
        before = np.full(60, np.inf)
        for gbps in np.geomspace(5, 3200, 40):
            faster = {
                other: replace(one, bandwidth_gbps=400.0) for other, one in here.machines.items() if other != name
            }
            faster[name] = replace(machine, bandwidth_gbps=float(gbps))
            after = replace(here, machines=faster).seconds(asked)
            assert (after <= before * (1 + 1e-12)).all()
            before = after


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_parameters_that_nobody_was_told_are_found_well_enough_for_a_larger_cluster(seed: int) -> None:
    hidden, random = elsewhere(seed), np.random.default_rng(seed)
    seen, larger = setups(random_runs(200, seed)), setups(random_runs(90, seed + 10, 8, 16))
    measured = np.exp(log_step(hidden, seen) + random.normal(0, 0.02, 200))
    found = fit_physics(closed(), seen, measured)
    error = np.abs(log_step(found, larger) - log_step(hidden, larger))
    assert np.median(error) < 0.035 and np.quantile(error, 0.9) < 0.07
    before = np.median(np.abs(log_step(closed(), larger) - log_step(hidden, larger)))
    assert before > 0.1 and before > 4 * np.median(error)
    measured[random.choice(200, 6, replace=False)] *= 10
    moved = np.abs(log_step(fit_physics(closed(), seen, measured), larger) - log_step(found, larger))
    assert np.median(moved) < 0.02 and np.quantile(moved, 0.9) < 0.05


def test_a_workload_with_many_rows_counts_for_no_more_than_150_of_them() -> None:
    seen = random_runs(450, 4)  # 150 of each workload
    measured = np.exp(log_step(elsewhere(4), setups(seen)))
    again = np.flatnonzero((seen["workload"] == seen["workload"].iloc[0]).to_numpy())
    often = np.concatenate([np.arange(450), again, again])
    once, thrice = (fit_physics(closed(), setups(seen.iloc[at]), measured[at]) for at in (np.arange(450), often))
    assert np.abs(log_step(thrice, setups(seen)) - log_step(once, setups(seen))).max() < 1e-4


def profiles() -> pd.DataFrame:
    rows = []
    for workload, (base, sample, _) in WORKLOADS.items():
        for name, (speed, _) in TYPES.items():
            for batch in BATCHES:
                alone = (base + sample * batch) / speed
                row = {"forward_s": alone / 3, "backward_s": alone * 2 / 3, "optimizer_s": 0.0}
                rows.append({"workload": workload, "instance_type": name, "batch": batch, **row})
    return pd.DataFrame(rows)


def error(found: StepTimeModel, runs: pd.DataFrame) -> float:
    predicted = found.predict(runs.drop(columns="step_s"))
    return float(np.mean(np.abs(predicted["step_s"] / runs["step_s"] - 1)))


def test_a_profile_makes_clusters_of_several_devices_better_known() -> None:
    known, asked = random_runs(150, seed=3), random_runs(120, seed=4, least=2)
    with_profiles, without = (error(from_rows(known, one), asked) for one in (profiles(), NONE))
    assert with_profiles < 0.05 and with_profiles < 1.05 * without


def test_only_machines_of_one_device_go_by_the_timeline() -> None:
    runs = random_runs(12, seed=5).assign(layout="")
    assert from_rows(runs, profiles()).physics.profiled == frozenset()
    assert from_rows(runs, profiles(), devices=1).physics.profiled == frozenset(WORKLOADS)


def test_a_curve_that_was_profiled_is_kept() -> None:
    found = from_rows(random_runs(60, seed=3), profiles())
    one = pd.DataFrame([{"workload": "conv", "cluster": "1xg.small", "layout": "1", "batch_per_device": "32"}])
    assert found.predict(one)["compute_s"].iloc[0] == pytest.approx(0.05 + 0.004 * 32, rel=0.02)
