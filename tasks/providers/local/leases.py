"""Store the leases of local hosts, and end the processes and cgroups of a lease.

A lease is the record of a launch. A process belongs to a lease if its PYTHONPATH is inside the
lease's folder. A cgroup belongs to a lease if its name contains the lease's id. Hosts run a copy of
the code in tasks/node. The copy is in the lease's folder, so that edits of the original code do not
change a running host.
"""

import os
import shutil
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from hashlib import sha256
from pathlib import Path

import psutil

from ..base import Lease, ProviderError
from ..leases import LeaseFolder
from .cpu_shares import CpuShares
from .processes import end, started_from

_ROUNDS = 5  # repeated searches, because processes may start while others are killed


class LeaseStore(LeaseFolder[Lease]):
    """The leases of one SRIFT_HOME.

    token: a hash that identifies this SRIFT_HOME in the names of hosts and cgroups.
    """

    kind = Lease

    def __init__(self, home: Path) -> None:
        super().__init__(home.resolve() / "leases")
        self.token = sha256(os.fsencode(self.root)).hexdigest()[:8]
        self.prefix = f"srift-{self.token}-"  # the cgroups' names begin with it

    def end(self, lease_id: str, shares: CpuShares) -> int:
        """Kill the processes of a lease, and remove its cgroups.

        Returns the number of killed processes.
        Raises ProviderError if a cgroup is still in use.
        """
        killed: set[psutil.Process] = set()
        code = self.directory(lease_id) / "code"
        for _ in range(_ROUNDS):
            left = set(started_from(code))
            if not left:
                break
            killed.update(end(left))
        try:
            shares.remove(f"{self.prefix}{lease_id}-")
        except OSError as error:
            raise ProviderError(
                f"lease {lease_id}: cgroup {error.filename} is still in use; run `srift reap` again"
            ) from error
        return len(killed)

    def close(self, lease_id: str, now: datetime, outcome: str) -> None:
        """Mark a lease as ended, and delete its code and scratch files, but not its mailbox.

        If the disk is full, the lease stays open until `srift reap`.
        """
        lease = self.read(lease_id)
        if lease is None or lease.ended_at is not None:
            return
        for folder in ("code", "scratch"):
            shutil.rmtree(self.directory(lease_id) / folder, ignore_errors=True)
        with suppress(OSError):
            self.write(replace(lease, ended_at=now, usd=lease.usd_until(now), outcome=outcome))
