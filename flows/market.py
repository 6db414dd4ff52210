"""Instance types and prices as of now; on its own clock it also re-prices the table, without measuring anything."""

from __future__ import annotations

from datetime import UTC, datetime

from prefect import flow

from flows.publish import publish
from tasks.data_files.public import with_public_workloads
from tasks.market.offers import note_definitions, snapshot_offers
from tasks.reporting.progress import reporter
from tasks.workspace.prefect_runtime import recorded_flow_run
from tasks.workspace.workspace import new_refresh_id, open_workspace


@flow(name="market", log_prints=True)
def market(
    provider: str = "local",
    refresh_id: str | None = None,
    republish: bool = True,
    buying: bool = False,
) -> str:
    """Take a snapshot of what is on offer; then publish anew unless a parent flow will. Returns a sentence.

    It also says what keeps a parent flow that is `buying` from it.
    """
    now = datetime.now(UTC)
    workspace = open_workspace(provider)
    with recorded_flow_run(workspace.home):
        workspace.warehouse.migrate()
        workspace = with_public_workloads(workspace)
        stamp = refresh_id or new_refresh_id(now)
        note_definitions(workspace, now)
        sentence = snapshot_offers(workspace, stamp, now, buying=buying)
        reporter().say(sentence)
        if republish:
            publish(provider, stamp)
    return sentence
