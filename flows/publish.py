"""Recommend for every workload and goal with the champion, check, store, export."""

from __future__ import annotations

from datetime import UTC, datetime

from prefect import flow

from tasks.alarms import noted
from tasks.installation import open_installation
from tasks.prices import current_offers
from tasks.publish import export_copies, store_publication
from tasks.recommend import recommend_all
from tasks.registry import load_champion, older_champion, older_sentence
from tasks.report import publish_artifacts, reporter
from warehouse.reads import mart


@flow(name="publish", log_prints=True)
def publish(provider: str, refresh_id: str) -> int:
    """A new publication over today's offers; returns its rows. A failed check leaves the old table in place."""
    here = open_installation(provider)
    champion = load_champion(here.home, provider)
    older = None if champion is not None else older_champion(here.home, provider)
    if older is not None:
        reporter().say(f"nothing is published: {older_sentence(provider, older)}")
        return 0
    runs = mart(here.warehouse, "runs", provider=provider)
    rows = noted(here, recommend_all(here, champion, current_offers(here), runs))
    store_publication(here, rows, champion, refresh_id, datetime.now(UTC))
    changes = export_copies(here)
    publish_artifacts(rows, changes)
    reporter().say(f"published {len(rows)} rows, {len(changes)} choices changed: {here.published}")
    return len(rows)
