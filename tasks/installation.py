"""What a flow works on: the settings, the warehouse and one provider, opened together and refused together."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from uuid import uuid4

from models.cloud import Cluster, Offer
from models.workload import Workload
from warehouse.database import Warehouse

from .nearest import nearest
from .providers.base import Provider
from .providers.ec2 import Ec2Provider
from .providers.local import LocalProvider
from .settings import IMPORTED, Settings, SettingsError, load_settings

PROVIDERS = ("local", "ec2")


@dataclass(frozen=True, slots=True, kw_only=True)
class Installation:
    """One srift.toml, its state, and where its machines come from."""

    settings: Settings
    warehouse: Warehouse
    provider: Provider

    @property
    def home(self) -> Path:
        """SRIFT_HOME: everything that is written."""
        return self.settings.home

    @property
    def max_hosts(self) -> int:
        """Most machines of a cluster that is advised; what a campaign buys has a limit of its own."""
        local = self.provider.name == "local"
        return self.settings.campaign.max_hosts if local else self.settings.ec2.max_hosts

    @property
    def max_minutes(self) -> float:
        """How long one campaign measures at most."""
        local = self.provider.name == "local"
        return self.settings.campaign.max_minutes if local else self.settings.ec2.max_minutes

    @property
    def published(self) -> Path:
        """The copies that readers open."""
        return self.home / "published"

    @property
    def workloads(self) -> list[Workload]:
        """Every workload of srift.toml, as its file is now."""
        return [self.settings.workload(name) for name in self.settings.workloads]

    @property
    def measurable(self) -> list[Workload]:
        """Those that can be run here: the others are known by imported measurements alone."""
        return [workload for workload in self.workloads if workload.digest != IMPORTED]

    def fits(self, cluster: Cluster) -> str:
        """Why `cluster` can never be had here; empty where it can."""
        return self.provider.fits(cluster)


def open_installation(provider: str = "local") -> Installation:
    """Raises SettingsError where srift.toml, a variable or the provider's name is wrong. Starts nothing."""
    settings = load_settings()
    return Installation(
        settings=settings,
        warehouse=Warehouse(settings.home / "warehouse.duckdb"),
        provider=provider_of(settings, provider),
    )


def provider_of(settings: Settings, name: str) -> Provider:
    """The provider called `name`. Raises SettingsError on one that there is not."""
    if name not in PROVIDERS:
        raise SettingsError(f"unknown provider {name!r}; {nearest(name, PROVIDERS)}")
    if name == "ec2":
        return Ec2Provider(settings.ec2, home=settings.home, node_package=Path(__file__).parent / "node")
    return LocalProvider(
        home=settings.home,
        instance_types=settings.local.instance_types,
        node_package=Path(__file__).parent / "node",
        python=sys.executable,
    )


def refuse_to_spend(provider: str, max_usd: float | None, settings: Settings | None = None) -> None:
    """EC2's machines cost money: nothing starts without a cap, nor with one above 0 where launching is not set up.

    Raises SettingsError naming what is missing. A cap of 0 measures nothing, and is always allowed.
    """
    if max_usd is not None and not 0 <= max_usd < float("inf"):
        raise SettingsError(f"--max-usd {max_usd} is no number of dollars that a cap can be")
    if provider != "ec2":
        return
    if max_usd is None:
        raise SettingsError(
            "machines of ec2 cost money: say with --max-usd what a refresh may spend; 0 measures nothing"
        )
    if max_usd > 0 and (settings or load_settings()).ec2.bucket is None:
        raise SettingsError(
            "machines of ec2 report through a bucket of S3, and none is named: set bucket under [ec2] in srift.toml and"
            " run `srift doctor --provider ec2`; with --max-usd 0 a refresh takes prices, learns from imported"
            " measurements and publishes"
        )


def new_refresh_id(now: datetime) -> str:
    """Sorts by time and is never given twice."""
    return f"{now:%Y%m%dT%H%M%S}-{uuid4().hex[:4]}"


def offers_of_market(offers: list[Offer], market: str) -> list[Offer]:
    """The offers of one market; "any" is all of them."""
    return [offer for offer in offers if market in ("any", offer.market)]
