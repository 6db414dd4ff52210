"""Provide hosts on this Linux computer, with CPU quotas, limited bandwidth and spot interruptions.

Prices are illustrative. Srift installs nothing on the computer. After a launch, only the folder of
the lease (the record of the launch) remains.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from models.domain.cluster import Cluster

from ..base import (
    Lease,
    LeaseUnreadable,
    NotSupported,
    NotSwept,
    Provider,
    ProviderError,
)
from .catalogue import LocalMachine, cores_of
from .cluster import LocalCluster
from .leases import LeaseStore
from .settings import LocalInstanceType


class LocalProvider(LocalMachine, Provider):
    """Starts hosts on this computer, and keeps their leases in `home`/leases.

    Each host runs a copy of the folder `node_package` with the interpreter `python`.
    """

    name = "local"

    def __init__(
        self,
        home: Path,
        instance_types: Mapping[str, LocalInstanceType],
        node_package: Path,
        python: str,
    ) -> None:
        super().__init__(instance_types, python)
        self.store = LeaseStore(home)
        self._node_package = node_package

    @contextmanager
    def acquire(
        self,
        cluster: Cluster,
        *,
        lease_id: str,
        deadline_s: float,
        seed: int,
        max_usd_per_hour: float,
    ) -> Iterator[LocalCluster]:
        """Start the hosts, yield the cluster, and end the hosts after the block.

        Each host runs an agent, the program that measures. The mailbox, the folder with the hosts'
        files, is kept.

        Raises:
            NoCapacity: if other hosts use too many cores.
            NotSupported: if this computer can never run the cluster.
            ProviderError, OSError: if hosts cannot be started.
        """
        if why := self.fits(cluster):
            raise NotSupported(why)
        now = datetime.now(UTC)
        lease = Lease.new(cluster, lease_id=lease_id, deadline_s=deadline_s, now=now)
        with self.store.locked():
            self.refuse_if_taken(cores_of(cluster))
            self.store.create(lease)
        running = LocalCluster(self, self.store, cluster, lease, seed)
        try:
            with self.store.locked():
                running.start(self._node_package)
                # Check again while these hosts wait. The lock covers only this SRIFT_HOME, and a
                # process of another SRIFT_HOME may have started hosts at the same moment.
                self.refuse_if_taken(0.0)
                running.go()
        except BaseException:
            running.release()
            self.store.forget(lease_id)
            raise
        try:
            yield running
        finally:
            running.release()
            self.store.close(lease_id, datetime.now(UTC), "released")

    def leases(self) -> list[Lease]:
        return self.store.held()

    def ended(self) -> list[Lease]:
        """Return the records of ended launches that `forget` has not deleted."""
        return [lease for lease in self.store.stored() if lease.ended_at]

    def forget(self, lease_id: str) -> None:
        """Delete the record of an ended launch and all files of its hosts.

        Raises ProviderError if the hosts may still run, or if the record cannot be read.
        """
        self.store.forget_ended(lease_id)

    def reap(self, now: datetime) -> list[str]:
        """End overdue launches, launches whose process has died, and launches without a lease.json.

        Launches of another SRIFT_HOME are not ended.

        Returns a sentence for each launch that was ended or could not be ended. If a lease.json
        cannot be read, the launch's hosts keep running, and NotSwept is raised after all other
        launches were checked.
        """
        sentences: list[str] = []
        unswept: dict[str, str] = {}
        with self.store.locked():
            for lease_id in self.store.ids():
                try:
                    lease = self.store.read(lease_id)
                    sentences += self._end(lease_id, lease, now)
                except LeaseUnreadable as error:
                    unswept[f"lease {lease_id}"] = str(error)
                except ProviderError as error:
                    sentences.append(str(error))
        if unswept:
            raise NotSwept("local", unswept, sentences)
        return sentences

    def _end(self, lease_id: str, lease: Lease | None, now: datetime) -> list[str]:
        """End a launch if `reap` must end it.

        Returns a list with one sentence about the launch; [] if nothing was done.

        lease: content of lease.json; None if the file is missing.
        """
        why = lease.why_end(now) if lease else "it has no lease.json"
        if not why or (lease and lease.ended_at):
            return []
        what = f"{self.store.end(lease_id, self.shares)} processes were killed"
        if lease:
            self.store.close(lease_id, now, "reaped")
        else:
            what += f"; {self.store.forget_without_records(lease_id)}"
        return [f"lease {lease_id}: {why}; {what}"]
