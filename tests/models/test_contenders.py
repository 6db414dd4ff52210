"""Who may yet be chosen: the best by the goal and the best that are safe already; what start-up adds to their hours."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from models.circumstances import spot
from models.circumstances.conditions import Stated
from models.cloud import Cluster
from models.contenders import contenders_of
from models.workload import Goal, Setup
from models.worth import Question
from tests.models.planning import offer, workload

HOURS = 10.0  # of work at a second a step
JOB = replace(workload("mlp", 64, None, samples=int(64 * 3600 * HOURS)), gradient_bytes=None)


def zones(count: int, first: int, usd_per_hour: float, market: str = "on-demand") -> list[Setup]:
    """One machine in each of so many zones, each a little dearer than the one before."""
    return [
        Setup(
            workload="mlp",
            cluster=Cluster(
                members=(offer("small", market, zone=f"z{at:03d}", usd_per_hour=usd_per_hour * (1 + at / 1e4)),)
            ),
            layout=(1,),
            batch_per_device=(64,),
        )
        for at in range(first, first + count)
    ]


def predicted(*steps: tuple[int, float, float]) -> pd.DataFrame:
    """(how many, step seconds, factor of the interval to either side) one after the other."""
    rows = [(step, step / off, step * off) for many, step, off in steps for _ in range(many)]
    return pd.DataFrame(rows, columns=["step_s", "step_low_s", "step_high_s"])


def test_those_that_are_safe_contend_beside_the_many_that_are_cheaper_and_may_miss() -> None:
    deadline = Goal(goal="cheapest_within_deadline", hours=HOURS)
    cheap, safe = zones(45, 0, 1.0), zones(25, 45, 3.0)
    steps = predicted((45, 1.0, 1.2), (25, 0.5, 1.01))
    found = contenders_of(replace(JOB, goals=(deadline,)), [*cheap, *safe], steps)
    asked = next(one for one in found.questions if one.name == deadline.goal)
    prices = [1.0 + at / 1e4 for at in range(30)] + [3.0 * (1 + at / 1e4) for at in range(45, 55)]
    assert asked.usd_per_hour == pytest.approx(prices)


@pytest.mark.parametrize("market", ["on-demand", "spot"])
def test_start_up_is_paid_once_and_does_not_grow_with_the_step(market: str) -> None:
    def asked(**seconds: float) -> Question:
        setups, steps = zones(2, 0, 1.0, market), predicted((2, 1.0, 1.1))
        found = contenders_of(JOB, setups, steps, met=Stated(**seconds))
        return next(one for one in found.questions if one.name == "fastest")

    slow, quick = asked(startup_s=7200.0), asked(startup_s=0.0)
    assert slow.fixed_hours == pytest.approx(2.0) and quick.fixed_hours == pytest.approx(0.0)
    assert slow.hours_per_step_s == pytest.approx(quick.hours_per_step_s)
    hazard = 0.3 if market == "spot" else 0.0
    for one, startup_s in ((slow, 7200.0), (quick, 0.0)):
        write_s = spot.checkpoint_seconds(0.0)
        hours = spot.expected_hours(HOURS, hazard, startup_s=startup_s, checkpoint_s=write_s)
        assert one.fixed_hours + one.hours_per_step_s == pytest.approx(np.full(2, hours))
    if market == "spot":
        assert (asked(replacement_s=3600.0).hours_per_step_s > 1.1 * quick.hours_per_step_s).all()
