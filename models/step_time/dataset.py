"""Turn frames of measurements into training rows (one per setup) and exchanges (one per workload).

If there are too many setups, some are left out. Each workload keeps at most `cap` setups, and they
are spread evenly across its layouts and instance types. A random choice would lose small workloads,
pilots and rare instance types.

If most runs recorded a time of the fixed work, all seconds are corrected to nominal speed. The
usual seconds of the fixed work are the median of the instance type in the warehouse:

    nominal seconds = seconds / slowness^beta,    slowness = geometric mean of reference / usual
    beta ~ N(reliability, 0.5^2) and repeats,     reliability = 1 - noise^2 / variance

`variance` is that of log slowness. `noise` is the standard deviation of one run's reference, from
its spread over blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from ..domain.numeric import FloatArray, IntArray
from ..domain.setup_table import column, in_one_order, modes_of
from ..domain.workload import MODES, UPDATES_SHARED
from .compression import in_turn, sent_everywhere
from .setup_arrays import SetupArrays, as_variants, read_setups, variant, workload_and_mode
from .tensor import NOTHING, Volumes

# Most setups in the regression, whose time and memory grow with their number.
_MOST_SETUPS = 9000
# Share of the backward pass in a step: it has two matrix products where the forward pass has one.
BACKWARD_PART = 2 / 3
_BETA_SD, _MOST_BETA = 0.5, 1.5  # prior standard deviation of beta, and its maximum
_LEAST_NOISE = 0.01  # least standard deviation of the log step time among repeats
_MEDIAN_TO_MEAN = np.pi / 2  # variance of the median over variance of the mean, if normal
_EVERYTHING = 1e18  # bytes of the last bucket if no part of the exchange can be hidden
_SETUP = ("workload", "cluster", "layout", "batch_per_device", "accumulation_steps")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingData:
    """The measurements of one provider, as frames with the columns of the warehouse's marts."""

    runs: pd.DataFrame
    profiles: pd.DataFrame
    buckets: pd.DataFrame
    probes: pd.DataFrame
    workloads: pd.DataFrame
    instance_types: pd.DataFrame


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRows:
    """Distinct setups with the median seconds of their runs at nominal speed.

    Arrays have shape (rows,), with a row per setup. `sync_s` is NaN if it is unknown. `repeats` is
    the number of runs of a setup. The speed of a machine changes over time; `speed_sd` is the
    standard deviation that these changes cause in a run's log seconds, or 0 if it is unknown.
    """

    setups: SetupArrays
    step_s: FloatArray
    sync_s: FloatArray
    repeats: FloatArray
    spread: FloatArray  # standard deviation of log seconds among repeats; 0 for a single run
    speed_sd: float
    types: tuple[str, ...]  # the instance types of all runs, profiles and probes
    run_ids: tuple[str, ...]
    provider: str


def by_variant(data: TrainingData, wanted: Iterable[str] = ()) -> TrainingData:
    """Rename each workload in the data to its group, a workload in one mode (see setup_arrays.py).

    Groups get the facts and digest of their workload. A profile is measured on one device. A group
    whose mode needs several devices therefore gets copies of the workload's profiles in the
    single-device mode. `wanted` names further groups that get such copies. Rows in unknown modes
    stay unchanged, and the model does not learn from them.
    """
    frames = {name: as_variants(getattr(data, name)) for name in ("runs", "profiles", "buckets")}
    names = {one for frame in frames.values() if len(frame) for one in frame["workload"]}
    met = {name: workload_and_mode(name) for name in sorted(names | set(wanted))}
    met = {name: (workload, mode) for name, (workload, mode) in met.items() if mode != MODES[0]}
    alone = {
        name: variant(workload, mode.alone)
        for name, (workload, mode) in met.items()
        if mode.of_several
    }
    frames["profiles"] = _with_copies(frames["profiles"], alone)
    return replace(
        data,
        **frames,
        workloads=_with_copies(data.workloads, {name: one for name, (one, _) in met.items()}),
    )


def _with_copies(frame: pd.DataFrame, of: Mapping[str, str]) -> pd.DataFrame:
    """Return the frame after copying rows of workloads under new names.

    `of` maps a new name to the workload whose rows are copied. Rows that already have the new name
    are dropped.
    """
    if not of or "workload" not in frame:
        return frame
    others = frame[~frame["workload"].isin(list(of))]
    return pd.concat(
        [
            others,
            *(others[others["workload"] == one].assign(workload=name) for name, one in of.items()),
        ],
        ignore_index=True,
    )


