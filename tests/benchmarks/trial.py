"""Runs made to judge Srift itself: measure given setups, and say what the champion and two baselines had expected.

Used by the flows `holdout`, `noise` and `advice`. What they measure is stored like any other run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import combinations_with_replacement
from typing import Any

import numpy as np
import pandas as pd

from models.campaign.campaign import Launch
from models.campaign.candidates import Measurement
from models.domain.cluster import Cluster, InstanceType, Offer, parse_cluster, parse_numbers
from models.domain.workload import MODES, Mode, Workload
from models.monitoring.slow_runs import TAKEN
from models.step_time.dataset import TrainingData, at_nominal_speed, by_variant
from models.step_time.machine_specs import computes
from models.step_time.model import StepTimeModel
from models.step_time.setup_arrays import as_variants, variant, variants_of
from tasks.campaign.budget import Tally
from tasks.campaign.campaign import serve_launch
from tasks.execution.collect import collect_launch
from tasks.reporting.progress import reporter
from tasks.workspace.workspace import Workspace
from tests.benchmarks.rivals import predict_compute_only, predict_trees
from warehouse.reads import mart

ITEM_S = 9.0  # at most, of one run: what a launch's deadline is reckoned by
START_S = 25.0


def launch_of(cluster: Cluster, items: Iterable[Unseen], reason: str) -> Launch:
    """A launch that measures exactly `items`, in order; the same setup may stand there more than once."""
    wanted = tuple(
        Measurement(
            kind="train",
            workload=item.workload,
            mode=item.mode,
            nodes=item.nodes,
            batches=item.batches,
            accumulation_steps=item.accumulation_steps,
            message_bytes=(),
            reason=reason,
            est_s=ITEM_S,
        )
        for item in items
    )
    est_s = START_S + ITEM_S * len(wanted)
    return Launch(
        cluster=cluster,
        items=wanted,
        est_s=est_s,
        est_usd=(cluster.total_usd_per_hour or 0.0) * est_s / 3600.0,
        reason=reason,
    )


def measure_all(here: Workspace, launches: Sequence[Launch], trial_id: str) -> pd.DataFrame:
    """Serve `launches` and return their measured runs (the mart's columns and taken_share), in order of run id."""
    # twice: what a host disturbs is measured again
    tally = Tally(
        cap_usd=float("inf"), stop_at=time.monotonic() + 2 * sum(one.est_s for one in launches)
    )
    reporter().start(sum(len(launch.items) for launch in launches))
    for number, launch in enumerate(launches):
        served = serve_launch(here, launch, f"{trial_id}-{number:02d}", tally)
        tally.add(served, collect_launch(here, served, trial_id, datetime.now(UTC)), load_s=0.0)
        reporter().say(
            f"  {launch.cluster.name}: {len(served.recorded)} of {len(launch.items)} runs, {served.outcome}"
        )
    reporter().stop()
    runs = mart(here.warehouse, "runs", provider=here.provider.name)
    details = mart(here.warehouse, "run_details", provider=here.provider.name)[
        ["run_id", "taken_share"]
    ]
    own = runs[runs["run_id"].str.startswith(trial_id)].merge(details, on="run_id", how="left")
    return own.sort_values("run_id").reset_index(drop=True)


def keys_of(runs: pd.DataFrame) -> set[Key]:
    """What has been measured, as the seeded rule of `tests.benchmarks.trial` knows setups."""
    found = set()
    for workload, row in zip(variants_of(runs), runs.itertuples(), strict=True):
        types = parse_cluster(str(row.cluster))
        batches = parse_numbers(str(row.batch_per_device), len(types), "batch_per_device")
        found.add(key(workload, types, batches))
    return found


Predict = Callable[[pd.DataFrame], np.ndarray[tuple[int, ...], np.dtype[np.float64]]]


def compare(model: StepTimeModel, data: TrainingData, measured: pd.DataFrame) -> pd.DataFrame:
    """`measured` with the champion's prediction and interval, and both baselines fitted on the same training data.

    And `nominal_step_s`, what was measured at the nominal speed of its machines, which is what is predicted.
    """
    setups = measured.drop(
        columns=["step_s", "sync_s", "step_spread", "taken_share"], errors="ignore"
    )
    predicted = model.predict(setups)
    runs = pd.concat(
        [data.runs[~data.runs["run_id"].isin(measured["run_id"])], measured], ignore_index=True
    )
    nominal = (
        at_nominal_speed(replace(data, runs=runs)).runs["step_s"].to_numpy(float)[-len(measured) :]
    )
    return measured.assign(
        nominal_step_s=nominal,
        predicted_step_s=predicted["step_s"].to_numpy(),
        low_s=predicted["step_low_s"].to_numpy(),
        high_s=predicted["step_high_s"].to_numpy(),
        compute_only_s=predict_compute_only(by_variant(data), as_variants(setups)),
        trees_s=predict_trees(by_variant(data), as_variants(setups)),
    )


def summary(compared: pd.DataFrame) -> pd.DataFrame:
    """Relative errors of the champion and the baselines, the champion's by kind of setup and by mode too; coverage and
    the median width of its intervals. At nominal speed: the same beside what was measured at the nominal speed of the
    machines. Undisturbed are runs of whose processor time less than a tenth was taken away (node/measuring.py).
    """
    mixed = compared["cluster"].str.contains("+", regex=False)
    rows = [_scored("champion", "predicted_step_s", compared)]
    if "nominal_step_s" in compared and not compared["nominal_step_s"].equals(compared["step_s"]):
        nominal = compared.assign(step_s=compared["nominal_step_s"])
        rows.append(_scored("  at nominal speed", "predicted_step_s", nominal))
    for name, own in (
        ("of one type", ~mixed),
        ("mixed types", mixed),
        ("undisturbed", compared["taken_share"] < TAKEN),
    ):
        if own.any() and not own.all():
            rows.append(_scored(f"  {name}", "predicted_step_s", compared[own]))
    if set(Mode._fields) <= set(compared):
        modes = {
            str(Mode(*map(str, one))): own
            for one, own in compared.groupby(list(Mode._fields), sort=False)
        }
        rows += [
            _scored(f"  {name}", "predicted_step_s", own)
            for name, own in modes.items()
            if len(modes) > 1
        ]
    rows += [
        _scored("compute only", "compute_only_s", compared),
        _scored("boosted trees", "trees_s", compared),
    ]
    return pd.DataFrame(rows)


def _scored(name: str, column: str, compared: pd.DataFrame) -> dict[str, Any]:
    measured = compared["step_s"]
    error = np.abs(compared[column].to_numpy(float) / measured.to_numpy(float) - 1.0)
    row = {
        "model": name,
        "rows": len(error),
        "mean": error.mean(),
        "median": np.median(error),
        "p90": np.quantile(error, 0.9),
        "worst": error.max(),
    }
    if column != "predicted_step_s":
        return row
    covered = (compared["low_s"] <= measured) & (measured <= compared["high_s"])
    width = (compared["high_s"] - compared["low_s"]) / compared["predicted_step_s"]
    return row | {"coverage_90": covered.mean(), "median_width": width.median()}


FRACTIONS = (0.375, 0.5, 0.75, 1.0, 1.25)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unseen:
    """One setup to measure on a cluster: the instances that take part and the samples each sees in a step."""

    workload: str
    nodes: tuple[int, ...]
    batches: tuple[int, ...]
    accumulation_steps: int = 1
    mode: Mode = MODES[0]


Key = tuple[str, tuple[tuple[str, int], ...]]


def key(workload: str, types: Sequence[str], batches: Sequence[int]) -> Key:
    """Identity of a setup with the order of its machines forgotten."""
    return workload, tuple(sorted(zip(types, batches, strict=True)))


def draw(
    workloads: Sequence[Workload],
    offers: Sequence[Offer],
    *,
    max_hosts: int,
    fits: Callable[[Cluster], str],
    measured: Collection[Key],
    count: int,
    seed: int,
) -> list[tuple[Cluster, tuple[Unseen, ...]]]:
    """At least `count` setups (fewer only if there are no more), grouped by the cluster that serves them.

    Each is in a mode that its workload tolerates and its machines can train in, all of them as likely.
    """
    rng = np.random.default_rng(seed)
    seen = set(measured)
    drawn: list[tuple[Cluster, tuple[Unseen, ...]]] = []
    total = 0
    for cluster in _clusters_in_turn(offers, max_hosts, fits, rng):
        if total >= count:
            break
        items = _setups(cluster, workloads, seen, rng)
        if items:
            drawn.append((cluster, items))
            total += len(items)
    return drawn


def at_one_batch(
    workloads: Sequence[Workload],
    offers: Sequence[Offer],
    *,
    max_hosts: int,
    fits: Callable[[Cluster], str],
    measured: Collection[Key],
    clusters: int,
    seed: int,
) -> list[tuple[Cluster, tuple[Unseen, ...]]]:
    """Every host alone and up to `clusters` clusters of several, with every workload at its least global batch.

    The batch is split by cores. What was measured already is left out, and so is a cluster with nothing left.
    """
    rng = np.random.default_rng(seed)
    drawn: list[tuple[Cluster, tuple[Unseen, ...]]] = []
    alone = [
        cluster for cluster in (Cluster(members=(offer,)) for offer in offers) if not fits(cluster)
    ]
    for cluster in [*alone, *_clusters_in_turn(offers, max_hosts, fits, rng)[:clusters]]:
        types = [member.instance_type for member in cluster.members]
        items = []
        for workload in workloads:
            batches = split_by_cores([one.cores for one in types], workload.global_batch_least)
            if key(workload.name, [one.name for one in types], batches) not in measured:
                items.append(
                    Unseen(workload=workload.name, nodes=tuple(range(len(types))), batches=batches)
                )
        if items:
            drawn.append((cluster, tuple(items)))
    return drawn


def _clusters_in_turn(
    offers: Sequence[Offer],
    max_hosts: int,
    fits: Callable[[Cluster], str],
    rng: np.random.Generator,
) -> list[Cluster]:
    """All clusters of two hosts or more, one from each stratum in turn, in random order within a stratum."""
    strata: dict[tuple[int, bool], list[Cluster]] = {}
    ordered = sorted(
        offers, key=lambda offer: (-offer.instance_type.cores, offer.instance_type.name)
    )
    for size in range(2, max_hosts + 1):
        for members in combinations_with_replacement(ordered, size):
            cluster = Cluster(members=members)
            if not fits(cluster):
                strata.setdefault((size, len(set(members)) == 1), []).append(cluster)
    queues = [
        [group[i] for i in rng.permutation(len(group))] for _, group in sorted(strata.items())
    ]
    turns = max((len(queue) for queue in queues), default=0)
    return [queue[turn] for turn in range(turns) for queue in queues if turn < len(queue)]


def _setups(
    cluster: Cluster, workloads: Sequence[Workload], seen: set[Key], rng: np.random.Generator
) -> tuple[Unseen, ...]:
    hosts = tuple(range(len(cluster.members)))
    wanted = [
        (w, hosts, f) for w in workloads for f in rng.choice(FRACTIONS, size=2, replace=False)
    ]
    for _ in range(2):
        size = int(rng.integers(1, len(hosts)))
        nodes = tuple(sorted(int(i) for i in rng.choice(len(hosts), size=size, replace=False)))
        wanted.append((workloads[int(rng.integers(len(workloads)))], nodes, rng.choice(FRACTIONS)))
    kept = []
    for workload, nodes, fraction in wanted:
        types = [cluster.members[node].instance_type for node in nodes]
        modes = [one for one in workload.modes if _trains(types, one)]
        if not modes:
            continue
        mode = modes[int(rng.integers(len(modes))) if len(workload.modes) > 1 else 0]
        batches = split_by_cores(
            [t.cores for t in types], round(float(fraction) * workload.global_batch_least)
        )
        identity = key(variant(workload.name, mode), [t.name for t in types], batches)
        if identity not in seen:
            seen.add(identity)
            kept.append(Unseen(workload=workload.name, mode=mode, nodes=nodes, batches=batches))
    return tuple(kept)


def _trains(types: Sequence[InstanceType], mode: Mode) -> bool:
    """One device shares nothing, and each must compute in the mode."""
    several = sum(one.devices for one in types) > 1
    return (several or not mode.sharded) and all(computes(one.device, mode) for one in types)


def split_by_cores(cores: Sequence[float], total: int) -> tuple[int, ...]:
    """`total` samples in proportion to `cores`, by largest remainder, at least one each (so `total` >= len(cores))."""
    share = np.asarray(cores, dtype=float) / sum(cores) * total
    batches = np.maximum(1, np.floor(share)).astype(int)
    for i in np.argsort(batches - share, kind="stable")[: max(0, total - int(batches.sum()))]:
        batches[i] += 1
    return tuple(int(batch) for batch in batches)
