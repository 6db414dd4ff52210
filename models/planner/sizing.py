"""Apply the sizing rules of Zou et al. to measured runs.

The rules describe strong scaling: the global batch stays the same and is shared by G units. A unit
is a machine with a given number of devices, or one device of a machine. T(G) is the step time on G
units. O is the overhead and P the parallel work in seconds, and R = O / P.

    efficiency   T(1) / (G T(G))
    rule         T(G) = O + P / G; the efficiency is therefore (1 + R) / (1 + G R)
    largest      the largest G with an efficiency of at least alpha is
                 floor((1 + R - alpha) / (alpha R))
    bandwidth    computation hides the exchange of gradients if the bandwidth is at least
                 2 (G - 1) / G * gradient bytes / hideable_s
    servers      the required number of parameter servers:
                 ceil(2 gradient bytes * workers / (server bytes per second * compute seconds))

`hideable_s` is the time from the first ready gradient bucket to the end of the backward pass. O and
P follow from measurements of T(1) and T(m), where m is the largest measured number of units:

    O = (m T(m) - T(1)) / (m - 1),   P = T(1) - O

If the step time with a global batch was not measured, it is estimated from steps with a smaller
batch. The step is assumed to consist of k micro-steps with b samples per unit:

    on one unit        k C
    on several units   (k - 1) C + D

C and D are the measured times of a step with b samples per unit: C on one unit, D on several units.
D includes the exchange of gradients, which takes place only in the last micro-step.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from itertools import product
from statistics import median
from typing import Any, NamedTuple

import pandas as pd

from ..domain.setup_table import Row, machines_of, modes_of, rows_of, types_of
from ..domain.workload import Mode
from ..step_time.dataset import (
    BACKWARD_SHARE,
    TrainingData,
    at_nominal_speed,
    valid_runs,
    workload_facts,
)
from ..step_time.machine_specs import Machine, read_machines
from ..step_time.rows import WorkloadFacts

EFFICIENCIES = {"largest_90": 0.9, "largest_80": 0.8}
FORMULAS = {
    "efficiency": "T(1) / (G T(G)) at the same global batch",
    "by_rule": "(1 + R) / (1 + G R), R = O / P, O = (m T(m) - T(1)) / (m - 1), P = T(1) - O",
    "largest": "floor((1 + R - alpha) / (alpha R))",
    "needed_gbps": "8e-9 * 2 (G - 1) / G * gradient_bytes / hideable_s",
    "servers": "ceil(2 * gradient_bytes * workers / (server_bytes_per_s * compute_s))",
    "best_batch": "measured batch of one device with the most samples per second that fits",
}
GIB = 2.0**30


class ScalingRule(NamedTuple):
    """The rule that a step on G machines or devices takes `overhead_s + parallel_s / G` seconds."""

    overhead_s: float
    parallel_s: float

    @classmethod
    def through(cls, single_s: float, size: int, step_s: float) -> ScalingRule:
        """Return the rule for a step that takes `single_s` on one unit, `step_s` on `size` units.

        A unit is a machine, or a device of one machine. `size` is at least 2. The overhead of the
        rule is limited to the range from 0 to `single_s`.
        """
        overhead_s = min(max((size * step_s - single_s) / (size - 1), 0.0), single_s)
        return cls(overhead_s, single_s - overhead_s)

    def efficiency(self, size: int) -> float:
        """Return the parallel efficiency on `size` units: step_s(1) / (size x step_s(size)).

        A unit is a machine, or a device of one machine.
        """
        return (self.overhead_s + self.parallel_s) / (size * self.overhead_s + self.parallel_s)

    def largest(self, efficiency: float) -> int | None:
        """Return the largest number of machines or devices that reaches a parallel `efficiency`.

        Returns None if every number reaches this efficiency.
        """
        if self.overhead_s == 0:
            return None
        # The module's formula with R = O / P, rearranged so that P may be zero.
        units = self.parallel_s * (1 - efficiency) / (efficiency * self.overhead_s) + 1 / efficiency
        return max(math.floor(units + 1e-9), 1)


class Scale(NamedTuple):
    """Median step times of a workload in one mode on one instance type, by number of units.

    The steps were measured on 1, 2, ... machines, or on 1, 2, ... devices of one machine. A unit is
    such a machine or device.

    - `devices_each`: the number of devices used on each machine; 0 if the units are devices
    - `steps`: {(number of units, samples of a unit in a micro-step, accumulation steps): step time
      in seconds}
    """

    mode: Mode
    instance_type: str
    devices_each: int
    steps: Mapping[tuple[int, float, int], float]

    def sizes(self, batch: float, micro: float | None) -> dict[int, float]:
        """Return {number of units: seconds of a step with the global batch `batch`}.

        A unit is a machine, or a device of one machine. If `micro` is None, the result has the
        fastest measured step for each number of units. If `micro` is a number, all steps have
        micro-steps of `micro` samples per unit. If such a step was not measured, its seconds are
        estimated, if possible, as the docstring of the module describes.
        """
        found: dict[int, float] = {}
        for (size, micro_batch, steps), step_s in sorted(self.steps.items()):
            if micro is None:
                if size * micro_batch * steps == batch:
                    found[size] = min(step_s, found.get(size, step_s))
                continue
            count, alone_s = batch / (size * micro), self.steps.get((1, micro, 1))
            if (micro_batch, steps) == (micro, count):
                found[size] = step_s
            elif (
                (micro_batch, steps) == (micro, 1) and count.is_integer() and count >= 1 and alone_s
            ):
                found[size] = (count - 1) * alone_s + step_s
        return found

    @property
    def batches(self) -> list[float]:
        """Return the measured global batches in ascending order."""
        return sorted({size * micro * steps for size, micro, steps in self.steps})

    def best_known(self, least: float, most: float) -> tuple[float, float | None] | None:
        """Return the pair (global batch, micro batch) for which `sizes` has the most step times.

        The global batch is between `least` and `most`. The micro batch is the number of samples per
        unit in a micro-step. If it is None, `sizes` uses only measured steps.
        Returns None if no pair has step times for both one unit and several units.
        """
        batches = [batch for batch in {least, *self.batches} if least <= batch <= most]
        micros = {None, *(micro for _, micro, _ in self.steps)}
        known = {pair: self.sizes(*pair) for pair in product(batches, micros)}
        # Among pairs with equally many step times, measured pairs come first, then pairs with a
        # high throughput on one unit, then pairs with a small global batch and micro-batch.
        return max(
            (pair for pair, sizes in known.items() if {1} < sizes.keys()),
            key=lambda pair: (
                len(known[pair]),
                pair[1] is None,
                pair[0] / known[pair][1],
                -pair[0],
                -(pair[1] or 0.0),
            ),
            default=None,
        )


def scales_of(data: TrainingData, workload: str, devices: Mapping[str, int]) -> list[Scale]:
    """Return a Scale of `workload` for each mode, instance type and number of devices per machine.

    Runs on unequal machines are left out. Runs in modes that need several devices are also left
    out. If no run measured a batch on a single device, a profile provides the step time of this
    batch.

    devices: {instance type: number of devices}, for runs without a `layout`. The layout is the
        number of devices used on each machine, such as `4+4+2`.
    """
    # Step times by mode, instance type and devices_each, and by the keys of `Scale.steps`.
    measured: dict[tuple[Any, ...], list[float]] = defaultdict(list)
    runs = valid_runs(data.runs)
    runs = runs[runs["workload"].astype(str) == workload]
    for row, mode in zip(rows_of(runs), modes_of(runs), strict=True):
        name, *others = types = types_of(row["cluster"])
        texts = row["cluster"], row.get("layout") or "", str(row["batch_per_device"])
        used, batches = machines_of(*texts, devices)
        if mode.of_several or len({*zip(types, used, batches, strict=True)}) > 1:
            continue
        each, batch, steps = used[0], float(batches[0]), int(row.get("accumulation_steps") or 1)
        measured[mode, name, each, len(types), each * batch, steps].append(row["step_s"])
        if not others:
            measured[mode, name, 0, each, batch, steps].append(row["step_s"])
    for row in _profiles(data, workload):
        for each in (0, 1):
            shape = row["mode"], row["instance_type"], each, 1, float(row["batch"]), 1
            measured.setdefault(shape, [row["step_s"]])
    scales: dict[tuple[Any, ...], dict[Any, float]] = defaultdict(dict)
    for key, seconds in sorted(measured.items()):
        scales[key[:3]][key[3:]] = median(seconds)
    found = [Scale(mode, name, each, steps) for (mode, name, each), steps in scales.items()]
    return [
        scale for scale in found if scale.devices_each or any(size > 1 for size, *_ in scale.steps)
    ]


def _profiles(data: TrainingData, workload: str) -> list[Row]:
    """Return the workload's profiles of single devices, with additional columns mode and step_s."""
    if not len(data.profiles):
        return []
    profiles = data.profiles[data.profiles["workload"].astype(str) == workload]
    step_s = profiles["forward_s"] + profiles["backward_s"] + profiles["optimizer_s"]
    rows = zip(rows_of(profiles.assign(step_s=step_s)), modes_of(profiles), strict=True)
    return [row | {"mode": mode} for row, mode in rows if not mode.of_several]


