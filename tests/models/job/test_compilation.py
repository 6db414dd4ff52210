"""Seconds of compilation, by workload and mode."""

from dataclasses import replace

import pandas as pd
import pytest

from models.domain.cluster import Cluster
from models.domain.workload import Mode, Setup
from models.job.compilation import COMPILE_S, fit_compilation
from models.job.cost import job_costs
from models.job.job_conditions import STATED
from tests.models.planning import LineModel, frame, offer, workload

COMPILED = Mode(switches="compile")


def fitted(count):
    row = {"workload": "lm", **COMPILED._asdict(), "seconds": 200.0}
    return fit_compilation(pd.DataFrame([row] * count))


def test_measured_seconds_replace_the_prior_of_their_workload_and_mode():
    model = fitted(4)
    assert model["lm", COMPILED] == pytest.approx(200.0, rel=0.03)
    assert fitted(1)["lm", COMPILED] < model["lm", COMPILED] < 200.0
    known = replace(STATED, compiled=model)
    assert known.compile_s("lm", COMPILED) == model["lm", COMPILED]
    for name, mode in (("cnn", COMPILED), ("lm", COMPILED._replace(precision="bf16"))):
        assert known.compile_s(name, mode) == COMPILE_S
    assert known.compile_s("cnn", COMPILED._replace(strategy="fsdp")) == 2 * COMPILE_S
    assert known.compile_s("lm", Mode()) == 0.0


def test_each_start_and_each_replacement_compiles():
    cluster = Cluster.of((1, offer("small", "spot")))
    plain = Setup(workload="mlp", cluster=cluster, layout=(1,), batch_per_device=(64,))
    setups = [plain, replace(plain, mode=Mode(switches="compile"))]
    rows, model = frame([plain, plain]), LineModel()
    draws = model.draws(rows, count=4, seed=0)
    costs = job_costs(workload("mlp", 64), setups, model.predict(rows), draws)
    assert costs.expected["hours"][1] - costs.expected["hours"][0] >= 0.999 * COMPILE_S / 3600
    before, after = costs.conditions.replacement_s
    assert after - before == pytest.approx(COMPILE_S)
