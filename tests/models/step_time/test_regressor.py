"""The regression finds what made the data, its draws move together, no bad row breaks it."""

from dataclasses import replace
from itertools import product

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from sklearn.base import clone

from models.domain.data_sheets import data_sheets
from models.domain.numeric import Z_90
from models.domain.workload import Mode
from models.step_time.kernel import COLUMN, LOG_SPREADS, WIDTH, StepCovariance
from models.step_time.learning import learn_spreads
from models.step_time.regressor import StepTimeRegressor
from models.step_time.residuals import ENOUGH, CellSpread, spreads_of
from tests.models.step_time.cases import error, fitted, inside, seconds, sound, width


def several_of(rows):
    """Mask of `middle` on several fast devices."""
    cell = (rows["workload"] == "middle") & rows["cluster"].str.endswith("fast")
    return cell & (rows["layout"] != "1")


@pytest.fixture(scope="module")
def without_middle(gpus):
    """`middle` is known by one fast device."""
    return fitted(gpus[~several_of(gpus)])


def test_a_workload_known_by_one_device_is_predicted_and_pilots_narrow_the_interval(
    gpus, without_middle
):
    held = several_of(gpus)
    pilots = held & (gpus["batch_per_device"] == 16)
    target = gpus[held & ~pilots]
    before = without_middle.predict(target)
    assert error(before, target["step_s"]).mean() < 0.10 and inside(before, target["step_s"]) > 0.8
    after = fitted(gpus[~held | pilots]).predict(target)
    assert width(after).median() < min(0.1, 0.8 * width(before).median())
    assert error(after, target["step_s"]).mean() < 0.06


def test_a_workload_in_one_mode_on_several_machines_tells_of_others(gpus):
    alone_s = [
        seconds(row.workload, row.kind, [1], row.batch_per_device) for row in gpus.itertuples()
    ]
    middle = gpus["workload"] == "middle"
    rows = gpus.assign(
        sync_s=(gpus["step_s"] - alone_s).clip(lower=0),
        strategy=np.where(middle, "zero1", "ddp"),
    )
    model = fitted(rows[~middle | (gpus["layout"] != "1")])
    found = replace(model, trained=model.trained | {("middle", Mode())}).predict(gpus[middle])
    truth = gpus["step_s"][middle]
    assert error(found, truth).mean() < 0.05 and inside(found, truth) > 0.8


def test_it_is_an_estimator_of_scikit_learn_that_keeps_rows_of_every_cell(without_middle):
    setups = without_middle.measured
    rows, step_s = without_middle.facts.lay_out(setups), without_middle.formula_seconds(setups)
    model = clone(StepTimeRegressor(most_rows=60, random_state=2)).fit(rows, step_s)
    kept = rows.take(model._thin(rows, np.random.default_rng(0)))
    assert set(kept.cell) == set(rows.cell)
    assert len(kept) == len(model.posterior_.process.inputs) == 60 + (rows.ranks == 1).sum()
    some = rows.take(np.arange(0, len(rows), 40))
    _, *interval = model.predict(some, return_interval=True)
    drawn = model.sample_y(some, 4000, random_state=1)
    assert np.quantile(drawn, (0.05, 0.95), axis=1) == pytest.approx(np.array(interval), rel=0.02)


def test_intervals_hold_the_noise_of_runs(gpus, without_middle):
    noisy = replace(without_middle, run_sd={0.0: 0.5})
    assert width(noisy.predict(gpus)).min() > 2 * Z_90 * 0.5


@pytest.mark.parametrize("case", ["one row", "contradictory", "not numbers", "alone"])
def test_bad_or_few_rows_give_sound_predictions(gpus, case):
    rows = {
        "one row": gpus.iloc[[0]],
        "contradictory": pd.concat([gpus, gpus.assign(step_s=100 * gpus["step_s"])])[::2],
        "not numbers": gpus.assign(
            step_s=gpus["step_s"].where(gpus.index % 7 > 2, [0, np.inf] * 168)
        ),
        "alone": gpus[gpus["layout"] == "1"],
    }[case]
    target = gpus[gpus["workload"].isin(rows["workload"]) & gpus["kind"].isin(rows["kind"])]
    model = fitted(rows)
    drawn = model.draw_arrays(model.read(target), count=4, seed=0)
    assert sound(model.predict(target)) and np.isfinite(drawn).all()


