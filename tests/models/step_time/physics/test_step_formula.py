"""The closed form against what no step time may do, at its prior and at parameters far from it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.domain.numeric import FloatArray
from models.domain.setup_table import read_setups
from models.step_time.machine_specs import Machine
from models.step_time.physics.collectives import Wires
from models.step_time.physics.compute import ComputeModel, Curve
from models.step_time.physics.ddp_timeline import StepTimes
from models.step_time.physics.step_formula import MEAN, NAMES, OWN_SD, SD, ClosedLine, closed_times, lay_out_closed

MACHINES = {
    name: Machine(cores=cores, bandwidth_gbps=gbps, devices=8, prior_speed=speed)
    for name, cores, gbps, speed in (("slow", 8.0, 10.0, 1.0), ("quick", 32.0, 25.0, 3.0), ("wide", 96.0, 100.0, 3.5))
}
GRADIENT_BYTES = {"net": 1e8, "tiny": 1e4, "unknown": 0.0}
# What was learned of two machines against four may make more machines cheaper: the formula beneath it may not.
LEARNED = ("machines", "two", "two_devices", "devices", "imbalance", "two_imbalance", "machines_devices")
NEUTRAL = {**dict.fromkeys(LEARNED, 0.0), "log_driven": 60.0}  # one device drives any link
BATCHES = (4.0, 16.0, 64.0, 256.0)


def curve(factor: float, origin: str = "profile") -> Curve:
    total = [factor * (0.02 + 0.004 * one) for one in BATCHES]
    parts = {"forward_s": tuple(one / 3 for one in total), "backward_s": tuple(2 * one / 3 for one in total)}
    return Curve(batches=BATCHES, optimizer_s=0.003 * factor, origin=origin, **parts)


def compute() -> ComputeModel:
    # "quick" and "wide" of "tiny" and "unknown" were never run: filled in, hence doubted
    curves = {("net", name): curve(3.0 / one.prior_speed) for name, one in MACHINES.items()}
    curves |= {(name, "slow"): curve(1.0, "inferred") for name in ("tiny", "unknown")}
    return ComputeModel(curves=curves, machines=MACHINES)


def line(
    types: list[str],
    layout: list[int],
    *,
    batch: float | str = 16,
    accumulation: int = 1,
    workload: str = "net",
    machines: dict[str, Machine] = MACHINES,
) -> ClosedLine:
    row = {
        "workload": workload,
        "cluster": "+".join(f"1x{name}" for name in types),
        "layout": "+".join(str(one) for one in layout),
        "batch_per_device": batch if isinstance(batch, str) else f"{batch:g}",
        "accumulation_steps": accumulation,
    }
    setups = read_setups(pd.DataFrame([row]), {})
    return lay_out_closed(setups, compute=compute(), gradient_bytes=GRADIENT_BYTES, machines=machines)


def parameters(z: float | list[float] = 0.0, **fixed: float) -> FloatArray:
    """(1, parameters) with both the shared value and the workload's deviation at `z`, but for the `fixed` values."""
    values = MEAN + (SD + OWN_SD) * np.array(z)
    for name, value in fixed.items():
        values[NAMES.index(name)] = value
    return values[None, :]


def at_least(values: FloatArray, name: str, least: float) -> FloatArray:
    found = values.copy()
    found[0, NAMES.index(name)] = max(found[0, NAMES.index(name)], least)
    return found


def of(found: FloatArray) -> float:
    return float(found[0])


def wires(one: ClosedLine, values: FloatArray) -> Wires:
    return Wires(one, {name: values[:, at] for at, name in enumerate(NAMES)})


def exchange(one: ClosedLine, values: FloatArray) -> float:
    return of(wires(one, values).whole.seconds)


def last_bucket(one: ClosedLine, values: FloatArray) -> float:
    return of(wires(one, values).last.seconds)


def hidden_part(values: FloatArray) -> float:
    return 1 / (1 + float(np.exp(-values[0, NAMES.index("logit_hidden")])))


Z = st.lists(st.floats(-4, 4), min_size=len(NAMES), max_size=len(NAMES))
EXTREME = st.lists(st.sampled_from([-4.0, 4.0]), min_size=len(NAMES), max_size=len(NAMES))


