"""Five machines, workloads and a simple step-time model for planning tests."""

import zlib
from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime

import numpy as np
import pandas as pd

from models.domain.cluster import InstanceType, Offer, parse_cluster, parse_numbers
from models.domain.workload import Mode, Workload
from models.step_time.memory import Needs
from models.step_time.setup_arrays import read_setups

PLAIN = Mode()

CORES = {"small": 0.2, "medium": 0.4, "net": 0.4, "large": 0.8, "whole": 1.0}
GBPS = {"small": 0.2, "medium": 0.2, "net": 1.0, "large": 0.5, "whole": 1.0}
USD = {"small": 0.030, "medium": 0.055, "net": 0.078, "large": 0.125, "whole": 0.175}
AS_OF = datetime(2026, 11, 20, tzinfo=UTC)
NOTHING = pd.DataFrame()


def machine(name, *, devices=1):
    return InstanceType(
        name=name,
        provider="local",
        devices=devices,
        device="cpu",
        cores=CORES[name],
        memory_gib=64.0,  # of the host, which says nothing of what a device holds
        device_memory_gib=2.0,
        bandwidth_gbps=GBPS[name],
    )


def offer(name, market="on-demand", **changes):
    spot = market == "spot"
    values = {
        "instance_type": machine(name),
        "market": market,
        "zone": "local-a",
        "region": "local",
        "usd_per_hour": USD[name] * (0.4 if spot else 1.0),
        "interruptions_per_hour": 0.3 if spot else 0.0,
        "price_as_of": AS_OF,
    }
    return Offer(**(values | changes))  # type: ignore[arg-type]


def offers(*markets):
    return [offer(name, market) for name in CORES for market in markets or ("on-demand", "spot")]


def cores_fit(cluster):
    cores = sum(offer.instance_type.cores for offer in cluster.members)
    return "" if cores <= 1.75 + 1e-9 else f"{cores} cores of 1.75"


def workload(name="mlp", least=64, most=None, *goals, samples=600_000):
    return Workload(
        name=name,
        digest="d" * 12,
        samples=samples,
        global_batch_least=least,
        global_batch_most=most or least,
        goals=goals,
        gradient_bytes=4_000_000,
    )


WORKLOADS = (
    workload("cnn", 48),
    workload("lm", 24),
    workload("mlp", 96, 384),
    workload("recommender", 768),
)


def linear_step(rows):
    """Predictions of these seconds a step."""
    step_s = np.array(rows, dtype=float)
    seconds = {"step_s": step_s, "step_low_s": 0.9 * step_s, "step_high_s": 1.1 * step_s}
    return pd.DataFrame(seconds).assign(bottleneck="compute")


@dataclass(frozen=True, kw_only=True)
class LineModel:
    """step = accumulation x max(a + k b / cores) + ring over the slowest link."""

    a: float = 0.01
    k: float = 0.002
    gradient_bytes: float = 4e6
    shared: float = 0.05
    setup_sd: float = 0.02

    def compute_lines(self, workload, types, mode=PLAIN):
        return [self.compute_line(workload, name, mode) for name in types]

    def compute_line(self, workload, instance_type, mode=PLAIN):
        return (self.a, self.k / CORES[instance_type])

    def needs(self, workload, mode, instance_type, ranks=1, *, accumulates=False):
        return Needs(0.0, 0.0, np.nan, [])

    @property
    def memory(self):
        return self

    def field_terms(self, setups, step_s):
        return pd.DataFrame(index=setups.index)

    def predict(self, setups):
        steps = []
        for row in setups.to_dict("records"):
            names = parse_cluster(row["cluster"])
            batches = parse_numbers(row["batch_per_device"], len(names), "batch")
            lines = [self.compute_line("", name) for name in names]
            compute = max(a + k * b for (a, k), b in zip(lines, batches, strict=True))
            slowest = min(GBPS[name] for name in names)
            ring = 2 * (len(names) - 1) / len(names) * self.gradient_bytes * 8e-9 / slowest
            steps.append(compute * row.get("accumulation_steps", 1) + ring)
        return linear_step(steps).set_index(setups.index)

    def draws(self, setups, *, count, seed):
        rng = np.random.default_rng(seed)
        together, alone = rng.standard_normal(count), rng.standard_normal((len(setups), count))
        errors = self.shared * together + self.setup_sd * alone
        return self.predict(setups)["step_s"].to_numpy()[:, None] * np.exp(errors)

    def joint(self, setups):
        """All err together, and each setup by itself, however often it is listed."""
        names = [
            f"{row['workload']} {sorted(parse_cluster(row['cluster']))} {row['batch_per_device']} "
            f"{row.get('accumulation_steps', 1)}"
            for row in setups.to_dict("records")
        ]
        same = np.array([[float(name == other) for other in names] for name in names])
        mean = np.log(self.predict(setups)["step_s"].to_numpy())
        return mean, self.shared**2 + self.setup_sd**2 * same, np.full(len(names), 0.02**2)


