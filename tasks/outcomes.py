"""What became of an attempt, in the controller's words: who is to blame, and the rows of runs that have no record."""

from __future__ import annotations

import errno
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .node.endings import EXIT_LOST_PEER, EXIT_MAILBOX, word_rank
from .node.record import Item

_AGAIN = "-again-"

Envelopes = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How one attempt ended: "finished", "failed" (try again without `culprit`), "lost" (machines), or "time".

    `nodes` are those without which it may yet go on: gone, going or silent. None: it cannot.
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


def blame(finished: Sequence[Mapping[str, Any]], under_way: str, planned: set[str]) -> Ended:
    """Judge a launch of which some node's torchrun ended badly, by the word of the node that was hit first.

    The others only lost their peer. Whoever says at what run it was is believed before `under_way`.
    """
    wrong = [node for node in finished if node.get("exit_code") != 0]
    witness = min(wrong, key=lambda node: word_rank(node.get("worker_exit_code")))
    code = witness.get("worker_exit_code")
    said = str(witness.get("run_id") or "")
    return Ended(
        how="lost" if code == EXIT_MAILBOX else "failed",
        culprit=said if said in planned else under_way,
        reason=f"node {witness['node']}: {_why(witness, code)}",
    )


def only_bereft(finished: Sequence[Mapping[str, Any]]) -> bool:
    """Whether all that ended badly just lost a peer: the one that was hit has not spoken, and may never."""
    wrong = [node for node in finished if node.get("exit_code") != 0]
    return all(node.get("worker_exit_code") == EXIT_LOST_PEER for node in wrong)


def again(run_id: str) -> str:
    """The id under which a run is tried once more, when its interruption has a row of its own."""
    return f"{first_id(run_id)}{_AGAIN}{int(run_id.partition(_AGAIN)[2] or 1) + 1}"


def first_id(run_id: str) -> str:
    """The id that the run was planned under."""
    return run_id.partition(_AGAIN)[0]


def full_mailbox(error: OSError, path: Path) -> str:
    """The sentence for a file that the mailbox did not take."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"the mailbox is full ({error.strerror}): free some space at {path} and refresh again"
    return f"the mailbox at {path} could not be used: {error}"


def item_row(lease_id: str, item: Item, envelopes: Envelopes, ended: Ended) -> dict[str, Any]:
    """The row of a run that was under way when its attempt ended."""
    return _row(item.run_id, lease_id, item.kind, ended.status, ended.reason, envelopes[item.run_id])


def launch_row(lease_id: str, cluster: str, envelopes: Envelopes, status: str, reason: str) -> dict[str, Any]:
    """The row of a launch that no single run stands for: one a launch, whatever it was to measure."""
    setup = dict(next(iter(envelopes.values()))) | {"workload": None, "cluster": cluster}
    setup |= {"layout": None, "batch_per_device": None, "workload_digest": None}
    suffix = "refused" if status == "refused" else "launch"
    return _row(f"{lease_id}-{suffix}", lease_id, "launch", status, reason, setup)


def _row(run_id: str, lease_id: str, kind: str, status: str, reason: str, setup: Mapping[str, Any]) -> dict[str, Any]:
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
        return f"its rank was killed ({name})" + (": out of memory, or by somebody" if name == "SIGKILL" else "")
    tail = str(node.get("log_tail", "")).strip().splitlines()
    return str(node.get("reason") or "") or f"torchrun ended with {node.get('exit_code')}: {' '.join(tail[-1:])}"