def members(most: int) -> st.SearchStrategy[tuple[list[str], list[int]]]:
    """Types and devices used of up to `most` machines."""
    one = st.tuples(st.sampled_from(sorted(MACHINES)), st.integers(1, 8))
    return st.lists(one, min_size=1, max_size=most).map(
        lambda many: ([name for name, _ in many], [used for _, used in many])
    )


MEMBERS = members(5)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(MEMBERS, Z, st.floats(1.0, 50.0), st.floats(1, 2000))
def test_more_bandwidth_never_slows_a_step(
    cluster: tuple[list[str], list[int]], z: list[float], more: float, batch: float
) -> None:
    types, layout = cluster
    wider = {name: replace(one, bandwidth_gbps=one.bandwidth_gbps * more) for name, one in MACHINES.items()}
    values = parameters(z)
    before, after = (
        of(closed_times(line(types, layout, batch=round(batch), machines=one), values).step_s)
        for one in (MACHINES, wider)
    )
    assert after <= before * (1 + 1e-12)


def test_bandwidth_helps_between_machines_and_the_slowest_link_counts() -> None:
    quick, mixed, wide = (
        exchange(line(types, [1, 1]), parameters())
        for types in (["quick", "quick"], ["wide", "quick"], ["wide", "wide"])
    )
    assert quick == mixed > 1.5 * wide


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(1, 32), st.integers(1, 8), st.floats(1.01, 100), Z)
def test_an_exchange_never_gets_cheaper_with_more_bytes_or_more_ranks(
    machines: int, devices: int, more: float, z: list[float]
) -> None:
    # the same inside one machine, whose devices have a slope of their own; and bytes to a power that is not negative
    values = at_least(parameters(z, **dict.fromkeys(LEARNED, 0.0)), "inside_devices", 0.0)
    values = at_least(values, "bytes", -1.0)
    here = line(["slow"] * machines, [devices] * machines)
    least = exchange(here, values) * (1 - 1e-12)
    assert exchange(replace(here, gradient_bytes=here.gradient_bytes * more), values) >= least
    if machines > 1:
        assert exchange(line(["slow"] * (machines + 1), [devices] * (machines + 1)), values) >= least
    # devices more may drive more of the link, as learned
    values[0, NAMES.index("log_driven")] = NEUTRAL["log_driven"]
    least = exchange(here, values) * (1 - 1e-12)
    assert exchange(line(["slow"] * machines, [devices + 1] * machines), values) >= least
    if machines > 1:
        assert exchange(line(["slow"] * machines, [devices] * (machines - 1) + [devices + 1]), values) >= least


def test_a_ring_of_many_moves_twice_the_bytes_and_machines_add_latency() -> None:
    neutral = {**NEUTRAL, "bytes": 0.0, "log_gamma": 0.0}
    no_latency = parameters(log_alpha=-60.0, log_scale=0.0, **neutral)
    times = [exchange(line(["slow"] * n, [1] * n), no_latency) for n in (2, 64)]
    # 1e8 bytes at 10 Gbit/s are 0.08 s: 2 (n - 1)/n of it
    assert times == pytest.approx([0.08, 0.08 * 2 * 63 / 64])
    latency = parameters(log_alpha=0.0, log_scale=-60.0, **neutral)
    assert exchange(line(["slow"] * 8, [1] * 8), latency) == pytest.approx(8 * (1 + 1e8 / (25 << 20)))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(MEMBERS, Z, st.sampled_from(sorted(GRADIENT_BYTES)), st.integers(1, 8))
def test_a_step_lies_between_its_compute_and_compute_and_communication(
    cluster: tuple[list[str], list[int]], z: list[float], workload: str, accumulation: int
) -> None:
    types, layout = cluster
    here, values = line(types, layout, workload=workload, accumulation=accumulation), parameters(z)
    times = closed_times(here, values)
    step, alone, sent = of(times.step_s), of(times.compute_s), of(times.communication_s)
    assert step >= alone * (1 - 1e-12) and step >= sent * (1 - 1e-12)
    # of the last micro-step a part cannot hide anything, and nor can the optimizer and the micro-steps before it
    last = of(closed_times(replace(here, accumulation=np.ones(1), optimizer_s=0 * here.optimizer_s), values).compute_s)
    assert step >= (alone - hidden_part(values) * last + sent) * (1 - 1e-12)
    assert step <= (alone + sent) * (1 + 1e-12)
    if sum(layout) == 1:
        assert sent == 0 and step == pytest.approx(alone, rel=1e-12)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.sampled_from(sorted(MACHINES)), st.lists(st.integers(1, 8), min_size=1, max_size=4), st.integers(2, 16), Z)