def size_workload(
    data: TrainingData, workload: str, *, batches: tuple[float, float]
) -> dict[str, list[Row]]:
    """Return the scaling rules and best batches of a workload, as {name of a list: rows}.

    A Scale has the step times of a mode, an instance type and a number of devices used per machine.
    A size is a number of machines, or of devices of one machine. A Scale is usable if the step
    times of a global batch are known for size 1 and for a larger size. The lists are:

        scaling     a row for each usable Scale: its scaling rule
        checks      a row for each usable Scale and size: measured and predicted efficiency
        best_batch  a row for each mode and instance type: the batch with which a single device
                    computes the most samples per second
        unknown     a row for each Scale that is not usable

    `batches` are the minimum and the maximum global batch to consider.
    """
    data = at_nominal_speed(data)
    seen = {name for cluster in set(data.runs["cluster"]) for name in types_of(cluster)}
    machines, profiles = read_machines(data.instance_types, seen), _profiles(data, workload)
    facts = workload_facts(data).get(workload, WorkloadFacts())
    # The share of the backward pass after the first gradient bucket is ready.
    after = facts.hidden_part / BACKWARD_SHARE if facts.hidden_part > 0 else 1.0
    found: dict[str, list[Row]] = {
        name: [] for name in ("scaling", "checks", "best_batch", "unknown")
    }
    for scale in scales_of(data, workload, {name: m.devices for name, m in machines.items()}):
        machine = machines[scale.instance_type]
        alike = [row for row in profiles if row["mode"] == scale.mode]
        here = [row for row in alike if row["instance_type"] == scale.instance_type]
        key: Row = {"instance_type": scale.instance_type, "devices_each": scale.devices_each}
        key |= scale.mode._asdict()
        if scale.devices_each == 1:
            found["best_batch"] += [key | best for best in _best_batch(scale, machine, here)]
        pair = scale.best_known(*batches)
        if pair is None:
            found["unknown"].append(key | {"batches": scale.batches})
            continue
        key |= {"global_batch": pair[0], "micro_batch": pair[1]}
        sizes = scale.sizes(*pair)
        found["checks"] += [key | check for check in check_sizes(sizes)]
        row = key | _scaling_columns(
            sizes, max(machine.devices, *sizes) if not scale.devices_each else 0
        )
        if scale.devices_each and facts.gradient_bytes > 0:
            shares = [profile["backward_s"] / profile["step_s"] for profile in here or alike]
            backward = after * median(shares or [BACKWARD_SHARE])
            row |= _overlap_columns(
                sizes, scale.devices_each, facts.gradient_bytes, machine, backward
            )
        found["scaling"].append(row)
    return found


