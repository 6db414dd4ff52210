"""The bandwidth at which compression stops to pay, read off a table; steps to a loss with Adasum and without."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch

from tasks.node.strategies.adasum import ADASUM, pair
from tests.benchmarks import strategies
from tests.benchmarks.adasum import AVERAGED, JOBS, adasum_of, steps_to_target, trainer
from tests.benchmarks.strategies import BATCHES, MBITS, Claims, crossing, judge_adasum, settings


@pytest.mark.parametrize("at", [0.06, 0.2, 0.5, 2.9])
def test_the_crossing_lies_where_the_gain_is_nothing_and_is_unknown_where_it_never_is(at: float) -> None:
    gbps = np.array(MBITS) / 1000
    table = pd.DataFrame({"gbps": gbps, "gain": np.log(at / gbps)}).sample(frac=1.0, random_state=1)
    assert crossing(table, "gain") == pytest.approx(at)
    assert np.isnan(crossing(table.assign(gain=1.0), "gain")) and np.isnan(crossing(table.assign(gain=-1.0), "gain"))


def test_every_type_and_workload_has_its_settings() -> None:
    text = settings()
    assert text.count("[local.instance_types.") == len(MBITS) + 2, "and two kinds"
    assert text.count("[workloads.") == len(BATCHES) + 1


def test_ranks_in_one_process_are_combined_in_pairs_and_train_from_the_same_weights() -> None:
    vectors = list(torch.randn(4, 6, generator=torch.Generator().manual_seed(0)))
    expected = pair(pair(*vectors[:2], [2, 4]), pair(*vectors[2:], [2, 4]), [2, 4])
    assert torch.equal(adasum_of(vectors, [2, 4]), expected)
    losses = []
    for how in (AVERAGED, *ADASUM):
        step = trainer("wide_mlp", how, ranks=2, seed=0, factor=1.0)
        losses.append([step() for _ in range(4)])
    first, *_, last = np.array(losses).T
    assert first == pytest.approx(first[0], rel=1e-5), "all have the same weights and batches"
    assert len(set(last.round(6))) == 3, "each learned something else"


def test_steps_are_counted_to_the_loss_and_no_further_than_asked() -> None:
    counted = steps_to_target("wide_mlp", AVERAGED, ranks=2, seed=0, factor=2.0)
    assert counted < JOBS["wide_mlp"].most
    assert steps_to_target("wide_mlp", AVERAGED, ranks=2, seed=0, factor=2.0, most=counted) == counted
    assert np.isinf(steps_to_target("wide_mlp", AVERAGED, ranks=2, seed=0, factor=2.0, most=counted - 1))
    assert np.isinf(steps_to_target("wide_mlp", AVERAGED, ranks=2, seed=0, factor=1e6)), "it diverges"


@pytest.mark.parametrize(("ratio", "holds"), [(0.6, True), (0.8, False)])
def test_the_claim_is_of_the_largest_batch_and_names_what_gains_nothing(
    monkeypatch: pytest.MonkeyPatch, ratio: float, holds: bool
) -> None:
    rows = [("a", 2, 0.1), ("a", 8, ratio), ("b", 8, 1.1), ("c", 8, np.inf)]
    table = pd.DataFrame(rows, columns=["workload", "ranks", "ratio"]).assign(sd=0.1, form="adasum")
    monkeypatch.setattr(strategies, "adasum_steps", lambda names, seeds: table)
    claims = Claims()
    judge_adasum(claims, 5)
    assert claims.hold is holds and "no fewer: b, c" in claims.rows[0]["shown"]
