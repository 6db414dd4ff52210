"""Store the leases of local hosts, and end everything that belongs to a lease.

The PYTHONPATH of a process and the name of a cgroup show to which lease they belong. The folder of
a lease also has code/node/, a copy of the agent. An edit of the checkout therefore never reaches a
running host.
"""

import os
import shutil
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from hashlib import sha256
from pathlib import Path

from tasks.providers.base import ProviderError
from tasks.providers.leases import NAME, HeldLease, LeaseFolder
from tasks.providers.local.cpu_shares import CpuShares
from tasks.providers.local.processes import Process, end, started_from

_ROUNDS = 5  # searches for processes that were started while others were killed


class LeaseStore(LeaseFolder[HeldLease]):
    """The leases of one home. `token` identifies the home in the names of hosts and cgroups."""

    kind = HeldLease

    def __init__(self, home: Path) -> None:
        super().__init__(home.resolve() / "leases")
        self.token = sha256(os.fsencode(self.root)).hexdigest()[:8]
        self.prefix = f"srift-{self.token}-"  # names of this home's CPU groups start with it

    def end(self, lease_id: str, shares: CpuShares) -> tuple[int, int]:
        """Kill all processes of a lease and remove its cgroups.

        Returns the number of killed processes and the number of removed cgroups. Raises
        ProviderError if a cgroup is still in use.
        """
        killed: set[Process] = set()
        code = self.directory(lease_id) / "code"
        for _ in range(_ROUNDS):
            left = {process for process, _ in started_from(code)}
            if not left:
                break
            killed |= set(end(left))
        try:
            removed = shares.remove(f"{self.prefix}{lease_id}-")
        except OSError as error:
            raise ProviderError(
                f"lease {lease_id}: cgroup {error.filename} is still in use; run `srift reap` again"
            ) from error
        return len(killed), removed

    def close(self, lease_id: str, now: datetime, outcome: str) -> None:
        """Mark a lease as ended, and delete its code and scratch files. Its mailbox stays.

        Does nothing if the lease has ended already. If the disk is full, the lease stays open and
        the reaper ends it later.
        """
        lease = self.read(lease_id)
        if lease is None or lease.ended_at is not None:
            return
        for folder in ("code", "scratch"):
            shutil.rmtree(self.directory(lease_id) / folder, ignore_errors=True)
        usd = lease.held().usd_until(now)
        with suppress(OSError):
            self.write(replace(lease, ended_at=now, usd=usd, outcome=outcome))

    def stray_ids(self, shares: CpuShares) -> set[str]:
        """Return the lease ids of all processes and cgroups that this home started.

        Leases without a folder are included.
        """
        names = {
            name.removeprefix(self.prefix).rpartition("-")[0] for name in shares.names(self.prefix)
        }
        names |= {path.relative_to(self.root).parts[0] for _, path in started_from(self.root)}
        return {name for name in names if NAME.match(name)}
