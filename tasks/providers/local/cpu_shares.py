"""Limit the CPU time of local hosts: with cgroup quotas (v1 or v2), or by pinning to whole cores.

During a measurement, a host is pinned to cores. It also has a quota and the maximum CPU weight, so
that it runs before other programs. If this process cannot set quotas, each host is only pinned to
whole cores.
"""

import math
import os
import signal
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import psutil

from .processes import hosts

_PERIOD_US = 10_000  # short, so that step times vary little
_LEAST_QUOTA_US = 1_000  # the kernel refuses a smaller quota
_REMOVED_S = 3.0  # maximum wait until the cgroup of killed processes can be removed
_MOUNTS, _OUR_GROUP = Path("/proc/mounts"), Path("/proc/self/cgroup")


@dataclass(frozen=True)
class CpuShares:
    """Limits the CPU time of hosts. Each host has a cgroup below the folder `base`.

    version: the cgroup version, 1 or 2.
    why_not: why this process cannot set quotas; "" if it can.
    """

    version: int = 0
    base: Path = Path(os.devnull)
    why_not: str = ""

    def add(self, name: str, pids: Collection[int]) -> None:
        """Move a host's processes to a new cgroup, `name`.

        Does nothing if this process cannot set quotas. Raises OSError if the cgroup cannot be
        created or joined.
        """
        if self.why_not:
            return
        group = self.base / name
        group.mkdir(exist_ok=True)
        for pid in pids:
            (group / "cgroup.procs").write_text(str(pid))

    def settle(
        self,
        name: str,
        processes: Collection[psutil.Process],
        cores: float | None,
        usable: set[int],
    ) -> None:
        """Set the CPU quota of the host `name`, and pin the host to the cores in `usable`.

        If this process cannot set quotas (see `why_not`), the host is only pinned.

        processes: all processes of the host.
        cores: the quota, such as 1.5 cores; None removes the quota.
        usable: the indices of the cores on which the host may run.

        Raises OSError if writing the quota or pinning fails.
        """
        if not self.why_not:
            self._write_quota(self.base / name, cores)
        for process in processes:
            with suppress(psutil.NoSuchProcess):  # the process has just ended
                for thread in process.threads():
                    with suppress(ProcessLookupError):
                        os.sched_setaffinity(thread.id, usable)

    def remove(self, prefix: str) -> None:
        """End the hosts whose names start with `prefix`, and remove their cgroups.

        Raises OSError if a cgroup is still in use.
        """
        for group in list(self.base.glob(f"{prefix}*")):
            until = time.monotonic() + _REMOVED_S
            while group.is_dir():
                for pid in _words(group / "cgroup.procs"):
                    with suppress(ProcessLookupError):
                        os.kill(int(pid), signal.SIGKILL)
                try:
                    group.rmdir()
                except OSError:
                    if time.monotonic() > until:
                        raise
                    time.sleep(0.01)

    def _write_quota(self, group: Path, cores: float | None) -> None:
        """Limit a cgroup to `cores` cores and set the maximum CPU weight.

        cores: None removes the limit and resets the weight.
        Raises OSError if the cgroup's files cannot be written.
        """
        period_us, quota_us = _PERIOD_US, 0
        if cores:
            period_us = max(_PERIOD_US, math.ceil(_LEAST_QUOTA_US / cores))
            quota_us = round(cores * period_us)
        if self.version == 2:
            (group / "cpu.max").write_text(f"{quota_us or 'max'} {period_us}")
            (group / "cpu.weight").write_text("10000" if quota_us else "100")
            return
        # Lift the quota first, so that an old quota never applies with a new period.
        (group / "cpu.cfs_quota_us").write_text("-1")
        (group / "cpu.cfs_period_us").write_text(str(period_us))
        (group / "cpu.cfs_quota_us").write_text(str(quota_us or -1))
        (group / "cpu.shares").write_text("262144" if quota_us else "1024")


