"""Leases of local hosts: what belongs to each, found by names and marks, and how all of it is
ended.

leases/<lease_id>/ also holds code/node/: the agent's copy, so that an edit of the checkout never
reaches a running host.
"""

from __future__ import annotations

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

_ROUNDS = 5  # of looking for what was started while others were being ended


class LeaseStore(LeaseFolder[HeldLease]):
    """The leases of one home. `token` tells its hosts and groups from those of other homes."""

    kind = HeldLease

    def __init__(self, home: Path) -> None:
        super().__init__(home.resolve() / "leases")
        self.token = sha256(os.fsencode(self.root)).hexdigest()[:8]
        self.prefix = f"srift-{self.token}-"  # of the names of this home's CPU groups

    def end(self, lease_id: str, shares: CpuShares) -> tuple[int, int]:
        """Kill all processes of a lease and remove its CPU groups; return how many of each there
        were.

        Raises ProviderError naming a group that stays busy.
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
                f"lease {lease_id}: {error.filename} is still busy; run `srift reap` again"
            ) from error
        return len(killed), removed

    def close(self, lease_id: str, now: datetime, outcome: str) -> None:
        """Mark a lease ended and delete its code; its mailbox stays. A full disk leaves it to the
        reaper.
        """
        lease = self.read(lease_id)
        if lease is None or lease.ended_at is not None:
            return
        for folder in ("code", "scratch"):
            shutil.rmtree(self.directory(lease_id) / folder, ignore_errors=True)
        usd = lease.held("local").usd_until(now)
        with suppress(OSError):
            self.write(replace(lease, ended_at=now, usd=usd, outcome=outcome))

    def stray_ids(self, shares: CpuShares) -> set[str]:
        """Lease ids of this home's processes and CPU groups, with or without a lease folder."""
        names = {
            name.removeprefix(self.prefix).rpartition("-")[0] for name in shares.names(self.prefix)
        }
        names |= {path.relative_to(self.root).parts[0] for _, path in started_from(self.root)}
        return {name for name in names if NAME.match(name)}
