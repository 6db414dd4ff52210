"""The EC2 provider: types and prices of AWS or of the package; `machines` launches and ends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from models.domain.cluster import Cluster, InstanceType, Offer
from tasks.providers.base import (
    Capabilities,
    EndedLease,
    Lease,
    NotSwept,
    Provider,
    ProviderError,
    RunningCluster,
)
from tasks.providers.ec2 import api as ec2_api
from tasks.providers.ec2 import prices as ec2_prices
from tasks.providers.ec2 import reaper as ec2_reaper
from tasks.providers.ec2.api import AwsClock, Clients, Ec2Api
from tasks.providers.ec2.catalogue import (
    GPU,
    described,
    facts_of,
    family,
    image_line,
    is_gpu,
    may_be_wanted,
    off_image,
    wanted,
)
from tasks.providers.ec2.errors import NO_CREDENTIALS
from tasks.providers.ec2.leases import Ec2Leases
from tasks.providers.ec2.machines import NO_BUCKET, Ec2Machines
from tasks.providers.ec2.settings import Ec2
from tasks.providers.ec2.snapshot import packaged
from tasks.providers.ec2.survey import Surveyor, not_launched

_THREADS = 8  # regions asked in parallel
NOT_LOOKED = "EC2 was not looked at: nothing was launched from this home, and [ec2] bucket is unset"

CAPABILITIES = Capabilities(spends_money=True, simulated=False)


class Ec2Provider(Provider):
    """Types and prices of the regions in `choices`; leases under `home`/leases-ec2.

    `clients` replaces boto3's. `node_package` is what machines run.
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
        self._clock, self._threaded = clock or AwsClock(), threaded
        self._leases = Ec2Leases(home)
        self._latest_offers: list[Offer] = []
        self._several_interfaces = set(packaged().several_interfaces)

    def instance_types(self) -> list[InstanceType]:
        return list(self._live_types.values())

    def offers(self, now: datetime) -> list[Offer]:
        """On demand by region and spot by zone. A price that AWS does not tell is None."""
        types, advisor = self._live_types, dict[str, Any]()
        if "spot" in self._choices.markets and self._given is None:
            advisor = ec2_api.spot_advisor()
        with ThreadPoolExecutor(_THREADS) as pool:
            found = pool.map(
                lambda region: self._offers_of(region, now, types, advisor), self._choices.regions
            )
            self._latest_offers = self.billed([offer for offers in found for offer in offers])
        return self._latest_offers

    def packaged_types(self) -> list[InstanceType]:
        return packaged_types(self._choices)

    def packaged_offers(self) -> list[Offer]:
        """On demand only: a snapshot has no spot prices."""
        if "on-demand" not in self._choices.markets:
            return []
        return self.billed(packaged().offers(self.packaged_types(), self._choices.regions))

    def placement_scores(self, region: str, names: Sequence[str], count: int) -> dict[str, int]:
        """AWS limits how many different questions an account may ask in a day."""
        return self._api.placement_scores(region, names, count)

    def billed(self, offers: Sequence[Offer]) -> list[Offer]:
        return ec2_prices.billed(offers, self._choices)

    def limits(self) -> list[str]:
        """Asks nothing of AWS."""
        found = [] if self._choices.bucket else [NO_BUCKET]
        try:
            why = "" if self._given is not None or ec2_api.has_credentials() else NO_CREDENTIALS
        except ProviderError as error:
            why = str(error)
        if why:
            snapshot = packaged()
            found.append(
                f"{why}. Until then, prices are the last known ones, at first the packaged ones of "
                f"{snapshot.prices_as_of:%Y-%m-%d}"
            )
        return found + misspelt(self._choices) + left_out(self._choices)

    @staticmethod
    def fits(cluster: Cluster) -> str:
        """Empty if all machines are in one region, and all or none have GPUs."""
        regions = {member.region for member in cluster.members}
        if len(regions) != 1:
            return f"a cluster lies in one region, not in {', '.join(sorted(regions))}"
        if len({member.instance_type.device == "cpu" for member in cluster.members}) > 1:
            return "machines with and without GPUs do not train together: NCCL reaches GPUs alone"
        return ""

    def launches(self, cluster: Cluster) -> str:
        return self.fits(cluster) or not_launched(cluster, self._choices, self._several_interfaces)

    @contextmanager
    def acquire(
        self, cluster: Cluster, *, lease_id: str, deadline_s: float, seed: int
    ) -> Iterator[RunningCluster]:
        """In the cluster's market, else on demand. `seed` has no effect."""
        machines, offers = self._machines, self._offers_near(cluster)
        with machines.acquire(cluster, offers, lease_id=lease_id, deadline_s=deadline_s) as running:
            yield running

    def leases(self) -> list[Lease]:
        """Held leases, ended leases that are not fetched yet, and unreadable ones."""
        found, unreadable = self._leases.read_all()
        held = [lease.held("ec2") for lease in found if lease.ended_at is None or not lease.fetched]
        return held + [
            self._leases.unknown(lease_id, error, "ec2") for lease_id, error in unreadable.items()
        ]

    def ended(self) -> list[EndedLease]:
        """Ended leases whose uploads are here; missing uploads are fetched if AWS answers."""
        over = [lease for lease in self._leases.all() if lease.ended_at is not None]
        if not all(lease.fetched for lease in over):
            with suppress(ProviderError):
                over = [self._machines.fetched(lease, pulls=1) for lease in over]
        return [self._leases.over(lease) for lease in over if lease.fetched]

    def closed(self) -> list[EndedLease]:
        return [
            self._leases.over(lease) for lease in self._leases.known() if lease.ended_at is not None
        ]

    def forget(self, lease_id: str) -> None:
        self._leases.forget_ended(lease_id)

    def reap(self, now: datetime, *, all_of_them: bool = False) -> list[str]:
        """End orphaned leases, and machines with our tags past their deadline, in every region."""
        if self._choices.bucket is None and not self._leases.root.is_dir():
            return [NOT_LOOKED]
        try:
            machines = self._machines
        except ProviderError as error:
            held, unreadable = self._leases.read_all()
            unswept = {f"lease {name}": str(why) for name, why in unreadable.items()}
            regions = [*self._choices.regions, *(lease.region for lease in held)]
            raise NotSwept("ec2", unswept | dict.fromkeys(regions, str(error))) from error
        return ec2_reaper.reap(machines, now, all_of_them=all_of_them)

    def not_swept_since(self, moment: datetime) -> list[str]:
        """A sweep in the future, by a wrong clock, does not count."""
        swept, now = dict[str, datetime](), self._clock.now()
        with suppress(ProviderError):
            swept = self._leases.swept()
        return [
            region
            for region in self._choices.regions
            if region not in swept or not moment <= swept[region] <= now
        ]

    def was_used(self) -> bool:
        return bool(self._leases.ids() or self._leases.swept_file.exists())

    @cached_property
    def _machines(self) -> Ec2Machines:
        return Ec2Machines(
            api=self._api,
            choices=self._choices,
            surveyor=Surveyor(self._api, self._choices),
            leases=self._leases,
            node_package=self._node_package,
            threaded=self._threaded,
        )

    def _offers_near(self, cluster: Cluster) -> list[Offer]:
        """Known prices in the cluster's region: listed before, else by AWS or the package."""
        with suppress(ProviderError):
            if not self._latest_offers:
                self.offers(self._clock.now())
        region = cluster.members[0].region
        return [
            offer
            for offer in (*self._latest_offers, *self.packaged_offers())
            if offer.region == region
        ]

    @cached_property
    def _api(self) -> Ec2Api:
        if self._given is None and not ec2_api.has_credentials():
            raise ProviderError(NO_CREDENTIALS)
        return Ec2Api(self._given or ec2_api.boto_clients(), self._clock)

    @cached_property
    def _offered(self) -> dict[str, set[str]]:
        """Region -> offered types that may be wanted."""
        api, regions, patterns = self._api, self._choices.regions, self._choices.instance_types
        with ThreadPoolExecutor(_THREADS) as pool:
            names = pool.map(
                lambda region: may_be_wanted(api.type_names(region), patterns), regions
            )
            return dict(zip(regions, names, strict=True))

    @cached_property
    def _live_types(self) -> dict[str, InstanceType]:
        """Each type is described by the first region that offers it: it is the same everywhere."""
        answers: list[dict[str, Any]] = []
        left = set().union(*self._offered.values())
        for region, names in self._offered.items():
            answers += self._api.instance_types(region, sorted(left & names))
            left -= names
        self._several_interfaces |= {
            str(answer["InstanceType"]) for answer in answers if facts_of(answer).several_interfaces
        }
        line = image_line(self._choices.ami_parameter)
        kept = wanted(described(answers), self._choices.instance_types, line)
        return {kind.name: kind for kind in kept}

    def _offers_of(
        self, region: str, now: datetime, types: dict[str, InstanceType], advisor: dict[str, Any]
    ) -> list[Offer]:
        here = [types[name] for name in sorted(self._offered[region] & types.keys())]
        found: list[Offer] = []
        if "on-demand" in self._choices.markets:
            prices = ec2_prices.on_demand_prices(self._api.price_list(region))
            found += ec2_prices.on_demand_offers(here, prices, region=region, price_as_of=now)
        if "spot" in self._choices.markets:
            spot = ec2_prices.newest_spot_prices(self._api.spot_prices(region, now))
            buckets = ec2_prices.advised_buckets(advisor, region)
            found += ec2_prices.spot_offers(here, spot, buckets, region=region, price_as_of=now)
        return found


