"""Answer a reader: one question put to the champion over the newest prices, or the table as it was published."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from models.identity import rows_of
from models.workload import Goal
from warehouse.database import WarehouseMissing
from warehouse.export import read_published
from warehouse.reads import mart

from .installation import offers_of_market, open_installation
from .pilots import pilots_for
from .prices import current_offers
from .recommend import plan_one
from .registry import load_champion

_NULLABLE_WHOLE = ("global_batch", "accumulation_steps", "measured_runs")


def answer(
    provider: str,
    workload: str,
    *,
    hours: float | None,
    usd: float | None,
    samples: int | None,
    market: str,
    top: int,
    pilots: int = 0,
) -> list[dict[str, Any]]:
    """Rows for one workload and one constraint, best first.

    The first one also holds, as `frontier`, every setup that no other beats in both expected hours and dollars,
    whatever the constraint; how many `candidates` there were; and the `pilots` that would tell most (None where none
    was asked for or could be bought).
    Raises SettingsError on an unknown workload, and WarehouseMissing where no model is in force yet.
    """
    here = open_installation(provider)
    asked = here.settings.workload(workload)
    name = "cheapest_within_deadline" if hours is not None else "fastest_within_budget"
    asked = replace(asked, samples=samples or asked.samples, goals=(Goal(goal=name, hours=hours, usd=usd),))
    champion = load_champion(here.home, provider)
    if champion is None:
        raise WarehouseMissing(f"no model of {provider} machines is in force yet: run `srift refresh` first")
    everything = current_offers(here)
    offers = offers_of_market(everything, market)
    runs = mart(here.warehouse, "runs", provider=provider)
    found = plan_one(here, champion, asked, offers, runs, top=top)
    first, *others = (row for row in found.rows if row["goal"] == name)
    told = pilots_for(here, champion, asked, offers, buyable=everything, count=pilots) if pilots else None
    return [first | {"frontier": found.frontier, "candidates": found.candidates, "pilots": told}, *others]


def published_rows(folder: Path) -> list[dict[str, Any]]:
    """The current publication, None where a value is missing. Raises WarehouseMissing before the first one."""
    frame = read_published(folder)
    frame = frame.astype(dict.fromkeys(_NULLABLE_WHOLE, "Int64"))  # floats to pandas, where a row lacks them
    return rows_of(frame.astype(object).where(frame.notna(), None))
