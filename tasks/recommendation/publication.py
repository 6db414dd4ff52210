"""Store a publication if its checks agree, renew the copies and the page that readers open, and read them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import pandas as pd

from models.domain.setup_table import rows_of
from warehouse.database import one_line
from warehouse.export import export, published_rows, read_published, write_whole
from warehouse.publication import Publication, publish
from warehouse.reads import mart, measured_workloads, public_rows, reported

from ..data_files.public import ORIGIN, PUBLIC_IMPORT, with_public_workloads
from ..reporting import report_page
from ..reporting.metrics import write_metrics
from ..reporting.progress import reporter
from ..training.registry import Champion
from ..workspace.locking import alone
from ..workspace.settings import IMPORTED
from ..workspace.workspace import Workspace, capabilities, refresh_command

Row = dict[str, Any]


def store_publication(
    workspace: Workspace,
    rows: Sequence[Row],
    champion: Champion | None,
    refresh_id: str,
    now: datetime,
) -> int:
    """Rows stored. Raises PublicationRefused where a check finds a row that must not be; nothing is stored then."""
    publication = Publication(
        publication_id=refresh_id,
        published_at=now,
        provider=workspace.provider.name,
        refresh_id=refresh_id,
        model_version="" if champion is None else str(champion.version),
    )
    return publish(workspace.warehouse, rows, publication)


def export_copies(workspace: Workspace) -> list[Row]:
    """Replace published files, metrics and the report page; returns what changed against the last publication."""
    with alone(
        workspace.home, "export"
    ):  # or an older state, read before, could be renamed into place after
        export(workspace.warehouse, workspace.published)
        changes = read_published(workspace.published, "recommendation_changes")
        write_metrics(workspace.published / "metrics.prom", published_rows(workspace.published))
        _renew_page(workspace)
    return [{str(key): value for key, value in row.items()} for row in changes.to_dict("records")]


def _renew_page(workspace: Workspace) -> None:
    """Draw the report page of what was just published. Where that fails the old page stays, and a sentence says so: the
    table is published all the same.
    """
    try:
        frames = {name: read_published(workspace.published, name) for name in report_page.PUBLISHED}
        frames |= reported(workspace.warehouse)
        sources = {
            name: report_page.Source(
                illustrative=capabilities(name).simulated,
                refresh=refresh_command(name, max_usd="25"),
            )
            for name in frames["publications"]["provider"]
        }
        write_whole(workspace.report_page, report_page.draw(frames, sources))
    except Exception as error:  # whatever it is, readers of the table must not wait for it
        logging.getLogger(__name__).info("the report page could not be drawn", exc_info=True)
        old = (
            "the one drawn before stays" if workspace.report_page.exists() else "there is none yet"
        )
        reporter().say(
            f"note: the report page {workspace.report_page} could not be drawn ({type(error).__name__}:"
            f" {one_line(error)}); {old}, and the table beside it is new"
        )


def after_refresh(
    workspace: Workspace, rows: Sequence[dict[str, Any]]
) -> tuple[list[dict[str, Any]], list[str]]:
    """Of the published `rows` those to show after a refresh of this provider, and sentences on the others.

    On this machine these are all of its rows. Elsewhere measuring costs money: a workload that nothing is known of
    there is named and no more, and imported workloads are named with the command that asks about them.
    """
    name = workspace.provider.name
    mine = [row for row in rows if row["provider"] == name]
    if not workspace.spends_money:
        return mine, []
    workspace = with_public_workloads(workspace)
    measured = measured_workloads(workspace.warehouse, name)
    known = {*measured, *(row["workload"] for row in mine if row["cluster"] is not None)}
    unknown = sorted({row["workload"] for row in mine} - known)
    sentences = []
    if unknown:
        sentences.append(
            f"never measured on {name} machines, and left out here: {', '.join(unknown)}"
        )
    public = sorted(public_rows(workspace.warehouse, name).keys() & known)
    if public:
        sentences.append(
            f"from {ORIGIN}: {', '.join(public)}; `srift forget {PUBLIC_IMPORT}` leaves them out"
        )
    facts = rows_of(mart(workspace.warehouse, "workloads", provider=name, digest=IMPORTED))
    imported = {
        str(one["workload"]): one
        for one in facts
        if one["workload"] not in workspace.settings.workloads
    }
    if imported:
        counted = [
            f"{one} ({measured[one]} rows)" if one in measured else f"{one} (facts alone)"
            for one in imported
        ]
        sentences.append(f"imported: {', '.join(counted)}")
        asked = max(imported, key=lambda one: measured.get(one, 0))
        samples = "" if pd.notna(imported[asked]["samples"]) else " --samples N"
        sentences.append(
            f"ask about one with the global batch B{' and the N samples' if samples else ''} of its training:"
            f" srift recommend {asked} --provider {name} --deadline 12h{samples} --batch B"
        )
    elif not known:
        sentences.append(
            f"nothing is known of {name} machines yet: `srift import FILE` loads measurements of them"
        )
    return [row for row in mine if row["workload"] in known], sentences
