"""What links do: all-reduce seconds over message sizes, and of messages between two machines."""

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
from .strategies.messages import exchange

_SIZE_S = 0.6  # to spend on a message size
_MIN_REPEATS, _MAX_REPEATS = 4, 40

SWEEPS = 3  # over all pairs: two choose an order, the third judges it
_PAIR_S = 0.01  # of a message between two machines
_MIN_BYTES, _MAX_BYTES = 2**16, 2**26
_EMPTIES = 5

Matrix = list[list[float]]


def probe(
    item: Item, group: dist.ProcessGroup | None, device: torch.device, patience: Patience
) -> tuple[dict[str, Any], str]:
    """Values of a probe record: `rows` of bytes, seconds, spread, repeats.

    Seconds are the interquartile mean of the slowest rank.
    """
    if group is None:
        return {}, "a probe needs at least two devices"
    rows = []
    for size in item.message_bytes:
        message = torch.zeros(max(1, size // 4), dtype=torch.float32, device=device)
        once_s = _all_reduce_s(message, group, repeats=2)[-1]
        repeats = max(_MIN_REPEATS, min(_MAX_REPEATS, int(_SIZE_S / max(once_s, 1e-6))))
        measure = partial(_all_reduce_s, message, group, repeats=repeats)
        seconds = patience.undisturbed(measure, group)
        rows.append(
            {
                "bytes": size,
                "seconds": fmean(seconds[place] for place in measuring.central(seconds)),
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
    """Seconds between each two of the n ranks of `group`, one of each machine, all others idle.

    `latency_s` and `byte_s`: (SWEEPS, n, n) of an empty message and of a further byte, both ends
    sending, at the slower end. `sharing`: (SWEEPS) how much the slowest disjoint pairs wait for
    each other when all send: 0 not at all, 1 as on one link. `took_s`: seconds of all this.
    Every rank of `group` must call it, on gloo.
    """
    began = time.monotonic()
    sizes: dict[int, int] = {}  # of messages to each peer
    sweeps = [_sweep(sizes, group) for _ in range(SWEEPS)]
    latency_s, byte_s = ([sweep[kind] for sweep in sweeps] for kind in range(2))
    ranks = range(dist.get_world_size(group))
    by_rank = gather([float(sizes.get(peer, 0)) for peer in ranks], group)
    alone_s, slowness = {}, {}
    for i, j in combinations(ranks, 2):
        latency, byte = (median(sweep[i][j] for sweep in kind) for kind in (latency_s, byte_s))
        alone_s[i, j] = latency + by_rank[i][j] * byte
        slowness[i, j] = alone_s[i, j] / by_rank[i][j]
    together = _disjoint(slowness)
    sharing = [_sharing(together, alone_s, sizes, group) for _ in range(SWEEPS)]
    took_s = time.monotonic() - began
    return {"latency_s": latency_s, "byte_s": byte_s, "sharing": sharing, "took_s": took_s}


def _sweep(sizes: dict[int, int], group: dist.ProcessGroup) -> tuple[Matrix, Matrix]:
    """Latency and seconds a byte of each pair, one pair after the other."""
    rank, ranks = dist.get_rank(group), range(dist.get_world_size(group))
    latency_s, byte_s = [0.0] * len(ranks), [0.0] * len(ranks)
    for pair in combinations(ranks, 2):
        meet(group)
        if rank in pair:
            peer = sum(pair) - rank
            empty_s = median(_exchange_s(1, peer, group) for _ in range(_EMPTIES))
            sizes[peer] = sizes.get(peer) or _size(peer, group)
            beyond_s = _steady_s(sizes[peer], peer, group) - empty_s
            latency_s[peer], byte_s[peer] = empty_s, max(beyond_s, 1e-12) / sizes[peer]
    return _slower(gather(latency_s, group)), _slower(gather(byte_s, group))


def _sharing(
    together: Sequence[tuple[int, int]],
    alone_s: dict[tuple[int, int], float],
    sizes: dict[int, int],
    group: dist.ProcessGroup,
) -> float:
    """How much disjoint pairs wait for each other when all send at once."""
    rank, own_s = dist.get_rank(group), 0.0
    meet(group)
    for pair in together:
        if rank in pair:
            peer = sum(pair) - rank
            own_s = _steady_s(sizes[peer], peer, group)
    at_once_s = max(seconds[0] for seconds in gather([own_s], group))
    slowest_s = max(alone_s[pair] for pair in together)
    in_turn_s = sum(alone_s[pair] for pair in together)
    return min(max((at_once_s - slowest_s) / (in_turn_s - slowest_s), 0.0), 1.0)


def _disjoint(slowness: dict[tuple[int, int], float]) -> list[tuple[int, int]]:
    """The slowest pair, the slowest pair of the other machines, and so on."""
    found: list[tuple[int, int]] = []
    for pair in sorted(slowness, key=lambda pair: (-slowness[pair], pair)):
        if not any(set(pair) & set(other) for other in found):
            found.append(pair)
    return found


def _slower(rows: Matrix) -> Matrix:
    """(n, n) the larger of what both ends measured."""
    return [[max(rows[i][j], rows[j][i]) for j in range(len(rows))] for i in range(len(rows))]


def _size(peer: int, group: dist.ProcessGroup) -> int:
    """Bytes that take about _PAIR_S; both ends find the same."""
    size = _MIN_BYTES
    while size < _MAX_BYTES:
        own = torch.tensor([_steady_s(size, peer, group)], dtype=torch.float64)
        theirs = torch.empty_like(own)
        exchange([(own, peer)], [(theirs, peer)], group)
        if max(own, theirs) >= _PAIR_S:
            break
        size *= 2
    return size


def _steady_s(size: int, peer: int, group: dist.ProcessGroup) -> float:
    """The faster of two messages after a first: a rate limit lets the first bytes pass at once."""
    _exchange_s(size, peer, group)
    return min(_exchange_s(size, peer, group) for _ in range(2))


def _exchange_s(size: int, peer: int, group: dist.ProcessGroup) -> float:
    given, received = torch.zeros(size, dtype=torch.uint8), torch.empty(size, dtype=torch.uint8)
    before = time.monotonic()
    exchange([(given, peer)], [(received, peer)], group)
    return time.monotonic() - before
