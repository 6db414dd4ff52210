"""Setups that ran are never refused; profiles are measurements; facts give bounds."""

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.domain.workload import MODES, Mode
from models.step_time.dataset import workload_facts
from models.step_time.machine_specs import Machine
from models.step_time.memory import MemoryModel, fit_memory
from models.step_time.rows import WorkloadFacts
from models.step_time.setup_arrays import read_setups
from models.step_time.single_device import Transformer
from tests.benchmarks.held_out import DATA, transformer_data
from tests.models.step_time.cases import NONE, setup

PLAIN = MODES[0]
GIB, A, B = 2.0**30, "a.16g", "b.24g"
MACHINES = {
    name: Machine(cores=8, bandwidth_gbps=10, devices=1, prior_speed=1, device_memory_gib=gib)
    for name, gib in ((A, 16.0), (B, 24.0), ("c.unknown", 0.0))
}
NOTHING = setup().iloc[:0]


def fitted(runs=NOTHING, profiles=NONE, **facts):
    return fit_memory(profiles, read_setups(runs, {}), MACHINES, {"net": WorkloadFacts(**facts)})


def profiled(fixed, gradients, sample):
    batch = np.array([8, 16, 32])
    peak = fixed + np.maximum(gradients, sample * batch)
    frame = pd.DataFrame({"batch": batch, "peak_bytes": peak})
    return frame.assign(workload="net", instance_type=A)


@pytest.mark.parametrize("sample", [1e6, 2e7, 3e7, 1e8])
def test_gradients_and_activations_are_told_apart_by_where_peaks_rise(sample):
    model = fitted(profiles=profiled(4e9, 4e8, sample), gradient_bytes=4e8)
    for batch in (8, 16, 32, 64):
        alone = 4e9 + max(4e8, sample * batch)
        predicted = model.needs("net", PLAIN, A).peak_bytes(batch) / 1.075 - 4e8
        slack = 4e8 if sample == 1e6 and batch > 32 else 1e-6 * alone
        assert alone * (1 - 1e-6) <= predicted <= alone + slack
    assert np.isnan(model.needs("stranger", PLAIN, A).peak_bytes(1))


GRADIENTS, SAMPLE = 8e9, 4e8


def peak(mode, ranks, batch=16, **steps):
    """Of Adam, with a gigabyte of context; gradients weigh as much as 20 samples."""
    frame = profiled(1e9 + 3 * GRADIENTS, GRADIENTS, SAMPLE)
    model = fitted(profiles=frame, gradient_bytes=GRADIENTS)
    return model.needs("net", mode, A, ranks, **steps).peak_bytes(batch) / 1.075


def test_sharded_ranks_hold_less_the_more_they_are():
    ddp, fsdp, zero2, zero1 = (Mode(strategy=name) for name in ("ddp", "fsdp", "zero2", "zero1"))
    assert peak(ddp, 8) == peak(ddp, 1) == pytest.approx(1e9 + 5 * GRADIENTS)
    for name, copies in {
        "ddp-fp16": 0,
        "ddp-powersgd": 1,
        "adasum": 0.5,
        "adasum-delta": 2.5,
    }.items():
        more = peak(Mode(strategy=name), 8) - peak(ddp, 8)
        assert more == pytest.approx(copies * GRADIENTS)
    # context, an eighth of weights and states, activations; five or three groups of weights
    fixed = 1e9 + 3 * GRADIENTS / 8 + 16 * SAMPLE
    assert peak(fsdp, 8) == pytest.approx(fixed + 5 * GRADIENTS / 8)
    assert peak(zero2, 8) == pytest.approx(fixed + 7 / 8 * GRADIENTS + 3 * GRADIENTS / 8)
    for steps in ({}, {"accumulates": True}):
        saved = peak(ddp, 8, **steps) - peak(zero1, 8, **steps)
        assert saved == pytest.approx(7 / 8 * 2 * GRADIENTS)  # Adam's two moments
    for mode in (fsdp, zero2):
        assert peak(mode, 8, accumulates=True) == pytest.approx(peak(mode, 8) + GRADIENTS / 8)


@given(
    st.lists(
        st.tuples(st.sampled_from(sorted(MACHINES)), st.integers(1, 4096)), min_size=1, max_size=6
    ),
    st.floats(0, 6e9),
    st.one_of(st.just(0.0), st.floats(1e6, 1e13)),
)
def test_setups_that_ran_are_never_refused(runs, gradients, flops):
    rows = pd.concat([setup("net", f"1x{name}", batch) for name, batch in runs])
    model = fitted(rows, gradient_bytes=gradients, flops=flops)
    for name, batch in runs:
        gib = MACHINES[name].device_memory_gib
        assert not gib or model.needs("net", PLAIN, name).peak_bytes(batch) <= gib * GIB


