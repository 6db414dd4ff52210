"""The model against a world whose truth is known, against physics, bad data and workloads never measured."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.step_time import serialization
from models.step_time.model import (
    StepTimeModel,
    TrainingData,
    all_introduced,
    bottlenecks,
    fit,
    introduced,
)
from tests.models import guessing
from tests.models.synthetic import TYPES, WORKLOADS, World

NUMBERS = [
    "step_s",
    "step_low_s",
    "step_high_s",
    "samples_per_s",
    "compute_s",
    "communication_s",
    "exposed_communication_s",
]


@cache
def known() -> tuple[TrainingData, pd.DataFrame, StepTimeModel]:
    world = World(1)
    data = world.data(70)
    return data, world.runs(150, first=1000), fit(data, seed=0)


def setup(
    workload: str = "lm", cluster: str = "2xs.large", batch: str = "8", accumulation: int = 1
) -> pd.DataFrame:
    row = {
        "workload": workload,
        "cluster": cluster,
        "batch_per_device": batch,
        "accumulation_steps": accumulation,
    }
    return pd.DataFrame([row])


def sound(predicted: pd.DataFrame) -> bool:
    values = predicted[NUMBERS].to_numpy(float)
    ordered = (predicted["step_low_s"] < predicted["step_s"]) & (
        predicted["step_s"] < predicted["step_high_s"]
    )
    return bool(
        np.isfinite(values).all()
        and (values >= 0).all()
        and (predicted["step_low_s"] > 0).all()
        and ordered.all()
    )


@pytest.mark.parametrize("seed", [1, 2, 5])
def test_setups_never_seen_are_predicted_far_better_than_by_compute_alone(seed: int) -> None:
    world = World(seed)
    data = world.data(70)
    fresh = world.runs(120, first=1000)
    predicted = fit(data, seed=0).predict(fresh.drop(columns="step_s"))
    error = np.abs(predicted["step_s"] / fresh["step_s"] - 1)
    profiled = fit(replace(data, runs=data.runs.iloc[:0]), seed=0).predict(fresh)
    baseline = np.abs(profiled["compute_s"] / fresh["step_s"] - 1)
    assert np.median(error) < 0.04 and np.mean(error) < 0.05
    assert np.median(error) < 0.3 * np.median(baseline)
    inside = (predicted["step_low_s"] <= fresh["step_s"]) & (
        fresh["step_s"] <= predicted["step_high_s"]
    )
    assert 0.8 <= inside.mean() <= 1.0
    assert (
        np.median((predicted["step_high_s"] - predicted["step_low_s"]) / predicted["step_s"]) < 0.2
    )


def test_mixed_clusters_are_no_worse_than_uniform_ones() -> None:
    _, fresh, model = known()
    error = np.abs(model.predict(fresh)["step_s"] / fresh["step_s"] - 1)
    mixed = fresh["cluster"].str.contains(r"\+")
    assert np.median(error[mixed]) < np.median(error[~mixed]) + 0.02


def test_profiles_and_probes_alone_predict_with_wider_intervals() -> None:
    data, fresh, model = known()
    bare = fit(replace(data, runs=data.runs.iloc[:0]), seed=0)
    predicted, informed = bare.predict(fresh), model.predict(fresh)
    assert np.median(np.abs(predicted["step_s"] / fresh["step_s"] - 1)) < 0.12
    assert sound(predicted)
    width = np.log(predicted["step_high_s"] / predicted["step_low_s"])
    assert (width > np.log(informed["step_high_s"] / informed["step_low_s"])).mean() > 0.95


def test_intervals_are_wider_where_nothing_similar_was_measured() -> None:
    data, _, _ = known()
    runs = data.runs[~((data.runs["workload"] == "mlp") & (data.runs["cluster"] != "1xs.large"))]
    model = fit(replace(data, runs=runs), seed=0)
    measured, unseen = (model.predict(setup(one, "4xs.small", "24")) for one in ("embed", "mlp"))
    far = model.predict(setup("mlp", "4xs.small", "1536"))
    widths = [
        float(np.log(one["step_high_s"] / one["step_low_s"]).iloc[0])
        for one in (measured, unseen, far)
    ]
    assert widths[0] < widths[1] < widths[2]


def test_a_type_on_which_a_workload_was_never_profiled_is_predicted_with_more_doubt() -> None:
    data, _, _ = known()
    world = World(1)
    profiles = world.profiles(leave_out=[("lm", "s.small")])
    runs = data.runs[
        ~((data.runs["workload"] == "lm") & data.runs["cluster"].str.contains("s.small"))
    ]
    asked = setup("lm", "1xs.small", "8")
    filled = fit(replace(data, runs=runs, profiles=profiles), seed=0).predict(asked).iloc[0]
    measured = fit(replace(data, runs=runs), seed=0).predict(asked).iloc[0]
    truth = world.step("lm", ["s.small"], [8])
    assert filled["step_s"] == pytest.approx(truth, rel=0.15)
    assert filled["step_low_s"] < truth < filled["step_high_s"]
    widths = [np.log(one["step_high_s"] / one["step_low_s"]) for one in (filled, measured)]
    assert widths[0] > 1.5 * widths[1]


def test_the_same_data_and_seed_give_the_same_model() -> None:
    data, _, model = known()
    assert serialization.dump(fit(data, seed=0)) == serialization.dump(model)


def test_draws_agree_with_the_intervals_and_errors_of_alike_setups_move_together() -> None:
    _, _, model = known()
    asked = pd.concat(
        [
            setup("mlp", "3xs.medium", "96"),
            setup("mlp", "3xs.medium", "100"),
            setup("conv", "1xs.whole"),
        ]
    )
    drawn = model.draws(asked, count=4000, seed=0)
    predicted = model.predict(asked)
    assert np.median(drawn, axis=1) == pytest.approx(predicted["step_s"].to_numpy(), rel=0.01)
    assert np.quantile(drawn, 0.95, axis=1) == pytest.approx(
        predicted["step_high_s"].to_numpy(), rel=0.02
    )
    together = np.corrcoef(np.log(drawn))
    assert together[0, 1] > 0.3 and together[0, 1] > together[0, 2] + 0.2


def test_what_was_measured_never_reaches_a_prediction() -> None:
    _, fresh, model = known()
    shuffled = fresh.assign(step_s=fresh["step_s"].to_numpy()[::-1], sync_s=1e9)
    pd.testing.assert_frame_equal(model.predict(shuffled), model.predict(fresh))


def test_order_of_machines_means_nothing() -> None:
    _, _, model = known()
    one, two = (
        model.predict(setup(cluster="1xs.large+2xs.small", batch="8+2+2")),
        model.predict(setup(cluster="2xs.small+1xs.large", batch="2+2+8")),
    )
    assert one["step_s"].iloc[0] == pytest.approx(two["step_s"].iloc[0])


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(sorted(WORKLOADS)),
    st.lists(st.sampled_from(sorted(TYPES)), min_size=1, max_size=8),
    st.integers(1, 5000),
    st.integers(1, 8),
)
def test_never_nan_negative_or_crossing_zero_and_more_batch_never_quicker(
    workload: str, types: list[str], batch: int, accumulation: int
) -> None:
    _, _, model = known()
    cluster = "+".join(f"1x{name}" for name in types)
    asked = pd.concat(
        [setup(workload, cluster, str(one), accumulation) for one in (batch, 2 * batch)]
    )
    predicted = model.predict(asked)
    assert sound(predicted)
    assert predicted["step_s"].iloc[1] >= predicted["step_s"].iloc[0] * 0.97


def by_formula(model: StepTimeModel, asked: pd.DataFrame) -> float:
    """Seconds of the one setup by the formula alone."""
    rows, _, _ = model.facts.lay_out(model._read(asked))
    return float(
        model.regression.times(
            rows, rows.workload[0], rows.kind[0], np.zeros_like(rows.line.alone_s)
        ).step_s[0]
    )


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(sorted(WORKLOADS)),
    st.lists(st.sampled_from(sorted(TYPES)), min_size=2, max_size=5),
    st.floats(1.0, 50.0),
)
def test_more_bandwidth_never_slows_the_physical_step(
    workload: str, types: list[str], more: float
) -> None:
    _, _, model = known()
    wider = {
        name: replace(one, bandwidth_gbps=one.bandwidth_gbps * more)
        for name, one in model.machines.items()
    }
    asked = setup(workload, "+".join(f"1x{name}" for name in types), "24")
    before, after = (
        by_formula(replace(model, facts=replace(model.facts, machines=one)), asked)
        for one in (model.machines, wider)
    )
    assert after <= before * (1 + 1e-9)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(sorted(WORKLOADS)), st.sampled_from(sorted(TYPES)), st.integers(1, 15))
def test_another_machine_of_the_kind_never_quickens_the_physical_step(
    workload: str, name: str, count: int
) -> None:
    _, _, model = known()
    steps = [by_formula(model, setup(workload, f"{n}x{name}", "24")) for n in (count, count + 1)]
    assert steps[1] >= steps[0] * (1 - 1e-9)


def test_says_what_limits_a_step() -> None:
    data, _, model = known()
    assert model.predict(setup("lm", "1xs.small", "24"))["bottleneck"].iloc[0] == "compute"
    assert (
        model.predict(setup("mlp", "2xs.medium", "24"))["bottleneck"].iloc[0]
        == "communication between nodes"
    )
    uneven = model.predict(setup("lm", "1xs.whole+1xs.small", "24"))
    assert uneven["bottleneck"].iloc[0] == "stragglers"
    slow = data.profiles.assign(
        input_s=0.9 * (data.profiles["forward_s"] + data.profiles["backward_s"])
    )
    starved = serialization.load(serialization.dump(fit(replace(data, profiles=slow), seed=0)))
    assert starved.predict(setup("lm", "1xs.small", "24"))["bottleneck"].iloc[0] == "input"


def test_accumulating_twice_costs_nearly_two_steps_of_compute_but_one_of_communication() -> None:
    _, _, model = known()
    once, twice = (model.predict(setup("lm", "2xs.small", "4", n)).iloc[0] for n in (1, 2))
    assert 1.2 * once["step_s"] < twice["step_s"] < 2 * once["step_s"]
    assert twice["samples_per_s"] > once["samples_per_s"]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (setup("lmm"), "unknown workload 'lmm'.*lm"),
        (setup(cluster="2xs.larg"), "unknown instance type 's.larg'.*s.large"),
        (
            setup().assign(strategy="fsdp"),
            "workload 'lm' was never measured in fp32 fsdp; known in: fp32",
        ),
        (setup().assign(strategy="gossip"), "unknown strategy 'gossip'; known: ddp, fsdp, zero2"),
        (
            setup().assign(precision="bf16"),
            "workload 'lm' was never measured in bf16; known in: fp32",
        ),
        (setup().assign(precision="fp8"), "unknown precision 'fp8'; known: fp32, tf32"),
        (setup().assign(provider="ec2"), "provider 'ec2'"),
        (setup(batch="8+x"), "batch_per_device"),
        (setup().drop(columns="cluster"), "lack the column 'cluster'"),
        (setup(accumulation=0), "accumulation_steps"),
    ],
)
def test_what_cannot_be_predicted_is_refused_by_name(asked: pd.DataFrame, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        known()[2].predict(asked)


def test_bad_rows_and_outliers_do_not_ruin_the_fit() -> None:
    data, fresh, model = known()
    runs = data.runs.copy()
    runs.loc[[3, 30], "step_s"] *= 10
    runs.loc[5, "step_s"], runs.loc[6, "step_s"], runs.loc[7, "step_s"] = 0.0, -1.0, np.nan
    predicted = fit(replace(data, runs=runs), seed=0).predict(fresh)
    assert sound(predicted)
    assert np.median(np.abs(predicted["step_s"] / fresh["step_s"] - 1)) < 0.05
    clean = model.predict(fresh)
    moved = np.abs(np.log(predicted["step_s"] / clean["step_s"]))
    assert np.quantile(moved, 0.9) < 0.03


@pytest.mark.parametrize("count", [0, 1, 2, 5, 12])
def test_few_runs_are_enough_to_be_sound(count: int) -> None:
    data, fresh, _ = known()
    predicted = fit(replace(data, runs=data.runs.iloc[:count]), seed=0).predict(fresh)
    assert sound(predicted)
    assert np.median(np.abs(predicted["step_s"] / fresh["step_s"] - 1)) < 0.12


def test_rows_of_the_import_format_alone_are_enough() -> None:
    data, fresh, _ = known()
    none = pd.DataFrame()
    bare = TrainingData(
        runs=data.runs,
        profiles=none,
        buckets=none,
        probes=none,
        workloads=none,
        instance_types=data.instance_types,
    )
    predicted = fit(bare, seed=0).predict(fresh)
    assert sound(predicted)
    assert np.median(np.abs(predicted["step_s"] / fresh["step_s"] - 1)) < 0.15


def test_nothing_at_all_is_refused_and_providers_are_not_pooled() -> None:
    data, _, _ = known()
    none = pd.DataFrame()
    with pytest.raises(ValueError, match="nothing to learn from"):
        fit(
            TrainingData(
                runs=none,
                profiles=none,
                buckets=none,
                probes=none,
                workloads=none,
                instance_types=none,
            ),
            seed=0,
        )
    mixed = data.runs.assign(provider=["ec2", *["local"] * (len(data.runs) - 1)])
    with pytest.raises(ValueError, match="several providers"):
        fit(replace(data, runs=mixed), seed=0)


def test_compute_line_and_memory_serve_the_planner() -> None:
    _, _, model = known()
    intercept, slope = model.compute_line("lm", "s.small")
    world = World(1)
    forward, backward, _ = world.device("lm", "s.small", 12)
    assert intercept + 12 * slope == pytest.approx(forward + backward, rel=0.06)
    assert model.peak_bytes("lm", "s.small", 24) == pytest.approx(
        1.075 * (2e8 + 1.5e7 + 2.4e7 + 5e6), rel=3e-3
    )


@dataclass
class Part:
    """A step of one second: what of it is compute, on average over the ranks too."""

    compute_s: float
    mean_compute_s: float


def limit(part: Part, machines: int = 2, input_part: float = 0.0) -> str:
    exposed, uneven, making, many = (
        np.array([one])
        for one in (1 - part.compute_s, part.compute_s - part.mean_compute_s, input_part, machines)
    )
    (found,) = bottlenecks(exposed, uneven, input_part=making, machines=many)
    return found


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        (Part(0.81, 0.81), "compute"),
        (Part(0.79, 0.79), "communication between nodes"),
        (Part(1.0, 0.81), "compute"),
        (Part(1.0, 0.79), "stragglers"),
        (Part(0.75, 0.45), "stragglers"),  # both: the larger
        (Part(0.65, 0.40), "communication between nodes"),
    ],
)
def test_a_fifth_of_the_step_is_what_it_takes_to_limit_it(part: Part, expected: str) -> None:
    assert limit(part) == expected


def test_inside_one_machine_and_making_batches_have_names_of_their_own() -> None:
    assert limit(Part(0.7, 0.7), machines=1) == "communication inside a node"
    assert limit(Part(0.9, 0.9), input_part=0.6) == "input"
    assert limit(Part(0.9, 0.9), input_part=0.4) == "compute"
    assert limit(Part(0.7, 0.7), input_part=0.6) == "communication between nodes"


@pytest.mark.parametrize("kind", [one.name for one in guessing.TYPES])
def test_the_guess_is_near_where_networks_behave_and_its_interval_says_how_little_is_known(
    kind: str,
) -> None:
    guesses = introduced(guessing.model(), guessing.NEW)
    assert guesses is not None
    (found,) = guesses.predict(guessing.asked("new", f"1x{kind}", 32)).to_dict("records")
    tflops = next(float(one.device_tflops or 0) for one in guessing.TYPES if one.name == kind)
    true_s = guessing.seconds(1.5e10, 32, tflops)
    assert found["step_s"] == pytest.approx(true_s, rel=0.35)
    assert found["step_low_s"] < true_s < found["step_high_s"]
    (known,) = guessing.model().predict(guessing.asked("c", f"1x{kind}", 32)).to_dict("records")
    assert (
        found["step_high_s"] / found["step_low_s"]
        > 1.5
        > known["step_high_s"] / known["step_low_s"]
    )
    assert np.isnan(found["nearest_doublings"])


def test_what_it_is_off_by_is_shared_by_the_types() -> None:
    guesses = introduced(guessing.model(), guessing.NEW)
    assert guesses is not None
    rows = pd.concat([guessing.asked("new", f"1x{one.name}", 32) for one in guessing.TYPES])
    drawn = np.log(guesses.draws(rows, count=400, seed=1))
    assert np.corrcoef(drawn).min() > 0.5


def test_nothing_that_was_known_changes() -> None:
    guesses = introduced(guessing.model(), guessing.NEW)
    assert guesses is not None
    rows = guessing.data().runs.drop(columns="step_s")
    pd.testing.assert_frame_equal(guesses.predict(rows), guessing.model().predict(rows))
    assert "new" not in guessing.model().workloads, "the model itself was changed"
    with pytest.raises(ValueError, match="new"):
        guessing.model().predict(guessing.asked("new", f"1x{guessing.TYPES[0].name}", 32))


def test_facts_without_flops_and_workloads_that_were_measured_are_not_guessed_at() -> None:
    assert introduced(guessing.model(), replace(guessing.NEW, flops_per_sample=None)) is None
    assert introduced(guessing.model(), replace(guessing.NEW, name="a")) is None, (
        "perhaps as another definition, but measured"
    )


def test_the_guess_is_stored_with_the_model_exactly() -> None:
    back = serialization.load(serialization.dump(guessing.model()))
    guesses, again = introduced(guessing.model(), guessing.NEW), introduced(back, guessing.NEW)
    assert guesses is not None and again is not None
    rows = pd.concat([guessing.asked("new", f"2x{one.name}", 16) for one in guessing.TYPES])
    pd.testing.assert_frame_equal(guesses.predict(rows), again.predict(rows))


def test_without_a_peak_rate_there_is_no_guess() -> None:
    types = guessing.data().instance_types.assign(device_tflops=None)
    without_rates = fit(replace(guessing.data(), instance_types=types), seed=1)
    guesses = introduced(without_rates, guessing.NEW)
    assert guesses is not None and not guesses.can_guess(guessing.TYPES[0].name)
    with pytest.raises(ValueError, match="never measured"):
        guesses.predict(guessing.asked("new", f"1x{guessing.TYPES[0].name}", 32))


def test_memory_is_bounded_by_the_facts() -> None:
    guesses = introduced(guessing.model(), guessing.NEW)
    assert guesses is not None
    assert (
        1.4e9
        < guesses.peak_bytes("new", guessing.TYPES[0].name, 1)
        < guesses.peak_bytes("new", guessing.TYPES[0].name, 64)
    )


def test_several_are_introduced_at_once_each_as_if_alone_and_none_that_was_measured() -> None:
    flops, sizes = {"new": 1.5e10, "other": 4e10, "a": 1.0}, {"new": 2e8, "a": 1.0}
    both = all_introduced(guessing.model(), flops, sizes)
    assert both.workloads == tuple(sorted({*guessing.model().workloads, "new", "other"}))
    alone = introduced(guessing.model(), guessing.NEW)
    assert alone is not None
    rows = pd.concat([guessing.asked("new", f"2x{one.name}", 16) for one in guessing.TYPES])
    pd.testing.assert_frame_equal(both.predict(rows), alone.predict(rows))
    assert both.peak_bytes("new", guessing.TYPES[0].name, 8) == alone.peak_bytes(
        "new", guessing.TYPES[0].name, 8
    )
    heavier = [
        float(
            both.predict(guessing.asked(name, f"1x{guessing.TYPES[0].name}", 32))["step_s"].iloc[0]
        )
        for name in ("new", "other")
    ]
    assert heavier[1] > 1.5 * heavier[0]
    measured = guessing.asked("a", f"1x{guessing.TYPES[0].name}", 8)
    pd.testing.assert_frame_equal(both.predict(measured), guessing.model().predict(measured))
    in_turn = introduced(alone, replace(guessing.NEW, name="other", flops_per_sample=4e10))
    assert in_turn is not None and in_turn.workloads == both.workloads
