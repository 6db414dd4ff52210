"""Choose the rank order of a launch's machines from measured links between pairs of machines."""

from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, Field

from models.domain.workload import COMBINED
from models.planner.placement import Links, Round, choose, halvings, ring

from ..node.record import LEAST_ORDERED, Item

MOST_ORDERED = 16  # maximum number of machines whose pairs are measured: 120 pairs, one at a time
# Size of a message in bytes: the bucket size of DistributedDataParallel, for every workload.
_MESSAGE_BYTES = 25 * 2**20

_Seconds = Annotated[float, Field(ge=0, lt=1e4)]
_Square = list[list[_Seconds]]


class _Pairs(BaseModel, strict=True, frozen=True, allow_inf_nan=False):
    """The links that `node.probe.pairs` measured, validated because machines may send wrong data.

    A sweep measures every pair once.

    nodes: the measured machines. Row and column i of each matrix belong to `nodes[i]`.
    latency_s: for each sweep, a square matrix. An entry is the seconds until two machines have sent
        each other one byte.
    byte_s: for each sweep, a square matrix. An entry is the additional seconds for each byte of a
        message.
    sharing: for each sweep, a number from 0 (every pair has a separate link) to 1 (all pairs share
        one link).
    """

    nodes: list[int]
    latency_s: list[_Square] = Field(min_length=2)
    byte_s: list[_Square]
    sharing: list[Annotated[float, Field(ge=0, le=1)]]

    def sweeps(self, nodes: Sequence[int]) -> list[Links]:
        """Return the measured links between `nodes`, as a `Links` for each sweep.

        A sweep is one measurement of every pair of nodes.

        Raises ValueError in these cases:

        - The measured nodes are not exactly `nodes`.
        - `latency_s` or `byte_s` lacks the time of a pair.
        - A time is zero or less.
        """
        latency_s, byte_s = np.array(self.latency_s), np.array(self.byte_s)  # raises if ragged
        shape = (len(self.sharing), len(nodes), len(nodes))
        if self.nodes != list(nodes) or not latency_s.shape == byte_s.shape == shape:
            raise ValueError("the measured links do not match the nodes of the attempt")
        between = ~np.eye(len(nodes), dtype=bool)
        if min(latency_s[:, between].min(), byte_s[:, between].min()) <= 0:
            raise ValueError("a link has a measured time of zero or less")
        return [
            Links(latency_s=latency, byte_s=byte, sharing=sharing)
            for latency, byte, sharing in zip(latency_s, byte_s, self.sharing, strict=True)
        ]


def links_matter(items: Sequence[Item], addresses: Sequence[str]) -> bool:
    """Return True if the links between machines should be measured to choose a rank order.

    Returns False in these cases:

    - Every run uses fewer than LEAST_ORDERED machines.
    - The launch has more than MOST_ORDERED machines, so that the measurement would take too long.
    - Two hosts have the same address, so that there is no network between them.

    addresses: the network address of each machine.
    """
    if len(set(addresses)) < len(addresses) or not LEAST_ORDERED <= len(addresses) <= MOST_ORDERED:
        return False
    return any(len(item.nodes) >= LEAST_ORDERED for item in items)


def sending_order(
    pairs: Any, nodes: Sequence[int], items: Sequence[Item]
) -> tuple[tuple[int, ...], str]:
    """Choose the fastest rank order for the runs `items`, and return (order, reason).

    The order lists `nodes` by rank. An empty order means that the current order is kept.

    pairs: the links between pairs of nodes, from `Mailbox.pairs`. If they are invalid, the
        current order is kept.
    nodes: the indices of the machines, in the current order.
    """
    try:
        sweeps = _Pairs.model_validate(pairs).sweeps(nodes)
    except ValueError:  # includes pydantic's ValidationError
        return (), f"unchanged: the links that node {nodes[0]} reported are invalid"
    places, reason = choose(sweeps, traffic(items, len(nodes)))
    order = list(places)
    if not any(item.strategy in COMBINED for item in items):
        # A ring may begin at any machine. Keep the first node first: it runs parameter servers.
        order = [*order[order.index(0) :], *order[: order.index(0)]]
    if order == list(range(len(nodes))):
        return (), reason
    return tuple(nodes[place] for place in order), reason


def traffic(items: Sequence[Item], machines: int) -> tuple[Round, ...]:
    """Return the rounds of messages that machines exchange in one step of each run in `items`.

    Runs on fewer than LEAST_ORDERED machines are left out.
    """
    pairs = machines & (machines - 1) == 0
    all_rounds: tuple[Round, ...] = ()
    for item in items:
        if len(item.nodes) >= LEAST_ORDERED:
            rounds = halvings if item.strategy in COMBINED and pairs else ring
            all_rounds += rounds(machines, _MESSAGE_BYTES)
    return all_rounds
