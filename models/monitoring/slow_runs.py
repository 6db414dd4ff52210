"""Find runs whose step time is above its predicted 90 % interval, and name the likely cause.

The first of these causes that applies is named:

    host      CPU steal: the hypervisor withheld at least a tenth of the CPU time that was needed
    speed     a reference computation before and after the steps was slower than usual
    machine   one machine computes longer per step than equal machines do
    link      slow communication explains at least half of the delay (formula below)
    input     making batches takes at least a third of the step
    compute   in all other cases: all machines compute more slowly than predicted

The formula for the cause `link` is:

    sync_s - exposed_communication_s >= (measured step time - predicted step time) / 2

`sync_s` is the measured time per step in which ranks wait for data from other ranks and do not
compute. `exposed_communication_s` is the predicted time.

The reference computation is always the same. Its duration shows how fast the machine is.

In data-parallel training, the steps of all ranks end at the same time. The cause `machine` is
therefore found from compute times, not from step times.
"""

from collections.abc import Mapping
from statistics import median
from typing import Any

import numpy as np
import pandas as pd

from ..domain.setup_table import machines_of, rows_of, types_of

TAKEN = 0.1  # a run is disturbed if the hypervisor withholds this share of the needed CPU time
_DEVIATIONS = 3.0  # a machine is slow above this many standard deviations of log reference seconds
# Minimum relative difference for which a machine is called slow: between its compute time and that
# of equal machines, or between the reference computation and its usual duration.
_LEAST_APART = 0.1
_LINK = 0.5  # the link is the cause if communication is at least this share of the excess
_INPUT = 1 / 3  # input is the cause if making batches takes at least this share of the step

Row = Mapping[str, Any]
Cause = tuple[str, str, str]  # cause, detail, instance type


def alarms(
    runs: pd.DataFrame, predicted: pd.DataFrame, input_share: Mapping[tuple[str, str], float]
) -> list[dict[str, Any]]:
    """Return a row of the table raw_alarms for each run that is slower than its predicted interval.

    Args:
        runs: rows of the mart run_details, the newest first, with an additional column `slowness`:
            the seconds of the reference computation divided by its usual seconds.
        predicted: a row for each row of `runs`, in the same order, with columns step_s, step_high_s
            and exposed_communication_s (seconds of communication that computation does not hide).
        input_share: {(workload, instance type): the share of a step that making batches took in a
            profile}. If a run used a data loader (`loader_workers` is known), the share is
            calculated from its measured `input_s` instead.
    """
    found = []
    for run, expected in zip(rows_of(runs), rows_of(predicted), strict=True):
        if run["step_s"] <= expected["step_high_s"]:
            continue
        cause, detail, instance_type = _cause(run, expected, input_share)
        found.append(
            {name: run[name] for name in ("run_id", "workload", "cluster", "zone", "measured_at")}
            | {
                "measured_s": run["step_s"],
                "predicted_s": expected["step_s"],
                "high_s": expected["step_high_s"],
                "cause": cause,
                "detail": detail,
                "instance_type": instance_type,
            }
        )
    return found


def sentence(row: Row) -> str:
    """Return a sentence about a slow run and its cause; `row` is a row of the mart `alarms`."""
    return (
        f"slow run {row['run_id']} at {row['measured_at']:%Y-%m-%d %H:%M} UTC: {row['workload']} on"
        f" {row['cluster']} took {row['measured_s']:.3g} s per step,"
        f" {row['measured_s'] / row['predicted_s'] - 1:.0%} more than predicted: {row['detail']}"
    )


