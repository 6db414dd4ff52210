"""What links do: all-reduce seconds over message sizes, and seconds of messages between each two machines.

All-reduces are interquartile means of the slowest rank, repeats bounded by time.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from itertools import combinations
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed as dist

from . import measuring
from .device import now
from .measuring import Patience, gather, meet
from .record import Item

_SIZE_S = 0.6  # about this long for one message size
_REPEATS_LEAST, _REPEATS_MOST = 4, 40

SWEEPS = 3  # over all pairs: an order chosen by two is judged by the third
_PAIR_S = 0.01  # about this long for one message between two machines
_LEAST_BYTES, _MOST_BYTES = 2**16, 2**26
_EMPTIES = 5


def probe(
    item: Item, group: dist.ProcessGroup | None, device: torch.device, patience: Patience
) -> tuple[dict[str, Any], str]:
    """Values of a probe record: `rows` of bytes, seconds, spread, repeats. One device has nothing to send to."""
    if group is None:
        return {}, "a probe needs at least two devices"
    rows = []
    for size in item.message_bytes:
        message = torch.zeros(max(1, size // 4), dtype=torch.float32, device=device)
        first = _all_reduce_s(message, group, repeats=2)[-1]
        repeats = max(_REPEATS_LEAST, min(_REPEATS_MOST, int(_SIZE_S / max(first, 1e-6))))
        seconds = patience.undisturbed(
            partial(_all_reduce_s, message, group, repeats=repeats), group
        )
        middle = fmean(seconds[i] for i in measuring.central(seconds))
        rows.append(
            {
                "bytes": size,
                "seconds": middle,
                "spread": measuring.spread(seconds),
                "repeats": repeats,
            }
        )
    return {"rows": rows}, ""


def _all_reduce_s(message: torch.Tensor, group: dist.ProcessGroup, *, repeats: int) -> list[float]:
    """Seconds of each all-reduce at its slowest rank, back to back after a common start."""
    mine = []
    meet(group)
    for _ in range(repeats):
        before = now(message.device)
        dist.all_reduce(message, group=group)
        mine.append(now(message.device) - before)
    return measuring.slowest(gather(mine, group))


def pairs(group: dist.ProcessGroup) -> dict[str, Any]:
    """Seconds between each two of the n ranks of `group`, one of each machine, both sending at once, and no others.

    `latency_s` and `byte_s`: (SWEEPS, n, n) of an empty message and of a further byte, at the slower end. `sharing`:
    (SWEEPS) of the slowest pairs without a common machine how much they wait for each other when all send at once: 0
    not at all, 1 as on one link. `took_s`: seconds of all this. Every rank of `group` must call it, on gloo.
    """
    rank, many = dist.get_rank(group), dist.get_world_size(group)
    sizes: dict[int, int] = {}  # of messages to each peer
    latency_s, byte_s, sharing = [], [], []
    began = time.monotonic()
    for _ in range(SWEEPS):
        own_latency_s, own_byte_s = [0.0] * many, [0.0] * many
        for pair in combinations(range(many), 2):
            meet(group)
            if rank in pair:
                peer = sum(pair) - rank
                empty_s = median(_exchange_s(1, peer, group) for _ in range(_EMPTIES))
                sizes[peer] = sizes.get(peer) or _size(peer, group)
                own_latency_s[peer] = empty_s
                own_byte_s[peer] = (
                    max(_steady_s(sizes[peer], peer, group) - empty_s, 1e-12) / sizes[peer]
                )
        rows = gather(own_latency_s + own_byte_s, group)
        latency_s.append(_slower([one[:many] for one in rows]))
        byte_s.append(_slower([one[many:] for one in rows]))
    shapes = gather([float(sizes.get(peer, 0)) for peer in range(many)], group)
    alone_s = {
        (i, j): median(one[i][j] for one in latency_s)
        + shapes[i][j] * median(one[i][j] for one in byte_s)
        for i, j in combinations(range(many), 2)
    }
    together = _disjoint(
        {pair: seconds / shapes[pair[0]][pair[1]] for pair, seconds in alone_s.items()}
    )
    for _ in range(SWEEPS):
        meet(group)
        own_s = 0.0
        for pair in together:
            if rank in pair:
                peer = sum(pair) - rank
                own_s = _steady_s(sizes[peer], peer, group)
        at_once_s = max(one[0] for one in gather([own_s], group))
        slowest_s, summed_s = (
            max(map(alone_s.__getitem__, together)),
            sum(map(alone_s.__getitem__, together)),
        )
        sharing.append(min(max((at_once_s - slowest_s) / (summed_s - slowest_s), 0.0), 1.0))
    return {
        "latency_s": latency_s,
        "byte_s": byte_s,
        "sharing": sharing,
        "took_s": time.monotonic() - began,
    }


def _disjoint(slowness: dict[tuple[int, int], float]) -> list[tuple[int, int]]:
    """The slowest pair, the slowest of those that have no machine in common with it, and so on."""
    found: list[tuple[int, int]] = []
    for pair in sorted(slowness, key=lambda one: (-slowness[one], one)):
        if not any(set(pair) & set(other) for other in found):
            found.append(pair)
    return found


def _slower(rows: Sequence[Sequence[float]]) -> list[list[float]]:
    """(n, n) of each two the larger of what both ends measured."""
    return [[max(rows[i][j], rows[j][i]) for j in range(len(rows))] for i in range(len(rows))]


def _size(peer: int, group: dist.ProcessGroup) -> int:
    """Bytes that take about _PAIR_S; both ends find the same."""
    size = _LEAST_BYTES
    while size < _MOST_BYTES:
        own = torch.tensor([_steady_s(size, peer, group)], dtype=torch.float64)
        theirs = torch.empty_like(own)
        _exchange(own, theirs, peer, group)
        slower_s = float(max(own, theirs))
        if slower_s >= _PAIR_S:
            break
        size *= 2
    return size


def _steady_s(size: int, peer: int, group: dist.ProcessGroup) -> float:
    """Of the faster of two messages after one alike: a rate limited on average lets the first bytes through at once."""
    _exchange_s(size, peer, group)
    return min(_exchange_s(size, peer, group) for _ in range(2))


def _exchange_s(size: int, peer: int, group: dist.ProcessGroup) -> float:
    given, received = torch.zeros(size, dtype=torch.uint8), torch.empty(size, dtype=torch.uint8)
    before = time.monotonic()
    _exchange(given, received, peer, group)
    return time.monotonic() - before


def _exchange(
    given: torch.Tensor, received: torch.Tensor, peer: int, group: dist.ProcessGroup
) -> None:
    """Both ends send and receive at once."""
    asked = [dist.P2POp(dist.isend, given, group=group, group_peer=peer)]
    asked.append(dist.P2POp(dist.irecv, received, group=group, group_peer=peer))
    for work in dist.batch_isend_irecv(asked):
        work.wait()
