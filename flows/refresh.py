"""The scheduled flow, which runs the flows reap, market, measure, retrain and publish in turn."""

from datetime import UTC, datetime
from typing import Any

from prefect import State, flow
from prefect.states import Cancelled

from flows.measure import measure, prepare
from flows.publish import publish
from flows.retrain import retrain
from models.domain.setup_table import rows_of
from tasks.data_files.imports import load_public
from tasks.data_files.public import PROVIDER
from tasks.doctor.checks import refuse_unless_well
from tasks.reporting.progress import publish_summary, publish_table, reporter, tell_all
from tasks.training.registry import show_report
from tasks.workspace.locking import Busy, patience_s, refresh_lock
from tasks.workspace.workspace import (
    Workspace,
    new_refresh_id,
    open_workspace,
    refuse_to_spend,
)
from warehouse.database import DiskFull


@flow(name="refresh", flow_run_name="refresh {provider}", log_prints=True)
def refresh(provider: str = "local", max_usd: float | None = None) -> dict[str, Any] | State[Any]:
    """Update the prices, the measurements, the model and the published table.

    max_usd: dollar cap. None means the cap in srift.toml. With 0, nothing is measured.

    Returns Prefect's state Cancelled if another refresh is running in this SRIFT_HOME, else a
    dictionary:

        refresh_id        the id of the refresh
        measured          a summary of the measurements
        promotion         the decision about the new model
        published_rows    the number of published rows
    """
    refuse_to_spend(provider, max_usd)
    workspace = open_workspace(provider)
    refuse_unless_well(workspace.settings, provider, max_usd)
    refresh_id = new_refresh_id(datetime.now(UTC))
    try:
        with refresh_lock(workspace.home, refresh_id, patience_s=patience_s()):
            return _refresh(workspace, refresh_id, max_usd)
    except Busy as busy:
        return Cancelled(message=str(busy))


def _refresh(workspace: Workspace, refresh_id: str, max_usd: float | None) -> dict[str, Any]:
    """Run the phases of a refresh in order, and return the dictionary that `refresh` describes.

    The caller must hold the refresh lock.
    """
    tell_all()
    provider = workspace.provider.name
    prepare(workspace, refresh_id, max_usd)
    if provider == PROVIDER:
        load_public(workspace)
    measured = measure(refresh_id, provider, max_usd)
    promotion = retrain(refresh_id, provider)
    rows = publish(provider, refresh_id)
    try:
        workspace.warehouse.back_up()
    except DiskFull as error:  # not fatal: the new table is published, the old backup is intact
        reporter().say(f"note: {error}")
    launches = workspace.mart("lease_spend", refresh_id=refresh_id)
    launches = launches.drop(columns=["provider", "refresh_id", "started_at", "ended_at"])
    publish_table("launches", "Launches of this refresh, by workload", rows_of(launches))
    bought = f"{measured['launches']} launches, ${measured['usd']:.4f}; {rows} published rows"
    report = f"Report page: {show_report(workspace.home, provider, workspace.report_page)}"
    publish_summary("refresh", "Summary of this refresh", [report, bought, promotion])
    return {
        "refresh_id": refresh_id,
        "measured": measured,
        "promotion": promotion,
        "published_rows": rows,
    }