def check_sizes(sizes: Mapping[int, float]) -> list[Row]:
    """Return a row for each number of units: measured and predicted parallel efficiency.

    `sizes` maps numbers of units (machines or devices) to seconds per step. The column `by_rule` is
    the efficiency that a ScalingRule predicts for the size of the row. The rule is fitted to the
    step times of 1 unit and of the next smaller size in `sizes`. `by_rule` is None for the two
    smallest sizes.
    """
    rows = []
    for size, step_s in sizes.items():
        row: Row = {"size": size, "step_s": step_s, "efficiency": sizes[1] / (size * step_s)}
        below = max((other for other in sizes if other < size), default=1)
        by_rule = None
        if below > 1:
            by_rule = ScalingRule.through(sizes[1], below, sizes[below]).efficiency(size)
        rows.append(row | {"by_rule": by_rule})
    return rows


def _scaling_columns(sizes: Mapping[int, float], limit: int) -> Row:
    """Return the scaling rule, and the largest size that reaches each of the EFFICIENCIES.

    A size is a number of machines or devices.

    sizes: {size: seconds per step}.
    limit: the highest size that can exist, such as the devices of a machine; 0 means no limit.
    """
    most = max(sizes)
    rule = ScalingRule.through(sizes[1], most, sizes[most])
    largest = {name: rule.largest(efficiency) for name, efficiency in EFFICIENCIES.items()}
    if limit:
        largest = {name: min(units or limit, limit) for name, units in largest.items()}
    return {"measured_size": most, "one_s": sizes[1], **rule._asdict(), **largest}


