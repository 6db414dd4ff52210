"""Boosted trees without physics: what a careful person would try first, and what the champion must beat."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from sklearn.ensemble import HistGradientBoostingRegressor

from models.cloud import parse_cluster, parse_numbers
from models.columns import column, read_setups
from models.identity import rows_of
from models.learning import TrainingData

Floats = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


def predict_trees(data: TrainingData, setups: pd.DataFrame, *, seed: int = 0) -> Floats:
    """(setups,) step seconds by trees on workload, batch and machine features, fitted to `data.runs` in log."""
    workloads = sorted(data.workloads["workload"].astype(str))
    kinds = data.instance_types.set_index("name")[["cores", "bandwidth_gbps"]]
    trees = HistGradientBoostingRegressor(max_iter=300, learning_rate=0.05, min_samples_leaf=3, random_state=seed)
    trees.fit(_features(data.runs, workloads, kinds), np.log(data.runs["step_s"].to_numpy(float)))
    return np.asarray(np.exp(trees.predict(_features(setups, workloads, kinds))))


def predict_trees_alone(known: pd.DataFrame, asked: pd.DataFrame, devices: dict[str, int], *, seed: int = 0) -> Floats:
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
    trees = HistGradientBoostingRegressor(max_iter=300, learning_rate=0.05, min_samples_leaf=3, random_state=seed)
    features = _numbers(known, devices, curves)
    told = np.isfinite(features).any(axis=0)  # scikit-learn refuses a feature without any value
    trees.fit(features[:, told], np.log(step[good]))
    return np.asarray(np.exp(trees.predict(_numbers(asked, devices, curves)[:, told])))


def _single_device(known: pd.DataFrame, devices: dict[str, int]) -> dict[str, tuple[Floats, Floats]]:
    """By workload, log batches in order and the mean log seconds of a micro-step on one device."""
    setups = read_setups(known, devices)
    rows = pd.DataFrame(
        {
            "workload": np.array(setups.workloads, dtype=object),
            "batch": np.log(setups.batch.max(axis=1, initial=0.0)),
            "step": np.log(known["step_s"].to_numpy(float) / setups.accumulation),
        }
    )[setups.ranks == 1]
    means = {str(name): own.groupby("batch")["step"].mean() for name, own in rows.groupby("workload")}
    return {name: (one.index.to_numpy(float), one.to_numpy(float)) for name, one in means.items()}


def _numbers(rows: pd.DataFrame, devices: dict[str, int], curves: dict[str, tuple[Floats, Floats]]) -> Floats:
    """(rows, features); NaN, which the trees take, for unknown bytes and for workloads without single-device rows."""
    setups = read_setups(rows, devices)
    batch = np.log(setups.batch.max(axis=1, initial=0.0))
    least = np.where(setups.present, setups.layout, np.inf).min(axis=1)
    size = pd.to_numeric(column(rows, "gradient_bytes", np.nan), errors="coerce").to_numpy(float)
    size = np.log(np.where(size > 0, size, np.nan))
    names, alone = np.array(setups.workloads, dtype=object), np.full(len(rows), np.nan)
    for name, (batches, seconds) in curves.items():
        alone[names == name] = np.interp(batch[names == name], batches, seconds)  # level beyond the batches measured
    layout = (setups.ranks, setups.instances, setups.layout.max(axis=1), least)
    return np.column_stack([batch, *layout, size, setups.accumulation, alone])


def _features(rows: pd.DataFrame, workloads: list[str], kinds: pd.DataFrame) -> Floats:
    machines = {str(name): (float(c), float(b)) for name, c, b in kinds.itertuples()}
    return np.array([_row(row, workloads, machines) for row in rows_of(rows)])


def _row(row: dict[str, Any], workloads: list[str], machines: dict[str, tuple[float, float]]) -> list[float]:
    types = parse_cluster(str(row["cluster"]))
    batches = np.array(parse_numbers(str(row["batch_per_device"]), len(types), "batch_per_device"))
    cores = np.array([machines[name][0] for name in types])
    links = np.array([machines[name][1] for name in types])
    one_hot = [float(name == row["workload"]) for name in workloads]
    shape = [len(types), cores.min(), cores.sum(), links.min(), batches.sum(), (batches / cores).max()]
    return [*one_hot, *map(float, shape), float(row["accumulation_steps"] or 1)]
