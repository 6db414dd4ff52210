"""What each provider knows of each workload, and which provider to ask about a workload."""

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
    """A workload as a provider knows it: rows measured here, imported, and public.

    `provider` is "" for a workload of srift.toml without data; `devices` are those with rows.
    """

    workload: str
    provider: str
    in_settings: bool
    devices: tuple[str, ...] = ()
    measured_rows: int = 0
    imported_rows: int = 0
    public_rows: int = 0
    newest_measured_at: datetime | None = None
    parameters: float | None = None
    gradient_bytes: float | None = None
    flops_per_sample: float | None = None
    samples: float | None = None

    def as_json(self) -> dict[str, Any]:
        """Return plain values, counts as whole numbers."""
        values = asdict(self) | {"devices": list(self.devices)}
        whole = ("parameters", "gradient_bytes", "samples")
        return values | {name: int(values[name]) for name in whole if values[name] is not None}

    @property
    def rows(self) -> int:
        return self.measured_rows + self.imported_rows + self.public_rows


def known_workloads(warehouse: Warehouse, settings: Settings) -> list[KnownWorkload]:
    """Return workloads with rows or facts by name, then those of srift.toml without."""
    with warehouse.read_or_empty() as connection:
        marts = ("workload_rows", "workloads", "instance_types")
        clusters, workloads, types = (rows_of(select(connection, mart)) for mart in marts)
    devices = {
        (provider, name): device
        for provider, known in known_devices(settings.local.instance_types).items()
        for name, (_, device) in known.items()
    }
    devices |= {(str(row["provider"]), str(row["name"])): str(row["device"]) for row in types}
    for row in rows_of(waiting(warehouse, settings)):
        if any(
            (one["workload"], one["provider"]) == (row["workload"], PUBLIC) for one in workloads
        ):
            continue
        workloads.append(row | {"provider": PUBLIC})
        for at, cluster in enumerate(row["clusters"]):
            moment = datetime.fromisoformat(str(row["newest_measured_at"]))
            counted = {"cluster": cluster, "public_rows": 0 if at else row["rows"]}
            clusters.append(row | counted | {"provider": PUBLIC, "newest_measured_at": moment})
    found = []
    for row in workloads:
        provider, name = str(row["provider"]), str(row["workload"])
        own = [one for one in clusters if (one["provider"], one["workload"]) == (provider, name)]
        facts: dict[str, Any] = {fact: _number(row.get(fact)) for fact in FACTS}
        if not own and not any(facts[fact] for fact in FACTS[:-1]):
            continue  # only noted from srift.toml
        moments = [one["newest_measured_at"] for one in own]
        types_used = {kind for one in own for kind in parse_cluster(str(one["cluster"]))}
        counts = ("measured_rows", "imported_rows", "public_rows")
        found.append(
            KnownWorkload(
                workload=name,
                provider=provider,
                in_settings=name in settings.workloads,
                devices=tuple(sorted({devices.get((provider, one), one) for one in types_used})),
                newest_measured_at=max(filter(pd.notna, moments), default=None),
                **{count: sum(int(one.get(count, 0)) for one in own) for count in counts},
                **facts,
            )
        )
    found.sort(key=lambda one: (one.workload, one.provider))
    without = sorted(set(settings.workloads) - {one.workload for one in found})
    return found + [KnownWorkload(workload=one, provider="", in_settings=True) for one in without]


def provider_that_knows(warehouse: Warehouse, settings: Settings, workload: str) -> tuple[str, str]:
    """Return the provider with rows or facts of `workload`, local first, and a remark if any.

    Raises:
        SettingsError: no provider knows it.
    """
    known = workload_providers(warehouse)
    if are_waiting(warehouse, settings):
        known |= {(name, PUBLIC) for name in public_workloads()}
    providers = sorted(provider for name, provider in known if name == workload)
    if not providers and workload not in settings.workloads:
        names = {*settings.workloads, *(name for name, _ in known)}
        raise SettingsError(f"unknown workload {workload!r}; {nearest_names(workload, names)}")
    local = PROVIDERS[0]
    others = [one for one in providers if one != local]
    if not others:
        return local, ""
    if local not in providers:
        return others[0], f"{workload} is known on {others[0]} alone: this is its answer"
    return local, (
        f"{workload} is known on {' and '.join(providers)}: this is the answer of {local};"
        f" --provider {others[0]} asks the other"
    )


def known_elsewhere(warehouse: Warehouse, workload: str, provider: str) -> str:
    """Say which other provider knows `workload`; empty if none does."""
    known = workload_providers(warehouse)
    others = sorted(one for name, one in known if name == workload and one != provider)
    if not others:
        return ""
    return f"{workload!r} is not known on {provider}: add --provider {others[0]}"


def _number(value: Any) -> float | None:
    return None if value is None or pd.isna(value) else float(value)