def test_accumulating_costs_the_other_micro_steps_and_one_exchange(
    name: str, layout: list[int], accumulation: int, z: list[float]
) -> None:
    values, types = parameters(z), [name] * len(layout)
    one, many = (closed_times(line(types, layout, accumulation=s), values) for s in (1, accumulation))
    optimizer = compute().curve("net", name).optimizer_s
    others = (accumulation - 1) * (of(one.compute_s) - optimizer)
    assert of(many.step_s) - of(one.step_s) == pytest.approx(others, rel=1e-9)
    assert of(many.communication_s) == of(one.communication_s)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(MEMBERS, Z, st.integers(1, 4))
def test_of_unequal_machines_the_slowest_decides(
    cluster: tuple[list[str], list[int]], z: list[float], accumulation: int
) -> None:
    types, layout = cluster
    values = parameters(z)
    whole = closed_times(line(types, layout, accumulation=accumulation), values)
    alone = [
        of(closed_times(line([n], [d], accumulation=accumulation), values).compute_s)
        for n, d in zip(types, layout, strict=True)
    ]
    assert of(whole.compute_s) == pytest.approx(max(alone))
    assert alone[int(whole.slowest[0])] == pytest.approx(max(alone))
    assert of(whole.mean_compute_s) == pytest.approx(np.mean(alone))
    # the others waited for it: at half their time they wait longer, and nothing is gained
    plain = line(types, layout, accumulation=accumulation)
    plain = replace(plain, optimizer_s=0 * plain.optimizer_s)
    before = closed_times(plain, values)
    less = np.where(np.arange(len(types)) == before.slowest[0], 1.0, 0.5)
    after = closed_times(replace(plain, alone_s=less * plain.alone_s, fixed_s=less * plain.fixed_s), values)
    assert of(after.step_s) == pytest.approx(of(before.step_s))


def test_the_equation_by_hand_on_two_machines_of_seven_devices() -> None:
    # sigma 0.5, h = (6/3)^2, eta 1, c 0.25: T1 = 0.084 of at most 1.044 s, a = 0.02; half of it hides, p = 2
    by_hand = {
        "log_slowdown": np.log(0.5),
        "log_crowding": np.log(2),
        "slowdown_batch": 1,
        "log_contention": np.log(0.25),
    }
    values = parameters(**by_hand, logit_hidden=0.0, log_sharpness=0.0, log_scale=0.5)
    here = line(["quick"] * 2, [7, 7])
    times, sent = closed_times(here, values), exchange(here, values)
    micro = 0.084 * (1 + 0.5 * 4 * 0.084 / 1.044) + 0.25 * 0.02 * 2
    assert of(times.compute_s) == pytest.approx(micro + 0.003, rel=1e-6)
    assert 0.3 * micro < sent < 3 * micro
    last = last_bucket(here, values)
    assert 0 < last < 0.3 * sent  # 25 MiB of 100 MB, or less
    assert of(times.step_s) == pytest.approx(0.003 + micro / 2 + np.hypot(micro / 2, sent - last) + last, rel=1e-6)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(MEMBERS, Z, st.floats(1e3, 1e9), st.floats(1.01, 100))
def test_a_step_never_gets_quicker_with_more_bytes_and_its_last_bucket_is_never_hidden(
    cluster: tuple[list[str], list[int]], z: list[float], sent_bytes: float, more: float
) -> None:
    types, layout = cluster
    values = at_least(parameters(z), "bytes", -1.0)
    few = replace(line(types, layout), gradient_bytes=np.array([sent_bytes]))
    many = replace(few, gradient_bytes=np.array([sent_bytes * more]))
    before, after = (closed_times(one, values) for one in (few, many))
    assert of(after.step_s) >= of(before.step_s) * (1 - 1e-12)
    for one, times in ((few, before), (many, after)):
        assert of(times.step_s) >= (of(times.compute_s) + last_bucket(one, values)) * (1 - 1e-12)