def frame(setups):
    return pd.DataFrame([setup.row() for setup in setups])  # type: ignore[attr-defined]


@dataclass(frozen=True, kw_only=True)
class JointModel(LineModel):
    """As LineModel, by groups of equal machines; each setup is slower by a factor of its own.

    Draws are in pairs about the prediction and do not depend on what else is asked about.
    """

    lines: dict
    gbps: dict
    sample_bytes: dict  # NaN unknown
    slower: float = 0.3
    setup_sd: float = 0.1

    def compute_line(self, workload, instance_type, mode=PLAIN):
        return self.lines[instance_type]

    def needs(self, workload, mode, instance_type, ranks=1, *, accumulates=False):
        return Needs(0.0, 0.0, self.sample_bytes[instance_type], [])

    def formula_seconds(self, arrays):
        return np.array([self._seconds(row) for row in self._rows(arrays)])

    def predict_arrays(self, arrays):
        rows = self._rows(arrays)
        return linear_step(
            [self._seconds(row) * (1 + self.slower * self._chance(row).random()) for row in rows]
        )

    def draw_arrays(self, arrays, *, count, seed):
        together = self.shared * np.random.default_rng(seed).standard_normal(count // 2)
        alone = [
            self.setup_sd * self._chance(row, seed).standard_normal(count // 2)
            for row in self._rows(arrays)
        ]
        off = together + np.array(alone).reshape(-1, count // 2)
        step = self.predict_arrays(arrays)["step_s"].to_numpy(float)
        return step[:, None] * np.exp(np.concatenate([off, -off], axis=1))

    def predict(self, setups):
        return self.predict_arrays(read_setups(setups, {}))

    def draws(self, setups, *, count, seed):
        return self.draw_arrays(read_setups(setups, {}), count=count, seed=seed)

    def _rows(self, arrays):
        """(steps, ((type, devices, batch), machines) in order): equal for equal setups."""
        found = []
        columns = (arrays.kind, arrays.layout, arrays.batch, arrays.count, arrays.accumulation)
        for *members, steps in zip(*(column.tolist() for column in columns), strict=True):
            counted = Counter()
            for kind, devices, batch, number in zip(*members, strict=True):
                if kind >= 0:
                    counted[arrays.names[kind], devices, batch] += number
            found.append((steps, tuple(sorted(counted.items()))))
        return found

    def _seconds(self, row):
        steps, members = row
        compute = max(
            self.lines[name][0] + self.lines[name][1] * batch for (name, _, batch), _ in members
        )
        ranks = sum(devices * number for (_, devices, _), number in members)
        ring = 0.05 * (ranks - 1) / ranks / min(self.gbps[name] for (name, _, _), _ in members)
        return steps * compute + ring

    def _chance(self, row, seed=0):
        return np.random.default_rng([seed, zlib.crc32(repr(row).encode())])
