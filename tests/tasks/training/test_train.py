"""A challenger is fitted, judged, recorded, and promoted only if the rule agrees."""

from dataclasses import replace
from functools import cache

import pandas as pd
import pytest

from models.monitoring.promotion import Promotion
from tasks.training import registry
from tasks.training.registry import Champion
from tasks.training.train import Challenger, challenge, register
from tests.installed import NOON, champion, measured, model, scores
from warehouse import reads


def frames(**changes):
    data = measured()
    return {name: getattr(data, name) for name in reads.TRAINING_FRAMES} | changes


@cache
def few():
    return frames(runs=measured().runs.head(16))


@cache
def first():
    """The first challenger, of a few runs."""
    return challenge(few(), None)


@pytest.fixture
def logged(monkeypatch):
    """What reaches the registry, which has tests of its own."""
    seen = {"moves": []}
    monkeypatch.setattr(
        registry, "log_challenger", lambda home, provider, model, **rest: seen.update(rest) or 4
    )
    monkeypatch.setattr(registry, "load_champion", lambda *_: None)
    for move in ("promote", "refuse"):
        monkeypatch.setattr(
            registry, move, lambda *words, move=move, **_: seen["moves"].append((move, *words[1:]))
        )
    return seen


def challenger(promote):
    return Challenger(
        model=model(),
        held_out=pd.DataFrame(),
        scoreboard=scores(),
        decision=Promotion(promote=promote, reason="ruled"),
    )


def test_the_first_challenger_is_scored_on_rows_held_out_and_promoted():
    assert challenge(frames(runs=measured().runs.head(0)), None) is None
    made = first()
    assert made.decision.promote
    assert set(made.model.trained_on) <= set(few()["runs"]["run_id"])
    assert {"workload", "setup"} <= set(made.scoreboard["split"]) == set(made.held_out["split"])
    assert {"conv", "lm", "all"} <= set(made.scoreboard["group"])


def test_forgotten_runs_leave_the_model():
    made = challenge(few(), champion())
    assert made.decision.promote and len(made.model.trained_on) == 16


@pytest.mark.parametrize("promote", [True, False])
def test_the_version_its_card_its_scores_and_the_decision_are_written_down(here, logged, promote):
    made = challenger(promote)
    assert register(here, made, frames(), "refresh-9", NOON) == (4, made.decision)
    assert logged["moves"] == [("promote" if promote else "refuse", "local", 4, "ruled")]
    [row] = here.warehouse.select("model_versions", {"provider": "local"}).to_dict("records")
    assert (row["version"], row["promoted"], row["reason"]) == ("4", promote, "ruled")
    assert row["training_digest"] == logged["provenance"].training_digest
    written = here.warehouse.select("scores", {"provider": "local", "version": "4"})
    assert set(written["mean_error"]) == {0.05}
    assert "conv, lm" in logged["card"]


def test_a_champion_of_another_machine_is_compared_with_too(here, logged, monkeypatch):
    monkeypatch.setattr(registry, "load_champion", lambda *_: Champion(version=3, model=model()))
    version, decision = register(here, replace(first(), over=1), frames(), "refresh-9", NOON)
    assert not decision.promote
    assert logged["moves"] == [("refuse", "local", 4, decision.reason)]
    [row] = here.warehouse.select("model_versions", {"provider": "local"}).to_dict("records")
    assert (row["version"], row["promoted"]) == (str(version), False)
