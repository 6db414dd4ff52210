"""What became of promises, drift, then challenger, scoreboard, champion or refusal."""

from __future__ import annotations

from datetime import UTC, datetime

from prefect import flow

from tasks.alarms import note_alarms
from tasks.drift import note_drift
from tasks.installation import open_installation
from tasks.ledger import judge_promises
from tasks.registry import load_champion
from tasks.report import reporter
from tasks.train import challenge, register
from warehouse.reads import training_frames


@flow(name="retrain", log_prints=True)
def retrain(refresh_id: str, provider: str = "local") -> str:
    """Fit on everything measured under today's definitions; returns the promotion rule's sentence."""
    here = open_installation(provider)
    frames = training_frames(here.warehouse, provider)
    champion, now = load_champion(here.home, provider), datetime.now(UTC)
    judge_promises(here, frames, refresh_id, now)
    for drift in note_drift(here, frames, champion, refresh_id, now):  # before the challenger has seen those runs
        reporter().say(drift)
    for slow in note_alarms(here, frames, champion, refresh_id, now):
        reporter().say(slow)
    challenger = challenge(frames, champion)
    if challenger is None:
        return "nothing was ever measured: there is no challenger"
    version = register(here, challenger, frames, refresh_id, datetime.now(UTC))
    sentence = f"model version {version}: {challenger.decision.reason}"
    reporter().say(sentence)
    return sentence
