"""The benchmarks' own arithmetic on small examples."""

import math
from collections import Counter
from collections.abc import Collection
from dataclasses import replace
from itertools import product

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.domain.workload import Mode
from models.planner.placement import halvings, ring
from tests.benchmarks import campaign, choices, gpu_world, holdout, spot
from tests.benchmarks.claims import Claim, rows_of, with_section
from tests.benchmarks.elastic import wrong_resumptions
from tests.benchmarks.hosts import Key, key, split_by_cores
from tests.benchmarks.placement import Network, networks, orders_of
from tests.benchmarks.scores import figures
from tests.benchmarks.setups import measured_setups
from tests.models.planning import WORKLOADS, cores_fit, offers

DEADLINE, CAP = choices.DEADLINE, choices.CAP


def test_claims_replace_their_own_section_only() -> None:
    rows = rows_of([Claim("a", "1", "2", False)], "run", "2026-01-01", "abc")
    text = with_section(with_section("head\n", "one", "old\n"), "two", "kept\n")
    text = with_section(text, "one", rows)
    assert "old" not in text and "kept" in text and text.startswith("head")
    assert text.count("**missed**") == 1 and rows.count("|") == 8


def test_errors_and_coverage_are_means_over_draws() -> None:
    rows = pd.DataFrame(
        {
            "table": "t",
            "group": "g",
            "draw": [0, 0, 1],
            "measured_s": [1.0, 2.0, 1.0],
            "ours": [1.1, 2.0, 1.3],
            "low_s": [0.9, 2.1, 1.0],
            "high_s": 2.2,
        }
    )
    found = figures(rows, ["table"]).iloc[0]
    assert found["mean"] == pytest.approx((5 + 30) / 2) and found["covers"] == 75


def test_one_seed_is_one_world_and_no_asked_row_is_known() -> None:
    runs = gpu_world.GpuWorld(3).data().runs
    assert runs.equals(gpu_world.GpuWorld(3).data().runs)
    groups = list(gpu_world.questions(runs, seed=0))
    assert len({(group.table, group.name) for group in groups}) == len(groups) > 40
    assert not any((group.known & group.held_out).any() for group in groups)


def test_drawn_setups_are_new_in_tolerated_modes_and_split_exactly() -> None:
    modes = tuple(Mode(*pair) for pair in product(("fp32", "tf32"), ("ddp", "fsdp")))
    tolerant = [replace(WORKLOADS[0], modes=modes)]

    def drawn(measured: Collection[Key] = (), seed: int = 1) -> list[Key]:
        found = holdout.draw(
            tolerant,
            offers("on-demand"),
            max_hosts=4,
            fits=cores_fit,
            measured=measured,
            count=60,
            seed=seed,
        )
        keys = []
        for cluster, items in found:
            for item in items:
                types = [cluster.members[node].instance_type.name for node in item.nodes]
                assert item.mode.precision == "fp32" and (
                    len(item.nodes) > 1 or item.mode.strategy == "ddp"
                )
                keys.append(key(item.workload, types, item.batches, item.mode))
        return keys

    first = drawn()
    assert first == drawn() != drawn(seed=2)
    assert max(Counter(first).values()) == 1 and len(first) >= 60
    assert not set(drawn(measured=set(first[:30]))) & set(first[:30])
    assert sum(split_by_cores([0.8, 0.4, 0.2], 48)) == 48
    assert min(split_by_cores([1.0, 0.01], 10)) == 1


