"""The closed form of Pollux, fitted to each workload by itself: what a careful reader of the papers would build.

    T_grad = a + k b        T_sync = 0 (one device), a_l + b_l (n - 2) (one machine), a_n + b_n (n - 2) (several)
    T_step = (s - 1) T_grad + (T_grad^g + T_sync^g)^(1/g),  g in [1, 10]

b samples per device, n devices, s accumulation steps (Qiao et al., OSDI 2021). A term that a workload's rows cannot
identify is the median over the other workloads, per byte of gradient where bytes are known; it is never fitted.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
from scipy.optimize import least_squares
from sklearn.ensemble import HistGradientBoostingRegressor

from models.domain.cluster import parse_cluster, parse_numbers
from models.domain.numeric import BoolArray, FloatArray
from models.domain.setup_table import column, rows_of
from models.step_time.dataset import TrainingData
from models.step_time.model import fit
from models.step_time.setup_arrays import SetupArrays, read_setups

# The terms in the order of every array of them.
A, K, A_LOCAL, B_LOCAL, A_NET, B_NET, G = range(7)
_LEAST_G, _MOST_G = 1.0, 10.0
# Gammas to start from: little overlap and much. The better fit is kept.
_STARTS = (1.5, 4.0)
_SHOWS = (
    1.1  # times the seconds of one device, from which on a step shows how long its collectives take
)
# Least seconds of a step that a fit may pass through, so that its logarithm exists.
_LEAST_S = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    """Numbers of setups, each (rows,)."""

    batch: FloatArray
    devices: FloatArray
    machines: FloatArray
    accumulation: FloatArray

    @classmethod
    def of(cls, setups: SetupArrays) -> _Rows:
        """The slowest device is taken to be the one with the largest batch."""
        return cls(
            batch=setups.batch.max(axis=1, initial=0.0),
            devices=setups.ranks,
            machines=setups.instances,
            accumulation=setups.accumulation,
        )

    def take(self, picked: BoolArray) -> _Rows:
        return _Rows(
            batch=self.batch[picked],
            devices=self.devices[picked],
            machines=self.machines[picked],
            accumulation=self.accumulation[picked],
        )


def step_seconds(
    terms: FloatArray,
    *,
    batch: FloatArray,
    devices: FloatArray,
    machines: FloatArray,
    accumulation: FloatArray,
) -> FloatArray:
    """(rows,) seconds by the equation above; `terms` are a, k, a_l, b_l, a_n, b_n in seconds, and g."""
    grad = terms[A] + terms[K] * batch
    local = terms[A_LOCAL] + terms[B_LOCAL] * (devices - 2)
    net = terms[A_NET] + terms[B_NET] * (devices - 2)
    sync = np.select([devices <= 1, machines <= 1], [np.zeros_like(local), local], net)
    most = np.maximum(np.maximum(grad, sync), _LEAST_S)
    # divided by the larger: neither power overflows
    joined = most * ((grad / most) ** terms[G] + (sync / most) ** terms[G]) ** (1 / terms[G])
    return np.asarray((accumulation - 1) * grad + joined, dtype=float)


def predict_textbook(
    known: pd.DataFrame, asked: pd.DataFrame, devices: dict[str, int]
) -> FloatArray:
    """(asked,) step seconds; measurement columns, `known` with step_s, both with gradient_bytes where it is known.

    `devices` by instance type stands in for an empty layout. What was measured in `asked` is not looked at. NaN where
    neither the workload nor any other was measured. Raises ValueError on text that is not of the contract's form.
    """
    learned, wanted = read_setups(known, devices), read_setups(asked, devices)
    terms = fit_terms(
        learned, known["step_s"].to_numpy(float), gradient_bytes(known, asked), wanted.workloads
    )
    rows, names = _Rows.of(wanted), np.array(wanted.workloads, dtype=object)
    found = np.full(len(asked), np.nan)
    for name, values in terms.items():
        picked = names == name
        found[picked] = _seconds(values, rows.take(picked))
    return found


def gradient_bytes(*frames: pd.DataFrame) -> dict[str, float]:
    """Positive gradient_bytes by workload; those of whom nobody knows them are left out."""
    found: dict[str, float] = {}
    for frame in frames:
        if "gradient_bytes" in frame:
            values = pd.to_numeric(frame["gradient_bytes"], errors="coerce").to_numpy(float)
            good = np.flatnonzero(np.isfinite(values) & (values > 0))
            found |= {str(frame["workload"].iloc[at]): float(values[at]) for at in good}
    return found


def fit_terms(
    setups: SetupArrays, step_s: FloatArray, sizes: dict[str, float], wanted: Iterable[str]
) -> dict[str, FloatArray]:
    """The seven terms of every workload measured or wanted; none at all where nothing was measured.

    `sizes` are bytes of gradient by workload. The fit minimises squares of the error of log seconds.
    """
    names, rows = np.array(setups.workloads, dtype=object), _Rows.of(setups)
    good = np.isfinite(step_s) & (step_s > 0)
    own = {name: good & (names == name) for name in sorted(set(setups.workloads) | set(wanted))}
    free = {name: _identified(rows.take(picked)) for name, picked in own.items()}
    if not good.any():
        return {}
    # First each workload by itself; then, those that lack a term again, with what the others know.
    alone = {
        name: _fit(rows.take(picked), step_s[picked], free[name], np.full(7, np.nan))
        for name, picked in own.items()
        if picked.any()
    }
    found = {}
    for name, picked in own.items():
        if free[name].all():
            found[name] = alone[name]
            continue
        others = [
            (sizes.get(one, 0.0), np.where(free[one], alone[one], np.nan))
            for one in alone
            if one != name
        ]
        found[name] = _fit(
            rows.take(picked), step_s[picked], free[name], _typical(others, sizes.get(name, 0.0))
        )
    return found


def _identified(rows: _Rows) -> BoolArray:
    """(terms,) which of them these rows can tell.

    A line over devices needs three counts of them: two differ by their layout as much as by their number. The overlap
    needs two batches that synchronise.
    """
    several = rows.devices > 1
    local, net = several & (rows.machines <= 1), rows.machines > 1
    found = np.zeros(7, dtype=bool)
    found[K] = len(rows.batch) > 0
    found[A] = len(set(rows.batch)) > 1
    for level, slope, picked in ((A_LOCAL, B_LOCAL, local), (A_NET, B_NET, net)):
        found[level] = picked.any()
        found[slope] = len(set(rows.devices[picked])) > 2
    found[G] = found[A] and len(set(rows.batch[several])) > 1
    return found


def _typical(others: list[tuple[float, FloatArray]], size: float) -> FloatArray:
    """(terms,) medians over the workloads that know a term, for one with `size` bytes; NaN where none does."""
    found = np.full(7, np.nan)
    for term in range(7):
        knowing = [(one, terms[term]) for one, terms in others if np.isfinite(terms[term])]
        sized = [value / one for one, value in knowing if one > 0]
        if sized and size > 0 and term != G:
            found[term] = float(np.median(sized)) * size
        elif knowing:
            found[term] = float(np.median([value for _, value in knowing]))
    return found


def _pinned(prior: FloatArray, step_s: FloatArray) -> FloatArray:
    """(terms,) the prior with its gaps filled: one kind of link stands in for the other, and without any, nothing."""
    found = prior.copy()
    for one, other in ((A_LOCAL, A_NET), (B_LOCAL, B_NET), (A_NET, A_LOCAL), (B_NET, B_LOCAL)):
        if not np.isfinite(found[one]):
            found[one] = prior[other]
    # adaptdl starts there too: without evidence no overlap
    found[G] = found[G] if np.isfinite(found[G]) else _LEAST_G
    found = np.where(np.isfinite(found), found, 0.0)
    if len(
        step_s
    ):  # one batch only: adaptdl gives half to the constant; another workload's is no reason for more
        half = 0.5 * float(step_s.min())
        found[A] = min(found[A], half) if np.isfinite(prior[A]) else half
    return found


def _seconds(terms: FloatArray, rows: _Rows) -> FloatArray:
    return step_seconds(
        terms,
        batch=rows.batch,
        devices=rows.devices,
        machines=rows.machines,
        accumulation=rows.accumulation,
    )


def _fit(rows: _Rows, step_s: FloatArray, free: BoolArray, prior: FloatArray) -> FloatArray:
    """(terms,) the free ones fitted to these rows, the others pinned."""
    found = _pinned(prior, step_s / rows.accumulation)
    if not free.any():
        return found
    middle = float(np.median(step_s / rows.accumulation))
    # Units in which every term is about one: the solver's steps then mean the same in each.
    unit = np.full(7, middle)
    unit[K] = middle / max(float(np.median(rows.batch)), 1.0)
    unit[[B_LOCAL, B_NET]] = middle / max(float(rows.devices.max()), 1.0)
    unit[G] = 1.0
    lower, upper = np.zeros(7), np.full(7, np.inf)
    lower[G], upper[G] = _LEAST_G, _MOST_G

    def terms(values: FloatArray) -> FloatArray:
        every = found.copy()
        every[free] = values * unit[free]
        return every

    def residual(values: FloatArray) -> FloatArray:
        seconds = np.maximum(_seconds(terms(values), rows), _LEAST_S)
        return np.asarray(np.log(seconds) - np.log(step_s), dtype=float)

    fits = []
    for gamma in _STARTS if free[G] else _STARTS[:1]:
        start = np.array([0.1, 0.5, 0.2, 0.1, 0.2, 0.1, gamma])[free]
        fits.append(least_squares(residual, start, bounds=(lower[free], upper[free])))
    best = min(fits, key=lambda one: float(one.cost))
    return terms(np.asarray(best.x, dtype=float))


Floats = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


def predict_trees(data: TrainingData, setups: pd.DataFrame, *, seed: int = 0) -> Floats:
    """(setups,) step seconds by trees on workload, batch and machine features, fitted to `data.runs` in log."""
    workloads = sorted(data.workloads["workload"].astype(str))
    kinds = data.instance_types.set_index("name")[["cores", "bandwidth_gbps"]]
    trees = HistGradientBoostingRegressor(
        max_iter=300, learning_rate=0.05, min_samples_leaf=3, random_state=seed
    )
    trees.fit(_features(data.runs, workloads, kinds), np.log(data.runs["step_s"].to_numpy(float)))
    return np.asarray(np.exp(trees.predict(_features(setups, workloads, kinds))))


def predict_trees_alone(
    known: pd.DataFrame, asked: pd.DataFrame, devices: dict[str, int], *, seed: int = 0
) -> Floats:
    """(asked,) step seconds by trees in log, from measurement columns and gradient_bytes alone; no name is a feature.

    `known` has step_s; `devices` by instance type stands in for an empty layout. What was measured in `asked` is not
    looked at. NaN where nothing is known. Raises ValueError on text that is not of the contract's form.
    """
    step = known["step_s"].to_numpy(float)
    good = np.flatnonzero(np.isfinite(step) & (step > 0))
    if not len(good) or not len(asked):
        return np.full(len(asked), np.nan)
    known = known.iloc[good]
    curves = _single_device(known, devices)
    trees = HistGradientBoostingRegressor(
        max_iter=300, learning_rate=0.05, min_samples_leaf=3, random_state=seed
    )
    features = _numbers(known, devices, curves)
    with_values = np.isfinite(features).any(
        axis=0
    )  # scikit-learn refuses a feature without any value
    trees.fit(features[:, with_values], np.log(step[good]))
    return np.asarray(np.exp(trees.predict(_numbers(asked, devices, curves)[:, with_values])))


def predict_adaptdl(
    known: pd.DataFrame, asked: pd.DataFrame, devices: dict[str, int]
) -> FloatArray:
    """As `predict_textbook`, fitted to each workload on a kind of machine by itself; both frames have `kind`."""
    return predict_textbook(by_kind(known), by_kind(asked), devices)


def by_kind(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows with a workload of its own for each `kind` of machine."""
    return frame.assign(workload=frame["workload"] + " on " + frame["kind"])


