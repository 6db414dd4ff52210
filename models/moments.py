"""When something was measured, told by a cell that may be empty. Moments without a zone are UTC's."""

from __future__ import annotations

from datetime import UTC, datetime

import pandas as pd

from .cloud import parse_cluster


def older(measured_at: object, than: datetime) -> bool:
    """Was it measured before `than`? False where nobody knows when."""
    moment = _moment(measured_at)
    return moment is not None and moment < _aware(than)


def after(measured_at: object, than: datetime) -> bool:
    """Was it measured after `than`? False where nobody knows when."""
    moment = _moment(measured_at)
    return moment is not None and moment > _aware(than)


def gone_stale(runs: pd.DataFrame, before: datetime | None) -> frozenset[str]:
    """Instance types of which every run with a known moment was measured before `before`."""
    newest: dict[str, bool] = {}
    if before is None or "measured_at" not in runs:
        return frozenset()
    for cluster, moment in zip(runs["cluster"], runs["measured_at"], strict=True):
        if _moment(moment) is not None:
            for name in set(parse_cluster(str(cluster))):
                newest[name] = newest.get(name, True) and older(moment, before)
    return frozenset(name for name, stale in newest.items() if stale)


def _moment(measured_at: object) -> datetime | None:
    if measured_at is None or pd.isna(measured_at):  # type: ignore[call-overload]
        return None
    return _aware(pd.Timestamp(measured_at).to_pydatetime())  # type: ignore[arg-type]


def _aware(moment: datetime) -> datetime:
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)
