"""List the facts (parameters, FLOPs, ...) and the measurement counts of each workload."""

from typing import Any

from models.domain.cluster import parse_cluster
from models.domain.suggestions import nearest_names
from warehouse.database import Warehouse, rows_of_query
from warehouse.reads import workload_providers

from ..data_files.public import PROVIDER as PUBLIC
from ..data_files.public import packaged_names
from ..workspace.settings import Settings, SettingsError
from ..workspace.workspace import Workspace, known_devices


def known_workloads(warehouse: Warehouse, settings: Settings) -> list[dict[str, Any]]:
    """Return a row for each known workload and each provider with data on this workload.

    A row has the workload's facts (parameters, FLOPs, ...), the counts of its measured, imported
    and public step times, and the measured devices. A workload of srift.toml without data has a
    single row, with the provider "".
    """
    with warehouse.read() as connection:
        rows = rows_of_query(connection, "from known_workloads")
        types = rows_of_query(connection, "from instance_types")
    devices = {
        (provider, name): device
        for provider, device_types in known_devices(settings.local.instance_types).items()
        for name, (_, device) in device_types.items()
    }
    devices |= {(row["provider"], row["name"]): row["device"] for row in types}
    for row in rows:
        kinds = {kind for cluster in row.pop("clusters") for kind in parse_cluster(cluster)}
        row["devices"] = sorted({devices.get((row["provider"], kind), kind) for kind in kinds})
    without = sorted(set(settings.workloads) - {row["workload"] for row in rows})
    return rows + [{"workload": name, "provider": "", "devices": []} for name in without]


def unknown(workspace: Workspace, workload: str) -> SettingsError:
    """Return the error to raise if the workspace's provider has no data on `workload`.

    The message names another provider with data, or known workloads with similar names.
    """
    pairs = workload_providers(workspace.warehouse) | {(name, PUBLIC) for name in packaged_names()}
    elsewhere = [provider for name, provider in sorted(pairs) if name == workload]
    if elsewhere:
        return SettingsError(f"{workload!r} has data for provider {elsewhere[0]}: add --provider")
    names = {*workspace.settings.workloads, *(name for name, _ in pairs)}
    return SettingsError(f"unknown workload {workload!r}; {nearest_names(workload, names)}")