def detect() -> CpuShares:
    """Return a `CpuShares` with the first cgroup folder in which this process can set quotas.

    If there is no such folder, the attribute `why_not` of the result gives the reasons.
    """
    reasons = []
    for version, top, home in _hierarchies():
        # Try this process's cgroup first, so that the limits of this process apply to its hosts.
        bases = dict.fromkeys([home, top, home.parent if home != top else top])
        for base in filter(Path.is_dir, bases):
            shares, group = CpuShares(version, base), base / f"srift-try-{os.getpid()}"
            try:
                if version == 2:
                    (base / "cgroup.subtree_control").write_text("+cpu")
                group.mkdir(exist_ok=True)
                shares._write_quota(group, 0.5)
                return shares
            except OSError as error:
                reasons.append(f"{base}: {error.strerror}")
            finally:
                with suppress(OSError):
                    group.rmdir()
    none = "no cgroup hierarchy with a cpu controller is mounted"
    return CpuShares(why_not="; ".join(reasons) or none)


def usable_cores() -> float:
    """Return the number of cores that this process may use.

    The CPU affinity and the cgroup quotas both limit this number. The lower limit is returned.
    """
    return min(len(os.sched_getaffinity(0)), quota_cores())


@cache
def quota_cores() -> float:
    """Return the number of cores that cgroup quotas allow this process; inf without quotas."""
    least = math.inf
    for version, top, home in _hierarchies():
        files = ("cpu.max",) if version == 2 else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        for group in (home, *home.parents):
            words = [word for file in files for word in _words(group / file)]
            if group.is_relative_to(top) and len(words) == 2 and words[0] not in ("max", "-1"):
                least = min(least, int(words[0]) / int(words[1]))
    return least


def _hierarchies() -> Iterator[tuple[int, Path, Path]]:
    """Yield (version, mount point, cgroup) for each mounted cgroup hierarchy that may have quotas.

    version: the cgroup version, 1 or 2.
    cgroup: the folder of this process's cgroup in the hierarchy.
    """
    paths = dict[str, str]()
    for line in _OUR_GROUP.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        paths |= dict.fromkeys(controllers.split(","), path.lstrip("/"))
    for line in _MOUNTS.read_text().splitlines():
        _, mounted, kind, options, *_ = line.split()
        top = Path(mounted)
        if kind == "cgroup" and "cpu" in options.split(","):
            yield 1, top, top / paths.get("cpu", "")
        elif kind == "cgroup2":
            yield 2, top, top / paths.get("", "")


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []


def place(shares: Sequence[float], promised: Mapping[int, float]) -> list[set[int]]:
    """Return the set of cores on which each host of a launch may run.

    Hosts are placed by size, beginning with the largest. Each host gets the cores with the least
    load. For example, a host with 1.5 cores gets two cores, and adds a load of 0.75 to each core.
    A load of 1 fills a core. If the final load of any of a host's cores exceeds 1, the host may
    run on all usable cores.

    shares: number of cores of each host, such as 1.5.
    promised: {usable core: load from the hosts of other launches}.
    """
    loads = dict(promised)
    placed: list[set[int]] = [set() for _ in shares]
    for index in sorted(range(len(shares)), key=lambda i: -shares[i]):
        count = min(len(loads), max(1, math.ceil(shares[index] - 1e-9)))
        placed[index] = set(sorted(loads, key=lambda core: (loads[core], core))[:count])
        for core in placed[index]:
            loads[core] += shares[index] / count
    overfull = {core for core, load in loads.items() if load > 1 + 1e-9}
    return [set(loads) if cores & overfull else cores for cores in placed]


def promised_to_others(lease_id: str) -> dict[int, float]:
    """Return {usable core: load} from the hosts of all launches except `lease_id`.

    A load of 1 fills the core. For example, a host with 1.5 cores that is pinned to two cores adds
    a load of 0.75 to each core.
    """
    loads = dict.fromkeys(os.sched_getaffinity(0), 0.0)
    for mark, pids in hosts().items():
        with suppress(OSError):
            cores = os.sched_getaffinity(max(pids)) if mark.lease_id != lease_id else set()
            for core in cores & loads.keys():
                loads[core] += mark.cores / len(cores)
    return loads
