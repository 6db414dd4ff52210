"""End overdue launches, launches whose process has died, and leftover machines.

A lease is the record of a launch. A machine is left over if the deadline in its tags has passed. A
machine of this SRIFT_HOME is also left over if its lease has ended or is missing. The reaper checks
the regions of srift.toml, the regions of the leases on disk, and all regions that it checked in the
last 30 days.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta

from ..base import LeaseUnreadable, NotSwept, ProviderError
from .api import STILL_ALIVE, Ec2Api, Filters
from .errors import AwsRefused
from .leases import Ec2Lease, Ec2Leases
from .settings import Ec2
from .termination import (
    await_shutdown,
    end_machines,
    end_these,
    not_answered,
    tags_of,
    tidy,
    until,
)

# How long a region is still checked after it is in no lease and not in srift.toml.
_REMEMBERED = timedelta(days=30)


@dataclass
class Reaper:
    """One search of all leases and regions for machines that must end.

    fetch: downloads the uploads of a lease's machines, and returns the updated lease.
    sentences: what was ended or needs attention.
    regions: the regions to check besides those of srift.toml.
    unswept: {region or lease: why it could not be checked, or why its machines did not end}.
    busy: the regions in which machines of a lease did not end.
    """

    api: Ec2Api
    leases: Ec2Leases
    choices: Ec2
    fetch: Callable[[Ec2Lease], Ec2Lease]
    now: datetime
    sentences: list[str] = field(default_factory=list)
    unswept: dict[str, str] = field(default_factory=dict)
    regions: set[str] = field(default_factory=set)
    busy: set[str] = field(default_factory=set)

    def reap(self) -> list[str]:
        """End the launches and machines that must end, in all known regions.

        Returns a sentence for each launch or machine that was ended or needs attention.
        After all other work, raises NotSwept if a region or lease file could not be checked, or if
        machines did not end.
        """
        with self.leases.locked():
            for lease_id in self.leases.ids():
                self._lease(lease_id)
        # If a region is known only from earlier searches, its search time is not updated. Such a
        # region is therefore forgotten after 30 days.
        to_note = self.regions | {*self.choices.regions}
        try:
            swept = self.leases.swept().items()
            self.regions |= {region for region, at in swept if self.now - at < _REMEMBERED}
        except ProviderError as error:
            self.unswept["other regions"] = str(error)
        for region in sorted(self.regions | to_note):
            self._sweep(region)
        self.leases.note_swept(to_note - self.busy - self.unswept.keys(), self.now)
        if self.unswept:
            raise NotSwept("ec2", self.unswept, self.sentences)
        return self.sentences

    def _lease(self, lease_id: str) -> None:
        """End the launch of a lease in these cases:

        - Its deadline has passed.
        - Its Srift process has died.
        - Its machines did not end at an earlier try.

        If lease.json is missing, the lease's folder is deleted, unless it has measurement records.
        """
        try:
            lease = self.leases.read(lease_id)
        except LeaseUnreadable as error:
            self.unswept[f"lease {lease_id}"] = str(error)
            return
        if lease is None:  # `_sweep` ends its machines, if there are any
            says = self.leases.forget_without_records(lease_id)
            self.sentences.append(f"lease {lease_id} has no lease.json; {says}")
            return
        self.regions.add(lease.region)
        why = lease.why_end(self.now)
        if lease.ended_at is None and (why or lease.releasing):
            self._end(lease, why or "its machines did not end at the first attempt")

    def _end(self, lease: Ec2Lease, why: str) -> None:
        """End the launch's machines, download their uploads, and add a sentence to `sentences`.

        why: the reason for the end, such as "its controller (process 12) is gone".
        """
        name, outcome = f"lease {lease.lease_id}", "released" if lease.releasing else "reaped"
        lease, problem = end_machines(self.api, lease)
        says = f"{name} ({lease.cluster}): {why}; "
        try:
            if problem:
                says += f"{problem}; {until(lease)}"
                self.leases.write(replace(lease, releasing=True))
            else:
                says += f"{len(lease.machines)} machines in {lease.region} were ended"
                await_shutdown(self.api, lease)
                lease = self.fetch(self.leases.close(lease, self.now, outcome))
                says += "" if lease.fetched else "; their uploads could not be downloaded yet"
        except OSError as error:
            says += f"; lease.json cannot be written ({error.strerror})"
        self.sentences.append(says)
        if problem and problem != not_answered(lease):
            self.unswept[name] = says
            self.busy.add(lease.region)

    def _sweep(self, region: str) -> None:
        """End the leftover machines in `region`, and delete resources that are no longer needed.

        The resources are security groups, placement groups and launch templates.
        """
        why: dict[str, str] = {}
        ours: tuple[Filters, ...] = (
            {"tag:srift:deployment": self.choices.deployment},
            {"tag:srift:controller": self.leases.token},  # finds machines of earlier deployments
        )
        try:
            for filters in ours:
                shown = self.api.instances(region, STILL_ALIVE | filters)
                why |= {name: self._why_over(tags_of(found)) for name, found in shown.items()}
            over = [name for name in why if why[name]]
            stays = end_these(self.api, region, over)
        except AwsRefused as error:
            self.unswept[region] = f"its machines could not be listed or ended: {error}"
            return
        for name in over:
            done = "does not end" if name in stays else "was ended"
            self.sentences.append(f"machine {name} in {region} {done}: {why[name]}")
        for filters in ours:
            tidy(self.api, region, filters, lambda tags: bool(self._why_over(tags)))
        if stays:
            self.unswept[region] = f"these machines do not end: {', '.join(stays)}"

    def _why_over(self, tags: dict[str, str]) -> str:
        """Return why a resource with these tags is no longer needed; "" if it may be needed.

        After the deadline in its tags, a resource is no longer needed. A resource of this
        SRIFT_HOME is also no longer needed if its lease has ended or is missing.
        """
        deadline, lease_id = 0.0, tags.get("srift:lease", "")
        with suppress(ValueError):  # a person may have edited the tag
            deadline = float(tags.get("srift:deadline", ""))
        if deadline and self.now.timestamp() >= deadline:
            return f"its deadline was {datetime.fromtimestamp(deadline, UTC):%Y-%m-%d %H:%M:%S} UTC"
        if tags.get("srift:controller") == self.leases.token and self._is_over(lease_id):
            return f"its lease {lease_id} is over"
        return ""

    def _is_over(self, lease_id: str) -> bool:
        """Return True if the lease has ended or does not exist; False if open or unreadable."""
        try:
            lease = self.leases.read(lease_id)
        except LeaseUnreadable:
            return False
        except ProviderError:
            return True
        # Leases are stored before machines are launched, so machines without a lease are abandoned.
        return lease is None or lease.ended_at is not None
