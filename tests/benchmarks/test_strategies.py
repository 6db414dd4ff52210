"""The bandwidth at which compression stops to pay, read off a table; steps to a loss with Adasum and without; what
made-up networks take for a round, and which orders of machines pass.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch
import typer

from models.planner.placement import halvings, ring
from tasks.node.strategies.adasum import ADASUM, pair
from tests.benchmarks import strategies, tensor
from tests.benchmarks.adasum import AVERAGED, JOBS, adasum_of, steps_to_target, trainer
from tests.benchmarks.elastic import wrong_resumptions
from tests.benchmarks.placement import Hosts, Network, host_rows, networks, orders_of, rewired
from tests.benchmarks.strategies import (
    BATCHES,
    MBITS,
    Claims,
    crossing,
    judge_adasum,
    judge_placement,
    judge_servers,
    judge_tables,
    judge_tensor,
    settings,
)


@pytest.mark.parametrize("at", [0.06, 0.2, 0.5, 2.9])
def test_the_crossing_lies_where_the_gain_is_nothing_and_is_unknown_where_it_never_is(
    at: float,
) -> None:
    gbps = np.array(MBITS) / 1000
    table = pd.DataFrame({"gbps": gbps, "gain": np.log(at / gbps)}).sample(frac=1.0, random_state=1)
    assert crossing(table, "gain") == pytest.approx(at)
    assert np.isnan(crossing(table.assign(gain=1.0), "gain")) and np.isnan(
        crossing(table.assign(gain=-1.0), "gain")
    )


@pytest.mark.parametrize(
    ("one", "other", "ranks"), [("tensor-1d", "tensor-2d", 4), ("tensor-2d", "tensor-2.5d", 16)]
)
def test_grids_send_as_much_at_the_rows_of_their_crossing_and_it_is_found_from_seconds(
    one: str, other: str, ranks: int
) -> None:
    rows = tensor.crossing_rows(one, other, ranks, 256)
    sent = [
        tensor.Case(strategy=name, width=256, rows=0).sent_bytes(ranks, rows)
        for name in (one, other)
    ]
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
    crossed = {
        "ranks": 4,
        "width": 8,
        "one": "tensor-1d",
        "other": "tensor-2d",
        "predicted": 9.0,
        "measured": 9.0,
    }
    crossed |= {"off": off, "noise": 0.01}
    large = {
        "strategy": ["tensor-2d", "tensor-2.5d"],
        "step_s": [1.5 - off, 1.0],
        "spread": 0.01,
        "formula": [2, 1],
    }
    monkeypatch.setattr(tensor, "exactness", lambda: exact)
    monkeypatch.setattr(tensor, "link_bytes", lambda: sent)
    monkeypatch.setattr(tensor, "crossings", lambda: (exact, pd.DataFrame([crossed])))
    monkeypatch.setattr(tensor, "dominated", lambda: pd.DataFrame(large))
    claims = Claims()
    judge_tensor(claims)
    assert [row["holds"] for row in claims.rows] == ["yes" if holds else "NO"] * 4


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
    assert (
        steps_to_target("wide_mlp", AVERAGED, ranks=2, seed=0, factor=2.0, most=counted) == counted
    )
    assert np.isinf(
        steps_to_target("wide_mlp", AVERAGED, ranks=2, seed=0, factor=2.0, most=counted - 1)
    )
    assert np.isinf(steps_to_target("wide_mlp", AVERAGED, ranks=2, seed=0, factor=1e6)), (
        "it diverges"
    )


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


def test_an_uplink_is_shared_by_what_leaves_a_rack_at_once() -> None:
    racks = np.array([0, 1, 0, 1])
    own = Network(
        name="", rate=np.full((4, 4), 10.0), latency_s=np.zeros((4, 4)), rack=racks, uplink=2.0
    )
    apart, together = np.array([[0, 1, 2, 3], [0, 2, 1, 3]])
    assert own.seconds_of(ring(4, 40.0), np.array([apart, together])).tolist() == [
        6 * 2 * 10 / 2,
        6 * 10 / 2,
    ]
    assert own.seconds_of(halvings(4, 40.0), np.array([apart, together])).tolist() == [
        2 * 2 * 20 / 2 + 2 * 10 / 10, 2 * 20 / 10 + 2 * 2 * 10 / 2,
    ]  # fmt: skip
    assert {sweep.sharing for sweep in own.measured(0)} == {1.0}, "two pairs on one uplink"


def test_orders_chosen_from_noisy_links_come_near_the_best() -> None:
    table = orders_of(networks([1])[:4])
    assert (table["over_best"] <= 0.05).all() and (table["over_best"] >= 0).all()
    assert table.groupby("network")["changed"].max().to_dict() == {
        "two racks": True, "three racks": True, "random": True, "one slow machine": False,
    }  # fmt: skip


def test_hosts_are_put_into_racks_and_rates_of_pairs_at_both_ends() -> None:
    script = rewired(Hosts(name="", gbps=(), rack=(0, 1, 0), uplink_gbps=0.02))
    assert script.count("tbf rate 20mbit") == 4 and "ip link set h1 master r1" in script
    script = rewired(Hosts(name="", gbps=(), rack=(0, 0, 0), pairs_gbps=((0, 2, 0.05),)))
    assert script.count("htb rate 50.0mbit") == 2 and "bridge" not in script


@pytest.mark.parametrize(
    ("over", "breadth_s", "holds"), [(0.0, 2.0, True), (0.2, 2.0, False), (0.0, 0.5, False)]
)
def test_an_order_far_from_the_best_or_slower_on_hosts_than_another_falls_short(
    monkeypatch: pytest.MonkeyPatch, over: float, breadth_s: float, holds: bool
) -> None:
    names = {"chosen": 1.0, "as they come": 3.0, "breadth first": breadth_s}
    seconds = {name: [own, 1.01 * own] for name, own in names.items()}
    matrices = [(1.0 - np.eye(4)).tolist()] * 3
    found = {
        "seconds": seconds,
        "orders": {name: [0, 1, 2, 3] for name in names},
        "reason": "because",
    }
    found["pairs"] = {"latency_s": matrices, "byte_s": matrices, "took_s": 1.0}
    hosts = Hosts(name="here", gbps=(1.0,) * 4, rack=(0,) * 4)
    row = {"network": "two racks", "traffic": "ring", "over_best": over, "searched_over_best": over}
    table = pd.DataFrame([row | {"breadth_first": 2.0, "as_they_come": 3.0, "changed": True}])
    monkeypatch.setattr(strategies, "host_networks", lambda seed: [hosts])
    monkeypatch.setattr(strategies, "on_hosts", lambda *_: found)
    monkeypatch.setattr(strategies, "orders_of", lambda _: table)
    claims = Claims()
    judge_placement(claims, 1)
    assert claims.hold is holds, claims.rows
    assert host_rows(hosts, found)[1]["over_chosen"] == pytest.approx(3.0)


def test_what_was_not_measured_makes_no_claim_hold() -> None:
    columns = [
        "workload",
        "cluster",
        "strategy",
        "batch_per_device",
        "step_s",
        "step_spread",
        "sync_s",
        "gradient_bytes",
    ]
    one = ["wide_mlp", "4xb50", "ps-{}", "32", 1.0, 0.01, 0.1, 1e9]
    runs = pd.DataFrame([[str(cell).format(n) if isinstance(cell, str) else cell for cell in one] for n in (1, 2, 4)],
                        columns=columns)  # fmt: skip
    claims = Claims()
    judge_servers(claims, runs.assign(step_s=[3.0, 2.0, 1.0]))
    judge_tables(claims, runs)
    assert [row["holds"] for row in claims.rows] == ["NO", "NO"]
    assert "1 of 1" in claims.rows[0]["shown"] and "15 not measured" in claims.rows[0]["shown"]
    assert "1xfast in ddp" in claims.rows[1]["shown"]


def test_a_checkpoint_counts_as_lost_where_older_steps_are_made_again_although_it_was_written_again() -> (
    None
):
    checkpoints = [
        {"step": step, "ended_unix": at} for step, at in ((10, 1.0), (20, 2.0), (30, 9.0))
    ]

    def wrong(step: int, lost: int) -> int:
        first, second = (
            {"step": a, "began_unix": b, "lost_steps": c}
            for a, b, c in ((0, 0.0, 0), (step, 5.0, lost))
        )
        return wrong_resumptions({"checkpoints": checkpoints, "starts": [first, second]}, every=10)

    assert wrong(20, 9) == wrong(20, 10) == 0, "of a loss while step 30 was written"
    assert wrong(20, 13) == 1, "step 30 was whole before, and was made again since"
    assert wrong(10, 9) == 1


def test_a_part_that_there_is_not_is_refused_with_the_nearest() -> None:
    with pytest.raises(typer.BadParameter, match="no part 'tabels'; did you mean 'tables'"):
        strategies.main(parts="update,tabels")
