"""Compiling counts in a job's start-up, as it was measured, and in no other mode's."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from models.domain.workload import Mode
from models.job.compilation import COMPILE_S, CompileModel, fit_compilation
from models.job.cost import job_costs
from models.job.job_conditions import Stated
from models.planner.candidates import Supply
from models.planner.planner import candidates, plan
from tests.models.planning import GBPS, JointModel, frame, offer, workload

COMPILED = Mode(switches="compile")


def fitted(*rows: tuple[str, Mode, float]) -> CompileModel:
    return fit_compilation(
        pd.DataFrame([{"workload": name, **mode._asdict(), "seconds": s} for name, mode, s in rows])
    )


def test_a_mode_that_compiles_nothing_takes_no_seconds_and_one_that_was_never_compiled_those_of_the_prior() -> (
    None
):
    assert CompileModel().seconds("lm", Mode()) == 0.0
    assert CompileModel().seconds("lm", COMPILED) == COMPILE_S
    assert CompileModel().seconds("lm", COMPILED._replace(strategy="fsdp")) == 2 * COMPILE_S


def test_what_was_measured_replaces_the_prior_of_its_workload_in_its_mode_alone() -> None:
    model = fitted(*[("lm", COMPILED, 200.0)] * 4)
    assert model.seconds("lm", COMPILED) == pytest.approx(200.0, rel=0.03)
    assert (
        fitted(("lm", COMPILED, 200.0)).seconds("lm", COMPILED)
        < model.seconds("lm", COMPILED)
        < 200.0
    )
    for name, mode in (("cnn", COMPILED), ("lm", COMPILED._replace(precision="bf16"))):
        assert model.seconds(name, mode) == COMPILE_S
    assert model.seconds("lm", Mode()) == 0.0


def test_hours_of_a_compiled_mode_are_longer_by_compiling_at_every_start() -> None:
    model = JointModel(
        lines={"small": (0.01, 0.0005)}, gbps=GBPS, memory={"small": np.nan}, slower=0.0
    )
    job = replace(workload("lm", 16), modes=(Mode(), COMPILED))
    met = Stated(compilation=fitted(*[("lm", COMPILED, 900.0)] * 50))
    supply = Supply(
        offers=[offer("small"), offer("small", "spot")],
        max_hosts=1,
        fits=lambda _: "",
        job_conditions=met,
    )
    setups = [one for one in candidates(job, supply, model) if one.accumulation_steps == 1]
    rows = frame(setups)
    costs = job_costs(
        job, setups, model.predict(rows), model.draws(rows, count=4, seed=0), job_conditions=met
    )
    hours = {
        (one.cluster.market, one.switches): (float(h), float(again))
        for one, h, again in zip(setups, costs.hours, costs.conditions.replacement_s, strict=True)
    }
    for market in ("on-demand", "spot"):
        plain, compiled = hours[market, "none"], hours[market, "compile"]
        assert compiled[0] - plain[0] >= 0.249 and compiled[1] - plain[1] == pytest.approx(
            900.0, rel=0.01
        )
    short = replace(job, samples=16_000)  # seconds of work
    assert {row["switches"] for row in plan(short, supply, model).rows} == {"none"}
    first = plan(replace(short, modes=(COMPILED,)), supply, model).rows[0]
    assert first["switches"] == "compile" and first["hours"] > 0.25
