"""The machines of one launch while it runs, and what to do when some are gone or about to go.

`decide` is pure, over what is left to measure:

go on     the notice leaves enough time, or no run that is left needs the machine
replace   request another machine in its place: there is time to start it and to measure with it
fewer     measure the runs that do not need it, on the other machines
give up   neither: a row says so
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..node.data import FAILED, READY
from ..node.record import Item
from ..providers.base import NodeState, RunningCluster
from .job import POLL_S, Clock
from .mailbox import Mailbox
from .outcomes import AttemptEnd

# Of one launch: in a market that takes more machines, start-ups cost too much.
MOST_REPLACEMENTS = 3
MARGIN_S = 5.0  # before a machine goes: a record is written and carried away
_OVERHEAD_S = 5.0  # of an item beside its timed steps: building, warming up, agreeing


@dataclass(frozen=True, slots=True, kw_only=True)
class RemainingWork:
    """What is left to do, and the means.

    `items` have no record yet, the one under way first; `under_way_s` is what it still needs.
    `host` is the node at whose store the attempt under way meets, None between attempts. `seconds`
    are left of time and money. A new machine takes `start_up_s`; `no_replacement` says why none may
    be requested.
    """

    items: Sequence[Item]
    under_way_s: float
    host: int | None
    seconds: float
    start_up_s: float
    no_replacement: str = ""


def expected_s(item: Item) -> float:
    """Most seconds that an item usually takes."""
    return item.most_s + _OVERHEAD_S


def decide(
    lost: frozenset[int], left: RemainingWork, leaving_s: float | None = None
) -> tuple[str, str]:
    """Return what becomes of a launch that loses machines, now or in `leaving_s` seconds, and why.

    The first value is one of the words above.
    """
    needing = [item for item in left.items if not lost.isdisjoint(item.needs)]
    hosts = left.host in lost
    if not needing and not (hosts and left.items):
        return "go on", "no run that is left needs it"
    if leaving_s is not None:
        if not hosts and lost.isdisjoint(left.items[0].needs):
            return "go on", "the run under way does not need it"
        if left.under_way_s + MARGIN_S <= leaving_s:
            return "go on", "the run under way ends before it goes"
    shortest_s = min(map(expected_s, needing), default=math.inf)
    if not left.no_replacement and left.start_up_s + shortest_s <= left.seconds:
        return "replace", f"{len(needing)} runs still need it"
    if len(needing) < len(left.items):
        return "fewer", f"{len(needing)} runs left out, the others go on"
    if leaving_s is not None:
        return "go on", "the time that it stays serves nothing better"
    why = left.no_replacement or "too little time or money is left to start another"
    return "give up", f"all runs that are left need it, and {why}"


class Machines:
    """What the provider and the mailbox say of the machines. At first all are awaited.

    Each machine fetches `data` (addresses by digest) after it has reported itself, and is awaited
    until it has them.
    """

    def __init__(
        self,
        running: RunningCluster,
        mailbox: Mailbox,
        *,
        stop_at: float,
        clock: Clock,
        data: Mapping[str, str],
    ) -> None:
        self.running, self.mailbox, self.data = running, mailbox, data
        self.stop_at, self.clock = stop_at, clock
        self.gone: set[int] = set()
        self.fetching: set[int] = set()
        self.awaited = set(range(mailbox.nodes))
        self.states: Sequence[NodeState] = ()

    @property
    def here(self) -> list[int]:
        """Machines that can work, in rank order."""
        return [node for node in range(self.mailbox.nodes) if node not in self.gone | self.awaited]

    def all_here(self) -> bool:
        """True if every awaited machine has reported itself and has its data, or never will."""
        addresses = self.running.addresses
        reported = {node for node in self.awaited if self.mailbox.reported(node, addresses[node])}
        self.fetching = {node for node in reported if self._lacks_data(node)}
        self.awaited -= reported - self.fetching
        return not self.awaited

    def wait_for_all(self) -> AttemptEnd | None:
        """None once all are here; else how it ended. Data may come for as long as time and money
        last.
        """
        within_s = self.running.ready_within_s
        give_up = self.clock.monotonic() + within_s
        while not self.all_here():
            if lost := self.lost():
                return lost
            if ended := self.out_of_time():
                if not self.fetching:
                    return ended
                reason = f"node {min(self.fetching)} still fetched its data when {ended.reason}"
                return AttemptEnd(how="lost", reason=reason)
            late = self.awaited - self.fetching
            if late and self.clock.monotonic() > give_up:
                return is_late(late, "report itself", within_s)
            self.clock.sleep(POLL_S)
        return None

    def _lacks_data(self, node: int) -> bool:
        states = self.mailbox.data_of(node)
        return any(
            states.get(digest, {}).get("state") not in (READY, FAILED) for digest in self.data
        )

    def lost(self) -> AttemptEnd | None:
        """Machines that are gone or have fallen silent. A run under way then was interrupted, not
        slow.
        """
        self.states = self.running.nodes()
        dead = {
            node: state
            for node, state in enumerate(self.states)
            if not state.alive and node not in self.gone
        }
        if dead:
            node, state = min(dead.items(), key=lambda entry: not entry[1].interrupted)
            reason = f"node {node}: {state.reason}"
            interrupted = state.interrupted
            return AttemptEnd(how="lost", reason=reason, interrupted=interrupted, nodes=tuple(dead))
        silent = self.mailbox.silent(self.running.now_unix()) & {*self.here, *self.fetching}
        if silent:
            reason = f"node {min(silent)} fell silent"
            return AttemptEnd(how="lost", reason=reason, nodes=tuple(silent))
        return None

    def drop(self, lost: frozenset[int]) -> None:
        """Expect nothing more of these machines."""
        self.awaited -= lost
        self.fetching -= lost
        self.gone |= lost

    def leaving(self) -> tuple[frozenset[int], float]:
        """Machines that an interruption notice says will go, and in how many seconds the first
        does.

        A rebalance recommendation takes nothing away yet.
        """
        going = {
            node: state.leaving_s
            for node, state in enumerate(self.states)
            if state.leaving_s is not None and state.notice == "interruption" and node in self.here
        }
        return frozenset(going), min(going.values(), default=math.inf)

    def out_of_time(self) -> AttemptEnd | None:
        """How it ends if the campaign's time, or its money, is up."""
        if self.clock.monotonic() > self.stop_at:
            return AttemptEnd(how="time", reason="the campaign's time is up")
        return None


def is_late(nodes: set[int], what: str, within_s: float) -> AttemptEnd:
    """Return the end by machines that did not do something in time."""
    named = ", ".join(map(str, sorted(nodes)))
    reason = f"node {named} did not {what} within {within_s:.0f} s"
    return AttemptEnd(how="lost", reason=reason, nodes=tuple(sorted(nodes)))
