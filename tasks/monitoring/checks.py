"""Drift and slow runs, as the champion judges what it has not learned from; and the regret ledger. Stores all three."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from typing import Any

import pandas as pd

from models.domain.cluster import parse_cluster
from models.domain.setup_table import rows_of
from models.monitoring import drift, regret_ledger
from models.monitoring import slow_runs as alarm
from models.monitoring.drift import drift_sentence
from models.monitoring.regret_ledger import ledger_summary
from models.step_time.dataset import TrainingData, at_nominal_speed, slowness
from warehouse import append, reads
from warehouse.database import WarehouseMissing

from ..market.job_conditions import job_conditions
from ..providers.base import ProviderError
from ..training.registry import Champion
from ..workspace.workspace import Workspace


def note_drift(
    workspace: Workspace,
    frames: Mapping[str, pd.DataFrame],
    champion: Champion | None,
    refresh_id: str,
    now: datetime,
) -> list[str]:
    """Judge the recent runs before a challenger learns from them; returns a sentence for each drift that goes on.

    Without a champion, or a run that is new to it, nothing is judged and what was known stays.
    """
    provider = workspace.provider.name
    if champion is not None:
        before = {
            (row["scope"], row["instance_type"], row["zone"]): row["since"]
            for row in rows_of(reads.drifting(workspace.warehouse, provider))
        }
        found = drift.judge(
            drift.recent(champion.model, at_nominal_speed(TrainingData(**frames))), before
        )
        rows = [asdict(one) | {"model_version": str(champion.version)} for one in found]
        with workspace.warehouse.transact() as connection:
            append.append(
                connection,
                "raw_drift",
                rows,
                provider=provider,
                refresh_id=refresh_id,
                judged_at=now,
            )
    return drift_sentences(workspace, reads.drifting(workspace.warehouse, provider))


def drift_sentences(workspace: Workspace, drifting: pd.DataFrame) -> list[str]:
    """What to say of the drifting rows of the mart `drift`; not of instance types that are offered no more."""
    rows = rows_of(drifting)
    types = {row["instance_type"] for row in rows if row["scope"] == "type"}
    known = types & set(_on_offer(workspace, types)) if types else set()
    return [
        drift_sentence(row)
        for row in rows
        if row["scope"] == "provider" or row["instance_type"] in known
    ]


def drifting_types(workspace: Workspace) -> dict[str, datetime]:
    """When each drifting instance type was found to drift: what was measured before has to be measured again.

    Where all runs together drift, that is every type on offer.
    """
    moments: dict[str, datetime] = {}
    for row in rows_of(reads.drifting(workspace.warehouse, workspace.provider.name)):
        for name in [row["instance_type"]] if row["scope"] == "type" else _on_offer(workspace, ()):
            moments[name] = max(
                row["newest_measured_at"].to_pydatetime(), moments.get(name, datetime.min)
            )
    return moments


def _on_offer(workspace: Workspace, otherwise: Collection[str]) -> Collection[str]:
    """Names of the provider's instance types; `otherwise` where it does not answer now."""
    try:
        return [one.name for one in workspace.provider.instance_types()]
    except ProviderError:
        return otherwise


MOST_SAID = 5
# Of the mart `run_details`: what only a measurement tells.
_OUTCOMES = ["step_s", "sync_s", "step_spread", "input_s", "rank_compute_s", "taken_share"]
_OUTCOMES += ["reference_s", "usual_reference_s", "usual_spread"]

Row = dict[str, Any]


def note_alarms(
    workspace: Workspace,
    frames: Mapping[str, pd.DataFrame],
    champion: Champion | None,
    refresh_id: str,
    now: datetime,
) -> list[str]:
    """Judge what is new to the champion, before a challenger learns from it; a sentence for each run that was slow.

    And for each instance type of which this refresh had a slow machine, with a champion or without.
    """
    of = {"provider": workspace.provider.name}
    cautions = alarm.slow_machines(
        reads.mart(workspace.warehouse, "machine_speeds", refresh_id=refresh_id, **of)
    )
    if champion is None:
        return cautions
    runs = _unseen(reads.mart(workspace.warehouse, "run_details", **of), champion)
    if not len(runs):
        return cautions
    predicted = champion.model.predict(runs.drop(columns=_OUTCOMES))
    found = alarm.alarms(
        runs.assign(slowness=slowness(runs)), predicted, _input_share(frames["profiles"])
    )
    rows = [row | {"model_version": str(champion.version)} for row in found]
    with workspace.warehouse.transact() as connection:
        append.append(
            connection,
            "raw_alarms",
            rows,
            provider=workspace.provider.name,
            refresh_id=refresh_id,
            judged_at=now,
        )
    return alarm_sentences(pd.DataFrame(rows)) + cautions


