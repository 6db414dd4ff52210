"""Open a workspace: the settings, the warehouse and one provider of machines."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

from models.domain.suggestions import nearest_names
from models.domain.workload import Workload
from warehouse.database import Warehouse

from ..providers.base import Provider
from ..providers.ec2 import provider as ec2
from ..providers.ec2.snapshot import read_snapshot
from ..providers.local import provider as local
from .settings import IMPORTED, Settings, SettingsError, load_settings
from .shared import open_warehouse

if TYPE_CHECKING:
    import pandas as pd

PROVIDERS = {"local": False, "ec2": True}  # {name: True if its machines cost dollars}


@dataclass(frozen=True, kw_only=True)
class Workspace:
    """The settings, the warehouse and the provider of machines that a command uses."""

    settings: Settings
    warehouse: Warehouse
    provider: Provider

    @property
    def home(self) -> Path:
        return self.settings.home

    @property
    def spends_money(self) -> bool:
        return spends_money(self.provider.name)

    @property
    def max_hosts(self) -> int:
        """Return the maximum number of machines in a recommended cluster."""
        return (self.settings.ec2 if self.spends_money else self.settings.campaign).max_hosts

    @property
    def max_minutes(self) -> float:
        """Return the time limit of a refresh's measurements, in minutes."""
        return (self.settings.ec2 if self.spends_money else self.settings.campaign).max_minutes

    @property
    def published(self) -> Path:
        """Return the folder of the published recommendations and report page."""
        return self.home / "published"

    @property
    def report_page(self) -> Path:
        return self.published / "report.html"

    @property
    def workloads(self) -> list[Workload]:
        return [self.settings.workload(name) for name in self.settings.workloads]

    @property
    def measurable(self) -> list[Workload]:
        """Return the workloads that have code, and not only imported measurements."""
        return [workload for workload in self.workloads if workload.digest != IMPORTED]

    def mart(self, name: str, **equal: object) -> pd.DataFrame:
        """Return the rows of this workspace's provider in the mart (a view) `name`.

        equal: {column: value that the column must equal}.
        """
        return self.warehouse.select(name, {"provider": self.provider.name, **equal})

    def without(self, names: Collection[str]) -> Workspace:
        """Return a copy of the workspace that lacks the workloads in `names`."""
        workloads = {
            name: workload
            for name, workload in self.settings.workloads.items()
            if name not in names
        }
        return replace(self, settings=self.settings.model_copy(update={"workloads": workloads}))


def open_workspace(provider: str = "local", settings: Settings | None = None) -> Workspace:
    """Return the workspace of `provider`.

    settings: the settings to use; None loads srift.toml.

    Raises SettingsError if the settings are wrong or the provider is unknown.
    """
    settings = settings or load_settings()
    return Workspace(
        settings=settings,
        warehouse=open_warehouse(settings),
        provider=provider_of(settings, provider),
    )


def provider_of(settings: Settings, name: str) -> Provider:
    """Return the provider `name`. Raises SettingsError if it is unknown."""
    node_package = Path(__file__).parents[1] / "node"
    if spends_money(name):
        return ec2.Ec2Provider(settings.ec2, home=settings.home, node_package=node_package)
    types = settings.local.instance_types
    return local.LocalProvider(settings.home, types, node_package, sys.executable)


def spends_money(name: str) -> bool:
    """Return True if machines of the provider `name` cost dollars.

    Local machines are CPU shares of this computer. Srift assumes a price for them, but nobody
    pays it.

    Raises SettingsError if the provider is unknown.
    """
    if name not in PROVIDERS:
        raise SettingsError(f"unknown provider {name!r}; {nearest_names(name, PROVIDERS)}")
    return PROVIDERS[name]


def known_devices(local_types: Iterable[str]) -> dict[str, dict[str, tuple[int, str]]]:
    """Return the devices of instance types, {provider: {instance type: (count, device name)}}.

    local_types: names of the local instance types.
    """
    return {
        "local": dict.fromkeys(local_types, (1, "cpu")),
        "ec2": {
            instance_type.name: (instance_type.devices, instance_type.device)
            for instance_type in read_snapshot().instance_types
        },
    }


def refresh_command(provider: str, max_usd: str) -> str:
    """Return the `srift refresh` command of `provider`, for messages to the user.

    max_usd: the dollar cap in the command line; ignored if the provider's machines cost nothing.
    """
    if not spends_money(provider):
        return "srift refresh"
    return f"srift refresh --provider {provider} --max-usd {max_usd}"


def refuse_to_spend(provider: str, max_usd: float | None) -> None:
    """Check the dollar cap and the S3 bucket before machines are bought.

    Raises SettingsError in these cases:

    - The cap is negative or infinite.
    - Machines of the provider cost money, and no cap is given.
    - Machines of the provider cost money, the cap is above 0, and no bucket is set.

    max_usd: the cap in dollars; None if the user gave no cap.
    """
    if max_usd is not None and not 0 <= max_usd < float("inf"):
        raise SettingsError(f"--max-usd {max_usd} must be a finite number of dollars, at least 0")
    if not spends_money(provider):
        return
    if max_usd is None:
        raise SettingsError(
            f"machines of {provider} cost money: set a dollar cap with --max-usd. A cap of 0"
            " permits no measurements"
        )
    if max_usd > 0 and load_settings().ec2.bucket is None:
        raise SettingsError(
            f"machines of {provider} report through S3: set bucket under [ec2] in srift.toml, and"
            f" run `srift doctor --provider {provider}`"
        )


def new_refresh_id(now: datetime) -> str:
    """Return a new refresh id, which sorts by time and is unique across machines."""
    return f"{now:%Y%m%dT%H%M%S}-{uuid4().hex[:8]}"


@cache
def code_commit() -> str:
    """Return the git commit of Srift's code, with `-dirty` if there are uncommitted changes.

    Returns "unknown" if git is not installed or the code is not in a repository.
    """
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--match", ""]
    try:
        return subprocess.check_output(
            command, cwd=Path(__file__).parent, stderr=subprocess.DEVNULL, text=True
        ).strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
