"""Sizing rules against steps with known overhead, and what no run can show."""

import math

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.planner.sizing import ScalingRule, size_workload
from tests.frames import data_of

ANY = (0.0, math.inf)
GIGABIT = 125e6
NOTHING = pd.DataFrame()
PROFILES = pd.DataFrame(
    [
        {"workload": "net", "instance_type": "a", "batch": batch, "peak_bytes": peak}
        | {"forward_s": 0.3 * step, "backward_s": 0.6 * step, "optimizer_s": 0.1 * step}
        for batch, step, peak in ((16, 0.28, 1.5e9), (32, 0.5, 2.5e9))
    ]
)


def row(cluster, batch, step_s, **changes):
    plain = {"provider": "local", "workload": "net", "cluster": cluster, "layout": ""}
    plain |= {"precision": "fp32", "strategy": "ddp", "switches": "none"}
    return plain | {"batch_per_device": str(batch), "step_s": step_s} | changes


def data(*rows, profiles=NOTHING, **of_a):
    a = {"name": "a", "devices": 1, "device": "cpu", "cores": 1.0, "device_memory_gib": 4.0}
    g = {"name": "g", "devices": 4, "device": "t4", "cores": 8.0, "bandwidth_gbps": 10.0}
    return data_of(
        runs=pd.DataFrame(rows),
        profiles=profiles,
        workloads=pd.DataFrame([{"workload": "net", "gradient_bytes": GIGABIT}]),
        instance_types=pd.DataFrame([a | {"bandwidth_gbps": 1.0} | of_a, g]),
    )


# one machine: 1.0 s for 64 samples, 0.52 s for 32; several machines take 0.1 s more
ALONE = [row("1xa", 64, 1.0), row("1xa", 32, 0.52), row("1xa", 16, 0.28)]
RUNS = [*ALONE, row("2xa", 32, 0.62), row("4xa", 16, 0.38)]


@given(st.floats(0.001, 10), st.floats(0.01, 100), st.integers(2, 64), st.integers(1, 99))
def test_rule_recovers_overhead(overhead, parallel, size, larger):
    rule = ScalingRule.through(overhead + parallel, size, overhead + parallel / size)
    assert (rule.overhead_s, rule.parallel_s) == pytest.approx((overhead, parallel), rel=1e-6)
    throughput = (overhead + parallel) / (larger * (overhead + parallel / larger))
    assert rule.efficiency(larger) == pytest.approx(throughput, rel=1e-6)


@given(st.floats(0.001, 10), st.floats(0.01, 100), st.floats(0.1, 0.99))
def test_largest_size_is_the_last_efficient_one(overhead, parallel, alpha):
    rule = ScalingRule(overhead, parallel)
    largest = rule.largest(alpha)
    assert largest == 1 or rule.efficiency(largest) >= alpha - 1e-6
    assert rule.efficiency(largest + 1) < alpha + 1e-6


def test_no_overhead_and_no_parallel_time():
    free, stuck = ScalingRule.through(1.0, 2, 0.45), ScalingRule.through(1.0, 2, 1.5)
    assert (free.largest(0.9), free.efficiency(100)) == (None, 1.0)
    assert (stuck.largest(0.9), stuck.largest(0.5), stuck.efficiency(4)) == (1, 2, 0.25)


def test_sizes_are_predicted_from_smaller_sizes_alone():
    found = size_workload(data(*RUNS), "net", batches=(64, 64))
    single, two, four = found["checks"]
    assert two["efficiency"] == pytest.approx(1 / (2 * 0.62))
    assert single["by_rule"] is None and two["by_rule"] is None
    ratio = 0.24 / 0.76  # O = 2 * 0.62 - 1
    assert four["by_rule"] == pytest.approx((1 + ratio) / (1 + 4 * ratio))
    [scaling] = found["scaling"]
    assert scaling["measured_size"] == 4 and scaling["micro_batch"] is None


def test_batches_are_composed_of_micro_steps_only_if_none_was_measured():
    runs = [row("1xa", 8, 0.16), row("2xa", 8, 0.2), row("4xa", 8, 0.24)]
    checks = size_workload(data(*runs), "net", batches=ANY)["checks"]
    assert [(check["global_batch"], check["micro_batch"]) for check in checks] == [(32, 8)] * 3
    steps = [check["step_s"] for check in checks]
    assert steps == pytest.approx([4 * 0.16, 0.16 + 0.2, 0.24])
    nothing = size_workload(data(*RUNS), "net", batches=(48, 48))
    assert not nothing["scaling"] and nothing["unknown"][0]["batches"] == [16, 32, 64]


def test_bandwidth_and_servers_that_hide_the_exchange():
    measured = data(*RUNS, profiles=PROFILES)
    [row] = size_workload(measured, "net", batches=(64, 64))["scaling"]
    assert row["workers"] == 4 and row["hideable_s"] == pytest.approx(0.6 * 0.25)
    assert row["needed_gbps"] == pytest.approx(1.5 / 0.15)  # 2 * 3/4 of a gigabit
    assert row["servers"] == math.ceil(2 * 4 / 0.25)  # at one gigabit per second
    [unknown] = size_workload(data(*RUNS, bandwidth_gbps=None), "net", batches=(64, 64))["scaling"]
    assert unknown["needed_gbps"] > 0
    assert unknown["stated_gbps"] is None and unknown["servers"] is None


def test_best_batch_is_the_fastest_that_fits():
    [best] = size_workload(data(*RUNS, profiles=PROFILES), "net", batches=ANY)["best_batch"]
    assert (best["batch"], best["samples_per_s"]) == (64, 64.0)
    small = data(row("1xa", 8, 0.16), profiles=PROFILES, device_memory_gib=2.0)
    [best] = size_workload(small, "net", batches=ANY)["best_batch"]
    assert (best["batch"], best["peak_bytes"]) == (16, 1.5e9)


def test_modes_are_separate_and_unequal_shares_are_ignored():
    others = [
        row("1xa", 64, 0.1, precision="bf16"),
        row("2xa", 32, 0.05, strategy="fsdp"),
        row("2xa", "32+64", 0.02),
    ]
    found = size_workload(data(*RUNS, *others), "net", batches=(64, 64))
    assert found["checks"] == size_workload(data(*RUNS), "net", batches=(64, 64))["checks"]
    assert [unknown["precision"] for unknown in found["unknown"]] == ["bf16"]


def test_devices_of_a_machine_and_machines_are_separate_scales():
    rows = [row("1xg", 8, 0.2 + 0.01 * each, layout=str(each)) for each in (1, 2, 4)]
    rows += [row("2xg", 8, 0.3, layout="4"), row("2xg", 8, 0.25, layout="1+1")]
    found = size_workload(data(*rows), "net", batches=ANY)
    assert [scaling["devices_each"] for scaling in found["scaling"]] == [0, 1, 4]
    inside, _, machines = found["scaling"]
    assert inside["largest_80"] == 4 and "servers" not in inside and machines["workers"] == 8
