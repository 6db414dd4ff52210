"""Implement the interface `Provider` for EC2: offers, launches, leases and the reaper."""

from contextlib import suppress
from datetime import datetime

from ..base import Lease, NotSwept, Provider, ProviderError
from .machines import Ec2Machines
from .reaper import Reaper

NOT_LOOKED = "EC2 was not checked: SRIFT_HOME has no launch on EC2, and [ec2] bucket is unset"


class Ec2Provider(Ec2Machines, Provider):
    """Launches machines in the regions of [ec2], and keeps their leases in SRIFT_HOME/leases-ec2.

    A lease is the record of one launch.
    """

    def leases(self) -> list[Lease]:
        """Return the leases with running machines or missing uploads, and the unreadable leases.

        An upload is missing until it has been downloaded from S3.
        """
        return self.lease_folder.held()

    def ended(self) -> list[Lease]:
        """Return the ended leases whose uploads have all been downloaded.

        Tries to download missing uploads first. Errors of AWS are ignored.
        """
        over = [lease for lease in self.lease_folder.read_all()[0] if lease.ended_at]
        with suppress(ProviderError):
            over = [self.fetched(lease, 0.0) for lease in over]
        return [lease for lease in over if lease.fetched]

    def closed(self) -> list[Lease]:
        return [lease for lease in self.lease_folder.known() if lease.ended_at]

    def forget(self, lease_id: str) -> None:
        self.lease_folder.forget_ended(lease_id)

    def reap(self, now: datetime, *, all_of_them: bool = False) -> list[str]:
        """End overdue and abandoned launches, and machines with Srift's tags past their deadline.

        A launch is overdue if its deadline has passed, and abandoned if the process that made it
        has died. If `all_of_them` is True, every launch of this SRIFT_HOME is ended. All regions
        that this SRIFT_HOME uses or used in the last 30 days are checked. Returns a sentence for
        each launch or machine that was ended or needs attention. Raises NotSwept if a region or
        lease file could not be checked, or if machines did not end.
        """
        if self.choices.bucket is None and not self.lease_folder.root.is_dir():
            return [NOT_LOOKED]
        try:
            reaper = Reaper(self, now, all_of_them)
        except ProviderError as error:  # no credentials
            raise NotSwept("ec2", dict.fromkeys(self.choices.regions, str(error))) from error
        return reaper.reap()

    def not_swept_since(self, moment: datetime) -> list[str]:
        """Return the regions of [ec2] that `reap` has not checked since `moment`.

        A check whose stored time is in the future, because of a wrong clock, does not count.
        """
        swept, now = dict[str, datetime](), self.clock.now()
        with suppress(ProviderError):
            swept = self.lease_folder.swept()
        recent = {region for region, at in swept.items() if moment <= at <= now}
        return [region for region in self.choices.regions if region not in recent]

    def was_used(self) -> bool:
        return bool(self.lease_folder.ids() or self.lease_folder.swept_file.exists())
