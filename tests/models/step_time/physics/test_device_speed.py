"""How fast devices are against each other, and how surely: figures that are told, and what workloads on both tell."""

from __future__ import annotations

import numpy as np
import pytest

from models.step_time.machine_specs import Machine
from models.step_time.physics.device_speed import Speeds, Timed, learn_speeds


def machine(speed: float, *, device: str = "cpu", told: bool = True) -> Machine:
    return Machine(cores=8, bandwidth_gbps=10, devices=1, prior_speed=speed, speed_told=told, device=device)


MACHINES = {
    "t.one": machine(8.0, device="t"),
    "t.four": machine(8.0, device="t"),
    "a.one": machine(20.0, device="a"),
    "u.one": machine(8.0, device="u", told=False),
    "cpu": machine(0.8),
    "other": machine(1.6),
    "stranger": machine(8.0, device="", told=False),
}


def timed(workload: str, name: str, seconds: float) -> Timed:
    return (workload, name, seconds, 0.0)


def sd(speeds: Speeds, name: str, other: str) -> float:
    assert speeds.sd(MACHINES, name, other) == pytest.approx(speeds.sd(MACHINES, other, name))
    return speeds.sd(MACHINES, name, other)


def ratio(speeds: Speeds, name: str, other: str) -> float:
    return float(np.exp(speeds.log(MACHINES, name) - speeds.log(MACHINES, other)))


def test_before_anything_ran_the_figures_stand_and_are_doubted_by_how_little_they_tell() -> None:
    speeds = learn_speeds([timed("w", "t.one", 1.0)], MACHINES)
    assert ratio(speeds, "a.one", "t.one") == pytest.approx(2.5)
    same, cores, peaks, untold = (
        sd(speeds, *pair) for pair in (("t.one", "t.four"), ("cpu", "other"), ("t.one", "a.one"), ("t.one", "u.one"))
    )
    assert same < cores < peaks < untold < sd(speeds, "stranger", "u.one")
    assert peaks < sd(speeds, "t.one", "cpu")  # cores and accelerators are measured by other sticks
    assert same < 0.15 and 0.4 < peaks < 0.8 and untold > 1.0
    assert speeds.sd(MACHINES, "t.one", "t.one") == 0.0


def test_workloads_that_ran_on_both_tell_the_ratio_and_say_it_more_surely_the_more_they_are() -> None:
    truth, before = 5.0, sd(Speeds(), "a.one", "t.one")
    for many in (1, 3, 10):
        times = [timed(f"w{at}", name, at + took) for at in range(many) for name, took in (("t.one", 1.0),)]
        times += [timed(f"w{at}", "a.four" if at % 2 else "a.one", (at + 1.0) / truth) for at in range(many)]
        speeds = learn_speeds(times, MACHINES | {"a.four": MACHINES["a.one"]})
        assert 4.4 < ratio(speeds, "a.one", "t.one") < 5.0
        found = sd(speeds, "a.one", "t.one")
        assert found < before
        before = found
    assert before == pytest.approx(0.17, abs=0.02)  # what one workload likes a device is left


def test_a_speed_that_nobody_told_is_believed_as_it_was_seen() -> None:
    times = [timed(f"w{at}", name, took) for at in range(3) for name, took in (("t.one", 1.0), ("u.one", 0.2))]
    assert ratio(learn_speeds(times, MACHINES), "u.one", "t.one") == pytest.approx(5.0, rel=0.05)


def test_workloads_that_never_ran_on_both_tell_nothing_of_the_ratio() -> None:
    apart = learn_speeds([timed("w", "t.one", 1.0), timed("v", "a.one", 9.0)], MACHINES)
    assert sd(apart, "a.one", "t.one") == pytest.approx(sd(Speeds(), "a.one", "t.one"))
    assert ratio(apart, "a.one", "t.one") == pytest.approx(2.5)


def test_a_guess_tells_less_of_a_speed_than_a_profile() -> None:
    rows = [timed("w", "t.one", 1.0), timed("w", "a.one", 0.1)]
    doubted = [rows[0], (*rows[1][:3], 0.6)]
    sure, unsure = (ratio(learn_speeds(one, MACHINES), "a.one", "t.one") for one in (rows, doubted))
    assert sure > unsure > 2.5
