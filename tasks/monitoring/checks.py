"""Compare new runs with predictions, and store drift, slow runs and the regret of recommendations.

A choice is a published recommendation. Its promises are the predicted step time, hours and dollars.
Its regret is the extra cost over the best choice that is now known. Run the checks before a model
is fitted to the new runs.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import pandas as pd

from models.domain.setup_table import rows_of, types_of
from models.monitoring import drift, regret_ledger, slow_runs
from models.monitoring.drift import drift_sentence
from models.step_time.dataset import TrainingData, at_nominal_speed, slowness
from models.step_time.model import StepTimeModel
from warehouse.append import append

from ..market.job_conditions import experience_of
from ..training.registry import Champion
from ..workspace.workspace import Workspace

Row = dict[str, Any]
_MOST_SENTENCES = 5
# Columns of the mart run_details that are known only after a run.
_OUTCOMES = ["step_s", "sync_s", "step_spread", "input_s", "rank_compute_s", "taken_share"]
_OUTCOMES += ["reference_s", "usual_reference_s", "usual_spread"]


def note_drift(
    workspace: Workspace,
    frames: Mapping[str, pd.DataFrame],
    champion: Champion | None,
    refresh_id: str,
    now: datetime,
) -> list[str]:
    """Test instance types for drift, store the results, and return a sentence for each drift.

    An instance type drifts in a zone if too many of its new runs lie outside their predicted
    intervals.

    frames: the data to which models are fitted, as {name: frame}.
    champion: the model in use. If None, nothing is tested, and the sentences report the last tests.
    """
    if champion is not None:
        drift_rows = rows_of(workspace.mart("drift", drifting=True))
        before = {(row["instance_type"], row["zone"]): row["since"] for row in drift_rows}
        recent = drift.recent(champion.model, at_nominal_speed(TrainingData(**frames)))
        _store(workspace, "raw_drift", drift.judge(recent, before), champion, refresh_id, now)
    return [drift_sentence(row) for row in rows_of(workspace.mart("drift", drifting=True))]


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
    """Return {drifting instance type: time of its newest run that was tested for drift}.

    A type is drifting if too many of its new runs lie outside their predicted intervals. When
    Srift plans new runs, it ignores the type's training runs up to the returned time.
    """
    drifting = workspace.mart("drift", drifting=True)
    newest = drifting.groupby("instance_type")["newest_measured_at"].max()
    return {str(name): at.to_pydatetime() for name, at in newest.items()}


def note_alarms(
    workspace: Workspace, champion: Champion | None, refresh_id: str, now: datetime
) -> list[str]:
    """Store an alarm for each slow run, and return sentences about slow runs and slow machines.

    A run is slow if its step time is above the 90 % interval that the model in use predicts. Runs
    to which the model was fitted are not checked. A machine is slow if a fixed computation took
    much longer than is usual on its instance type.

    champion: the model in use. If it is None, only machines are checked, and nothing is stored.
    refresh_id: the refresh whose machines are checked.
    """
    cautions = slow_runs.slow_machines(workspace.mart("machine_speeds", refresh_id=refresh_id))
    if champion is None:
        return cautions
    runs = _unseen(workspace.mart("run_details")[::-1], champion.model)
    if not len(runs):
        return cautions
    predictions = champion.model.predict(runs.drop(columns=_OUTCOMES))
    shares = workspace.mart("input_shares")
    share: dict[Any, float] = shares.set_index(["workload", "instance_type"])["share"].to_dict()
    rows = slow_runs.alarms(runs.assign(slowness=slowness(runs)), predictions, share)
    _store(workspace, "raw_alarms", rows, champion, refresh_id, now)
    return alarm_sentences(rows) + cautions


def alarm_sentences(alarms: Sequence[Row]) -> list[str]:
    """Return a sentence for each of the newest alarms, and a sentence that counts older alarms.

    An alarm is the record of a slow run.

    alarms: rows of the mart `alarms`, the newest first.
    """
    sentences = [slow_runs.sentence(row) for row in alarms[:_MOST_SENTENCES]]
    if len(alarms) > _MOST_SENTENCES:
        sentences.append(
            f"{len(alarms) - _MOST_SENTENCES} older slow runs are in the view `alarms`"
        )
    return sentences


def _unseen(runs: pd.DataFrame, model: StepTimeModel) -> pd.DataFrame:
    """Return the runs that `model` can predict, without the runs to which it was fitted."""
    workloads = set(model.workloads) - model.guessed
    has_known_types = runs["cluster"].map(
        lambda cluster: model.measured_types.issuperset(types_of(cluster))
    )
    is_new = ~runs["run_id"].isin(model.trained_on) & runs["workload"].isin(workloads)
    return runs[is_new & has_known_types.astype(bool)].reset_index(drop=True)


def judge_promises(
    workspace: Workspace, frames: Mapping[str, pd.DataFrame], refresh_id: str, now: datetime
) -> int:
    """Compare the predictions of published tables with runs that were measured later.

    Each comparison is stored as a row of the table raw_ledger. Returns the number of new rows.

    frames: the data to which models are fitted, as {name: frame}.
    """
    types = frames["instance_types"]
    rows = regret_ledger.judge(
        workspace.mart("promises"),
        frames["runs"],
        frames["workloads"],
        dict(zip(types["name"], types["devices"].fillna(1).astype(int), strict=True)),
        experience_of(workspace).conditions,
        overshoot_price=workspace.settings.choice.overshoot_price,
    )
    with workspace.warehouse.transact() as connection:
        return append(connection, "raw_ledger", rows, refresh_id=refresh_id, judged_at=now)


def ledger_sentence(summary: Row) -> str:
    """Return a sentence that compares published choices with later measurements.

    summary: the result of `warehouse.export.ledger_summary`. If it is {}, the result is "".
    """
    if not summary:
        return ""
    mean, count = "", summary["compared"]
    if count:
        regret = summary["mean_regret"]
        mean = f"; mean regret {regret:.1%} over {count} choices with measured rivals"
    return (
        f"ledger: {summary['measured']} published choices were measured later,"
        f" {summary['within']:.0%} within the predicted interval;"
        f" {summary['failures']} missed the deadline or budget{mean}"
    )
