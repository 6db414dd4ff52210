"""CPU shares of local hosts: by quota where control groups can be written (v1 or v2), else whole
cores by affinity.

A quota is in force only while it is settled: starting up is not what is measured. With it goes the
greatest weight there is, so that whatever else runs on the machine waits for a measurement, not the
other way round. An affinity holds from the beginning, since a whole core costs a starting host
nothing.
"""

from __future__ import annotations

import math
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

from tasks.providers.base import NoCapacity
from tasks.providers.local.processes import Process, end, hosts, identify

_PERIOD_US = 10_000  # short, so that steps stay smooth
_LEAST_QUOTA_US = 1_000  # the kernel refuses less


class CpuShares(ABC):
    """A way to limit a host to its share. `why_not`: why no parts of a core can be enforced."""

    why_not = ""

    @abstractmethod
    def enforces(self, cores: float) -> bool:
        """Whether a share of `cores` can be enforced."""

    @abstractmethod
    def add(self, name: str, pids: Sequence[int], cores: float) -> None:
        """Put a host's first processes under control; what they start follows. Raises OSError,
        NoCapacity.
        """

    def settle(self, name: str, cores: float | None) -> None:
        """Limit the host to `cores`; None: full speed again. Raises OSError."""
        return

    def group(self, name: str) -> Path | None:
        return None

    def groups(self, prefix: str) -> list[Path]:
        """Directories of hosts whose names start with `prefix`."""
        return []


class Cgroups(CpuShares):
    """Quotas below one directory of a cgroup hierarchy that may be written; a group has none before
    it is settled.
    """

    def __init__(self, base: Path) -> None:
        self.base = base

    def enforces(self, cores: float) -> bool:
        return cores > 0

    def group(self, name: str) -> Path:
        return self.base / name

    def groups(self, prefix: str) -> list[Path]:
        return sorted(path for path in self.base.glob(f"{prefix}*") if path.is_dir())

    def add(self, name: str, pids: Sequence[int], cores: float) -> None:
        group = self.group(name)
        group.mkdir(exist_ok=True)
        for pid in pids:
            (group / "cgroup.procs").write_text(str(pid))

    def settle(self, name: str, cores: float | None) -> None:
        if cores is None:
            self._write(self.group(name), None, _PERIOD_US)
        else:
            period_us = max(_PERIOD_US, math.ceil(_LEAST_QUOTA_US / cores))
            self._write(self.group(name), round(cores * period_us), period_us)

    def prepare(self) -> None:
        """Make children of the base controllable. Raises OSError."""

    @abstractmethod
    def _write(self, group: Path, quota_us: int | None, period_us: int) -> None: ...


class CgroupsV1(Cgroups):
    """The `cpu` hierarchy of version 1: cpu.cfs_quota_us over cpu.cfs_period_us."""

    def _write(self, group: Path, quota_us: int | None, period_us: int) -> None:
        # Lifted first: no pair of an old quota and a new period is ever in force.
        (group / "cpu.cfs_quota_us").write_text("-1")
        (group / "cpu.cfs_period_us").write_text(str(period_us))
        (group / "cpu.shares").write_text("1024" if quota_us is None else "262144")
        if quota_us is not None:
            (group / "cpu.cfs_quota_us").write_text(str(quota_us))


class CgroupsV2(Cgroups):
    """The unified hierarchy: cpu.max, once the base hands the cpu controller down."""

    def prepare(self) -> None:
        """Hand the cpu controller down, where it is not already."""
        if "cpu" not in (self.base / "cgroup.subtree_control").read_text().split():
            (self.base / "cgroup.subtree_control").write_text("+cpu")

    def _write(self, group: Path, quota_us: int | None, period_us: int) -> None:
        (group / "cpu.max").write_text(f"{'max' if quota_us is None else quota_us} {period_us}")
        (group / "cpu.weight").write_text("100" if quota_us is None else "10000")


class Affinity(CpuShares):
    """Whole cores, each host on its own from `add` on: all that an ordinary user can enforce."""

    def __init__(self, why_not: str) -> None:
        self.why_not = why_not

    def enforces(self, cores: float) -> bool:
        return cores >= 1 and float(cores).is_integer()

    def add(self, name: str, pids: Sequence[int], cores: float) -> None:
        """Pin the processes to cores that no other host is pinned to. Raises NoCapacity where there
        are too few.
        """
        mine = os.sched_getaffinity(0)
        taken: set[int] = set()
        for pid in {pid for others in hosts().values() for pid in others} - set(pids):
            with suppress(OSError):
                pinned = os.sched_getaffinity(pid)
                taken |= pinned if len(pinned) < len(mine) else set()
        free = sorted(mine - taken, reverse=True)[: int(cores)]
        if len(free) < int(cores):
            raise NoCapacity(
                f"{int(cores)} whole cores wanted, {len(free)} not given to another host"
            )
        for pid in pids:
            os.sched_setaffinity(pid, free)