def packaged_types(choices: Ec2) -> list[InstanceType]:
    """Wanted types of the package that a region of `choices` offers."""
    snapshot = packaged()
    names = {name for region in choices.regions for name in snapshot.usd.get(region, {})}
    here = (kind for kind in snapshot.instance_types if kind.name in names)
    return wanted(here, choices.instance_types, image_line(choices.ami_parameter))


def left_out(choices: Ec2) -> list[str]:
    """Families that `gpu` leaves out because the image does not run on them."""
    line = image_line(choices.ami_parameter)
    if GPU not in choices.instance_types:
        return []
    if line is None:
        return ["[ec2] ami_parameter: unknown image line, so `gpu` stands for every NVIDIA type"]
    left = [kind for kind in packaged().instance_types if is_gpu(kind) and off_image(kind, line)]
    named = wanted(left, choices.instance_types, line)
    families = sorted({family(kind.name) for kind in left if kind not in named})
    if not families:
        return []
    return [f"`gpu` leaves out {', '.join(families)}: the image of ami_parameter lacks support"]


def misspelt(choices: Ec2) -> list[str]:
    """Regions and type patterns of [ec2] that the package does not know."""
    snapshot = packaged()
    patterns = (*choices.instance_types, *choices.prices, *choices.discounts)
    unknown = [region for region in choices.regions if region not in snapshot.usd]
    unknown += [pattern for pattern in patterns if not wanted(snapshot.instance_types, [pattern])]
    return [f"[ec2] {name!r} matches no region or type that the package knows" for name in unknown]
