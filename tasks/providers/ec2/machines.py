"""EC2's machines as a provider holds them: had under a lease, released whatever happens, and nothing of theirs lost.

A lease is over when its machines are ended; it may be loaded when all that they uploaded lies in its mailbox.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from models.domain.cluster import Cluster, Offer
from tasks.providers.base import EndedLease, NotSupported, ProviderError
from tasks.providers.ec2 import prices as ec2_prices
from tasks.providers.ec2.api import Ec2Api, Store
from tasks.providers.ec2.capacity_ladder import Rung
from tasks.providers.ec2.cluster import Ec2Cluster, places_of
from tasks.providers.ec2.errors import AwsRefused
from tasks.providers.ec2.launch import Launcher
from tasks.providers.ec2.leases import Ec2Lease, Ec2Leases
from tasks.providers.ec2.mailbox_s3 import Mirror, lease_prefix
from tasks.providers.ec2.settings import Ec2
from tasks.providers.ec2.survey import Surveyor, archive
from tasks.providers.ec2.termination import await_shutdown, tidy, until, with_retries
from tasks.providers.ec2.userdata import NodeBoot, user_data
from tasks.providers.local.processes import boot_id, myself

LEAVE_S = 20.0  # for agents that were asked to leave, so that their last words are uploaded before they are ended
NO_BUCKET = (
    "no machines can be launched on EC2 before [ec2] bucket names the S3 bucket that is their mailbox; prices and "
    "imported measurements (`srift import`) work without"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ec2Machines:
    """The leases of one home, and the account they are of. `threaded`: mirrors sync by themselves."""

    api: Ec2Api
    choices: Ec2
    surveyor: Surveyor
    leases: Ec2Leases
    node_package: Path
    threaded: bool = True

    @contextmanager
    def acquire(
        self, cluster: Cluster, offers: Sequence[Offer], *, lease_id: str, deadline_s: float
    ) -> Iterator[Ec2Cluster]:
        """See Provider.acquire. A lease whose controller died before it had its machines is taken up again."""
        self.leases.known()  # beside machines and dollars that nobody knows none are bought
        lease = self._lease(cluster, lease_id, deadline_s)
        store = self._store(lease)
        store.listed(
            lease_prefix(lease.prefix, lease_id)
        )  # a missing bucket is said here, and where it lies
        ends_unix = int(lease.deadline_at.timestamp())
        spec = self.surveyor.launch_spec(
            cluster, lease_id=lease_id, controller=self.leases.token, deadline_unix=ends_unix
        )
        rungs, said = self.surveyor.rungs(spec, cluster, offers)
        spec = replace(spec, image_id=lease.image_id or spec.image_id, deployment=lease.deployment)
        code, digest = archive(self.node_package)
        store.put(f"{lease.prefix}/code/{digest}.tar.gz", code)
        lease = replace(
            lease,
            image_id=spec.image_id,
            role_id=lease.role_id or self.surveyor.account(spec.region).role_id,
            code_sha256=lease.code_sha256 or digest,
        )
        script, billed = (
            self._script(lease, store.region),
            partial(ec2_prices.billed, terms=self.choices),
        )
        launcher = Launcher(self.api, self.leases, lease, spec, script, billed)
        with self.leases.locked():
            self._begin(lease)
        running: Ec2Cluster | None = None
        try:
            rung = launcher.climb(rungs, said)
            usd = rung.cluster.usd_per_hour
            launcher.keep(
                replace(launcher.lease, handed_over=True, market=rung.markets, usd_per_hour=usd)
            )
            running = self._running(launcher, rung, store)
            yield running
        except BaseException as error:
            with suppress(
                ProviderError, OSError
            ):  # the first error is the story; the reaper comes after
                self._release(launcher, running, store)
            if isinstance(error, OSError) and running is None:
                raise ProviderError(
                    f"the lease of the machines could not be written: {error}"
                ) from error
            raise
        sentence = self._release(launcher, running, store)
        if sentence:
            raise ProviderError(sentence)

    def ended(self) -> list[EndedLease]:
        """Leases that are over and whose uploads are all here; of the others, what is missing is fetched first."""
        found = []
        for lease in self.leases.all():
            if lease.ended_at is not None and self.fetched(lease, patient=False).fetched:
                found.append(lease.over(self.leases.mailbox(lease.lease_id)))
        return found

    def fetched(self, lease: Ec2Lease, *, patient: bool) -> Ec2Lease:
        """The lease with its mailbox made whole, if the store can be read now; `patient` tries for half a minute."""
        if lease.fetched or not lease.userids:
            return replace(lease, fetched=True)
        try:
            mirror = self._mirror(lease, self._store(lease))
            whole = pulled_with_retries(self.api, mirror) if patient else mirror.pull()
            lease = replace(lease, fetched=whole)
            self.leases.write(lease)
        except (ProviderError, OSError):
            return replace(lease, fetched=False)
        return lease

    def _lease(self, cluster: Cluster, lease_id: str, deadline_s: float) -> Ec2Lease:
        """A new one, or the one that a dead controller left before it had its machines. Raises ProviderError."""
        known, choices = self.leases.read(lease_id), self.choices
        words: dict[str, Any] = {
            "deployment": choices.deployment,
            "bucket": self._bucket(),
            "prefix": choices.prefix,
        }
        if known is not None:
            free = known.ended_at is None and not known.handed_over and not known.releasing
            if not free or known.controller_alive or known.cluster != cluster.name:
                raise ProviderError(f"lease {lease_id} exists already")
            words = {name: getattr(known, name) or value for name, value in words.items()}
            return replace(known, controller=myself(), boot_id=boot_id(), **words)
        now, region = self.api.clock.now(), cluster.members[0].region
        return Ec2Lease.new(
            cluster, lease_id=lease_id, deadline_s=deadline_s, now=now, region=region, **words
        )

    def _begin(self, lease: Ec2Lease) -> None:
        """On disk before the first request that may cost money."""
        known = self.leases.read(lease.lease_id)
        if known is None:
            self.leases.create(lease)
        elif known.controller_alive:
            raise ProviderError(f"lease {lease.lease_id} exists already")
        else:
            self.leases.write(lease)
        self.leases.mailbox(lease.lease_id).mkdir(exist_ok=True)

    def _script(self, lease: Ec2Lease, bucket_region: str) -> Callable[[float], str]:
        """The user-data of a machine that is to end itself after so many seconds."""
        boot = NodeBoot(
            bucket=lease.bucket,
            prefix=lease.prefix,
            region=bucket_region,
            code_sha256=lease.code_sha256,
            lease_id=lease.lease_id,
            role_id=lease.role_id,
            python=self.choices.python,
            # of an emulation, which the machines must be able to reach too
            endpoint=os.environ.get("AWS_ENDPOINT_URL_S3")
            or os.environ.get("AWS_ENDPOINT_URL")
            or "",
        )
        return partial(user_data, boot)

    def _running(self, launcher: Launcher, rung: Rung, store: Store) -> Ec2Cluster:
        mailbox = self.leases.mailbox(launcher.lease.lease_id)
        running = Ec2Cluster(self.api, launcher, rung, mailbox, self._mirror(launcher.lease, store))
        running.mirror.sync()
        if self.threaded:
            running.mirror.start()
        return running

    def _mirror(self, lease: Ec2Lease, store: Store) -> Mirror:
        return Mirror(
            store,
            lease_prefix(lease.prefix or self.choices.prefix, lease.lease_id),
            self.leases.mailbox(lease.lease_id),
            places_of(lease),
            lambda: self.api.clock.now().timestamp(),
        )

    def _release(self, launcher: Launcher, running: Ec2Cluster | None, store: Store) -> str:
        """End the machines and fetch what they uploaded; "" or why some may live on. May be called at any stage.

        The mirror's thread is joined last: a store that does not answer keeps no machine alive.
        """
        try:
            if running is not None:
                self._let_leave(running)
        finally:
            try:
                sentence = launcher.end()
            finally:
                if running is not None:
                    running.mirror.stop()
        lease = launcher.lease
        if sentence:
            with suppress(OSError):
                launcher.keep(replace(lease, releasing=True, note=sentence))
            return f"{sentence}; {until(lease)}"
        if running is not None:
            await_shutdown(self.api, lease)
            lease = replace(lease, fetched=pulled_with_retries(self.api, running.mirror))
        if lease.machines or lease.refusals:
            self.leases.close(
                lease, self.api.clock.now(), "released" if lease.machines else "refused"
            )
        else:
            self.leases.forget(lease.lease_id)
        tidy(
            self.api,
            lease.region,
            lease.deployment,
            lambda tags: tags.get("srift:lease") == lease.lease_id,
        )
        return ""

    def _let_leave(self, running: Ec2Cluster) -> None:
        """Agents that were asked to leave are waited for: their couriers upload what is left and go down."""
        running.mirror.sync_by_hand()
        give_up = self.api.clock.now() + timedelta(seconds=LEAVE_S)
        while (
            (running.mailbox / "done.json").exists()
            and self.api.clock.now() < give_up
            and not running.all_down()
        ):
            self.api.clock.sleep(2.0)
            running.mirror.sync_by_hand()

    def _store(self, lease: Ec2Lease) -> Store:
        return Store(self.api, lease.region, lease.bucket or self._bucket())

    def _bucket(self) -> str:
        if self.choices.bucket is None:
            raise NotSupported(NO_BUCKET)
        return self.choices.bucket


def pulled_with_retries(api: Ec2Api, mirror: Mirror) -> bool:
    """Whether a pull went through whole, tried for half a minute."""

    def pull() -> None:
        if not mirror.pull():
            raise AwsRefused(mirror.problem, code="", kind="unsure")

    with suppress(AwsRefused):
        with_retries(api, pull)
        return True
    return False