def test_a_network_of_one_bucket_hides_nothing_and_a_large_one_nearly_all_but_its_last() -> None:
    values = parameters(log_last=0.0)
    busy = line(["wide"] * 2, [1, 1], batch=256)
    small, large = (replace(busy, gradient_bytes=np.array([size])) for size in (20e6, 400e6))
    times = closed_times(small, values)
    assert of(times.step_s) == pytest.approx(of(times.compute_s) + exchange(small, values), rel=1e-9)
    times = closed_times(large, values)
    exposed = of(times.step_s) - of(times.compute_s)
    assert last_bucket(large, values) < exposed < 0.3 * exchange(large, values)


def test_one_device_alone_is_as_it_was_measured_and_more_on_a_machine_slow_each_other_down() -> None:
    seconds = [of(closed_times(line(["quick"], [n]), parameters()).compute_s) for n in (1, 2, 4, 8)]
    assert seconds[0] == pytest.approx(0.02 + 0.004 * 16 + 0.003)
    assert seconds == sorted(seconds) and seconds[2] > 1.02 * seconds[0]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    members(64),
    EXTREME,
    st.sampled_from(sorted(GRADIENT_BYTES)),
    st.sampled_from([1, 16, 100_000]),
    st.integers(1, 64),
)
def test_every_time_is_finite_and_positive_at_extreme_parameters(
    cluster: tuple[list[str], list[int]], z: list[float], workload: str, batch: int, accumulation: int
) -> None:
    types, layout = cluster
    here = line(types, layout, batch=batch, accumulation=accumulation, workload=workload)
    times: StepTimes = closed_times(here, parameters(z))
    for found in (times.step_s, times.compute_s, times.mean_compute_s):
        assert np.isfinite(found).all() and (found > 0).all()
    assert np.isfinite(times.communication_s).all() and (times.communication_s >= 0).all()
    assert (times.communication_s > 0).all() == (sum(layout) > 1)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(MEMBERS, Z, st.integers(1, 3000), st.floats(1.01, 16), st.sampled_from(sorted(GRADIENT_BYTES)))
def test_a_step_grows_with_the_batch(
    cluster: tuple[list[str], list[int]], z: list[float], batch: int, more: float, workload: str
) -> None:
    types, layout = cluster
    values = parameters(z)
    larger = int(np.ceil(batch * more))
    lines = [line(types, layout, batch=one, workload=workload) for one in (batch, larger)]
    # however doubtful: a curve that bends by what was thought of it never falls
    for least in (0.0, 1.0):
        doubted = [replace(one, doubt=np.maximum(one.doubt, least)) for one in lines]
        steps = [of(closed_times(one, values).step_s) for one in doubted]
        assert steps[1] > steps[0]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(MEMBERS, Z, st.lists(st.integers(1, 3000), min_size=5, max_size=5), st.integers(0, 4), st.integers(2, 16))
def test_more_samples_for_one_machine_never_make_a_step_quicker(
    cluster: tuple[list[str], list[int]], z: list[float], batches: list[int], which: int, more: int
) -> None:
    types, layout = cluster
    shares = batches[: len(types)]
    larger = [one * (more if at == which % len(types) else 1) for at, one in enumerate(shares)]
    steps = []
    for each in (shares, larger):
        one = line(types, layout, batch="+".join(map(str, each)), workload="tiny")
        steps.append(of(closed_times(replace(one, doubt=np.maximum(one.doubt, 0.6)), parameters(z)).step_s))
    assert steps[1] >= steps[0] * (1 - 1e-12)


def test_a_workload_may_be_off_only_as_far_as_its_compute_is_doubted() -> None:
    level = {"level": 1.0, "tilt": 0.0}
    for name, workload in (("slow", "net"), ("quick", "tiny"), ("slow", "tiny")):
        here = line([name], [1], workload=workload)
        here = replace(here, optimizer_s=0 * here.optimizer_s)
        moved, middle = (of(closed_times(here, one).step_s) for one in (parameters(**level), parameters()))
        assert moved == pytest.approx(middle * np.exp(compute().curve_doubt(workload, name)))
    # what is lost in borrowing from another type is that type's, and not what the workload is off by everywhere
    assert (
        compute().doubt("tiny", "quick") > compute().curve_doubt("tiny", "quick") == compute().doubt("tiny", "slow") > 0
    )
