"""Implement `Provider` for EC2: offers, launches, leases (records of launches) and the reaper."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path

from models.domain.cluster import Cluster

from ..base import Lease, NotSupported, NotSwept, Provider, ProviderError
from .api import AwsClock, Clients, Store
from .attempts import attempts
from .cluster import Ec2Cluster
from .leases import Ec2Lease, Ec2Leases
from .mailbox_s3 import Mirror
from .market import NO_BUCKET, Ec2Market
from .reaper import Reaper
from .settings import Ec2
from .survey import launch_spec, node_archive
from .termination import await_shutdown, tidy, until
from .userdata import user_data

LEAVE_S = 20.0  # seconds for the agents to upload their last files before their machines are ended
NOT_LOOKED = "EC2 was not checked: SRIFT_HOME has no launch on EC2, and [ec2] bucket is unset"


class Ec2Provider(Ec2Market, Provider):
    """Launches machines in the regions of srift.toml.

    home: SRIFT_HOME. The leases (records of launches) are in `home`/leases-ec2.
    node_package: the folder with the code that machines run.
    threaded: True if a thread exchanges files with S3. If False, the caller must call
        `Mirror.sync`, which exchanges files once.
    """

    def __init__(
        self,
        choices: Ec2,
        clients: Clients | None = None,
        *,
        home: Path,
        node_package: Path,
        clock: AwsClock | None = None,
        threaded: bool = True,
    ) -> None:
        super().__init__(choices, clients, clock)
        self.lease_folder, self._node_package = Ec2Leases(home), node_package
        self._threaded = threaded

    @contextmanager
    def acquire(
        self,
        cluster: Cluster,
        *,
        lease_id: str,
        deadline_s: float,
        seed: int,
        max_usd_per_hour: float,
    ) -> Iterator[Ec2Cluster]:
        """Launch the cluster, yield it, and end its machines after the block.

        If spot has no capacity, on-demand machines are launched. This requires that [ec2] `markets`
        includes "on-demand", and that their price is at most `max_usd_per_hour`. `seed` has no
        effect.

        Raises:
            LeaseUnreadable: if a lease cannot be read. Nothing is launched.
            NotSupported, NoCapacity, OSError: if the launch fails.
            ProviderError: if the launch fails, or if machines may still run after the block.
        """
        self.lease_folder.known()  # raises if a lease is unreadable
        running = self._prepare(cluster, lease_id, deadline_s)
        zones, markets = running.spec.subnets, self.choices.markets
        wanted = attempts(cluster, self.known_offers(), zones, markets, max_usd_per_hour)
        with self.lease_folder.locked():
            self.lease_folder.create(running.lease)
        try:
            running.start(wanted)
            if self._threaded:
                running.mirror.start()
            yield running
        except BaseException:
            with suppress(ProviderError, OSError):  # raise the first error; the reaper tries again
                self._release(running)
            raise
        self._release(running)

    def _prepare(self, cluster: Cluster, lease_id: str, deadline_s: float) -> Ec2Cluster:
        """Upload the machines' code to S3, and return the cluster. No machine is requested yet.

        Raises NotSupported if the settings do not allow the launch, and ProviderError if AWS
        refuses a request.
        """
        region, choices, now = cluster.region, self.choices, self.api.now()
        if choices.bucket is None:
            raise NotSupported(NO_BUCKET)
        spec = launch_spec(
            self.api,
            choices,
            cluster,
            lease_id=lease_id,
            controller=self.lease_folder.token,
            deadline_unix=int(now.timestamp() + deadline_s),
        )
        lease = Ec2Lease.new(
            cluster,
            lease_id=lease_id,
            deadline_s=deadline_s,
            now=now,
            region=region,
            home=spec.controller,
            deployment=choices.deployment,
            bucket=choices.bucket,
            prefix=choices.prefix,
            role_id=spec.role_id,
        )
        store = Store(self.api, region, choices.bucket)
        store.listed(lease.objects)  # sets store.region to the bucket's region
        code, digest = node_archive(self._node_package)
        store.put(f"{choices.prefix}/code/{digest}.tar.gz", code)
        endpoint = os.environ.get("AWS_ENDPOINT_URL_S3", os.environ.get("AWS_ENDPOINT_URL", ""))
        script = partial(
            user_data,
            endpoint=endpoint,
            bucket=choices.bucket,
            prefix=choices.prefix,
            region=store.region,
            code_sha256=digest,
            lease=lease_id,
            role_id=spec.role_id,
            python=choices.python,
        )
        mirror = self._mirror(lease, store)
        return Ec2Cluster(self.api, self.lease_folder, lease, spec, script, mirror)

    def fetched(self, lease: Ec2Lease) -> Ec2Lease:
        """Download all uploads of an ended launch, if not yet done. Return the updated lease.

        If a download fails, `fetched` is False in the updated lease.
        """
        if lease.fetched or not lease.machines:
            return replace(lease, fetched=True)
        mirror = self._mirror(lease, Store(self.api, lease.region, lease.bucket))
        lease = replace(lease, fetched=mirror.pull())
        with suppress(OSError):  # the next call downloads the uploads again
            self.lease_folder.write(lease)
        return lease

    def _mirror(self, lease: Ec2Lease, store: Store) -> Mirror:
        return Mirror(store, lease, self.lease_folder.mailbox(lease.lease_id))

    def _release(self, running: Ec2Cluster) -> None:
        """End the machines, and download the files that they uploaded to S3.

        Raises ProviderError if some machines may still run.
        """
        launched, mirror = bool(running.lease.current), running.mirror
        try:
            if launched:  # agents that find done.json upload their last files and shut down
                for _ in self.api.looks(2.0, LEAVE_S):
                    alive = any(node.alive for node in running.nodes())
                    if not alive or not (mirror.mailbox / "done.json").exists():
                        break
        finally:
            try:
                problem = running.end()
            finally:  # stop the exchange of files last: a slow S3 must not keep machines running
                mirror.stop()
        lease = running.lease
        if problem:
            with suppress(OSError):
                running.keep(replace(lease, releasing=True))
            raise ProviderError(f"{problem}; {until(lease)}")
        if launched:
            await_shutdown(self.api, lease)
            lease = replace(lease, fetched=mirror.pull())
        self.lease_folder.close(lease, self.api.now(), "released")
        tidy(self.api, lease.region, lease.filters, lambda tags: True)

    def leases(self) -> list[Lease]:
        """Return the leases that may have running machines, or uploads that are not yet downloaded.

        Unreadable leases are included.
        """
        return self.lease_folder.held()

    def ended(self) -> list[Lease]:
        """Download the uploads of ended leases, and return these leases.

        A lease is left out if a download fails.
        """
        stored = self.lease_folder.stored()
        over = [lease for lease in stored if isinstance(lease, Ec2Lease) and lease.ended_at]
        with suppress(ProviderError):
            over = [self.fetched(lease) for lease in over]
        return [lease for lease in over if lease.fetched]

    def closed(self) -> list[Lease]:
        return [lease for lease in self.lease_folder.known() if lease.ended_at]

    def forget(self, lease_id: str) -> None:
        self.lease_folder.forget_ended(lease_id)

    def reap(self, now: datetime) -> list[str]:
        """End overdue launches, launches whose process has died, and leftover machines.

        A machine is left over if the deadline in its tags has passed. A machine of this SRIFT_HOME
        is also left over if its lease has ended or is missing. For the checked regions, see
        reaper.py.

        Returns a sentence for each launch or machine that was ended or needs attention. Raises
        NotSwept if a region or lease file could not be checked, or if machines did not end.
        """
        if self.choices.bucket is None and not self.lease_folder.root.is_dir():
            return [NOT_LOOKED]
        try:
            reaper = Reaper(self.api, self.lease_folder, self.choices, self.fetched, now)
        except ProviderError as error:  # no credentials
            raise NotSwept("ec2", dict.fromkeys(self.choices.regions, str(error))) from error
        return reaper.reap()

    def not_swept_since(self, moment: datetime) -> list[str]:
        """Return the regions of [ec2] that `reap` has not checked since `moment`."""
        swept, now = dict[str, datetime](), self.clock.now()
        with suppress(ProviderError):
            swept = self.lease_folder.swept()
        # A wrong clock may have stored a time in the future.
        recent = {region for region, at in swept.items() if moment <= at <= now}
        return [region for region in self.choices.regions if region not in recent]

    def was_used(self) -> bool:
        return bool(self.lease_folder.ids() or self.lease_folder.swept_file.exists())
