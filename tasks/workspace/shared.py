"""Choose the warehouse: a DuckDB file in SRIFT_HOME, or the warehouse that a team shares."""

from typing import Any

from warehouse.database import Warehouse
from warehouse.lake import Lake, SharedWarehouse

from .settings import Settings


def open_warehouse(settings: Settings, *, wait_s: float | None = None) -> Warehouse:
    """Return the team's warehouse if [shared] names a host, else the warehouse in SRIFT_HOME.

    wait_s: maximum seconds to wait while another process uses the warehouse. None means the default
        of `SharedWarehouse` or `Warehouse`.
    """
    path, shared = settings.home / "warehouse.duckdb", settings.shared
    patience: dict[str, Any] = {} if wait_s is None else {"wait_s": wait_s}
    if not shared.host:
        return Warehouse(path, **patience)
    lake = Lake(url=shared.url(shared.database), data=settings.shared_data("warehouse"))
    return SharedWarehouse(path, lake, **patience)
