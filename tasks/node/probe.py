"""All-reduce seconds over message sizes: interquartile means of the slowest rank, repeats bounded by time."""

from __future__ import annotations

from functools import partial
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist

from . import measuring
from .device import now
from .measuring import Patience, gather, meet
from .record import Item

_SIZE_S = 0.6  # about this long for one message size
_REPEATS_LEAST, _REPEATS_MOST = 4, 40


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
        seconds = patience.undisturbed(partial(_all_reduce_s, message, group, repeats=repeats), group)
        middle = fmean(seconds[i] for i in measuring.central(seconds))
        rows.append({"bytes": size, "seconds": middle, "spread": measuring.spread(seconds), "repeats": repeats})
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
