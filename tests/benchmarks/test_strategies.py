"""The bandwidth at which compression stops to pay, read off a table; steps to a loss with Adasum and without."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch

from tasks.node.strategies.adasum import ADASUM, pair
from tests.benchmarks import strategies, tensor
from tests.benchmarks.adasum import AVERAGED, JOBS, adasum_of, steps_to_target, trainer
from tests.benchmarks.strategies import BATCHES, MBITS, Claims, crossing, judge_adasum, judge_tensor, settings


@pytest.mark.parametrize("at", [0.06, 0.2, 0.5, 2.9])
def test_the_crossing_lies_where_the_gain_is_nothing_and_is_unknown_where_it_never_is(at: float) -> None:
    gbps = np.array(MBITS) / 1000
    table = pd.DataFrame({"gbps": gbps, "gain": np.log(at / gbps)}).sample(frac=1.0, random_state=1)
    assert crossing(table, "gain") == pytest.approx(at)
    assert np.isnan(crossing(table.assign(gain=1.0), "gain")) and np.isnan(crossing(table.assign(gain=-1.0), "gain"))


@pytest.mark.parametrize(("one", "other", "ranks"), [("tensor-1d", "tensor-2d", 4), ("tensor-2d", "tensor-2.5d", 16)])
def test_grids_send_as_much_at_the_rows_of_their_crossing_and_it_is_found_from_seconds(
    one: str, other: str, ranks: int
) -> None:
    rows = tensor.crossing_rows(one, other, ranks, 256)
    sent = [tensor.Case(strategy=name, width=256, rows=0).sent_bytes(ranks, rows) for name in (one, other)]
    assert rows > 0 and sent[0] == pytest.approx(sent[1])
    asked = [part * rows for part in (0.5, 0.8, 1.3, 2.0)]
    logs = [np.log(many / rows) for many in asked]
    assert tensor.crossed_at(asked[::-1], logs[::-1]) == pytest.approx(rows)
    assert tensor.crossed_at(asked, [-one for one in logs]) == pytest.approx(rows)
    assert np.isnan(tensor.crossed_at(asked, [1.0] * 4))


@pytest.mark.parametrize(("off", "holds"), [(0.0, True), (0.3, False)])
def test_a_claim_of_tensor_parallelism_holds_by_its_figure(
    monkeypatch: pytest.MonkeyPatch, off: float, holds: bool
) -> None:
    exact = pd.DataFrame({"off": [1e-7 + off]})
    sent = pd.DataFrame({"off": [0.001, -off]})
    crossed = {"ranks": 4, "width": 8, "one": "tensor-1d", "other": "tensor-2d", "predicted": 9.0, "measured": 9.0}
    crossed |= {"off": off, "noise": 0.01}
    large = {"strategy": ["tensor-2d", "tensor-2.5d"], "step_s": [1.5 - off, 1.0], "spread": 0.01, "formula": [2, 1]}
    monkeypatch.setattr(tensor, "exactness", lambda: exact)
    monkeypatch.setattr(tensor, "link_bytes", lambda: sent)
    monkeypatch.setattr(tensor, "crossings", lambda: (exact, pd.DataFrame([crossed])))
    monkeypatch.setattr(tensor, "dominated", lambda: pd.DataFrame(large))
    claims = Claims()
    judge_tensor(claims)
    assert [row["holds"] for row in claims.rows] == ["yes" if holds else "NO"] * 4


def test_every_type_and_workload_has_its_settings() -> None:
    text = settings()
    assert text.count("[local.instance_types.") == len(MBITS) and text.count("[workloads.") == len(BATCHES)


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