def detect(mounts: Path = Path("/proc/mounts"), own: Path = Path("/proc/self/cgroup")) -> CpuShares:
    """Return the first way that works: a quota on a group made for the purpose, else affinity."""
    reasons: list[str] = []
    for groups in _candidates(mounts.read_text(), own.read_text()):
        name = f"srift-try-{os.getpid()}"
        try:
            groups.prepare()
            groups.group(name).mkdir(exist_ok=True)
            groups.settle(name, 0.5)
        except OSError as error:
            reasons.append(f"{groups.base}: {error.strerror}")
        else:
            return groups
        finally:
            with suppress(OSError):
                groups.group(name).rmdir()
    return Affinity(
        "; ".join(dict.fromkeys(reasons)) or "no cgroup hierarchy with a cpu controller is mounted"
    )


@cache
def quota_cores(
    mounts: Path = Path("/proc/mounts"), own: Path = Path("/proc/self/cgroup")
) -> float:
    """Cores that the quotas on our group and those above it leave us; infinity without one."""
    least = math.inf
    for kind, top, home in _hierarchies(mounts.read_text(), own.read_text()):
        for group in (home, *home.parents):
            if not group.is_relative_to(top):
                break
            if kind == "cgroup":
                words = _words(group / "cpu.cfs_quota_us") + _words(group / "cpu.cfs_period_us")
            else:
                words = _words(group / "cpu.max")
            if len(words) == 2 and words[0] not in ("max", "-1"):
                least = min(least, int(words[0]) / int(words[1]))
    return least


def _candidates(mounts: str, own: str) -> Iterator[Cgroups]:
    """Yield groups below ours, so that limits on us hold; else below the root; else beside us."""
    for kind, top, home in _hierarchies(mounts, own):
        if kind == "cgroup":
            yield from (CgroupsV1(base) for base in dict.fromkeys([home, top]) if base.is_dir())
        elif "cpu" in _words(top / "cgroup.controllers"):
            bases = [home, top, home.parent if home != top else top]
            yield from (CgroupsV2(base) for base in dict.fromkeys(bases) if base.is_dir())


def _hierarchies(mounts: str, own: str) -> Iterator[tuple[str, Path, Path]]:
    """Each mounted hierarchy that may hold the cpu controller: its kind, its top, and our own group
    in it.
    """
    paths = {
        controllers: path
        for _, controllers, path in (line.split(":", 2) for line in own.splitlines())
    }
    for fields in (line.split() for line in mounts.splitlines()):
        top, kind, options = Path(fields[1]), fields[2], fields[3].split(",")
        if kind == "cgroup" and "cpu" in options:
            below = next(
                (path for controllers, path in paths.items() if "cpu" in controllers.split(",")),
                "/",
            )
            yield kind, top, top / below.lstrip("/")
        elif kind == "cgroup2":
            yield kind, top, top / paths.get("", "/").lstrip("/")


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []


def members(group: Path) -> list[Process]:
    pids = (int(word) for word in _words(group / "cgroup.procs"))
    return [process for process in map(identify, pids) if process is not None]


def remove(group: Path, *, within_s: float = 3.0) -> bool:
    """End the processes of a group and remove it; whether it was there. Raises OSError if it stays
    busy.
    """
    until = time.monotonic() + within_s
    while group.is_dir():
        end(members(group))
        try:
            group.rmdir()
        except FileNotFoundError:
            return False
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.01)
        else:
            return True
    return False


def place(shares: Sequence[float], promised: Mapping[int, float]) -> list[set[int]]:
    """Cores for each share, aligned with `shares`; `promised` has every usable core with what
    others hold of it.

    A share of more than one core gets as many whole ones. Packing is not always possible: those
    that would share a core promised more than once over get every core, and the scheduler spreads
    them.
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
    return [
        set(loads) if placed[index] & overfull else placed[index] for index in range(len(shares))
    ]


def promised_to_others(lease_id: str) -> dict[int, float]:
    """Shares of each core that hosts of other leases are pinned to."""
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
    """Every thread of `processes` to `cores`; what they start later follows. One that has just
    ended is passed over.
    """
    for process in processes:
        with suppress(FileNotFoundError):
            for thread in Path(f"/proc/{process.pid}/task").iterdir():
                with suppress(ProcessLookupError):
                    os.sched_setaffinity(int(thread.name), cores)
