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

DISTURBED = 0.1  # of the processor time that was wanted: runs of one setup differ by about as much anyway
_LEAST_TICKS = 20.0  # wanted: of fewer, one that was taken says nothing
_STAT = Path("/proc/stat")
_T = TypeVar("_T")


@dataclass(slots=True)
class Patience:
    """Seconds that may still go into measuring again; and ticks taken and wanted during what was kept of an item, at
    whichever of its machines had most taken away each time.
    """

    left_s: float = 0.0
    taken: float = 0.0
    wanted: float = 0.0

    @property
    def taken_share(self) -> float:
        """Part of the processor time wanted that was taken away during what was kept since `forget`."""
        return _share(self.taken, self.wanted)

    def forget(self) -> None:
        """Another item begins."""
        self.taken = self.wanted = 0.0

    def undisturbed(self, measure: Callable[[], _T], group: dist.ProcessGroup | None) -> _T:
        """What `measure` returns the first time that no machine of `group` has more taken away; all of it repeats.

        Once the patience of any of them is spent, whatever it returns then. Ranks decide alike, by the same numbers.
        """
        while True:
            before, started = processor_ticks(), time.monotonic()
            found = measure()
            taken, wanted = (now - then for now, then in zip(processor_ticks(), before, strict=True))
            told = gather([taken, wanted, time.monotonic() - started, self.left_s], group)
            worst = max(told, key=lambda one: (_share(one[0], one[1]), one[0]))
            spent_s, left_s = max(one[2] for one in told), min(one[3] for one in told)
            if _share(worst[0], worst[1]) < DISTURBED or left_s <= 0:
                self.taken, self.wanted = self.taken + worst[0], self.wanted + worst[1]
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


def _share(taken: float, wanted: float) -> float:
    return min(max(taken / wanted, 0.0), 1.0) if wanted >= _LEAST_TICKS else 0.0
