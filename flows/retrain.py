"""What became of promises, drift, then challenger, scoreboard, champion or refusal."""

from __future__ import annotations

from datetime import UTC, datetime

from prefect import flow

from tasks.monitoring.checks import judge_promises, note_alarms, note_drift
from tasks.reporting.progress import DRIFTED, PROMOTION_REFUSED, announce, reporter
from tasks.training.registry import load_champion
from tasks.training.train import challenge, register
from tasks.workspace.workspace import open_workspace
from warehouse.reads import LEARNED, counted_runs, training_frames


@flow(name="retrain", log_prints=True)
def retrain(refresh_id: str, provider: str = "local") -> str:
    """Fit on everything measured under today's definitions; returns the promotion rule's sentence."""
    workspace = open_workspace(provider)
    workspace.warehouse.migrate()  # a deployment of its own may be the first after an upgrade
    frames = training_frames(workspace.warehouse, provider)
    champion, now = load_champion(workspace.home, provider), datetime.now(UTC)
    judge_promises(workspace, frames, refresh_id, now)
    for drift in note_drift(
        workspace, frames, champion, refresh_id, now
    ):  # before the challenger has seen those runs
        reporter().say(drift)
        announce(DRIFTED, f"model.{provider}", drift)
    for slow in note_alarms(workspace, frames, champion, refresh_id, now):
        reporter().say(slow)
    counted = counted_runs(workspace.warehouse, provider)
    if counted > len(frames["runs"]):
        reporter().say(
            f"{counted:,} runs count, and the model learns from {len(frames['runs']):,} of them: {LEARNED}"
        )
    challenger = challenge(frames, champion, workspace.settings.shared.dask)
    if challenger is None:
        return "nothing was ever measured: there is no challenger"
    version, decision = register(workspace, challenger, frames, refresh_id, datetime.now(UTC))
    sentence = f"model version {version}: {decision.reason}"
    reporter().say(sentence)
    if not decision.promote:
        announce(PROMOTION_REFUSED, f"model.{provider}", sentence, version=version)
    return sentence
