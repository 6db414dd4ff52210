"""Check and store a table of recommendations, and update the published files and report page."""

from collections.abc import Sequence
from datetime import datetime

from models.domain.setup_table import Row, rows_of
from warehouse.export import export, published_rows, read_published, write_whole
from warehouse.publication import Publication, publish
from warehouse.reads import report_rows

from ..reporting import report_page
from ..reporting.metrics import write_metrics
from ..reporting.progress import reporter
from ..training.registry import Champion
from ..workspace.locking import alone
from ..workspace.workspace import Workspace, refresh_command, spends_money


def store_publication(
    workspace: Workspace,
    rows: Sequence[Row],
    champion: Champion | None,
    refresh_id: str,
    now: datetime,
) -> int:
    """Store `rows` as a new table of recommendations, and return the number of rows.

    Raises:
        PublicationRefused: if a check finds a wrong row. Nothing is stored.
    """
    publication = Publication(
        publication_id=refresh_id,
        published_at=now,
        provider=workspace.provider.name,
        refresh_id=refresh_id,
        model_version="" if champion is None else str(champion.version),
    )
    return publish(workspace.warehouse, rows, publication)


def export_copies(workspace: Workspace) -> list[Row]:
    """Rewrite the published files, the metrics and the report page from the warehouse.

    Returns the rows of the published table recommendation_changes.
    """
    # Without the lock, another process could overwrite newer files with older files.
    with alone(workspace.home, "export"):
        export(workspace.warehouse, workspace.published)
        changes = read_published(workspace.published, "recommendation_changes")
        write_metrics(workspace.published / "metrics.prom", published_rows(workspace.published))
        _renew_page(workspace)
    return rows_of(changes)


def _renew_page(workspace: Workspace) -> None:
    """Write the report page. After an error, print a note and keep the previous page."""
    page = workspace.report_page
    try:
        rows = report_rows(workspace.warehouse)
        sources = {
            name: {"illustrative": not spends_money(name), "refresh": refresh_command(name, "25")}
            for name in (row["provider"] for row in rows["publications"])
        }
        write_whole(page, report_page.draw(rows, sources))
    except Exception as error:  # an error in the page must not stop the publication
        reporter().say(f"note: the report page {page} could not be written: {error!r}")
