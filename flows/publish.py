"""The flow that recommends clusters for every workload and goal, and publishes the table."""

from datetime import UTC, datetime

from prefect import flow, task

from flows.spread import each_by_task
from tasks.data_files.public import with_public_workloads
from tasks.market.offers import current_offers
from tasks.recommendation.publication import export_copies, store_publication
from tasks.recommendation.table import recommend_all
from tasks.reporting.progress import announce_changes, publish_artifacts, reporter
from tasks.training.registry import load_champion
from tasks.workspace.workspace import open_workspace
from warehouse.reads import measured_setups

recommend = task(recommend_all)
store = task(store_publication)
export = task(export_copies)


@flow(name="publish", flow_run_name="publish {provider}", log_prints=True)
def publish(provider: str, refresh_id: str) -> int:
    """Publish recommended clusters for every workload and goal, and return the number of rows.

    Raises PublicationRefused if a check fails. In that case, the previous table stays published.
    """
    workspace = with_public_workloads(open_workspace(provider))
    champion = load_champion(workspace.home, provider)
    runs = measured_setups(workspace.warehouse, provider, workspace.settings.workloads)
    # Local hosts must fit on this machine. A Dask worker on another machine cannot check this.
    dask = workspace.settings.shared.dask if workspace.spends_money else ""
    offers = current_offers(workspace)
    rows = recommend(workspace, champion, offers, runs, each=each_by_task(dask))
    store(workspace, rows, champion, refresh_id, datetime.now(UTC))
    changes = export(workspace)
    publish_artifacts(rows, changes)
    announce_changes(provider, changes)
    choices = sum(change["change"] == "choice" for change in changes)
    reporter().say(
        f"published {len(rows)} rows: {choices} first choices changed,"
        f" {len(changes) - choices} other changes. Files: {workspace.published}"
    )
    return len(rows)