def _cause(run: Row, expected: Row, input_share: Mapping[tuple[str, str], float]) -> Cause:
    """Return (cause, detail for the user, instance type) of a slow run.

    The module's docstring lists the causes. The instance type depends on the cause:

    - "machine": the type of the slow machine
    - "compute": the type of the machines if they have equal types, else ""
    - other causes: ""

    `expected` is the run's prediction. `alarms` describes `input_share`.
    """
    taken, slowness = _number(run, "taken_share"), _number(run, "slowness")
    if taken >= TAKEN:
        return "host", f"the hypervisor withheld {taken:.0%} of the needed CPU time", ""
    if slowness > slow_from(_number(run, "usual_spread")):
        detail = f"slow machine: the fixed computation took {slowness - 1:.0%} longer than usual"
        return "speed", detail, ""
    types = types_of(run["cluster"])
    node, above = _slowest_machine(run, types)
    if above > max(_LEAST_APART, np.nan_to_num(_number(run, "step_spread"))):
        detail = f"node {node} ({types[node]}) computes {above:.0%} slower than equal machines"
        return "machine", detail, types[node]
    step_s, sync_s = run["step_s"], _number(run, "sync_s")
    exposed_s = expected["exposed_communication_s"]
    if sync_s - exposed_s >= _LINK * (step_s - expected["step_s"]):
        waited = f"ranks waited {sync_s:.3g} s per step for communication"
        return "link", f"slow link: {waited}, and {exposed_s:.3g} s were predicted", ""
    share = max(input_share.get((run["workload"], name), 0.0) for name in types)
    if pd.notna(run.get("loader_workers")):
        share = _number(run, "input_s") / step_s
    if share >= _INPUT:
        return "input", f"making batches takes {share:.0%} of a step", ""
    detail = "slow code: all machines compute more slowly than predicted"
    return "compute", detail, types[0] if len(set(types)) == 1 else ""


def _number(row: Row, name: str) -> float:
    """Return the value of column `name`, or NaN if the row has no value.

    Comparisons with NaN are False, so a missing value never counts as a cause.
    """
    value = row.get(name)
    return float(np.nan if value is None else value)


def slow_from(usual_spread: float) -> float:
    """Return the slowness above which a machine is called slow.

    Slowness is the duration of the reference computation divided by its usual duration.
    `usual_spread` is the standard deviation of the log duration among machines of the same type.
    """
    return max(1.0 + _LEAST_APART, float(np.exp(_DEVIATIONS * np.nan_to_num(usual_spread))))


def slow_machines(speeds: pd.DataFrame) -> list[str]:
    """Return a sentence for each machine that is slower than usual for its instance type.

    `speeds` has a row for each run and machine. Its columns are lease_id (the launch), node,
    instance_type, reference_s (seconds of the reference computation), usual_s (the usual seconds on
    the instance type) and usual_spread (see `slow_from`).
    """
    machines = speeds.groupby(["instance_type", "lease_id", "node"]).agg(
        {"reference_s": "median", "usual_s": "first", "usual_spread": "first"}
    )
    usual_s = machines["usual_s"].astype(float)
    slow = machines[machines["reference_s"] > machines["usual_spread"].map(slow_from) * usual_s]
    return [
        f"slow machine: node {row['node']} of {row['lease_id']} ({row['instance_type']}) took"
        f" {row['reference_s']:.3g} s for the fixed computation; {row['usual_s']:.3g} s are usual"
        for row in rows_of(slow.reset_index())
    ]


def _slowest_machine(run: Row, types: tuple[str, ...]) -> tuple[int, float]:
    """Return (node, excess) for the node that is slowest compared with equal nodes.

    Equal nodes have the same instance type, number of devices used and batch per device. An excess
    of 0.2 means that the node computes 20 % longer per step than the median equal node. The result
    is (0, 0.0) if the seconds of the nodes are unknown.

    types: the instance type of each node.
    """
    rank_s = np.array(run["rank_compute_s"], dtype=float, ndmin=1)
    used, shares = machines_of(run["cluster"], run["layout"], run["batch_per_device"], {})
    if len(rank_s) != sum(used):  # the run did not record the seconds of each device
        return 0, 0.0
    seconds = np.maximum.reduceat(rank_s, np.cumsum([0, *used[:-1]])).tolist()
    kinds = list(zip(types, used, shares, strict=True))
    above = []
    for node, kind in enumerate(kinds):
        equals = [seconds[at] for at, other in enumerate(kinds) if other == kind and at != node]
        above.append(seconds[node] / median(equals) - 1 if equals else 0.0)
    return above.index(max(above)), max(above)
