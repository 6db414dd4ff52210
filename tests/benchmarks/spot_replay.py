"""Jobs replayed against recorded spot prices: are the stated hours kept as often as stated? Draws with a given seed.

A machine bids (1 + margin) times the price at its launch and is lost when the price rises above that; its replacement
bids anew. Interruptions so bunch as prices do: a zone in demand is lost again and again, most are never lost. What is
stated is what the table states: checkpoints by the prior, start-up and hazards learned.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from models.domain.numeric import Z_90
from models.job.capacity import fit_startup
from models.job.checkpoints import fit_checkpoints
from models.job.duration import (
    best_interval,
    drawn_hours,
    expected_hours,
    pieces,
)
from models.job.interruption_rates import HazardModel, fit_hazard
from models.job.job_conditions import Learned
from models.job.job_conditions import Pool as Offered
from models.step_time.machine_specs import data_sheets, sheets_of
from models.step_time.one_device import OneDevice

Floats = NDArray[np.float64]
Pool = tuple[str, str]  # instance type and zone

WINDOW_HOURS = 24.0  # exposure is counted by the day
_LENGTHS_H = (2.0, 72.0)  # of work, log-uniform
_MOST_ZONES, _MOST_MACHINES = 3, 4  # of a gang, and in each of its zones
_ROOM = 1.5  # a job starts where the record goes on for so many times its work
_DRAWS = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Price changes of one pool: hours since the start of the record, ascending, and dollars an hour from then on."""

    hours: Floats
    usd: Floats

    def losses(self, start: float, end: float, margin: float) -> tuple[float, ...]:
        """Moments within (start, end] at which a machine kept running from `start` is lost."""
        found: list[float] = []
        at = max(int(np.searchsorted(self.hours, start, side="right")) - 1, 0)
        bid = (1 + margin) * self.usd[at]
        for hour, usd in zip(self.hours[at + 1 :], self.usd[at + 1 :], strict=True):
            if hour > end:
                break
            if usd > bid:
                found.append(float(hour))
                bid = (1 + margin) * usd
        return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One simulated job: machines in pools, hours of work, its start in hours of the record, and what luck gave it."""

    machines: tuple[Pool, ...]
    work_hours: float
    start: float
    network: str
    checkpoint_mb: float
    checkpoint_s: float
    startup_s: float
    replacement_s: float


def read_prices(record: pd.DataFrame) -> dict[Pool, Prices]:
    """Prices by (type, zone) of `record`: instance_type, zone, hours, usd_per_hour."""
    return {
        (str(kind), str(zone)): Prices(
            hours=rows["hours"].to_numpy(dtype=float),
            usd=rows["usd_per_hour"].to_numpy(dtype=float),
        )
        for (kind, zone), rows in record.sort_values("hours").groupby(["instance_type", "zone"])
    }


def learn(prices: Mapping[Pool, Prices], start: float, end: float, margin: float) -> HazardModel:
    """The hazard learned from machines kept in every pool from `start` to `end`, launched anew each day."""
    rows: list[tuple[str, str, float, int]] = []
    for (kind, zone), pool in prices.items():
        for begin in np.arange(
            max(start, float(pool.hours[0])), end - WINDOW_HOURS + 1e-9, WINDOW_HOURS
        ):
            lost = pool.losses(float(begin), float(begin) + WINDOW_HOURS, margin)
            rows.append((kind, zone, WINDOW_HOURS, len(lost)))
    windows = pd.DataFrame(rows, columns=["instance_type", "zone", "hours", "interruptions"])
    # by the rule above all machines of a pool are lost at once
    count = int(windows["interruptions"].sum())
    return fit_hazard(
        windows, together=pd.DataFrame({"machines": [2] * count, "lost": [2] * count})
    )


def jobs(
    prices: Mapping[Pool, Prices],
    start: float,
    end: float,
    *,
    many: int,
    seed: int,
    startups: Mapping[str, Floats],
    checkpoints: pd.DataFrame,
) -> Iterator[Job]:
    """`many` jobs of many lengths, gangs, zones and starts within [start, end] of the record.

    Every pool is as likely; a gang may span zones of one type and region. `startups` are recorded seconds by type
    to draw from, `checkpoints` recorded (mb, seconds, group) of which one group is drawn.
    """
    rng = np.random.default_rng(seed)
    pools = sorted(prices)
    groups = [(str(network), rows) for network, rows in checkpoints.groupby("group")]
    while many:
        work = float(np.exp(rng.uniform(*np.log(_LENGTHS_H))))
        kind, zone = pools[rng.integers(len(pools))]
        near = [
            pool
            for pool in pools
            if pool[0] == kind and pool[1][:-1] == zone[:-1] and pool[1] != zone
        ]
        others = rng.permutation(len(near))[: rng.integers(_MOST_ZONES)]
        chosen = [(kind, zone), *(near[one] for one in others)]
        first = max(start, *(float(prices[pool].hours[0]) for pool in chosen))
        network, rows = groups[rng.integers(len(groups))]
        begin, each = (
            rng.uniform(first, max(end - _ROOM * work, first)),
            int(rng.integers(1, _MOST_MACHINES + 1)),
        )
        drawn = rng.choice(
            startups[kind], 2 * each * len(chosen)
        )  # the last machine of a gang decides
        if begin + _ROOM * work <= end:
            many -= 1
            yield Job(
                machines=tuple(pool for pool in chosen for _ in range(each)),
                work_hours=work,
                start=float(begin),
                network=network,
                checkpoint_mb=float(rows["mb"].iloc[0]),
                checkpoint_s=float(rng.choice(rows["seconds"])),
                startup_s=float(drawn[: len(drawn) // 2].max()),
                replacement_s=float(rng.choice(drawn[len(drawn) // 2 :])),
            )


def hours_given(
    interruptions: Iterable[float],
    *,
    work_hours: float,
    interval_hours: float,
    startup_hours: float,
    checkpoint_hours: float,
    replacement_hours: float,
) -> float:
    """Hours from asking for the machines to the end of the work, the moments of `interruptions` being known.

    Moments are hours since the machines were asked for, in any order; those after the end do nothing. During start-up
    an interruption starts it anew. Every `interval_hours` of work a checkpoint is written; there is none after the last
    piece. `replacement_hours` is from an interruption to work going on: new machines, and the checkpoint read back.
    """
    count = int(pieces(work_hours, interval_hours))
    piece = work_hours / count
    done, working_from, started = 0, startup_hours, False

    def end() -> float:
        left = count - done
        return working_from + left * piece + max(left - 1, 0) * checkpoint_hours

    for moment in sorted(interruptions):
        if moment < 0 or moment >= end():
            continue
        if moment < working_from:
            working_from = moment + (replacement_hours if started else startup_hours)
            continue
        # a millionth of a second early still counts as written: sums of floats, not physics
        done += int((moment - working_from + 1e-10) // (piece + checkpoint_hours))
        working_from, started = moment + replacement_hours, True
    return end()


def replay(
    simulated: Sequence[Job],
    prices: Mapping[Pool, Prices],
    job_conditions: Learned,
    *,
    margin: float,
    seed: int = 0,
) -> pd.DataFrame:
    """Each job's stated hours and what it took.

    Columns: work_hours, zones, interruptions, expected, p90, p90_memoryless, actual. What is stated knows the job's
    machines, work and bytes, never its luck. Reading a checkpoint back is taken to last as long as writing it.
    """
    rows = []
    for job in simulated:
        zones = list(dict.fromkeys(job.machines))
        counts = np.array([[job.machines.count(pool) for pool in zones]], dtype=np.int64)
        state_bytes = 1e6 * job.checkpoint_mb
        conditions = job_conditions.gangs(
            [Offered(kind, "spot", zone, 0.0) for kind, zone in zones], counts, state_bytes
        )
        nothing = np.zeros(1)
        certain = replace(conditions, doubt=nothing, bunching=nothing)
        work = np.full((1, _DRAWS), job.work_hours)
        p90, memoryless = (
            float(np.quantile(drawn_hours(work, [job.work_hours], one, seed=seed), 0.9))
            for one in (conditions, certain)
        )
        moments = [
            moment - job.start
            for pool in zones
            for moment in prices[pool].losses(
                job.start, job.start + 2 * job.work_hours + 24, margin
            )
        ]
        actual = hours_given(
            moments,
            work_hours=job.work_hours,
            interval_hours=float(
                best_interval(conditions.checkpoint_s[0] / 3600, conditions.hazard_per_hour[0])
            ),
            startup_hours=job.startup_s / 3600,
            checkpoint_hours=job.checkpoint_s / 3600,
            replacement_hours=(job.replacement_s + job.checkpoint_s) / 3600,
        )
        rows.append(
            {
                "work_hours": job.work_hours,
                "zones": len(zones),
                "interruptions": sum(moment < actual for moment in moments),
                "expected": float(expected_hours([job.work_hours], conditions)[0]),
                "p90": p90,
                "p90_memoryless": memoryless,
                "actual": actual,
            }
        )
    return pd.DataFrame(rows)


_MARKETS = {"on_demand": "on-demand", "preemptible": "spot"}
# The launches were of machines with these devices, the prices are of EC2 families with their peers.
_STANDS_FOR = {"K80": "p2", "P100": "p3"}
# The recorded step times all have one batch, which their file does not tell; any number does, since it cancels.
_BATCH = 128.0


def _columns(path: Path, names: dict[str, str]) -> pd.DataFrame:
    """The named columns of a CSV file under our names. Raises ValueError where one is missing."""
    rows = pd.read_csv(path)
    if missing := [name for name in names if name not in rows]:
        raise ValueError(f"{path}: no column {', '.join(missing)}")
    return rows[list(names)].rename(columns=names)


def read_step_times(path: Path) -> pd.DataFrame:
    """Columns workload, kind (of GPU), flops_per_sample, batch, device_tflops, seconds."""
    names = {
        "model": "workload",
        "gpu": "kind",
        "model_flops": "flops_per_sample",
        "gpu_tflops": "device_tflops",
    }
    rows = _columns(path, names | {"iter_time_s": "seconds"})
    return rows.assign(batch=_BATCH, kind=rows["kind"].str.lower())


def read_checkpoints(path: Path) -> pd.DataFrame:
    """Columns group (the network), mb, seconds."""
    return _columns(path, {"model": "group", "checkpoint_mb": "mb", "checkpoint_s": "seconds"})


def read_launches(path: Path, instance_types: list[str]) -> pd.DataFrame:
    """Columns instance_type, market, seconds: each launch once for every one of `instance_types` that it stands for."""
    rows = _columns(path, {"mode": "market", "gpu": "gpu", "total_s": "seconds"})
    rows["market"] = rows["market"].map(_MARKETS)
    rows["family"] = rows["gpu"].map(_STANDS_FOR)
    types = pd.DataFrame(
        {
            "instance_type": instance_types,
            "family": [one.partition(".")[0] for one in instance_types],
        }
    )
    return rows.merge(types, on="family").drop(columns=["family", "gpu"])


def read_spot_prices(path: Path) -> pd.DataFrame:
    """Columns instance_type, zone, hours since the record's start, usd_per_hour."""
    names = {
        "instance_type": "instance_type",
        "availability_zone": "zone",
        "spot_usd_per_h": "usd_per_hour",
    }
    rows = _columns(path, names | {"timestamp_utc": "at"})
    at = pd.to_datetime(rows["at"])
    return rows.drop(columns="at").assign(hours=(at - at.min()).dt.total_seconds() / 3600)


