"""A made-up world of GPU machines whose truth is known and not the models' form: it asks what no file at hand can tell.

Every bucket of gradients waits for its part of the backward pass and for the bucket before it, then goes round a ring
inside each machine and one between the machines; ranks that wait for the slowest of many take longer, and devices of
one machine share its cores. Nine types of machine from one to eight devices, ten workloads from 3.5 to 355 million
parameters, one to 64 devices. Rows are off by a placement's own factor and by noise.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from models.step_time.dataset import TrainingData
from models.step_time.setup_arrays import read_setups

from .splits import Split

# name: devices, cores, teraflop/s of a device, gigabyte/s between devices of one machine, gigabit/s between machines.
TYPES: dict[str, tuple[int, int, float, float, float]] = {
    "v1.one": (1, 8, 12, 0, 10),
    "v1.four": (4, 32, 12, 45, 10),
    "v1.eight": (8, 64, 12, 45, 25),
    "t1.one": (1, 4, 5, 0, 5),
    "t1.four": (4, 48, 5, 7, 50),
    "a1.one": (1, 8, 15, 0, 10),
    "a1.four": (4, 48, 15, 11, 40),
    "a1.eight": (8, 192, 15, 11, 100),
    "p1.eight": (8, 96, 19, 220, 400),
}
# Dollars an hour: by the rate of all devices, and something for the machine.
USD = {name: 0.1 + 0.06 * devices * tflops for name, (devices, _, tflops, _, _) in TYPES.items()}
# name: parameters, operations of forward and backward a sample.
WORKLOADS: dict[str, tuple[float, float]] = {
    "wide-cnn": (138e6, 93e9),
    "deep-cnn": (25e6, 12e9),
    "vision-transformer": (86e6, 52e9),
    "medium-lm": (355e6, 1.5e12),
    "encoder": (340e6, 6e11),
    "mobile-cnn": (3.5e6, 1e9),
    "recommender": (54e6, 0.5e9),
    "segmenter": (31e6, 1.2e11),
    "recurrent-lm": (60e6, 4e10),
    "efficient-cnn": (9e6, 2.4e9),
}
_BATCHES, _LARGE = (
    (1, 2, 4, 8, 12, 16, 24, 32, 48, 64),
    3e11,
)  # beyond so many operations only the smaller batches
_UNEVEN = ((1, 3), (2, 4), (1, 3, 4), (4, 4, 1), (2, 2, 4), (4, 3))
_BUCKET_BYTES, _MOST_MACHINES, _PLACEMENT_SD, _NOISE_SD = 25e6, 16, 0.03, 0.025


@dataclass(frozen=True, slots=True, kw_only=True)
class _Truth:
    """What is hidden of a workload."""

    launch_s: float  # of a step's kernels, whatever the batch
    half_batch: float  # at which a device is half as busy as it can be
    efficiency: float
    input_core_s: float
    first_ready: float  # part of the backward pass before the first bucket
    backward: float  # part of a step's compute
    liking: dict[str, float]  # by make of device


class GpuWorld:
    """Measures setups; `seed` decides the hidden truth, which setups are measured, and the noise."""

    def __init__(self, seed: int) -> None:
        self._seed, random = seed, np.random.default_rng(seed)
        self._reached, self._latency_s = random.uniform(0.55, 0.9), random.uniform(30e-6, 80e-6)
        self._truth = {
            name: _Truth(
                launch_s=random.uniform(0.005, 0.03),
                half_batch=random.uniform(1, 12),
                efficiency=random.uniform(0.25, 0.6),
                input_core_s=random.uniform(0, 0.02),
                first_ready=random.uniform(0, 0.3),
                backward=random.uniform(0.6, 0.7),
                liking={
                    name.split(".")[0]: float(np.exp(random.normal(0, 0.15))) for name in TYPES
                },
            )
            for name in WORKLOADS
        }

    def step(
        self, workload: str, name: str, layout: Sequence[int], batch: int
    ) -> tuple[float, float]:
        """Seconds of a step, and those of them that the slowest rank waits."""
        own, (parameters, _) = self._truth[workload], WORKLOADS[workload]
        devices, cores = TYPES[name][:2]
        ranks, most = sum(layout), max(layout)
        compute = self._alone(workload, name, batch) * (1 + 0.03 * (most - 1) / max(devices - 1, 1))
        compute += 8 * own.input_core_s * (most - 1) / cores
        compute *= 1 + 0.015 * np.sqrt(2 * np.log(ranks))
        buckets = int(np.ceil(4 * parameters / _BUCKET_BYTES))
        sent = self._exchange(name, layout, 4 * parameters / buckets)
        end = (1 - own.backward) * compute
        for one in range(1, buckets + 1 if ranks > 1 else 1):
            part = own.first_ready + (1 - own.first_ready) * one / buckets
            end = max(end, compute * (1 - own.backward + own.backward * part)) + 1.05 * sent
        return max(compute, end), max(end - compute, 0.0)

    def _alone(self, workload: str, name: str, batch: int) -> float:
        own = self._truth[workload]
        busy = own.efficiency * own.liking[name.split(".")[0]] * batch / (batch + own.half_batch)
        return own.launch_s + batch * WORKLOADS[workload][1] / (TYPES[name][2] * 1e12 * busy)

    def _exchange(self, name: str, layout: Sequence[int], size_bytes: float) -> float:
        ranks, machines, most = sum(layout), len(layout), max(layout)
        seconds = 0.0
        if most > 1:
            seconds += 2 * (most - 1) * (size_bytes / most / (TYPES[name][3] * 1e9) + 8e-6)
        if machines > 1:
            link = (
                min(
                    TYPES[name][4] / 8 * self._reached, (10 if machines == 2 else 8) * np.sqrt(most)
                )
                * 1e9
            )
            flows = min(1.0, 0.35 + 0.16 * most)  # one flow does not fill a fast link
            ring = (
                2
                * (ranks - 1)
                / ranks
                * size_bytes
                / (link * flows)
                * (1 + 0.04 * np.log2(machines))
            )
            ring += 2 * machines * self._latency_s * (1 + 0.2 * most)
            seconds += ring * (1 + 0.3 * (1 - ranks / machines / most))
        return float(seconds)

    def data(self) -> TrainingData:
        """Measured rows in the import format, with the facts of workloads and types; no profile, no probe."""
        random = np.random.default_rng([self._seed, 1])
        rows = [
            row
            for workload in WORKLOADS
            for name in TYPES
            for row in self._rows(workload, name, random)
        ]
        types = [
            {"name": name, "device": name.split(".")[0], "digest": name}
            | dict(
                zip(
                    ("devices", "cores", "device_tflops", "bandwidth_gbps"),
                    (*row[:3], row[4]),
                    strict=True,
                )
            )
            for name, row in TYPES.items()
        ]
        none = pd.DataFrame()
        return TrainingData(
            runs=pd.DataFrame(rows).assign(provider="ec2"),
            profiles=none,
            buckets=none,
            probes=none,
            workloads=none,
            instance_types=pd.DataFrame(types),
        )

    def _rows(
        self, workload: str, name: str, random: np.random.Generator
    ) -> Iterator[dict[str, object]]:
        devices = TYPES[name][0]
        if random.random() < 0.35:  # nobody ran it there
            return
        batches = _BATCHES[:6] if WORKLOADS[workload][1] > _LARGE else _BATCHES
        for layout in _layouts(devices):
            placed = float(np.exp(random.normal(0, _PLACEMENT_SD))) if len(layout) > 1 else 1.0
            for batch in batches:
                if sum(layout) > 1 and random.random() < 0.4:
                    continue
                step_s, sync_s = self.step(workload, name, layout, batch)
                yield {
                    "workload": workload,
                    "cluster": f"{len(layout)}x{name}",
                    "layout": "+".join(str(one) for one in layout),
                    "batch_per_device": "+".join([str(batch)] * len(layout)),
                    "step_s": step_s * placed * np.exp(random.normal(0, _NOISE_SD)),
                    "sync_s": sync_s * np.exp(random.normal(0, 2 * _NOISE_SD)),
                    "gradient_bytes": 4 * WORKLOADS[workload][0],
                }


def _layouts(devices: int) -> Iterator[tuple[int, ...]]:
    """One device, every even layout of a power of two up to 64, and uneven ones where a machine has four or more."""
    yield (1,)
    for ranks in (2, 4, 8, 16, 32, 64):
        for machines in range(1, _MOST_MACHINES + 1):
            if ranks % machines == 0 and ranks // machines <= devices:
                yield (ranks // machines,) * machines
    if devices >= 4:
        yield from _UNEVEN


def questions(runs: pd.DataFrame, *, seed: int) -> Iterator[Split]:
    """What users of such a file would ask; workloads and types are held out in turn, whole."""
    setups = read_setups(runs, {name: row[0] for name, row in TYPES.items()})
    workload, ranks, random = np.array(setups.workloads), setups.ranks, np.random.default_rng(seed)
    kind, several = np.array([types[0] for types in setups.types]), setups.instances > 1
    asked = random.random(len(runs)) < 0.2
    yield Split(name="neighbours", group="all", known=~asked, asked=asked)
    for name in sorted(set(workload)):
        own, twelve = workload == name, np.zeros(len(runs), dtype=bool)
        twelve[random.choice(np.flatnonzero(own), 12, replace=False)] = True
        known = ~own | (ranks == 1)
        yield Split(name="one device known", group=name, known=known, asked=~known)
        yield Split(
            name="three recommended pilots", group=name, known=known, asked=~known, choose=3
        )
        yield Split(
            name="twelve measurements", group=name, known=~own | twelve, asked=own & ~twelve
        )
    for most, size in ((8, 16), (8, 64), (16, 64)):
        yield Split(
            name="larger clusters",
            group=f"{most} to {size}",
            known=ranks <= most,
            asked=ranks == size,
        )
    for name in [one for one, row in TYPES.items() if row[0] > 1]:
        for what, out in (
            ("type known on one machine", several),
            ("type known by one device", ranks > 1),
        ):
            yield Split(
                name=what, group=name, known=~((kind == name) & out), asked=(kind == name) & out
            )
