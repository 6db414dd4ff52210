"""The EC2 provider, as far as catalogue and prices: what AWS offers now, or what came with the package."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import datetime
from functools import cached_property
from typing import Any, Protocol

from models.cloud import Cluster, InstanceType, Offer
from tasks.providers import ec2_api, ec2_prices
from tasks.providers.base import EndedLease, Lease, NotSupported, ProviderError, RunningCluster
from tasks.providers.ec2_api import Clients, Ec2Api
from tasks.providers.ec2_catalogue import described, may_be_wanted, wanted
from tasks.providers.ec2_errors import NO_CREDENTIALS
from tasks.providers.ec2_snapshot import RENEW, packaged

_AT_ONCE = 8  # regions that are asked side by side
_NO_MACHINES = (
    "this version cannot launch machines on EC2 yet: its table is about measurements made elsewhere (`srift import`)"
)


class Ec2Choices(Protocol):
    """What `srift.toml` states under [ec2]."""

    @property
    def regions(self) -> tuple[str, ...]:
        """Regions to consider."""

    @property
    def instance_types(self) -> tuple[str, ...]:
        """Patterns of types to consider, as `ec2_catalogue.wanted` reads them."""

    @property
    def markets(self) -> tuple[str, ...]:
        """Of on-demand and spot, those to consider."""


class Ec2Provider:
    """Types and prices of the regions in `choices`. `clients` stands in for boto3's, with credentials of its own."""

    name = "ec2"

    def __init__(self, choices: Ec2Choices, clients: Clients | None = None) -> None:
        self._choices = choices
        self._given = clients

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
        advisor = ec2_api.spot_advisor() if "spot" in self._choices.markets and self._given is None else {}
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            asked = pool.map(lambda region: self._offers_of(region, now, types, advisor), self._choices.regions)
            return [offer for offers in asked for offer in offers]

    def packaged_types(self) -> list[InstanceType]:
        """As `instance_types`, from what came with the package."""
        snapshot = packaged()
        names = {name for region in self._choices.regions for name in snapshot.usd.get(region, {})}
        return wanted((one for one in snapshot.instance_types if one.name in names), self._choices.instance_types)

    def packaged_offers(self) -> list[Offer]:
        """As `offers`, from what came with the package: on demand only, and as old as its prices."""
        if "on-demand" not in self._choices.markets:
            return []
        return packaged().offers(self.packaged_types(), self._choices.regions)

    def limits(self) -> list[str]:
        """What cannot be done, why, and how to put it right. Asks nothing of AWS."""
        found = [_NO_MACHINES]
        try:
            why = "" if self._given is not None or ec2_api.has_credentials() else NO_CREDENTIALS
        except ProviderError as error:
            why = str(error)
        if why:
            found.append(f"{why}. Until then prices are those last known, at first of {self._age_of_package()}")
        found += [f"[ec2] regions: {one}" for one in map(self._unknown, self._choices.regions) if one]
        return found

    def fits(self, cluster: Cluster) -> str:
        """Empty where all machines are of one region; whether there is capacity shows only when they are asked for."""
        regions = {member.region for member in cluster.members}
        return "" if len(regions) == 1 else f"a cluster lies in one region, not in {', '.join(sorted(regions))}"

    @contextmanager
    def acquire(self, cluster: Cluster, *, lease_id: str, deadline_s: float, seed: int) -> Iterator[RunningCluster]:
        """Raises NotSupported: there is no launching in this version."""
        raise NotSupported(_NO_MACHINES)
        yield

    def leases(self) -> list[Lease]:
        """None: nothing can be launched."""
        return []

    def ended(self) -> list[EndedLease]:
        """None."""
        return []

    def forget(self, lease_id: str) -> None:
        """There is no lease to forget."""

    def reap(self, now: datetime, *, all_of_them: bool = False) -> list[str]:
        """Nothing can outlive its deadline."""
        return []

    @cached_property
    def _api(self) -> Ec2Api:
        if self._given is None and not ec2_api.has_credentials():
            raise ProviderError(NO_CREDENTIALS)
        return Ec2Api(self._given or ec2_api.boto_clients())

    @cached_property
    def _offered(self) -> dict[str, set[str]]:
        """Names that each region offers, of those that may be wanted."""
        api, regions = self._api, self._choices.regions
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            names = pool.map(
                lambda region: may_be_wanted(api.type_names(region), self._choices.instance_types), regions
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
        types, _ = described(answers)
        return {one.name: one for one in wanted(types, self._choices.instance_types)}

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
        known: Sequence[str] = sorted(packaged().usd)
        if region in known:
            return ""
        near = difflib.get_close_matches(region, known, n=2)
        hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"known: {', '.join(known)}"
        return f"{region!r} is no region that the packaged prices know; {hint}"