def alarm_sentences(alarms: pd.DataFrame) -> list[str]:
    """What to say of rows of the mart `alarms`: the newest, and how many more there are."""
    rows = rows_of(alarms)
    more = [f"slow run: and {len(rows) - MOST_SAID} older ones, in `alarms` of the published table"]
    return [alarm.sentence(row) for row in rows[:MOST_SAID]] + (
        more if len(rows) > MOST_SAID else []
    )


def noted(workspace: Workspace, rows: Sequence[Row]) -> list[Row]:
    """Rows to publish, the first of each goal with a note where a machine like one of its own stood out as slow."""
    try:
        alarms = rows_of(
            reads.mart(workspace.warehouse, "alarms", provider=workspace.provider.name)
        )
    except WarehouseMissing:
        return list(rows)
    return [row | {"reason": _with_note(row, alarms)} for row in rows]


def _with_note(row: Row, alarms: Sequence[Row]) -> str:
    """The row's reason, and the newest alarm about an instance type that it recommends."""
    own = {str(one["instance_type"]) for one in row["cluster_offers"] or ()}
    lasting = [
        one for one in alarms if one["cause"] not in ("host", "speed")
    ]  # those were the moment's
    for one in lasting if row["rank"] == 1 else ():
        touched = (
            {one["instance_type"]}
            if one["instance_type"]
            else set(parse_cluster(str(one["cluster"])))
        )
        if own & touched and (one["cause"] != "input" or one["workload"] == row["workload"]):
            return f"{row['reason']}; note: {alarm.sentence(one)}"
    return str(row["reason"])


def _unseen(runs: pd.DataFrame, champion: Champion) -> pd.DataFrame:
    """Runs that the champion has not learned from, of workloads and instance types that it has met."""
    model = champion.model
    if not len(runs):
        return runs
    types, workloads = model.measured_types, set(model.workloads) - model.guessed
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
    return dict(
        zip(zip(known["workload"], known["instance_type"], strict=True), shares, strict=True)
    )


def judge_promises(
    workspace: Workspace, frames: Mapping[str, pd.DataFrame], refresh_id: str, now: datetime
) -> int:
    """Judge every promise by the runs measured since; returns how many judgements are new. Again adds nothing."""
    promises = reads.mart(workspace.warehouse, "promises", provider=workspace.provider.name)
    types = frames["instance_types"]
    devices = (
        dict(zip(types["name"], types["devices"].fillna(1).astype(int), strict=True))
        if len(types)
        else {}
    )
    judged = regret_ledger.judge(
        promises,
        frames["runs"],
        frames["workloads"],
        devices,
        job_conditions(workspace),
        overshoot_price=workspace.settings.choice.overshoot_price,
    )
    with workspace.warehouse.transact() as connection:
        return append.append(connection, "raw_ledger", judged, refresh_id=refresh_id, judged_at=now)


def ledger_sentence(published: pd.DataFrame) -> str:
    """What became of the choices, of the published regret_ledger of one provider; empty where none was measured."""
    summary = ledger_summary(published)
    if not summary["measured"]:
        return ""
    choices = f"{summary['measured']} published choice{'s' if summary['measured'] != 1 else ''} measured since"
    inside = f"{summary['within_interval']:.0%} within the promised interval"
    if summary["mean_regret"] is None:
        regret = "no rival of one that held was measured"
    else:
        regret = f"mean regret {summary['mean_regret']:.1%} over {summary['compared']} compared with rivals"
    return f"ledger: {choices}, {inside}; {regret}; {summary['failures']} missed their constraint"