def predict_srifty(
    known: pd.DataFrame,
    asked: pd.DataFrame,
    devices: dict[str, int],
    gbps: dict[str, float],
    *,
    seed: int = 0,
) -> Floats:
    """(asked,) step seconds by Srifty's method: compute from a profile, collectives from boosted trees.

        T_step = T1 / 3 + max(2 T1 / 3, C),     C by trees in log from bytes, devices, machines, layout and link

    T1 is of one device at that batch, forward a third of it; C is what steps that are longer than T1 have beyond
    forward (Luo et al. time collectives alone, which these rows do not). Both frames have `kind`, and `gbps` is by
    kind. NaN where the workload never ran on one device of the kind.
    """
    frames = [by_kind(one) for one in (known, asked)]
    curves = _single_device(frames[0], devices)
    table = [_numbers(one, devices, curves) for one in frames]
    link = [np.log([gbps[str(kind)] for kind in one["kind"]]) for one in frames]
    alone = [np.exp(one[:, -1]) * one[:, -2] for one in table]
    features = [np.column_stack([one[:, 1:6], at]) for one, at in zip(table, link, strict=True)]
    step = known["step_s"].to_numpy(float)
    shows = (features[0][:, 0] > 1) & (step > _SHOWS * alone[0])
    if not shows.any():
        return np.full(len(asked), np.nan)
    trees = HistGradientBoostingRegressor(
        max_iter=300, learning_rate=0.05, min_samples_leaf=3, random_state=seed
    )
    trees.fit(features[0][shows], np.log((step - alone[0] / 3)[shows]))
    found = alone[1] / 3 + np.maximum(2 * alone[1] / 3, np.exp(trees.predict(features[1])))
    return np.where(features[1][:, 0] > 1, found, alone[1])


