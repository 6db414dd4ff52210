"""Boosted trees without physics: what a careful person would try first, and what the champion must beat."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from sklearn.ensemble import HistGradientBoostingRegressor

from models.cloud import parse_cluster, parse_numbers
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