def read_buckets(path: Path, region: str) -> dict[str, int]:
    """Spot Advisor's bucket (0 to 4) of each instance type in `region`."""
    names = {"region": "region", "instance_type": "instance_type", "interruption_bucket": "bucket"}
    rows = _columns(path, names)
    mine = rows[rows["region"] == region]
    return {
        str(name): int(bucket)
        for name, bucket in zip(mine["instance_type"], mine["bucket"], strict=True)
    }


FOLDS = 4  # of zones, each held out once
MARGINS = (
    0.0,
    0.005,
    0.01,
    0.02,
)  # bids above the price at launch: from the tightest, lost often, to one seldom lost


def checkpoint_scores(rows: pd.DataFrame) -> pd.DataFrame:
    """Each of `rows` (mb, seconds, group), before any was written (`learned` False) and from the other groups' (True).

    Columns: learned, group, error, inside (90 % interval), width (its high over its low end).
    """
    written = rows.assign(
        workload=rows["group"].astype(str), instance_type="", bytes=1e6 * rows["mb"].astype(float)
    )
    parts = []
    for group, held in written.groupby("workload"):
        for learned in (False, True):
            model = fit_checkpoints(written[(written["workload"] != group) & learned])
            found = [model.seconds(size, [""]) for size in held["bytes"]]
            expected, log_sd = (np.array([float(one[at][0]) for one in found]) for at in (0, 1))
            seconds = held["seconds"].to_numpy(dtype=float)
            parts.append(
                pd.DataFrame(
                    {
                        "learned": learned,
                        "group": str(group),
                        "error": np.abs(expected / seconds - 1),
                        "inside": np.abs(np.log(seconds / expected)) <= Z_90 * log_sd,
                        "width": np.exp(2 * Z_90 * log_sd),
                    }
                )
            )
    return pd.concat(parts, ignore_index=True)


