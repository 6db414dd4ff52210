"""End what should be dead and bring home what it had measured; used by the flow, the command and every refresh."""

from __future__ import annotations

from datetime import UTC, datetime

from .collect import collect
from .installation import Installation, new_refresh_id, open_installation
from .step import Step


def reap_now(provider: str) -> list[str]:
    """A sentence for each thing ended or brought home; empty where nothing was left."""
    return end_and_collect.fn(open_installation(provider), datetime.now(UTC))


@Step
def end_and_collect(here: Installation, now: datetime) -> list[str]:
    """End leases past their deadline or without a controller, and load what ended ones hold. Says what it did."""
    ended = here.provider.reap(now)
    here.warehouse.migrate()
    collected = collect.fn(here, new_refresh_id(now), now)
    sentences = [*ended, *collected.notes]
    if collected.new:
        sentences.append(f"{collected.new} rows that had not been loaded are in the warehouse now")
    return sentences
