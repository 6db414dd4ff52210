"""Whether a strategy learns as dense data parallelism does, by the losses of both."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pandas as pd
import pytest

from models.domain.workload import Mode
from models.planner.learning import unknown_learning, verdict, vetoes
from tests.models.planning import workload

SPARSE = Mode(strategy="ddp-mstopk")
JOB = replace(workload("mlp", 64), digest="d", modes=(Mode(), SPARSE))


def run(strategy: str, seed: int, losses: list[float], **changes: Any) -> dict[str, Any]:
    """A row of the mart `learning`."""
    row = {
        "workload": "mlp",
        "workload_digest": "d",
        "cluster": "2xs",
        "layout": "1",
        "batch_per_device": "8",
    }
    row |= {
        "precision": "fp32",
        "switches": "none",
        "status": "measured",
        "told_by": "node",
        "cause": "",
        "steps_a_window": 5,
    }
    return row | {"strategy": strategy, "seed": seed, "losses": losses, "diverged": False} | changes


def falling(last: float) -> list[float]:
    return [one for one in (3.0, 2.5, 2.0, 1.5, last) for _ in range(4)]


def runs(last: float, *, dense: tuple[float, float] = (1.0, 1.0), **changes: Any) -> pd.DataFrame:
    """Dense falls from 3 to `dense` by seed, and the strategy to `last`, in 20 windows of 5 steps."""
    rows = [run("ddp", seed, falling(one)) for seed, one in zip((1, 2), dense, strict=True)]
    return pd.DataFrame(
        rows + [run(SPARSE.strategy, seed, falling(last), **changes) for seed in (1, 2)]
    )


@pytest.mark.parametrize(("last", "dense", "passes"), [
    (1.19, (1.0, 1.0), True), (1.21, (1.0, 1.0), False), (0.5, (1.0, 1.0), True),
    (1.39, (0.8, 1.2), True), (1.41, (0.8, 1.2), False),
])  # fmt: skip
def test_a_tenth_of_what_dense_learned_is_allowed_or_what_its_seeds_differ_by(
    last: float, dense: tuple[float, float], passes: bool
) -> None:
    found = verdict(runs(last, dense=dense), JOB, SPARSE)
    assert found is not None and found.passes is passes and found.steps == 100
    said = vetoes(runs(last, dense=dense), JOB)
    assert said == ({} if passes else {SPARSE: f"ddp-mstopk: after 100 steps its loss is {last:.3g}, ddp's 1"
                                       f" ({found.allowed:.3g} allowed)"})  # fmt: skip


def test_only_windows_that_all_have_are_compared_and_few_of_them_tell_nothing() -> None:
    short = runs(9.0)
    short["losses"] = [one[:16] for one in short["losses"]]
    found = verdict(short, JOB, SPARSE)
    assert found is not None and (found.passes, found.loss, found.dense, found.steps) == (
        True,
        1.5,
        1.5,
        80,
    )
    short["losses"] = [one[:7] for one in short["losses"]]
    assert verdict(short, JOB, SPARSE) is None
    assert vetoes(short, JOB) == {
        SPARSE: "ddp-mstopk: its runs could not show that it learns as ddp does"
    }


def test_training_that_ends_on_no_number_fails() -> None:
    known = runs(1.0)
    known["diverged"] = known["strategy"] == SPARSE.strategy
    said = vetoes(known, JOB)[SPARSE]
    assert said == "ddp-mstopk: after 100 steps its loss is no number, ddp's 1 (1.2 allowed)"


@pytest.mark.parametrize(
    "changes",
    [{"workload_digest": "e"}, {"precision": "bf16"}, {"workload": "cnn"}, {"switches": "compile"}],
)
def test_runs_of_something_else_say_nothing_and_it_is_to_be_shown(changes: dict[str, str]) -> None:
    for known in (pd.DataFrame(), runs(1.0, **changes)):
        assert "not shown yet to learn as ddp does" in vetoes(known, JOB)[SPARSE]
        assert unknown_learning(known, [JOB]) == [(JOB, SPARSE)]


def test_what_was_shown_or_tried_is_not_run_again_and_what_a_controller_lost_is() -> None:
    assert unknown_learning(runs(1.0), [JOB]) == unknown_learning(runs(9.0), [JOB]) == []
    assert unknown_learning(runs(1.0, status="interrupted", told_by="controller"), [JOB]) == [
        (JOB, SPARSE)
    ]
    often = pd.concat([runs(1.0, status="failed")] * 3)
    assert unknown_learning(often, [JOB]) == [] and unknown_learning(often.iloc[:-1], [JOB]) == [
        (JOB, SPARSE)
    ]
    assert unknown_learning(often.assign(cause="data"), [JOB]) == [(JOB, SPARSE)]
    assert unknown_learning(pd.concat([runs(1.0, status="interrupted")] * 9), [JOB]) == [
        (JOB, SPARSE)
    ]


@pytest.mark.parametrize(
    ("first", "dense"), [(1.0, (1.0, 1.0)), (0.5, (1.0, 1.0)), (3.0, (0.5, 3.5))]
)
def test_where_dense_learned_no_more_than_its_seeds_differ_by_nothing_is_shown(
    first: float, dense: tuple[float, float]
) -> None:
    known = runs(1.0, dense=dense)
    known["losses"] = [[first] * 4 + one[4:] for one in known["losses"]]
    assert "could not show" in vetoes(known, JOB)[SPARSE]
    assert "cluster" in runs(1.0) and verdict(runs(1.0, cluster="2xt"), JOB, SPARSE) is None


def test_nothing_is_asked_of_who_tolerates_nothing_else() -> None:
    alone = replace(JOB, modes=(SPARSE,))
    assert vetoes(pd.DataFrame(), alone) == {} and unknown_learning(pd.DataFrame(), [alone]) == []