def contest(
    measured: list[float], usd: list[float], predicted: list[float] | None = None, sd: float = 0.0
) -> choices.Contest:
    """Setups of 1, 2, 3 ... machines at `usd` an hour; draws lie around the prediction."""
    batch = math.lcm(*range(1, len(measured) + 1))
    rows = pd.DataFrame(
        {
            "workload": "w",
            "cluster": f"{n}xm{n}",
            "layout": "+".join(["1"] * n),
            "batch_per_device": str(batch // n),
            "step_s": step_s,
        }
        for n, step_s in enumerate(measured, 1)
    )
    prices = {f"m{n}": price / n for n, price in enumerate(usd, 1)}
    found = measured_setups(rows, {}, prices)
    step_s = np.array(measured if predicted is None else predicted)
    draws = np.exp(sd * np.random.default_rng(0).standard_normal((1, 200)))
    columns = {"step_s": step_s, "step_low_s": step_s, "step_high_s": step_s, "input_s": 0.0}
    columns |= dict.fromkeys(("communication_s", "exposed_communication_s"), 0.0)
    compute_s = 1 / np.arange(1, len(measured) + 1)
    return choices.Contest(
        setups=found.setups,
        measured_s=found.step_s,
        predictions=pd.DataFrame(columns).assign(bottleneck="compute", compute_s=compute_s),
        draws=step_s[:, None] * draws,
    )


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(st.floats(0.1, 100), st.floats(0.1, 100)), min_size=2, max_size=8))
def test_perfect_predictions_lose_nothing_and_nobody_beats_the_best(
    rows: list[tuple[float, float]],
) -> None:
    judged = choices.judge(contest([s for s, _ in rows], [p for _, p in rows]), seed=0)
    strict = judged[judged["chooser"] == "recommended at 90 %"]
    assert strict["met"].all() and strict["regret"].abs().max() < 1e-6
    assert (judged[["regret", "lost"]].fillna(0) > -1e-9).all(axis=None)
    assert judged[judged["chooser"] == choices.RECOMMENDED]["lost"].max() < 1e-6


def test_habits_and_wrong_predictions_miss_and_chances_hold_for_certain_times() -> None:
    three = contest([4, 2, 1], [1, 3, 9])
    table = choices.summary(choices.judge(three, seed=0)).set_index(["chooser", "kind"])
    assert table["missed"][choices.RECOMMENDED, DEADLINE] == 0
    assert table["missed"]["cheapest per hour", DEADLINE] > 0
    assert table["missed"]["most machines", CAP] > 0
    rosy = choices.judge(contest([2.0, 1.0], [1, 3], predicted=[1.0, 1.0]), seed=0)
    ours = rosy[(rosy["chooser"] == choices.RECOMMENDED) & (rosy["kind"] == DEADLINE)]
    assert not ours["met"].all()
    chance_rows = choices.chances(three)
    assert ((chance_rows["said"] > 0.5) == chance_rows["held"]).all()
    assert choices.reliability(chance_rows)["cases"].sum() == len(chance_rows)


STEP_S = np.array([4.0, 2.0, 1.5, 1.4])


def ground() -> campaign.Ground:
    rows = pd.DataFrame({"cluster": ["1xa", "1xb", "1xc", "1xc"], "step_s": STEP_S}).assign(
        workload="w", batch_per_device="8", layout=["1", "2", "3", "4"]
    )
    found = measured_setups(rows, {}, {"a": 1.0, "b": 2.0, "c": 4.0})
    price = np.array([1.0, 2.0, 4.0, 4.0])
    questions = tuple(campaign.questions_at(np.arange(4), STEP_S, price))
    return campaign.Ground(workload="w", setups=found.setups, step_s=STEP_S, questions=questions)


def test_regret_is_against_the_best_that_meets_the_constraint() -> None:
    cheapest, fastest, *_ = (question for question in ground().questions)
    found = [campaign.regret(fastest, STEP_S, at) for at in range(4)]
    assert found == pytest.approx(STEP_S / 1.4 - 1)
    assert campaign.regret(cheapest, STEP_S, 2) == pytest.approx(0.5)
    assert campaign.regret(cheapest, STEP_S, None) == 1.0


def test_a_sweep_pays_for_all_setups_and_ends_without_regret() -> None:
    place = ground()
    curve = campaign.replay(campaign.Sweep(ground=place, order=range(4)))
    assert curve["regret"].iloc[0] == 1.0 and curve["regret"].iloc[-1] == 0.0
    assert curve["runs"].tolist() == [0, 1, 2, 3, 4]
    assert campaign.usd_until(curve, 0.0) == curve["usd"].iloc[-1] > 0
    curve = pd.DataFrame({"usd": [0.0, 1.0, 2.0, 3.0], "regret": [0.2, 0.01, 0.3, 0.05]})
    assert campaign.usd_until(curve, 0.05) == 3.0 and campaign.usd_until(curve, 0.01) == np.inf


