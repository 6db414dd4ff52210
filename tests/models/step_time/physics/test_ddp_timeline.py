"""The recursion on cases small enough to do by hand, and the all-reduce that it sends."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.step_time.machine_specs import Machine
from models.step_time.physics.ddp_timeline import (
    CollectiveModel,
    StepParameters,
    Timeline,
    default_buckets,
    fit_collectives,
    step_times,
)
from tests.models.synthetic import TYPES, World

PLAIN = StepParameters(collective_scale=1.0, contention=1.0, ddp_byte_cpu_s=0.0, ddp_cpu_s=0.0, jitter=0.0)
MODELS = st.builds(
    CollectiveModel,
    alpha_s=st.floats(0, 1e-2),
    base_cpu_s=st.floats(0, 1e-2),
    message_cpu_s=st.floats(0, 1e-2),
    byte_cpu_s=st.floats(0, 1e-7),
    efficiency=st.floats(0.5, 0.99),
    sharpness=st.floats(1, 8),
)
SIZES, RANKS = st.floats(0, 1e9), st.integers(1, 64)
GBPS, CORES = st.floats(0.05, 100), st.floats(0.05, 96)
MORE = st.floats(1, 100)
ROOM = 1 + 1e-9  # floating point


def line(
    *,
    before: list[float],
    backward: list[float],
    ready: list[float],
    collective_s: list[float],
    cpu_core_s: list[float] | None = None,
    cores: float = 1.0,
) -> Timeline:
    n = len(before)
    return Timeline(
        before=np.array([before]),
        backward=np.array([backward]),
        count=np.ones((1, n)),
        cores=np.full((1, n), cores),
        contended=np.ones((1, n)),
        ready=np.array([ready]),
        collective_s=np.array([collective_s]),
        cpu_core_s=np.array([cpu_core_s or [0.0] * len(ready)]),
        gradient_bytes=np.array([1e6]),
        ranks=np.array([float(n)]),
        distance=np.zeros(1),
    )


def step(timeline: Timeline, parameters: StepParameters = PLAIN) -> float:
    return float(step_times(timeline, parameters).step_s[0])


def test_a_bucket_starts_when_it_is_ready_and_the_stream_is_free() -> None:
    # ready at 1 + 0.5 x 2 and 1 + 2; the first ends at 2 + 1.5, so the second runs from 3.5 to 4.5
    assert step(line(before=[1, 1], backward=[2, 2], ready=[0.5, 1], collective_s=[1.5, 1.0])) == pytest.approx(4.5)


def test_communication_that_hides_costs_nothing_and_the_rest_is_exposed() -> None:
    hidden = step_times(line(before=[1, 1], backward=[2, 2], ready=[0.1, 0.2], collective_s=[0.1, 0.1]), PLAIN)
    assert hidden.step_s[0] == pytest.approx(3.0) and hidden.communication_s[0] == pytest.approx(0.2)


def test_the_latest_rank_decides() -> None:
    times = step_times(line(before=[1, 3], backward=[2, 2], ready=[1.0], collective_s=[1.0]), PLAIN)
    assert times.step_s[0] == pytest.approx(6.0)
    assert times.slowest[0] == 1 and times.mean_compute_s[0] == pytest.approx(4.0)


def test_communication_takes_its_cpu_from_backward() -> None:
    # over 1 s of communication 0.4 core seconds are taken from a host of half a core: 0.8 s of its backward
    taken = line(before=[0, 0], backward=[4, 4], ready=[0.25], collective_s=[1.0], cpu_core_s=[0.4], cores=0.5)
    assert step(taken) == pytest.approx(4.8)


@given(
    st.lists(st.floats(0.01, 5), min_size=2, max_size=4),
    st.lists(st.tuples(st.floats(0, 1), st.floats(0.001, 3), st.floats(0, 1)), min_size=1, max_size=4),
    st.floats(1.0, 20.0),
    st.floats(0.2, 1.0),
)
def test_a_step_is_no_shorter_than_its_parts_and_slower_links_never_shorten_it(
    backward: list[float], buckets: list[tuple[float, float, float]], slower: float, cores: float
) -> None:
    ready = sorted(one for one, _, _ in buckets)
    seconds = [max(wall, cpu / cores) for _, wall, cpu in buckets]
    cpu = [one for _, _, one in buckets]
    before = [0.5] * len(backward)

    def at(factor: float) -> float:
        return step(
            line(
                before=before,
                backward=backward,
                ready=ready,
                collective_s=[factor * one for one in seconds],
                cpu_core_s=cpu,
                cores=cores,
            )
        )

    here = at(1.0)
    assert here >= 0.5 + max(backward) - 1e-9
    assert here >= sum(seconds) - 1e-9
    assert here <= 0.5 + max(backward) + sum(seconds) + sum(cpu) / cores + 1e-9
    assert at(slower) >= here * (1 - 1e-9)


def test_default_buckets_are_those_of_ddp() -> None:
    mib = float(1 << 20)
    assert default_buckets(30 * mib).size_bytes == (mib, 25 * mib, 4 * mib)
    assert default_buckets(30 * mib).ready == pytest.approx((1 / 30, 26 / 30, 1.0))
    assert default_buckets(0).size_bytes == ()


def test_a_collective_is_no_quicker_than_the_cpu_it_takes() -> None:
    # twice 0.4 core seconds on half a core are 1.6 s, longer than the probe's 1 s
    timeline = line(before=[0, 0], backward=[1, 1], ready=[1.0], collective_s=[1.0], cpu_core_s=[0.4], cores=0.5)
    doubled = StepParameters(collective_scale=1.0, contention=2.0, ddp_byte_cpu_s=0.0, ddp_cpu_s=0.0, jitter=0.0)
    assert step(timeline, doubled) == pytest.approx(2.6)


def seconds(model: CollectiveModel, size: float, ranks: int, gbps: float, cores: float) -> float:
    return float(model.seconds(np.array(size), np.array(float(ranks)), np.array(gbps), np.array(cores)))


@given(MODELS, SIZES, RANKS, GBPS, CORES, MORE)
def test_more_bytes_never_cost_less_and_better_links_or_cores_never_more(
    model: CollectiveModel, size: float, ranks: int, gbps: float, cores: float, more: float
) -> None:
    here = seconds(model, size, ranks, gbps, cores)
    assert np.isfinite(here) and here >= 0
    assert seconds(model, size * more, ranks, gbps, cores) * ROOM >= here
    assert seconds(model, size, ranks, gbps * more, cores) <= here * ROOM
    assert seconds(model, size, ranks, gbps, cores * more) <= here * ROOM


@given(MODELS, SIZES, RANKS, st.integers(0, 64), GBPS, CORES)
def test_more_ranks_never_cost_less_and_one_rank_costs_nothing(
    model: CollectiveModel, size: float, ranks: int, extra: int, gbps: float, cores: float
) -> None:
    here = seconds(model, size, ranks, gbps, cores)
    assert seconds(model, size, ranks + extra, gbps, cores) * ROOM >= here
    assert seconds(model, size, 1, gbps, cores) == 0


@given(MODELS, SIZES, RANKS, GBPS, CORES)
def test_an_all_reduce_is_no_quicker_than_its_own_cpu(
    model: CollectiveModel, size: float, ranks: int, gbps: float, cores: float
) -> None:
    cpu = float(model.cpu_core_s(np.array(size), np.array(float(ranks)))) / cores
    assert seconds(model, size, ranks, gbps, cores) * ROOM >= cpu


def machines() -> dict[str, Machine]:
    return {
        name: Machine(cores=cores, bandwidth_gbps=gbps, devices=1, prior_speed=cores)
        for name, (cores, gbps) in TYPES.items()
    }


def test_probes_of_some_clusters_predict_larger_and_mixed_ones() -> None:
    world = World(3)
    probed = [["s.small"] * 2, ["n.medium"] * 2, ["s.large"] * 2, ["s.small"] * 3, ["s.whole", "s.medium"]]
    model = fit_collectives(world.probes(probed), machines())
    errors = []
    for types in (["s.small"] * 4, ["n.medium"] * 4, ["s.large", "s.small"], ["s.medium"] * 3, ["n.medium", "s.small"]):
        gbps, cores = min(TYPES[one][1] for one in types), min(TYPES[one][0] for one in types)
        for size in (1e6, 4e6, 16e6):
            truth = world.collective(types, size)[0]
            errors.append(abs(seconds(model, size, len(types), gbps, cores) / truth - 1))
    assert np.median(errors) < 0.08
    assert max(errors) < 0.3


def test_one_probe_out_by_a_factor_of_ten_hardly_moves_the_fit() -> None:
    probes = World(4).probes([["s.small"] * 2, ["n.medium"] * 3, ["s.large"] * 2])
    spoilt = probes.copy()
    spoilt.loc[3, "seconds"] *= 10
    clean, dirty = fit_collectives(probes, machines()), fit_collectives(spoilt, machines())
    for size in (1e6, 16e6):
        assert seconds(dirty, size, 4, 0.2, 0.2) == pytest.approx(seconds(clean, size, 4, 0.2, 0.2), rel=0.15)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan")])
def test_useless_probes_leave_the_prior(value: float) -> None:
    probes = pd.DataFrame([{"cluster": "2xs.small", "bytes": 1e6, "seconds": value}])
    assert fit_collectives(probes, machines()) == CollectiveModel()
    assert fit_collectives(pd.DataFrame(), machines()) == CollectiveModel()
