"""From the frames of measurements to what is fitted: one entry a setup, buckets by workload, the learned parameters.

Where more setups were measured than are taken they are thinned evenly by workload, then by what ran on what: a workload
keeps min(its setups, cap), with the largest cap that keeps the total. By chance alone a small workload, a pilot run or
a rare instance type would vanish among a million setups of something else.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from ..domain.numeric import FloatArray, IntArray
from ..domain.setup_table import SetupArrays, column, in_one_order, read_setups

# More setups than this are thinned: the regression's cost and memory grow with them.
_MOST_SETUPS = 9000
# Backward costs about twice forward: two products to one.
BACKWARD_PART = 2 / 3


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingData:
    """One provider's frames, with the columns that the warehouse's marts of the same names document."""

    runs: pd.DataFrame
    profiles: pd.DataFrame
    buckets: pd.DataFrame
    probes: pd.DataFrame
    workloads: pd.DataFrame
    instance_types: pd.DataFrame


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRows:
    """Distinct setups with the median of their runs. `sync_s` is NaN where nobody recorded it."""

    setups: SetupArrays
    step_s: FloatArray
    sync_s: FloatArray
    repeats: FloatArray
    spread: FloatArray  # standard deviation of the log among repeats, 0 for one
    types: tuple[str, ...]  # every instance type that any frame mentions
    run_ids: tuple[str, ...]
    provider: str

    def take(self, picked: np.ndarray[tuple[int, ...], np.dtype[np.intp]]) -> TrainingRows:
        """The rows at these positions."""
        return replace(
            self,
            setups=self.setups.take(picked),
            step_s=self.step_s[picked],
            sync_s=self.sync_s[picked],
            repeats=self.repeats[picked],
            spread=self.spread[picked],
        )


def definition_digests(frame: pd.DataFrame, name: str) -> dict[str, str]:
    """Digests in the frame `workloads` or `instance_types` by the column `name`; unknown ones are left out."""
    if "digest" not in frame or not len(frame):
        return {}
    defined = frame[frame["digest"].notna()]
    return {str(one): str(digest) for one, digest in zip(defined[name], defined["digest"], strict=True)}


def valid_runs(runs: pd.DataFrame) -> pd.DataFrame:
    """Runs of plain ddp in fp32 with a positive finite step time; the others cannot be learned from."""
    if "step_s" not in runs.columns or not len(runs):
        return runs.iloc[:0]
    step = pd.to_numeric(runs["step_s"], errors="coerce").to_numpy(float)
    good = np.isfinite(step) & (step > 0)
    for name, only in (("strategy", "ddp"), ("precision", "fp32")):
        good &= np.array([str(one) in (only, "") for one in column(runs, name, only)], dtype=bool)
    return runs.iloc[np.flatnonzero(good)]


def training_rows(data: TrainingData, *, seed: int) -> TrainingRows:
    """Read the runs, pool repeats of a setup, thin them where there are many.

    Raises ValueError on several providers.
    """
    providers = {str(one) for frame in (data.runs, data.profiles) if "provider" in frame for one in frame["provider"]}
    if len(providers) > 1:
        raise ValueError(f"measurements of several providers are never pooled: {', '.join(sorted(providers))}")
    runs = valid_runs(data.runs)
    devices = {}
    if "devices" in data.instance_types:
        devices = {str(one["name"]): int(one["devices"] or 1) for one in data.instance_types.to_dict("records")}
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
        seen |= {part.split("x", 1)[-1] for one in data.probes["cluster"] for part in str(one).split("+")}
    return TrainingRows(
        setups=setups,
        step_s=pooled["step_s"].to_numpy(float),
        sync_s=pooled["sync_s"].to_numpy(float),
        repeats=pooled["repeats"].to_numpy(float),
        spread=np.nan_to_num(pooled["spread"].to_numpy(float)),
        types=tuple(sorted(seen)),
        run_ids=tuple(str(one) for one in column(runs, "run_id", "") if str(one)),
        provider=next(iter(providers), "local"),
    )


@dataclass(frozen=True, slots=True)
class Exchange:
    """What a workload exchanges: bytes of its gradients, 0 where unknown; the part of one device's seconds that comes
    after its first bucket is ready, and the bytes of its last one, NaN where nobody recorded buckets.
    """

    gradient_bytes: float
    hidden_part: float = float("nan")
    last_bucket_bytes: float = float("nan")


def exchanges(data: TrainingData) -> dict[str, Exchange]:
    """By workload, of all whose buckets or gradient bytes are known."""
    sizes = {name: 4.0 * many for name, many in _facts(data, "parameters").items()}  # fp32
    found = {name: Exchange(size) for name, size in (sizes | _facts(data, "gradient_bytes")).items()}
    for workload, rows in data.buckets.groupby("workload") if len(data.buckets) else ():
        ordered = rows.groupby("bucket")[["bytes", "ready_fraction"]].median().sort_index()
        size = ordered["bytes"].to_numpy(float)
        found[str(workload)] = Exchange(
            gradient_bytes=float(size.sum()),
            hidden_part=BACKWARD_PART * (1 - float(ordered["ready_fraction"].min())),
            last_bucket_bytes=float(size[-1]),
        )
    return found


def flops_per_sample(data: TrainingData) -> dict[str, float]:
    """Operations of forward and backward by workload, where anybody told."""
    return _facts(data, "flops_per_sample")


def _facts(data: TrainingData, name: str) -> dict[str, float]:
    """A positive figure by workload: what the workloads' own frame says, else what the runs say."""
    facts: dict[str, float] = {}
    for frame in (data.runs, data.workloads):
        if name in frame and "workload" in frame:
            known = frame[pd.to_numeric(frame[name], errors="coerce") > 0]
            facts |= {str(one): float(value) for one, value in zip(known["workload"], known[name], strict=True)}
    return facts


