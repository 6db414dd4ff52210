"""Describe how an attempt ended, and build warehouse rows about it.

An attempt is one execution of torchrun, which measures several runs.
"""

import signal
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..node.processes import EXIT_LOST_PEER, EXIT_MAILBOX, EXIT_NO_DEVICE, blame_rank

_OUT_OF_MEMORY = "its rank was killed (SIGKILL): out of memory, or killed by a user"

Row = dict[str, Any]
RunSetup = Mapping[str, Any]
RunSetups = Mapping[str, RunSetup]


@dataclass(frozen=True, kw_only=True)
class AttemptEnd:
    """How an attempt ended. An attempt is one execution of torchrun, which measures several runs.

    how: "finished" if all runs ended, "failed" if a run failed, "lost" if machines were lost, or
        "time" if the refresh has no time or money left.
    culprit: id of the run that failed or was being measured; empty if there is no such run.
    interrupted: True if the provider took a machine away or the user stopped the launch.
    nodes: if `how` is "failed", the machines that lack their expected devices. If `how` is "lost",
        the lost machines. If the lost machines are unknown, `nodes` is empty and the launch ends.
    """

    how: str
    culprit: str = ""
    reason: str = ""
    interrupted: bool = False
    nodes: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.how}: {self.reason}" if self.reason else self.how


def blame(reports: Sequence[Row], under_way: str, run_ids: Collection[str]) -> AttemptEnd:
    """Return an AttemptEnd that says which run made an attempt fail, and why.

    The exit codes of the workers show which node most likely caused the failure. The report of that
    node names the run and the reason. If the node could not write to the mailbox, `how` is "lost"
    and `nodes` is empty. Such a result ends the launch.

    reports: reports of the nodes whose torchrun has ended, with exit codes, run id and reason.
    under_way: id of the run to blame if the report names no run in `run_ids`.
    run_ids: ids of the attempt's runs.
    """
    failures = [node for node in reports if node.get("exit_code") != 0]
    if not failures:
        reason = "torchrun ended before all runs were measured"
        return AttemptEnd(how="failed", culprit=under_way, reason=reason)
    witness = min(failures, key=lambda node: blame_rank(node.get("worker_exit_code")))
    run_id, code = str(witness.get("run_id")), witness.get("worker_exit_code")
    last = str(witness.get("log_tail", "")).strip().splitlines()[-1:]
    end = f"torchrun ended with exit code {witness.get('exit_code')}: {' '.join(last)}"
    why = _OUT_OF_MEMORY if code == -signal.SIGKILL else witness.get("reason") or end
    without = (node["node"] for node in failures if node.get("worker_exit_code") == EXIT_NO_DEVICE)
    is_full = code == EXIT_MAILBOX
    return AttemptEnd(
        how="lost" if is_full else "failed",
        culprit=run_id if run_id in run_ids else under_way,
        reason=f"node {witness['node']}: {why}",
        nodes=() if is_full else tuple(without),
    )


def all_lost_a_peer(reports: Sequence[Row]) -> bool:
    """Return True if every failed node reports that it lost the connection to another node.

    reports: the nodes' reports. A lost node may have no report.
    """
    failures = [node for node in reports if node.get("exit_code") != 0]
    return all(node.get("worker_exit_code") == EXIT_LOST_PEER for node in failures)


def refresh_of(lease_id: str) -> str:
    """Return the id of the refresh that made a launch: `lease_id` up to its last "-"."""
    return lease_id.rpartition("-")[0]


def run_row(lease_id: str, run_id: str, setup: RunSetup, status: str, reason: str) -> Row:
    """Return a row for a run that has no record from a machine.

    status: "failed", "interrupted" or "refused".
    """
    return {
        "run_id": run_id,
        "lease_id": lease_id,
        "kind": setup["kind"],
        "status": status,
        "reason": reason,
        "setup": setup,
    }


def launch_row(
    lease_id: str, cluster: str, run_setups: RunSetups, status: str, reason: str, number: int
) -> Row:
    """Return a row about a whole launch.

    The row has the same columns as a row about a run. Its column `kind` is "launch".

    run_setups: {run id: setup} of the planned runs.
    status: "failed", "interrupted" or "refused".
    number: part of the row's id, unless it is 0. Rows about the same launch need different numbers.
    """
    unknown = ("workload", "layout", "batch_per_device", "workload_digest")
    setup = {**next(iter(run_setups.values())), **dict.fromkeys(unknown)}
    setup |= {"cluster": cluster, "kind": "launch"}
    suffix = "refused" if status == "refused" else "launch"
    run_id = f"{lease_id}-{suffix}" + (f"-{number}" if number else "")
    return run_row(lease_id, run_id, setup, status, reason)
