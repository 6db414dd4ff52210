"""Measure the network: time all-reduces of several sizes, and messages between two machines."""

import time
from functools import partial
from itertools import combinations
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist

from .device import now
from .record import Item
from .repetition import NotMeasured, Patience, central, meet
from .strategies.messages import exchange
from .strategies.replicas import Group, of_ranks

_SIZE_S = 0.6  # seconds to spend on each message size
_MIN_REPEATS, _MAX_REPEATS = 4, 40

# Number of measurements of all pairs of machines. Two measurements choose an order of the machines,
# and the third measurement checks this order.
SWEEPS = 3
_PAIR_S = 0.01  # minimum seconds of an exchange of the long message
_MIN_BYTES, _MAX_BYTES = 2**16, 2**26  # limits of the size of the long message
_EXCHANGES = 4  # number of exchanges of a message; the first one is a warm-up


def probe(item: Item, group: Group, device: torch.device, patience: Patience) -> dict[str, Any]:
    """Time all-reduces of several sizes, and return the values for the run's record.

    Returns {"rows": list}. Each row is a dictionary for one message size:

    bytes: the size of the message.
    seconds: the interquartile mean over repeated all-reduces. The time of an all-reduce is the time
        on its slowest rank.

    Raises NotMeasured if `group` is None, because a single device does not use the network.
    """
    if group is None:
        raise NotMeasured("a probe of the network needs at least two devices")
    rows = []
    for size in item.message_bytes:
        message = torch.zeros(size // 4, dtype=torch.float32, device=device)
        once_s = _all_reduce_s(message, group, repeats=2)[-1]
        repeats = max(_MIN_REPEATS, min(_MAX_REPEATS, int(_SIZE_S / once_s)))
        measure = partial(_all_reduce_s, message, group, repeats=repeats)
        seconds = patience.repeat_if_disturbed(measure, group)
        rows.append({"bytes": size, "seconds": fmean(central(seconds, float))})
    return {"rows": rows}


def _all_reduce_s(message: torch.Tensor, group: dist.ProcessGroup, *, repeats: int) -> list[float]:
    """Run `repeats` all-reduces, and return the seconds of each all-reduce on its slowest rank."""
    mine = []
    meet(group)
    for _ in range(repeats):
        before = now(message.device)
        dist.all_reduce(message, group=group)
        mine.append(now(message.device) - before)
    return [max(each) for each in zip(*of_ranks(mine, group), strict=True)]


def pairs(group: dist.ProcessGroup) -> dict[str, Any]:
    """Measure the links between the n ranks of a gloo `group`, which has one rank per machine.

    Every rank of `group` must call this function. Each measurement is repeated SWEEPS times. The
    result has these keys, and each value is a list with one element per repeat:

    latency_s: (n, n) matrices. Entry (i, j) is the time in seconds in which ranks i and j send each
        other one byte.
    byte_s: (n, n) matrices. Entry (i, j) is the additional time in seconds for each byte of a
        longer message.
    sharing: numbers from 0 to 1. 0 means that pairs of machines do not delay each other if they
        send at the same time. 1 means that all pairs share one link.
    """
    links = _Links(group)
    sweeps = torch.stack([links.sweep() for _ in range(SWEEPS)])
    latency_s, byte_s = sweeps.median(dim=0).values
    sizes = torch.tensor(of_ranks(links.sizes, group))
    alone_s = latency_s + sizes * byte_s
    slowness = alone_s / sizes
    # Choose disjoint pairs: first the slowest pair, then the slowest pair of the other machines.
    together: dict[tuple[int, int], float] = {}
    every = combinations(range(len(sizes)), 2)
    for pair in sorted(every, key=slowness.__getitem__, reverse=True):
        if not any(set(pair) & set(other) for other in together):
            together[pair] = alone_s[pair].item()
    return {
        "latency_s": sweeps[:, 0].tolist(),
        "byte_s": sweeps[:, 1].tolist(),
        "sharing": [links.sharing(together) for _ in range(SWEEPS)],
    }


class _Links:
    """This rank's links to the other ranks of `group`.

    Each link is measured with a message of one byte and a long message.

    sizes: the size in bytes of the long message to each rank; 0 until the first sweep.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.rank = group, dist.get_rank(group)
        self.sizes = [0] * dist.get_world_size(group)

    def sweep(self) -> torch.Tensor:
        """Measure each pair of ranks once. Return a tensor of shape (2, ranks, ranks).

        The first matrix has the latencies in seconds. The second matrix has the seconds per byte.
        """
        mine = torch.zeros(2, len(self.sizes), dtype=torch.float64)
        for pair in combinations(range(len(self.sizes)), 2):
            meet(self.group)
            if self.rank in pair:
                peer = sum(pair) - self.rank
                empty_s = self._steady_s(1, peer)
                size = self.sizes[peer] = self.sizes[peer] or self._size(peer)
                beyond_s = self._steady_s(size, peer) - empty_s
                mine[:, peer] = torch.tensor([empty_s, max(beyond_s, 1e-12) / size])
        both = torch.stack(of_ranks(mine, self.group), dim=1)
        return torch.maximum(both, both.mT)

    def sharing(self, together: dict[tuple[int, int], float]) -> float:
        """Measure how much the pairs in `together` delay each other if all send at the same time.

        The result 0 means not at all, and 1 means that all pairs share one link.

        together: {pair of ranks: seconds of an exchange while no other pair sends}. No rank is in
            two pairs.
        """
        mine_s = 0.0
        meet(self.group)
        for pair in together:
            if self.rank in pair:
                peer = sum(pair) - self.rank
                mine_s = self._steady_s(self.sizes[peer], peer)
        at_once_s: float = max(of_ranks(mine_s, self.group))
        slowest_s, in_turn_s = max(together.values()), sum(together.values())
        return min(max((at_once_s - slowest_s) / (in_turn_s - slowest_s), 0.0), 1.0)

    def _size(self, peer: int) -> int:
        """Return the size in bytes of the long message for the link to `peer`.

        An exchange of this size takes at least _PAIR_S seconds. If even _MAX_BYTES bytes take less
        time, the size is _MAX_BYTES.
        """
        size = _MIN_BYTES
        while size < _MAX_BYTES:
            mine = torch.tensor([self._steady_s(size, peer)], dtype=torch.float64)
            theirs = torch.empty_like(mine)
            exchange((mine, peer), (theirs, peer), self.group)
            if max(mine, theirs) >= _PAIR_S:
                break
            size *= 2
        return size

    def _steady_s(self, size: int, peer: int) -> float:
        """Exchange `size` bytes with `peer` in both directions, and return the time in seconds.

        The time is the minimum of several exchanges after a warm-up.
        """
        sent, received = (torch.zeros(size, dtype=torch.uint8) for _ in range(2))
        times = []
        for _ in range(_EXCHANGES):
            before = time.monotonic()
            exchange((sent, peer), (received, peer), self.group)
            times.append(time.monotonic() - before)
        return min(times[1:])  # some links send the first bytes above their rate limit
