"""What a lost machine costs an elastic job: learned by outcome and type, and added up over a job's losses."""

from __future__ import annotations

import math
from dataclasses import replace

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.job.restarts import NOTICED_S, PRIOR_S, ElasticJob, RestartModel, fit_restarts
from tasks.node import agent

JOB = ElasticJob(
    steps=100,
    checkpoint_every=10,
    step_s={3: 1.0, 2: 1.4, 1: 2.5},
    startup_s=20.0,
    checkpoint_s=0.5,
    restore_s=0.25,
    lost_s=12.0,
    replaced=False,
)
MOMENTS = st.lists(st.floats(0, 300), max_size=6)


def restarts(*rows: tuple[str, str, float]) -> pd.DataFrame:
    return pd.DataFrame(rows, columns=["outcome", "instance_type", "seconds"])


def test_the_prior_is_wide_and_gives_way_to_a_few_restarts() -> None:
    prior = RestartModel()
    assert prior.seen == frozenset() and (prior.seconds("fewer", ["a"]) > PRIOR_S["fewer"]).all()
    known = fit_restarts(restarts(*[("fewer", "a", 30.0)] * 4))
    assert known.seen == {"fewer"}
    assert known.seconds("fewer", ["a"])[0] == pytest.approx(30, rel=0.04)
    assert PRIOR_S["fewer"] < known.seconds("fewer", ["other"])[0], (
        "other types are thought of with it"
    )
    assert known.seconds("replaced", ["a"]) == pytest.approx(
        prior.seconds("replaced", ["a"]), rel=0.01
    )


def test_one_restart_counts_once() -> None:
    known = fit_restarts(restarts(("fewer", "a", PRIOR_S["fewer"] * math.e)))
    middle, doubt = known.types["fewer", "a"]
    apart, noise = 0.7**2 + 0.3**2, 0.2**2  # of an outcome and a type; of a restart
    assert middle - math.log(PRIOR_S["fewer"]) == pytest.approx(apart / (apart + noise))
    assert doubt**2 == pytest.approx(1 / (1 / apart + 1 / noise))


def test_types_differ_once_each_was_seen() -> None:
    known = fit_restarts(restarts(*[("replaced", "a", 10.0)] * 8, *[("replaced", "b", 40.0)] * 8))
    slow, fast = known.seconds("replaced", ["b", "a"])
    assert slow == pytest.approx(40, rel=0.06) and fast == pytest.approx(10, rel=0.06)


def test_what_is_neither_outcome_counts_for_nothing_and_no_seconds_are_refused() -> None:
    assert fit_restarts(restarts(("grown", "a", 5.0))).seen == frozenset()
    with pytest.raises(ValueError, match="above 0"):
        fit_restarts(restarts(("fewer", "a", 0.0)))
    with pytest.raises(ValueError, match="none of fewer, replaced"):
        RestartModel().seconds("grown", ["a"])


def test_without_losses_a_job_takes_its_steps_and_checkpoints() -> None:
    assert JOB.seconds([]) == pytest.approx(20 + 100 + 10 * 0.5)


def test_a_loss_takes_the_steps_since_the_last_checkpoint_and_the_rest_is_made_by_fewer() -> None:
    # whole checkpoints after 10.5 and 21 seconds: of 25 seconds 4 are lost
    assert JOB.seconds([25.0]) == pytest.approx(20 + 25 + 12.25 + 80 * 1.4 + 8 * 0.5)
    assert replace(JOB, replaced=True).seconds([25.0]) == pytest.approx(
        20 + 25 + 12.25 + 80 + 8 * 0.5
    )


def test_before_the_first_checkpoint_there_is_none_to_read_and_all_is_lost() -> None:
    assert JOB.seconds([5.0]) == pytest.approx(20 + 5 + 12 + 100 * 1.4 + 10 * 0.5)


def test_a_loss_while_others_meet_is_waited_out_and_has_them_begin_anew() -> None:
    assert JOB.seconds([25.0, 31.0]) == pytest.approx(20 + 31 + 24.25 + 80 * 2.5 + 8 * 0.5)
    assert JOB.seconds([25.0, 29.0]) == pytest.approx(20 + 29 + 12.25 + 80 * 2.5 + 8 * 0.5), (
        "both are missed at once"
    )
    assert NOTICED_S == agent._ALIVE_EVERY_S * agent._ALIVE_MISSED
    with_others = replace(JOB, replaced=True)
    assert with_others.seconds([25.0, 30.0]) == pytest.approx(20 + 30 + 12.25 + 80 + 8 * 0.5)


def test_a_loss_that_happened_found_the_job_at_work() -> None:
    late = JOB.seconds([]) - 20 + 1.0
    assert JOB.seconds([late]) == JOB.seconds([])
    assert JOB.seconds([late], happened=True) == pytest.approx(20 + late + 12.25 + 10 * 1.4 + 0.5)


@given(MOMENTS)
def test_losses_only_cost(moments: list[float]) -> None:
    assert JOB.seconds(moments) >= JOB.seconds([]) - 1e-9
    assert JOB.seconds(moments) == JOB.seconds(sorted(moments)), "in whatever order they are told"


@given(MOMENTS)
def test_the_first_machine_stays_and_what_comes_after_the_end_is_no_loss(
    moments: list[float],
) -> None:
    assert JOB.seconds([*moments, 10_000.0]) == JOB.seconds(moments)
    assert JOB.seconds([1.0, 2.0, *[3.0 + one for one in moments]]) == JOB.seconds([1.0, 2.0])


def test_the_mean_grows_with_the_rate_and_is_the_same_for_a_seed() -> None:
    rare, often = (JOB.expected_seconds(rate, seed=1) for rate in (0.0, 60.0))
    assert rare == JOB.seconds([]) and often > 1.1 * rare
    assert often == JOB.expected_seconds(60.0, seed=1)
