"""Read EC2's instance types and offers from AWS, or from the snapshot that ships with Srift.

Types and prices from this snapshot are called packaged. An offer is an instance type in one region
and market, with its price and interruption rate.
"""

from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from functools import cached_property

from models.domain.cluster import Cluster, InstanceType, Offer

from ..base import ProviderError
from . import api as ec2_api
from .api import Answer, AwsClock, Clients, Ec2Api
from .catalogue import filter_types, instance_types_of
from .prices import (
    apply_terms,
    newest_spot_prices,
    on_demand_offers,
    on_demand_prices,
    spot_offers,
)
from .settings import Ec2
from .snapshot import read_snapshot
from .survey import not_launched

NO_BUCKET = (
    "nothing can be launched on EC2: set [ec2] bucket to an S3 bucket for the machines' files"
)


class Ec2Market:
    """The instance types and offers of EC2.

    choices: the section [ec2] of srift.toml.
    clients: `clients(service, region)` returns an AWS client. None means boto3's clients.
    clock: None means the real clock.
    """

    name = "ec2"

    def __init__(self, choices: Ec2, clients: Clients | None, clock: AwsClock | None) -> None:
        self.choices, self._given, self.clock = choices, clients, clock or ec2_api.AwsClock()
        self._latest_offers: list[Offer] = []

    @cached_property
    def api(self) -> Ec2Api:
        return ec2_api.connect(self._given, self.clock)

    def instance_types(self) -> list[InstanceType]:
        every = [kind for types in self._live_types.values() for kind in types]
        return list({kind.name: kind for kind in every}.values())

    def offers(self, now: datetime) -> list[Offer]:
        """Return the current offers from AWS in the markets listed in [ec2] `markets`.

        A type has one on-demand offer in each region and one spot offer in each zone.
        """
        markets, by_region, advisor = self.choices.markets, self._live_types, Answer()
        if "spot" in markets and self._given is None and not self.choices.emulated:
            advisor = ec2_api.spot_advisor()
        found: list[Offer] = []
        for region, types in by_region.items():
            if "on-demand" in markets:
                listed = on_demand_prices(self.api.price_list(region))
                found += on_demand_offers(types, listed, region=region, price_as_of=now)
            if "spot" in markets:
                spot = newest_spot_prices(self.api.spot_prices(region, now))
                found += spot_offers(types, spot, advisor, region=region, price_as_of=now)
        self._latest_offers = self.billed(found)
        return self._latest_offers

    def known_offers(self) -> list[Offer]:
        """Return the latest offers from AWS, followed by the offers that ship with Srift.

        If `offers` has not been called, AWS is queried now. If the query fails, only the offers
        that ship with Srift are returned.
        """
        if not self._latest_offers:
            with suppress(ProviderError):
                self.offers(self.clock.now())
        return self._latest_offers + self.packaged_offers()

    def packaged_offers(self) -> list[Offer]:
        """Return the on-demand offers that ship with Srift.

        Returns [] if [ec2] `markets` does not include "on-demand".
        """
        if "on-demand" not in self.choices.markets:
            return []
        choices = self.choices
        return [offer for name in choices.regions for offer in packaged_offers(choices, name)]

    def placement_scores(self, region: str, names: Sequence[str], count: int) -> dict[str, int]:
        """Return {zone: spot placement score}; see `Provider.placement_scores`.

        Call this method rarely. AWS limits how many distinct queries an account may send per day.
        Two queries are distinct if their types or counts differ.
        """
        rows = self.api.ask_all(
            "SpotPlacementScores",
            "ec2:GetSpotPlacementScores",
            region,
            InstanceTypes=names,
            TargetCapacity=count,
            SingleAvailabilityZone=True,
            RegionNames=[region],
        )
        zones = self.api.ask("ec2:DescribeAvailabilityZones", region)["AvailabilityZones"]
        scores = {row["AvailabilityZoneId"]: row["Score"] for row in rows}
        return {
            zone["ZoneName"]: scores[zone["ZoneId"]] for zone in zones if zone["ZoneId"] in scores
        }

    def billed(self, offers: Sequence[Offer]) -> list[Offer]:
        return apply_terms(offers, self.choices)

    def limits(self) -> list[str]:
        """Return a sentence for each problem of the settings or credentials.

        The sentence also says how to fix the problem. No request is sent to AWS.
        """
        found = [] if self.choices.bucket else [NO_BUCKET]
        try:
            ec2_api.connect(self._given)
        except ProviderError as error:
            found.append(
                f"{error}. Until then, Srift uses the last prices that it read from AWS, or the "
                f"packaged prices of {read_snapshot().prices_as_of:%Y-%m-%d}"
            )
        return found + notes_on_types(self.choices)

    @staticmethod
    def fits(cluster: Cluster) -> str:
        """Return why EC2 can never run this cluster; "" if EC2 can run it.

        All machines must be in one region. Either all machines have accelerators, or none has.
        """
        regions = {member.region for member in cluster.members}
        if len(regions) != 1:
            return f"a cluster must be in one region, not in {', '.join(sorted(regions))}"
        if len({member.instance_type.device == "cpu" for member in cluster.members}) > 1:
            return "machines with and without GPUs cannot train together: NCCL connects only GPUs"
        return ""

    def launches(self, cluster: Cluster) -> str:
        return self.fits(cluster) or not_launched(cluster, self.choices)

    @cached_property
    def _live_types(self) -> dict[str, list[InstanceType]]:
        """Return {region: the region's types that match a pattern in [ec2] `instance_types`}."""
        choices, found = self.choices, {}
        for region in choices.regions:
            answers = self.api.ask_all("InstanceTypes", "ec2:DescribeInstanceTypes", region)
            types = instance_types_of(answers)
            found[region] = filter_types(types, choices.instance_types, choices.ami_parameter)
        return found


def packaged_types(choices: Ec2) -> list[InstanceType]:
    """Return the instance types that ship with Srift and match the settings `choices`.

    A type must match a pattern in `choices.instance_types`, and be sold in one of the regions in
    `choices.regions`.
    """
    names = {name for region in choices.regions for name in read_snapshot().usd.get(region, {})}
    here = (kind for kind in read_snapshot().instance_types if kind.name in names)
    return filter_types(here, choices.instance_types, choices.ami_parameter)


def packaged_offers(choices: Ec2, region: str) -> list[Offer]:
    """Return the on-demand offers in `region` that ship with Srift, at this account's prices.

    choices: the section [ec2] of srift.toml, which has the account's prices and discounts.
    """
    usd, as_of = read_snapshot().usd.get(region, {}), read_snapshot().prices_as_of
    here = [kind for kind in packaged_types(choices) if kind.name in usd]
    return apply_terms(on_demand_offers(here, usd, region=region, price_as_of=as_of), choices)


def notes_on_types(choices: Ec2) -> list[str]:
    """Return warnings about misspelled regions and type patterns in `choices`.

    A name is considered misspelled if it matches nothing in the snapshot that ships with Srift.
    """
    types = read_snapshot().instance_types
    patterns = (*choices.instance_types, *choices.prices, *choices.discounts)
    unknown = [region for region in choices.regions if region not in read_snapshot().usd]
    unknown += [pattern for pattern in patterns if not filter_types(types, [pattern])]
    return [
        f"[ec2] {name!r} matches no packaged region or type: check the spelling" for name in unknown
    ]
