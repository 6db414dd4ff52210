"""Store a publication if its checks agree, and renew the copies that readers open."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from warehouse import publication
from warehouse.export import export, read_published

from .installation import Installation
from .registry import Champion
from .step import Step
from .turn import alone

Row = dict[str, Any]


@Step
def store_publication(
    here: Installation, rows: Sequence[Row], champion: Champion | None, refresh_id: str, now: datetime
) -> int:
    """Rows stored. Raises PublicationRefused where a check finds a row that must not be; nothing is stored then."""
    return publication.publish(
        here.warehouse,
        rows,
        publication_id=refresh_id,
        published_at=now,
        provider=here.provider.name,
        refresh_id=refresh_id,
        model_version="" if champion is None else str(champion.version),
    )


@Step
def export_copies(here: Installation) -> list[Row]:
    """Replace the published files; returns what changed against the last publication."""
    with alone(here.home, "export"):  # or an older state, read before, could be renamed into place after
        export(here.warehouse, here.published)
        changes = read_published(here.published, "recommendation_changes")
    return [{str(key): value for key, value in row.items()} for row in changes.to_dict("records")]
