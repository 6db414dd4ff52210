"""A world with a known truth that is not of the model's form."""

import itertools
from typing import NamedTuple

import numpy as np
import pandas as pd

from models.domain.cluster import cluster_name
from models.domain.workload import join_numbers
from models.step_time.model import TrainingData

TYPES = {
    "s.small": (0.2, 0.2),
    "s.medium": (0.4, 0.2),
    "n.medium": (0.4, 1.0),
    "s.large": (0.8, 0.5),
    "s.whole": (1.0, 1.0),
}


class HiddenWorkload(NamedTuple):
    """Core seconds on a whole core, gradient bytes, and how its cost bends."""

    base_s: float
    sample_s: float
    bend: float
    gradient_bytes: int
    batches: tuple
    ready: tuple
    sizes: tuple  # parts of the gradient


WORKLOADS = {
    name: HiddenWorkload(*values)
    for name, *values in (
        ("conv", 0.008, 0.004, 1.03, 1_100_000, (4, 8, 16, 24, 48), (0.55, 1.0), (0.6, 0.4)),
        ("lm", 0.02, 0.012, 0.97, 5_000_000, (2, 4, 8, 12, 24), (0.35, 1.0), (0.2, 0.8)),
        ("mlp", 0.03, 0.0006, 1.0, 16_000_000, (24, 48, 96, 192), (0.3, 1.0), (0.1, 0.9)),
        ("embed", 0.012, 0.00015, 1.02, 9_000_000, (96, 192, 384, 768), (0.2, 1.0), (0.1, 0.9)),
    )
}


