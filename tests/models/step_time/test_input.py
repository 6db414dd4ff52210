"""What loading adds to a step: against a machine that shares its processor out in slices, and in a fitted model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.step_time.input import Loaders, Wait, separated
from models.step_time.machine_specs import Machine
from models.step_time.model import StepTimeModel, TrainingData, fit
from models.step_time.serialization import dump, load
from models.step_time.setup_arrays import read_setups
from tests.models.synthetic import TYPES, World

LINK: dict[str, Any] = {"bandwidth_gbps": 10.0, "prior_speed": 1.0}


def machine(cores: float, devices: int = 0) -> Machine:
    """With so many GPUs; with none its processors are the device."""
    device = {"device": "t4", "device_tflops": 8.0} if devices else {}
    return Machine(cores=cores, devices=devices or 1, **LINK, **device)


def waiting(
    one: Machine, *, load_s: float, wait_s: float = 0.0, workers: int = 2, batch: int = 10
) -> Wait:
    """Of a machine alone."""
    row = {
        "workload": "net",
        "cluster": "1xm",
        "layout": str(one.devices),
        "batch_per_device": str(batch),
    }
    setups = read_setups(pd.DataFrame([row]), {"m": one.devices})
    found = Loaders(workers={"net": workers}, samples={("net", "m"): (load_s, wait_s)}).wait(
        setups, {"m": one}
    )
    assert found is not None
    return found


def step(wait: Wait, rest_s: float, part: float = 1.0) -> float:
    return float(wait.step_s(np.array([rest_s]), np.array([part]))[0])


def sliced(rest_s: float, part: float, batch_s: float, workers: int) -> float:
    """Seconds of a step of one processor of which everybody who asks gets slices, two batches a worker in stock."""
    slice_s = rest_s / 400
    ready, queued, under_way = 0, 2 * workers, [0.0] * workers
    busy = [False] * workers
    now, ends = 0.0, []
    phase, left = "wait", 0.0
    while len(ends) < 60:
        if phase == "wait" and ready:
            ready, queued, phase, left = ready - 1, queued + 1, "compute", part * rest_s
        for one in range(workers):
            if not busy[one] and queued:
                queued, busy[one], under_way[one] = queued - 1, True, batch_s
        running = sum(busy) + (phase == "compute")
        for one in range(workers):
            if busy[one]:
                under_way[one] -= slice_s / running
                if under_way[one] <= 0:
                    busy[one], ready = False, ready + 1
        if phase == "compute":
            left -= slice_s / running
            if left <= 0:
                phase, left = "exchange", (1 - part) * rest_s
        elif phase == "exchange":
            left -= slice_s
        now += slice_s
        if phase == "exchange" and left <= 0:
            phase = "wait"
            ends.append(now)
    return (ends[-1] - ends[19]) / 40


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("part", [1.0, 0.6, 0.3])
@pytest.mark.parametrize("loading", [0.1, 0.4, 0.9, 2.0, 5.0])
def test_a_processor_that_trains_and_loads_takes_as_long_as_one_that_shares_itself_out(
    workers: int, part: float, loading: float
) -> None:
    expected = step(waiting(machine(1.0), load_s=loading / 10, workers=workers), 1.0, part)
    assert expected == pytest.approx(sliced(1.0, part, loading, workers), rel=0.03)


SECONDS = st.floats(1e-4, 10.0)
COUNTS = st.integers(1, 8)


@given(
    SECONDS, SECONDS, st.floats(0, 1), st.floats(0.1, 64), COUNTS, st.integers(0, 8), st.booleans()
)
def test_more_processors_or_devices_of_ones_own_never_make_it_slower_and_loading_never_makes_it_faster(
    rest_s: float, load_s: float, part: float, cores: float, devices: int, workers: int, gpu: bool
) -> None:
    def took(cores: float, load_s: float = load_s, rest_s: float = rest_s) -> float:
        one = machine(cores, devices if gpu else 0)
        return step(waiting(one, load_s=load_s, wait_s=0.3 * load_s, workers=workers), rest_s, part)

    slack = 1 + 1e-9
    assert took(2 * cores) <= took(cores) * slack
    assert rest_s <= took(cores) * slack and took(cores, load_s=0.0) == rest_s
    assert took(cores) <= took(cores, load_s=2 * load_s) * slack
    assert took(cores) <= took(cores, rest_s=1.5 * rest_s) * slack, (
        "else a bound of the rest were none of the step"
    )


@given(
    SECONDS,
    SECONDS,
    st.floats(0, 1),
    st.floats(-2, 2),
    st.floats(-2, 2),
    st.integers(0, 4),
    st.booleans(),
)
def test_of_a_pair_of_draws_the_geometric_mean_is_no_less_than_what_is_predicted(
    rest_s: float,
    load_s: float,
    part: float,
    rest_off: float,
    load_off: float,
    workers: int,
    gpu: bool,
) -> None:
    wait = waiting(machine(2.0, 2 if gpu else 0), load_s=load_s, wait_s=load_s, workers=workers)
    off = np.array([[rest_off, -rest_off]])
    drawn = wait.step_s(
        rest_s * np.exp(off),
        np.array([part]),
        factor=np.exp(np.array([[load_off, -load_off]])),
        about=np.array([rest_s]),
    )
    assert np.log(drawn).mean() >= np.log(step(wait, rest_s, part)) - 1e-9, (
        "the planner's bounds rely on it"
    )


def test_by_hand() -> None:
    gpu = machine(8.0, 4)  # 4 devices of 10 samples
    assert step(waiting(gpu, load_s=0.1, workers=0), 3.0) == pytest.approx(3.0 + 10 * 0.1)
    assert step(waiting(gpu, load_s=0.1, workers=0, wait_s=0.2), 3.0) == pytest.approx(
        3.0 + 10 * 0.3
    )
    assert step(waiting(gpu, load_s=0.1, workers=1), 0.1) == pytest.approx(10 * 0.1), (
        "by one worker each"
    )
    assert step(waiting(gpu, load_s=0.1, workers=9), 0.1) == pytest.approx(4 * 10 * 0.1 / 8), (
        "by eight processors"
    )
    assert step(waiting(gpu, load_s=0.1, workers=9), 0.6) == 0.6
    assert step(waiting(machine(0.2), load_s=0.1, workers=0), 3.0) == pytest.approx(
        3.0 + 10 * 0.1 / 0.2
    )


@pytest.mark.parametrize(
    ("one", "workers", "more"),
    [
        (machine(8.0, 4), 0, "loader workers"),
        (machine(8.0, 4), 1, "loader workers"),
        (machine(8.0, 4), 9, "processors"),
        (machine(0.4), 0, "processors"),
        (machine(0.4), 2, "processors"),
        (machine(0.3), 1, "processors"),
        (machine(8.0), 1, "loader workers"),
        (machine(8.0), 0, "loader workers"),
    ],
)
def test_what_would_help_is_named(one: Machine, workers: int, more: str) -> None:
    wait = waiting(one, load_s=1.0, workers=workers)
    assert wait.helped_by(np.array([1.0]), np.array([1.0])) == [more]
    assert waiting(one, load_s=0.0, workers=workers).helped_by(
        np.array([1.0]), np.array([1.0])
    ) == [""]


LOAD_S, WORKERS, SHARE = 0.006, 1, {name: cores for name, (cores, _) in TYPES.items()}


def truth(
    rest_s: float, sync_s: float, batches: list[int], types: list[str]
) -> tuple[float, float]:
    """(step_s, input_s) with a worker on each machine, by slices."""
    part = 1 - sync_s / rest_s
    steps = [
        sliced(rest_s, part, batch * LOAD_S / SHARE[name], WORKERS)
        for batch, name in zip(batches, types, strict=True)
    ]
    slowest = int(np.argmax(steps))
    loading = batches[slowest] * LOAD_S / SHARE[types[slowest]]
    return steps[slowest], max(0.0, steps[slowest] - rest_s - min(loading, part * rest_s))


def with_loader(data: TrainingData) -> TrainingData:
    """The world's data, in which `conv` has a loader that takes as long as its network, or longer."""
    runs = data.runs.copy()
    runs[["sync_s", "input_s", "loader_workers"]] = np.nan
    for at, row in runs[runs["workload"] == "conv"].iterrows():
        names = [part.split("x", 1) for part in str(row["cluster"]).split("+")]
        types = [name for count, name in names for _ in range(int(count))]
        shares = str(row["batch_per_device"]).split("+")
        batches = [
            int(one) * int(row["accumulation_steps"])
            for one in (shares if len(shares) > 1 else shares * len(types))
        ]
        rest_s = float(row["step_s"])
        sync_s = 0.3 * rest_s * (len(types) > 1)
        step_s, input_s = truth(rest_s, sync_s, batches, types)
        runs.loc[at, ["step_s", "sync_s", "input_s", "loader_workers"]] = (
            step_s,
            sync_s,
            input_s,
            WORKERS,
        )
    own = data.profiles["workload"] == "conv"
    made_s = np.where(
        own, LOAD_S * data.profiles["batch"] / data.profiles["instance_type"].map(SHARE), 0.0
    )
    profiles = data.profiles.assign(
        forward_s=data.profiles["forward_s"] + made_s,
        input_s=made_s,
        load_s=np.where(own, LOAD_S, np.nan),
        load_wait_s=np.where(own, 0.0, np.nan),
        loader_workers=np.where(own, WORKERS, np.nan),
    )
    return replace(data, runs=runs, profiles=profiles)


