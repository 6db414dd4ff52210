"""The flow that tests the model in use, fits a new model, and promotes it unless it is worse."""

from datetime import UTC, datetime

from prefect import flow, task

from flows.spread import each_by_task
from tasks.monitoring.checks import judge_promises, note_alarms, note_drift
from tasks.reporting.progress import DRIFTED, PROMOTION_REFUSED, announce, reporter
from tasks.training.registry import load_champion, page_of
from tasks.training.train import challenge, register
from tasks.workspace.workspace import open_workspace
from warehouse.reads import LEARNED, measured_workloads, training_frames

# With more runs, a cross-validation in processes saves more time than the processes take to start.
_PARALLEL_ABOVE = 1000

judge = task(judge_promises)
find_drift = task(note_drift)
find_slow_runs = task(note_alarms)
fit_challenger = task(challenge)
register_challenger = task(register)


@flow(name="retrain", flow_run_name="retrain {provider}", log_prints=True)
def retrain(refresh_id: str, provider: str = "local") -> str:
    """Test the model in use (champion). Fit a challenger, and promote it unless it is worse.

    The tests compare published predictions with later measurements. They also detect slow runs and
    drift. Drift means that too many new runs are outside their predicted intervals.

    Returns a sentence with the decision, or the reason why no challenger was fitted.
    """
    workspace = open_workspace(provider)
    workspace.warehouse.create()
    frames = training_frames(workspace.warehouse, provider)
    champion, now = load_champion(workspace.home, provider), datetime.now(UTC)
    judge(workspace, frames, refresh_id, now)
    # Judge drift before retraining, on runs that the champion has not learned from.
    for drift in find_drift(workspace, frames, champion, refresh_id, now):
        reporter().say(drift)
        announce(DRIFTED, f"model.{provider}", drift)
    for slow in find_slow_runs(workspace, champion, refresh_id, now):
        reporter().say(slow)
    counted = sum(measured_workloads(workspace.warehouse, provider).values())
    learned = len(frames["runs"])
    if counted > learned:
        reporter().say(f"the model learns from {learned:,} of {counted:,} runs: {LEARNED}")
    each = each_by_task(workspace.settings.shared.dask, processes=learned > _PARALLEL_ABOVE)
    challenger = fit_challenger(frames, champion, each)
    if challenger is None:
        return "no challenger was fitted: there are no measurements"
    version, decision = register_challenger(
        workspace, challenger, frames, refresh_id, datetime.now(UTC)
    )
    sentence = f"model version {version} ({page_of(provider, version)}): {decision.reason}"
    reporter().say(sentence)
    if not decision.promote:
        announce(PROMOTION_REFUSED, f"model.{provider}", sentence, version=version)
    return sentence
