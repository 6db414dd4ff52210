"""What to do when a machine is about to go, or is gone: a pure decision over what is left to measure.

go on     the notice leaves enough time, or only says that the risk has risen, or nobody needs the machine any more
replace   ask for another machine in its place: there is time to start it and to measure with it
fewer     measure what does not need it, on the others
give up   neither: what is left is left out, and a row says so
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .node.record import Item

MOST_REPLACEMENTS = 3  # of one launch: a market that takes machines so often is not worth its start-ups
MARGIN_S = 5.0  # before a machine goes: a record is written and carried away
_OVERHEAD_S = 5.0  # of an item beside its timed steps: building, warming up, agreeing


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """Machines that go together. `leaving_s` None: they are gone. `notice` is "interruption" or "rebalance"."""

    nodes: frozenset[int]
    leaving_s: float | None = None
    notice: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
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
    no_more: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """`how` as above, and why, for a person."""

    how: str
    reason: str


def expected_s(item: Item) -> float:
    """Seconds that an item takes at most where nobody knows better."""
    return item.most_s + _OVERHEAD_S


def decide(loss: Loss, left: Left) -> Decision:
    """What becomes of a launch that loses machines. Asks nobody: whether a replacement is to be had shows later."""
    needing = [item for item in left.items if not loss.nodes.isdisjoint(item.nodes)]
    if loss.leaving_s is not None and loss.notice == "rebalance":
        return Decision(how="go on", reason="a rebalance recommendation takes nothing away yet")
    hosts = left.host in loss.nodes
    if not needing and not (hosts and left.items):
        return Decision(how="go on", reason="no run that is left needs it")
    if loss.leaving_s is not None:
        first = left.items[:1]
        if not (hosts or any(not loss.nodes.isdisjoint(item.nodes) for item in first)):
            return Decision(how="go on", reason="the run under way does not need it")
        if left.under_way_s + MARGIN_S <= loss.leaving_s:
            return Decision(how="go on", reason="the run under way ends before it goes")
    if needing and not left.no_more and left.start_up_s + min(map(expected_s, needing)) <= left.seconds:
        return Decision(how="replace", reason=f"{_runs(needing)} still {_need(needing)} it")
    if len(needing) < len(left.items):
        return Decision(how="fewer", reason=f"{_runs(needing)} left out, the others go on" if needing else "not needed")
    if loss.leaving_s is not None:
        return Decision(how="go on", reason="nothing better can be done with the time that it stays")
    why = left.no_more or "too little time or money is left to start another"
    return Decision(how="give up", reason=f"all runs that are left need it, and {why}")


def _runs(items: Sequence[Item]) -> str:
    return f"{len(items)} run{'' if len(items) == 1 else 's'}"


def _need(items: Sequence[Item]) -> str:
    return "needs" if len(items) == 1 else "need"
