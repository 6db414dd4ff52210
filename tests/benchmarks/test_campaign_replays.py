"""Replays of measured rows, whole: a scene of a warehouse, all policies, dollars and a plot."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from models.campaign.candidates import Costs
from tasks.data_files.public import FACTS, MEASUREMENTS
from tests.benchmarks import campaign as replays
from tests.benchmarks.campaign import (
    OURS,
    Scene,
    compare,
    dollars,
    ends,
    grid,
    of_file,
    plot,
    regrets,
)
from tests.benchmarks.replay import ground_of, start
from tests.installed import USD, measured

SHARED = Path(__file__).parents[3] / "shared" / "data"


@pytest.fixture(scope="module")
def scene() -> Scene:
    data = measured()
    return replays._scene(data, dict.fromkeys(USD, 1), USD, Costs())


@pytest.fixture(scope="module")
def curves(scene: Scene) -> pd.DataFrame:
    return compare(scene, batches=2, least=4, given=True, seeds=2, seed=1, say=lambda text: None)


def test_every_policy_is_played_on_every_workload_and_ends_without_regret_where_it_buys_all(
    curves: pd.DataFrame,
) -> None:
    assert set(curves["workload"]) == {"conv", "lm"}
    last = curves.groupby(["policy", "workload", "seed"]).tail(1)
    others = last[last["policy"] != OURS]
    assert (others["regret"] < 1e-9).all() and others["policy"].nunique() == 10
    assert (curves.groupby(["policy", "workload", "seed"])["usd"].diff().dropna() >= 0).all()
    assert set(last[last["policy"] == OURS]["seed"]) == {0} and set(
        others[others["policy"] == "random"]["seed"]
    ) == {
        0,
        1,
    }


def test_dollars_are_medians_over_seeds_and_add_up(curves: pd.DataFrame) -> None:
    table = dollars(curves, 0.05).set_index("policy")
    assert table["all"].to_numpy() == pytest.approx((table["conv"] + table["lm"]).to_numpy())
    assert (table["least"] <= table["all"]).all() and (table["all"] <= table["most"]).all()
    assert table["all"].is_monotonic_increasing and np.isfinite(table["all"]).all()
    assert table.loc[OURS, "all"] <= table.loc["random", "all"]


def test_the_curves_are_shown_by_dollars_and_drawn(curves: pd.DataFrame, tmp_path: Path) -> None:
    amounts = grid(curves)
    table = regrets(curves, amounts).set_index("policy")
    assert (
        amounts[0] == 0
        and amounts[-1] == curves["usd"].max()
        and len(table.columns) == len(amounts)
    )
    assert table.iloc[:, -1].drop(OURS).to_numpy() == pytest.approx(0.0, abs=1e-6)
    assert set(ends(curves)["workload"]) == {"conv", "lm"}
    plot(curves, tmp_path / "curves.png", title="regret")
    assert (tmp_path / "curves.png").read_bytes()[:4] == b"\x89PNG"


def test_with_nothing_known_one_device_is_paid_for_and_only_that_is_learned(scene: Scene) -> None:
    ground = ground_of(
        scene.data.runs, "lm", usd=scene.usd, devices=scene.devices, batches=1, least=4
    )
    begun, bare = (
        start(
            scene.data, ground, scene.devices, costs=scene.costs, usd=scene.usd, given=given, seed=1
        )
        for given in (True, False)
    )
    assert begun.usd == 0.0 and begun.known
    assert bare.usd > 0.0 and bare.known == ()
    assert np.median(np.diag(bare.covariance)) > np.median(np.diag(begun.covariance))
    lost = scene.data.runs[scene.data.runs["workload"] != "lm"]
    with pytest.raises(ValueError, match="one device"):
        start(
            replace(scene.data, runs=lost),
            ground,
            scene.devices,
            costs=scene.costs,
            usd=scene.usd,
            given=False,
            seed=1,
        )


def test_what_the_held_out_workload_measured_beyond_one_device_is_never_seen(scene: Scene) -> None:
    runs = scene.data.runs
    ground = ground_of(runs, "lm", usd=scene.usd, devices=scene.devices, batches=1, least=4)
    several = (runs["workload"] == "lm") & ~runs["cluster"].str.match(r"^1x[^+]*$")
    other = replace(scene.data, runs=runs.assign(step_s=runs["step_s"].where(~several, 7.0)))
    one, two = (
        start(data, ground, scene.devices, costs=scene.costs, usd=scene.usd, given=True, seed=1)
        for data in (scene.data, other)
    )
    assert (
        several.any()
        and np.array_equal(one.mean, two.mean)
        and np.array_equal(one.covariance, two.covariance)
    )


@pytest.mark.skipif(
    not (SHARED / "ec2_catalogue.csv").exists(), reason="the shared prices are not here"
)
def test_rows_of_ec2_are_priced_by_the_catalogue() -> None:
    found = of_file(MEASUREMENTS, workloads=FACTS, catalogue=SHARED / "ec2_catalogue.csv")
    assert found.usd["g4dn.12xlarge"] == pytest.approx(3.912) and found.costs.minimum_s == 60.0
    assert len(found.data.runs) == 4853 and found.devices["g4dn.12xlarge"] == 4
