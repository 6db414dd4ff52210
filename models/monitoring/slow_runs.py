"""A measured run slower than its interval, and why: which part of its step is longer than the model expected.

    excess = measured - predicted step,    of communication = sync_s - predicted exposed communication

    the host         a tenth or more of the processor time that was wanted was taken away while it was measured
    the speed        fixed work beside it took longer than usual too, by a tenth and three standard deviations of its
                     type: measured on slow machines, whatever its code
    a slow machine   its step without communication lies above that of its equals by more than the steps' own spread
    a slow link      half of the excess or more is of communication
    input            the rest of the step is longer, and making batches takes a third of it or more
    compute          the rest of the step is longer on all machines alike
Data-parallel steps end together, so that the times of whole steps do not tell ranks apart. Never says what to do.
A machine whose fixed work takes that long is named too, whether a run was above its interval or not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import pandas as pd

from ..domain.cluster import parse_cluster, parse_numbers
from ..domain.setup_table import rows_of

_DEVIATIONS = (
    3.0  # of the log of the fixed work's seconds among machines of a type, above which one is slow
)
TAKEN = 0.1  # part of the processor time wanted, from which on a run counts as disturbed
_LEAST_APART = 0.1  # of a machine's step above its equals', below which it is no slow machine
_LINK = 0.5
_SPEED = ("slowness", "usual_spread")
_INPUT = 1 / 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """One slow run. `instance_type` is the slow machine's, or "" where the cause is not one machine's."""

    run_id: str
    workload: str
    cluster: str
    zone: str
    cause: str  # "host", "speed", "machine", "link", "input", "compute"
    instance_type: str
    measured_s: float
    predicted_s: float
    high_s: float
    detail: str
    measured_at: pd.Timestamp


def alarms(
    runs: pd.DataFrame, predicted: pd.DataFrame, input_share: Mapping[tuple[str, str], float]
) -> list[Alarm]:
    """An alarm for each of `runs` above its interval, the newest first.

    `runs`: run_id, workload, cluster, layout, batch_per_device, zone, step_s, sync_s, step_spread, rank_compute_s (a
    list, or None), taken_share (or None), measured_at, and where known `slowness` (of its fixed work, 1 is usual) and
    `usual_spread` (standard deviation of its log for the type). `predicted`, aligned by position: step_s, step_high_s,
    exposed_communication_s.
    `input_share` is the part of a step that making batches took in profiles, by workload and instance type. Of a run
    with `loader_workers` its own `input_s` counts instead: what workers load beside the steps keeps none waiting.
    """
    found = []
    for run, expected_row in zip(rows_of(runs), rows_of(predicted), strict=True):
        if not float(run["step_s"]) > float(expected_row["step_high_s"]):
            continue
        cause, name, detail = _cause(run, expected_row, input_share)
        found.append(
            Alarm(
                run_id=str(run["run_id"]),
                workload=str(run["workload"]),
                cluster=str(run["cluster"]),
                zone=str(run["zone"] or ""),
                cause=cause,
                instance_type=name,
                measured_s=float(run["step_s"]),
                predicted_s=float(expected_row["step_s"]),
                high_s=float(expected_row["step_high_s"]),
                detail=detail,
                measured_at=run["measured_at"],
            )
        )
    return sorted(found, key=lambda one: (one.measured_at, one.run_id), reverse=True)


def sentence(row: Mapping[str, Any]) -> str:
    """A row of the mart `alarms` in words."""
    where = f" in {row['zone']}" if row["zone"] else ""
    slower = float(row["measured_s"]) / float(row["predicted_s"]) - 1
    return (
        f"slow run: {row['workload']} on {row['cluster']}{where} took {float(row['measured_s']):.3g} s a step, "
        f"{slower:.0%} more than predicted (at most {float(row['high_s']):.3g} s): {row['detail']} (run"
        f" {row['run_id']}, {row['measured_at']:%Y-%m-%d %H:%M} UTC)"
    )


def _cause(
    run: Mapping[str, Any],
    expected_row: Mapping[str, Any],
    input_share: Mapping[tuple[str, str], float],
) -> tuple[str, str, str]:
    """Cause, the slow machine's instance type, and a sentence's part."""
    taken = float(run.get("taken_share") or 0.0)
    if taken >= TAKEN:  # whatever else looks slow
        return (
            "host",
            "",
            f"what its machines run on took {taken:.0%} of the processor time wanted away",
        )
    slowness, spread = (np.nan if pd.isna(one := run.get(name)) else float(one) for name in _SPEED)
    if slowness > slow_from(spread):
        said = f"measured on a slow machine: fixed work beside it took {slowness - 1:.0%} longer than usual of its type"
        return "speed", "", said
    slow = _slow_machine(run)
    if slow is not None:
        node, name, above = slow
        return "machine", name, f"node {node} ({name}) computes {above:.0%} slower than its equals"
    excess = float(run["step_s"]) - float(expected_row["step_s"])
    sync = (
        float(run["sync_s"])
        if run["sync_s"] is not None and np.isfinite(float(run["sync_s"]))
        else None
    )
    if sync is not None and sync - float(expected_row["exposed_communication_s"]) >= _LINK * excess:
        expected = float(expected_row["exposed_communication_s"])
        return (
            "link",
            "",
            f"a slow link: {sync:.3g} s wait for gradients, {expected:.3g} s expected",
        )
    types = parse_cluster(str(run["cluster"]))
    if pd.notna(run.get("loader_workers")):
        share = float(run["input_s"] or 0.0) / float(run["step_s"])
        if share >= _INPUT:
            return "input", "", f"input: waiting for its loader took {share:.0%} of the step"
        input_share = {}
    shares = {name: input_share.get((str(run["workload"]), name), 0.0) for name in types}
    most = max(shares, key=lambda name: shares[name])
    if shares[most] >= _INPUT:
        return (
            "input",
            "",
            f"input: making batches took {shares[most]:.0%} of a step in its profile on {most}",
        )
    why = "all machines compute slower than expected"
    if np.isfinite(slowness):
        why = (
            f"slow code: {why}, at the speed that is usual of them (fixed work {slowness - 1:+.0%})"
        )
    return "compute", types[0] if len(set(types)) == 1 else "", why


def slow_from(usual_spread: float) -> float:
    """From how many times the usual seconds of fixed work on a machine is slow, by the spread of its type."""
    return max(1.0 + _LEAST_APART, float(np.exp(_DEVIATIONS * np.nan_to_num(usual_spread))))


def slow_machines(speeds: pd.DataFrame) -> list[str]:
    """A sentence for each instance type of which a machine is slow, naming the slowest; a machine is a node of a lease.

    `speeds`: lease_id, node, instance_type, zone, reference_s, usual_s, usual_spread; a row a run and machine.
    """
    said: list[str] = []
    for name, own in speeds.groupby("instance_type", sort=True) if len(speeds) else ():
        usual_s, limit = (
            float(own["usual_s"].iloc[0]),
            slow_from(float(own["usual_spread"].iloc[0])),
        )
        seconds = own.groupby(["lease_id", "node", "zone"])["reference_s"].median()
        slow = seconds[seconds > limit * usual_s].sort_values(ascending=False)
        if not len(slow):
            continue
        lease_id, node, zone = slow.index[0]
        where = f" in {zone}" if zone else ""
        others = (
            f"; so were {len(slow) - 1} of its {len(seconds) - 1} others" if len(slow) > 1 else ""
        )
        said.append(
            f"slow machine: node {node} ({name}{where}) of {lease_id} took {slow.iloc[0]:.3g} s for fixed work, "
            f"{slow.iloc[0] / usual_s - 1:.0%} more than usual of its type ({usual_s:.3g} s){others}"
        )
    return said


def _slow_machine(run: Mapping[str, Any]) -> tuple[int, str, float] | None:
    """(place in the cluster, instance type, share above its equals) of the slowest machine, where one stands out.

    Equals are machines of its type with as many devices and samples.
    """
    seconds = _by_machine(run)
    if seconds is None:
        return None
    spread = float(run["step_spread"] or 0.0)
    types = parse_cluster(str(run["cluster"]))
    shares = parse_numbers(str(run["batch_per_device"]), len(types), "batch_per_device")
    used = parse_numbers(str(run["layout"]), len(types), "layout")
    kinds = list(zip(types, used, shares, strict=True))
    above = []
    for node, kind in enumerate(kinds):
        equals = [
            seconds[other] for other, one in enumerate(kinds) if one == kind and other != node
        ]
        if equals:
            above.append((seconds[node] / median(equals) - 1, node))
    if not above or max(above)[0] <= max(_LEAST_APART, spread if np.isfinite(spread) else 0.0):
        return None
    share, node = max(above)
    return node, types[node], share


def _by_machine(run: Mapping[str, Any]) -> list[float] | None:
    """Seconds of a step without communication at the slowest device of each machine; None where unknown."""
    ranks: Sequence[float] | None = run.get("rank_compute_s")
    if ranks is None or not isinstance(ranks, list | tuple | np.ndarray) or not len(ranks):
        return None
    types = parse_cluster(str(run["cluster"]))
    used = parse_numbers(str(run["layout"]), len(types), "layout")
    if sum(used) != len(ranks):
        return None
    ends = np.cumsum(used)
    found = [
        float(np.max(np.asarray(ranks[end - n : end], dtype=float)))
        for end, n in zip(ends, used, strict=True)
    ]
    return found if all(np.isfinite(found)) and min(found) > 0 else None