@pytest.fixture(scope="module")
def plain() -> TrainingData:
    return World(seed=5).data(count=40)


@pytest.fixture(scope="module")
def model(plain: TrainingData) -> StepTimeModel:
    return fit(with_loader(plain), seed=0, calibrated=None)


def asked(workload: str = "conv") -> pd.DataFrame:
    rows = [
        (cluster, batch)
        for cluster in ("1xs.small", "1xs.whole", "2xs.medium", "4xn.medium")
        for batch in (8, 24)
    ]
    return pd.DataFrame(
        [
            {"workload": workload, "cluster": cluster, "batch_per_device": str(batch)}
            for cluster, batch in rows
        ]
    )


def test_data_without_loaders_stay_the_very_same(plain: TrainingData) -> None:
    unloaded = replace(plain, profiles=plain.profiles.assign(load_s=None, loader_workers=None))
    for data in (plain, unloaded):
        found, loaders = separated(data)
        assert found is data and not loaders.workers


def test_what_is_measured_with_a_loader_is_taken_apart_as_it_came_about(
    plain: TrainingData,
) -> None:
    data, loaders = separated(with_loader(plain))
    assert loaders.workers == {"conv": WORKERS} and loaders.sample("conv", "s.small")[:2] == (
        LOAD_S,
        0.0,
    )
    own = plain.runs["workload"] == "conv"
    assert (data.runs["step_s"][own] / plain.runs["step_s"][own]).median() == pytest.approx(
        1.0, abs=0.1
    )
    assert (data.runs["step_s"][~own] == plain.runs["step_s"][~own]).all()
    assert data.profiles["forward_s"].to_numpy() == pytest.approx(
        plain.profiles["forward_s"].to_numpy()
    )


