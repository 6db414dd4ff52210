"""Recommend for every workload and goal with the champion, check, store, export."""

from __future__ import annotations

from datetime import UTC, datetime

from prefect import flow

from tasks.data_files.public import with_public_workloads
from tasks.market.offers import current_offers
from tasks.monitoring.checks import noted
from tasks.recommendation.publication import export_copies, store_publication
from tasks.recommendation.recommend import recommend_all
from tasks.reporting.progress import announce_changes, publish_artifacts, reporter
from tasks.training.registry import load_champion, older_champion, older_sentence
from tasks.workspace.workspace import open_workspace
from warehouse.reads import setups_of_workloads


@flow(name="publish", log_prints=True)
def publish(provider: str, refresh_id: str) -> int:
    """A new publication over today's offers; returns its rows. A failed check leaves the old table in place."""
    workspace = with_public_workloads(open_workspace(provider))
    champion = load_champion(workspace.home, provider)
    older = None if champion is not None else older_champion(workspace.home, provider)
    if older is not None:
        reporter().say(f"nothing is published: {older_sentence(provider, older)}")
        return 0
    runs = setups_of_workloads(
        workspace.warehouse, provider, (one.name for one in workspace.workloads)
    )
    rows = noted(workspace, recommend_all(workspace, champion, current_offers(workspace), runs))
    store_publication(workspace, rows, champion, refresh_id, datetime.now(UTC))
    changes = export_copies(workspace)
    publish_artifacts(rows, changes)
    announce_changes(provider, changes)
    chosen = sum(change["change"] == "choice" for change in changes)
    other = len(changes) - chosen
    reporter().say(
        f"published {len(rows)} rows, {chosen} choices changed, {other} changed otherwise: {workspace.published}"
    )
    return len(rows)
