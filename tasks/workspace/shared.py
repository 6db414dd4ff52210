"""The warehouse of an installation: a file in its home, or what `[shared]` in srift.toml names."""

from __future__ import annotations

from warehouse.database import WAIT_S, Warehouse
from warehouse.lake import TURN_S, Lake, SharedWarehouse

from .settings import Settings


def open_warehouse(settings: Settings, *, wait_s: float | None = None) -> Warehouse:
    """Opens nothing yet: a writer waits at most `wait_s` for others, by default what suits a file or a shared one."""
    path, stated = settings.home / "warehouse.duckdb", settings.shared
    if not stated.host:
        return Warehouse(path, wait_s=WAIT_S if wait_s is None else wait_s)
    lake = Lake(
        host=stated.host,
        port=stated.port,
        user=stated.user,
        database=stated.database,
        data=settings.shared_data("warehouse"),
    )
    return SharedWarehouse(path, lake, wait_s=TURN_S if wait_s is None else wait_s)