def guess_scores(rows: pd.DataFrame) -> pd.DataFrame:
    """Each of `rows` (as `read_step_times` has them) predicted from the other workloads' seconds and its own FLOPs.

    Columns: workload, device_tflops, error, inside, width (high over low end of the 90 % interval).
    """
    parts = []
    sheets = sheets_of({}, data_sheets())
    flops = dict(
        zip(rows["workload"].astype(str), rows["flops_per_sample"].astype(float), strict=True)
    )
    points = rows.assign(log_s=np.log(rows["seconds"]), sd=0.01)
    points = points.groupby(["workload", "kind", "batch"], as_index=False)[["log_s", "sd"]].median()
    for workload, held in rows.groupby("workload"):
        model = OneDevice.fit(points[points["workload"] != workload], sheets=sheets, flops=flops)
        asked = model.at(list(held["workload"]), list(held["kind"]), held["batch"].to_numpy(float))
        middle, half = model.predict(asked), Z_90 * np.sqrt(np.diag(model.covariance(asked, asked)))
        seconds = held["seconds"].to_numpy(dtype=float)
        parts.append(
            pd.DataFrame(
                {
                    "workload": str(workload),
                    "device_tflops": held["device_tflops"].to_numpy(dtype=float),
                    "error": np.abs(np.exp(middle) / seconds - 1),
                    "inside": np.abs(np.log(seconds) - middle) <= half,
                    "width": np.exp(2 * half),
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
) -> pd.DataFrame:
    """`many` jobs on the later half of the record, learned from the first; and as many on zones held out by fold.

    `launches`: instance_type, market, seconds; half of each type's teach the start-up, jobs draw from the others.
    Columns: those of `replay`, and split, "later half" or "other zones".
    """
    number = launches.groupby("instance_type").cumcount()
    spot = launches["market"] == "spot"
    startup = fit_startup(launches[spot & (number % 2 == 0)].assign(machines=1))
    unseen: dict[str, Floats] = {
        str(kind): rows["seconds"].to_numpy(dtype=float)
        for kind, rows in launches[spot & (number % 2 == 1)].groupby("instance_type")
    }
    end = max(float(pool.hours[-1]) for pool in prices.values())

    def played(
        held: Sequence[Pool], taught: Sequence[Pool], until: float, start: float, part: int
    ) -> pd.DataFrame:
        lucky = jobs(
            {pool: prices[pool] for pool in held},
            start,
            end,
            many=many // FOLDS if start == 0 else many,
            seed=seed + part,
            startups=unseen,
            checkpoints=checkpoints,
        )
        hazard = learn({pool: prices[pool] for pool in taught}, 0.0, until, margin)
        known = Learned(startup=startup, hazard=hazard)
        return replay(list(lucky), prices, known, margin=margin)

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
                "over_memoryless_p90_%": 100
                * float((mine["actual"] > mine["p90_memoryless"]).mean()),
                "actual_over_expected": float(mine["actual"].sum() / mine["expected"].sum()),
            }
        )
    return pd.DataFrame(rows)