def test_a_kind_with_few_rows_a_cell_has_spreads_of_its_own(without_middle):
    setups = without_middle.measured
    rows = without_middle.facts.lay_out(setups.take(np.arange(0, len(setups.workload), 3)))
    cells = pd.Series(rows.cell[rows.ranks > 1]).value_counts()
    assert cells.max() < ENOUGH <= cells.sum()
    found = learn_spreads(rows, np.zeros(len(rows)), np.ones(len(rows)), growth=1.0)
    quiet, noisy = sorted(set(rows.kind.tolist()))
    assert set(found) == {quiet, noisy}
    loud = CellSpread(np.ones(3), noisy)
    spreads = spreads_of(found | {noisy: loud}, rows)
    assert (spreads[rows.kind == noisy] == 1).all() and (spreads[rows.kind == quiet] < 0.1).all()


def test_rows_without_gradient_bytes_are_learned_from(gpus):
    found = fitted(gpus[::2], facts=("workload",)).predict(gpus)
    assert error(found, gpus["step_s"]).median() < 0.15


def test_a_kind_is_known_by_its_data_sheet_and_better_by_its_rows():
    sheets = data_sheets().loc[["t4", "v100", "a10g", "a100", "l40s"]].reset_index(names="name")
    types = sheets.assign(device=sheets["name"], device_tflops=sheets["fp32_tflops"], devices=1)
    setups = pd.DataFrame(
        product((0.3, 0.6, 0.5), (8, 16, 32)), columns=["bound", "batch_per_device"]
    )
    runs = types.merge(setups, how="cross")
    memory, rate = runs["bandwidth_gbytes_s"], runs["fp32_tflops"]
    factor = memory ** -runs["bound"] * rate ** (runs["bound"] - 1)
    runs = runs.assign(
        workload=runs["bound"].astype(str),
        cluster="1x" + runs["name"],
        step_s=runs["batch_per_device"] * factor,
    ).drop(columns="devices")
    new = runs["cluster"] == "1xl40s"
    target, widths = runs[new], []
    for known, most in ((~new, 0.15), (~new | (runs["batch_per_device"] == 16), 0.05)):
        found = fitted(runs[known], types=types).predict(target)
        assert np.log(found["step_s"] / target["step_s"]).abs().max() < most
        widths.append(width(found).mean())
    assert widths[1] < 0.7 * widths[0]


def test_pilots_that_surprise_widen_the_intervals_of_their_workload(gpus):
    held = several_of(gpus)
    pilots = held & gpus["batch_per_device"].isin([16, 48])
    factor = np.exp(0.15 * np.random.default_rng(1).choice([-1, 1], len(gpus)))
    odd = gpus.assign(step_s=gpus["step_s"].where(~pilots, gpus["step_s"] * factor))
    target = gpus[held & ~pilots]
    plain, wide = (fitted(rows[~held | pilots]) for rows in (gpus, odd))
    widths = [width(model.predict(target)) for model in (plain, wide)]
    assert (widths[1] > 1.5 * widths[0]).all()
    _, covariance, noise = wide.joint(target)
    together = 2 * Z_90 * np.sqrt(np.diag(covariance) + noise)
    assert together == pytest.approx(widths[1].to_numpy(), rel=0.01)


def test_few_workloads_on_a_kind_widen_the_intervals_of_the_next(gpus, without_middle):
    held = gpus[several_of(gpus)]
    known = gpus[(gpus["layout"] != "1") & ~gpus.index.isin(held.index)]
    workloads = known[known["kind"] == held["kind"].iloc[0]]["workload"].nunique()
    normal = replace(without_middle.posterior, scales={})
    variances = [
        np.diag(model.joint(held)[1])
        for model in (without_middle, replace(without_middle, posterior=normal))
    ]
    factor = (stats.t.ppf(0.95, workloads + 1) / Z_90) ** 2
    assert variances[0] / variances[1] == pytest.approx(np.full(len(held), factor))


def test_only_machines_with_the_same_library_share_deviations_of_exchanges():
    rows = np.zeros((3, WIDTH))
    rows[:, 0], rows[:, COLUMN["library"]] = 1.0, [1, 1, 2]  # slopes in log_scale
    shared = StepCovariance(LOG_SPREADS)(rows)
    assert shared[0, 1] > 0 and shared[0, 2] == 0


def test_doubt_beyond_measured_clusters_is_a_random_walk_with_the_pace_of_the_rows():
    rows = np.zeros((2, WIDTH))
    rows[:, COLUMN["link"]], rows[:, COLUMN["beyond"]], rows[:, COLUMN["pace"]] = 1, [1, 3], 0.1
    assert StepCovariance(LOG_SPREADS)(rows) == pytest.approx(0.01 * np.array([[1, 1], [1, 3]]))
