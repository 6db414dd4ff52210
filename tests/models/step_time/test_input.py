"""Loading: against a processor that is shared out in slices, and in a fitted model."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.domain.cluster import parse_cluster, parse_numbers
from models.step_time.input import Loaders, separate_loading
from models.step_time.machine_specs import Machine, read_machines
from models.step_time.model import fit
from models.step_time.setup_arrays import read_setups
from tests.models.step_time.cases import setup
from tests.models.synthetic import TYPES, World

LOAD_S, WORKERS, CORES = 0.006, 1, {name: cores for name, (cores, _) in TYPES.items()}


def machine(cores, gpus=0):
    device = {"device": "t4"} if gpus else {}
    return Machine(cores=cores, devices=gpus or 1, bandwidth_gbps=10.0, prior_speed=1.0, **device)


def waiting(host, load_s, wait_s=0.0, workers=2):
    """The wait of one machine with batches of ten samples a device."""
    row = setup("net", "1xm", 10).assign(layout=str(host.devices))
    loaders = Loaders(workers={"net": workers}, samples={("net", "m"): (load_s, wait_s)})
    return loaders.wait(read_setups(row, {}), {"m": host})


def step(wait, rest_s, compute_share=1.0):
    return float(wait.step_s(np.array([rest_s]), np.array([compute_share]))[0])


def sliced(rest_s, compute_share, batch_s, workers):
    """Seconds of a step on one processor in slices, with two batches a worker in stock."""
    slice_s = rest_s / 400
    ready, queued, left_s = 0, 2 * workers, [0.0] * workers
    busy, ends, now = [False] * workers, [], 0.0
    phase, left = "wait", 0.0
    while len(ends) < 60:
        if phase == "wait" and ready:
            ready, queued, phase, left = ready - 1, queued + 1, "compute", compute_share * rest_s
        for worker in range(workers):
            if not busy[worker] and queued:
                queued, busy[worker], left_s[worker] = queued - 1, True, batch_s
        running = sum(busy) + (phase == "compute")
        for worker in range(workers):
            if busy[worker]:
                left_s[worker] -= slice_s / running
                if left_s[worker] <= 0:
                    busy[worker], ready = False, ready + 1
        if phase == "compute":
            left -= slice_s / running
            if left <= 0:
                phase, left = "exchange", (1 - compute_share) * rest_s
        elif phase == "exchange":
            left -= slice_s
        now += slice_s
        if phase == "exchange" and left <= 0:
            phase = "wait"
            ends.append(now)
    return (ends[-1] - ends[19]) / 40


@pytest.mark.parametrize("workers", [1, 4])
@pytest.mark.parametrize("compute_share", [1.0, 0.6, 0.3])
@pytest.mark.parametrize("loading", [0.1, 0.9, 5.0])
def test_a_processor_that_trains_and_loads_takes_as_long_as_in_slices(
    workers, compute_share, loading
):
    found = step(waiting(machine(1.0), loading / 10, workers=workers), 1.0, compute_share)
    assert found == pytest.approx(sliced(1.0, compute_share, loading, workers), rel=0.03)


SECONDS = st.floats(1e-4, 10.0)


@given(SECONDS, SECONDS, st.floats(0, 1), st.floats(0.1, 64), st.integers(0, 8), st.integers(0, 4))
def test_processors_never_slow_a_step_and_loading_never_quickens_it(
    rest_s, load_s, compute_share, cores, workers, gpus
):
    def took(cores, load_s=load_s, rest_s=rest_s):
        wait = waiting(machine(cores, gpus), load_s, 0.3 * load_s, workers)
        return step(wait, rest_s, compute_share)

    most = took(cores) * (1 + 1e-9)
    assert took(2 * cores) <= most and rest_s <= most and took(cores, load_s=0.0) == rest_s
    assert took(cores) <= took(cores, load_s=2 * load_s) * (1 + 1e-9)
    assert took(cores) <= took(cores, rest_s=1.5 * rest_s) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("host", "workers", "wait_s", "rest_s", "expected"),
    [
        (machine(8.0, 4), 0, 0.2, 3.0, 3.0 + 10 * 0.3),
        (machine(8.0, 4), 1, 0.0, 0.1, 10 * 0.1),
        (machine(8.0, 4), 9, 0.0, 0.1, 4 * 10 * 0.1 / 8),
        (machine(8.0, 4), 9, 0.0, 0.6, 0.6),
        (machine(0.2), 0, 0.0, 3.0, 3.0 + 10 * 0.1 / 0.2),
    ],
)
def test_steps_by_hand(host, workers, wait_s, rest_s, expected):
    assert step(waiting(host, 0.1, wait_s, workers), rest_s) == pytest.approx(expected)


def truth(rest_s, sync_s, batches, types):
    """(step_s, input_s) with one worker a machine, in slices."""
    compute_share = 1 - sync_s / rest_s
    loads = [batch * LOAD_S / CORES[name] for batch, name in zip(batches, types, strict=True)]
    steps = [sliced(rest_s, compute_share, load, WORKERS) for load in loads]
    slowest = int(np.argmax(steps))
    hidden = min(loads[slowest], compute_share * rest_s)
    return steps[slowest], max(0.0, steps[slowest] - rest_s - hidden)


def with_loader(data):
    """The data, with a loader of `conv` that takes as long as its network or longer."""
    runs = data.runs.assign(sync_s=np.nan, input_s=np.nan, loader_workers=np.nan)
    for at, row in runs[runs["workload"] == "conv"].iterrows():
        types, rest_s = parse_cluster(row["cluster"]), row["step_s"]
        sync_s = 0.3 * rest_s * (len(types) > 1)
        batches = parse_numbers(row["batch_per_device"], len(types), "batch")
        batches = np.array(batches) * row["accumulation_steps"]
        step_s, input_s = truth(rest_s, sync_s, batches, types)
        columns = ["step_s", "sync_s", "input_s", "loader_workers"]
        runs.loc[at, columns] = step_s, sync_s, input_s, WORKERS
    conv = data.profiles["workload"] == "conv"
    cores = data.profiles["instance_type"].map(CORES)
    made_s = np.where(conv, LOAD_S * data.profiles["batch"] / cores, 0.0)
    profiles = data.profiles.assign(
        forward_s=data.profiles["forward_s"] + made_s,
        input_s=made_s,
        load_s=np.where(conv, LOAD_S, np.nan),
        load_wait_s=np.where(conv, 0.0, np.nan),
        loader_workers=np.where(conv, WORKERS, np.nan),
    )
    return replace(data, runs=runs, profiles=profiles)


PLAIN = World(seed=5).data(count=40)
SETUPS = pd.concat(
    [
        setup("conv", cluster, batch)
        for cluster in ("1xs.small", "1xs.whole", "2xs.medium", "4xn.medium")
        for batch in (8, 24)
    ],
    ignore_index=True,
)


@pytest.fixture(scope="module")
def model():
    return fit(with_loader(PLAIN), seed=0)


def test_loading_is_separated_from_measurements():
    machines = read_machines(PLAIN.instance_types, ())
    found, loaders = separate_loading(PLAIN, machines)
    assert found is PLAIN and not loaders.workers
    data, loaders = separate_loading(with_loader(PLAIN), machines)
    assert loaders.workers == {"conv": WORKERS}
    assert loaders.sample("conv", "s.small")[:2] == (LOAD_S, 0.0)
    conv, ratio = PLAIN.runs["workload"] == "conv", data.runs["step_s"] / PLAIN.runs["step_s"]
    assert ratio[conv].median() == pytest.approx(1.0, abs=0.1) and (ratio[~conv] == 1).all()
    assert np.allclose(data.profiles["forward_s"], PLAIN.profiles["forward_s"])


def test_steps_are_predicted_with_their_wait_which_is_the_bottleneck(model):
    world, found = World(seed=5), model.predict(SETUPS)
    for row, predicted in zip(SETUPS.itertuples(), found["step_s"], strict=True):
        types = parse_cluster(row.cluster)
        batches = [int(row.batch_per_device)] * len(types)
        rest_s = world.step("conv", types, batches)
        step_s, _ = truth(rest_s, 0.3 * rest_s * (len(types) > 1), batches, types)
        assert predicted == pytest.approx(step_s, rel=0.2)
    assert set(found["bottleneck"]) == {"input"} and set(found["input_by"]) == {"processors"}
    parts = found["compute_s"] + found["exposed_communication_s"] + found["input_s"]
    assert np.allclose(parts, found["step_s"])
    assert not model.predict(SETUPS.assign(workload="lm"))["input_s"].any()