def test_a_larger_batch_than_ran_is_refused_there_and_allowed_on_a_larger_device():
    model = fitted(setup("net", f"1x{A}", 64), gradient_bytes=1e9)
    assert model.needs("net", PLAIN, A).peak_bytes(65) > 16 * GIB
    assert model.needs("net", PLAIN, B).peak_bytes(78) <= 24 * GIB
    # a gigabyte of gradients takes the room of five samples
    needs = model.needs("net", PLAIN, A, accumulates=True)
    assert [needs.peak_bytes(b) <= 16 * GIB for b in (59, 60)] == [True, False]
    assert int(needs.largest_batch(16 * GIB)) == 59
    again = fitted(setup("net", f"1x{A}", 64, 2), gradient_bytes=1e9)
    assert again.needs("net", PLAIN, A, accumulates=True).peak_bytes(64) <= 16 * GIB


def test_a_batch_that_fitted_on_many_ranks_may_not_fit_on_few():
    model = fitted(setup("net", f"4x{A}", 64).assign(strategy="fsdp"), gradient_bytes=1e9)
    small, large = (model.needs("net", Mode(strategy="fsdp"), A, ranks) for ranks in (2, 4))
    assert large.peak_bytes(64) <= 16 * GIB < small.peak_bytes(64)


@pytest.mark.parametrize("accumulates", [False, True])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "adasum"])
@pytest.mark.parametrize("ran", [None, 8, 100])
def test_the_largest_batch_is_the_last_that_fits(strategy, accumulates, ran):
    rows = setup("net", f"1x{A}", ran) if ran else NOTHING
    frame = profiled(1e9 + 3 * GRADIENTS, GRADIENTS, SAMPLE)
    needs = fitted(rows, profiles=frame, gradient_bytes=GRADIENTS).needs(
        "net", Mode(strategy=strategy), A, 4, accumulates=accumulates
    )
    for gib in (1, 16, 24, 48, 64, 80):
        fitting = [batch for batch in range(1, 500) if needs.peak_bytes(batch) <= gib * GIB]
        assert int(needs.largest_batch(gib * GIB)) == max(fitting, default=0)


@pytest.mark.parametrize("strategy", ["fsdp", "zero2"])
def test_offloaded_states_leave_the_device(strategy):
    stays, goes = (Mode(strategy=strategy, switches=each) for each in ("none", "offload"))
    assert peak(goes, 4) < peak(stays, 4)


@pytest.mark.parametrize(
    ("precision", "switches", "layers"),
    [("bf16", "none", 24), ("fp32", "none", 48), ("bf16", "checkpointing", 1 + 2 * 24 / 34)],
)
def test_activations_of_a_transformer_are_those_of_its_layers(precision, switches, layers):
    shape = Transformer(parameters=1.3e9, layers=24, hidden=2048, sequence=1024)
    model, mode = fitted(transformer=shape, gradient_bytes=5e9), Mode(precision, "fsdp", switches)
    single, two, shared = (
        model.needs("net", mode, A, ranks).peak_bytes(batch)
        for batch, ranks in ((1, 8), (2, 8), (1, 64))
    )
    logits = 5 * (1.3e9 / 2048 - 12 * 24 * 2048) * 1024
    assert two - single == pytest.approx(34 * layers * 2048 * 1024 + logits) and shared < single


@pytest.mark.skipif(not DATA.exists(), reason="needs the published steps of ../shared")
def test_published_transformers_fit_and_most_do_not_with_twice_the_batch():
    data = transformer_data()
    model, runs = MemoryModel(workloads=workload_facts(data), lines={}, ran={}), data.runs
    room = runs["device"].str.extract(r"(\d+)GB")[0].astype(float)

    def fits(factor):
        peaks = [
            model.needs(
                row.workload,
                Mode(row.precision, row.strategy, row.switches),
                A,
                row.devices,
                accumulates=row.accumulation_steps > 1,
            ).peak_bytes(factor * row.batch_per_device)
            for row in runs.itertuples()
        ]
        return float((np.array(peaks) / GIB <= room).mean())

    assert fits(1) >= 0.95 and fits(2) < 0.5
