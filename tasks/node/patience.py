"""What a machine's own host takes away while something is measured, and measuring that again.

A virtual processor that wants to run and may not counts as stolen in /proc/stat [proc(5)]. A step is then as long as
the host's other guests make it, which nobody asked about. Hosts take processors away for seconds to minutes, so that
waiting helps; nobody waits for ever, and what was taken during what is kept is told with it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from .peers import gather

MOST_TAKEN = 0.1  # of the processor time that was wanted: runs of one setup differ by about as much anyway
_STAT = Path("/proc/stat")
_T = TypeVar("_T")


@dataclass(slots=True)
class Patience:
    """Seconds that may still go into measuring again, and the largest part that was taken during what was kept."""

    left_s: float = 0.0
    taken: float = 0.0

    def undisturbed(self, measure: Callable[[], _T], group: dist.ProcessGroup | None) -> _T:
        """What `measure` returns the first time that no machine of `group` has more taken away; all of it repeats.

        Once the patience of any of them is spent, whatever it returns then.
        """
        while True:
            before, started = processor_ticks(), time.monotonic()
            found = measure()
            told = gather([taken_since(before), time.monotonic() - started, self.left_s], group)
            taken, spent_s, left_s = (
                max(one[0] for one in told),
                max(one[1] for one in told),
                min(one[2] for one in told),
            )
            if taken <= MOST_TAKEN or left_s <= 0:
                self.taken = max(self.taken, taken)
                return found
            self.left_s = left_s - spent_s


def processor_ticks() -> tuple[float, float]:
    """Of this machine since it started: ticks that its host took away, and all that its processors wanted."""
    try:
        words = _STAT.read_text().split("\n", 1)[0].split()
        user, nice, system, _idle, _waiting, interrupts, soft, taken = (float(one) for one in words[1:9])
    except (OSError, ValueError):  # a kernel that does not tell
        return 0.0, 0.0
    return taken, user + nice + system + interrupts + soft + taken


def taken_since(before: tuple[float, float]) -> float:
    """Part of the processor time wanted since then that the host took away; 0 where none was wanted."""
    taken, wanted = (now - then for now, then in zip(processor_ticks(), before, strict=True))
    return taken / wanted if wanted > 0 else 0.0
