"""Store drift, slow runs and judged promises, before a challenger learns from the runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any

import pandas as pd

from models.domain.cluster import parse_cluster
from models.domain.setup_table import rows_of
from models.monitoring import drift, regret_ledger, slow_runs
from models.monitoring.drift import drift_sentence
from models.monitoring.regret_ledger import ledger_summary
from models.step_time.dataset import TrainingData, at_nominal_speed, slowness
from warehouse import reads
from warehouse.append import append

from ..market.job_conditions import job_conditions
from ..providers.base import ProviderError
from ..training.registry import Champion
from ..workspace.workspace import Workspace

Row = dict[str, Any]
MOST_SENTENCES = 5
# Columns of the mart run_details that are not known before a run.
_OUTCOMES = ["step_s", "sync_s", "step_spread", "input_s", "rank_compute_s", "taken_share"]
_OUTCOMES += ["reference_s", "usual_reference_s", "usual_spread"]


def note_drift(
    workspace: Workspace,
    frames: Mapping[str, pd.DataFrame],
    champion: Champion | None,
    refresh_id: str,
    now: datetime,
) -> list[str]:
    """Judge the runs that are new to the champion; returns a sentence for each drift."""
    provider = workspace.provider.name
    if champion is not None:
        before = {
            (row["scope"], row["instance_type"], row["zone"]): row["since"]
            for row in rows_of(reads.drifting(workspace.warehouse, provider))
        }
        recent = drift.recent(champion.model, at_nominal_speed(TrainingData(**frames)))
        _store(workspace, "raw_drift", drift.judge(recent, before), champion, refresh_id, now)
    return [drift_sentence(row) for row in rows_of(reads.drifting(workspace.warehouse, provider))]


def _store(
    workspace: Workspace,
    table: str,
    rows: Sequence[Row],
    champion: Champion,
    refresh_id: str,
    now: datetime,
) -> None:
    stamp = {"provider": workspace.provider.name, "model_version": str(champion.version)}
    with workspace.warehouse.transact() as connection:
        append(connection, table, rows, refresh_id=refresh_id, judged_at=now, **stamp)


def drifting_types(workspace: Workspace) -> dict[str, datetime]:
    """Return when each drifting type was found to drift: earlier runs have to be repeated.

    Every type on offer drifts if all runs together do.
    """
    moments: dict[str, datetime] = {}
    for row in rows_of(reads.drifting(workspace.warehouse, workspace.provider.name)):
        names = [row["instance_type"]]
        if row["scope"] == "provider":
            with suppress(ProviderError):
                names = [one.name for one in workspace.provider.instance_types()]
        for name in names:
            newest = row["newest_measured_at"].to_pydatetime()
            moments[name] = max(newest, moments.get(name, datetime.min))
    return moments


def note_alarms(
    workspace: Workspace, champion: Champion | None, refresh_id: str, now: datetime
) -> list[str]:
    """Judge runs that are new to the champion; returns sentences on slow runs and slow machines."""
    of = {"provider": workspace.provider.name}
    speeds = reads.mart(workspace.warehouse, "machine_speeds", refresh_id=refresh_id, **of)
    cautions = slow_runs.slow_machines(speeds)
    if champion is None:
        return cautions
    runs = _unseen(reads.mart(workspace.warehouse, "run_details", **of), champion)
    if not len(runs):
        return cautions
    predicted = champion.model.predict(runs.drop(columns=_OUTCOMES))
    shares = {
        (row["workload"], row["instance_type"]): row["share"]
        for row in rows_of(reads.mart(workspace.warehouse, "input_shares", **of))
    }
    rows = slow_runs.alarms(runs.assign(slowness=slowness(runs)), predicted, shares)
    _store(workspace, "raw_alarms", rows, champion, refresh_id, now)
    return alarm_sentences(pd.DataFrame(rows)) + cautions


def alarm_sentences(alarms: pd.DataFrame) -> list[str]:
    """Describe the newest rows of the mart `alarms`, and count the others."""
    sentences = [slow_runs.sentence(row) for row in rows_of(alarms)]
    more = len(sentences) - MOST_SENTENCES
    counted = [f"slow run: and {more} older ones, in `alarms` of the published table"]
    return sentences[:MOST_SENTENCES] + (counted if more > 0 else [])


def noted(workspace: Workspace, rows: Sequence[Row]) -> list[Row]:
    """Add the newest slow run of a recommended instance type to the reasons of first choices."""
    alarms = reads.mart(workspace.warehouse, "alarms", provider=workspace.provider.name)
    # Causes that pass with the hour say nothing about the type.
    lasting = [row for row in rows_of(alarms) if row["cause"] not in ("host", "speed")]
    return [row | {"reason": _with_note(row, lasting)} for row in rows]


def _with_note(row: Row, alarms: Sequence[Row]) -> str:
    types = {str(offer["instance_type"]) for offer in row["cluster_offers"] or ()}
    for alarm in alarms if row["rank"] == 1 else ():
        slow = {alarm["instance_type"]} - {""} or set(parse_cluster(str(alarm["cluster"])))
        if types & slow and (alarm["cause"] != "input" or alarm["workload"] == row["workload"]):
            return f"{row['reason']}; note: {slow_runs.sentence(alarm)}"
    return str(row["reason"])


def _unseen(runs: pd.DataFrame, champion: Champion) -> pd.DataFrame:
    """Runs that the champion has not learned from, of workloads and types that it knows."""
    model = champion.model
    known = set(model.workloads) - model.guessed
    unseen = [
        row["run_id"] not in model.trained_on
        and row["workload"] in known
        and model.measured_types.issuperset(parse_cluster(str(row["cluster"])))
        for row in rows_of(runs)
    ]
    return runs[unseen].reset_index(drop=True)


def judge_promises(
    workspace: Workspace, frames: Mapping[str, pd.DataFrame], refresh_id: str, now: datetime
) -> int:
    """Judge every promise by the runs measured since; returns how many judgements are new."""
    promises = reads.mart(workspace.warehouse, "promises", provider=workspace.provider.name)
    types = frames["instance_types"]
    judged = regret_ledger.judge(
        promises,
        frames["runs"],
        frames["workloads"],
        dict(zip(types["name"], types["devices"].fillna(1).astype(int), strict=True)),
        job_conditions(workspace),
        overshoot_price=workspace.settings.choice.overshoot_price,
    )
    with workspace.warehouse.transact() as connection:
        return append(connection, "raw_ledger", judged, refresh_id=refresh_id, judged_at=now)


def ledger_sentence(published: pd.DataFrame) -> str:
    """Summarize the published regret_ledger of one provider; empty if no choice was measured."""
    summary = ledger_summary(published)
    if not summary["measured"]:
        return ""
    regret = "no rival was measured"
    if summary["mean_regret"] is not None:
        regret = f"mean regret {summary['mean_regret']:.1%} of {summary['compared']} with rivals"
    return (
        f"ledger: {summary['measured']} published choices measured since,"
        f" {summary['within_interval']:.0%} within the promised interval; {regret};"
        f" {summary['failures']} missed their constraint"
    )
