"""Show a reader the table as it was published: nothing is asked but the published copy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from models.identity import rows_of
from warehouse.export import read_published

_NULLABLE_WHOLE = ("global_batch", "accumulation_steps", "measured_runs")
_MOMENTS = ("published_at", "price_as_of", "newest_measurement_at")


def published_rows(folder: Path) -> list[dict[str, Any]]:
    """The current publication: None where a value is missing, times with their zone.

    Raises WarehouseMissing before the first one.
    """
    frame = read_published(folder)
    frame = frame.astype(dict.fromkeys(_NULLABLE_WHOLE, "Int64"))  # floats to pandas, where a row lacks them
    for name in _MOMENTS:
        frame[name] = frame[name].dt.tz_localize("UTC")  # as the warehouse means them
    return rows_of(frame.astype(object).where(frame.notna(), None))
