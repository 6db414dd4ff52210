"""The harder questions to ask of measured rows: which are known, which are to be predicted. Seeded; no model is fitted.

Each split gives masks over the rows. Groups are whole workloads, sizes or layouts: rows are drawn by chance only where
the question itself says so (between neighbours; so many random measurements).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from models.domain.numeric import BoolArray, FloatArray
from models.monitoring.backtest import backtest, described
from models.monitoring.cross_validation import inside
from models.step_time.dataset import TrainingData
from models.step_time.model import fit
from models.step_time.setup_arrays import SetupArrays, read_setups

from .setups import measured_setups, recommended_pilots

NEIGHBOURS, ALONE, PILOTS, CHOSEN, RANDOM, LARGER, UNEQUAL = (
    "neighbours",
    "one device known",
    "three pilots",
    "three recommended pilots",
    "twelve measurements",
    "larger clusters",
    "unequal layouts",
)
_NEIGHBOUR_SEEDS, _RANDOM_SEEDS, _MEASUREMENTS, _TEST_PART = 3, 5, 12, 0.2
# Sizes of the devices known and asked for in the split by cluster size.
_SIZES = ((4, 16), (8, 16))


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """`known` and `asked` are masks over the rows; `choose` pilots are measured first, of those asked for."""

    name: str
    group: str
    known: BoolArray
    asked: BoolArray
    choose: int = 0


def splits(runs: pd.DataFrame, devices: dict[str, int], *, seed: int) -> Iterator[Split]:
    """Every split of the benchmark; `devices` by instance type stands in for an empty layout."""
    setups = read_setups(runs, devices)
    workload = np.array(setups.workloads)
    alone = setups.ranks == 1
    for one in range(_NEIGHBOUR_SEEDS):
        asked = np.random.default_rng([seed, one]).random(len(runs)) < _TEST_PART
        yield Split(name=NEIGHBOURS, group=f"draw {one}", known=~asked, asked=asked)
    for name in sorted(set(setups.workloads)):
        own = workload == name
        yield Split(name=ALONE, group=name, known=~own | alone, asked=own & ~alone)
        for batch, picked in _pilots(setups, own, devices):
            yield Split(
                name=PILOTS,
                group=f"{name} at {batch:g}",
                known=~own | alone | picked,
                asked=own & ~alone & ~picked,
            )
        yield Split(name=CHOSEN, group=name, known=~own | alone, asked=own & ~alone, choose=3)
        for one in range(_RANDOM_SEEDS):
            picked = np.zeros(len(runs), dtype=bool)
            random = np.random.default_rng([seed, 100 + one])
            picked[
                random.choice(
                    np.flatnonzero(own), min(_MEASUREMENTS, int(own.sum())), replace=False
                )
            ] = True
            yield Split(
                name=RANDOM, group=f"{name} draw {one}", known=~own | picked, asked=own & ~picked
            )
    for most, size in _SIZES:
        yield Split(
            name=LARGER,
            group=f"{most} to {size} devices",
            known=setups.ranks <= most,
            asked=setups.ranks == size,
        )
    unequal = np.array([len(set(row[row > 0])) > 1 for row in setups.layout])
    yield Split(name=UNEQUAL, group="all", known=~unequal, asked=unequal)


def _pilots(
    setups: SetupArrays, own: BoolArray, devices: dict[str, int]
) -> Iterator[tuple[float, BoolArray]]:
    """One full machine, one device on each of two, two full machines: at each quartile of the batches that have all."""
    full = np.array(
        [max(devices.get(name, 1) for name in types) for types in setups.types], dtype=float
    )
    machines = setups.instances
    even = setups.layout.max(axis=1) * machines == setups.ranks
    kinds = [
        own & even & (machines == count) & (setups.ranks == count * each)
        for count, each in ((1, full), (2, np.ones_like(full)), (2, full))
    ]
    batch: FloatArray = setups.batch[:, 0]
    shared = sorted(set(batch[kinds[0]]) & set(batch[kinds[1]]) & set(batch[kinds[2]]))
    for at in sorted(
        {round(part * (len(shared) - 1)) for part in (0.25, 0.5, 0.75)} if shared else ()
    ):
        yield shared[at], (kinds[0] | kinds[1] | kinds[2]) & (batch == shared[at])


# Known rows, rows asked for, devices by instance type, to seconds.
Rival = Callable[[pd.DataFrame, pd.DataFrame, dict[str, int]], FloatArray]


def ask(
    data: TrainingData,
    split: Split,
    rivals: Mapping[str, Rival],
    devices: dict[str, int],
    *,
    seed: int,
    usd: Mapping[str, float] | None = None,
) -> pd.DataFrame:
    """The rows that `split` asks for, with our prediction and interval and each rival's prediction.

    Columns: split, group, workload, measured_s, ours, low_s, high_s, and one by rival (NaN where it gives none). Where
    the split lets pilots be chosen, they are those that `srift recommend` would name at the dollars an hour of `usd`
    (by instance type; None: a dollar a device), and everybody is given them.
    """
    known, asked = split.known.copy(), split.asked.copy()
    data = replace(data, instance_types=described(data, data.runs))
    if split.choose:
        own = np.flatnonzero(
            (data.runs["workload"] == data.runs["workload"].to_numpy()[asked][0]).to_numpy()
        )
        measured = measured_setups(
            data.runs.iloc[own], devices, usd or {name: float(n) for name, n in devices.items()}
        )
        before = fit(replace(data, runs=data.runs[known]), seed=seed)
        pilots = recommended_pilots(before, measured.setups, count=split.choose, seed=seed)
        chosen = own[measured.places[pilots]]
        known[chosen], asked[chosen] = True, False
    training, rows = data.runs[known], data.runs[asked]
    ours = backtest(replace(data, runs=training), rows, seed=seed)
    hidden = rows.drop(columns=["step_s", "sync_s"])
    return pd.DataFrame(
        {
            "split": split.name,
            "group": split.group,
            "workload": rows["workload"],
            "measured_s": rows["step_s"].astype(float),
            "ours": ours["predicted_step_s"],
            "low_s": ours["low_s"],
            "high_s": ours["high_s"],
            **{name: rival(training, hidden, devices) for name, rival in rivals.items()},
        }
    )


def errors(scored: pd.DataFrame, names: Iterable[str]) -> pd.DataFrame:
    """Mean, median and 90th percentile of |predicted / measured - 1| by split and model, in per cent."""
    found = []
    for split, own in scored.groupby("split", sort=False):
        for name in names:
            away = 100 * np.abs(own[name].to_numpy(float) / own["measured_s"].to_numpy(float) - 1)
            finite = away[np.isfinite(away)]
            figures = (
                (finite.mean(), np.median(finite), np.quantile(finite, 0.9))
                if len(finite)
                else (np.nan,) * 3
            )
            row = {"split": split, "model": name, "rows": len(finite)}
            found.append({**row, **dict(zip(("mean", "median", "p90"), figures, strict=True))})
    return pd.DataFrame(found)


def coverage(scored: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    """Part of the rows inside our 90, 80 and 50 % intervals, and the median width of the first, in per cent."""
    covered = inside(*(scored[name].to_numpy(float) for name in ("measured_s", "low_s", "high_s")))
    errors = scored.assign(
        error=100 * np.abs(scored["ours"] / scored["measured_s"] - 1),
        **{f"inside_{part}": 100.0 * found for part, found in covered.items()},
        width=100 * (scored["high_s"] - scored["low_s"]) / scored["ours"],
    )
    figures = {name: (name, "mean") for name in ("inside_90", "inside_80", "inside_50")}
    figures |= {
        "mean": ("error", "mean"),
        "median": ("error", "median"),
        "width": ("width", "median"),
    }
    return errors.groupby(by, sort=False).agg(rows=("error", "size"), **figures).reset_index()