def test_ours_buys_until_no_run_may_change_a_choice() -> None:
    place = ground()

    def ours(sd: float) -> campaign.Ours:
        return campaign.Ours(
            ground=place,
            order=(),
            mean=np.log(STEP_S[[0, 1, 3, 2]]),
            covariance=sd**2 * np.eye(4),
            noise=np.full(4, 1e-6),
            learned=frozenset(),
        )

    assert ours(1e-3).next() == ()
    curve = campaign.replay(ours(0.3))
    assert curve["regret"].iloc[-1] <= curve["regret"].iloc[0] and curve["runs"].iloc[-1] > 0


JOB = st.fixed_dictionaries(
    {
        "work_hours": st.floats(0.1, 30.0),
        "interval_hours": st.floats(0.05, 40.0),
        "startup_hours": st.floats(0.0, 0.5),
        "checkpoint_hours": st.floats(0.0, 0.2),
        "replacement_hours": st.floats(0.0, 0.5),
    }
)


@given(job=JOB, moments=st.lists(st.floats(0.0, 60.0), max_size=8))
def test_an_interruption_costs_at_most_a_piece_its_checkpoint_and_a_replacement(
    job: dict[str, float], moments: list[float]
) -> None:
    assert spot.hours_given(moments[::-1], **job) == spot.hours_given(moments, **job)
    lost = spot.hours_given(moments[:1], **job) - spot.hours_given([], **job)
    piece = min(job["interval_hours"], job["work_hours"])
    most = piece + job["checkpoint_hours"] + job["replacement_hours"]
    assert -1e-9 <= lost <= max(most, job["startup_hours"]) + 1e-9


def test_a_machine_is_lost_when_the_price_exceeds_its_bid() -> None:
    usd = np.array([1.0, 1.1, 1.2, 0.9, 1.3])
    pool = spot.Prices(hours=np.array([0.0, 5.0, 10.0, 12.0, 20.0]), usd=usd)
    assert pool.losses(0.0, 100.0, 0.15) == [10.0]
    assert pool.losses(6.0, 100.0, 0.0) == [10.0, 20.0]
    assert pool.losses(6.0, 100.0, 0.2) == []


def test_an_uplink_is_shared_and_chosen_orders_come_near_the_best() -> None:
    rate, latency_s = np.full((4, 4), 10.0), np.zeros((4, 4))
    rack = np.array([0, 1, 0, 1])
    network = Network(name="", rate=rate, latency_s=latency_s, rack=rack, uplink=2.0)
    orders = np.array([[0, 1, 2, 3], [0, 2, 1, 3]])
    assert network.seconds_of(ring(4, 40.0), orders).tolist() == [60, 30]
    assert network.seconds_of(halvings(4, 40.0), orders).tolist() == [42, 24]
    table = orders_of(networks([1]))
    assert table["over_best"].between(0, 0.05).all()
    alike = table[table["network"].isin(["all alike", "one slow machine"])]
    assert not alike["changed"].any() and table["changed"].any()


@pytest.mark.parametrize(
    ("step", "lost", "wrong"), [(20, 9, 0), (20, 10, 0), (20, 13, 1), (10, 9, 1)]
)
def test_a_job_resumes_from_the_newest_whole_checkpoint(step: int, lost: int, wrong: int) -> None:
    written = [{"step": at, "ended_unix": end} for at, end in ((10, 1.0), (20, 2.0), (30, 9.0))]
    starts = [
        {"step": at, "began_unix": began, "lost_steps": steps}
        for at, began, steps in ((0, 0.0, 0), (step, 5.0, lost))
    ]
    assert wrong_resumptions({"checkpoints": written, "starts": starts}, every=10) == wrong
