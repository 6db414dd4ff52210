"""The collective obeys physics whatever its parameters, and learns a provider's from its probes."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.communication import CollectiveModel, fit_collectives
from models.machines import Machine
from tests.models.synthetic import TYPES, World

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
