"""Which cores each host runs on while it is measured: shares packed so that no core is promised twice.

A quota alone says how much, not where: two hosts that the scheduler puts on one core for a moment each lose what the
other takes, and profiles come out up to a third too slow. Heaviest first, each to the least promised core.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from tasks.providers.local_processes import Process, hosts


def place(shares: Sequence[float], promised: Mapping[int, float]) -> list[set[int]]:
    """Cores for each share, aligned with `shares`; `promised` has every usable core with what others hold of it.

    A share of more than one core gets as many whole ones. Packing is not always possible: those that would share a core
    promised more than once over get every core, and the scheduler spreads them.
    """
    loads = dict(promised)
    placed: dict[int, set[int]] = {}
    for index in sorted(range(len(shares)), key=lambda i: -shares[i]):
        count = min(len(loads), max(1, math.ceil(shares[index] - 1e-9)))
        cores = sorted(loads, key=lambda core: (loads[core], core))[:count]
        for core in cores:
            loads[core] += shares[index] / count
        placed[index] = set(cores)
    overfull = {core for core, load in loads.items() if load > 1 + 1e-9}
    return [set(loads) if placed[index] & overfull else placed[index] for index in range(len(shares))]


def promised_to_others(lease_id: str) -> dict[int, float]:
    """Every core that we may use, with the shares that hosts of other leases hold of it where they are pinned."""
    loads = dict.fromkeys(os.sched_getaffinity(0), 0.0)
    for mark, pids in hosts().items():
        if mark.lease_id == lease_id:
            continue
        with suppress(OSError, ValueError):
            cores = os.sched_getaffinity(max(pids))
            for core in cores & loads.keys():
                loads[core] += mark.cores / len(cores)
    return loads


def pin(processes: Iterable[Process], cores: set[int]) -> None:
    """Every thread of `processes` to `cores`; what they start later follows. One that has just ended is passed over."""
    for process in processes:
        with suppress(FileNotFoundError):
            for thread in Path(f"/proc/{process.pid}/task").iterdir():
                with suppress(ProcessLookupError):
                    os.sched_setaffinity(int(thread.name), cores)
