"""Convert frames of measurements to training rows and facts of workloads.

Every machine runs a reference computation around each measurement (node/reference.py). The
computation is always the same, so its duration (the reference seconds) shows the machine's speed.
Nominal speed is the usual speed of the instance type. If most runs have reference seconds, all
measured seconds are corrected to nominal speed:

    slowness        = geometric mean of (reference seconds / usual) over the machines of a run
    nominal seconds = seconds / slowness^beta
    prior of beta   = N(reliability, 0.5^2)
    reliability     = 1 - noise^2 / variance

Repeated runs of the same setups update beta.

- `usual`: the median reference seconds of the machine's instance type in the warehouse
- `variance`: the variance of log slowness over all runs
- `noise`: the standard error of a run's log slowness, estimated from repetitions (blocks) of the
  reference computation
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
import scipy

from ..domain.numeric import FloatArray
from ..domain.setup_table import column, in_canonical_order, modes_of, types_of
from ..domain.workload import MODE_COLUMNS, MODES
from .bytes_sent import Volumes
from .machine_specs import Machine, device_kind
from .rows import WorkloadFacts
from .setup_arrays import read_setups
from .single_device import Transformer

# Share of the backward pass in a step. It has two matrix products for each matrix product in the
# forward pass.
BACKWARD_SHARE = 2 / 3
_BETA_SD, _MOST_BETA = 0.5, 1.5  # prior standard deviation of beta, and its maximum
_LEAST_NOISE = 0.01  # minimum standard deviation of log step seconds between runs of a setup
_MEDIAN_TO_MEAN = np.pi / 2  # variance of the median / variance of the mean, for normal values
# Standard deviations of log seconds. Alone: a profile of one device. Compute: compute on several
# devices. Sync: the relative error of sync_s. Pooled: the mean of rows with the same batch.
# Crowded: added for each device of a machine after the first.
_ALONE_SD, _COMPUTE_SD, _SYNC_SD, _POOLED_SD, _CROWDED_SD = 0.01, 0.08, 0.05, 0.04, 0.03
_LEAST_COMPUTE = 0.02  # minimum share of compute in a step
# Number of repeated setups that the prior of the noise counts as; minimum standard deviation of log
# seconds at which the runs of a setup can contradict each other.
_FEW_REPEATED, _LEAST_CONTRADICTION = 4, 0.03
_SETUP = ["workload", *MODE_COLUMNS, "cluster", "layout", "batch_per_device", "accumulation_steps"]
_CELL = ["workload", *MODE_COLUMNS, "instance_type", "batch", "kind"]
_ALIKE = ["workload", *MODE_COLUMNS, "batch", "kind"]


@dataclass(frozen=True, kw_only=True)
class TrainingData:
    """The measurements of one provider, as frames with the columns of the warehouse's marts."""

    runs: pd.DataFrame
    profiles: pd.DataFrame
    buckets: pd.DataFrame
    probes: pd.DataFrame
    workloads: pd.DataFrame
    instance_types: pd.DataFrame


def definition_digests(frame: pd.DataFrame, name: str) -> dict[str, str]:
    """Return the digest of the definition of each workload or instance type in `frame`.

    The result is {name of the workload or type: digest}. `name` is the column with these names.
    """
    return dict(frame.reindex(columns=[name, "digest"]).dropna().itertuples(index=False))


def numbers(frame: pd.DataFrame, name: str, default: float = np.nan) -> FloatArray:
    """Return a (rows,) array: the numbers of column `name`, with `default` for missing values."""
    return pd.to_numeric(column(frame, name, default), errors="coerce").to_numpy(float, copy=True)


