"""The local provider: real hosts on one Linux machine, with CPU shares, shaped links and
revocations.

Its prices are illustrative. Nothing is installed and nothing outlives the processes but the lease's
directory.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from models.domain.cluster import Cluster
from tasks.providers.base import (
    Capabilities,
    EndedLease,
    Lease,
    NoCapacity,
    NotSupported,
    NotSwept,
    Provider,
    ProviderError,
)
from tasks.providers.local import catalogue as local_catalogue
from tasks.providers.local.catalogue import LocalCatalogue, cores_of
from tasks.providers.local.cluster import LocalCluster, Surroundings
from tasks.providers.local.leases import LeaseStore, LocalLease
from tasks.providers.local.settings import LocalInstanceType

_CARRIED = ("HOME", "LANG")  # no credentials and no settings of ours reach a host

CAPABILITIES = Capabilities(spends_money=False, simulated=True)


class LocalProvider(LocalCatalogue, Provider):
    """Hosts on this machine, leases under `home`/leases. `python` runs a copy of `node_package` on
    each host.
    """

    name = "local"

    def __init__(
        self,
        home: Path,
        instance_types: Mapping[str, LocalInstanceType],
        node_package: Path,
        python: str,
    ) -> None:
        super().__init__(instance_types)
        self.store = LeaseStore(home)
        self._node_package = node_package
        self._python = python

    @contextmanager
    def acquire(
        self, cluster: Cluster, *, lease_id: str, deadline_s: float, seed: int
    ) -> Iterator[LocalCluster]:
        """Start hosts with agents; on exit only the mailbox is left (see `forget`).

        Raises NotSupported if they can never be had here, NoCapacity while other hosts hold the
        cores, and ProviderError if hosts cannot be started.
        """
        if why := self.fits(cluster):
            raise (
                NoCapacity(why)
                if cores_of(cluster) > local_catalogue.most_cores()
                else NotSupported(why)
            )
        lease = LocalLease.new(
            cluster, lease_id=lease_id, deadline_s=deadline_s, now=datetime.now(UTC)
        )
        running = LocalCluster(self._around(), cluster, lease, seed)
        with self.store.locked():
            self.refuse_if_taken(cores_of(cluster))
            self.store.create(lease)
        yielded = False
        try:
            with self.store.locked():
                running.start()
                # Seen again with our own hosts waiting: a controller of another home may have come
                # at the same moment.
                self.refuse_if_taken(0.0)
                running.go()
            yielded = True
            yield running
        except OSError as error:
            if yielded:
                raise
            raise ProviderError(f"hosts could not be started: {error}") from error
        finally:
            running.release()
            if yielded:
                self.store.close(lease_id, datetime.now(UTC), "released")
            else:
                self.store.forget(lease_id)

    def leases(self) -> list[Lease]:
        found, unreadable = self.store.read_all()
        held = [lease.held("local") for lease in found if lease.ended_at is None]
        return held + [
            self.store.unknown(lease_id, error, "local") for lease_id, error in unreadable.items()
        ]

    def ended(self) -> list[EndedLease]:
        """Leases that are over and not forgotten, also those of a killed controller."""
        store = self.store
        return [
            lease.over(store.mailbox(lease.lease_id))
            for lease in store.all()
            if lease.ended_at is not None
        ]

    def forget(self, lease_id: str) -> None:
        """Delete an ended lease and its mailbox. Raises ProviderError while it is held."""
        self.store.forget_ended(lease_id)

    def reap(self, now: datetime, *, all_of_them: bool = False) -> list[str]:
        """End leases without a controller or past their deadline, and processes of no lease.

        Raises NotSwept at the end if a lease cannot be read; its hosts are left alone.
        """
        if not self.store.root.is_dir():
            return []
        sentences: list[str] = []
        with self.store.locked():
            found, unreadable = self.store.read_all()
            known = {lease.lease_id: lease for lease in found}
            theirs = {*self.store.ids(), *self.store.stray_ids(self.shares)}
            for lease_id in sorted(theirs - unreadable.keys()):
                lease = known.get(lease_id)
                if lease is None:
                    why = "nothing tells who holds it"
                else:
                    why = (
                        "it was over"
                        if lease.ended_at
                        else lease.why_end(now, all_of_them=all_of_them)
                    )
                if not why:
                    continue
                try:
                    processes, groups = self.store.end(lease_id, self.shares)
                    kept = self.store.set_aside(lease_id) if lease is None else None
                except ProviderError as error:
                    sentences.append(str(error))
                    continue
                if lease is not None and lease.ended_at is None:
                    self.store.close(lease_id, now, "reaped")
                elif lease is not None and not processes and not groups:
                    continue
                what = f"{processes} processes and {groups} CPU groups were ended"
                what += f"; its records were moved to {kept}" if kept is not None else ""
                cluster = f" ({lease.cluster})" if lease is not None else ""
                sentences.append(f"lease {lease_id}{cluster}: {why}; {what}")
        if unreadable:
            raise NotSwept(
                "local", {f"lease {name}": str(why) for name, why in unreadable.items()}, sentences
            )
        return sentences

    def _around(self) -> Surroundings:
        return Surroundings(
            store=self.store,
            isolation=self.isolation,
            shares=self.shares,
            node_package=self._node_package,
            python=self._python,
            environment={name: os.environ[name] for name in _CARRIED if name in os.environ},
            replaced=frozenset(name for name, one in self._specs.items() if one.spot_replaced),
            refuse_if_taken=self.refuse_if_taken,
        )
