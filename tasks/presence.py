"""The machines of one launch while it runs: who is here, who is gone or about to go, who is still on the way."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from .benchmark import POLL_S, Clock
from .losses import Loss
from .mailbox import Mailbox, silent_nodes
from .outcomes import Ended, full_mailbox
from .providers.base import NodeState, RunningCluster


class Machines:
    """What the provider and the mailbox say of them. Starts with all on the way."""

    def __init__(self, running: RunningCluster, mailbox: Mailbox, *, stop_at: float, clock: Clock) -> None:
        self.running, self.mailbox, self.stop_at, self.clock = running, mailbox, stop_at, clock
        self.gone: set[int] = set()
        self.awaited: set[int] = set(range(mailbox.nodes))
        self._states: Sequence[NodeState] = ()

    @property
    def here(self) -> list[int]:
        """Those that can be worked with, in rank order."""
        return [node for node in range(self.mailbox.nodes) if node not in self.gone | self.awaited]

    def all_here(self) -> bool:
        """Whether everyone awaited has reported itself."""
        addresses = self.running.addresses
        self.awaited -= {node for node in self.awaited if self.mailbox.reported(node, addresses[node])}
        return not self.awaited

    def lost(self) -> Ended | None:
        """Whether machines are gone or have fallen silent. A run under way then was interrupted, not slow."""
        self._states = self.running.nodes()
        dead = [node for node, state in enumerate(self._states) if not state.alive and node not in self.gone]
        if dead:
            first = min(dead, key=lambda node: not self._states[node].interrupted)
            state = self._states[first]
            full = "" if state.interrupted else self._full()
            return Ended(
                how="lost",
                reason=f"node {first}: {state.reason}{full}",
                interrupted=state.interrupted,
                nodes=() if full else tuple(dead),
            )
        silent = [node for node in silent_nodes(self.mailbox, self.running.now_unix()) if node in self.here]
        if silent:
            full = self._full()
            reason = f"node {silent[0]} fell silent{full}"
            return Ended(how="lost", reason=reason, nodes=() if full else tuple(silent))
        return None

    def dead(self, node: int) -> bool:
        """Whether the provider said so at the last look (`lost`)."""
        return not self._states[node].alive

    def taken(self, node: int) -> bool:
        """Whether the market takes that very machine, or has: others may have gone with it for another reason."""
        state = self._states[node]
        return state.interrupted or state.notice == "interruption"

    def leaving(self) -> Loss | None:
        """Those that a notice says will go, as the last look at them (`lost`) told."""
        going = {
            node: state
            for node, state in enumerate(self._states)
            if state.leaving_s is not None and state.notice == "interruption" and node in self.here
        }
        if not going:
            return None
        soonest = min(state.leaving_s for state in going.values() if state.leaving_s is not None)
        return Loss(nodes=frozenset(going), leaving_s=soonest, notice="interruption")

    def out_of_time(self) -> Ended | None:
        """Whether the campaign's time, or its money, is up."""
        if self.clock.monotonic() > self.stop_at:
            return Ended(how="time", reason="the campaign's time is up")
        return None

    def wait(
        self, within_s: float, until: Callable[[], bool], what: str, late: Callable[[], Collection[int]]
    ) -> Ended | None:
        """None once `until` holds, else how it ended; `late` are those to wait for no longer when time runs out."""
        give_up = self.clock.monotonic() + within_s
        while not until():
            ended = self.lost() or self.out_of_time()
            if ended is not None:
                return ended
            if self.clock.monotonic() > give_up:
                nodes = tuple(sorted(late()))
                reason = f"{_named(nodes)} did not {what} within {within_s:.0f} s"
                return Ended(how="lost", reason=reason, nodes=nodes)
            self.clock.sleep(POLL_S)
        return None

    def _full(self) -> str:
        """An agent that cannot write falls silent or dies of it: say so, for it is what can be put right."""
        full = self.mailbox.refuses()
        return f": {full_mailbox(full, self.mailbox.path)}" if full else ""


def _named(nodes: Sequence[int]) -> str:
    return f"node{'' if len(nodes) == 1 else 's'} {', '.join(map(str, nodes))}"
