"""A workload in another precision is measured and split apart."""

from dataclasses import replace
from functools import cache

import pandas as pd
import pytest

from models.domain.setup_table import row_key, setup_key
from models.domain.workload import PRECISIONS, Mode
from models.planner.candidates import Supply
from models.planner.planner import candidates
from models.step_time.machine_specs import computes
from models.step_time.memory import Needs
from models.step_time.model import fit
from tests.models.planning import PLAIN, LineModel, cores_fit, machine, offer, workload
from tests.models.synthetic import World

HALF = 0.5  # of the seconds of fp32


@cache
def learned():
    """lm was measured in bf16 too, where its compute takes half as long."""
    data = World(1).data(70)
    lm = data.profiles["workload"] == "lm"
    profiles = data.profiles[lm].assign(precision="bf16")
    for name in ("forward_s", "backward_s"):
        profiles[name] *= HALF
    runs, buckets = data.runs[data.runs["workload"] == "lm"], data.buckets
    alone = runs[~runs["cluster"].str.contains(r"[2-9]x|\+")]
    halves = {"step_s": alone["step_s"] * HALF, "run_id": alone["run_id"].astype(str) + "-bf16"}
    more = buckets[buckets["workload"] == "lm"].assign(precision="bf16")
    data = replace(
        data,
        profiles=pd.concat([data.profiles.assign(precision="fp32"), profiles], ignore_index=True),
        runs=pd.concat([data.runs, alone.assign(precision="bf16", **halves)], ignore_index=True),
        buckets=pd.concat([buckets, more]),
    )
    return fit(data, seed=0)


def setup_row(precision, name="lm"):
    row = {"workload": name, "cluster": "1xs.large", "batch_per_device": "8"}
    return pd.DataFrame([row | {"precision": precision}])


def test_a_row_and_a_setup_in_a_precision_have_one_key():
    setup = setups_of()[0]
    other = replace(setup, mode=Mode("bf16"))
    assert setup_key(other) == row_key(other.row(), {}) != setup_key(setup)


def test_what_was_learned_in_bf16_is_predicted_in_bf16_and_fp32_is_left_as_it_was():
    model = learned()
    assert model.modes_of("lm") == (Mode(), Mode("bf16")) and model.modes_of("mlp") == (Mode(),)
    ours = {
        precision: float(model.predict(setup_row(precision))["step_s"].iloc[0])
        for precision in ("fp32", "bf16")
    }
    assert ours["bf16"] == pytest.approx(HALF * ours["fp32"], rel=0.15)
    plain = fit(World(1).data(70), seed=0)
    assert ours["fp32"] == pytest.approx(
        float(plain.predict(setup_row("fp32"))["step_s"].iloc[0]), rel=0.03
    )


def test_a_precision_that_was_not_measured_is_refused():
    with pytest.raises(ValueError):
        learned().predict(setup_row("bf16", "mlp"))


@pytest.mark.parametrize(
    "device, able",
    [
        ("cpu", "fp32 bf16 fp16"),
        ("T4", "fp32 fp16"),
        ("A10G", "fp32 tf32 bf16 fp16"),
        ("of tomorrow", "fp32 tf32 bf16 fp16"),
    ],
)
def test_a_device_computes_in_the_precisions_of_its_data_sheet(device, able):
    assert [name for name in PRECISIONS if computes(device, Mode(name))] == able.split()


class HalfInBf16(LineModel):
    """Half of the compute, and half of the memory."""

    def compute_line(self, workload, instance_type, mode=PLAIN):
        a, k = super().compute_line(workload, instance_type, mode)
        return (HALF * a, HALF * k) if mode.precision == "bf16" else (a, k)

    def needs(self, workload, mode, instance_type, ranks=1, *, accumulates=False):
        return Needs(0.0, 0.0, 2.0**30 / (32 if mode.precision == "bf16" else 16), [])


MODEL = HalfInBf16(setup_sd=0.15)
JOB = replace(workload("mlp", 64), modes=(Mode(), Mode("bf16")))


def sold(device="cpu"):
    kinds = [machine("large"), replace(machine("whole"), device=device)]
    return [replace(offer(kind.name), instance_type=kind) for kind in kinds]


def setups_of(job=JOB, device="cpu"):
    return candidates(job, Supply(offers=sold(device), max_hosts=2, fits=cores_fit), MODEL)


def test_setups_are_split_in_each_precision_that_all_devices_of_the_cluster_compute_in():
    found = {(setup.cluster.name, setup.mode.precision) for setup in setups_of()}
    clusters = {cluster for cluster, _ in found}
    assert clusters == {"1xlarge", "1xwhole", "2xlarge"}
    assert found == {(cluster, precision) for cluster in clusters for precision in ("fp32", "bf16")}
    old = {(setup.cluster.name, setup.mode.precision) for setup in setups_of(device="T4")}
    assert old == found - {("1xwhole", "bf16")}
    assert {setup.mode.precision for setup in setups_of(replace(JOB, modes=(Mode("bf16"),)))} == {
        "bf16"
    }


def test_a_batch_that_a_device_holds_in_bf16_alone_needs_no_accumulation_there():
    steps = {
        (setup.mode.precision, setup.accumulation_steps)
        for setup in setups_of()
        if setup.cluster.name == "1xlarge"
    }
    assert ("bf16", 1) in steps and ("fp32", 1) not in steps and ("fp32", 2) in steps
