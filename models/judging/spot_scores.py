"""How good are the parts of a job's hours on networks and zones that they have not seen. Chooses nothing by it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from ..circumstances.checkpoints import fit_checkpoints
from ..circumstances.hazard import Pool
from ..circumstances.startup import fit_startup
from ..first_guess import fit_first_guess
from .spot_replay import Floats, Prices, jobs, learn, replay

FOLDS = 4  # of zones, each held out once
MARGINS = (0.0, 0.005, 0.01, 0.02)  # bids above the price at launch: from the tightest, lost often, to one seldom lost


def checkpoint_scores(rows: pd.DataFrame) -> pd.DataFrame:
    """Each of `rows` (mb, seconds, group) predicted from the other groups: group, error, inside (the 90 % interval)."""
    parts = []
    for group, held in rows.groupby("group"):
        model = fit_checkpoints(rows[rows["group"] != group])
        low, high = model.interval(held["mb"])
        seconds = held["seconds"].to_numpy(dtype=float)
        error = np.abs(model.seconds(held["mb"]) / seconds - 1)
        inside = (low <= seconds) & (seconds <= high)
        parts.append(pd.DataFrame({"group": str(group), "error": error, "inside": inside}))
    return pd.concat(parts, ignore_index=True)


def guess_scores(rows: pd.DataFrame) -> pd.DataFrame:
    """Each of `rows` (as `fit_first_guess` takes them) predicted from the other workloads' FLOPs and its own.

    Columns: workload, device_tflops, error, inside, width (high over low end of the 90 % interval).
    """
    parts = []
    for workload, held in rows.groupby("workload"):
        model = fit_first_guess(rows[rows["workload"] != workload])
        asked = (held["flops_per_sample"], held["batch"], held["device_tflops"])
        middle, _ = model.seconds(*asked)
        low, high = model.interval(*asked)
        seconds = held["seconds"].to_numpy(dtype=float)
        parts.append(
            pd.DataFrame(
                {
                    "workload": str(workload),
                    "device_tflops": held["device_tflops"].to_numpy(dtype=float),
                    "error": np.abs(middle / seconds - 1),
                    "inside": (low <= seconds) & (seconds <= high),
                    "width": high / low,
                }
            )
        )
    return pd.concat(parts, ignore_index=True)


def replay_scores(
    prices: Mapping[Pool, Prices],
    checkpoints: pd.DataFrame,
    launches: pd.DataFrame,
    *,
    margin: float,
    many: int,
    seed: int,
    day_offset: float,
) -> pd.DataFrame:
    """`many` jobs on the later half of the record, learned from the first; and as many on zones held out by fold.

    `launches`: instance_type, market, seconds; half of each type's teach the start-up, jobs draw from the others.
    Columns: those of `replay`, and split, "later half" or "other zones".
    """
    number = launches.groupby("instance_type").cumcount()
    spot = launches["market"] == "spot"
    startup = fit_startup(launches[spot & (number % 2 == 0)])
    unseen: dict[str, Floats] = {
        str(kind): rows["seconds"].to_numpy(dtype=float)
        for kind, rows in launches[spot & (number % 2 == 1)].groupby("instance_type")
    }
    others = {
        str(group): fit_checkpoints(checkpoints[checkpoints["group"] != group])
        for group in checkpoints["group"].unique()
    }
    end = max(float(pool.hours[-1]) for pool in prices.values())

    def played(held: Sequence[Pool], taught: Sequence[Pool], until: float, start: float, part: int) -> pd.DataFrame:
        lucky = jobs(
            {pool: prices[pool] for pool in held},
            start,
            end,
            many=many // FOLDS if start == 0 else many,
            seed=seed + part,
            startups=unseen,
            checkpoints=checkpoints,
        )
        return replay(
            list(lucky),
            prices,
            margin=margin,
            hazard=learn({pool: prices[pool] for pool in taught}, 0.0, until, margin, day_offset),
            startup=startup,
            checkpoints=others,
            day_offset=day_offset,
        )

    pools = sorted(prices)
    parts = [played(pools, pools, end / 2, end / 2, 0).assign(split="later half")]
    for fold in range(FOLDS):
        held = pools[fold::FOLDS]
        others_of = [pool for pool in pools if pool not in held]
        parts.append(played(held, others_of, end, 0.0, 1 + fold).assign(split="other zones"))
    return pd.concat(parts, ignore_index=True)


def exceeded(scored: pd.DataFrame) -> pd.DataFrame:
    """By split: jobs, those interrupted and interruptions a job, per cent over p90 (and over a memoryless p90), and
    actual over expected hours.
    """
    rows = []
    for split, mine in scored.groupby("split"):
        rows.append(
            {
                "split": str(split),
                "jobs": len(mine),
                "interrupted_%": 100 * float((mine["interruptions"] > 0).mean()),
                "interruptions_a_job": float(mine["interruptions"].mean()),
                "over_p90_%": 100 * float((mine["actual"] > mine["p90"]).mean()),
                "over_memoryless_p90_%": 100 * float((mine["actual"] > mine["p90_memoryless"]).mean()),
                "actual_over_expected": float(mine["actual"].sum() / mine["expected"].sum()),
            }
        )
    return pd.DataFrame(rows)
