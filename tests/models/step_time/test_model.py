"""The model against a world whose truth is known, against physics, bad data and guesses."""

import pickle
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.domain.workload import MODES
from models.step_time import serialization
from models.step_time.model import bottlenecks, fit, introduce
from tests.frames import data_of
from tests.models import guessing
from tests.models.planning import workload
from tests.models.step_time.cases import error, fitted, inside, setup, sound, width
from tests.models.synthetic import TYPES, WORKLOADS


def test_unmeasured_setups_are_predicted_far_better_than_by_compute_alone(known):
    data, fresh, model = known
    predicted, truth = model.predict(fresh.drop(columns="step_s")), fresh["step_s"]
    bare = fit(replace(data, runs=data.runs.iloc[:0]), seed=0).predict(fresh)
    off = error(predicted, truth)
    assert off.median() < 0.04 and off.mean() < 0.05
    assert off.median() < 0.3 * (bare["compute_s"] / truth - 1).abs().median()
    assert inside(predicted, truth) >= 0.8 and width(predicted).median() < 0.2
    mixed = fresh["cluster"].str.contains("+", regex=False)
    assert off[mixed].median() < off[~mixed].median() + 0.02
    assert sound(bare) and error(bare, truth).median() < 0.12
    assert (width(bare) > width(predicted)).mean() > 0.95


def test_intervals_are_wider_without_similar_measurements(known):
    data = known[0]
    mlp = (data.runs["workload"] == "mlp") & (data.runs["cluster"] != "1xs.large")
    model = fit(replace(data, runs=data.runs[~mlp]), seed=0)
    setups = [setup("embed", "4xs.small", 24)]
    setups += [setup("mlp", "4xs.small", batch) for batch in (24, 1536)]
    assert width(model.predict(pd.concat(setups, ignore_index=True))).is_monotonic_increasing


def test_draws_agree_with_the_intervals_and_move_together(known):
    model = known[2]
    setups = pd.concat(
        [
            setup("mlp", "3xs.medium", 96),
            setup("mlp", "3xs.medium", 100),
            setup("conv", "1xs.whole"),
        ]
    )
    drawn, predicted = (
        model.draw_arrays(model.read(setups), count=4000, seed=0),
        model.predict(setups),
    )
    high = predicted["step_high_s"].to_numpy()
    assert np.quantile(drawn, 0.95, axis=1) == pytest.approx(high, rel=0.02)
    mean, covariance, noise = model.joint(setups)
    assert np.log(drawn).mean(axis=1) == pytest.approx(mean) and (noise > 0).all()
    covariance = covariance + np.diag(noise)
    assert np.cov(np.log(drawn)) == pytest.approx(covariance, abs=0.05 * covariance.max())
    together = np.corrcoef(np.log(drawn))
    assert together[0, 1] > 0.3 and together[0, 1] > together[0, 2] + 0.2


def test_the_order_of_machines_means_nothing(known):
    setups = [setup(cluster="1xs.large+2xs.small", batch="8+2+2")]
    setups.append(setup(cluster="2xs.small+1xs.large", batch="2+2+8"))
    first, second = known[2].predict(pd.concat(setups))["step_s"]
    assert first == pytest.approx(second)


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(sorted(WORKLOADS)),
    st.lists(st.sampled_from(sorted(TYPES)), min_size=1, max_size=8),
    st.integers(1, 5000),
    st.integers(1, 8),
)
def test_predictions_are_sound_and_a_larger_batch_is_no_quicker(
    known, name, types, batch, accumulation
):
    cluster = "+".join(f"1x{kind}" for kind in types)
    setups = [setup(name, cluster, size, accumulation) for size in (batch, 2 * batch)]
    predicted = known[2].predict(pd.concat(setups))
    assert sound(predicted)
    assert predicted["step_s"].iloc[1] >= predicted["step_s"].iloc[0] * 0.97


@pytest.mark.parametrize(
    ("compute", "mean", "machines", "expected"),
    [
        (0.81, 0.81, 2, "compute"),
        (0.7, 0.7, 1, "communication inside a node"),
        (1.0, 0.79, 2, "stragglers"),
        (0.75, 0.45, 2, "stragglers"),
        (0.7, 0.7, 2, "communication between nodes"),
    ],
)
def test_a_fifth_of_the_step_is_a_bottleneck(compute, mean, machines, expected):
    exposed, uneven, counts = (
        np.array([value]) for value in (1 - compute, compute - mean, machines)
    )
    found = bottlenecks(exposed, uneven, loading=np.zeros(1), machines=counts)
    assert found == [expected]


def test_accumulation_repeats_compute_and_not_communication(known):
    once, twice = (known[2].predict(setup("lm", "2xs.small", 4, n)).iloc[0] for n in (1, 2))
    assert 1.2 * once["step_s"] < twice["step_s"] < 2 * once["step_s"]
    assert twice["samples_per_s"] > once["samples_per_s"]


@pytest.mark.parametrize(
    "setups",
    [
        setup("lmm"),
        setup(cluster="2xs.larg"),
        setup().assign(strategy="gossip"),
        setup().assign(provider="ec2"),
        setup(batch="8+x"),
        setup().drop(columns="cluster"),
    ],
)
def test_unknown_setups_are_refused(known, setups):
    with pytest.raises(ValueError):
        known[2].predict(setups)


