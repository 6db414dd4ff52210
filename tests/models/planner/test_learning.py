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


def runs(excess, *, dense=(1.0,) * 4, **changes):
    """DDP falls from 3 to `dense` by seed, the strategy to `excess` above, in 20 windows of 5 steps."""
    rows = []
    for seed, end in enumerate(dense, 1):
        above = excess[seed - 1] if isinstance(excess, tuple) else excess
        rows.append(ROW | {"strategy": "ddp", "seed": seed, "losses": falling(end)})
        columns = {"strategy": SPARSE.strategy, "seed": seed, "losses": falling(end + above)}
        rows.append(ROW | columns | changes)
    return pd.DataFrame(rows)


APART = (0.5, 0.8, 1.2, 1.5)  # DDP's losses of four seeds


@pytest.mark.parametrize(
    ("excess", "dense", "passes"),
    [
        (0.19, (1.0,) * 4, True),
        (0.21, (1.0,) * 4, False),
        (-0.5, APART, True),
        (0.6, APART, False),  # less than the seeds differ
        ((0.3, 0.0, 0.1, -0.1), APART, None),
        ((0.3, 0.5, 0.2, 0.3), APART, None),
        ((0.3, 0.5, 0.2, 0.3, 0.3, 0.3), (*APART, 1.0, 1.0), False),
        (0.0, (1.0,) * 3, None),
    ],
)
def test_a_tenth_of_ddps_progress_is_allowed_in_pairs_of_one_seed(excess, dense, passes):
    found = verdict(runs(excess, dense=dense), JOB, SPARSE)
    assert (found and found.passes) is passes and (found is None or found.steps == 100)
    assert list(vetoes(runs(excess, dense=dense), JOB)) == ([] if passes else [SPARSE])


def test_only_windows_that_all_runs_have_are_compared():
    short = runs(8.0)
    short["losses"] = [losses[:16] for losses in short["losses"]]
    found = verdict(short, JOB, SPARSE)
    assert (found.loss, found.dense, found.steps) == (1.5, 1.5, 80)
    short["losses"] = [losses[:7] for losses in short["losses"]]
    assert verdict(short, JOB, SPARSE) is None and list(vetoes(short, JOB)) == [SPARSE]


def test_a_diverged_training_fails():
    known = runs(0.0)
    known["diverged"] = known["strategy"] == SPARSE.strategy
    found = verdict(known, JOB, SPARSE)
    assert not found.passes and list(vetoes(known, JOB)) == [SPARSE]


@pytest.mark.parametrize(
    "changes",
    [{"workload_digest": "e"}, {"precision": "bf16"}, {"workload": "cnn"}, {"switches": "compile"}],
)
def test_runs_of_something_else_show_nothing(changes):
    for known in (runs(0.0).iloc[:0], runs(0.0, **changes)):
        assert list(vetoes(known, JOB)) == [SPARSE]
        assert [each[:2] for each in unknown_learning(known, [JOB])] == [(JOB, SPARSE)]


def test_a_proof_or_enough_failures_are_not_repeated():
    assert unknown_learning(runs(0.0), [JOB]) == unknown_learning(runs(8.0), [JOB]) == []

    def seeds(known):
        return [list(found) for *_, found in unknown_learning(known, [JOB])]

    assert seeds(runs(0.0, status="interrupted", told_by="controller")) == [[1, 2]]
    assert seeds(runs(0.0, dense=(1.0, 1.0))) == [[3, 4]]
    often = pd.concat([runs(0.0, dense=(1.0, 1.0), status="failed")] * 3)
    assert seeds(often) == [] and seeds(often.iloc[:-1]) == [[6, 7]]
    assert seeds(often.assign(cause="data")) == [[1, 2]]
    assert seeds(pd.concat([runs(0.0, status="interrupted")] * 9)) == [[1, 2]]


@pytest.mark.parametrize(
    ("first", "dense"), [(1.0, (1.0,) * 4), (0.5, (1.0,) * 4), (3.0, (0.5, 3.5, 2.0, 2.0))]
)
def test_nothing_is_shown_if_ddp_learned_less_than_its_noise(first, dense):
    known = runs(0.0, dense=dense)
    known["losses"] = [[first] * 4 + losses[4:] for losses in known["losses"]]
    assert verdict(known, JOB, SPARSE) is None
    assert verdict(runs(0.0, cluster="2xt"), JOB, SPARSE) is None


def test_a_mode_without_its_dense_mode_is_not_doubted():
    alone = replace(JOB, modes=(SPARSE,))
    assert vetoes(runs(8.0), alone) == {} and unknown_learning(runs(8.0), [alone]) == []
