"""Stated hours of jobs on spot machines against records that were not learned from.

Checkpoint seconds and step times of held-out networks, and jobs replayed on recorded spot prices: a
machine bids (1 + margin) times the price at its launch and is lost when the price rises above it;
its replacement bids anew. Needs the files of ../shared/data.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import typer

from models.domain.cluster import Pool as Offered
from models.domain.numeric import Z_90, FloatArray
from models.job.capacity import fit_startup
from models.job.checkpoints import best_interval, fit_checkpoints, pieces, write_seconds
from models.job.duration import drawn_hours, expected_hours
from models.job.interruption_rates import HazardModel, fit_hazard
from models.job.job_conditions import JobConditions
from tests.benchmarks.claims import Claim, Write, report, show
from tests.benchmarks.held_out import DATA
from tests.benchmarks.scores import Group, figures, score
from tests.frames import data_of

Pool = tuple[str, str]  # instance type and zone
WINDOW_HOURS, FOLDS = 24.0, 4  # exposure is counted by the day; folds of zones
MARGINS = (0.0, 0.005, 0.01, 0.02)  # of bids above the price at launch
_LENGTHS_H = (2.0, 72.0)  # of work, log-uniform
_MOST_ZONES, _MOST_MACHINES = 3, 4  # of a gang, and in each of its zones
_ROOM = 1.5  # the record goes on for so many times a job's work
_DRAWS = 400
# The launches were of machines with these devices; the prices are of EC2 families like them.
_FAMILY = {"K80": "p2", "P100": "p3"}
_MARKETS = {"on_demand": "on-demand", "preemptible": "spot"}


@dataclass(frozen=True, kw_only=True)
class Prices:
    """Price changes of one pool: hours since the record's start, ascending, and dollars an hour."""

    hours: FloatArray
    usd: FloatArray

    def losses(self, start: float, end: float, margin: float) -> list[float]:
        """Hours within (start, end] at which a machine kept running from `start` is lost."""
        found: list[float] = []
        at = max(int(np.searchsorted(self.hours, start, side="right")) - 1, 0)
        bid = (1 + margin) * self.usd[at]
        for hour, usd in zip(self.hours[at + 1 :], self.usd[at + 1 :], strict=True):
            if hour > end:
                break
            if usd > bid:
                found.append(float(hour))
                bid = (1 + margin) * usd
        return found


@dataclass(frozen=True, kw_only=True)
class Job:
    """A simulated job: its machines, hours of work, start in the record, and drawn seconds."""

    machines: tuple[Pool, ...]
    work_hours: float
    start: float
    checkpoint_mb: float
    checkpoint_s: float
    startup_s: float
    replacement_s: float


def read_prices(path: Path) -> dict[Pool, Prices]:
    """Prices by instance type and zone."""
    rows = pd.read_csv(path)
    moment = pd.to_datetime(rows["timestamp_utc"])
    rows = rows.assign(hours=(moment - moment.min()).dt.total_seconds() / 3600)
    by = rows.sort_values("hours").groupby(["instance_type", "availability_zone"])
    return {
        (str(kind), str(zone)): Prices(
            hours=rows["hours"].to_numpy(float), usd=rows["spot_usd_per_h"].to_numpy(float)
        )
        for (kind, zone), rows in by
    }


def read_launches(path: Path, instance_types: list[str]) -> pd.DataFrame:
    """Columns instance_type, market, seconds: each launch for every type of its family."""
    rows = pd.read_csv(path).rename(columns={"total_s": "seconds"})
    rows = rows.assign(market=rows["mode"].map(_MARKETS), family=rows["gpu"].map(_FAMILY))
    types = pd.DataFrame({"instance_type": instance_types})
    types["family"] = types["instance_type"].str.split(".").str[0]
    return rows.merge(types, on="family")[["instance_type", "market", "seconds"]]


def read_checkpoints(path: Path) -> pd.DataFrame:
    """Columns group (the network), mb, seconds."""
    names = {"model": "group", "checkpoint_mb": "mb", "checkpoint_s": "seconds"}
    return pd.read_csv(path)[list(names)].rename(columns=names)


def learn(prices: Mapping[Pool, Prices], end: float, margin: float) -> HazardModel:
    """The hazard of machines launched in every pool each day until `end`."""
    rows = []
    for (kind, zone), pool in prices.items():
        last = end - WINDOW_HOURS + 1e-9
        for begin in np.arange(max(0.0, float(pool.hours[0])), last, WINDOW_HOURS).tolist():
            lost = pool.losses(begin, begin + WINDOW_HOURS, margin)
            rows.append((kind, zone, WINDOW_HOURS, len(lost)))
    windows = pd.DataFrame(rows, columns=["instance_type", "zone", "hours", "interruptions"])
    # a price takes all machines of a pool at once
    count = int(windows["interruptions"].sum())
    return fit_hazard(
        windows, together=pd.DataFrame({"machines": [2] * count, "lost": [2] * count})
    )


