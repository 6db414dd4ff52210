"""Challenger, scoreboard, champion or refusal."""

from __future__ import annotations

from datetime import UTC, datetime

from prefect import flow

from tasks.installation import open_installation
from tasks.registry import load_champion
from tasks.report import reporter
from tasks.train import challenge, register
from warehouse.reads import training_frames


@flow(name="retrain", log_prints=True)
def retrain(refresh_id: str, provider: str = "local") -> str:
    """Fit on everything measured under today's definitions; returns the promotion rule's sentence."""
    here = open_installation(provider)
    frames = training_frames(here.warehouse, provider)
    challenger = challenge(frames, load_champion(here.home, provider))
    if challenger is None:
        return "nothing was ever measured: there is no challenger"
    version = register(here, challenger, frames, refresh_id, datetime.now(UTC))
    sentence = f"model version {version}: {challenger.decision.reason}"
    reporter().say(sentence)
    return sentence
