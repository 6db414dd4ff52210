"""Sizing rules: what is solved from measured steps, what is predicted from which, and what no run can tell."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.planner.sizing import (
    Rule,
    Scaling,
    Sizing,
    Work,
    efficiencies,
    series_of,
    size_workload,
)
from models.step_time.dataset import TrainingData

ANY = (0.0, math.inf)
BYTES = 125e6  # a gigabit
NOTHING = pd.DataFrame()


def row(cluster: str, batch: int | str, step_s: float, **changes: Any) -> dict[str, Any]:
    plain = {
        "provider": "local",
        "workload": "net",
        "cluster": cluster,
        "layout": "",
        "batch_per_device": str(batch),
    }
    return plain | {"accumulation_steps": 1, "step_s": step_s, "gradient_bytes": BYTES} | changes


def data(*rows: dict[str, Any], profiles: pd.DataFrame = NOTHING, **of_type: Any) -> TrainingData:
    a = {
        "name": "a",
        "devices": 1,
        "device": "cpu",
        "cores": 1.0,
        "bandwidth_gbps": 1.0,
        "device_memory_gib": 4.0,
    }
    types = [
        a | of_type,
        {"name": "g", "devices": 4, "device": "t4", "cores": 8.0, "bandwidth_gbps": 10.0},
    ]
    facts = pd.DataFrame([{"workload": "net", "gradient_bytes": BYTES}])
    return TrainingData(
        runs=pd.DataFrame(rows),
        profiles=profiles,
        buckets=NOTHING,
        probes=NOTHING,
        workloads=facts,
        instance_types=pd.DataFrame(types),
    )


def profile(
    batch: int, step_s: float, peak_bytes: float | None = None, **changes: Any
) -> dict[str, Any]:
    parts = {"forward_s": 0.3 * step_s, "backward_s": 0.6 * step_s, "optimizer_s": 0.1 * step_s}
    return {
        "workload": "net",
        "instance_type": "a",
        "batch": batch,
        **parts,
        "peak_bytes": peak_bytes,
    } | changes


def sized(measured: TrainingData, batches: tuple[float, float] = ANY) -> Sizing:
    return size_workload(measured, "net", batches=batches)


def only(measured: TrainingData, batches: tuple[float, float] = ANY) -> Scaling:
    (found,) = sized(measured, batches).scalings
    return found


# one machine takes 1.0 s for 64 samples, 0.52 for 32, 0.28 for 16, 0.16 for 8; several 0.1 s more
ALONE = {64: 1.0, 32: 0.52, 16: 0.28, 8: 0.16}
RUNS = [row("1xa", batch, step_s) for batch, step_s in ALONE.items()]
RUNS += [row("2xa", 32, 0.62), row("4xa", 16, 0.38)]


@given(
    overhead=st.floats(0.001, 10),
    parallel=st.floats(0.01, 100),
    size=st.integers(2, 64),
    asked=st.integers(1, 99),
)
def test_the_rule_recovers_overhead_and_parallel_time_and_says_what_they_make_of_any_size(
    overhead: float, parallel: float, size: int, asked: int
) -> None:
    rule = Rule.through(overhead + parallel, size, overhead + parallel / size)
    assert (rule.overhead_s, rule.parallel_s) == pytest.approx((overhead, parallel), rel=1e-6)
    throughputs = (overhead + parallel) / (asked * (overhead + parallel / asked))
    assert rule.efficiency(asked) == pytest.approx(throughputs, rel=1e-6)


@given(overhead=st.floats(0.001, 10), parallel=st.floats(0.01, 100), alpha=st.floats(0.1, 0.99))
def test_the_largest_size_of_an_efficiency_has_it_and_the_next_has_not(
    overhead: float, parallel: float, alpha: float
) -> None:
    rule = Rule(size=2, overhead_s=overhead, parallel_s=parallel)
    largest = rule.largest(alpha)
    assert largest is not None
    assert largest == 1 or rule.efficiency(largest) >= alpha - 1e-6
    assert rule.efficiency(largest + 1) < alpha + 1e-6


def test_without_overhead_nothing_limits_and_where_several_are_no_faster_than_one_one_is_best() -> (
    None
):
    free, stuck = Rule.through(1.0, 2, 0.45), Rule.through(1.0, 2, 1.5)
    assert (free.ratio, free.largest(0.9), free.efficiency(100)) == (0.0, None, 1.0)
    assert (stuck.ratio, stuck.largest(0.9), stuck.efficiency(4)) == (math.inf, 1, 0.25)
    assert stuck.largest(0.5) == 2, "two that are as fast as one are half as efficient"


def test_a_size_is_predicted_from_the_sizes_below_it_alone() -> None:
    checks = {one.size: one for one in only(data(*RUNS, row("8xa", 8, 0.26)), (64, 64)).checks}
    slower = {one.size: one for one in only(data(*RUNS, row("8xa", 8, 2.6)), (64, 64)).checks}
    assert [checks[size].efficiency for size in (1, 2)] == pytest.approx([1.0, 1 / (2 * 0.62)])
    assert checks[2].by_rule is None and checks[1].by_shares is None
    # from 2: O = 2 * 0.62 - 1 = 0.24, R = 0.24 / 0.76; from shares: 0.28 + 1.5 * 0.1
    assert checks[4].by_rule == pytest.approx((1 + 0.24 / 0.76) / (1 + 4 * 0.24 / 0.76))
    assert checks[4].by_shares == pytest.approx(1 / (4 * (0.28 + 1.5 * 0.1)))
    # from 4: 0.1 s at 3/4 of a ring's bytes makes 0.1167 at 7/8
    assert checks[8].by_shares == pytest.approx(1 / (8 * (0.16 + 0.1 * (7 / 8) / (3 / 4))))
    assert {size: (one.by_rule, one.by_shares) for size, one in checks.items()} == {
        size: (one.by_rule, one.by_shares) for size, one in slower.items()
    }
    assert slower[8].efficiency == pytest.approx(checks[8].efficiency / 10)


def test_what_one_ran_no_run_for_is_put_together_of_micro_steps_where_both_rules_are_the_same() -> (
    None
):
    measured = data(row("1xa", 8, 0.16), row("2xa", 8, 0.2), row("4xa", 8, 0.24))
    found = only(measured)
    assert (found.global_batch, found.micro_batch) == (32, 8)
    assert [(one.size, one.put_together) for one in found.checks] == [
        (1, True),
        (2, True),
        (4, False),
    ]
    assert [one.step_s for one in found.checks] == pytest.approx([4 * 0.16, 0.16 + 0.2, 0.24])
    assert found.checks[2].by_rule == pytest.approx(found.checks[2].by_shares)


def test_a_global_batch_that_ran_everywhere_comes_before_one_that_is_put_together() -> None:
    quick = row(
        "1xa", 16, 0.2
    )  # more samples a second than at once, so that only where it ran speaks for 64 at once
    measured = data(*(quick if one == RUNS[2] else one for one in RUNS), row("2xa", 16, 0.3))
    found = only(measured, (64, 64))
    assert (found.global_batch, found.micro_batch) == (64, None)
    assert not any(one.put_together for one in found.checks)


def test_the_global_batch_lies_between_what_is_asked_for_and_none_that_was_not_measured_is_made_up() -> (
    None
):
    measured = data(*RUNS, row("2xa", 16, 0.4))
    assert only(measured, (32, 32)).global_batch == 32
    found = sized(measured, (48, 48))
    assert not found.scalings and [one.batches for one in found.too_few] == [[8, 16, 32, 64]]


def test_the_largest_cluster_counts_measured_sizes_as_measured_and_says_where_measurements_end() -> (
    None
):
    found = only(data(*RUNS), (64, 64))
    half, most = found.largest
    assert (most.alpha, half.alpha) == (0.8, 0.9)
    assert (half.by_shares, most.by_shares) == (
        1,
        2,
    ) and not most.at_least  # 0.81 of two, 0.66 of four
    assert most.by_rule == found.rule.largest(0.8) == 2
    checked = only(data(*RUNS[:4], row("2xa", 32, 0.63), RUNS[5]), (64, 64)).largest[1]
    assert checked.by_shares == 1, "0.79 of two as measured, though four would have them at 0.85"
    endless = only(data(*RUNS[:4], row("2xa", 32, 0.5)), (64, 64)).largest[0]
    assert endless.by_rule is None and endless.by_shares == 2


def test_bandwidth_and_servers_that_hide_the_exchange_beside_what_was_measured() -> None:
    profiles = pd.DataFrame([profile(16, 0.28)])
    hiding = only(data(*RUNS, profiles=profiles), (64, 64)).hiding
    assert hiding is not None and (hiding.size, hiding.workers) == (4, 4)
    hideable = (
        0.6 * 0.28
    )  # of the measured step of 16 samples, the backward pass as it was profiled
    assert hiding.hideable_s == pytest.approx(hideable)
    assert hiding.needed_gbps == pytest.approx(1.5 / hideable)  # 2 * 3/4 of a gigabit
    assert hiding.exposed_s_at_stated == pytest.approx(1.5 - hideable)  # at one Gbit/s
    assert hiding.measured_exposed_s == pytest.approx(0.1)
    # four workers each send and receive a gigabit through servers of one Gbit/s, in 0.28 s
    assert (hiding.servers, hiding.servers_full_duplex) == (
        math.ceil(2 * 4 / 0.28),
        math.ceil(4 / 0.28),
    )
    ready = pd.DataFrame([{"workload": "net", "bucket": 0, "bytes": BYTES, "ready_fraction": 0.5}])
    later = only(replace(data(*RUNS, profiles=profiles), buckets=ready), (64, 64)).hiding
    assert later is not None and later.needed_gbps == pytest.approx(2 * hiding.needed_gbps)


def test_a_link_that_nobody_states_is_not_taken_for_another() -> None:
    hiding = only(data(*RUNS, bandwidth_gbps=None), (64, 64)).hiding
    assert hiding is not None and hiding.needed_gbps > 0
    assert (hiding.stated_gbps, hiding.exposed_s_at_stated, hiding.servers) == (None, None, None)


def test_the_best_batch_is_the_fastest_of_those_that_fit_with_the_largest_that_would() -> None:
    peaks = {8: 1.0e9, 16: 1.5e9, 32: 2.5e9}
    profiles = pd.DataFrame([profile(batch, ALONE[batch], peak) for batch, peak in peaks.items()])
    (found,) = sized(data(*RUNS, profiles=profiles)).best_batches
    assert (found.batch, found.samples_per_s) == (64, pytest.approx(64.0))
    assert found.largest_that_fits is not None and found.largest_that_fits >= 64
    (small,) = sized(
        data(row("1xa", 8, 0.16), profiles=profiles, device_memory_gib=2.0)
    ).best_batches
    assert small.batch == 16 and small.samples_per_s == pytest.approx(16 / 0.28), (
        "32 samples take 2.5 GB and more"
    )
    assert small.largest_that_fits is not None and 16 <= small.largest_that_fits < 32
    assert small.measured_peak_bytes == 1.5e9 and small.predicted_peak_bytes is not None
    assert small.predicted_peak_bytes >= small.measured_peak_bytes


def test_runs_of_other_modes_and_of_unequal_shares_are_not_mixed_in() -> None:
    others = [
        row("1xa", 64, 0.1, precision="bf16"),
        row("2xa", 32, 0.05, strategy="fsdp"),
        row("1xa+1xg", "32", 0.01, layout="1"),
        row("2xa", "32+64", 0.02),
        row("2xa", 32, 0.02, workload="other"),
    ]
    plain = {"precision": "fp32", "strategy": "ddp", "switches": "none"}
    found = sized(data(*(plain | one for one in [*RUNS, *others])), (64, 64))
    assert [one.workload for one in found.scalings] == ["net"]
    assert found.scalings[0].checks == only(data(*RUNS), (64, 64)).checks
    assert {one.workload for one in found.too_few} == {"net in bf16"}


def test_devices_of_one_machine_and_machines_of_equally_many_devices_are_series_of_their_own() -> (
    None
):
    rows = [row("1xg", 8, 0.2 + 0.01 * each, layout=str(each)) for each in (1, 2, 4)]
    rows += [row("2xg", 8, 0.3, layout="4"), row("2xg", 8, 0.25, layout="1+1")]
    found = sized(data(*rows)).scalings
    assert [(one.devices_each, [check.size for check in one.checks]) for one in found] == [
        (0, [1, 2, 4]),
        (1, [1, 2]),
        (4, [1, 2]),
    ]
    assert found[0].hiding is None and found[2].hiding is not None and found[2].hiding.workers == 8
    at_most = found[0].largest[1]
    assert (at_most.by_rule, at_most.by_shares, at_most.at_least) == (4, 4, False), (
        "a machine has no more"
    )
    full = next(one for one in series_of(data(*rows), "net", {"g": 4}) if one.devices_each == 4)
    assert full.steps == {1: {(32.0, 1): pytest.approx(0.24)}, 2: {(32.0, 1): 0.3}}, (
        "samples of a whole machine"
    )


def test_a_profile_stands_in_for_one_device_where_no_run_does() -> None:
    measured = data(
        row("1xa", 64, 1.0),
        row("2xa", 32, 0.62),
        profiles=pd.DataFrame([profile(32, 0.5), profile(64, 9)]),
    )
    (series,) = series_of(measured, "net", {"a": 1})
    assert series.steps[1] == {(64.0, 1): 1.0, (32.0, 1): pytest.approx(0.5)}
    rule, shares = efficiencies(series, Work(64.0), (1, 2), 4)
    assert rule is not None and shares is None, "nobody knows how long one takes for 16 samples"
    assert series.alone(48) == pytest.approx(0.75) and series.alone(128) is None
