"""Provide EC2's types and prices, from AWS or from the package, and launch EC2 clusters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import datetime
from functools import cached_property, partial
from pathlib import Path

from models.domain.cluster import Cluster, InstanceType, Offer

from ..base import (
    EndedLease,
    Lease,
    NotSwept,
    Provider,
    ProviderError,
    RunningCluster,
)
from . import api as ec2_api
from . import prices as ec2_prices
from .api import Answer, AwsClock, Clients, Ec2Api
from .catalogue import (
    GPU,
    described,
    facts_of,
    family,
    image_families,
    is_gpu,
    may_be_wanted,
    wanted,
)
from .errors import NO_CREDENTIALS
from .leases import Ec2Leases
from .machines import NO_BUCKET, Ec2Machines
from .reaper import Reaper
from .settings import Ec2
from .snapshot import packaged
from .survey import not_launched

_THREADS = 8  # regions that are queried in parallel
NOT_LOOKED = "EC2 was not checked: nothing was launched from this home, and [ec2] bucket is unset"


class Ec2Provider(Provider):
    """EC2 in the regions of `choices`, with leases in the folder `leases-ec2` of `home`.

    `clients` replaces boto3's clients. `node_package` is the folder of the code that machines run.
    If `threaded` is False, no thread syncs the mailboxes.
    """

    name = "ec2"

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
        self._choices, self._given, self._node_package = choices, clients, node_package
        self._clock, self._threaded = clock or ec2_api.AwsClock(), threaded
        self._leases = Ec2Leases(home)
        self._latest_offers: list[Offer] = []
        self._several_interfaces = set(packaged().several_interfaces)

    def instance_types(self) -> list[InstanceType]:
        return list(self._live_types.values())

    def offers(self, now: datetime) -> list[Offer]:
        """Return an on-demand offer for each type and region, and a spot offer for each zone.

        An unknown price is None.
        """
        types, advisor = self._live_types, Answer()
        if "spot" in self._choices.markets and self._given is None:
            advisor = ec2_api.spot_advisor()
        ask = partial(self._offers_of, types=types, now=now, advisor=advisor)
        with ThreadPoolExecutor(_THREADS) as pool:
            found = [offer for offers in pool.map(ask, self._choices.regions) for offer in offers]
        self._latest_offers = self.billed(found)
        return self._latest_offers

    def packaged_types(self) -> list[InstanceType]:
        return packaged_types(self._choices)

    def packaged_offers(self) -> list[Offer]:
        """Return the packaged on-demand offers; the package has no spot prices."""
        if "on-demand" not in self._choices.markets:
            return []
        regions = self._choices.regions
        return [offer for region in regions for offer in packaged_offers(self._choices, region)]

    def placement_scores(self, region: str, names: Sequence[str], count: int) -> dict[str, int]:
        """Return the spot placement scores by zone, as Provider.placement_scores describes.

        AWS limits the number of different requests per account and day.
        """
        return self._api.placement_scores(region, names, count)

    def billed(self, offers: Sequence[Offer]) -> list[Offer]:
        return ec2_prices.billed(offers, self._choices)

    def limits(self) -> list[str]:
        """Return sentences that say what EC2 cannot do here and how to fix it.

        This needs no request to AWS.
        """
        found = [] if self._choices.bucket else [NO_BUCKET]
        try:
            why = "" if self._given is not None or ec2_api.has_credentials() else NO_CREDENTIALS
        except ProviderError as error:
            why = str(error)
        if why:
            found.append(
                f"{why}. Until then, the last known prices are used, at first the packaged prices "
                f"of {packaged().prices_as_of:%Y-%m-%d}"
            )
        return found + notes_on_types(self._choices)

    @staticmethod
    def fits(cluster: Cluster) -> str:
        """Return why EC2 cannot launch the cluster; "" if it can.

        All machines must be in one region, and all or none of them must have GPUs.
        """
        regions = {member.region for member in cluster.members}
        if len(regions) != 1:
            return f"a cluster must be in one region, not in {', '.join(sorted(regions))}"
        if len({member.instance_type.device == "cpu" for member in cluster.members}) > 1:
            return "machines with and without GPUs cannot train together: NCCL connects only GPUs"
        return ""

    def launches(self, cluster: Cluster) -> str:
        return self.fits(cluster) or not_launched(cluster, self._choices, self._several_interfaces)

    @contextmanager
    def acquire(
        self, cluster: Cluster, *, lease_id: str, deadline_s: float, seed: int
    ) -> Iterator[RunningCluster]:
        """Launch the cluster in its market, or on demand if that fails. `seed` has no effect."""
        machines, offers = self._machines, self._known_offers()
        with machines.acquire(cluster, offers, lease_id=lease_id, deadline_s=deadline_s) as running:
            yield running

    def leases(self) -> list[Lease]:
        """Return held leases, ended leases with missing uploads, and unreadable leases."""
        return self._leases.held("ec2")

    def ended(self) -> list[EndedLease]:
        """Fetch missing uploads if AWS answers. Return the ended leases that have all uploads."""
        over = [lease for lease in self._leases.all() if lease.ended_at]
        if not all(lease.fetched for lease in over):
            with suppress(ProviderError):
                over = [self._machines.fetched(lease, 0.0) for lease in over]
        return self._leases.over(lease for lease in over if lease.fetched)

    def closed(self) -> list[EndedLease]:
        return self._leases.over(self._leases.known())

    def forget(self, lease_id: str) -> None:
        self._leases.forget_ended(lease_id)

    def reap(self, now: datetime, *, all_of_them: bool = False) -> list[str]:
        """End orphaned leases, and machines with Srift's tags past their deadline.

        Checks every region that this home uses or used. Raises NotSwept if a region or lease could
        not be checked.
        """
        if self._choices.bucket is None and not self._leases.root.is_dir():
            return [NOT_LOOKED]
        try:
            machines = self._machines
        except ProviderError as error:
            held, unreadable = self._leases.read_all()
            unswept = {f"lease {name}": str(why) for name, why in unreadable.items()}
            regions = [*self._choices.regions, *(lease.region for lease in held)]
            raise NotSwept("ec2", unswept | dict.fromkeys(regions, str(error))) from error
        return Reaper(machines, now, all_of_them).reap()

    def not_swept_since(self, moment: datetime) -> list[str]:
        """Return the regions that the reaper has not checked since `moment`.

        A check with a time in the future, recorded by a wrong clock, does not count.
        """
        swept, now = dict[str, datetime](), self._clock.now()
        with suppress(ProviderError):
            swept = self._leases.swept()
        recent = {region for region, at in swept.items() if moment <= at <= now}
        return [region for region in self._choices.regions if region not in recent]

    def was_used(self) -> bool:
        return bool(self._leases.ids() or self._leases.swept_file.exists())

    @cached_property
    def _machines(self) -> Ec2Machines:
        return Ec2Machines(
            api=self._api,
            choices=self._choices,
            leases=self._leases,
            node_package=self._node_package,
            threaded=self._threaded,
        )

    def _known_offers(self) -> list[Offer]:
        """Return the latest offers and the packaged offers.

        If no offers have been listed yet, AWS is asked for them.
        """
        if not self._latest_offers:
            with suppress(ProviderError):
                self.offers(self._clock.now())
        return self._latest_offers + self.packaged_offers()

    @cached_property
    def _api(self) -> Ec2Api:
        return ec2_api.connect(self._given, self._clock)

    @cached_property
    def _offered(self) -> dict[str, set[str]]:
        """Return, for each region, the names of its types that the settings may include."""
        patterns = self._choices.instance_types
        return {
            region: may_be_wanted(self._api.type_names(region), patterns)
            for region in self._choices.regions
        }

    @cached_property
    def _live_types(self) -> dict[str, InstanceType]:
        """Return the types that the settings include, by name, as AWS describes them.

        Only the first region that offers a type is asked, because a type is the same in all
        regions.
        """
        answers: list[Answer] = []
        left = set().union(*self._offered.values())
        for region, names in self._offered.items():
            answers += self._api.instance_types(region, sorted(left & names))
            left -= names
        self._several_interfaces |= {
            str(answer["InstanceType"]) for answer in answers if facts_of(answer).several_interfaces
        }
        families = image_families(self._choices.ami_parameter)
        kept = wanted(described(answers), self._choices.instance_types, families)
        return {kind.name: kind for kind in kept}

    def _offers_of(
        self, region: str, types: dict[str, InstanceType], now: datetime, advisor: Answer
    ) -> list[Offer]:
        """Return the region's offers of `types` at list prices, in the markets of the settings.

        advisor: Spot Advisor's file, or empty.
        """
        here = [kind for name, kind in types.items() if name in self._offered[region]]
        found: list[Offer] = []
        if "on-demand" in self._choices.markets:
            prices = ec2_prices.on_demand_prices(self._api.price_list(region))
            found += ec2_prices.on_demand_offers(here, prices, region=region, price_as_of=now)
        if "spot" in self._choices.markets:
            spot = ec2_prices.newest_spot_prices(self._api.spot_prices(region, now))
            found += ec2_prices.spot_offers(here, spot, advisor, region=region, price_as_of=now)
        return found


def packaged_types(choices: Ec2) -> list[InstanceType]:
    """Return the packaged types that `choices` include and at least one of its regions offers."""
    names = {name for region in choices.regions for name in packaged().usd.get(region, {})}
    here = (kind for kind in packaged().instance_types if kind.name in names)
    return wanted(here, choices.instance_types, image_families(choices.ami_parameter))


def packaged_offers(choices: Ec2, region: str) -> list[Offer]:
    """Return the packaged on-demand offers in `region`, with the prices that this account pays."""
    usd, as_of = packaged().usd.get(region, {}), packaged().prices_as_of
    here = [kind for kind in packaged_types(choices) if kind.name in usd]
    offers = ec2_prices.on_demand_offers(here, usd, region=region, price_as_of=as_of)
    return ec2_prices.billed(offers, choices)


def notes_on_types(choices: Ec2) -> list[str]:
    """Return sentences about unknown names in [ec2] and GPU families that `gpu` leaves out."""
    types = packaged().instance_types
    patterns = (*choices.instance_types, *choices.prices, *choices.discounts)
    unknown = [region for region in choices.regions if region not in packaged().usd]
    unknown += [pattern for pattern in patterns if not wanted(types, [pattern])]
    notes = [
        f"[ec2] {name!r} matches no packaged region or type: check the spelling" for name in unknown
    ]
    families = image_families(choices.ami_parameter)
    if GPU in choices.instance_types:
        kept = wanted(types, choices.instance_types, families)
        left = {family(kind.name) for kind in types if is_gpu(kind) and kind not in kept}
        if left:
            names = ", ".join(sorted(left))
            notes.append(
                f"`gpu` leaves out {names}: the image in ami_parameter does not support them"
            )
        if families is None:
            notes.append(
                "[ec2] ami_parameter names an unknown image, so `gpu` means every NVIDIA type"
            )
    return notes