def test_no_measurements_and_several_providers_are_refused(known):
    data = known[0]
    mixed = data.runs.assign(provider=["ec2", *["local"] * (len(data.runs) - 1)])
    for refused in (data_of(), replace(data, runs=mixed)):
        with pytest.raises(ValueError):
            fit(refused, seed=0)


def test_a_stored_model_reads_back_exactly_and_equal_data_give_equal_models(known):
    data, fresh, model = known
    stored = serialization.dump(model)
    for equal in (serialization.load(stored), fit(data, seed=0)):
        pd.testing.assert_frame_equal(equal.predict(fresh), model.predict(fresh), rtol=1e-9)
        drawn = (copy.draw_arrays(copy.read(fresh[:9]), count=7, seed=3) for copy in (equal, model))
        assert np.allclose(*drawn, rtol=1e-9)
        assert equal.memory == model.memory


def test_other_bytes_are_no_model_and_call_nothing(tmp_path):
    command = f"cos\nmkdir\n(V{tmp_path}/made\ntR."  # a pickle that makes a folder
    for stored in (b"", b"{}", pickle.dumps(1), command.encode()):
        with pytest.raises(serialization.NotAModel):
            serialization.load(stored)
    assert not list(tmp_path.iterdir())


def test_a_changed_definition_was_not_measured(known):
    model, measured = known[2], replace(workload("lm"), digest="d-lm")
    assert model.met_workload(measured)
    assert not model.met_workload(replace(measured, digest="other"))
    assert set(model.type_digests.values()) == {"t"}


NEW, FIRST = guessing.NEW, guessing.TYPES[0].name


def guesses():
    found = introduce(guessing.model(), NEW)
    assert found is not None
    return found


@pytest.mark.parametrize("kind", [kind.name for kind in guessing.TYPES])
def test_a_guess_is_near_and_its_interval_is_wide(kind):
    found = guesses().predict(guessing.setup_row("new", f"1x{kind}", 32))
    tflops = next(
        float(instance.device_tflops or 0) for instance in guessing.TYPES if instance.name == kind
    )
    truth = guessing.seconds(1.5e10, 32, tflops)
    assert error(found, truth).iloc[0] < 0.35 and inside(found, truth) == 1
    measured = guessing.model().predict(guessing.setup_row("c", f"1x{kind}", 32))
    assert width(found).iloc[0] > np.log(1.5) > width(measured).iloc[0]
    assert np.isnan(found["nearest_doublings"]).all()


def test_a_guess_changes_no_other_prediction_and_shares_its_error():
    rows = guessing.data().runs.drop(columns="step_s")
    pd.testing.assert_frame_equal(guesses().predict(rows), guessing.model().predict(rows))
    assert "new" not in guessing.model().workloads
    setups = pd.concat([guessing.setup_row("new", f"2x{kind.name}", 16) for kind in guessing.TYPES])
    drawn = np.log(guesses().draw_arrays(guesses().read(setups), count=400, seed=1))
    assert np.corrcoef(drawn).min() > 0.5  # types share the error
    needs = guesses().memory.needs("new", MODES[0], FIRST)
    peaks = [needs.peak_bytes(batch) for batch in (1, 64)]
    assert 1.4e9 < peaks[0] < peaks[1]


def test_a_prediction_does_not_depend_on_what_else_is_asked(gpus):
    model = fitted(gpus[::3])
    columns = ["workload", "cluster", "layout", "batch_per_device"]
    uneven = pd.DataFrame([("large", "4xfast", "4+1+1+1", "8")], columns=columns)
    mixed = pd.DataFrame([("large", "1xfast+1xslow", "4+4", "8")], columns=columns)
    found = model.predict(pd.concat([uneven, mixed], ignore_index=True))
    pd.testing.assert_frame_equal(model.predict(uneven), found[:1], rtol=1e-9)


def test_only_measured_modes_are_offered_and_no_setups_give_no_predictions(gpus):
    sharded = gpus[gpus["layout"] != "1"].assign(precision="bf16", strategy="fsdp", sync_s=1e-3)
    model = fitted(sharded[::3])
    assert {str(mode) for _, mode in model.trained} == {"bf16 fsdp"}
    assert len(model.predict(sharded.iloc[:0])) == 0
    found = model.predict(sharded.assign(accumulation_steps=8))  # each micro-step communicates
    assert (found["exposed_communication_s"] <= found["communication_s"] * (1 + 1e-9)).all()


def test_the_optimizers_part_is_that_of_the_middle_batch_on_two_types_of_a_kind():
    types = pd.DataFrame({"name": ["large", "small"], "device": "t4"})
    rows = types.merge(pd.DataFrame({"batch": [8, 16, 32]}), how="cross").assign(workload="lm")
    rows = rows.assign(instance_type=rows["name"], optimizer_s=4.0)
    rows["forward_s"] = rows["backward_s"] = rows["batch"] / 2
    model = fit(data_of(profiles=rows, instance_types=types), seed=0)
    assert [*model.facts.optimizer_part.values()] == [4 / 16]
