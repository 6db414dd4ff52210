"""Instance types and prices as of now; on its own clock it also re-prices the table, without measuring anything."""

from __future__ import annotations

from datetime import UTC, datetime

from prefect import flow

from flows.publish import publish
from tasks.installation import new_refresh_id, open_installation
from tasks.prices import note_definitions, snapshot_offers
from tasks.report import reporter


@flow(name="market", log_prints=True)
def market(provider: str = "local", refresh_id: str | None = None, republish: bool = True) -> str:
    """Take a snapshot of what is on offer; then publish anew unless a parent flow will. Returns a sentence."""
    now = datetime.now(UTC)
    here = open_installation(provider)
    here.warehouse.migrate()
    stamp = refresh_id or new_refresh_id(now)
    note_definitions(here, now)
    sentence = snapshot_offers(here, stamp, now)
    reporter().say(sentence)
    if republish:
        publish(provider, stamp)
    return sentence
