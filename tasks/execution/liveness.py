"""The machines of one launch while it runs, and what to do when one is gone or about to go.

`decide` is pure, over what is left to measure:

go on     the notice leaves enough time, or nobody needs the machine any more
replace   ask for another machine in its place: there is time to start it and to measure with it
fewer     measure what does not need it, on the others
give up   neither: what is left is left out, and a row says so
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from ..node.data import FAILED, READY
from ..node.record import Item
from ..providers.base import NodeState, RunningCluster
from .job import POLL_S, Clock
from .mailbox import Mailbox, silent_nodes
from .outcomes import AttemptEnd, full_mailbox

MOST_REPLACEMENTS = (
    3  # of one launch: a market that takes machines so often is not worth its start-ups
)
MARGIN_S = 5.0  # before a machine goes: a record is written and carried away
_OVERHEAD_S = 5.0  # of an item beside its timed steps: building, warming up, agreeing


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineLoss:
    """Machines that go together. `leaving_s` None: they are gone."""

    nodes: frozenset[int]
    leaving_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RemainingWork:
    """What there is to do and to do it with.

    `items` have no record yet, the one under way first; `under_way_s` is what it still needs. `host` is the node at
    whose store the launch under way meets, None between launches. `seconds` are left of time and money. A new machine
    takes `start_up_s`; `no_more` says why none is to be asked for, "" where one may be.
    """

    items: Sequence[Item]
    under_way_s: float
    host: int | None
    seconds: float
    start_up_s: float
    no_replacement: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """`how` as above, and why, for a person."""

    how: str
    reason: str


def expected_s(item: Item) -> float:
    """Seconds that an item takes at most where nobody knows better."""
    return item.most_s + _OVERHEAD_S


def decide(loss: MachineLoss, left: RemainingWork) -> Decision:
    """What becomes of a launch that loses machines. Asks nobody: whether a replacement is to be had shows later."""
    needing = [item for item in left.items if not loss.nodes.isdisjoint(item.needs)]
    hosts = left.host in loss.nodes
    if not needing and not (hosts and left.items):
        return Decision(how="go on", reason="no run that is left needs it")
    if loss.leaving_s is not None:
        first = left.items[:1]
        if not (hosts or any(not loss.nodes.isdisjoint(item.needs) for item in first)):
            return Decision(how="go on", reason="the run under way does not need it")
        if left.under_way_s + MARGIN_S <= loss.leaving_s:
            return Decision(how="go on", reason="the run under way ends before it goes")
    if (
        needing
        and not left.no_replacement
        and left.start_up_s + min(map(expected_s, needing)) <= left.seconds
    ):
        return Decision(
            how="replace",
            reason=f"{_runs(needing)} still need{'s' if len(needing) == 1 else ''} it",
        )
    if len(needing) < len(left.items):
        return Decision(
            how="fewer",
            reason=f"{_runs(needing)} left out, the others go on" if needing else "not needed",
        )
    if loss.leaving_s is not None:
        return Decision(
            how="go on", reason="nothing better can be done with the time that it stays"
        )
    why = left.no_replacement or "too little time or money is left to start another"
    return Decision(how="give up", reason=f"all runs that are left need it, and {why}")


def _runs(items: Sequence[Item]) -> str:
    return f"{len(items)} run{'' if len(items) == 1 else 's'}"


class Machines:
    """What the provider and the mailbox say of them. Starts with all on the way; `data` are fetched by each, by digest.

    A machine that has reported itself and fetches is on its way still (`fetching`): it has no plan to run.
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
        self.running, self.mailbox, self.stop_at, self.clock, self.data = (
            running,
            mailbox,
            stop_at,
            clock,
            data,
        )
        self.gone: set[int] = set()
        self.unreported: set[int] = set()
        self.fetching: set[int] = set()
        self.awaited: set[int] = set(range(mailbox.nodes))
        self._states: Sequence[NodeState] = ()

    @property
    def here(self) -> list[int]:
        """Those that can be worked with, in rank order."""
        return [node for node in range(self.mailbox.nodes) if node not in self.gone | self.awaited]

    def all_here(self) -> bool:
        """Whether everyone awaited has reported itself, and has its data, or never will."""
        addresses = self.running.addresses
        reported = {node for node in self.awaited if self.mailbox.reported(node, addresses[node])}
        self.fetching = {node for node in reported if not self.mailbox.has_data(node, self.data)}
        self.unreported.clear()  # the same set: who waits for them holds it
        self.unreported |= self.awaited - reported
        self.awaited -= reported - self.fetching
        return not self.awaited

    def wait_for_all(self) -> AttemptEnd | None:
        """None once all are here; else how it ended.

        They report themselves within a time. Data come for as long as time and money last: their couriers tell of
        those that cannot be had, and a machine that no longer speaks is lost.
        """
        within_s = self.running.ready_within_s
        ended = self.wait(
            within_s,
            lambda: self.all_here() or not self.unreported,
            "report itself",
            self.unreported,
        )
        if ended is None:
            ended = self.wait(math.inf, self.all_here, "fetch its data", self.fetching)
            if ended is not None and ended.how == "time" and self.fetching:
                return AttemptEnd(how="lost", reason=f"{self._fetched()} when {ended.reason}")
        return ended

    def _fetched(self) -> str:
        """How far a machine was that still fetches."""
        node = min(self.fetching)
        found = self.mailbox.data_of(node)
        late = [
            digest
            for digest in self.data
            if found.get(digest, {}).get("state") not in (READY, FAILED)
        ]
        states = [
            f"{found.get(one, {}).get('bytes', 0)} of {found.get(one, {}).get('of_bytes') or 'unknown'}"
            for one in late
        ]
        whole = ", ".join(
            f"{state} bytes of {self.data[one]}" for one, state in zip(late, states, strict=True)
        )
        return f"node {node} had fetched {whole or 'nothing'}"

    def lost(self) -> AttemptEnd | None:
        """Whether machines are gone or have fallen silent. A run under way then was interrupted, not slow."""
        self._states = self.running.nodes()
        dead = [
            node
            for node, state in enumerate(self._states)
            if not state.alive and node not in self.gone
        ]
        if dead:
            first = min(dead, key=lambda node: not self._states[node].interrupted)
            state = self._states[first]
            full = "" if state.interrupted else self._full()
            return AttemptEnd(
                how="lost",
                reason=f"node {first}: {state.reason}{full}",
                interrupted=state.interrupted,
                nodes=() if full else tuple(dead),
            )
        silent = [
            node
            for node in silent_nodes(self.mailbox, self.running.now_unix())
            if node in {*self.here, *(self.fetching & self.awaited)}
        ]
        if silent:
            full = self._full()
            reason = f"node {silent[0]} fell silent{full}"
            return AttemptEnd(how="lost", reason=reason, nodes=() if full else tuple(silent))
        return None

    def dead(self, node: int) -> bool:
        """Whether the provider said so at the last look (`lost`)."""
        return not self._states[node].alive

    def was_interrupted(self, node: int) -> bool:
        """Whether the market takes that very machine, or has: others may have gone with it for another reason."""
        state = self._states[node]
        return state.interrupted or state.notice == "interruption"

    def leaving(self) -> MachineLoss | None:
        """Those that an interruption notice says will go, as the last look at them (`lost`) found.

        A rebalance recommendation only says that the risk has risen: it takes nothing away yet.
        """
        going = {
            node: state
            for node, state in enumerate(self._states)
            if state.leaving_s is not None and state.notice == "interruption" and node in self.here
        }
        if not going:
            return None
        soonest = min(state.leaving_s for state in going.values() if state.leaving_s is not None)
        return MachineLoss(nodes=frozenset(going), leaving_s=soonest)

    def out_of_time(self) -> AttemptEnd | None:
        """Whether the campaign's time, or its money, is up."""
        if self.clock.monotonic() > self.stop_at:
            return AttemptEnd(how="time", reason="the campaign's time is up")
        return None

    def wait(
        self, within_s: float, until: Callable[[], bool], what: str, late: Collection[int]
    ) -> AttemptEnd | None:
        """None once `until` holds, else how it ended; `late` are those to wait for no longer when time runs out."""
        give_up = self.clock.monotonic() + within_s
        while not until():
            ended = self.lost() or self.out_of_time()
            if ended is not None:
                return ended
            if self.clock.monotonic() > give_up:
                nodes = tuple(sorted(late))
                reason = f"{_named(nodes)} did not {what} within {within_s:.0f} s"
                return AttemptEnd(how="lost", reason=reason, nodes=nodes)
            self.clock.sleep(POLL_S)
        return None

    def _full(self) -> str:
        """An agent that cannot write falls silent or dies of it: say so, for it is what can be put right."""
        full = self.mailbox.refuses()
        return f": {full_mailbox(full, self.mailbox.path)}" if full else ""


def _named(nodes: Sequence[int]) -> str:
    return f"node{'' if len(nodes) == 1 else 's'} {', '.join(map(str, nodes))}"