def _single_device(
    known: pd.DataFrame, devices: dict[str, int]
) -> dict[str, tuple[Floats, Floats]]:
    """By workload, log batches in order and the mean log seconds of a micro-step on one device."""
    setups = read_setups(known, devices)
    rows = pd.DataFrame(
        {
            "workload": np.array(setups.workloads, dtype=object),
            "batch": np.log(setups.batch.max(axis=1, initial=0.0)),
            "step": np.log(known["step_s"].to_numpy(float) / setups.accumulation),
        }
    )[setups.ranks == 1]
    means = {
        str(name): own.groupby("batch")["step"].mean() for name, own in rows.groupby("workload")
    }
    return {name: (one.index.to_numpy(float), one.to_numpy(float)) for name, one in means.items()}


def _numbers(
    rows: pd.DataFrame, devices: dict[str, int], curves: dict[str, tuple[Floats, Floats]]
) -> Floats:
    """(rows, features); NaN, which the trees take, for unknown bytes and for workloads without single-device rows."""
    setups = read_setups(rows, devices)
    batch = np.log(setups.batch.max(axis=1, initial=0.0))
    least = np.where(setups.present, setups.layout, np.inf).min(axis=1)
    size = pd.to_numeric(column(rows, "gradient_bytes", np.nan), errors="coerce").to_numpy(float)
    size = np.log(np.where(size > 0, size, np.nan))
    names, alone = np.array(setups.workloads, dtype=object), np.full(len(rows), np.nan)
    for name, (batches, seconds) in curves.items():
        alone[names == name] = np.interp(
            batch[names == name], batches, seconds
        )  # level beyond the batches measured
    layout = (setups.ranks, setups.instances, setups.layout.max(axis=1), least)
    return np.column_stack([batch, *layout, size, setups.accumulation, alone])


