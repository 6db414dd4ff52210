"""Track the machines of a running launch."""

import math
from collections.abc import Collection, Sequence

from ..providers.base import NodeState, RunningCluster
from .job import POLL_S, Clock
from .mailbox import Mailbox
from .outcomes import AttemptEnd

_SILENCE_S = 30.0  # a heartbeat may be seconds late on a host with 0.2 CPU cores, but not 30 s


class Machines:
    """The states of a launch's machines: starting, able to measure, or lost.

    The provider and the machines themselves report the states.

    data: the digests of the data that each machine downloads.
    stop_at: the time on `clock` at which the refresh has no time or money left.
    awaited: the machines that have not reported their start, or are still downloading data.
    gone: the machines that are lost.
    fetching: the machines in `awaited` that have started and are still downloading data.
    """

    def __init__(
        self,
        running: RunningCluster,
        mailbox: Mailbox,
        stop_at: float,
        clock: Clock,
        data: Collection[str],
    ) -> None:
        self.running, self.mailbox, self.data = running, mailbox, data
        self.stop_at, self.clock = stop_at, clock
        self.gone: set[int] = set()
        self.fetching: set[int] = set()
        self.awaited = set(range(mailbox.nodes))
        self.states: Sequence[NodeState] = ()

    @property
    def here(self) -> list[int]:
        """Return the nodes (indices of machines) that can measure now, in rank order."""
        return [node for node in range(self.mailbox.nodes) if node not in self.gone | self.awaited]

    def all_here(self) -> bool:
        """Read the machines' reports. Return True if the launch no longer waits for any machine."""
        self.fetching = set()
        for node in sorted(self.awaited):
            if not self.mailbox.has_started(node, self.running.addresses[node]):
                continue
            if self.mailbox.fetched(node).issuperset(self.data):
                self.awaited.remove(node)
            else:
                self.fetching.add(node)
        return not self.awaited

    def wait_for_all(self) -> AttemptEnd | None:
        """Wait until all machines have reported their start and ended their downloads.

        Returns None if all machines are ready. Otherwise, the result says why the wait ended:

        - A machine was lost.
        - A machine started too slowly.
        - The refresh has no time or money left.
        """
        within_s = self.running.ready_within_s
        give_up = self.clock.monotonic() + within_s
        while not self.all_here():
            if loss := self.lost():
                return loss
            if timeout := self.out_of_time():
                if not self.fetching:
                    return timeout
                reason = f"node {min(self.fetching)} still fetches its data, and {timeout.reason}"
                return AttemptEnd(how="lost", reason=reason)
            late = self.awaited - self.fetching
            if late and self.clock.monotonic() > give_up:
                return nodes_lost(late, f"did not report itself within {within_s:.0f} s")
            self.clock.sleep(POLL_S)
        return None

    def lost(self) -> AttemptEnd | None:
        """Return an AttemptEnd with the newly lost machines; None if there are none.

        Machines in `gone` are left out. A machine is lost if the provider reports that it has
        ended. If the provider reports no such machine, the machines without a recent heartbeat are
        lost.

        If several machines have ended, `reason` describes only one of them: an interrupted machine,
        if there is one.
        """
        self.states = self.running.nodes()
        dead = [
            node
            for node, state in enumerate(self.states)
            if not state.alive and node not in self.gone
        ]
        if dead:
            node = min(dead, key=lambda node: not self.states[node].interrupted)
            state = self.states[node]
            return AttemptEnd(
                how="lost",
                reason=f"node {node}: {state.reason}",
                interrupted=state.interrupted,
                nodes=tuple(dead),
            )
        silent = self.mailbox.silent(self.running.now_unix() - _SILENCE_S)
        silent &= {*self.here, *self.fetching}
        return nodes_lost(silent, "fell silent") if silent else None

    def drop(self, nodes: frozenset[int]) -> None:
        """Move the nodes in `nodes` to `gone`, so that the launch no longer waits for them."""
        self.awaited -= nodes
        self.fetching -= nodes
        self.gone |= nodes

    def leaving(self) -> tuple[frozenset[int], float]:
        """Return (nodes with an interruption notice, seconds until the first of these nodes ends).

        If no node has a notice, the seconds are infinite.
        """
        going = {
            node: leaving_s
            for node in self.here
            if (leaving_s := self.states[node].leaving_s) is not None
        }
        return frozenset(going), min(going.values(), default=math.inf)

    def out_of_time(self) -> AttemptEnd | None:
        """Return an AttemptEnd if the refresh has no time or money left, else None."""
        if self.clock.monotonic() > self.stop_at:
            return AttemptEnd(how="time", reason="the campaign's time is up")
        return None


def nodes_lost(nodes: Collection[int], what: str, *, interrupted: bool = False) -> AttemptEnd:
    """Return an AttemptEnd which says that `nodes` are lost.

    what: what the nodes did, such as "fell silent".
    """
    indices = tuple(sorted(nodes))
    reason = f"node {', '.join(map(str, indices))} {what}"
    return AttemptEnd(how="lost", reason=reason, interrupted=interrupted, nodes=indices)
