"""How an attempt ended, in the controller's words: the run at fault, and the rows of runs that have
no record.
"""

from __future__ import annotations

import errno
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..node.processes import EXIT_LOST_PEER, EXIT_MAILBOX, EXIT_NO_DEVICE, blame_rank
from ..node.record import Item

_RETRY = "-again-"

RunSetups = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptEnd:
    """How one attempt ended: "finished", "failed" (try again without `culprit`), "lost" (machines),
    or "time".

    `nodes` are gone, going, silent, or without their devices: without them it may go on. None lost:
    it cannot.
    """

    how: str
    culprit: str = ""
    reason: str = ""
    interrupted: bool = False
    nodes: tuple[int, ...] = ()

    @property
    def status(self) -> str:
        """Status of the row that reports this end."""
        return "interrupted" if self.interrupted else "failed"

    def __str__(self) -> str:
        return f"{self.how}: {self.reason}" if self.reason else self.how


def blame(finished: Sequence[Mapping[str, Any]], under_way: str, planned: set[str]) -> AttemptEnd:
    """Judge a torchrun that ended early by what the node reports that was hit first: the others
    lost their peer.

    A node that names its run is believed before `under_way`.
    """
    failed = [node for node in finished if node.get("exit_code") != 0]
    if not failed:
        named = ", ".join(str(node["node"]) for node in finished)
        reason = f"torchrun ended on node {named} before it had measured"
        return AttemptEnd(how="failed", culprit=under_way, reason=reason)
    witness = min(failed, key=lambda node: blame_rank(node.get("worker_exit_code")))
    run_id = str(witness.get("run_id") or "")
    mailbox_full = witness.get("worker_exit_code") == EXIT_MAILBOX
    without = [one["node"] for one in failed if one.get("worker_exit_code") == EXIT_NO_DEVICE]
    return AttemptEnd(
        how="lost" if mailbox_full else "failed",
        culprit=run_id if run_id in planned else under_way,
        reason=f"node {witness['node']}: {_why(witness)}",
        nodes=() if mailbox_full else tuple(map(int, without)),
    )


def all_lost_a_peer(finished: Sequence[Mapping[str, Any]]) -> bool:
    """True if every torchrun that failed lost a peer: the node that was hit may never report."""
    failed = [node for node in finished if node.get("exit_code") != 0]
    return all(node.get("worker_exit_code") == EXIT_LOST_PEER for node in failed)


def retry_id(run_id: str) -> str:
    """The id of the next try of an interrupted run, whose interruption has a row."""
    return f"{planned_id(run_id)}{_RETRY}{int(run_id.partition(_RETRY)[2] or 1) + 1}"


def planned_id(run_id: str) -> str:
    """The id of the run's first try."""
    return run_id.partition(_RETRY)[0]


def full_mailbox(error: OSError, path: Path) -> str:
    """Say that the mailbox did not take a file."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"the mailbox is full: free some space at {path} and refresh again"
    return f"the mailbox at {path} could not be used: {error}"


def item_row(lease_id: str, item: Item, run_setups: RunSetups, ended: AttemptEnd) -> dict[str, Any]:
    """The row of a run that was under way when its attempt ended."""
    return {
        "run_id": item.run_id,
        "lease_id": lease_id,
        "kind": item.kind,
        "status": ended.status,
        "reason": ended.reason,
        "setup": dict(run_setups[item.run_id]),
    }


def launch_row(
    lease_id: str, cluster: str, run_setups: RunSetups, status: str, reason: str
) -> dict[str, Any]:
    """The row of a launch that ended with no run under way."""
    unknown = ("workload", "layout", "batch_per_device", "workload_digest")
    setup = {**next(iter(run_setups.values())), **dict.fromkeys(unknown), "cluster": cluster}
    suffix = "refused" if status == "refused" else "launch"
    return {
        "run_id": f"{lease_id}-{suffix}",
        "lease_id": lease_id,
        "kind": "launch",
        "status": status,
        "reason": reason,
        "setup": setup,
    }


def _why(node: Mapping[str, Any]) -> str:
    code = node.get("worker_exit_code")
    if isinstance(code, int) and code < 0:
        name = signal.Signals(-code).name if -code in signal.valid_signals() else f"signal {-code}"
        hint = ": out of memory, or killed by a user" if name == "SIGKILL" else ""
        return f"its rank was killed ({name}){hint}"
    last = str(node.get("log_tail", "")).strip().splitlines()[-1:]
    ended = f"torchrun ended with {node.get('exit_code')}: {' '.join(last)}"
    return str(node.get("reason") or ended)
