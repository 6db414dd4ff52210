"""Turn frames of measurements into training rows and facts of workloads.

If most runs recorded a time of the fixed work, all seconds are corrected to nominal speed. The
usual seconds of the fixed work are the median of the instance type in the warehouse:

    nominal seconds = seconds / slowness^beta,    slowness = geometric mean of reference / usual
    beta ~ N(reliability, 0.5^2) and repeats,     reliability = 1 - noise^2 / variance

`variance` is that of log slowness. `noise` is the standard deviation of one run's reference, from
its spread over blocks.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
import scipy

from ..domain.numeric import FloatArray
from ..domain.setup_table import column, in_one_order, modes_of, types_of
from ..domain.workload import MODE_COLUMNS, MODES
from .communication import Volumes
from .machine_specs import Machine, device_kind
from .one_device import Transformer
from .rows import WorkloadFacts

# Share of the backward pass in a step: it has two matrix products where the forward pass has one.
BACKWARD_PART = 2 / 3
_BETA_SD, _MOST_BETA = 0.5, 1.5  # prior standard deviation of beta, and its maximum
_LEAST_NOISE = 0.01  # least standard deviation of the log step time among repeats
_MEDIAN_TO_MEAN = np.pi / 2  # variance of the median over variance of the mean, if normal
# Standard deviations of log seconds: of one device; of compute on several devices; relative error
# of sync_s; of rows of one batch that are pooled; for each device of a machine after the first.
_ALONE_SD, _COMPUTE_SD, _SYNC_SD, _POOLED_SD, _CROWDED_SD = 0.01, 0.08, 0.05, 0.04, 0.03
_LEAST_COMPUTE = 0.02  # least share of compute in a step
# Repeated setups that the prior of the noise counts as; spread at which runs contradict each other.
_FEW_REPEATED, _LEAST_CONTRADICTION = 4, 0.03
_SETUP = (
    "workload",
    *MODE_COLUMNS,
    "cluster",
    "layout",
    "batch_per_device",
    "accumulation_steps",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingData:
    """The measurements of one provider, as frames with the columns of the warehouse's marts."""

    runs: pd.DataFrame
    profiles: pd.DataFrame
    buckets: pd.DataFrame
    probes: pd.DataFrame
    workloads: pd.DataFrame
    instance_types: pd.DataFrame


def definition_digests(frame: pd.DataFrame, name: str) -> dict[str, str]:
    """Return the digest of each definition in `frame`, by the definition's name.

    `name` is the column of the names. Rows without a digest are left out.
    """
    if "digest" not in frame:
        return {}
    return dict(frame[[name, "digest"]].dropna().itertuples(index=False))


def numbers(frame: pd.DataFrame, name: str, default: float = np.nan) -> FloatArray:
    """Return a (rows,) array: the numbers of column `name`, missing values as `default`."""
    values = pd.to_numeric(column(frame, name, default), errors="coerce")
    return values.to_numpy(float, copy=True)