def jobs(
    prices: Mapping[Pool, Prices],
    start: float,
    end: float,
    *,
    count: int,
    seed: int,
    startups: Mapping[str, FloatArray],
    checkpoints: pd.DataFrame,
) -> Iterator[Job]:
    """Draw `count` jobs of all lengths, gangs, zones and starts within the record.

    A gang may span zones of one type and region. Its last machine decides its start-up.
    """
    random, pools = np.random.default_rng(seed), sorted(prices)
    groups = [group for _, group in checkpoints.groupby("group")]
    while count:
        work = float(np.exp(random.uniform(*np.log(_LENGTHS_H))))
        kind, zone = pools[random.integers(len(pools))]
        same = [pool for pool in pools if pool[0] == kind and pool[1][:-1] == zone[:-1]]
        others = [pool for pool in same if pool[1] != zone]
        picked = random.permutation(len(others))[: random.integers(_MOST_ZONES)]
        zones = [(kind, zone), *(others[at] for at in picked)]
        first = max(start, *(float(prices[zone].hours[0]) for zone in zones))
        rows = groups[random.integers(len(groups))]
        begin = random.uniform(first, max(end - _ROOM * work, first))
        each = int(random.integers(1, _MOST_MACHINES + 1))
        gang = each * len(zones)
        drawn = random.choice(startups[kind], 2 * gang)
        if begin + _ROOM * work > end:
            continue
        count -= 1
        yield Job(
            machines=tuple(zone for zone in zones for _ in range(each)),
            work_hours=work,
            start=float(begin),
            checkpoint_mb=float(rows["mb"].iloc[0]),
            checkpoint_s=float(random.choice(rows["seconds"])),
            startup_s=float(drawn[:gang].max()),
            replacement_s=float(random.choice(drawn[gang:])),
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
    """Hours from request to end of work, given the hours of `interruptions` since the request.

    An interruption during start-up starts it anew. A checkpoint is written every
    `interval_hours` of work, none after the last piece. `replacement_hours` is from an
    interruption to work again.
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
        # a piece that ends within rounding of the moment counts as written
        done += int((moment - working_from + 1e-10) // (piece + checkpoint_hours))
        working_from, started = moment + replacement_hours, True
    return end()


def replay(
    simulated: Iterable[Job], prices: Mapping[Pool, Prices], known: JobConditions, *, margin: float
) -> pd.DataFrame:
    """Stated and actual hours of each job: expected, p90, actual, interruptions."""
    rows = []
    for job in simulated:
        zones = list(dict.fromkeys(job.machines))
        counts = np.array([[job.machines.count(pool) for pool in zones]], dtype=np.int64)
        offered = [Offered(kind, "spot", zone, 0.0) for kind, zone in zones]
        conditions = known.gangs(offered, counts, 1e6 * job.checkpoint_mb)
        work = np.full((1, _DRAWS), job.work_hours)
        drawn = drawn_hours(work, [job.work_hours], conditions, seed=0)
        until = job.start + 2 * job.work_hours + 24
        moments = [
            moment - job.start
            for pool in zones
            for moment in prices[pool].losses(job.start, until, margin)
        ]
        write_hours, hazard = conditions.checkpoint_s[0] / 3600, conditions.hazard_per_hour[0]
        actual = hours_given(
            moments,
            work_hours=job.work_hours,
            interval_hours=float(best_interval(write_hours, hazard)),
            startup_hours=job.startup_s / 3600,
            checkpoint_hours=job.checkpoint_s / 3600,
            replacement_hours=(job.replacement_s + job.checkpoint_s) / 3600,
        )
        expected = float(expected_hours([job.work_hours], conditions)[0])
        interruptions = sum(moment < actual for moment in moments)
        rows.append((expected, float(np.quantile(drawn, 0.9)), actual, interruptions))
    return pd.DataFrame(rows, columns=["expected", "p90", "actual", "interruptions"])


def replay_scores(
    prices: Mapping[Pool, Prices],
    checkpoints: pd.DataFrame,
    launches: pd.DataFrame,
    *,
    margin: float,
    count: int,
    seed: int,
) -> pd.DataFrame:
    """`count` jobs on the later half of the record, learned from the first, and on held-out zones.

    Half of each type's launches teach the start-up; jobs draw from the others.
    """
    number = launches.groupby("instance_type").cumcount()
    spot = launches["market"] == "spot"
    startup = fit_startup(launches[spot & (number % 2 == 0)].assign(machines=1))
    unseen = {
        str(kind): group["seconds"].to_numpy(float)
        for kind, group in launches[spot & (number % 2 == 1)].groupby("instance_type")
    }
    end = max(float(pool.hours[-1]) for pool in prices.values())

    def played(
        held: Sequence[Pool], taught: Sequence[Pool], until: float, start: float, seed_offset: int
    ) -> pd.DataFrame:
        drawn = jobs(
            {pool: prices[pool] for pool in held},
            start,
            end,
            count=count // FOLDS if start == 0 else count,
            seed=seed + seed_offset,
            startups=unseen,
            checkpoints=checkpoints,
        )
        hazard = learn({pool: prices[pool] for pool in taught}, until, margin)
        return replay(drawn, prices, JobConditions(startup=startup, hazard=hazard), margin=margin)

    pools = sorted(prices)
    parts = [played(pools, pools, end / 2, end / 2, 0).assign(split="later half")]
    for fold in range(FOLDS):
        held = pools[fold::FOLDS]
        others = [pool for pool in pools if pool not in held]
        parts.append(played(held, others, end, 0.0, 1 + fold).assign(split="other zones"))
    return pd.concat(parts, ignore_index=True)


def checkpoint_scores(measured: pd.DataFrame) -> pd.DataFrame:
    """Checkpoint seconds of each group by the prior, and learned from the other groups.

    Columns as of `score`; the table is a claim.
    """
    written = measured.assign(
        workload=measured["group"].astype(str),
        instance_type="",
        bytes=1e6 * measured["mb"].astype(float),
    )
    parts = []
    for group, held in written.groupby("workload"):
        for table, learned in (("none written", False), ("other networks written", True)):
            model = fit_checkpoints(written[(written["workload"] != group) & learned])
            found = [write_seconds(model, size, [""]) for size in held["bytes"]]
            ours, log_sd = (np.array([float(each[at][0]) for each in found]) for at in (0, 1))
            spread = np.exp(Z_90 * log_sd)
            columns = {"ours": ours, "low_s": ours / spread, "high_s": ours * spread}
            rows = held.assign(**columns, table=f"checkpoint seconds, {table}", draw=0)
            parts.append(rows.rename(columns={"seconds": "measured_s"}))
    return pd.concat(parts, ignore_index=True)


def guess_scores(path: Path) -> pd.DataFrame:
    """Step seconds of each network from the others' seconds and its own FLOPs.

    The recorded step times have one batch, which is not recorded; it cancels.
    """
    names = {"model": "workload", "model_flops": "flops_per_sample", "iter_time_s": "step_s"}
    rows = pd.read_csv(path).rename(columns=names)
    rows = rows.assign(provider="ec2", cluster="1x" + rows["gpu"], batch_per_device="128")
    types = rows[["gpu", "gpu_tflops"]].drop_duplicates().assign(device=rows["gpu"])
    types = types.rename(columns={"gpu": "name", "gpu_tflops": "device_tflops"})
    data, parts = data_of(runs=rows, instance_types=types.assign(devices=1)), []
    for name in sorted(set(rows["workload"])):
        held_out = (rows["workload"] == name).to_numpy()
        group = Group(
            table="step seconds from FLOPs alone", name=name, known=~held_out, held_out=held_out
        )
        parts.append(score(data, group))
    return pd.concat(parts, ignore_index=True)


def exceeded(rows: pd.DataFrame) -> pd.DataFrame:
    """By split: jobs, interruptions a job, per cent beyond the stated p90, actual over expected."""
    by = rows.assign(beyond=100.0 * (rows["actual"] > rows["p90"])).groupby("split")
    total = by[["actual", "expected"]].sum()
    table = by.agg(
        jobs=("actual", "size"), interruptions=("interruptions", "mean"), beyond=("beyond", "mean")
    )
    return table.assign(actual_over_expected=total["actual"] / total["expected"]).reset_index()


def main(folder: Path = DATA, count: int = 600, seed: int = 2026, write: Write = False) -> None:
    """Print errors of checkpoint and step seconds, and how often jobs exceed their p90."""
    written = read_checkpoints(folder / "checkpoint_times.csv")
    scored = [checkpoint_scores(written), guess_scores(folder / "single_gpu_step_times.csv")]
    claims = []
    for name, found in figures(pd.concat(scored), ["table"]).iterrows():
        limit = 8 if "checkpoint" in str(name) else 13
        error, covers = found["mean"], found["covers"]
        result = f"{error:.1f} %; covers {covers:.0f} %"
        met = bool(error <= limit and covers >= 90)
        claims.append(Claim(str(name), f"{limit} %; covers 90 %", result, met))
    prices = read_prices(folder / "spot_prices.csv")
    launches = read_launches(folder / "vm_startup.csv", sorted({kind for kind, _ in prices}))
    for margin in MARGINS:
        rows = replay_scores(prices, written, launches, margin=margin, count=count, seed=seed)
        table = exceeded(rows)
        show(f"bids {margin:.1%} above the price", table)
        for row in table.to_dict("records"):
            beyond = float(row["beyond"])
            claim = f"jobs beyond p90, bid +{margin:.1%}, {row['split']}"
            claims.append(Claim(claim, "5 to 15 %", f"{beyond:.1f} %", 5 <= beyond <= 15))
    report("spot", claims, write=write)


if __name__ == "__main__":
    typer.run(main)
