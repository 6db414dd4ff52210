"""The step-time regressor: it recovers what made the data, its draws move together, and no bad row breaks it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from models.domain.numeric import Z_90
from models.step_time.dataset import TrainingData
from models.step_time.formula import MEAN, NAMES, Line, compute_seconds, moved_step_s, step_times
from models.step_time.levels import kernel
from models.step_time.model import StepTimeModel, fit
from models.step_time.one_device import OneDevice

TYPES = pd.DataFrame(
    [
        {
            "name": "fast",
            "devices": 4,
            "device": "a",
            "cores": 32.0,
            "bandwidth_gbps": 50.0,
            "device_tflops": 10.0,
        },
        {
            "name": "slow",
            "devices": 4,
            "device": "b",
            "cores": 32.0,
            "bandwidth_gbps": 50.0,
            "device_tflops": 5.0,
        },
    ]
)
GRADIENTS = {"small": 2e7, "middle": 1e8, "large": 4e8}
SPEED = {"fast": 1.0, "slow": 0.5}


def seconds(
    workload: str, kind: str, layout: list[int], batch: float, *, link: float = 2.0
) -> float:
    """A plain truth: half of compute hides an exchange that grows with the bytes and a little with the machines."""
    alone = (0.02 + 0.004 * batch * (GRADIENTS[workload] / 1e8) ** 0.3) / SPEED[kind]
    ranks, machines = sum(layout), len(layout)
    if ranks == 1:
        return float(alone)
    gbps = 50 / link if machines > 1 else 80.0
    exchange = 2.0 * (ranks - 1) / ranks * GRADIENTS[workload] * 8e-9 / gbps * machines**0.1
    return float(alone - 0.5 * alone + ((0.5 * alone) ** 3 + exchange**3) ** (1 / 3))


def runs(
    workloads: list[str], kinds: list[str], *, noise: float = 0.02, seed: int = 0
) -> pd.DataFrame:
    """Every layout of up to four machines at seven batches."""
    random = np.random.default_rng(seed)
    rows = []
    for workload in workloads:
        for kind in kinds:
            for layout in ([1], [2], [4], [1, 1], [2, 2], [4, 4], [1, 1, 1, 1], [4, 4, 4, 4]):
                for batch in (8, 12, 16, 24, 32, 48, 64):
                    step = seconds(workload, kind, layout, batch) * np.exp(
                        noise * random.standard_normal()
                    )
                    rows.append(
                        {
                            "workload": workload,
                            "cluster": f"{len(layout)}x{kind}",
                            "layout": "+".join(map(str, layout)),
                            "batch_per_device": str(batch),
                            "step_s": step,
                            "provider": "ec2",
                        }
                    )
    return pd.DataFrame(rows)


def fitted(rows: pd.DataFrame) -> StepTimeModel:
    """The model on these runs."""
    none = pd.DataFrame()
    facts = pd.DataFrame(
        [{"workload": name, "gradient_bytes": size} for name, size in GRADIENTS.items()]
    )
    data = TrainingData(
        runs=rows, profiles=none, buckets=none, probes=none, workloads=facts, instance_types=TYPES
    )
    return fit(data, seed=0)


@pytest.fixture(scope="module")
def everything() -> pd.DataFrame:
    return runs(["small", "middle", "large"], ["fast", "slow"])


def asked(rows: pd.DataFrame) -> pd.DataFrame:
    return rows.drop(columns="step_s")


def test_a_workload_known_by_one_device_is_predicted_from_the_others(
    everything: pd.DataFrame,
) -> None:
    held = (everything["workload"] == "middle") & (everything["cluster"].str.endswith("fast"))
    held &= everything["layout"] != "1"
    model = fitted(everything[~held])
    predicted = model.predict(asked(everything[held]))
    error = np.abs(predicted["step_s"] / everything.loc[held, "step_s"] - 1)
    assert error.mean() < 0.10
    truth = everything.loc[held, "step_s"]
    assert ((predicted["step_low_s"] <= truth) & (truth <= predicted["step_high_s"])).mean() > 0.8


def test_rows_of_its_own_narrow_the_interval_and_the_error(everything: pd.DataFrame) -> None:
    held = (everything["workload"] == "middle") & (everything["cluster"].str.endswith("fast"))
    pilots = held & everything["batch_per_device"].eq("16")
    before = fitted(everything[~held | (everything["layout"] == "1")]).predict(
        asked(everything[held & ~pilots])
    )
    after = fitted(everything[~held | (everything["layout"] == "1") | pilots]).predict(
        asked(everything[held & ~pilots])
    )
    width = [
        float(np.median(np.log(one["step_high_s"] / one["step_low_s"]))) for one in (before, after)
    ]
    assert width[1] < 0.7 * width[0]
    assert np.abs(after["step_s"] / everything.loc[held & ~pilots, "step_s"] - 1).mean() < 0.06


def test_what_a_strategy_sends_on_one_kind_is_known_of_another_kind(
    everything: pd.DataFrame,
) -> None:
    sharded = everything[everything["workload"] != "large"].assign(strategy="fsdp")
    for at, row in sharded.iterrows():
        layout, (_, kind) = (
            [int(one) for one in row["layout"].split("+")],
            row["cluster"].split("x"),
        )
        sharded.loc[at, "step_s"] = seconds(
            row["workload"], kind, layout, float(row["batch_per_device"]), link=9.0
        )
    several = sharded[sharded["layout"].str.contains("+", regex=False)]
    asked_of = several["cluster"].str.endswith("slow")
    model = fitted(
        pd.concat([everything.assign(strategy="ddp"), several[~asked_of]], ignore_index=True)
    )
    longer = several["step_s"] / everything.loc[several.index, "step_s"]
    held = several[asked_of & (longer > 1.5)]
    assert len(held) > 12
    predicted = model.predict(asked(held))["step_s"]
    assert np.median(np.abs(predicted / held["step_s"].to_numpy() - 1)) < 0.10


def test_draws_have_the_joint_covariance_and_do_not_depend_on_what_else_is_asked(
    everything: pd.DataFrame,
) -> None:
    model = fitted(everything[(everything["workload"] != "large") | (everything["layout"] == "1")])
    setups = asked(
        everything[(everything["workload"] == "large") & (everything["layout"] != "1")]
    ).iloc[::4]
    drawn = np.log(model.draws(setups, count=2000, seed=3))
    mean, covariance, noise = model.joint(setups)
    assert np.allclose(drawn.mean(axis=1), mean, atol=1e-9)  # they come in pairs
    alike = covariance / np.multiply.outer(
        np.sqrt(np.diag(covariance)), np.sqrt(np.diag(covariance))
    )
    kind = setups["cluster"].str[2:].to_numpy()
    pairs = np.triu(kind[:, None] == kind, 1)
    assert (
        pairs.sum() > 20 and alike[pairs].mean() > 0.3
    )  # an unmeasured workload errs together on a kind
    covariance = covariance + np.diag(noise)  # a draw is of one new measurement, as an interval is
    spread = np.sqrt(np.diag(covariance))
    assert np.allclose(drawn.std(axis=1) / spread, 1, atol=0.15)
    stated = covariance / np.multiply.outer(spread, spread)
    assert (
        np.abs(np.corrcoef(drawn) - stated).mean() < 0.07
    )  # 128 random waves stand in for the process
    assert np.allclose(np.exp(drawn[2:4]), model.draws(setups.iloc[2:4], count=2000, seed=3))
    assert (noise > 0).all()


def test_intervals_hold_what_leaving_cells_out_and_repeated_runs_say(
    everything: pd.DataFrame,
) -> None:
    held = (
        (everything["workload"] == "middle")
        & everything["cluster"].str.endswith("fast")
        & (everything["layout"] != "1")
    )
    model = fitted(everything[~held])

    def widths() -> tuple[float, float]:
        """In logs, of the cell left out and of one that was measured."""
        left, had = (
            model.predict(asked(everything[rows]))
            for rows in (held, everything["workload"] == "small")
        )
        return tuple(
            float(np.median(np.log(one["step_high_s"] / one["step_low_s"]))) for one in (left, had)
        )

    begun = widths()
    for kind in model.regression.widened:
        model.regression.widened[kind] *= 3
    doubted = widths()
    assert doubted[0] > 1.5 * begun[0] and doubted[1] == begun[1]
    model = replace(model, measured=replace(model.measured, run_sd=0.5))
    assert min(widths()) > 2 * Z_90 * 0.5


def test_placements_of_one_cluster_count_as_one_neighbour_and_say_what_they_say_apart(
    everything: pd.DataFrame,
) -> None:
    random = np.random.default_rng(1)
    placed = everything[everything["layout"] == "4+4"]
    orders = [placed.assign(layout=one, step_s=placed["step_s"] * np.exp(0.05 * random.standard_normal(len(placed))))
              for one in ("4+2+1", "1+2+4", "2+4+1")]  # fmt: skip
    orders = [one.assign(cluster="3x" + one["cluster"].str[2:]) for one in orders]
    model = fitted(pd.concat([everything, *orders], ignore_index=True))
    fit = model.regression
    for block in fit.blocks:
        known, spread = fit.neighbours(block), fit.residual[block.name]
        assert len(known.features) < len(known.place) == len(block.at)
        elsewhere = known.features + 0.3
        apart = kernel(fit.rows.features[block.at], elsewhere, spread)
        white = np.linalg.solve(block.factor, apart)
        sides = np.linalg.solve(block.factor, np.column_stack([block.slopes, block.off]))
        pooled = np.linalg.solve(known.factor, kernel(known.features, elsewhere, spread))
        assert np.allclose(pooled.T @ known.solved, white.T @ sides, rtol=1e-9, atol=1e-11)
        assert np.allclose(pooled.T @ pooled, white.T @ white, rtol=1e-9, atol=1e-13)
        drawn = random.standard_normal((len(block.at), 3))
        assert np.allclose(
            pooled.T @ known.whitened(drawn),
            white.T @ np.linalg.solve(block.factor, drawn),
            atol=1e-9,
        )


def test_no_prediction_undercuts_the_least_seconds(everything: pd.DataFrame) -> None:
    """Neighbours that were measured much quicker than the formula has them pull predictions below it, not the bound."""
    rows = everything.assign(
        step_s=everything["step_s"].where(everything["layout"] != "4+4", 0.6 * everything["step_s"])
    )
    model = fitted(rows)
    arrays = model._read(asked(rows))
    assert (model.predict_arrays(arrays)["step_s"].to_numpy() >= model.least_seconds(arrays)).all()


def test_an_outlier_of_ten_moves_little(everything: pd.DataFrame) -> None:
    wild = everything.copy()
    at = wild.index[(wild["layout"] == "4+4")][5]
    wild.loc[at, "step_s"] *= 10
    other = asked(everything.drop(index=at))
    ratio = fitted(wild).predict(other)["step_s"] / fitted(everything).predict(other)["step_s"]
    assert np.abs(np.log(ratio)).max() < 0.1


@pytest.mark.parametrize(
    "case", ["one row", "one batch", "contradictory", "not numbers", "one device only"]
)
def test_bad_or_few_rows_give_finite_positive_seconds(everything: pd.DataFrame, case: str) -> None:
    rows = everything.copy()
    if case == "one row":
        rows = rows.iloc[[0]]
    elif case == "one batch":
        rows = rows[rows["batch_per_device"] == "16"]
    elif case == "contradictory":
        rows = pd.concat([rows, rows.assign(step_s=100 * rows["step_s"]), rows.assign(step_s=1e-6)])
    elif case == "not numbers":
        rows.loc[rows.index[::7], "step_s"] = 0.0
        rows.loc[rows.index[::11], "step_s"] = np.nan
        rows.loc[rows.index[::13], "step_s"] = np.inf
    else:
        rows = rows[rows["layout"] == "1"]
    model = fitted(rows)
    known = everything[everything["workload"].isin(set(rows["workload"]))]
    known = known[known["cluster"].str.endswith("fast") | (case != "one row")]
    predicted = model.predict(asked(known))[["step_s", "step_low_s", "step_high_s"]].to_numpy(float)
    assert np.isfinite(predicted).all()
    assert (predicted > 0).all()
    assert (predicted[:, 1] < predicted[:, 0]).all()
    assert (predicted[:, 0] < predicted[:, 2]).all()
    assert np.isfinite(model.draws(asked(known), count=4, seed=0)).all()


def test_each_parameter_moves_the_step_by_what_the_equation_says() -> None:
    """Also where only a part of the equation is evaluated anew."""
    random, rows, by = np.random.default_rng(1), 40, 0.01
    numbers = {name: random.uniform(1.0, 4.0, rows) for name in Line.__slots__}
    tall = {
        name: random.uniform(0.5, 2.0, (rows, 2))
        for name in ("alone_s", "middle_s", "optimizer_s", "count")
    }
    sizes = {
        "gradient_bytes": 1e8 * numbers["gradient_bytes"],
        "devices": random.integers(2, 5, (rows, 2)) * 1.0,
    }
    sizes["machines"] = random.integers(2, 5, rows) * 1.0  # two of them are another algorithm
    line = Line(**numbers | tall | sizes)
    values = MEAN + random.normal(0, 0.5, (rows, len(NAMES)))
    found = moved_step_s(line, values, by=by)
    for at in range(len(NAMES)):
        moved = values.copy()
        moved[:, at] += by
        assert np.array_equal(found[:, at], step_times(line, moved).step_s), NAMES[at]
        assert not np.array_equal(found[:, at], step_times(line, values).step_s), NAMES[at]


def test_each_device_of_a_machine_slows_the_others_more_than_the_one_before() -> None:
    """Whatever was learned: what they share is free until it runs short."""
    devices = np.arange(1.0, 9.0)
    same = np.ones((8, 1))
    line = Line(
        **dict.fromkeys(Line.__slots__, np.ones(8))
        | {"alone_s": same, "middle_s": same, "devices": devices[:, None]}
    )
    for learned in np.random.default_rng(0).normal(0, 3, (50, len(NAMES))):
        value = dict(zip(NAMES, np.repeat(learned[:, None], 8, axis=1), strict=True))
        more = np.diff(compute_seconds(line, value)[:, 0])
        assert more.min() > 0 and (np.diff(more) >= -1e-9 * more[1:]).all()


def test_nothing_to_learn_from_is_said() -> None:
    with pytest.raises(ValueError, match="nothing to learn"):
        fitted(runs(["small"], ["fast"]).assign(step_s=np.nan))


def test_a_kind_by_its_data_sheet_and_then_by_its_rows() -> None:
    rates = {
        "a": (400.0, 10.0),
        "b": (800.0, 20.0),
        "c": (1600.0, 40.0),
        "d": (600.0, 30.0),
        "new": (900.0, 60.0),
    }
    names, kinds, batches, logs = [], [], [], []
    for workload, bound in (("w1", 0.3), ("w2", 0.6), ("w3", 0.5)):
        for kind, (bandwidth, rate) in rates.items():
            for batch in (8.0, 16.0, 32.0):
                names.append(workload)
                kinds.append(kind)
                batches.append(batch)
                logs.append(np.log(batch) - bound * np.log(bandwidth) - (1 - bound) * np.log(rate))
    known = np.array(kinds) != "new"

    def fitted_to(mask: np.ndarray) -> OneDevice:
        points = pd.DataFrame(
            {"workload": names, "kind": kinds, "batch": batches, "log_s": logs, "sd": 0.01}
        )
        return OneDevice.fit(
            points[mask], sheets={name: (*one, 1.0) for name, one in rates.items()}
        )

    truth = np.array(logs)[~known]
    model = fitted_to(known)
    points = model.at(
        ["w1"] * 3 + ["w2"] * 3 + ["w3"] * 3, ["new"] * 9, np.array([8.0, 16.0, 32.0] * 3)
    )
    assert np.abs(model.predict(points) - truth).max() < 0.15
    before = model.covariance(points, points)
    own = fitted_to(known | (np.array(batches) == 16))
    points = own.at(
        ["w1"] * 3 + ["w2"] * 3 + ["w3"] * 3, ["new"] * 9, np.array([8.0, 16.0, 32.0] * 3)
    )
    assert np.abs(own.predict(points) - truth).max() < 0.05
    assert np.diag(own.covariance(points, points)).mean() < 0.5 * np.diag(before).mean()


def test_every_parameter_has_a_prior() -> None:
    assert len(NAMES) == len(MEAN) == len(set(NAMES))


def test_hundreds_of_batches_are_not_hundreds_of_parameters() -> None:
    random = np.random.default_rng(5)
    rows = [
        {
            "workload": "middle",
            "cluster": f"{machines}xfast",
            "layout": layout,
            "batch_per_device": str(batch),
        }
        | {
            "step_s": seconds("middle", "fast", [int(one) for one in layout.split("+")], batch)
            * peculiar
        }
        for batch in range(1, 301)
        for peculiar in [
            float(np.exp(0.06 * random.standard_normal()))
        ]  # to the batch, on one device and on several
        for machines, layout in ((1, "1"), (2, "4+4"))
    ]
    regression = fitted(pd.DataFrame(rows).assign(provider="ec2")).regression
    mean, factor = regression.alone["middle"]
    assert len(mean) == 300 and factor.shape[1] == 100
