"""Lets the champion judge the runs that it has not learned from, and tells the next campaign which machines drift."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING

import pandas as pd

from models.identity import rows_of
from models.told import drift_sentence
from warehouse import append, reads

from .installation import Installation
from .providers.base import ProviderError
from .step import Step

if TYPE_CHECKING:
    from .registry import Champion


@Step
def note_drift(
    here: Installation, frames: Mapping[str, pd.DataFrame], champion: Champion | None, refresh_id: str, now: datetime
) -> list[str]:
    """Judge the recent runs before a challenger learns from them; returns a sentence for each drift that goes on.

    Without a champion, or a run that is new to it, nothing is judged and what was known stays.
    """
    provider = here.provider.name
    if champion is not None:
        from models import drift
        from models.learning import TrainingData

        before = {
            (row["scope"], row["instance_type"], row["zone"]): row["since"]
            for row in rows_of(reads.drifting(here.warehouse, provider))
        }
        found = drift.judge(drift.recent(champion.model, TrainingData(**frames)), before)
        rows = [asdict(one) | {"model_version": str(champion.version)} for one in found]
        with here.warehouse.transact() as connection:
            append.append_drift(connection, rows, provider=provider, refresh_id=refresh_id, judged_at=now)
    return drift_sentences(here, reads.drifting(here.warehouse, provider))


def drift_sentences(here: Installation, drifting: pd.DataFrame) -> list[str]:
    """What to say of the drifting rows of the mart `drift`; not of instance types that are offered no more."""
    rows = rows_of(drifting)
    types = {row["instance_type"] for row in rows if row["scope"] == "type"}
    known = types & set(_on_offer(here, types)) if types else set()
    return [drift_sentence(row) for row in rows if row["scope"] == "provider" or row["instance_type"] in known]


def drifting_types(here: Installation) -> dict[str, datetime]:
    """When each drifting instance type was found to drift: what was measured before has to be measured again.

    Where all runs together drift, that is every type on offer.
    """
    moments: dict[str, datetime] = {}
    for row in rows_of(reads.drifting(here.warehouse, here.provider.name)):
        for name in [row["instance_type"]] if row["scope"] == "type" else _on_offer(here, ()):
            moments[name] = max(row["newest_measured_at"].to_pydatetime(), moments.get(name, datetime.min))
    return moments


def _on_offer(here: Installation, otherwise: Collection[str]) -> Collection[str]:
    """Names of the provider's instance types; `otherwise` where it does not answer now."""
    try:
        return [one.name for one in here.provider.instance_types()]
    except ProviderError:
        return otherwise
