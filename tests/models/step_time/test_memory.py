"""What ran is never refused, what was profiled is measured, and the rest is bounded from facts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.domain.workload import Mode
from models.step_time import serialization
from models.step_time.machine_specs import Machine
from models.step_time.memory import MemoryModel, fit_memory
from models.step_time.model import fit
from models.step_time.setup_arrays import read_setups, variant
from tasks.data_files.backtest import read_training
from tests.models.synthetic import World

GIB = 2.0**30
DATA = Path(__file__).parents[4] / "shared" / "data"


def machine(gib: float | None) -> Machine:
    return Machine(cores=8, bandwidth_gbps=10, devices=1, prior_speed=1, device_memory_gib=gib)


MACHINES = {"a.16g": machine(16), "b.24g": machine(24), "c.unknown": machine(None)}


def ran(*rows: tuple[str, str, int]) -> pd.DataFrame:
    return pd.DataFrame(
        [{"workload": w, "cluster": f"1x{t}", "batch_per_device": str(b)} for w, t, b in rows],
        columns=["workload", "cluster", "batch_per_device"],
    )


def fitted(
    runs: pd.DataFrame,
    profiles: pd.DataFrame | None = None,
    gradient_bytes: dict[str, float] | None = None,
    flops: dict[str, float] | None = None,
) -> MemoryModel:
    return fit_memory(
        pd.DataFrame() if profiles is None else profiles,
        read_setups(runs, {}),
        MACHINES,
        gradient_bytes=gradient_bytes or {},
        flops_per_sample=flops or {},
        checkpoint_bytes={},
    )


def profiled(workload: str, instance_type: str, fixed: float, per_sample: float) -> pd.DataFrame:
    batches = np.array([8, 16, 32])
    return pd.DataFrame(
        {
            "workload": workload,
            "instance_type": instance_type,
            "batch": batches,
            "peak_bytes": fixed + per_sample * batches,
        }
    )


def test_a_profile_says_it_with_the_buckets_and_headroom_added() -> None:
    model = fitted(ran(), profiled("net", "a.16g", 1e9, 1e7), {"net": 4e7})
    assert model.peak_bytes("net", "a.16g", 100) == pytest.approx(1.075 * (1e9 + 1e9 + 4e7))
    large = fitted(ran(), profiled("net", "a.16g", 1e9, 1e8), {"net": 4e8})
    assert large.peak_bytes("net", "a.16g", 100) == pytest.approx(1.075 * (1e9 + 1e10 + 4e8))
    assert large.peak_bytes("net", "a.16g", 100, accumulates=True) == pytest.approx(
        1.075 * (1e9 + 1e10 + 2 * 4e8)
    )


def peaks(fixed: float, gradients: float, sample: float, mode: Mode = Mode()) -> MemoryModel:
    """A workload of Adam whose one-device profiles are `fixed` and the larger of gradients and activations."""
    batch = np.array([8, 16, 32])
    name = variant("net", mode)
    frame = pd.DataFrame({"workload": name, "instance_type": "a.16g", "batch": batch})
    return fitted(
        ran(),
        frame.assign(peak_bytes=fixed + np.maximum(gradients, sample * batch)),
        {name: gradients},
    )


@pytest.mark.parametrize("sample", [1e6, 2e7, 3e7, 1e8])
def test_gradients_and_activations_are_distinguished_by_where_peaks_rise_with_the_batch(
    sample: float,
) -> None:
    model = peaks(4e9, 4e8, sample)
    for batch in (8, 16, 32, 64):
        alone = 4e9 + max(4e8, sample * batch)
        predicted = model.peak_bytes("net", "a.16g", batch) / 1.075 - 4e8
        assert (
            alone * (1 - 1e-6)
            <= predicted
            <= alone + (4e8 if sample == 1e6 and batch > 32 else 1e-6 * alone)
        )


def test_what_ranks_share_is_less_the_more_they_are_and_what_each_gathers_stays() -> None:
    gradients, sample = 8e9, 4e8  # which weigh as much as each other between batches of 16 and 32
    modes = {name: Mode(strategy=name) for name in ("ddp", "fsdp", "zero2", "zero1")}
    models = {
        name: peaks(1e9 + 3 * gradients, gradients, sample, mode) for name, mode in modes.items()
    }

    def peak(name: str, ranks: int, **steps: bool) -> float:
        return (
            models[name].peak_bytes(variant("net", modes[name]), "a.16g", 16, ranks, **steps)
            / 1.075
        )

    assert peak("ddp", 8) == peak("ddp", 1) == pytest.approx(1e9 + 5 * gradients)
    # a gigabyte of context, an eighth of weights and states, activations, five or three groups of weights
    own = 1e9 + 3 * gradients / 8 + 16 * sample
    assert peak("fsdp", 8) == pytest.approx(own + 5 * gradients / 8, rel=1e-6)
    assert peak("zero2", 8) == pytest.approx(own + 7 / 8 * gradients + 3 * gradients / 8, rel=1e-6)
    assert peak("zero1", 8) == pytest.approx(peak("ddp", 8) - 7 / 8 * 2 * gradients, rel=1e-6), (
        "Adam's two moments"
    )
    assert peak("zero1", 1) == peak("ddp", 1) and peak(
        "zero1", 8, accumulates=True
    ) == pytest.approx(peak("ddp", 8, accumulates=True) - 7 / 8 * 2 * gradients)
    for name in ("fsdp", "zero2"):
        shared = [peak(name, ranks) for ranks in (2, 4, 8, 16)]
        assert shared == sorted(shared, reverse=True)
        assert peak(name, 8, accumulates=True) == pytest.approx(peak(name, 8) + gradients)


@pytest.mark.parametrize("strategy", ["fsdp", "zero2"])
def test_what_is_offloaded_needs_no_more_on_the_device_and_fits_where_its_states_would_not(
    strategy: str,
) -> None:
    gradients, sample = 8e9, 4e8
    stays, goes = Mode(strategy=strategy), Mode(strategy=strategy, switches="offload")
    models = {mode: peaks(1e9 + 3 * gradients, gradients, sample, mode) for mode in (stays, goes)}

    def peak(mode: Mode, batch: int, ranks: int, **steps: bool) -> float:
        return models[mode].peak_bytes(variant("net", mode), "a.16g", batch, ranks, **steps) / 1.075

    kept = {"fsdp": 3.0, "zero2": 2.0}[
        strategy
    ]  # times the weights; whole ones stay gathered on each under zero2
    for ranks in (2, 4, 8):
        moving = (
            gradients / 4 / ranks
        )  # an eighth of weights, and of gradients, of which each moves its part
        for batch in (1, 16, 64):
            summed = max(gradients / ranks - batch * sample, 0.0)
            less = peak(stays, batch, ranks) - peak(goes, batch, ranks)
            assert less == pytest.approx(kept * gradients / ranks + summed - moving) and less > 0
            less = peak(stays, batch, ranks, accumulates=True) - peak(
                goes, batch, ranks, accumulates=True
            )
            assert less == pytest.approx(kept * gradients / ranks - moving), (
                "gradients are whole till the last step"
            )
    if strategy == "fsdp":
        assert 1.075 * peak(goes, 16, 2) < 16 * GIB < 1.075 * peak(stays, 16, 2)


def test_a_run_that_was_offloaded_says_no_less_of_its_activations_than_its_device_holds() -> None:
    rows = {
        "workload": "net",
        "cluster": "4xa.16g",
        "batch_per_device": "8",
        "layout": "1",
        "strategy": "fsdp",
    }
    name = variant("net", Mode(strategy="fsdp", switches="offload"))
    model = fitted(pd.DataFrame([rows | {"switches": "offload"}]), None, {name: 2e10})
    assert model.peak_bytes(name, "a.16g", 8, 4) <= 16 * GIB
    assert model.facts[name][1] == pytest.approx(16 * GIB / 8)


def test_a_sharded_run_allows_its_batch_on_as_many_ranks_or_more() -> None:
    rows = pd.DataFrame(
        [
            {
                "workload": "net",
                "cluster": "4xa.16g",
                "batch_per_device": "8",
                "layout": "1",
                "strategy": "fsdp",
            }
        ]
    )
    name = variant("net", Mode(strategy="fsdp"))
    model = fitted(rows, None, {name: 2e10})
    assert (
        model.peak_bytes(name, "a.16g", 8, 4) <= 16 * GIB
        and model.peak_bytes(name, "a.16g", 8, 8) <= 16 * GIB
    )
    assert (
        model.peak_bytes(name, "a.16g", 8, 2) > 16 * GIB
        and model.peak_bytes(name, "a.16g", 9, 4) > 16 * GIB
    )
    assert model.peak_bytes(name, "a.16g", 8, 4, accumulates=True) > 16 * GIB


def test_another_type_takes_the_largest_that_was_profiled_and_nobody_knows_a_stranger() -> None:
    both = pd.concat([profiled("net", "a.16g", 1e9, 1e6), profiled("net", "b.24g", 2e9, 5e5)])
    model = fitted(ran(), both)
    assert model.peak_bytes("net", "c.unknown", 1000) == pytest.approx(1.075 * (2e9 + 1e9))
    assert np.isnan(model.peak_bytes("stranger", "a.16g", 1))


@given(
    st.lists(
        st.tuples(st.sampled_from(["a.16g", "b.24g", "c.unknown"]), st.integers(1, 4096)),
        min_size=1,
        max_size=6,
    ),
    st.floats(0, 6e9),
    st.one_of(st.none(), st.floats(1e6, 1e13)),
)
def test_what_ran_is_never_refused(
    runs: list[tuple[str, int]], gradient_bytes: float, flops: float | None
) -> None:
    model = fitted(
        ran(*(("net", name, batch) for name, batch in runs)),
        None,
        {"net": gradient_bytes},
        {"net": flops or 0.0},
    )
    for name, batch in runs:
        gib = MACHINES[name].device_memory_gib
        assert gib is None or model.peak_bytes("net", name, batch) <= gib * GIB


def test_what_ran_in_one_micro_step_allows_several_of_as_much_less_as_gradients_weigh() -> None:
    model = fitted(ran(("net", "a.16g", 64)), None, {"net": 1e9})
    a = (16 * GIB - 2e9) / 64  # 237 MB a sample at most, so that a gigabyte is five samples
    several = [
        batch
        for batch in range(1, 65)
        if model.peak_bytes("net", "a.16g", batch, accumulates=True) <= 16 * GIB
    ]
    assert several == list(range(1, int(64 - 1e9 / a) + 1)) and several[-1] == 59
    frame = ran(("net", "a.16g", 64)).assign(accumulation_steps=2)
    assert (
        fitted(frame, None, {"net": 1e9}).peak_bytes("net", "a.16g", 64, accumulates=True)
        <= 16 * GIB
    )


def test_beyond_what_ran_is_refused_on_the_same_device_and_allowed_on_a_larger_one() -> None:
    model = fitted(ran(("net", "a.16g", 64)), None, {"net": 1e8})
    assert model.peak_bytes("net", "a.16g", 65) > 16 * GIB
    assert model.peak_bytes("net", "b.24g", 90) <= 24 * GIB


def test_operations_bound_what_no_run_has_shown() -> None:
    small = fitted(ran(("net", "a.16g", 1)), None, {"net": 1e8}, {"net": 1e9})
    assert small.peak_bytes("net", "a.16g", 500) < 16 * GIB  # 10 MB a sample
    shown = pd.concat([profiled("other", "a.16g", 1e9, 4e7)])
    heavier = fitted(ran(("net", "a.16g", 1)), shown, {"net": 1e8}, {"net": 1e9, "other": 1e9})
    assert (
        heavier.peak_bytes("net", "a.16g", 500) > 16 * GIB
    )  # 40 MB an operation, as the profile shows


def test_a_fit_without_memory_figures_knows_nothing_and_survives_its_artifact() -> None:
    data = World(3).data(20)
    bare = replace(
        data, profiles=data.profiles.drop(columns="peak_bytes"), workloads=pd.DataFrame()
    )
    bare = replace(
        bare, runs=bare.runs.drop(columns=[c for c in ("flops_per_sample",) if c in bare.runs])
    )
    for model in (fit(data, seed=0), fit(bare, seed=0)):
        back = serialization.load(serialization.dump(model))
        for name in model.workloads:
            np.testing.assert_equal(
                back.peak_bytes(name, "s.small", 64), model.peak_bytes(name, "s.small", 64)
            )


@pytest.mark.skipif(not DATA.exists(), reason="needs the measured data beside the repository")
def test_every_measured_row_of_a_real_file_is_allowed() -> None:
    data, _ = read_training(
        DATA / "training_runs.csv",
        workloads=DATA / "workloads.csv",
        catalogue=DATA / "ec2_catalogue.csv",
    )
    few = replace(data, runs=data.runs.iloc[::9])
    model = fit(few, seed=0)
    most = data.runs["batch_per_device"].astype(str).str.split("+").str[0].astype(int)
    memory = (
        float(data.instance_types.set_index("name")["device_memory_gib"]["g4dn.12xlarge"]) * GIB
    )
    for workload, batch in most.iloc[::9].groupby(few.runs["workload"]).max().items():
        assert model.peak_bytes(str(workload), "g4dn.12xlarge", int(batch)) <= memory
        assert model.peak_bytes(str(workload), "g4dn.12xlarge", 1000 * int(batch)) > memory


def test_a_larger_gradient_never_makes_a_sample_smaller_than_its_operations_say() -> None:
    for gigabytes in (1.0, 2.2, 2.6, 4.0):
        model = fitted(ran(("net", "a.16g", 1)), None, {"net": gigabytes * 1e9}, {"net": 1e12})
        assert model.peak_bytes("net", "a.16g", 1) <= 16 * GIB  # it ran
        assert model.peak_bytes("net", "b.24g", 4) > 24 * GIB
