"""How far a workload scales, and what would hide its communication: the sizing rules of Zou et al. on measured runs.

Strong scaling, as setups are planned: a global batch B is divided over G units, which are machines of equally many
devices, or devices of one machine. T(G) is the measured step, C(b) what one unit takes for b samples.

    efficiency       T(1) / (G T(G)): throughput of G over G times that of one, at the same B
    the rule         T(G) = O + P / G;  R = O / P;  efficiency (1 + R) / (1 + G R);  largest G (1 + R - a) / (a R)
    by shares        T(G) = C(B / G) + E(G),  E(G) = E(m) (G - 1) / G * m / (m - 1)
    hidden           8 * 2 (G - 1) / G S bits within the backward pass that follows the first bucket
    servers          ceil(k S N / (B_ps T_C)), k = 2 where a server's link is half-duplex, 1 where it is not

O is overhead: what a step does not divide among units, whatever it is spent on (exchanging gradients, launching small
work, the optimizer). P is parallel time: what one unit does of a step, and G do in a Gth of the time. Both are solved
from T(1) and T(m) at the largest m that was measured: O = (m T(m) - T(1)) / (m - 1), P = T(1) - O. With one unit taking
O + P the efficiency is (O + P) / (G O + P), which is the rule, and its inverse in G the largest cluster [D].

A data-parallel step does not keep to it: one unit exchanges nothing, and a smaller share of a batch is not computed in
proportionally less time. `by shares` takes the share's time from what one unit was measured to take, and from the runs
of several only E(m) = T(m) - C(B / m), what they take beyond it, growing as a ring's bytes a link do. Where shares are
micro-steps of one size, C(B / G) = C(B) / G, and both are the same [D]: the overhead of one is the limit of the ring's.
Neither knows of an algorithm that changes with the number of machines, nor of steps waiting for input. By how much each
is right stands in `Check`: each size is predicted from the sizes below it alone.

Where B was not run on one unit and on several, it is put together of micro-steps of b samples a unit, as accumulation
does: k of them take k C(b) on one unit, and on several (k - 1) C(b) + T(b), since only the last is followed by an
exchange. One unit updates its weights a little too often by this.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import pandas as pd

from ..domain.setup_table import rows_of
from ..step_time.dataset import (
    BACKWARD_PART,
    TrainingData,
    at_nominal_speed,
    by_variant,
    exchanges,
    training_rows,
    valid_runs,
)
from ..step_time.machine_specs import Machine, read_machines
from ..step_time.memory import MemoryModel, memory_of
from ..step_time.setup_arrays import read_setups, workload_and_mode

ALPHAS = (0.9, 0.8)  # efficiencies that the largest cluster is asked for
FORMULAS = {
    "efficiency": "T(1) / (G T(G)) at the same global batch",
    "rule": "(1 + R) / (1 + G R), R = O / P, O = (m T(m) - T(1)) / (m - 1), P = T(1) - O",
    "largest_by_rule": "floor((1 + R - alpha) / (alpha R))",
    "by_shares": "T(1) / (G (C(B / G) + E(G))), E(m) = T(m) - C(B / m), E(G) = E(m) (G - 1) / G * m / (m - 1)",
    "needed_gbps": "8e-9 * 2 (G - 1) / G * gradient_bytes / hideable_s",
    "servers": "ceil(2 * gradient_bytes * workers / (server_bytes_per_s * compute_s)); 1 for 2 where full-duplex",
    "best_batch": "the measured batch of one device with most samples / step_s of those whose peak memory fits",
}
_GIB = 2.0**30
_MOST_SIZE = 4096  # units of a cluster that is asked about
_LARGEST_BATCH = 2**24  # on one device


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """T(G) = O + P / G through T(1) and T(`size`)."""

    size: int
    overhead_s: float
    parallel_s: float

    @classmethod
    def through(cls, one_s: float, size: int, step_s: float) -> Rule:
        """From seconds of one unit and of `size`, at least 2. Steps that divide too well have no overhead."""
        overhead = min(max((size * step_s - one_s) / (size - 1), 0.0), one_s)
        return cls(size=size, overhead_s=overhead, parallel_s=one_s - overhead)

    @property
    def ratio(self) -> float:
        """R; infinite where several units are no faster than one."""
        return self.overhead_s / self.parallel_s if self.parallel_s > 0 else math.inf

    def efficiency(self, size: int) -> float:
        """Of `size` units."""
        return 1 / size if math.isinf(self.ratio) else (1 + self.ratio) / (1 + size * self.ratio)

    def largest(self, alpha: float) -> int | None:
        """Units that are at least `alpha` efficient; None where nothing limits them."""
        if self.ratio == 0:
            return None
        inverse = 0.0 if math.isinf(self.ratio) else (1 - alpha) / self.ratio
        return max(math.floor((inverse + 1) / alpha + 1e-9), 1)


class Work(NamedTuple):
    """A global batch, divided as it was measured (`micro_batch` None), or in micro-steps of so many samples a unit."""

    batch: float
    micro_batch: float | None = None


class Step(NamedTuple):
    """Seconds of a step, its micro-step's samples on one unit, and whether it ran so, or is put together of others."""

    seconds: float
    micro_batch: float
    measured: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Measured steps of a workload in a mode by number of units: machines with `devices_each`, or devices of one (0).

    `steps` are median seconds by size, then by (samples of a unit in a micro-step, accumulation steps).
    """

    workload: str
    instance_type: str
    devices_each: int
    steps: Mapping[int, Mapping[tuple[float, int], float]] = field(default_factory=dict)

    def step(self, size: int, work: Work) -> Step | None:
        """Of `size` units; where several shares were measured the fastest. None where it is not known."""
        own, micro = self.steps.get(size, {}), work.micro_batch
        if micro is None:
            ran = [
                (seconds, one)
                for (one, steps), seconds in own.items()
                if size * one * steps == work.batch
            ]
            return Step(*min(ran), True) if ran else None
        count, alone = self._count(size, work), self.alone(micro)
        if count is None:
            return None
        if (micro, count) in own:
            return Step(own[micro, count], micro, True)
        if alone is None or (micro, 1) not in own:
            return None
        return Step((count - 1) * alone + own[micro, 1], micro, False)

    def share(self, size: int, work: Work) -> float | None:
        """C: seconds of one unit alone for what each of `size` has to do; None beyond the batches that it ran."""
        micro = work.micro_batch
        if micro is None:
            step = self.step(1, Work(work.batch / size))
            return self.alone(work.batch / size) if step is None else step.seconds
        count, alone = self._count(size, work), self.alone(micro)
        return None if count is None or alone is None else count * alone

    def alone(self, batch: float) -> float | None:
        """Seconds of one unit for so many samples at once, between those measured by a straight line; None beyond."""
        known = sorted(
            (micro, seconds)
            for (micro, steps), seconds in self.steps.get(1, {}).items()
            if steps == 1
        )
        if not known or not known[0][0] <= batch <= known[-1][0]:
            return None
        return float(np.interp(batch, *np.array(known).T))

    def _count(self, size: int, work: Work) -> int | None:
        """Micro-steps of each of `size` units; None where they are no whole number."""
        count = work.batch / (size * (work.micro_batch or work.batch))
        return int(count) if count >= 1 and count == int(count) else None

    def sizes(self, work: Work) -> dict[int, Step]:
        """Every size whose step is known."""
        found = {size: self.step(size, work) for size in sorted(self.steps)}
        return {size: step for size, step in found.items() if step is not None}

    @property
    def batches(self) -> list[float]:
        """Global batches that were measured on any size, ascending."""
        return sorted(
            {size * micro * count for size, own in self.steps.items() for micro, count in own}
        )

    def works(self, least: float, most: float) -> list[Work]:
        """Of global batches between these all that are known on one unit and on another size."""
        asked = [Work(batch) for batch in self.batches]
        if least == most:
            asked += [Work(least)]
        micros = sorted({micro for own in self.steps.values() for micro, _ in own})
        asked += [
            Work(batch, micro)
            for batch in dict.fromkeys(one.batch for one in asked)
            for micro in micros
        ]
        return [
            work
            for work in asked
            if least <= work.batch <= most and 1 in (known := self.sizes(work)) and len(known) > 1
        ]

    def work(self, least: float, most: float) -> Work | None:
        """Of `works` that which is known on most sizes; of these one that ran so, then the one unit's fastest."""

        def known(work: Work) -> tuple[int, bool, float, float]:
            steps = self.sizes(work)
            return len(steps), work.micro_batch is None, work.batch / steps[1].seconds, -work.batch

        return max(self.works(least, most), key=known, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A measured size beside what the measurements of smaller ones say of it; None for the smallest two."""

    size: int
    step_s: float
    put_together: bool  # of micro-steps that were measured
    efficiency: float
    by_rule: float | None
    by_shares: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Largest:
    """The largest cluster of an efficiency by the rule (None: unlimited), and by shares of those that divide the batch.

    `at_least`: one unit was measured with no smaller share, so that a larger cluster may be as efficient.
    """

    alpha: float
    by_rule: int | None
    by_shares: int
    at_least: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Hiding:
    """What would hide the exchange of gradients of the largest measured cluster; None where something is not known."""

    size: int
    gradient_bytes: float
    hideable_s: float
    needed_gbps: float | None
    stated_gbps: float | None
    exposed_s_at_stated: float | None  # by the same formula
    measured_exposed_s: float
    workers: int
    compute_s: float
    servers: int | None
    servers_full_duplex: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """How far one series scales at a global batch. Seconds; `extra_s` is E of the largest size."""

    workload: str
    instance_type: str
    devices_each: int
    global_batch: float
    micro_batch: float | None
    one_s: float
    rule: Rule
    extra_s: float | None
    checks: tuple[Check, ...]
    largest: tuple[Largest, ...]
    hiding: Hiding | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BestBatch:
    """The batch of one device that gives most samples a second of those measured, and the largest that would fit."""

    workload: str
    instance_type: str
    batch: float
    samples_per_s: float
    largest_measured: float
    largest_that_fits: int | None
    predicted_peak_bytes: float | None
    measured_peak_bytes: float | None
    memory_bytes: float | None


def series_of(data: TrainingData, workload: str, devices: Mapping[str, int]) -> list[Series]:
    """Every series of a workload's runs in plain data parallelism, each precision and switch apart.

    `data` is `by_variant`; `devices` by instance type stand in for an empty layout. Machines of several types, or with
    unequal shares, are left out. One device's profile stands in where it had no run.
    """
    runs = valid_runs(data.runs)
    named = [workload_and_mode(str(name)) for name in runs.get("workload", ())]
    runs = runs.iloc[
        [at for at, (name, mode) in enumerate(named) if name == workload and not mode.of_several]
    ]
    setups = read_setups(runs, dict(devices))
    equal = ~(
        setups.present
        & ((setups.kind != setups.kind[:, :1]) | (setups.layout != setups.layout[:, :1]))
    )
    equal &= ~(setups.present & (setups.batch != setups.batch[:, :1]))
    seconds: dict[tuple[str, str, int], dict[int, dict[tuple[float, int], list[float]]]] = {}

    def add(key: tuple[str, str, int], size: int, shape: tuple[float, int], step_s: float) -> None:
        seconds.setdefault(key, {}).setdefault(size, {}).setdefault(shape, []).append(step_s)

    for at in np.flatnonzero(equal.all(axis=1)).tolist():
        owner, name = setups.workloads[at], setups.types[at][0]
        machines, each = int(setups.instances[at]), int(setups.layout[at, 0])
        batch, steps, step_s = (
            setups.batch[at, 0],
            int(setups.accumulation[at]),
            float(runs["step_s"].iloc[at]),
        )
        add((owner, name, each), machines, (float(each * batch), steps), step_s)
        if machines == 1:
            add((owner, name, 0), each, (float(batch), steps), step_s)
    for row in rows_of(_profiled(data.profiles, workload)):
        owner, name, shape = (
            str(row["workload"]),
            str(row["instance_type"]),
            (float(row["batch"]), 1),
        )
        for each in (0, 1):
            own = seconds.get((owner, name, each), {})
            if (own or each) and shape not in own.get(1, {}):
                add((owner, name, each), 1, shape, float(row["step_s"]))
    return [
        Series(
            workload=owner,
            instance_type=name,
            devices_each=each,
            steps={
                size: {shape: float(np.median(all_s)) for shape, all_s in own.items()}
                for size, own in sizes.items()
            },
        )
        for (owner, name, each), sizes in sorted(seconds.items())
        if each or max(sizes) > 1  # else of machines with one device
    ]


def _profiled(profiles: pd.DataFrame, workload: str) -> pd.DataFrame:
    """Profiles of a workload in all modes of one device, with step_s of all parts."""
    if not len(profiles):
        return pd.DataFrame(columns=["workload", "instance_type", "batch", "step_s"])
    named = [workload_and_mode(str(name)) for name in profiles["workload"]]
    own = profiles.iloc[
        [at for at, (name, mode) in enumerate(named) if name == workload and not mode.of_several]
    ]
    return own.assign(step_s=own["forward_s"] + own["backward_s"] + own["optimizer_s"])


def efficiencies(
    series: Series, work: Work, known: Iterable[int], size: int
) -> tuple[float | None, float | None]:
    """Predicted efficiency of `size` units by the rule and by shares, from the steps of `known` sizes alone.

    Both rest on one unit and the largest of the others; None where these, or one unit's share, are not known.
    """
    one = series.step(1, work)
    steps = {
        other: step
        for other in known
        if other > 1 and (step := series.step(other, work)) is not None
    }
    if one is None or not steps:
        return None, None
    largest = max(steps)
    by_rule = Rule.through(one.seconds, largest, steps[largest].seconds).efficiency(size)
    extra, share = extra_seconds(series, work, largest), series.share(size, work)
    if extra is None or share is None:
        return by_rule, None
    ring = (size - 1) / size * largest / (largest - 1)
    return by_rule, one.seconds / (size * (share + ring * extra))


def extra_seconds(series: Series, work: Work, size: int) -> float | None:
    """E of `size` units, not below 0; None where they, or one unit's share, are not known."""
    step, share = series.step(size, work), series.share(size, work)
    return None if step is None or share is None else max(step.seconds - share, 0.0)


def scaling_of(series: Series, work: Work, data: TrainingData, machine: Machine) -> Scaling:
    """How far `series` scales at one of its `works`."""
    steps = series.sizes(work)
    one, measured = steps[1], max(steps)
    rule = Rule.through(one.seconds, measured, steps[measured].seconds)
    checks = []
    for size, step in steps.items():
        by_rule, by_shares = efficiencies(
            series, work, [other for other in steps if other < size], size
        )
        checks.append(
            Check(
                size=size,
                step_s=step.seconds,
                put_together=not step.measured,
                efficiency=one.seconds / (size * step.seconds),
                by_rule=by_rule,
                by_shares=by_shares,
            )
        )
    return Scaling(
        workload=series.workload,
        instance_type=series.instance_type,
        devices_each=series.devices_each,
        global_batch=work.batch,
        micro_batch=work.micro_batch,
        one_s=one.seconds,
        rule=rule,
        extra_s=extra_seconds(series, work, measured),
        checks=tuple(checks),
        largest=tuple(_largest(series, work, rule, alpha, machine.devices) for alpha in ALPHAS),
        hiding=_hiding(series, work, data, machine) if series.devices_each else None,
    )


def _largest(series: Series, work: Work, rule: Rule, alpha: float, devices: int) -> Largest:
    """By shares a size that was measured counts as measured, and others as predicted. A machine has no more `devices`
    than it has, or was measured with.
    """
    steps, by_rule = series.sizes(work), rule.largest(alpha)
    inside = series.devices_each == 0
    most = (
        max(devices, *series.steps)
        if inside
        else min(int(work.batch // series.devices_each), _MOST_SIZE)
    )
    reached = {size: steps[1].seconds / (size * step.seconds) for size, step in steps.items()}
    for size in range(2, most + 1):
        if size not in steps and work.batch % (size * (series.devices_each or 1)) == 0:
            predicted = efficiencies(series, work, steps, size)[1]
            reached |= {} if predicted is None else {size: predicted}
    largest = max(size for size, efficiency in reached.items() if efficiency >= alpha)
    return Largest(
        alpha=alpha,
        by_rule=min(by_rule or most, most) if inside else by_rule,
        by_shares=largest,
        at_least=largest == max(reached) and not (inside and largest == most),
    )


def _hiding(series: Series, work: Work, data: TrainingData, machine: Machine) -> Hiding | None:
    """Of the largest size that was measured; None where bytes of gradients or one unit's share are not known."""
    size = max(series.sizes(work))
    step, extra, compute = (
        series.step(size, work),
        extra_seconds(series, work, size),
        series.share(size, work),
    )
    exchange = exchanges(data).get(series.workload)
    if (
        step is None
        or extra is None
        or compute is None
        or exchange is None
        or not exchange.gradient_bytes > 0
    ):
        return None
    last = series.alone(step.micro_batch)
    hideable = (compute if last is None else last) * _hideable_part(series, data)
    traffic = 2 * (size - 1) / size * exchange.gradient_bytes
    gbps = machine.bandwidth_gbps if machine.link_known else None
    workers = size * series.devices_each
    servers = (
        None if gbps is None else servers_busy(exchange.gradient_bytes, workers, gbps, compute)
    )
    return Hiding(
        size=size,
        gradient_bytes=exchange.gradient_bytes,
        hideable_s=hideable,
        needed_gbps=8e-9 * traffic / hideable
        if hideable > 0
        else None,  # none: all gradients come last
        stated_gbps=gbps,
        exposed_s_at_stated=None if gbps is None else max(8e-9 * traffic / gbps - hideable, 0.0),
        measured_exposed_s=extra,
        workers=workers,
        compute_s=compute,
        servers=None if servers is None else math.ceil(2 * servers),
        servers_full_duplex=None if servers is None else math.ceil(servers),
    )


def servers_busy(gradient_bytes: float, workers: int, gbps: float, compute_s: float) -> float:
    """Parameter servers of `gbps` that `workers` keep busy for their `compute_s` in sending, or in receiving."""
    return gradient_bytes * workers / (gbps * 1e9 / 8 * compute_s)


def _hideable_part(series: Series, data: TrainingData) -> float:
    """Of one unit's step the backward pass that follows its first bucket: as profiled, else two thirds of the step."""
    profiled = _profiled(data.profiles, workload_and_mode(series.workload)[0])
    own = profiled[profiled["workload"] == series.workload]
    own = (
        own[own["instance_type"] == series.instance_type]
        if series.instance_type in set(own["instance_type"])
        else own
    )
    backward = float((own["backward_s"] / own["step_s"]).median()) if len(own) else BACKWARD_PART
    ready = (
        data.buckets[data.buckets["workload"] == series.workload]
        if len(data.buckets)
        else data.buckets
    )
    return backward * (1 - (float(ready["ready_fraction"].min()) if len(ready) else 0.0))


def best_batch(
    series: Series, data: TrainingData, memory: MemoryModel, machine: Machine
) -> BestBatch | None:
    """Of a series whose unit is one device; None where none of its batches was measured in a single micro-step."""
    gib = machine.device_memory_gib

    def fits(batch: float) -> bool:
        """What nothing is known of would have been refused by the device that it was measured on."""
        peak = memory.peak_bytes(series.workload, series.instance_type, batch)
        return gib is None or math.isnan(peak) or peak <= gib * _GIB

    speeds = {
        micro: micro / s
        for (micro, steps), s in series.steps.get(1, {}).items()
        if steps == 1 and fits(micro)
    }
    if not speeds:
        return None
    best = max(speeds, key=lambda batch: (speeds[batch], -batch))
    peak = memory.peak_bytes(series.workload, series.instance_type, best)
    profiled = _profiled(data.profiles, workload_and_mode(series.workload)[0])
    own = profiled[
        (profiled["workload"] == series.workload)
        & (profiled["instance_type"] == series.instance_type)
    ]
    peaks = (
        own[own["batch"] == best]["peak_bytes"].dropna()
        if "peak_bytes" in own
        else own["batch"].iloc[:0]
    )
    return BestBatch(
        workload=series.workload,
        instance_type=series.instance_type,
        batch=best,
        samples_per_s=speeds[best],
        largest_measured=max(speeds),
        largest_that_fits=None
        if gib is None or math.isnan(peak)
        else _largest_that_fits(fits, max(speeds)),
        predicted_peak_bytes=None if math.isnan(peak) else peak,
        measured_peak_bytes=float(peaks.max()) if len(peaks) else None,
        memory_bytes=None if gib is None else gib * _GIB,
    )


def _largest_that_fits(fits: Callable[[float], bool], from_batch: float) -> int:
    """Whole samples, by bisection from a batch that fits: peaks grow with it."""
    low, high = int(from_batch), _LARGEST_BATCH
    if fits(high):
        return high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizing:
    """What is known of a workload's sizes: series that scale, best batches, and series of too few runs to say so."""

    scalings: tuple[Scaling, ...]
    best_batches: tuple[BestBatch, ...]
    too_few: tuple[Series, ...]

    @property
    def types(self) -> set[str]:
        """Instance types that the workload was measured on."""
        return {
            one.instance_type
            for own in (self.scalings, self.best_batches, self.too_few)
            for one in own
        }

    def of(self, instance_type: str | None) -> Sizing:
        """Of one type alone; of all for None."""
        if instance_type is None:
            return self
        return Sizing(
            scalings=tuple(one for one in self.scalings if one.instance_type == instance_type),
            best_batches=tuple(
                one for one in self.best_batches if one.instance_type == instance_type
            ),
            too_few=tuple(one for one in self.too_few if one.instance_type == instance_type),
        )


def size_workload(data: TrainingData, workload: str, *, batches: tuple[float, float]) -> Sizing:
    """Sizes of a workload on each type that it was measured on, at a global batch between the two of `batches`.

    `data` holds one provider's measurements as the warehouse has them.
    """
    data = by_variant(at_nominal_speed(data))
    owners = [workload_and_mode(str(name))[0] == workload for name in data.runs.get("workload", ())]
    data = replace(data, runs=data.runs.iloc[np.flatnonzero(owners)])
    rows = training_rows(data, seed=0)
    machines = read_machines(data.instance_types, rows.types)
    memory = memory_of(data, rows.setups, machines)
    scalings: list[Scaling] = []
    best: list[BestBatch] = []
    too_few: list[Series] = []
    for series in series_of(data, workload, {name: one.devices for name, one in machines.items()}):
        machine, work = machines[series.instance_type], series.work(*batches)
        if work is not None:
            scalings.append(scaling_of(series, work, data, machine))
        else:
            too_few.append(series)
        found = best_batch(series, data, memory, machine) if series.devices_each == 1 else None
        best += [] if found is None else [found]
    return Sizing(scalings=tuple(scalings), best_batches=tuple(best), too_few=tuple(too_few))
