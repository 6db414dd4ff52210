"""A run above its interval is named with the part of its step that is longer than expected."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pandas as pd
import pytest

from models.monitoring.slow_runs import Alarm, alarms, sentence, slow_machines

RUN: dict[str, Any] = {
    "run_id": "r",
    "workload": "conv",
    "cluster": "3xa",
    "layout": "1",
    "batch_per_device": "8",
}
RUN |= {
    "zone": "z",
    "step_s": 1.5,
    "sync_s": 0.1,
    "step_spread": 0.02,
    "rank_compute_s": [1.0, 1.0, 1.0],
}
RUN |= {"measured_at": pd.Timestamp("2026-11-20 12:00")}
PREDICTED = {"step_s": 1.0, "step_high_s": 1.1, "exposed_communication_s": 0.1}


def judged(
    share: float = 0.0, predicted: dict[str, float] = PREDICTED, **changes: Any
) -> list[Alarm]:
    return alarms(pd.DataFrame([RUN | changes]), pd.DataFrame([predicted]), {("conv", "a"): share})


def test_a_machine_that_computes_slower_than_its_equals_is_named_and_a_run_within_its_interval_is_no_alarm() -> (
    None
):
    assert judged(step_s=1.05) == [] and judged(step_s=0.5) == []
    (one,) = judged(rank_compute_s=[1.0, 1.4, 1.0])
    assert (one.cause, one.instance_type) == ("machine", "a")
    assert one.detail == "node 1 (a) computes 40% slower than its equals"


def test_a_host_that_took_processors_away_is_the_cause_whatever_looks_slow() -> None:
    (one,) = judged(rank_compute_s=[1.0, 1.4, 1.0], taken_share=0.43)
    assert (one.cause, one.instance_type) == ("host", "")
    assert one.detail == "what its machines run on took 43% of the processor time wanted away"
    for little in (0.09, None, float("nan")):
        assert judged(rank_compute_s=[1.0, 1.4, 1.0], taken_share=little)[0].cause == "machine"


def test_a_run_whose_fixed_work_was_slow_too_was_measured_on_a_slow_machine_else_it_is_slow_code() -> (
    None
):
    (one,) = judged(rank_compute_s=[1.0, 1.4, 1.0], slowness=1.3, usual_spread=0.05)
    assert (one.cause, one.instance_type) == ("speed", "")
    assert (
        one.detail
        == "measured on a slow machine: fixed work beside it took 30% longer than usual of its type"
    )
    (one,) = judged(slowness=1.03, usual_spread=0.05)
    assert (one.cause, one.instance_type) == ("compute", "a")
    assert one.detail.startswith("slow code: all machines") and one.detail.endswith(
        "usual of them (fixed work +3%)"
    )
    assert judged(slowness=1.3, usual_spread=0.1)[0].cause == "compute", (
        "a third more is usual where speeds vary so"
    )
    assert judged(slowness=1.08, usual_spread=None)[0].cause == "compute", (
        "nor is less than a tenth slow"
    )
    assert judged(slowness=1.3, taken_share=0.4)[0].cause == "host"
    assert judged(step_s=1.05, slowness=2.0) == []
    assert judged(slowness=float("nan"))[0].detail == "all machines compute slower than expected"


def speeds(*seconds: float, spread: float = 0.05, **changes: Any) -> pd.DataFrame:
    """A run on a machine of its own for each of `seconds` of fixed work; 1.0 is usual."""
    own = {"instance_type": "a", "zone": "z", "usual_s": 1.0, "usual_spread": spread} | changes
    return pd.DataFrame(
        [
            own | {"lease_id": f"l{at}", "node": 0, "reference_s": one}
            for at, one in enumerate(seconds)
        ]
    )


def test_a_machine_that_is_slower_than_the_spread_of_its_type_is_named_with_its_lease() -> None:
    (said,) = slow_machines(speeds(1.0, 1.4, 0.9))
    assert said == (
        "slow machine: node 0 (a in z) of l1 took 1.4 s for fixed work, 40% more than usual of its type (1 s)"
    )
    (said,) = slow_machines(speeds(1.0, 1.4, 1.3))
    assert said.endswith("(1 s); so were 1 of its 2 others")
    assert (
        slow_machines(speeds(1.0, 1.4, spread=0.12)) == []
        and slow_machines(speeds(1.09, spread=0.0)) == []
    )
    assert slow_machines(speeds()) == []


def test_one_slow_moment_makes_no_slow_machine() -> None:
    same = speeds(1.0, 1.9, 1.05).assign(lease_id="l")
    assert slow_machines(same) == [] and len(slow_machines(same.assign(reference_s=1.9))) == 1


def test_noise_of_the_steps_makes_no_slow_machine() -> None:
    assert judged(rank_compute_s=[1.0, 1.4, 1.0], step_spread=0.5)[0].cause == "compute"
    assert judged(rank_compute_s=[1.0, 1.05, 1.0])[0].cause == "compute"


def test_only_equals_are_compared_each_as_slow_as_the_slowest_of_its_devices() -> None:
    mixed = {"cluster": "1xa+2xb", "batch_per_device": "16+8+8", "rank_compute_s": [2.0, 1.0, 1.0]}
    assert judged(**mixed)[0].cause == "compute"
    assert judged(**mixed | {"rank_compute_s": [2.0, 1.0, 1.3]})[0].detail.startswith("node 2 (b)")
    four = {"cluster": "2xa", "layout": "2", "rank_compute_s": [1.0, 1.5, 1.0, 1.0]}
    assert judged(**four)[0].detail.startswith("node 0 (a) computes 50%")


def test_waiting_longer_for_gradients_is_a_slow_link_and_making_batches_for_long_is_input() -> None:
    (one,) = judged(sync_s=0.5)
    assert (one.cause, one.instance_type) == (
        "link",
        "",
    ) and "0.5 s wait for gradients, 0.1 s expected" in one.detail
    said = sentence(asdict(one))
    assert said.startswith(
        "slow run: conv on 3xa in z took 1.5 s a step, 50% more than predicted (at most 1.1 s): a slow"
    )
    assert said.endswith("(run r, 2026-11-20 12:00 UTC)")
    assert judged(sync_s=0.2)[0].cause == "compute", "a fifth of the excess is not the cause of it"
    assert judged(share=0.5)[0].cause == "input"
    assert judged(share=0.1)[0].cause == "compute"


def test_a_run_with_a_loader_waits_for_its_input_by_what_it_measured_and_not_by_what_a_profile_loaded() -> (
    None
):
    (one,) = judged(input_s=0.75, loader_workers=2)
    assert (one.cause, one.detail) == (
        "input",
        "input: waiting for its loader took 50% of the step",
    )
    assert judged(share=0.5, input_s=0.1, loader_workers=2)[0].cause == "compute"


@pytest.mark.parametrize(
    "missing", [{"rank_compute_s": None}, {"sync_s": None}, {"rank_compute_s": [1.0]}]
)
def test_what_older_records_do_not_tell_is_not_guessed(missing: dict[str, Any]) -> None:
    assert judged(**missing)[0].cause == "compute"