def valid_runs(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the runs that have a known mode and a positive finite step time."""
    if "step_s" not in runs.columns or not len(runs):
        return runs.iloc[:0]
    step = numbers(runs, "step_s")
    good = np.isfinite(step) & (step > 0)
    good &= np.array([mode in MODES for mode in modes_of(runs)], dtype=bool)
    return runs.iloc[np.flatnonzero(good)]


def slowness(measured: pd.DataFrame) -> FloatArray:
    """Return a (rows,) array: seconds of the fixed work divided by its usual seconds.

    A row's value is NaN if either number is unknown. The columns `reference_s` and
    `usual_reference_s` hold a number, or one number per machine. The result for several machines is
    the geometric mean of their ratios.
    """
    found = np.full(len(measured), np.nan)
    if not {"reference_s", "usual_reference_s"}.issubset(measured.columns):
        return found
    pairs = zip(
        measured["reference_s"].tolist(), measured["usual_reference_s"].tolist(), strict=True
    )
    for at, (recorded, usual) in enumerate(pairs):
        if any(np.ndim(one) == 0 and pd.isna(one) for one in (recorded, usual)):
            continue
        own, common = (np.atleast_1d(np.asarray(one, dtype=float)) for one in (recorded, usual))
        if own.shape == common.shape and np.all(own > 0) and np.all(common > 0):
            found[at] = np.exp(np.mean(np.log(own / common)))
    return found


def at_nominal_speed(data: TrainingData) -> TrainingData:
    """Return the data with the seconds of runs and profiles corrected to nominal speed.

    The runs get a column `speed_sd` (the standard deviation that speed changes cause in a run's
    log seconds). The data is returned unchanged if it was
    corrected before, or if at most half of the runs have a time of the fixed work.
    """
    if "speed_sd" in data.runs:
        return data
    slow = np.log(slowness(data.runs))
    known = np.isfinite(slow)
    if 2 * int(known.sum()) <= len(data.runs):
        return data
    variance, reliability = _between_hours(data.runs[known], slow[known])
    beta = speed_exponent(data.runs[known], slow[known], reliability)
    runs = _divided(
        data.runs, ("step_s", "sync_s", "input_s"), np.exp(beta * np.where(known, slow, 0.0))
    )
    factors = np.exp(beta * np.nan_to_num(np.log(slowness(data.profiles))))
    parts = ("forward_s", "backward_s", "optimizer_s", "input_s", "load_s")
    return replace(
        data,
        runs=runs.assign(speed_sd=beta * np.sqrt(variance * reliability)),
        profiles=_divided(data.profiles, parts, factors),
    )


def _between_hours(runs: pd.DataFrame, slow: FloatArray) -> tuple[float, float]:
    """Return a pair: the variance of log slowness, and its reliability.

    The reliability is the fraction of the variance that is not measurement noise. `slow` (runs,) is
    the log slowness of `runs`.
    """
    spread, blocks = (
        pd.to_numeric(column(runs, name, otherwise)).to_numpy(float)
        for name, otherwise in (("reference_spread", 0.0), ("reference_blocks", 1))
    )
    machines = np.array([np.size(one) for one in runs["reference_s"]])
    noise = float(np.mean(_MEDIAN_TO_MEAN * spread**2 / (blocks * machines)))
    variance = float(np.var(slow))
    return variance, float(np.clip(1.0 - noise / variance, 0.0, 1.0)) if variance > 0 else 0.0


def speed_exponent(runs: pd.DataFrame, slow: FloatArray, reliability: float) -> float:
    """Return beta: how strongly log step seconds rise with log slowness.

    The slope is fitted to repeated runs of the same setups and shrunk towards `reliability`. If no
    setup ran at two speeds, `reliability` is returned. `slow` is the log slowness of `runs`.
    """
    step = pd.to_numeric(column(runs, "step_s", np.nan)).to_numpy(float)
    setup = pd.DataFrame({name: column(runs, name, "").astype(str) for name in _SETUP}).reset_index(
        drop=True
    )
    frame = setup.assign(x=slow, y=np.log(np.where(step > 0, step, np.nan))).dropna()
    groups = frame.groupby(list(_SETUP), sort=False)
    x, y = (frame[name] - groups[name].transform("mean") for name in ("x", "y"))
    squares, freedom = float((x * x).sum()), len(frame) - groups.ngroups - 1
    if freedom < 1 or squares <= 0:
        return reliability
    alone = float((x * y).sum()) / squares
    noise = max(float(((y - alone * x) ** 2).sum()) / freedom, _LEAST_NOISE**2)
    weight = squares / noise
    beta = (weight * alone + reliability / _BETA_SD**2) / (weight + 1 / _BETA_SD**2)
    return float(np.clip(beta, 0.0, _MOST_BETA))


def _divided(frame: pd.DataFrame, names: tuple[str, ...], factors: FloatArray) -> pd.DataFrame:
    """Return the frame with its columns `names` divided by `factors` (rows,)."""
    numbers = frame[[name for name in names if name in frame]].apply(pd.to_numeric, errors="coerce")
    return frame.assign(**numbers.astype(float).div(factors, axis=0))


def one_provider(data: TrainingData) -> str:
    """Return the provider of the data.

    Raises:
        ValueError: if the data has rows of several providers.
    """
    frames = [frame for frame in (data.runs, data.profiles) if "provider" in frame]
    providers = sorted({str(name) for frame in frames for name in frame["provider"]})
    if len(providers) > 1:
        raise ValueError(
            f"measurements of several providers are never pooled: {', '.join(providers)}"
        )
    return providers[0] if providers else "local"


def pooled(runs: pd.DataFrame, devices: dict[str, int]) -> pd.DataFrame:
    """Return a row per setup of valid runs.

    The columns are those of a setup, the medians step_s and sync_s (NaN if unknown), `runs` (the
    effective number), and `run_sd`, the standard deviation of log seconds among repeated runs.
    """
    keys = pd.DataFrame(
        {
            "workload": column(runs, "workload", "").astype(str),
            **{name: column(runs, name, known[0]) for name, known in MODE_COLUMNS.items()},
            **in_one_order(runs, devices),
            "accumulation_steps": column(runs, "accumulation_steps", 1).astype(float),
        }
    )
    numbers = {
        name: pd.to_numeric(column(runs, name, np.nan)).astype(float)
        for name in ("step_s", "sync_s")
    }
    frame = keys.assign(**numbers, log_s=np.log(numbers["step_s"]))
    found = frame.groupby(list(_SETUP), sort=True, as_index=False).agg(
        step_s=("step_s", "median"),
        sync_s=("sync_s", "median"),
        runs=("step_s", "size"),
        spread=("log_s", "std"),
    )
    # a sample's median spread is sqrt(chi^2_0.5(n - 1) / (n - 1)) times the true one
    again = found[found["runs"] > 1]
    freedom = again["runs"] - 1
    spreads = again["spread"] / np.sqrt(scipy.special.chdtri(freedom, 0.5) / freedom)
    run_sd = float(np.median(np.append(spreads, np.full(_FEW_REPEATED, _ALONE_SD))))
    excess = found["spread"].fillna(0.0) / max(run_sd, _LEAST_CONTRADICTION)
    return found.assign(runs=found["runs"] / excess.clip(lower=1.0) ** 2, run_sd=run_sd)


def profile_rows(profiles: pd.DataFrame) -> pd.DataFrame:
    """Return medians of profiles, by workload, mode, instance type and batch.

    Columns are step_s (forward and backward seconds), optimizer_s and input_part.
    """
    keys = ["workload", *MODE_COLUMNS, "instance_type", "batch"]
    if not {"workload", "instance_type", "batch", "forward_s", "backward_s"} <= set(profiles):
        return pd.DataFrame(columns=[*keys, "step_s", "optimizer_s", "input_part"])
    good = profiles[(profiles["batch"] > 0) & (profiles["forward_s"] > 0)]
    good = good[good["backward_s"] > 0]
    seconds = good["forward_s"] + good["backward_s"]
    modes = {name: column(good, name, known[0]) for name, known in MODE_COLUMNS.items()}
    found = good[["workload", "instance_type", "batch"]].assign(
        **modes,
        step_s=seconds,
        optimizer_s=pd.to_numeric(column(good, "optimizer_s", 0.0)).clip(lower=0.0),
        input_part=(pd.to_numeric(column(good, "input_s", 0.0)) / seconds).clip(0.0, 1.0),
    )
    return found.groupby(keys, as_index=False)[["step_s", "optimizer_s", "input_part"]].median()


def one_device_rows(
    setups: pd.DataFrame, profiles: pd.DataFrame, machines: Mapping[str, Machine]
) -> pd.DataFrame:
    """Return rows of one device without an optimizer: of profiles, and of compute on several.

    The compute of several devices is the step without `sync_s`, if it is known. Rows of one batch
    on equal machines are pooled, unless one device was measured. `setups` are the result of
    `pooled`, `profiles` of `profile_rows`.
    """
    layout = [[int(text) for text in str(value).split("+")] for value in setups["layout"]]
    ranks, most = (np.array([value(used) for used in layout]) for value in (sum, max))
    types = setups["cluster"].map(lambda name: sorted(set(types_of(name))))
    batches = setups["batch_per_device"].astype(str).str.split("+").map(set)
    even = (types.map(len) == 1) & (batches.map(len) == 1)
    rows = setups.assign(
        **_alone(setups),
        instance_type=types.map(lambda names: names[0]),
        batch=batches.map(lambda sizes: float(min(sizes))),
    )
    compute_s = (rows["step_s"] - rows["sync_s"]).clip(lower=_LEAST_COMPUTE * rows["step_s"])
    sync_sd = _SYNC_SD * rows["sync_s"] / compute_s
    variance = _COMPUTE_SD**2 + sync_sd**2 + (_CROWDED_SD * (most - 1)) ** 2
    rows = rows.assign(log_s=np.log(compute_s / rows["accumulation_steps"]), weight=1 / variance)
    rows = rows.assign(weighted=rows["log_s"] * rows["weight"])
    several = rows[even & (ranks > 1) & rows["sync_s"].notna()]
    keys = ["workload", *MODE_COLUMNS, "instance_type", "batch"]
    sums = several.groupby(keys, as_index=False)[["weight", "weighted"]].sum()
    measured = pd.concat([rows[ranks == 1], profiles])
    known = pd.MultiIndex.from_frame(_kinds(measured, machines))
    sums = sums[~pd.MultiIndex.from_frame(_kinds(sums, machines)).isin(known)]
    sums = sums.assign(
        step_s=np.exp(sums["weighted"] / sums["weight"]),
        noise_sd=np.hypot(_POOLED_SD, sums["weight"] ** -0.5),
    )
    found = pd.concat([profiles.assign(noise_sd=_ALONE_SD), sums], ignore_index=True)
    return found.assign(
        cluster="1x" + found["instance_type"].astype(str),
        batch_per_device=found["batch"],
        layout="1",
        accumulation_steps=1.0,
        runs=1.0,
    )


def _kinds(rows: pd.DataFrame, machines: Mapping[str, Machine]) -> pd.DataFrame:
    """Return the columns that identify seconds of one device."""
    kinds = [device_kind(str(name), machines[str(name)]) for name in rows["instance_type"]]
    found = rows[["workload", *MODE_COLUMNS]].astype(str)
    return found.assign(kind=kinds, batch=rows["batch"].astype(float))


def _alone(rows: pd.DataFrame) -> dict[str, list[str]]:
    """Return the mode columns of the rows on one device (Mode.alone)."""
    modes = [mode.alone for mode in modes_of(rows)]
    return {name: [getattr(mode, name) for mode in modes] for name in MODE_COLUMNS}


def facts_of(data: TrainingData, name: str) -> dict[str, float]:
    """Return the values of column `name` by workload; values that are not positive are left out.

    A value in the frame `workloads` takes precedence over values in the frame `runs`.
    """
    facts: dict[str, float] = {}
    for frame in (data.runs, data.workloads):
        if name in frame and "workload" in frame:
            known = frame[pd.to_numeric(frame[name], errors="coerce") > 0]
            facts |= dict(zip(known["workload"], known[name].astype(float), strict=True))
    return facts


def workload_facts(data: TrainingData) -> dict[str, WorkloadFacts]:
    """Return the facts of each workload of which any fact is known."""
    columns = (
        *("gradient_bytes", "checkpoint_bytes", "parameters", "flops_per_sample"),
        *("layers", "hidden", "sequence"),
    )
    known = {name: facts_of(data, name) for name in columns}
    volumes = {name: facts_of(data, f"divided_{name}") for name in Volumes._fields}
    found = {}
    for name in sorted({name for values in known.values() for name in values}):
        parameters = known["parameters"].get(name, 0.0)
        shape = [known[each].get(name, 0.0) for each in ("layers", "hidden", "sequence")]
        found[name] = WorkloadFacts(
            gradient_bytes=known["gradient_bytes"].get(name, 4.0 * parameters),  # fp32
            checkpoint_bytes=known["checkpoint_bytes"].get(name, 0.0),
            flops=known["flops_per_sample"].get(name, 0.0),
            transformer=Transformer(parameters, *shape) if parameters and all(shape) else None,
            divided=Volumes(*(values.get(name, 0.0) for values in volumes.values())),
        )
    for workload, rows in data.buckets.groupby("workload") if len(data.buckets) else ():
        ordered = rows.groupby("bucket")[["bytes", "ready_fraction"]].median().sort_index()
        size = ordered["bytes"].to_numpy(float)
        found[str(workload)] = replace(
            found.get(str(workload), WorkloadFacts()),
            gradient_bytes=float(size.sum()),
            hidden_part=BACKWARD_PART * (1 - float(ordered["ready_fraction"].min())),
            last_bucket_bytes=float(size[-1]),
        )
    return found
