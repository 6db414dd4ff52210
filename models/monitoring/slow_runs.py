"""Measured runs above their interval, and the part of the step that is longer than predicted.

    excess = measured - predicted step
    excess communication = sync_s - predicted exposed communication

    host      a tenth or more of the processor time that the machines wanted was taken away
    speed     fixed work beside the run took longer than usual too: a slow machine
    machine   one machine's step without communication is longer than that of its equals
    link      half of the excess or more is communication
    input     making batches takes a third of the step or more
    compute   all machines compute longer

Data-parallel steps end together, so that times of whole steps do not distinguish ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from ..domain.cluster import parse_cluster, parse_numbers
from ..domain.setup_table import rows_of

TAKEN = 0.1  # share of the processor time wanted from which a run counts as disturbed
_DEVIATIONS = 3.0  # of the log of fixed work's seconds from which a machine of a type is slow
_LEAST_APART = 0.1  # of a machine's step above its equals', and of fixed work above the usual
_LINK, _INPUT = 0.5, 1 / 3

Row = Mapping[str, Any]


class _Cause(NamedTuple):
    cause: str
    detail: str
    instance_type: str = ""


def alarms(
    runs: pd.DataFrame, predicted: pd.DataFrame, input_share: Mapping[tuple[str, str], float]
) -> list[dict[str, Any]]:
    """Return a row of the table raw_alarms for each of `runs` above its interval, the newest first.

    Args:
        runs: columns of the mart run_details, and `slowness` of its fixed work (1 is usual).
        predicted: step_s, step_high_s, exposed_communication_s, aligned by position.
        input_share: share of a step that making batches took in profiles, by workload and type.
            A run with `loader_workers` has its own `input_s` instead.
    """
    found = []
    for run, expected in zip(rows_of(runs), rows_of(predicted), strict=True):
        if not float(run["step_s"]) > float(expected["step_high_s"]):
            continue
        names = ("run_id", "workload", "cluster", "measured_at")
        found.append(
            {name: run[name] for name in names}
            | {
                "zone": run["zone"] or "",
                "measured_s": float(run["step_s"]),
                "predicted_s": float(expected["step_s"]),
                "high_s": float(expected["step_high_s"]),
            }
            | _cause(run, expected, input_share)._asdict()
        )
    return sorted(found, key=lambda row: (row["measured_at"], row["run_id"]), reverse=True)


def sentence(row: Row) -> str:
    """Describe a row of the mart `alarms`."""
    where = f"{row['cluster']} in {row['zone']}" if row["zone"] else row["cluster"]
    measured, predicted, high = (row[name] for name in ("measured_s", "predicted_s", "high_s"))
    return (
        f"slow run: {row['workload']} on {where} took {measured:.3g} s a step,"
        f" {measured / predicted - 1:.0%} more than predicted (at most {high:.3g} s):"
        f" {row['detail']} (run {row['run_id']}, {row['measured_at']:%Y-%m-%d %H:%M} UTC)"
    )


def _cause(run: Row, expected: Row, input_share: Mapping[tuple[str, str], float]) -> _Cause:
    taken, slowness = _number(run, "taken_share"), _number(run, "slowness")
    if taken >= TAKEN:
        return _Cause("host", f"the host took {taken:.0%} of the processor time away")
    if slowness > slow_from(_number(run, "usual_spread")):
        return _Cause(
            "speed", f"slow machine: fixed work took {slowness - 1:.0%} longer than usual"
        )
    types = parse_cluster(str(run["cluster"]))
    slowest = _slowest_machine(run, types)
    if slowest is not None:
        node, above = slowest
        detail = f"node {node} ({types[node]}) computes {above:.0%} slower than its equals"
        return _Cause("machine", detail, types[node])
    step_s, sync_s = float(run["step_s"]), _number(run, "sync_s")
    exposed_s = float(expected["exposed_communication_s"])
    if sync_s - exposed_s >= _LINK * (step_s - float(expected["step_s"])):
        return _Cause("link", f"slow link: {sync_s:.3g} s of waiting, {exposed_s:.3g} s predicted")
    if pd.notna(run.get("loader_workers")):
        share = _number(run, "input_s") / step_s
    else:
        share = max(input_share.get((str(run["workload"]), name), 0.0) for name in types)
    if share >= _INPUT:
        return _Cause("input", f"making batches takes {share:.0%} of a step")
    detail = "all machines compute slower than predicted"
    if np.isfinite(slowness):
        detail = f"slow code: {detail}, with fixed work at {slowness - 1:+.0%}"
    return _Cause("compute", detail, types[0] if len(set(types)) == 1 else "")


def _number(row: Row, name: str) -> float:
    """Return NaN where a run lacks the number: it compares as False."""
    return float(row.get(name, np.nan) if row.get(name) is not None else np.nan)


def slow_from(usual_spread: float) -> float:
    """Return the ratio to the usual seconds of fixed work from which a machine is slow."""
    return max(1.0 + _LEAST_APART, float(np.exp(_DEVIATIONS * np.nan_to_num(usual_spread))))


def slow_machines(speeds: pd.DataFrame) -> list[str]:
    """Describe the slowest machine of each instance type that has a slow one.

    `speeds`: lease_id, node, instance_type, reference_s, usual_s, usual_spread, a row a run and
    machine.
    """
    found = []
    for name, rows in speeds.groupby("instance_type") if len(speeds) else ():
        usual_s = float(rows["usual_s"].iloc[0])
        seconds = rows.groupby(["lease_id", "node"])["reference_s"].median()
        slow = seconds[seconds > slow_from(float(rows["usual_spread"].iloc[0])) * usual_s]
        if len(slow):
            slowest = slow.sort_values(ascending=False).reset_index().iloc[0]
            found.append(
                f"slow machine: node {slowest['node']} of {slowest['lease_id']} ({name}) took"
                f" {slow.max():.3g} s for fixed work, usually {usual_s:.3g} s;"
                f" {len(slow)} of {len(seconds)} machines are slow"
            )
    return found


def _slowest_machine(run: Row, types: tuple[str, ...]) -> tuple[int, float] | None:
    """Return (node, share above its equals) of the slowest machine, where one stands out.

    Equals are machines of a type with as many devices and samples.
    """
    ranks = run.get("rank_compute_s")
    used = parse_numbers(str(run["layout"]), len(types), "layout")
    if not isinstance(ranks, list | tuple | np.ndarray) or sum(used) != len(ranks):
        return None
    first = np.cumsum([0, *used[:-1]])
    seconds = np.maximum.reduceat(np.asarray(ranks, dtype=float), first)
    if not (np.isfinite(seconds) & (seconds > 0)).all():
        return None
    shares = parse_numbers(str(run["batch_per_device"]), len(types), "batch_per_device")
    kinds = list(zip(types, used, shares, strict=True))
    above = []
    for node, kind in enumerate(kinds):
        equals = [seconds[at] for at, other in enumerate(kinds) if other == kind and at != node]
        if equals:
            above.append((float(seconds[node] / median(equals) - 1), node))
    share, node = max(above, default=(0.0, 0))
    if share <= max(_LEAST_APART, np.nan_to_num(_number(run, "step_spread"))):
        return None
    return node, share
