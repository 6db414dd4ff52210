"""Choose the warehouse: a DuckDB file in SRIFT_HOME, or the warehouse that a team shares."""

from warehouse.database import WAIT_S, Warehouse
from warehouse.lake import TURN_S, Lake, SharedWarehouse

from .settings import Settings


def open_warehouse(settings: Settings, *, wait_s: float | None = None) -> Warehouse:
    """Return the warehouse without connecting to it.

    The warehouse is shared by a team if the section [shared] of srift.toml names a host.
    wait_s: maximum seconds to wait while another process uses the warehouse. None means the
    default, which is different for a shared warehouse.
    """
    path, shared = settings.home / "warehouse.duckdb", settings.shared
    if not shared.host:
        return Warehouse(path, wait_s=WAIT_S if wait_s is None else wait_s)
    lake = Lake(
        host=shared.host,
        port=shared.port,
        user=shared.user,
        database=shared.database,
        data=settings.shared_data("warehouse"),
    )
    return SharedWarehouse(path, lake, wait_s=TURN_S if wait_s is None else wait_s)
