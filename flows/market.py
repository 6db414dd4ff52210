"""The flow that stores current instance types and prices, and can publish a new table."""

from datetime import UTC, datetime

from prefect import flow, task

from flows.publish import publish
from tasks.data_files.public import with_public_workloads
from tasks.market.offers import ask_offers, note_definitions, snapshot_offers
from tasks.reporting.progress import reporter
from tasks.workspace.workspace import new_refresh_id, open_workspace

ask = task(retries=2, retry_delay_seconds=2)(ask_offers)


@flow(name="market", flow_run_name="market {provider}", log_prints=True)
def market(provider: str = "local", refresh_id: str | None = None, republish: bool = True) -> None:
    """Store the current instance types and prices, and print a one-sentence summary.

    refresh_id: id of the calling refresh. With None, a new id is created.
    republish: also publish a table of recommendations at the new prices.
    """
    now = datetime.now(UTC)
    workspace = open_workspace(provider)
    workspace.warehouse.create()
    workspace = with_public_workloads(workspace)
    refresh_id = refresh_id or new_refresh_id(now)
    note_definitions(workspace, now)
    reporter().say(snapshot_offers(workspace, refresh_id, now, ask))
    if republish:
        publish(provider, refresh_id)
