"""`srift workloads`: what is known of each workload, by provider; and which provider can answer for one."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

import pandas as pd

from models.domain.cluster import parse_cluster
from models.domain.setup_table import rows_of
from models.domain.suggestions import nearest_names
from warehouse.database import Warehouse, select
from warehouse.reads import workload_providers

from ..data_files.public import PROVIDER as PUBLIC
from ..data_files.public import are_waiting, public_workloads, waiting
from ..workspace.settings import Settings, SettingsError
from ..workspace.workspace import PROVIDERS, known_devices

FACTS = ("parameters", "gradient_bytes", "flops_per_sample", "samples")


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownWorkload:
    """A workload as a provider knows it: rows measured here, imported, and public ones that came with the package.

    `provider` is "" for one of srift.toml of which nothing is known; `devices` are the kinds that it was measured on.
    """

    workload: str
    provider: str
    devices: tuple[str, ...] = ()
    measured_rows: int = 0
    imported_rows: int = 0
    public_rows: int = 0
    newest_measured_at: datetime | None = None
    parameters: float | None = None
    gradient_bytes: float | None = None
    flops_per_sample: float | None = None
    samples: float | None = None
    in_settings: bool = False

    def as_json(self) -> dict[str, Any]:
        """Plain values; counts of parameters and bytes as whole numbers."""
        values = asdict(self) | {"devices": list(self.devices)}
        whole = ("parameters", "gradient_bytes", "samples")
        return values | {name: int(values[name]) for name in whole if values[name] is not None}

    @property
    def rows(self) -> int:
        """Of any origin."""
        return self.measured_rows + self.imported_rows + self.public_rows


def known_workloads(warehouse: Warehouse, settings: Settings) -> list[KnownWorkload]:
    """Every workload that a provider has rows or facts of, by name; then those of srift.toml of which there is nothing."""
    clusters, workloads, types = _read(warehouse)
    kinds = {
        (provider, name): device
        for provider, types_of in known_devices(settings.local.instance_types).items()
        for name, (_, device) in types_of.items()
    }
    kinds |= {(str(row["provider"]), str(row["name"])): str(row["device"]) for row in types}
    found = []
    for row in workloads:
        provider, name = str(row["provider"]), str(row["workload"])
        mine = [one for one in clusters if (one["provider"], one["workload"]) == (provider, name)]
        facts = {fact: _number(row[fact]) for fact in FACTS}
        if not mine and not any(facts[fact] for fact in FACTS[:-1]):
            continue  # noted from srift.toml, and nothing more
        moments = [one["newest_measured_at"] for one in mine if pd.notna(one["newest_measured_at"])]
        devices = {
            kinds.get((provider, part), part)
            for one in mine
            for part in parse_cluster(str(one["cluster"]))
        }
        found.append(
            KnownWorkload(
                workload=name,
                provider=provider,
                devices=tuple(sorted(devices)),
                measured_rows=sum(int(one["measured_rows"]) for one in mine),
                imported_rows=sum(int(one["imported_rows"]) for one in mine),
                public_rows=sum(int(one["public_rows"]) for one in mine),
                newest_measured_at=max(moments, default=None),
                in_settings=name in settings.workloads,
                **facts,
            )
        )
    for row in rows_of(waiting(warehouse, settings)):
        if (row["workload"], PUBLIC) not in {(one.workload, one.provider) for one in found}:
            parts = {part for cluster in row["clusters"] for part in parse_cluster(str(cluster))}
            found.append(
                KnownWorkload(
                    workload=str(row["workload"]),
                    provider=PUBLIC,
                    devices=tuple(sorted({kinds.get((PUBLIC, part), part) for part in parts})),
                    public_rows=int(row["rows"]),
                    newest_measured_at=datetime.fromisoformat(str(row["newest_measured_at"])),
                    parameters=_number(row["parameters"]),
                    gradient_bytes=_number(row["gradient_bytes"]),
                    in_settings=row["workload"] in settings.workloads,
                )
            )
    nothing = sorted(set(settings.workloads) - {one.workload for one in found})
    found.sort(key=lambda one: (one.workload, one.provider))
    return [
        *found,
        *(KnownWorkload(workload=name, provider="", in_settings=True) for name in nothing),
    ]


def provider_that_knows(warehouse: Warehouse, settings: Settings, workload: str) -> tuple[str, str]:
    """Which provider to ask about `workload` where nobody says, and a sentence about it ("" for the obvious one).

    The one that has rows or facts of it; of both local. Raises SettingsError where nobody knows it, naming the nearest.
    """
    known = workload_providers(warehouse)
    if are_waiting(warehouse, settings):
        known |= {(name, PUBLIC) for name in public_workloads()}
    theirs = sorted(provider for name, provider in known if name == workload)
    if not theirs and workload not in settings.workloads:
        names = {*settings.workloads, *(name for name, _ in known)}
        raise SettingsError(f"unknown workload {workload!r}; {nearest_names(workload, names)}")
    if not theirs or theirs == [PROVIDERS[0]]:
        return PROVIDERS[0], ""
    if len(theirs) == 1:
        return theirs[
            0
        ], f"{workload} is known on {theirs[0]} alone: this is its answer (--provider {theirs[0]})"
    others = [one for one in theirs if one != PROVIDERS[0]]
    return PROVIDERS[0], (
        f"{workload} is known on {' and '.join(theirs)}: this is the answer of {PROVIDERS[0]} machines; for "
        f"the other add --provider {others[0]}"
    )


def known_elsewhere(warehouse: Warehouse, workload: str, provider: str) -> str:
    """That another provider than `provider` knows `workload`, with what to type; empty where none does."""
    others = sorted(
        one for name, one in workload_providers(warehouse) if name == workload and one != provider
    )
    if not others:
        return ""
    return (
        f"{workload!r} is not known on {provider}; it is on {others[0]}: add --provider {others[0]}"
    )


def _read(
    warehouse: Warehouse,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[dict[str, Any]]]:
    """The marts workload_rows, workloads and instance_types; nothing before the first refresh or import."""
    with warehouse.read_or_empty() as connection:
        rows, workloads, types = (
            rows_of(select(connection, name))
            for name in ("workload_rows", "workloads", "instance_types")
        )
    return rows, workloads, types


def _number(value: Any) -> float | None:
    return None if value is None or pd.isna(value) else float(value)