def _overlap_columns(
    sizes: Mapping[int, float],
    devices_each: int,
    gradient_bytes: float,
    machine: Machine,
    backward: float,
) -> Row:
    """Return columns that show if the backward pass can hide the exchange of gradients.

    The numbers are for the largest cluster in `sizes`. Two columns can be None:

    - `needed_gbps`: the minimum bandwidth that hides the exchange; None if `backward` is 0
    - `servers`: the required number of parameter servers; None if the machine's bandwidth is
      unknown

    Args:
        sizes: {number of machines: seconds per step}.
        devices_each: the number of devices used on each machine.
        gradient_bytes: bytes of all gradients.
        machine: the instance type of the clusters.
        backward: the fraction of the compute seconds that can hide the exchange. It covers the
            backward pass from the time when the first gradients are ready.
    """
    size, gbps = max(sizes), machine.bandwidth_gbps if machine.link_known else None
    compute_s, workers = sizes[1] / size, size * devices_each
    gradient_gbit, hideable_s = 8e-9 * gradient_bytes, compute_s * backward
    needed = 2 * (1 - 1 / size) * gradient_gbit / hideable_s if hideable_s > 0 else None
    servers = None
    if gbps is not None:
        servers = math.ceil(2 * gradient_gbit * workers / (gbps * compute_s))
    return {
        "gradient_bytes": gradient_bytes,
        "workers": workers,
        "compute_s": compute_s,
        "stated_gbps": gbps,
        "servers": servers,
        "hideable_s": hideable_s,
        "needed_gbps": needed,
    }


def _best_batch(scale: Scale, machine: Machine, profiles: list[Row]) -> list[Row]:
    """Return a row about the best measured batch of a single device, as a list.

    The best batch fits in the memory of the device and has the most samples per second. The list is
    empty if no measured batch fits.
    """
    # If the peak memory of a batch is unknown, the batch fits, because it ran on this device.
    known = (row for row in profiles if pd.notna(row["peak_bytes"]))
    peaks = {row["batch"]: row["peak_bytes"] for row in known}
    memory = machine.device_memory_gib * GIB or None  # None: unknown
    speeds = {
        batch: batch / step_s
        for (size, batch, steps), step_s in scale.steps.items()
        if size == steps == 1 and peaks.get(batch, 0.0) <= (memory or math.inf)
    }
    if not speeds:
        return []
    best = max(speeds, key=lambda batch: (speeds[batch], -batch))
    return [
        {
            "batch": best,
            "samples_per_s": speeds[best],
            "largest_measured": max(speeds),
            "peak_bytes": peaks.get(best),
            "memory_bytes": memory,
        }
    ]
