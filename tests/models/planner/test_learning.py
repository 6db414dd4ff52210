"""A strategy is vetoed until its losses show that it learns as DDP does."""

from dataclasses import replace

import pandas as pd
import pytest

from models.domain.workload import Mode
from models.planner.learning import unknown_learning, verdict, vetoes
from tests.models.planning import workload

SPARSE = Mode(strategy="ddp-mstopk")
JOB = replace(workload("mlp", 64), digest="d", modes=(Mode(), SPARSE))
ROW = {
    "workload": "mlp",
    "workload_digest": "d",
    "precision": "fp32",
    "switches": "none",
    "cluster": "2xs",
    "layout": "1",
    "batch_per_device": "8",
    "status": "measured",
    "told_by": "node",
    "cause": "",
    "steps_a_window": 5,
    "diverged": False,
}


def falling(last):
    return [loss for loss in (3.0, 2.5, 2.0, 1.5, last) for _ in range(4)]


def runs(last, *, dense=(1.0, 1.0), **changes):
    """DDP falls from 3 to `dense` by seed, the strategy to `last`, in 20 windows of 5 steps."""
    rows = []
    for seed, end in zip((1, 2), dense, strict=True):
        rows.append(ROW | {"strategy": "ddp", "seed": seed, "losses": falling(end)})
        own = {"strategy": SPARSE.strategy, "seed": seed, "losses": falling(last)}
        rows.append(ROW | own | changes)
    return pd.DataFrame(rows)


@pytest.mark.parametrize(
    ("last", "dense", "passes"),
    [
        (1.19, (1.0, 1.0), True),
        (1.21, (1.0, 1.0), False),
        (0.5, (1.0, 1.0), True),
        (1.39, (0.8, 1.2), True),
        (1.41, (0.8, 1.2), False),
    ],
)
def test_a_tenth_of_ddps_progress_is_allowed_or_the_range_of_its_seeds(last, dense, passes):
    found = verdict(runs(last, dense=dense), JOB, SPARSE)
    assert found.passes is passes and found.steps == 100
    assert list(vetoes(runs(last, dense=dense), JOB)) == ([] if passes else [SPARSE])


def test_only_windows_that_all_runs_have_are_compared():
    short = runs(9.0)
    short["losses"] = [losses[:16] for losses in short["losses"]]
    found = verdict(short, JOB, SPARSE)
    assert (found.loss, found.dense, found.steps) == (1.5, 1.5, 80)
    short["losses"] = [losses[:7] for losses in short["losses"]]
    assert verdict(short, JOB, SPARSE) is None and list(vetoes(short, JOB)) == [SPARSE]


def test_a_diverged_training_fails():
    known = runs(1.0)
    known["diverged"] = known["strategy"] == SPARSE.strategy
    found = verdict(known, JOB, SPARSE)
    assert not found.passes and list(vetoes(known, JOB)) == [SPARSE]


@pytest.mark.parametrize(
    "changes",
    [{"workload_digest": "e"}, {"precision": "bf16"}, {"workload": "cnn"}, {"switches": "compile"}],
)
def test_runs_of_something_else_show_nothing(changes):
    for known in (runs(1.0).iloc[:0], runs(1.0, **changes)):
        assert list(vetoes(known, JOB)) == [SPARSE]
        assert unknown_learning(known, [JOB]) == [(JOB, SPARSE)]


def test_a_proof_or_enough_failures_are_not_repeated():
    assert unknown_learning(runs(1.0), [JOB]) == unknown_learning(runs(9.0), [JOB]) == []
    wanted = [(JOB, SPARSE)]
    assert unknown_learning(runs(1.0, status="interrupted", told_by="controller"), [JOB]) == wanted
    often = pd.concat([runs(1.0, status="failed")] * 3)
    assert unknown_learning(often, [JOB]) == []
    assert unknown_learning(often.iloc[:-1], [JOB]) == wanted
    assert unknown_learning(often.assign(cause="data"), [JOB]) == wanted
    assert unknown_learning(pd.concat([runs(1.0, status="interrupted")] * 9), [JOB]) == wanted


@pytest.mark.parametrize(
    ("first", "dense"), [(1.0, (1.0, 1.0)), (0.5, (1.0, 1.0)), (3.0, (0.5, 3.5))]
)
def test_nothing_is_shown_if_ddp_learned_less_than_its_noise(first, dense):
    known = runs(1.0, dense=dense)
    known["losses"] = [[first] * 4 + losses[4:] for losses in known["losses"]]
    assert verdict(known, JOB, SPARSE) is None
    assert verdict(runs(1.0, cluster="2xt"), JOB, SPARSE) is None


def test_a_mode_without_its_dense_mode_is_not_doubted():
    alone = replace(JOB, modes=(SPARSE,))
    assert vetoes(runs(9.0), alone) == {} and unknown_learning(runs(9.0), [alone]) == []