def test_steps_are_predicted_with_their_wait_which_is_named_as_the_limit(
    model: StepTimeModel,
) -> None:
    world, setups = World(seed=5), asked()
    found = model.predict(setups)
    for row, predicted in zip(setups.itertuples(), found.itertuples(), strict=True):
        count, name = str(row.cluster).split("x", 1)
        types, batch = [name] * int(count), int(str(row.batch_per_device))
        rest_s = world.step("conv", types, [batch] * len(types))
        step_s, _ = truth(rest_s, 0.3 * rest_s * (len(types) > 1), [batch] * len(types), types)
        assert predicted.step_s == pytest.approx(step_s, rel=0.2)
    assert set(found["bottleneck"]) == {"input"} and set(found["input_by"]) == {"processors"}
    parts = found["compute_s"] + found["exposed_communication_s"] + found["input_s"]
    assert parts.to_numpy() == pytest.approx(found["step_s"].to_numpy())
    assert (found["step_low_s"] < found["step_s"]).all() and (
        found["step_s"] < found["step_high_s"]
    ).all()
    others = model.predict(asked("lm"))
    assert (
        (others["input_s"] == 0).all()
        and (others["input_by"] == "").all()
        and "input" not in set(others["bottleneck"])
    )


def test_bounds_draws_and_moments_are_of_the_step_with_its_wait(model: StepTimeModel) -> None:
    setups = asked()
    arrays = read_setups(setups, dict.fromkeys(TYPES, 1))
    predicted = model.predict(setups)
    assert (model.least_seconds(arrays) <= predicted["step_s"]).all()
    assert (model.least_seconds(arrays) > predicted["step_s"] - 0.9 * predicted["input_s"]).any(), (
        "it has the wait too"
    )
    draws = np.log(model.draws(setups, count=2000, seed=1))
    mean, covariance, noise = model.joint(setups)
    assert mean == pytest.approx(np.log(predicted["step_s"].to_numpy()))
    assert draws.mean(axis=1) == pytest.approx(mean, abs=0.03)
    assert draws.std(axis=1) == pytest.approx(np.sqrt(np.diag(covariance) + noise), rel=0.35)
    inside = (predicted["step_low_s"].to_numpy()[:, None] < np.exp(draws)) & (
        np.exp(draws) < predicted["step_high_s"].to_numpy()[:, None]
    )
    assert inside.mean(axis=1) == pytest.approx(0.9, abs=0.05)
    assert np.exp(draws[:3]) == pytest.approx(model.draws(setups.iloc[:3], count=2000, seed=1)), (
        "whatever else is asked"
    )


def test_a_type_on_which_nobody_profiled_the_loader_is_doubted_more() -> None:
    samples = {("net", "a"): (0.01, 0.0), ("net", "b"): (0.012, 0.0)}
    unknown = Loaders(workers={"net": 1}, samples=samples)
    scaled = replace(unknown, fixed_s={"a": 0.02, "b": 0.02, "c": 0.04})
    (own, wider, known) = (
        one.sample("net", name) for one, name in ((unknown, "a"), (unknown, "c"), (scaled, "c"))
    )
    assert own[0] == 0.01 and wider[0] == pytest.approx(0.011) and known[0] == pytest.approx(0.022)
    assert own[2] < known[2] < wider[2]


def test_a_stored_model_knows_its_loaders_and_one_from_before_has_none(
    model: StepTimeModel,
) -> None:
    text = dump(model)
    assert dump(load(text)) == text
    pd.testing.assert_frame_equal(load(text).predict(asked()), model.predict(asked()))
