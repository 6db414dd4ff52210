"""Ends orphaned leases of this home, and machines with our tags past their deadline.

Looks through every region of srift.toml, of the leases on disk, and of the sweeps of the last 30
days: a lease may have been moved away. Raises NotSwept, after everything else is done, where it
could not look or end.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

from ..base import LeaseUnreadable, NotSwept, ProviderError
from .api import ALIVE, Answer
from .errors import AwsRefused
from .leases import Ec2Lease
from .machines import Ec2Machines
from .termination import (
    await_shutdown,
    end_machines,
    end_these,
    not_answered,
    tags_of,
    tidy,
    until,
)


@dataclass(slots=True)
class Reaper:
    """One sweep. `busy`: regions with a lease whose machines did not end."""

    machines: Ec2Machines
    now: datetime
    all_of_them: bool
    sentences: list[str] = field(default_factory=list)
    unswept: dict[str, str] = field(default_factory=dict)
    regions: set[str] = field(default_factory=set)
    busy: set[str] = field(default_factory=set)

    def reap(self) -> list[str]:
        """Return a sentence for each resource that was ended or needs attention."""
        leases = self.machines.leases
        self.regions |= {*self.machines.choices.regions}
        with leases.locked():
            for lease_id in leases.ids():
                self._lease(lease_id)
        to_note = {*self.regions}  # a remembered region is forgotten after its 30 days
        try:
            self.regions |= {*leases.used_regions(self.now)}
        except ProviderError as error:
            self.unswept["other regions"] = str(error)
        for region in sorted(self.regions):
            self._sweep(region)
        leases.note_swept(to_note - self.busy - self.unswept.keys(), self.now)
        if self.unswept:
            raise NotSwept("ec2", self.unswept, self.sentences)
        return self.sentences

    def _lease(self, lease_id: str) -> None:
        leases = self.machines.leases
        try:
            lease = leases.read(lease_id)
        except LeaseUnreadable as error:
            self.unswept[f"lease {lease_id}"] = str(error)
            return
        if lease is None:  # the sweep ends its machines, if there are any
            try:
                kept = leases.set_aside(lease_id)
                says = f"its records were moved to {kept}" if kept else "it has no records"
            except ProviderError as error:
                says = str(error)
            self.sentences.append(f"lease {lease_id} has no lease.json; {says}")
            return
        self.regions.add(lease.region)
        why = lease.why_end(self.now, all_of_them=self.all_of_them)
        if lease.ended_at is None and (why or lease.releasing):
            self._end(lease, why or "its machines did not end before")

    def _end(self, lease: Ec2Lease, why: str) -> None:
        leases, api, name = self.machines.leases, self.machines.api, f"lease {lease.lease_id}"
        outcome = "released" if lease.releasing else "reaped"
        lease, problem = end_machines(api, lease)
        says = f"{name} ({lease.cluster}): {why}; "
        try:
            if problem:
                says += f"{problem}; {until(lease)}"
                leases.write(replace(lease, releasing=True))
            else:
                says += f"{len(lease.machines)} machines in {lease.region} were ended"
                await_shutdown(api, lease)
                lease = self.machines.fetched(leases.close(lease, self.now, outcome))
                says += "" if lease.fetched else "; their uploads could not be fetched yet"
        except OSError as error:
            says += f"; lease.json cannot be written ({error.strerror})"
        self.sentences.append(says)
        if problem and problem != not_answered(lease):
            self.unswept[name] = says
            self.busy.add(lease.region)

    def _sweep(self, region: str) -> None:
        """End machines past their deadline, and machines of this home without an open lease."""
        api, shown = self.machines.api, dict[str, Answer]()
        ours = (
            {"srift:deployment": self.machines.choices.deployment},
            {"srift:controller": self.machines.leases.token},  # also under an earlier deployment
        )
        try:
            for tags in ours:
                shown |= api.instances(region, tags=tags, states=ALIVE)
            why = {name: self._why_over(tags_of(described)) for name, described in shown.items()}
            stays = end_these(api, region, [name for name in shown if why[name]])
        except AwsRefused as error:
            self.unswept[region] = f"its machines could not be listed or ended: {error}"
            return
        for name, described in shown.items():
            machine = f"machine {name} ({described['InstanceType']}, {region})"
            if why[name]:
                done = "does not end" if name in stays else "was ended"
                self.sentences.append(f"{machine} {done}: {why[name]}")
            elif not _deadline(tags_of(described)):
                self.sentences.append(f"{machine} has no readable tag srift:deadline: look at it")
        for tags in ours:
            tidy(api, region, tags, lambda tags: bool(self._why_over(tags)))
        if stays:
            self.unswept[region] = f"machines do not end: {', '.join(stays)}"

    def _why_over(self, tags: dict[str, str]) -> str:
        """Why nothing needs what has these tags any more; empty if something may."""
        deadline, lease_id = _deadline(tags), tags.get("srift:lease", "")
        if deadline and self.now.timestamp() >= deadline:
            return f"its deadline was {datetime.fromtimestamp(deadline, UTC):%Y-%m-%d %H:%M:%S} UTC"
        if tags.get("srift:controller") == self.machines.leases.token and self._is_over(lease_id):
            return f"its lease {lease_id} is over"
        return ""

    def _is_over(self, lease_id: str) -> bool:
        """A lease of this home is on disk before its machines: without one they are orphans."""
        try:
            lease = self.machines.leases.read(lease_id)
        except LeaseUnreadable:
            return False
        except ProviderError:
            return True
        return lease is None or lease.ended_at is not None


def _deadline(tags: dict[str, str]) -> float:
    try:
        return float(tags.get("srift:deadline", ""))
    except ValueError:
        return 0.0
