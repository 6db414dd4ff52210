"""List what is known about each workload, and find the provider that can answer for it."""

from __future__ import annotations

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
from ..workspace.workspace import PROVIDERS, Workspace, known_devices

FACTS = {"parameters": int, "gradient_bytes": int, "flops_per_sample": float, "samples": int}
COUNTS = ("measured_rows", "imported_rows", "public_rows")


def known_workloads(warehouse: Warehouse, settings: Settings) -> list[dict[str, Any]]:
    """Return a row for each pair of workload and provider with measurements or facts.

    A row has the facts about the workload, the numbers of its measured, imported and public rows,
    and the devices of these rows. Workloads of srift.toml without any data come last; their
    `provider` is "".
    """
    with warehouse.read_or_empty() as connection:
        marts = ("workload_rows", "workloads", "instance_types")
        clusters, facts, types = (select(connection, mart) for mart in marts)
    devices = {
        (provider, name): device
        for provider, known in known_devices(settings.local.instance_types).items()
        for name, (_, device) in known.items()
    }
    devices |= {(row["provider"], row["name"]): row["device"] for row in rows_of(types)}
    public = waiting(warehouse, settings).assign(provider=PUBLIC)
    public = public[~public["workload"].isin(facts[facts["provider"] == PUBLIC]["workload"])]
    counted = clusters.to_dict("records")
    for row in rows_of(public):
        moment = pd.Timestamp(row["newest_measured_at"])
        for at, cluster in enumerate(row["clusters"]):
            count = {"public_rows": 0 if at else row["rows"], "newest_measured_at": moment}
            counted.append(row | count | {"cluster": cluster})
    found = []
    for row in rows_of(facts) + rows_of(public):
        key = name, provider = row["workload"], row["provider"]
        rows = [one for one in counted if (one["workload"], one["provider"]) == key]
        stated = {fact: row.get(fact) for fact in FACTS}
        known = {
            fact: None if pd.isna(value) else FACTS[fact](value) for fact, value in stated.items()
        }
        if not rows and not any(known[fact] for fact in FACTS if fact != "samples"):
            continue  # the warehouse has only the definition from srift.toml
        kinds = {kind for one in rows for kind in parse_cluster(one["cluster"])}
        newest = [one["newest_measured_at"] for one in rows if pd.notna(one["newest_measured_at"])]
        found.append(
            {
                "workload": name,
                "provider": provider,
                "in_settings": name in settings.workloads,
                "devices": sorted({devices.get((provider, kind), kind) for kind in kinds}),
                **{count: sum(int(one.get(count, 0)) for one in rows) for count in COUNTS},
                "newest_measured_at": max(newest, default=None),
                **known,
            }
        )
    found.sort(key=lambda row: (row["workload"], row["provider"]))
    without = sorted(set(settings.workloads) - {row["workload"] for row in found})
    nothing: dict[str, Any] = {
        "devices": [],
        **dict.fromkeys(COUNTS, 0),
        "newest_measured_at": None,
    }
    nothing |= dict.fromkeys(FACTS)
    return found + [
        {"workload": name, "provider": "", "in_settings": True, **nothing} for name in without
    ]


def provider_that_knows(warehouse: Warehouse, settings: Settings, workload: str) -> tuple[str, str]:
    """Return a pair: the provider to ask about `workload`, and a remark on this choice.

    The local provider is chosen if it has rows or facts of the workload, or if no provider has any.
    Otherwise the first other provider by name is chosen. The remark is empty if only the local
    provider, or no provider, has data.

    Raises:
        SettingsError: if neither srift.toml nor a provider knows the workload.
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
        return others[
            0
        ], f"{workload} has data on {others[0]} only: this answer is for that provider"
    return local, (
        f"{workload} has data on {' and '.join(providers)}: this answer is for {local};"
        f" use --provider {others[0]} to ask the other"
    )


def known_elsewhere(workspace: Workspace, workload: str) -> str:
    """Return a sentence that names another provider with data about `workload`.

    The sentence is empty if no other provider has data.
    """
    provider, known = workspace.provider.name, workload_providers(workspace.warehouse)
    others = sorted(one for name, one in known if name == workload and one != provider)
    return f"{workload!r} is not known on {provider}: add --provider {others[0]}" if others else ""


def unknown(workspace: Workspace, workload: str) -> SettingsError:
    """Return the error to raise for a workload about which the provider has no data."""
    known = workload_providers(workspace.warehouse)
    names = {*workspace.settings.workloads, *(name for name, _ in known)}
    elsewhere = known_elsewhere(workspace, workload)
    return SettingsError(
        elsewhere or f"unknown workload {workload!r}; {nearest_names(workload, names)}"
    )
