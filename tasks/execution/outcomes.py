"""What became of an attempt, in the controller's words: who is to blame, and the rows of runs that have no record."""

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
    """How one attempt ended: "finished", "failed" (try again without `culprit`), "lost" (machines), or "time".

    `nodes` are those without which it may yet go on: gone, going, silent, or without their devices. None lost: it
    cannot.
    """

    how: str
    culprit: str = ""
    reason: str = ""
    interrupted: bool = False
    nodes: tuple[int, ...] = ()

    @property
    def status(self) -> str:
        """Of the row that tells of it."""
        return "interrupted" if self.interrupted else "failed"

    def __str__(self) -> str:
        return f"{self.how}: {self.reason}" if self.reason else self.how


def blame(finished: Sequence[Mapping[str, Any]], under_way: str, planned: set[str]) -> AttemptEnd:
    """Judge a launch that ended before its time, by the word of the node that was hit first.

    The others only lost their peer. Whoever says at what run it was is believed before `under_way`.
    """
    wrong = [node for node in finished if node.get("exit_code") != 0]
    if not wrong:
        named = ", ".join(str(node["node"]) for node in finished)
        return AttemptEnd(
            how="failed",
            culprit=under_way,
            reason=f"torchrun ended on node {named} before it had measured",
        )
    witness = min(wrong, key=lambda node: blame_rank(node.get("worker_exit_code")))
    code = witness.get("worker_exit_code")
    said = str(witness.get("run_id") or "")
    without = tuple(
        int(one["node"]) for one in wrong if one.get("worker_exit_code") == EXIT_NO_DEVICE
    )
    return AttemptEnd(
        how="lost" if code == EXIT_MAILBOX else "failed",
        culprit=said if said in planned else under_way,
        reason=f"node {witness['node']}: {_why(witness, code)}",
        nodes=() if code == EXIT_MAILBOX else without,
    )


def all_lost_a_peer(finished: Sequence[Mapping[str, Any]]) -> bool:
    """Whether all that ended badly just lost a peer: the one that was hit has not spoken, and may never."""
    wrong = [node for node in finished if node.get("exit_code") != 0]
    return all(node.get("worker_exit_code") == EXIT_LOST_PEER for node in wrong)


def retry_id(run_id: str) -> str:
    """The id under which a run is tried once more, when its interruption has a row of its own."""
    return f"{planned_id(run_id)}{_RETRY}{int(run_id.partition(_RETRY)[2] or 1) + 1}"


def planned_id(run_id: str) -> str:
    """The id that the run was planned under."""
    return run_id.partition(_RETRY)[0]


def full_mailbox(error: OSError, path: Path) -> str:
    """The sentence for a file that the mailbox did not take."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return (
            f"the mailbox is full ({error.strerror}): free some space at {path} and refresh again"
        )
    return f"the mailbox at {path} could not be used: {error}"


def item_row(lease_id: str, item: Item, run_setups: RunSetups, ended: AttemptEnd) -> dict[str, Any]:
    """The row of a run that was under way when its attempt ended."""
    return _row(
        item.run_id, lease_id, item.kind, ended.status, ended.reason, run_setups[item.run_id]
    )


def launch_row(
    lease_id: str, cluster: str, run_setups: RunSetups, status: str, reason: str
) -> dict[str, Any]:
    """The row of a launch that no single run stands for: one a launch, whatever it was to measure."""
    setup = dict(next(iter(run_setups.values()))) | {"workload": None, "cluster": cluster}
    setup |= {"layout": None, "batch_per_device": None, "workload_digest": None}
    suffix = "refused" if status == "refused" else "launch"
    return _row(f"{lease_id}-{suffix}", lease_id, "launch", status, reason, setup)


def _row(
    run_id: str, lease_id: str, kind: str, status: str, reason: str, setup: Mapping[str, Any]
) -> dict[str, Any]:
    return {
        "run_id": run_id,
        "lease_id": lease_id,
        "kind": kind,
        "status": status,
        "reason": reason,
        "setup": dict(setup),
    }


def _why(node: Mapping[str, Any], code: Any) -> str:
    if isinstance(code, int) and code < 0:
        name = signal.Signals(-code).name if -code in signal.valid_signals() else f"signal {-code}"
        return f"its rank was killed ({name})" + (
            ": out of memory, or by somebody" if name == "SIGKILL" else ""
        )
    tail = str(node.get("log_tail", "")).strip().splitlines()
    return (
        str(node.get("reason") or "")
        or f"torchrun ended with {node.get('exit_code')}: {' '.join(tail[-1:])}"
    )
