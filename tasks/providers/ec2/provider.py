"""The EC2 provider: what AWS offers now, or what came with the package; its machines are held by `ec2_machines`."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from models.domain.cluster import Cluster, InstanceType, Offer
from models.domain.suggestions import nearest_names
from tasks.providers.base import (
    Capabilities,
    EndedLease,
    Lease,
    NotSupported,
    NotSwept,
    Provider,
    ProviderError,
    RunningCluster,
)
from tasks.providers.ec2 import api as ec2_api
from tasks.providers.ec2 import prices as ec2_prices
from tasks.providers.ec2 import reaper as ec2_reaper
from tasks.providers.ec2.api import Clients, Clock, Ec2Api
from tasks.providers.ec2.catalogue import (
    GPU,
    described,
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
from tasks.providers.ec2.snapshot import RENEW, packaged, several_interfaces
from tasks.providers.ec2.survey import Surveyor, not_launched

_AT_ONCE = 8  # regions that are asked side by side
NOT_LOOKED = (
    "EC2 was not looked at: nothing was ever launched there from this home, and nothing can be launched before [ec2]"
    " bucket is set"
)
_NO_HOME = "this provider was opened for prices alone: it has no folder for leases"

CAPABILITIES = Capabilities(spends_money=True, simulated=False)


class Ec2Provider(Provider):
    """Types and prices of the regions in `choices`. `clients` stands in for boto3's, with credentials of its own.

    Leases lie under `home`/leases-ec2; without it there are prices only. `node_package` is what machines get.
    """

    name = "ec2"

    def __init__(
        self,
        choices: Ec2,
        clients: Clients | None = None,
        *,
        home: Path | None = None,
        node_package: Path | None = None,
        clock: Clock | None = None,
        threaded: bool = True,
    ) -> None:
        self._choices = choices
        self._given = clients
        self._home, self._node_package = home, node_package
        self._clock, self._threaded = clock or Clock(), threaded
        self._latest_offers: list[Offer] = []
        self._line = image_line(choices.ami_parameter)
        self._several_interfaces = set(packaged().several_interfaces)

    def instance_types(self) -> list[InstanceType]:
        """Types of the regions that srift.toml considers, as AWS describes them now.

        Raises ProviderError where it cannot be asked, with the fix.
        """
        return list(self._live_types.values())

    def offers(self, now: datetime) -> list[Offer]:
        """On demand by region and spot by zone, at `now`. A price that AWS does not tell is None.

        Raises ProviderError where it cannot be asked, with the fix.
        """
        types = self._live_types
        advisor = (
            ec2_api.spot_advisor()
            if "spot" in self._choices.markets and self._given is None
            else {}
        )
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            asked = pool.map(
                lambda region: self._offers_of(region, now, types, advisor), self._choices.regions
            )
            self._latest_offers = self.billed([offer for offers in asked for offer in offers])
        return self._latest_offers

    def packaged_types(self) -> list[InstanceType]:
        """As `instance_types`, from what came with the package."""
        snapshot = packaged()
        names = {name for region in self._choices.regions for name in snapshot.usd.get(region, {})}
        here = (one for one in snapshot.instance_types if one.name in names)
        return wanted(here, self._choices.instance_types, self._line)

    def packaged_offers(self) -> list[Offer]:
        """As `offers`, from what came with the package: on demand only, and as old as its prices."""
        if "on-demand" not in self._choices.markets:
            return []
        return self.billed(packaged().offers(self.packaged_types(), self._choices.regions))

    def placement_scores(self, region: str, names: Sequence[str], count: int) -> dict[str, int]:
        """See PlacementScores. AWS counts how many different questions of the kind an account asks in a day."""
        return self._api.placement_scores(region, names, count)

    def billed(self, offers: Sequence[Offer]) -> list[Offer]:
        """At this account's own prices, with volume, address and requests."""
        return ec2_prices.billed(offers, self._choices)

    def limits(self) -> list[str]:
        """What cannot be done, why, and how to put it right. Asks nothing of AWS."""
        found = [] if self._choices.bucket else [NO_BUCKET]
        try:
            why = "" if self._given is not None or ec2_api.has_credentials() else NO_CREDENTIALS
        except ProviderError as error:
            why = str(error)
        if why:
            found.append(
                f"{why}. Until then prices are those last known, at first of {self._age_of_package()}"
            )
        found += [
            f"[ec2] regions: {one}" for one in map(self._unknown, self._choices.regions) if one
        ]
        return found + self.misspelt() + self.off_image()

    def off_image(self) -> list[str]:
        """Which types `gpu` leaves out since the machines' image does not run on them, or that nobody knows."""
        if GPU not in self._choices.instance_types:
            return []
        if self._line is None:
            return [
                f"[ec2] ami_parameter {self._choices.ami_parameter} is of no line of images that is known here: every"
                " type with NVIDIA's GPUs is offered, whether it runs there or not"
            ]
        left = [
            one for one in packaged().instance_types if is_gpu(one) and off_image(one, self._line)
        ]
        named = wanted(left, self._choices.instance_types, self._line)
        families = sorted(
            {f"{family(one.name)} ({one.device})" for one in left if one not in named}
        )
        if not families:
            return []
        return [
            f"[ec2] instance_types: 'gpu' leaves out {', '.join(families)}, on which the image of ami_parameter does"
            f" not run ({self._line.source}); named one by one they are advised about, from imported measurements"
        ]

    def misspelt(self) -> list[str]:
        """A sentence for each type or pattern of [ec2] that matches none of the package's. Asks nothing of AWS."""
        named = {
            "[ec2] instance_types": self._choices.instance_types,
            "[ec2.prices]": tuple(self._choices.prices),
            "[ec2.discounts]": tuple(self._choices.discounts),
        }
        return [
            f"{key}: {one}"
            for key, patterns in named.items()
            for one in map(self._matchless, patterns)
            if one
        ]

    @staticmethod  # of no provider: it is sent to other machines, where credentials have no business
    def fits(cluster: Cluster) -> str:
        """Empty where all machines are of one region, and have GPUs or all have none.

        Whether there is capacity shows only when they are asked for.
        """
        regions = {member.region for member in cluster.members}
        if len(regions) != 1:
            return f"a cluster lies in one region, not in {', '.join(sorted(regions))}"
        if len({member.instance_type.device == "cpu" for member in cluster.members}) > 1:
            return "machines with and without GPUs do not train together: NCCL reaches GPUs alone"
        return ""

    def launches(self, cluster: Cluster) -> str:
        """Empty where this installation would launch the cluster, else why its settings keep it from that."""
        return self.fits(cluster) or not_launched(cluster, self._choices, self._several_interfaces)

    @contextmanager
    def acquire(
        self, cluster: Cluster, *, lease_id: str, deadline_s: float, seed: int
    ) -> Iterator[RunningCluster]:
        """See Provider.acquire. Climbs the ladder; NoCapacity where it is used up. `seed` is of no account here."""
        offers, machines = self._offers_near(cluster), self._machines
        with machines.acquire(cluster, offers, lease_id=lease_id, deadline_s=deadline_s) as running:
            yield running

    def leases(self) -> list[Lease]:
        """What is held now, by any controller of this home, and what is over and could not be brought home yet.

        Asks nothing of AWS. Each lease is here or among `ended`, so that its dollars are counted; one that cannot be
        read is here, with its `problem`.
        """
        leases = self._leases
        if leases is None:
            return []
        found, unreadable = leases.read_all()
        held = [one.held("ec2") for one in found if one.ended_at is None or not one.fetched]
        return held + [
            leases.unknown(lease_id, error, "ec2") for lease_id, error in unreadable.items()
        ]

    def ended(self) -> list[EndedLease]:
        """Leases that are over and not forgotten, once all that their machines uploaded is here."""
        leases = self._leases
        if leases is None:
            return []
        over = [one for one in leases.all() if one.ended_at is not None]
        if all(one.fetched for one in over):
            return [one.over(leases.mailbox(one.lease_id)) for one in over]
        try:
            return self._machines.ended()
        except ProviderError:
            return [one.over(leases.mailbox(one.lease_id)) for one in over if one.fetched]

    def closed(self) -> list[EndedLease]:
        """As `ended`, also where uploads are not here yet: what was spent is known before. Asks nothing of AWS.

        Raises LeaseUnreadable where a lease cannot be read: what it cost is not known.
        """
        leases = self._leases
        if leases is None:
            return []
        return [
            one.over(leases.mailbox(one.lease_id))
            for one in leases.known()
            if one.ended_at is not None
        ]

    def forget(self, lease_id: str) -> None:
        """Delete an ended lease and its mailbox. Raises ProviderError while it is held."""
        if self._leases is not None:
            self._leases.forget_ended(lease_id)

    def reap(self, now: datetime, *, all_of_them: bool = False) -> list[str]:
        """End leases of this home without a controller, and what has our tags past its deadline, in every region.

        Raises NotSwept, once all else is done, where a region or lease could not be looked at.
        """
        if self._leases is None:
            return []
        if self._choices.bucket is None and not self._leases.root.is_dir():
            return [NOT_LOOKED]
        try:
            machines = self._machines
        except ProviderError as error:
            held, unreadable = self._leases.read_all()
            regions = dict.fromkeys(
                [*self._choices.regions, *(one.region for one in held)], str(error)
            )
            raise NotSwept(
                "ec2", {f"lease {name}": str(why) for name, why in unreadable.items()} | regions
            ) from error
        return ec2_reaper.reap(machines, now, all_of_them=all_of_them)

    def not_swept_since(self, moment: datetime) -> list[str]:
        """Regions of srift.toml that the reaper has not looked through, to the end, since `moment`.

        A sweep that a clock which was wrong puts into the future does not count.
        """
        swept, now = {} if self._leases is None else self._leases.swept(), self._clock.now()
        return [
            one
            for one in self._choices.regions
            if one not in swept or not moment <= swept[one] <= now
        ]

    def was_used(self) -> bool:
        """Whether this home holds leases, or ever looked an account through."""
        return self._leases is not None and bool(self._leases.ids() or self._leases.swept())

    @cached_property
    def _leases(self) -> Ec2Leases | None:
        return None if self._home is None else Ec2Leases(self._home)

    @cached_property
    def _machines(self) -> Ec2Machines:
        if self._leases is None or self._node_package is None:
            raise NotSupported(_NO_HOME)
        return Ec2Machines(
            api=self._api,
            choices=self._choices,
            surveyor=Surveyor(self._api, self._choices),
            leases=self._leases,
            node_package=self._node_package,
            threaded=self._threaded,
        )

    def _offers_near(self, cluster: Cluster) -> list[Offer]:
        """Prices in the cluster's region: those listed before, else asked for, else what came with the package."""
        if self._choices.bucket is None:
            raise NotSupported(NO_BUCKET)
        with suppress(ProviderError):
            if not self._latest_offers:
                self.offers(self._clock.now())
        region = cluster.members[0].region
        return [
            one for one in (*self._latest_offers, *self.packaged_offers()) if one.region == region
        ]

    @cached_property
    def _api(self) -> Ec2Api:
        if self._given is None and not ec2_api.has_credentials():
            raise ProviderError(NO_CREDENTIALS)
        return Ec2Api(self._given or ec2_api.boto_clients(), self._clock)

    @cached_property
    def _offered(self) -> dict[str, set[str]]:
        """Names that each region offers, of those that may be wanted."""
        api, regions = self._api, self._choices.regions
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            names = pool.map(
                lambda region: may_be_wanted(api.type_names(region), self._choices.instance_types),
                regions,
            )
            return dict(zip(regions, names, strict=True))

    @cached_property
    def _live_types(self) -> dict[str, InstanceType]:
        """Each type is described once, by the first region that offers it: a type is the same everywhere."""
        answers: list[dict[str, Any]] = []
        left = set().union(*self._offered.values())
        for region, names in self._offered.items():
            answers += self._api.instance_types(region, sorted(left & names))
            left -= names
        self._several_interfaces |= set(several_interfaces(answers))
        return {
            one.name: one
            for one in wanted(described(answers), self._choices.instance_types, self._line)
        }

    def _offers_of(
        self, region: str, now: datetime, types: dict[str, InstanceType], advisor: dict[str, Any]
    ) -> list[Offer]:
        mine = [types[name] for name in sorted(self._offered[region] & types.keys())]
        found: list[Offer] = []
        if "on-demand" in self._choices.markets:
            prices = ec2_prices.on_demand_prices(self._api.price_list(region))
            found += ec2_prices.on_demand_offers(mine, prices, region=region, price_as_of=now)
        if "spot" in self._choices.markets:
            spot = ec2_prices.newest_spot_prices(self._api.spot_prices(region, now))
            buckets = ec2_prices.advised_buckets(advisor, region)
            found += ec2_prices.spot_offers(mine, spot, buckets, region=region, price_as_of=now)
        return found

    def _age_of_package(self) -> str:
        snapshot = packaged()
        return f"{snapshot.prices_as_of:%Y-%m-%d} ({snapshot.sources}; renewed by `{RENEW}`), without spot"

    def _unknown(self, region: str) -> str:
        known = packaged().usd
        why = (
            f"{region!r} is no region that the packaged prices know; {nearest_names(region, known)}"
        )
        return "" if region in known else why

    def _matchless(self, pattern: str) -> str:
        types = packaged().instance_types
        if wanted(types, [pattern]):
            return ""
        near = difflib.get_close_matches(pattern, [GPU, *(one.name for one in types)], n=2)
        hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
        return f"{pattern!r} matches no type that the package knows{hint}"
