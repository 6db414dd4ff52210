"""Lets the champion judge the runs that it has not learned from one by one: which were slow, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING, Any

import pandas as pd

from models import alarm
from models.cloud import parse_cluster
from models.identity import rows_of
from warehouse import append, reads
from warehouse.database import WarehouseMissing

from .installation import Installation
from .step import Step

if TYPE_CHECKING:
    from .registry import Champion

MOST_SAID = 5

Row = dict[str, Any]


@Step
def note_alarms(
    here: Installation, frames: Mapping[str, pd.DataFrame], champion: Champion | None, refresh_id: str, now: datetime
) -> list[str]:
    """Judge what is new to the champion, before a challenger learns from it; a sentence for each run that was slow."""
    if champion is None:
        return []
    runs = _unseen(reads.mart(here.warehouse, "run_details", provider=here.provider.name), champion)
    if not len(runs):
        return []
    outcomes = ["step_s", "sync_s", "step_spread", "rank_compute_s", "taken_share"]
    predicted = champion.model.predict(runs.drop(columns=outcomes))
    found = alarm.alarms(runs, predicted, _input_share(frames["profiles"]))
    rows = [asdict(one) | {"model_version": str(champion.version)} for one in found]
    with here.warehouse.transact() as connection:
        append.append_alarms(connection, rows, provider=here.provider.name, refresh_id=refresh_id, judged_at=now)
    return alarm_sentences(pd.DataFrame(rows))


def alarm_sentences(alarms: pd.DataFrame) -> list[str]:
    """What to say of rows of the mart `alarms`: the newest, and how many more there are."""
    rows = rows_of(alarms)
    more = [f"slow run: and {len(rows) - MOST_SAID} older ones, in `alarms` of the published table"]
    return [alarm.sentence(row) for row in rows[:MOST_SAID]] + (more if len(rows) > MOST_SAID else [])


def noted(here: Installation, rows: Sequence[Row]) -> list[Row]:
    """Rows to publish, the first of each goal with a note where a machine like one of its own stood out as slow."""
    try:
        alarms = rows_of(reads.mart(here.warehouse, "alarms", provider=here.provider.name))
    except WarehouseMissing:
        return list(rows)
    return [row | {"reason": _with_note(row, alarms)} for row in rows]


def _with_note(row: Row, alarms: Sequence[Row]) -> str:
    """The row's reason, and the newest alarm about an instance type that it recommends."""
    own = {str(one["instance_type"]) for one in row["cluster_offers"] or ()}
    lasting = [one for one in alarms if one["cause"] != "host"]  # that was the moment's
    for one in lasting if row["rank"] == 1 else ():
        touched = {one["instance_type"]} if one["instance_type"] else set(parse_cluster(str(one["cluster"])))
        if own & touched and (one["cause"] != "input" or one["workload"] == row["workload"]):
            return f"{row['reason']}; note: {alarm.sentence(one)}"
    return str(row["reason"])


def _unseen(runs: pd.DataFrame, champion: Champion) -> pd.DataFrame:
    """Runs that the champion has not learned from, of workloads and instance types that it has met."""
    model = champion.model
    if not len(runs):
        return runs
    types = {name for _, name in model.physics.compute.curves}
    workloads = {name for name, _ in model.physics.compute.curves}
    met = [
        row["run_id"] not in model.trained_on
        and row["workload"] in workloads
        and types.issuperset(parse_cluster(str(row["cluster"])))
        for row in rows_of(runs)
    ]
    return runs[met].reset_index(drop=True)


def _input_share(profiles: pd.DataFrame) -> dict[tuple[str, str], float]:
    """The part of a step that making the batch took, by workload and instance type, at the largest profiled batch."""
    if not len(profiles) or "input_s" not in profiles:
        return {}
    known = profiles.dropna(subset=["input_s"]).sort_values("batch")
    whole = known["forward_s"] + known["backward_s"] + known["optimizer_s"]
    shares = (known["input_s"] / whole).tolist()
    return dict(zip(zip(known["workload"], known["instance_type"], strict=True), shares, strict=True))