def thinned(setups: pd.DataFrame, *, most: int, seed: int) -> IntArray:
    """Positions of at most `most` setups, ascending: of all where there are no more.

    `setups` has workload, cluster and layout, the machines in one order. More than `most` workloads keep one setup
    each. Of a workload that is thinned, setups of one device come first, up to half of its share, since all others
    start from what these say. Instance types take turns, and so do the arrangements of the same types.
    """
    if len(setups) <= most:
        return np.arange(len(setups))
    chance = np.random.default_rng(seed).permutation(len(setups))
    workload, cluster, layout = (pd.factorize(setups[name]) for name in ("workload", "cluster", "layout"))
    alone = (np.asarray(layout[1]) == "1")[layout[0]].astype(np.intp)
    types = pd.factorize(np.array([_types(one) for one in cluster[1]], dtype=object))[0][cluster[0]]
    kind = _numbered(workload[0], alone, types)
    turn = _places(kind, _places(_numbered(kind, cluster[0], layout[0]), chance), chance)
    cap = _cap(np.bincount(workload[0]), most)
    early = _places(_numbered(workload[0], alone), turn, chance) < max(cap // 2, 1)
    rank = np.where(alone == 0, 1, np.where(early, 0, 2))  # more of one device only where nothing else is left
    return np.flatnonzero(_places(workload[0], rank, turn, chance) < cap)


def _cap(counts: IntArray, most: int) -> int:
    """The largest number of setups that each workload may keep, at least 1, for all to keep `most`, below their sum."""
    ascending = np.sort(counts)
    before = np.cumsum(ascending) - ascending
    caps = (most - before) // np.arange(len(counts), 0, -1)  # where this one is cut, and all that have more
    return max(int(caps[np.flatnonzero(caps < ascending)[0]]), 1)


def _places(group: IntArray, *keys: IntArray) -> IntArray:
    """(rows,) how many rows of the same group come before each, by the first key, ties by the next."""
    order = np.lexsort((*keys[::-1], group))
    sizes = np.bincount(group)
    starts = np.cumsum(sizes) - sizes
    places = np.empty(len(group), dtype=np.intp)
    places[order] = np.arange(len(group)) - starts[group[order]]
    return places


def _numbered(*codes: IntArray) -> IntArray:
    """(rows,) one number for each combination that some row has, from 0."""
    left, *others = codes
    for right in others:
        left = np.unique(left * (right.max() + 1) + right, return_inverse=True)[1]
    return left


def _types(cluster: str) -> str:
    """Instance types whatever the number of machines: `a+b` of `2xa+1xb`."""
    return "+".join(sorted({part.split("x", 1)[-1] for part in cluster.split("+")}))