def _features(rows: pd.DataFrame, workloads: list[str], kinds: pd.DataFrame) -> Floats:
    machines = {str(name): (float(c), float(b)) for name, c, b in kinds.itertuples()}
    return np.array([_row(row, workloads, machines) for row in rows_of(rows)])


def _row(
    row: dict[str, Any], workloads: list[str], machines: dict[str, tuple[float, float]]
) -> list[float]:
    types = parse_cluster(str(row["cluster"]))
    batches = np.array(parse_numbers(str(row["batch_per_device"]), len(types), "batch_per_device"))
    cores = np.array([machines[name][0] for name in types])
    links = np.array([machines[name][1] for name in types])
    one_hot = [float(name == row["workload"]) for name in workloads]
    shape = [
        len(types),
        cores.min(),
        cores.sum(),
        links.min(),
        batches.sum(),
        (batches / cores).max(),
    ]
    return [*one_hot, *map(float, shape), float(row["accumulation_steps"] or 1)]


def predict_compute_only(data: TrainingData, setups: pd.DataFrame) -> FloatArray:
    """(setups,) step seconds of the slowest rank's compute, from the same profiles that the model learns from.

    Raises ValueError on a workload never measured or a type never described.
    """
    model = fit(replace(data, runs=data.runs.iloc[:0]), seed=0)
    return model.predict(setups)["compute_s"].to_numpy(float)