def valid_runs(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the runs that have a known mode and a positive finite step time."""
    step, known = numbers(runs, "step_s"), [mode in MODES for mode in modes_of(runs)]
    good = np.flatnonzero((step > 0) & (step < np.inf) & np.array(known, bool))
    return runs.iloc[good]


def slowness(measured: pd.DataFrame) -> FloatArray:
    """Return a (rows,) array: `reference_s` / `usual_reference_s`, above 1 for a slow machine.

    Every machine runs a reference computation around each measurement. `reference_s` has its
    seconds, and `usual_reference_s` the usual seconds on the same instance type. Both columns have
    numbers, or sequences with a number for each machine. For several machines, the result is the
    geometric mean of their ratios.
    """
    names = ("reference_s", "usual_reference_s")
    pairs = zip(*(column(measured, name, np.nan) for name in names), strict=True)
    return np.array([np.exp(np.mean(np.log(np.divide(times, usual)))) for times, usual in pairs])


def at_nominal_speed(data: TrainingData) -> TrainingData:
    """Return the data with the seconds of runs and profiles corrected to nominal speed.

    The docstring of the module describes the correction. The runs get a column `speed_sd`: the
    standard deviation of log step seconds due to speed differences between machines. The data is
    returned unchanged if it was corrected before, or if at most half of the runs have reference
    seconds.
    """
    if "speed_sd" in data.runs:
        return data
    slow = np.log(slowness(data.runs))
    known = np.isfinite(slow)
    if 2 * int(known.sum()) <= len(data.runs):
        return data
    runs, variance = data.runs[known], float(np.var(slow[known]))
    spread, blocks = numbers(runs, "reference_spread", 0.0), numbers(runs, "reference_blocks", 1)
    machines = runs["reference_s"].map(np.size)
    noise = float(np.mean(_MEDIAN_TO_MEAN * spread**2 / (blocks * machines)))
    reliability = max(1.0 - noise / variance, 0.0) if variance > 0 else 0.0
    beta = speed_exponent(runs, slow[known], reliability)
    factors = np.exp(beta * np.nan_to_num(slow))
    runs = _divide(data.runs, ("step_s", "sync_s", "input_s"), factors)
    factors = np.exp(beta * np.nan_to_num(np.log(slowness(data.profiles))))
    parts = ("forward_s", "backward_s", "optimizer_s", "input_s", "load_s")
    return replace(
        data,
        runs=runs.assign(speed_sd=beta * np.sqrt(variance * reliability)),
        profiles=_divide(data.profiles, parts, factors),
    )


def speed_exponent(runs: pd.DataFrame, slow: FloatArray, reliability: float) -> float:
    """Return beta, the slope of log step seconds with respect to the log slowness of the machines.

    The slope is fitted to repeated runs of the same setups, and shrunk towards `reliability`.

    slow: (runs,) log of the `slowness` of each run.
    reliability: the fraction of the variance of `slow` that is not noise.
    """
    step = numbers(runs, "step_s")
    setup = pd.DataFrame({name: column(runs, name, "").astype(str) for name in _SETUP})
    frame = setup.assign(x=slow, y=np.log(np.where(step > 0, step, np.nan))).dropna()
    groups = frame.groupby(_SETUP, sort=False)
    x, y = (frame[name] - groups[name].transform("mean") for name in ("x", "y"))
    squares, freedom = float((x * x).sum()), len(frame) - groups.ngroups - 1
    if freedom < 1 or squares <= 0:
        return reliability
    alone = float((x * y).sum()) / squares
    noise = max(float(((y - alone * x) ** 2).sum()) / freedom, _LEAST_NOISE**2)
    weight = squares / noise
    beta = (weight * alone + reliability / _BETA_SD**2) / (weight + 1 / _BETA_SD**2)
    return float(np.clip(beta, 0.0, _MOST_BETA))


def _divide(frame: pd.DataFrame, names: tuple[str, ...], factors: FloatArray) -> pd.DataFrame:
    """Return the frame with its columns `names` divided by `factors` (rows,)."""
    numbers = frame[[name for name in names if name in frame]].apply(pd.to_numeric, errors="coerce")
    return frame.assign(**numbers.astype(float).div(factors, axis=0))


def single_provider(data: TrainingData) -> str:
    """Return the provider of the data; "local" if no row names a provider.

    Raises:
        ValueError: if the data has rows of several providers.
    """
    frames = (data.runs, data.profiles)
    providers = sorted({str(name) for frame in frames for name in frame.get("provider", ())})
    if len(providers) > 1:
        raise ValueError(
            f"measurements of several providers cannot be pooled: {', '.join(providers)}"
        )
    return providers[0] if providers else "local"


def _modes(frame: pd.DataFrame) -> dict[str, Any]:
    """Return {column: values} for precision, strategy and switches, with defaults where missing."""
    return {name: column(frame, name, known[0]) for name, known in MODE_COLUMNS.items()}


def pool_runs(runs: pd.DataFrame, machines: Mapping[str, Machine]) -> pd.DataFrame:
    """Pool the runs of each setup into one row. All `runs` must be valid (`valid_runs`).

    The frame has the columns of a setup, and these columns:

        step_s, sync_s   medians over the runs of the setup; NaN if unknown
        runs             the effective number of runs: below the real number if the standard
                         deviation of their log step seconds exceeds both run_sd and 0.03
        kind             the kind of device
        run_sd           standard deviation of log step seconds between runs of the same setup,
                         estimated for the kind of device
    """
    step_s = numbers(runs, "step_s")
    devices = {name: each.devices for name, each in machines.items()}
    kinds = {name: device_kind(name, each) for name, each in machines.items()}
    frame = in_canonical_order(runs, devices).assign(
        workload=column(runs, "workload", "").astype(str),
        **_modes(runs),
        accumulation_steps=numbers(runs, "accumulation_steps", 1),
        step_s=step_s,
        sync_s=numbers(runs, "sync_s"),
        log_s=np.log(step_s),
    )
    found = frame.groupby(_SETUP, as_index=False).agg(
        step_s=("step_s", "median"),
        sync_s=("sync_s", "median"),
        runs=("step_s", "size"),
        spread=("log_s", "std"),
    )
    # The median sd of a sample of n values is sqrt(chi^2_0.5(n - 1) / (n - 1)) times the true sd.
    again = found[found["runs"] > 1]
    freedom = again["runs"] - 1
    spreads = again["spread"] / np.sqrt(scipy.special.chdtri(freedom, 0.5) / freedom)
    usual = float(np.median(np.append(spreads, np.full(_FEW_REPEATED, _ALONE_SD))))
    kind = found["cluster"].map(lambda cluster: kinds.get(types_of(cluster)[0], ""))
    logs = np.log(spreads.clip(lower=_ALONE_SD)).groupby(kind).agg(["sum", "size"])
    prior = _FEW_REPEATED / 2
    by_kind = np.exp((logs["sum"] + prior * np.log(usual)) / (logs["size"] + prior))
    other = float(np.exp(np.log(by_kind).mean())) if len(by_kind) else usual
    run_sd = kind.map(by_kind).fillna(other)
    excess = found["spread"].fillna(0.0) / run_sd.clip(lower=_LEAST_CONTRADICTION)
    return found.assign(runs=found["runs"] / excess.clip(lower=1.0) ** 2, run_sd=run_sd, kind=kind)


def profile_rows(profiles: pd.DataFrame, machines: Mapping[str, Machine]) -> pd.DataFrame:
    """Pool profiles by their medians, with a row for each workload, mode, instance type and batch.

    The other columns are:

        kind         the kind of device
        step_s       forward and backward seconds
        optimizer_s  seconds of the optimizer
    """
    names = ["workload", *MODE_COLUMNS, "instance_type", "batch"]
    frame = profiles.reindex(columns=[*names, "forward_s", "backward_s", "optimizer_s"])
    found: pd.DataFrame = frame.assign(
        **_modes(frame),
        kind=[device_kind(name, machines[name]) for name in frame["instance_type"]],
        step_s=frame["forward_s"] + frame["backward_s"],
        optimizer_s=frame["optimizer_s"].fillna(0.0),
    )
    return found.groupby(_CELL, as_index=False)[["step_s", "optimizer_s"]].median()


def single_device_rows(setups: pd.DataFrame, profiles: pd.DataFrame) -> pd.DataFrame:
    """Return rows with the seconds of one device for a forward and a backward pass.

    The rows come from two sources:

    - Each row of `profiles` is a row of the result.
    - A multi-device row of `setups` is used if all its devices have the same instance type and
      batch, and sync_s is known. Its seconds are (step_s - sync_s) / accumulation steps. Rows with
      the same workload, one-device mode (`Mode.alone`), instance type and batch are averaged. An
      average is left out if there is a measurement on a single device of the same kind, with the
      same workload, mode and batch.

    setups: a row for each measured setup (see `pool_runs`).
    profiles: a row for each workload, mode, instance type and batch (see `profile_rows`).
    """
    arrays = read_setups(setups, {})
    alone = [arrays.modes[at].alone for at in arrays.mode]
    rows = setups.assign(
        **pd.DataFrame(alone, columns=[*MODE_COLUMNS]),
        instance_type=[arrays.names[at] for at in arrays.kind[:, 0]],
        batch=arrays.batch[:, 0],
    )
    ranks, most = arrays.ranks, arrays.layout.max(axis=1)
    compute_s = (rows["step_s"] - rows["sync_s"]).clip(lower=_LEAST_COMPUTE * rows["step_s"])
    sync_sd = _SYNC_SD * rows["sync_s"] / compute_s
    variance = _COMPUTE_SD**2 + sync_sd**2 + (_CROWDED_SD * (most - 1)) ** 2
    rows = rows.assign(log_s=np.log(compute_s / rows["accumulation_steps"]), weight=1 / variance)
    rows = rows.assign(weighted=rows["log_s"] * rows["weight"])
    even = [(each == each[:, :1]) | ~arrays.present for each in (arrays.kind, arrays.batch)]
    even = np.all(even, axis=(0, 2))
    several = rows[even & (ranks > 1) & rows["sync_s"].notna()]
    sums = several.groupby(_CELL, as_index=False)[["weight", "weighted"]].sum()
    known = pd.MultiIndex.from_frame(pd.concat([rows[ranks == 1], profiles])[_ALIKE])
    sums = sums[~pd.MultiIndex.from_frame(sums[_ALIKE]).isin(known)]
    sums = sums.assign(
        step_s=np.exp(sums["weighted"] / sums["weight"]),
        noise_sd=np.hypot(_POOLED_SD, sums["weight"] ** -0.5),
    )
    measured = profiles.assign(noise_sd=_ALONE_SD, source="profile")
    found: pd.DataFrame = pd.concat([measured, sums.assign(source="several")], ignore_index=True)
    return found.assign(
        cluster="1x" + found["instance_type"].astype(str),
        batch_per_device=found["batch"],
        runs=1.0,
    )


def facts_of(rows: pd.DataFrame) -> dict[str, WorkloadFacts]:
    """Read facts of workloads from the columns of `rows`, as {workload: its facts}.

    A workload is left out if none of its facts is known. If the rows of a workload differ in a
    fact, the last known value counts.

    rows: rows of runs or of workloads.
    """
    shape = ["parameters", "layers", "hidden", "sequence"]
    columns = [*shape, "gradient_bytes", "checkpoint_bytes", "flops_per_sample"]
    divided = [f"divided_{name}" for name in Volumes._fields]
    table = rows.reindex(columns=["workload", *columns, "vocabulary", *divided])
    table = table.set_index("workload").apply(pd.to_numeric, errors="coerce")
    known = table.where(table > 0).groupby(level=0).last().dropna(how="all", subset=columns)
    return {
        str(name): WorkloadFacts(
            gradient_bytes=facts["gradient_bytes"] or 4.0 * facts["parameters"],  # fp32
            checkpoint_bytes=facts["checkpoint_bytes"],
            flops=facts["flops_per_sample"],
            transformer=Transformer(*(facts[each] for each in (*shape, "vocabulary")))
            if all(facts[each] for each in shape)
            else None,
            divided=Volumes(*(facts[each] for each in divided)),
        )
        for name, facts in known.fillna(0.0).to_dict("index").items()
    }


def workload_facts(data: TrainingData) -> dict[str, WorkloadFacts]:
    """Collect the facts of workloads from all measurements, as {workload: its facts}.

    If gradient buckets were profiled, `gradient_bytes`, `hidden_part` and `last_bucket_bytes` come
    from the profile. Other facts come from `data.workloads` if known there, else from `data.runs`.
    A workload is left out if none of its facts is known.
    """
    found = facts_of(pd.concat([data.runs, data.workloads]))
    for workload, rows in data.buckets.groupby("workload") if len(data.buckets) else ():
        ordered = rows.groupby("bucket")[["bytes", "ready_fraction"]].median().sort_index()
        size = ordered["bytes"].to_numpy(float)
        found[str(workload)] = replace(
            found.get(str(workload), WorkloadFacts()),
            gradient_bytes=float(size.sum()),
            hidden_part=BACKWARD_SHARE * (1 - float(ordered["ready_fraction"].min())),
            last_bucket_bytes=float(size[-1]),
        )
    return found
