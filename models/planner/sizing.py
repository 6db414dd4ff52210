"""Sizing rules of Zou et al., applied to measured runs.

Scaling is strong: G units share the same global batch. A unit is a machine with a given number of
devices, or a device of one machine. T(G) is the measured step time on G units.

    efficiency   T(1) / (G T(G))
    rule         T(G) = O + P / G, R = O / P: efficiency (1 + R) / (1 + G R)
    largest      floor((1 + R - alpha) / (alpha R)) units have an efficiency of at least alpha
    bandwidth    2 (G - 1) / G gradient bytes, sent within the backward pass after the first bucket
    servers      ceil(2 gradient bytes * workers / (server bytes per second * compute seconds))

T(1) and T(m) at the largest measured size m determine O = (m T(m) - T(1)) / (m - 1) and
P = T(1) - O.

A global batch that was not run can be composed of k micro-steps of b samples for each unit. One
unit takes k C(b), where C(b) is its step time for b samples. Several units take
(k - 1) C(b) + T(b), because only the last micro-step is followed by an exchange.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ..domain.cluster import parse_cluster, parse_numbers
from ..domain.setup_table import modes_of, rows_of
from ..domain.workload import Mode
from ..step_time.dataset import (
    BACKWARD_PART,
    TrainingData,
    at_nominal_speed,
    exchanges,
    valid_runs,
)
from ..step_time.machine_specs import Machine, read_machines

EFFICIENCIES = (0.9, 0.8)
FORMULAS = {
    "efficiency": "T(1) / (G T(G)) at the same global batch",
    "by_rule": "(1 + R) / (1 + G R), R = O / P, O = (m T(m) - T(1)) / (m - 1), P = T(1) - O",
    "largest": "floor((1 + R - alpha) / (alpha R))",
    "needed_gbps": "8e-9 * 2 (G - 1) / G * gradient_bytes / hideable_s",
    "servers": "ceil(2 * gradient_bytes * workers / (server_bytes_per_s * compute_s))",
    "best_batch": "measured batch of one device with the most samples per second that fits",
}
GIB = 2.0**30


@dataclass(frozen=True, slots=True)
class ScalingRule:
    """T(G) = overhead_s + parallel_s / G."""

    overhead_s: float
    parallel_s: float

    @classmethod
    def through(cls, one_s: float, size: int, step_s: float) -> ScalingRule:
        """Return the rule through T(1) and T(`size`), with `size` at least 2."""
        overhead_s = min(max((size * step_s - one_s) / (size - 1), 0.0), one_s)
        return cls(overhead_s, one_s - overhead_s)

    def efficiency(self, size: int) -> float:
        return (self.overhead_s + self.parallel_s) / (size * self.overhead_s + self.parallel_s)

    def largest(self, efficiency: float) -> int | None:
        """Return the largest efficient number of units; None if it is unlimited."""
        if self.overhead_s == 0:
            return None
        # The formula of the module with R = O / P, multiplied out so that P may be zero.
        units = self.parallel_s * (1 - efficiency) / (efficiency * self.overhead_s) + 1 / efficiency
        return max(math.floor(units + 1e-9), 1)


@dataclass(frozen=True, slots=True)
class Scale:
    """Median step times of one workload and mode by number of units.

    `devices_each` is the number of devices of a machine; 0 if units are devices of one machine.
    `steps[size][micro_batch, accumulation_steps]` are seconds; `micro_batch` counts samples of a
    unit.
    """

    mode: Mode
    instance_type: str
    devices_each: int
    steps: Mapping[int, Mapping[tuple[float, int], float]]

    def step_s(self, size: int, batch: float, micro: float | None) -> float | None:
        """Return seconds of a step of `batch` samples on `size` units; None if unknown.

        With `micro` None the step must have been measured; otherwise it is composed of micro-steps
        of `micro` samples for each unit.
        """
        measured = self.steps.get(size, {})
        if micro is None:
            whole = [s for (own, steps), s in measured.items() if size * own * steps == batch]
            return min(whole, default=None)
        count = batch / (size * micro)
        if count < 1 or count != int(count):
            return None
        if (micro, int(count)) in measured:
            return measured[micro, int(count)]
        alone, last = self.steps.get(1, {}).get((micro, 1)), measured.get((micro, 1))
        return None if alone is None or last is None else (count - 1) * alone + last

    def sizes(self, batch: float, micro: float | None) -> dict[int, float]:
        """Return seconds by number of units for all sizes that are known."""
        found = {size: self.step_s(size, batch, micro) for size in sorted(self.steps)}
        return {size: seconds for size, seconds in found.items() if seconds is not None}

    @property
    def batches(self) -> list[float]:
        """Measured global batches in ascending order."""
        shapes = [(size, *shape) for size, own in self.steps.items() for shape in own]
        return sorted({size * micro * steps for size, micro, steps in shapes})

    def known_batches(self, least: float, most: float) -> list[tuple[float, float | None]]:
        """Return (global batch, micro batch) pairs known on one unit and on several."""
        batches = [*self.batches, *([least] if least == most else [])]
        micros = [None, *sorted({micro for own in self.steps.values() for micro, _ in own})]
        pairs = [(batch, micro) for batch in dict.fromkeys(batches) for micro in micros]
        return [
            (batch, micro)
            for batch, micro in pairs
            if least <= batch <= most and {1} < self.sizes(batch, micro).keys()
        ]

    def best_known(self, least: float, most: float) -> tuple[float, float | None] | None:
        """Return the pair of `known_batches` with the most sizes; prefer measured, then fast."""

        def rank(pair: tuple[float, float | None]) -> tuple[int, bool, float, float]:
            sizes = self.sizes(*pair)
            return len(sizes), pair[1] is None, pair[0] / sizes[1], -pair[0]

        return max(self.known_batches(least, most), key=rank, default=None)


def scales_of(data: TrainingData, workload: str, devices: Mapping[str, int]) -> list[Scale]:
    """Return one Scale for each mode, instance type and number of devices.

    Clusters with several types or unequal shares are ignored. `devices` gives the layout of runs
    without one. A profile of one device stands in where no run exists.
    """
    seconds: dict[tuple[Mode, str, int], dict[int, dict[tuple[float, int], list[float]]]]
    seconds = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    runs = valid_runs(data.runs)
    runs = runs[runs["workload"].astype(str) == workload] if len(runs) else runs
    for row, mode in zip(rows_of(runs), modes_of(runs), strict=True):
        types = parse_cluster(str(row["cluster"]))
        layout = row.get("layout") or devices.get(types[0], 1)
        shares = {
            *zip(
                types,
                parse_numbers(layout, len(types), "layout"),
                parse_numbers(row["batch_per_device"], len(types), "batch_per_device"),
                strict=True,
            )
        }
        if mode.of_several or len(shares) > 1:
            continue
        ((name, each, batch),) = shares
        steps, step_s = int(row.get("accumulation_steps") or 1), float(row["step_s"])
        seconds[mode, name, each][len(types)][float(each * batch), steps].append(step_s)
        if len(types) == 1:
            seconds[mode, name, 0][each][float(batch), steps].append(step_s)
    for row in _profiles(data, workload):
        for each in (0, 1):
            alone = seconds.get((row["mode"], row["instance_type"], each), {})
            if alone or each:
                sizes = seconds[row["mode"], row["instance_type"], each]
                sizes[1].setdefault((float(row["batch"]), 1), [row["step_s"]])
    return [
        Scale(mode, name, each, {size: _medians(own) for size, own in sizes.items()})
        for (mode, name, each), sizes in sorted(seconds.items())
        if each or max(sizes) > 1
    ]


def _medians(
    seconds: Mapping[tuple[float, int], Sequence[float]],
) -> dict[tuple[float, int], float]:
    return {shape: float(np.median(repeats)) for shape, repeats in seconds.items()}


def _profiles(data: TrainingData, workload: str) -> list[dict[str, Any]]:
    """Return profiles of the workload with `mode` and `step_s`."""
    if not len(data.profiles):
        return []
    own = data.profiles[data.profiles["workload"].astype(str) == workload]
    step_s = own["forward_s"] + own["backward_s"] + own["optimizer_s"]
    rows = zip(rows_of(own.assign(step_s=step_s)), modes_of(own), strict=True)
    return [row | {"mode": mode} for row, mode in rows if not mode.of_several]


def size_workload(
    data: TrainingData, workload: str, *, batches: tuple[float, float]
) -> dict[str, list[dict[str, Any]]]:
    """Return what measured runs say about the sizes of a workload, as rows of plain values.

    `scaling` has a row for each Scale with a global batch between the two of `batches`,
    `checks` a row for each of its measured sizes, `best_batch` a row for each mode and type, and
    `unknown` a row for each Scale without such a batch.
    """
    data = at_nominal_speed(data)
    clusters = set(data.runs.get("cluster", ()))
    seen = {name for cluster in clusters for name in parse_cluster(str(cluster))}
    machines = read_machines(data.instance_types, seen)
    found: dict[str, list[dict[str, Any]]] = {
        name: [] for name in ("scaling", "checks", "best_batch", "unknown")
    }
    for scale in scales_of(data, workload, {name: m.devices for name, m in machines.items()}):
        machine, key = machines[scale.instance_type], _key(scale)
        pair = scale.best_known(*batches)
        if pair is None:
            found["unknown"].append(key | {"batches": scale.batches})
        else:
            sizes = scale.sizes(*pair)
            key |= {"global_batch": pair[0], "micro_batch": pair[1]}
            found["checks"] += [key | check for check in check_sizes(sizes)]
            found["scaling"].append(key | _scaling(scale, sizes, machine, data, workload))
        if scale.devices_each == 1:
            found["best_batch"] += _best_batch(scale, machine, data, workload)
    return found


def _key(scale: Scale) -> dict[str, Any]:
    return {
        "instance_type": scale.instance_type,
        "devices_each": scale.devices_each,
        **scale.mode._asdict(),
    }


def check_sizes(sizes: Mapping[int, float]) -> list[dict[str, Any]]:
    """Return measured efficiencies beside those predicted from smaller sizes alone."""
    rows = []
    for size, step_s in sizes.items():
        below = [other for other in sizes if 1 < other < size]
        rule = ScalingRule.through(sizes[1], max(below), sizes[max(below)]) if below else None
        rows.append(
            {
                "size": size,
                "step_s": step_s,
                "efficiency": sizes[1] / (size * step_s),
                "by_rule": rule.efficiency(size) if rule else None,
            }
        )
    return rows


def _scaling(
    scale: Scale, sizes: Mapping[int, float], machine: Machine, data: TrainingData, workload: str
) -> dict[str, Any]:
    most = max(sizes)
    rule = ScalingRule.through(sizes[1], most, sizes[most])
    row: dict[str, Any] = {"measured_size": most, "one_s": sizes[1], **asdict(rule)}
    row |= {f"largest_{alpha * 100:.0f}": rule.largest(alpha) for alpha in EFFICIENCIES}
    if scale.devices_each == 0:
        # One machine has no more devices than it has.
        limit = max(machine.devices, most)
        for alpha in EFFICIENCIES:
            name = f"largest_{alpha * 100:.0f}"
            row[name] = min(row[name] or limit, limit)
    else:
        row |= _hiding(scale, sizes, machine, data, workload)
    return row


def _hiding(
    scale: Scale, sizes: Mapping[int, float], machine: Machine, data: TrainingData, workload: str
) -> dict[str, Any]:
    """Return the bandwidth and the parameter servers that hide the exchange of gradients."""
    exchange = exchanges(data).get(workload)
    if exchange is None or not exchange.gradient_bytes > 0:
        return {}
    size = max(sizes)
    compute_s = sizes[1] / size
    hideable_s = compute_s * _backward_share(scale, data, workload)
    traffic_gbit = 8e-9 * 2 * (size - 1) / size * exchange.gradient_bytes
    gbps = machine.bandwidth_gbps if machine.link_known else None
    workers = size * scale.devices_each
    busy = None if gbps is None else 8e-9 * exchange.gradient_bytes * workers / (gbps * compute_s)
    return {
        "gradient_bytes": exchange.gradient_bytes,
        "workers": workers,
        "compute_s": compute_s,
        "hideable_s": hideable_s,
        "needed_gbps": traffic_gbit / hideable_s if hideable_s > 0 else None,
        "stated_gbps": gbps,
        "servers": None if busy is None else math.ceil(2 * busy),
    }


def _backward_share(scale: Scale, data: TrainingData, workload: str) -> float:
    """Return the share of a step after the first gradient bucket, two thirds without a profile."""
    profiles = [row for row in _profiles(data, workload) if row["mode"] == scale.mode]
    here = [row for row in profiles if row["instance_type"] == scale.instance_type]
    shares = [row["backward_s"] / row["step_s"] for row in here or profiles]
    ready = 0.0
    if len(data.buckets):
        own = data.buckets[data.buckets["workload"].astype(str) == workload]
        ready = float(own["ready_fraction"].min()) if len(own) else 0.0
    return (float(np.median(shares)) if shares else BACKWARD_PART) * (1 - ready)


def _best_batch(
    scale: Scale, machine: Machine, data: TrainingData, workload: str
) -> list[dict[str, Any]]:
    """Return the measured batch of one device with the most samples per second that fits."""
    peaks = {
        float(row["batch"]): row.get("peak_bytes")
        for row in _profiles(data, workload)
        if row["instance_type"] == scale.instance_type and row["mode"] == scale.mode
    }
    memory = math.inf if machine.device_memory_gib is None else machine.device_memory_gib * GIB
    speeds = {
        batch: batch / step_s
        for (batch, steps), step_s in scale.steps.get(1, {}).items()
        # NaN and None: the peak is unknown, but the batch ran on this device.
        if steps == 1 and not (peaks.get(batch) or 0.0) > memory
    }
    if not speeds:
        return []
    best = max(speeds, key=lambda batch: (speeds[batch], -batch))
    peak = peaks.get(best)
    return [
        _key(scale)
        | {
            "batch": best,
            "samples_per_s": speeds[best],
            "largest_measured": max(speeds),
            "peak_bytes": None if peak is None or math.isnan(peak) else float(peak),
            "memory_bytes": None if math.isinf(memory) else memory,
        }
    ]
