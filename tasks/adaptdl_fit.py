"""The fit of Pollux's authors, as released in the package adaptdl: a rival of the benchmark, never part of the product.

Needs the extra `bench`; only `adaptdl.goodput` is used, which starts and reads nothing.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pandas as pd

from models.columns import column, read_setups
from models.setups import SetupArrays

Floats = np.ndarray[tuple[int, ...], np.dtype[np.float64]]
# adaptdl's profile has one entry for each of these, whatever the layout of the replicas
_KEY = ["machines", "devices", "batch"]


def predict_adaptdl(known: pd.DataFrame, asked: pd.DataFrame, devices: dict[str, int]) -> Floats:
    """(asked,) step seconds by `adaptdl.goodput.fit_perf_params`, fitted to the rows of each workload by themselves.

    Measurement columns, `known` with step_s and sync_s in seconds; `devices` by instance type stands in for an empty
    layout. What was measured in `asked` is not looked at. NaN for a workload without a usable row or whose fit fails.
    Raises ImportError without adaptdl, and ValueError on text that is not of the contract's form.
    """
    from adaptdl import goodput

    learned, wanted = _numbers(read_setups(known, devices)), _numbers(read_setups(asked, devices))
    learned["step"] = known["step_s"].to_numpy(float)
    learned["sync"] = pd.to_numeric(column(known, "sync_s", np.nan), errors="coerce").to_numpy(float)
    found = np.full(len(asked), np.nan)
    for name, rows in wanted.groupby("workload"):
        found[rows.index.to_numpy()] = _predict(goodput, _profile(learned[learned["workload"] == name]), rows)
    return found


def _numbers(setups: SetupArrays) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "workload": np.array(setups.workloads, dtype=object),
            "machines": setups.instances,
            "devices": setups.ranks,
            # adaptdl gives every replica the same; the slowest has the most
            "batch": setups.batch.max(axis=1, initial=0.0),
            "accumulation": setups.accumulation,
        }
    )


def _profile(rows: pd.DataFrame) -> pd.DataFrame:
    """One workload's rows as adaptdl would have profiled them: `_KEY`, accum_s and optim_s.

    Its authors (adaptdl/torch/_metrics.py, 0.2.11) take the optimizer step less its synchronisation for one more
    accumulation step, and the means of both at each key. The rows' step_s holds all micro-steps. A single device does
    not wait; where several did for an unknown time, the single-device seconds stand for the accumulation step.
    """
    alone = rows[rows["devices"] == 1].assign(each=lambda one: one["step"] / one["accumulation"])
    curve = alone.groupby("batch")["each"].mean().sort_index()
    sync = rows["sync"].where(rows["devices"] > 1, 0.0)
    accum = (rows["step"] - sync) / rows["accumulation"]
    if len(curve):
        guess = np.interp(rows["batch"], curve.index.to_numpy(float), curve.to_numpy(float))
        accum = accum.where(sync.notna(), np.minimum(guess, rows["step"] / rows["accumulation"]))
    timed = rows.assign(accum_s=accum, optim_s=rows["step"] - (rows["accumulation"] - 1) * accum)
    timed = timed[np.isfinite(timed["accum_s"]) & (timed["accum_s"] > 0) & (timed["optim_s"] > 0)]
    profile: pd.DataFrame = timed.groupby(_KEY, as_index=False)[["accum_s", "optim_s"]].mean()
    return profile


def _predict(goodput: Any, profile: pd.DataFrame, rows: pd.DataFrame) -> Floats:
    """(rows,) step seconds; NaN where the fit fails, for whatever reason of adaptdl's own."""
    none = np.full(len(rows), np.nan)
    if not len(profile):
        return none
    machines, devices, batch = (rows[one].to_numpy(float) for one in _KEY)
    steps = rows["accumulation"].to_numpy(float)
    try:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            fitted = goodput.fit_perf_params(*(profile[one].to_numpy(float) for one in (*_KEY, "accum_s", "optim_s")))
            # The package itself tells samples a second, and counts the micro-steps before the last.
            throughput = goodput.GoodputFunction(fitted, (1.0, 1.0), 1).throughput(machines, devices, batch, steps - 1)
            seconds = np.asarray(devices * batch * steps / throughput, dtype=float)
    except Exception:
        return none
    finally:
        goodput.np = np  # a fit that fails leaves autograd's there
    return np.where(np.isfinite(seconds) & (seconds > 0), seconds, np.nan)
