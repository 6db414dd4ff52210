"""Jobs replayed against recorded spot prices: are the stated hours kept as often as stated? Draws with a given seed.

A machine bids (1 + margin) times the price at its launch and is lost when the price rises above that; its replacement
bids anew. Interruptions so bunch as prices do: a zone in demand is lost again and again, most are never lost.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ..circumstances.checkpoints import CheckpointModel
from ..circumstances.hazard import Hazard, HazardModel, Pool, fit_hazard
from ..circumstances.interrupted import best_interval, hours_given
from ..circumstances.spot import JobTime, job_time
from ..circumstances.startup import StartupModel

Floats = NDArray[np.float64]

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
            hours=rows["hours"].to_numpy(dtype=float), usd=rows["usd_per_hour"].to_numpy(dtype=float)
        )
        for (kind, zone), rows in record.sort_values("hours").groupby(["instance_type", "zone"])
    }


def learn(prices: Mapping[Pool, Prices], start: float, end: float, margin: float, day_offset: float) -> HazardModel:
    """The hazard learned from machines kept in every pool from `start` to `end`, launched anew each day.

    `day_offset` is the hour of the day (UTC) at hour 0 of the record.
    """
    rows: list[tuple[str, str, float, int]] = []
    moments: list[float] = []
    for (kind, zone), pool in prices.items():
        for begin in np.arange(max(start, float(pool.hours[0])), end - WINDOW_HOURS + 1e-9, WINDOW_HOURS):
            lost = pool.losses(float(begin), float(begin) + WINDOW_HOURS, margin)
            rows.append((kind, zone, WINDOW_HOURS, len(lost)))
            moments += lost
    windows = pd.DataFrame(rows, columns=["instance_type", "zone", "hours", "interruptions"])
    hour = np.floor(np.array(moments) + day_offset).astype(int) % 24
    by_hour = pd.DataFrame(
        {"hour": np.arange(24), "hours": windows["hours"].sum() / 24, "interruptions": np.bincount(hour, minlength=24)}
    )
    # by the rule above all machines of a pool are lost at once
    together = pd.DataFrame({"machines": [2] * len(moments), "lost": [2] * len(moments)})
    return fit_hazard(windows, by_hour=by_hour, together=together)


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
        near = [pool for pool in pools if pool[0] == kind and pool[1][:-1] == zone[:-1] and pool[1] != zone]
        others = rng.permutation(len(near))[: rng.integers(_MOST_ZONES)]
        chosen = [(kind, zone), *(near[one] for one in others)]
        first = max(start, *(float(prices[pool].hours[0]) for pool in chosen))
        network, rows = groups[rng.integers(len(groups))]
        begin, each = rng.uniform(first, max(end - _ROOM * work, first)), int(rng.integers(1, _MOST_MACHINES + 1))
        drawn = rng.choice(startups[kind], 2 * each * len(chosen))  # the last machine of a gang decides
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


def replay(
    simulated: Sequence[Job],
    prices: Mapping[Pool, Prices],
    *,
    margin: float,
    hazard: HazardModel,
    startup: StartupModel,
    checkpoints: Mapping[str, CheckpointModel],
    day_offset: float,
    seed: int = 0,
) -> pd.DataFrame:
    """Each job's stated hours and what it took.

    Columns: work_hours, zones, interruptions, expected, p90, p90_memoryless, actual. `checkpoints` holds, by network,
    the model learned from the others. What is stated knows the job's machines, work and bytes, never its luck. Reading
    a checkpoint back is taken to last as long as writing it.
    """
    rows = []
    for job in simulated:
        gang = hazard.gang(job.machines, hours=job.work_hours, start_hour=(job.start + day_offset) % 24)
        checkpoint = checkpoints[job.network]
        stated, memoryless = (
            _stated(job, met, startup, checkpoint, seed=seed) for met in (gang, replace(gang, doubt=0.0, bunching=0.0))
        )
        write_s = float(checkpoint.seconds(job.checkpoint_mb))
        zones = dict.fromkeys(job.machines)
        moments = [
            moment - job.start
            for pool in zones
            for moment in prices[pool].losses(job.start, job.start + 2 * job.work_hours + 24, margin)
        ]
        actual = hours_given(
            moments,
            work_hours=job.work_hours,
            interval_hours=float(best_interval(write_s / 3600, gang.per_hour)),
            startup_hours=job.startup_s / 3600,
            checkpoint_hours=job.checkpoint_s / 3600,
            replacement_hours=(job.replacement_s + job.checkpoint_s) / 3600,
        )
        rows.append(
            {
                "work_hours": job.work_hours,
                "zones": len(zones),
                "interruptions": sum(moment < actual for moment in moments),
                "expected": float(stated.hours[0]),
                "p90": float(stated.hours_p90[0]),
                "p90_memoryless": float(memoryless.hours_p90[0]),
                "actual": actual,
            }
        )
    return pd.DataFrame(rows)


def _stated(job: Job, gang: Hazard, startup: StartupModel, checkpoint: CheckpointModel, *, seed: int) -> JobTime:
    """What is said of `job` beforehand, by its machines, work and bytes."""
    launch = startup.gang((kind, "spot") for kind, _ in job.machines)
    again = startup.gang([(job.machines[0][0], "spot")])
    write_s = float(checkpoint.seconds(job.checkpoint_mb))
    return job_time(
        [job.work_hours],
        [gang.per_hour],
        [np.nan],
        draws=_DRAWS,
        seed=seed,
        startup_s=launch.mean_s,
        startup_log_sd=launch.log_sd,
        checkpoint_s=write_s,
        checkpoint_log_sd=float(checkpoint.log_sd(job.checkpoint_mb)),
        replacement_s=again.mean_s + write_s,
        doubt=gang.doubt,
        bunching=gang.bunching,
    )
