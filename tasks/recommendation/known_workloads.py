"""List what is known about each workload, and find the provider that can answer for it."""

from __future__ import annotations

from typing import Any

from models.domain.cluster import parse_cluster
from models.domain.suggestions import nearest_names
from warehouse.database import Warehouse, rows_of_query
from warehouse.reads import workload_providers

from ..data_files.public import PROVIDER as PUBLIC
from ..data_files.public import are_waiting, public_workloads
from ..workspace.settings import Settings, SettingsError
from ..workspace.workspace import PROVIDERS, Workspace, known_devices


def known_workloads(warehouse: Warehouse, settings: Settings) -> list[dict[str, Any]]:
    """Return a row for each pair of workload and provider with measurements or facts.

    A row has the facts about the workload, the numbers of its measured, imported and public rows,
    and the devices of these rows. Workloads of srift.toml without any data come last; their
    `provider` is "".
    """
    with warehouse.read() as connection:
        found = rows_of_query(connection, "from known_workloads")
        types = rows_of_query(connection, "from instance_types")
    devices = {
        (provider, name): device
        for provider, known in known_devices(settings.local.instance_types).items()
        for name, (_, device) in known.items()
    }
    devices |= {(row["provider"], row["name"]): row["device"] for row in types}
    for row in found:
        kinds = {kind for cluster in row.pop("clusters") for kind in parse_cluster(cluster)}
        row["devices"] = sorted({devices.get((row["provider"], kind), kind) for kind in kinds})
        row["in_settings"] = row["workload"] in settings.workloads
    without = sorted(set(settings.workloads) - {row["workload"] for row in found})
    nothing = {"provider": "", "devices": [], "in_settings": True}
    return found + [{"workload": name, **nothing} for name in without]


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
    if providers in ([], [local]):
        return local, ""
    chosen = local if local in providers else providers[0]
    return chosen, (
        f"{workload} has data on {' and '.join(providers)}: this answer is for {chosen};"
        " --provider chooses another"
    )


def unknown(workspace: Workspace, workload: str) -> SettingsError:
    """Return the error to raise for a workload about which the provider has no data."""
    provider = workspace.provider.name
    known = workload_providers(workspace.warehouse)
    names = {*workspace.settings.workloads, *(name for name, where in known if where == provider)}
    return SettingsError(f"unknown workload {workload!r}; {nearest_names(workload, names)}")