def definition_digests(frame: pd.DataFrame, name: str) -> dict[str, str]:
    """Return the digest of each definition in `frame`, by the definition's name.

    `name` is the column of the names. Rows without a digest are left out.
    """
    if "digest" not in frame:
        return {}
    return dict(frame[[name, "digest"]].dropna().itertuples(index=False))


def valid_runs(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the runs that have a known mode and a positive finite step time."""
    if "step_s" not in runs.columns or not len(runs):
        return runs.iloc[:0]
    step = pd.to_numeric(runs["step_s"], errors="coerce").to_numpy(float)
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

    The runs get a column `speed_sd` (see TrainingRows). The data is returned unchanged if it was
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


def training_rows(data: TrainingData, *, seed: int) -> TrainingRows:
    """Return one row per setup: the median seconds of its runs.

    If there are too many setups, `thinned` leaves some out; `seed` decides which.

    Raises:
        ValueError: if the data has rows of several providers.
    """
    providers = {
        str(one)
        for frame in (data.runs, data.profiles)
        if "provider" in frame
        for one in frame["provider"]
    }
    if len(providers) > 1:
        raise ValueError(
            f"measurements of several providers are never pooled: {', '.join(sorted(providers))}"
        )
    runs = valid_runs(data.runs)
    devices = {}
    if "devices" in data.instance_types:
        devices = {
            str(one["name"]): int(one["devices"] or 1)
            for one in data.instance_types.to_dict("records")
        }
    keys = pd.DataFrame(
        {
            "workload": column(runs, "workload", "").astype(str),
            **in_one_order(runs, devices),
            "accumulation_steps": column(runs, "accumulation_steps", 1).astype(float),
        }
    )
    numbers = keys.assign(
        step_s=pd.to_numeric(column(runs, "step_s", np.nan)).astype(float),
        sync_s=pd.to_numeric(column(runs, "sync_s", np.nan)).astype(float),
    )
    numbers["log_step"] = np.log(numbers["step_s"])
    pooled = numbers.groupby(list(keys.columns), sort=True, as_index=False).agg(
        step_s=("step_s", "median"),
        sync_s=("sync_s", "median"),
        repeats=("step_s", "size"),
        spread=("log_step", "std"),
    )
    pooled = pooled.iloc[thinned(pooled, most=_MOST_SETUPS, seed=seed)]
    setups = read_setups(pooled, devices)
    seen = setups.met_types
    if "instance_type" in data.profiles:
        seen |= {str(one) for one in data.profiles["instance_type"]}
    if "cluster" in data.probes:
        seen |= {
            part.split("x", 1)[-1] for one in data.probes["cluster"] for part in str(one).split("+")
        }
    return TrainingRows(
        setups=setups,
        step_s=pooled["step_s"].to_numpy(float),
        sync_s=pooled["sync_s"].to_numpy(float),
        repeats=pooled["repeats"].to_numpy(float),
        spread=np.nan_to_num(pooled["spread"].to_numpy(float)),
        speed_sd=float(runs["speed_sd"].iloc[0]) if "speed_sd" in runs and len(runs) else 0.0,
        types=tuple(sorted(seen)),
        run_ids=tuple(str(one) for one in column(runs, "run_id", "") if str(one)),
        provider=next(iter(providers), "local"),
    )


@dataclass(frozen=True, slots=True)
class Exchange:
    """What the devices of a workload exchange in a step.

    `gradient_bytes` is 0 if it is unknown. `hidden_part` is the fraction of one device's seconds
    that remains when the first bucket of gradients is ready. `hidden_part` and `last_bucket_bytes`
    are NaN if they are unknown. `divided` has the sizes of layers split by tensor parallelism.
    """

    gradient_bytes: float
    hidden_part: float = float("nan")
    last_bucket_bytes: float = float("nan")
    divided: Volumes = NOTHING


def exchanges(data: TrainingData) -> dict[str, Exchange]:
    """Return, by group, the exchange of each workload whose buckets or gradient bytes are known.

    Bytes are adjusted to the strategy of the group.
    """
    sizes = {name: 4.0 * many for name, many in facts_of(data, "parameters").items()}  # fp32
    found = {
        name: Exchange(size) for name, size in (sizes | facts_of(data, "gradient_bytes")).items()
    }
    volumes = [facts_of(data, f"divided_{name}") for name in Volumes._fields]
    divided = {name: Volumes(*(one.get(name, 0.0) for one in volumes)) for name in found}
    for workload, rows in data.buckets.groupby("workload") if len(data.buckets) else ():
        ordered = rows.groupby("bucket")[["bytes", "ready_fraction"]].median().sort_index()
        size = ordered["bytes"].to_numpy(float)
        found[str(workload)] = Exchange(
            gradient_bytes=float(size.sum()),
            hidden_part=BACKWARD_PART * (1 - float(ordered["ready_fraction"].min())),
            last_bucket_bytes=float(size[-1]),
        )
    return {
        name: sent(replace(one, divided=divided.get(name, NOTHING)), name)
        for name, one in found.items()
    }


def sent(one: Exchange, workload: str) -> Exchange:
    """Return the exchange of the group `workload`, adjusted to the strategy of its mode.

    `one` is the exchange of the same workload in DDP.
    """
    strategy = workload_and_mode(workload)[1].strategy
    last = _EVERYTHING if in_turn(strategy) else one.last_bucket_bytes
    if strategy == UPDATES_SHARED:  # gathers weights after the backward pass: half an all-reduce
        last += one.gradient_bytes / 2
    return replace(
        one, gradient_bytes=one.gradient_bytes * sent_part(workload), last_bucket_bytes=last
    )


def sent_part(workload: str) -> float:
    """Return the bytes that a step sends, divided by those of an all-reduce of the gradients.

    An all-reduce sends each gradient twice. `fsdp` gathers weights twice and sums gradients;
    `zero2` gathers weights once and sums gradients; `zero1` gathers weights after an all-reduce
    [D].
    """
    strategy = workload_and_mode(workload)[1].strategy
    return 1.5 if strategy in ("fsdp", UPDATES_SHARED) else sent_everywhere(strategy)


def flops_per_sample(data: TrainingData) -> dict[str, float]:
    return facts_of(data, "flops_per_sample")


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


def thinned(setups: pd.DataFrame, *, most: int, seed: int) -> IntArray:
    """Choose at most `most` setups, but at least one per workload; return their sorted positions.

    `setups` has columns workload, cluster and layout, with machines in a canonical order. Up to
    half of the setups kept for a workload are one-device setups, because predictions for several
    devices build on them. The remaining setups are taken from the instance types in turn, and from
    the layouts of each combination of types in turn.
    """
    if len(setups) <= most:
        return np.arange(len(setups))
    chance = np.random.default_rng(seed).permutation(len(setups))
    workload, cluster, layout = (
        pd.factorize(setups[name]) for name in ("workload", "cluster", "layout")
    )
    alone = (np.asarray(layout[1]) == "1")[layout[0]].astype(np.intp)
    types = pd.factorize(np.array([_types(one) for one in cluster[1]], dtype=object))[0][cluster[0]]
    kind = _numbered(workload[0], alone, types)
    order = _places(kind, _places(_numbered(kind, cluster[0], layout[0]), chance), chance)
    cap = _cap(np.bincount(workload[0]), most)
    early = _places(_numbered(workload[0], alone), order, chance) < max(cap // 2, 1)
    rank = np.where(alone == 0, 1, np.where(early, 0, 2))
    return np.flatnonzero(_places(workload[0], rank, order, chance) < cap)


def _cap(counts: IntArray, most: int) -> int:
    """Return the largest number of setups that one workload may keep, at least 1.

    `counts` is the number of setups of each workload, and `most` the total number to keep.
    """
    ascending = np.sort(counts)
    before = np.cumsum(ascending) - ascending
    # the cap if this workload and all larger workloads lose setups
    caps = (most - before) // np.arange(len(counts), 0, -1)
    return max(int(caps[np.flatnonzero(caps < ascending)[0]]), 1)


def _places(group: IntArray, *keys: IntArray) -> IntArray:
    """Return each row's rank within its group, from 0, in ascending order of the keys."""
    order = np.lexsort((*keys[::-1], group))
    sizes = np.bincount(group)
    starts = np.cumsum(sizes) - sizes
    places = np.empty(len(group), dtype=np.intp)
    places[order] = np.arange(len(group)) - starts[group[order]]
    return places


def _numbered(*codes: IntArray) -> IntArray:
    """Return a number for each row; rows get equal numbers if all their codes are equal."""
    left, *others = codes
    for right in others:
        left = np.unique(left * (right.max() + 1) + right, return_inverse=True)[1]
    return left


def _types(cluster: str) -> str:
    """Return the distinct instance types of a cluster: "2xa+1xb" gives "a+b"."""
    return "+".join(sorted({part.split("x", 1)[-1] for part in cluster.split("+")}))