class World:
    """Measures setups; `seed` decides noise and each type's deviation from its speed."""

    def __init__(self, seed=0):
        self.random = np.random.default_rng(seed)
        self.speed = {
            name: cores * float(np.exp(self.random.normal(0, 0.05)))
            for name, (cores, _) in TYPES.items()
        }
        self.oddity = {
            pair: float(np.exp(self.random.normal(0, 0.03)))
            for pair in itertools.product(WORKLOADS, TYPES)
        }

    def noise(self, sd):
        return float(np.exp(self.random.normal(0, sd)))

    def device(self, workload, name, batch):
        """Forward, backward, optimizer seconds under a quota of 10 ms periods."""
        network = WORKLOADS[workload]
        core_s = network.base_s + network.sample_s * batch**network.bend
        factor = self.oddity[workload, name] / self.speed[name]
        total = max(core_s * factor - 0.01 * (1 - min(self.speed[name], 1)), core_s)
        return 0.34 * total, 0.66 * total, network.gradient_bytes * 4e-10 / self.speed[name]

    def collective(self, types, size):
        """Seconds and core seconds of an all-reduce in pieces of 256 KiB."""
        n = len(types)
        if n == 1:
            return 0.0, 0.0
        gbps, share = min(TYPES[name][1] for name in types), min(self.speed[name] for name in types)
        messages = 2 * (n - 1) * max(1.0, np.ceil(size / n / 262_144) ** 0.9)
        moved = 2 * (n - 1) / n * size
        core_s = 4e-4 + messages * 8e-5 + moved * 7e-10
        wire = moved / (gbps * 0.94 * 1.25e8)
        stall = messages * 2e-4 * max(0.0, 1 - share)
        behind = max(0.0, 0.55 * core_s / share - 0.7 * wire)
        return wire + 0.45 * core_s / share + behind + stall, core_s

    def step(self, workload, types, batches, accumulation=1):
        """One noisy measured step in small time slices."""
        network, n = WORKLOADS[workload], len(types)
        devices = [self.device(workload, *pair) for pair in zip(types, batches, strict=True)]
        forward, backward, optimizer = np.array(devices).T
        speed = np.array([self.speed[name] for name in types])
        wobble = np.array([self.noise(0.015) for _ in types])
        before = wobble * (optimizer + forward + (accumulation - 1) * (forward + backward))
        backward = wobble * backward + (n > 1) * network.gradient_bytes * 6e-10 / speed
        end, late = 0.0, before + backward
        for fraction, size in zip(network.ready, network.sizes, strict=True):
            seconds, core_s = self.collective(types, network.gradient_bytes * size)
            seconds *= 1.06
            start = max(end, float((before + fraction * backward).max()))
            end = start + seconds
            if n > 1:
                hidden = np.maximum(np.minimum(end, late) - start, 0.0) / max(seconds, 1e-9)
                late = late + 0.8 * hidden * core_s / speed
                end = start + seconds * (1 + 0.1 * float(hidden.max()))
        return max(end, float(late.max())) * self.noise(0.02)

    def row(self, at, workload, types, batches, accumulation=1):
        network = WORKLOADS[workload]
        return {
            "run_id": f"run-{at}",
            "provider": "local",
            "workload": workload,
            "cluster": cluster_name(types),
            "layout": "+".join("1" for _ in types),
            "batch_per_device": join_numbers(tuple(batches)),
            "accumulation_steps": accumulation,
            "strategy": "ddp",
            "precision": "fp32",
            "switches": "none",
            "step_s": self.step(workload, types, batches, accumulation),
            "sync_s": None,
            "step_spread": 0.02,
            "parameters": network.gradient_bytes // 4,
            "gradient_bytes": network.gradient_bytes,
            "flops_per_sample": None,
        }

    def runs(self, count, *, first=0, batches_of=0):
        """`count` random setups of 1 to 4 hosts within 1.75 cores."""
        rows = []
        while len(rows) < count:
            workload = str(self.random.choice(sorted(WORKLOADS)))
            n = int(self.random.choice([1, 2, 3, 4], p=[0.2, 0.35, 0.2, 0.25]))
            kinds = [str(kind) for kind in self.random.choice(sorted(TYPES), size=2)]
            types = [kinds[0] if self.random.random() < 0.6 else kinds[1] for _ in range(n)]
            if sum(TYPES[name][0] for name in types) > 1.75:
                continue
            batch = int(self.random.choice(WORKLOADS[workload].batches[batches_of:]))
            mean = sum(TYPES[name][0] for name in types) / n
            even = self.random.random() < 0.3
            batches = [
                batch if even else max(1, round(batch * TYPES[name][0] / mean)) for name in types
            ]
            accumulation = int(self.random.choice([1, 1, 1, 2]))
            rows.append(self.row(first + len(rows), workload, types, batches, accumulation))
        return pd.DataFrame(rows)

    def profiles(self):
        rows = []
        for (workload, network), name in itertools.product(WORKLOADS.items(), TYPES):
            for batch in network.batches[::2]:
                forward, backward, optimizer = self.device(workload, name, batch)
                measured = (
                    forward * self.noise(0.015),
                    backward * self.noise(0.015),
                    optimizer * self.noise(0.02),
                    2e8 + 3 * network.gradient_bytes + 1e6 * batch,
                )
                rows.append((workload, name, batch, *measured))
        names = "workload instance_type batch forward_s backward_s optimizer_s peak_bytes"
        return table(rows, names)

    def probes(self, clusters):
        rows = [
            (cluster_name(types), size, self.collective(types, size)[0] * self.noise(0.03))
            for types in clusters
            for size in (4_096, 65_536, 1 << 20, 4 << 20, 16 << 20)
        ]
        return table(rows, "cluster bytes seconds")

    def data(self, count=70):
        """Profiles of all pairs, probes of six clusters, `count` runs."""
        clusters = [
            *(["s.small"] * 2, ["s.small"] * 4, ["n.medium"] * 2, ["n.medium"] * 4),
            *(["s.large"] * 2, ["s.whole", "s.medium"]),
        ]
        facts = [
            (name, network.gradient_bytes // 4, network.gradient_bytes)
            for name, network in WORKLOADS.items()
        ]
        buckets = [
            (name, at, share * network.gradient_bytes, ready)
            for name, network in WORKLOADS.items()
            for at, (share, ready) in enumerate(zip(network.sizes, network.ready, strict=True))
        ]
        types = [(name, 1, "cpu", cores, gbps) for name, (cores, gbps) in TYPES.items()]
        return TrainingData(
            runs=self.runs(count),
            profiles=self.profiles(),
            buckets=table(buckets, "workload bucket bytes ready_fraction"),
            probes=self.probes(clusters),
            workloads=table(facts, "workload parameters gradient_bytes"),
            instance_types=table(types, "name devices device cores bandwidth_gbps"),
        )


def table(rows, names):
    """Rows of local machines."""
    return pd.DataFrame(rows, columns=names.split()).assign(provider="local")
