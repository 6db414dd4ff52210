"""Accuracy on GPUs, workloads and sizes that no file has: a synthetic world whose truth is known.

The truth is not of the model's form. Every gradient bucket waits for its share of the backward pass
and for the bucket before it, then goes round a ring inside each machine and one between machines.
Nine types of machine, ten workloads, one to 64 devices; rows have noise by placement and by run.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import pandas as pd
import typer
from joblib import Parallel, delayed

from models.step_time.dataset import TrainingData
from tasks.workspace.blas_threads import single_thread
from tests.benchmarks.claims import Claim, Write, report
from tests.benchmarks.scores import Group, score, summary
from tests.frames import data_of

# Devices, cores, TFLOP/s of a device, GB/s inside a machine, Gbit/s between machines.
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
# Parameters, and operations of forward and backward for one sample.
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
_BATCHES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
_LARGE = 3e11  # operations, beyond which only the smaller batches fit
_UNEVEN = ((1, 3), (2, 4), (1, 3, 4), (4, 4, 1), (2, 2, 4), (4, 3))
_BUCKET_BYTES, _MOST_MACHINES, _PLACEMENT_SD, _NOISE_SD = 25e6, 16, 0.03, 0.025


class GpuWorld:
    """Measures setups; `seed` decides the hidden truth, the measured setups, and the noise."""

    def __init__(self, seed: int) -> None:
        self._seed, random = seed, np.random.default_rng(seed)
        self._reached, self._latency_s = random.uniform(0.55, 0.9), random.uniform(30e-6, 80e-6)
        makes = sorted({name.split(".")[0] for name in TYPES})
        self._truth = {
            name: {
                "launch_s": random.uniform(0.005, 0.03),
                "half_batch": random.uniform(1, 12),  # at which a device reaches half its rate
                "efficiency": random.uniform(0.25, 0.6),
                "input_core_s": random.uniform(0, 0.02),
                "first_ready": random.uniform(0, 0.3),  # of the backward pass, before a bucket
                "backward": random.uniform(0.6, 0.7),  # of a step's compute
                **{make: float(np.exp(random.normal(0, 0.15))) for make in makes},
            }
            for name in WORKLOADS
        }

    def step(
        self, workload: str, name: str, layout: Sequence[int], batch: int
    ) -> tuple[float, float]:
        """Return seconds of a step, and the seconds that the slowest rank waits."""
        truth, (parameters, operations) = self._truth[workload], WORKLOADS[workload]
        devices, cores, tflops = TYPES[name][:3]
        ranks, most = sum(layout), max(layout)
        busy = (
            truth["efficiency"] * truth[name.split(".")[0]] * batch / (batch + truth["half_batch"])
        )
        compute = truth["launch_s"] + batch * operations / (tflops * 1e12 * busy)
        compute *= 1 + 0.03 * (most - 1) / max(devices - 1, 1)
        compute += 8 * truth["input_core_s"] * (most - 1) / cores
        compute *= 1 + 0.015 * np.sqrt(2 * np.log(ranks))
        buckets = int(np.ceil(4 * parameters / _BUCKET_BYTES))
        exchange_s = self._exchange_s(name, layout, 4 * parameters / buckets)
        backward, first = truth["backward"], truth["first_ready"]
        end = (1 - backward) * compute
        for bucket in range(1, buckets + 1 if ranks > 1 else 1):
            ready = 1 - backward + backward * (first + (1 - first) * bucket / buckets)
            end = max(end, compute * ready) + 1.05 * exchange_s
        return max(compute, end), max(end - compute, 0.0)

    def _exchange_s(self, name: str, layout: Sequence[int], size_bytes: float) -> float:
        """Seconds of one bucket: a ring inside the fullest machine and a ring between machines."""
        ranks, machines, most = sum(layout), len(layout), max(layout)
        inside, gbps = TYPES[name][3:]
        seconds = 0.0
        if most > 1:
            seconds += 2 * (most - 1) * (size_bytes / most / (inside * 1e9) + 8e-6)
        if machines > 1:
            switch = (10 if machines == 2 else 8) * np.sqrt(most)
            link = min(gbps / 8 * self._reached, switch) * 1e9
            flows = min(1.0, 0.35 + 0.16 * most)  # one flow does not fill a fast link
            sent = 2 * (ranks - 1) / ranks * size_bytes * (1 + 0.04 * np.log2(machines))
            ring = sent / (link * flows) + 2 * machines * self._latency_s * (1 + 0.2 * most)
            seconds += ring * (1 + 0.3 * (1 - ranks / machines / most))
        return float(seconds)

    def data(self) -> TrainingData:
        """Measured rows in the import format, and the facts of types; no profile, no probe."""
        random = np.random.default_rng([self._seed, 1])
        rows = [
            row
            for workload in WORKLOADS
            for name in TYPES
            for row in self._rows(workload, name, random)
        ]
        names = ["devices", "cores", "device_tflops", "inside", "bandwidth_gbps"]
        types = pd.DataFrame.from_dict(TYPES, orient="index", columns=names)
        types = types.drop(columns="inside").rename_axis("name").reset_index()
        return data_of(
            runs=pd.DataFrame(rows).assign(provider="ec2"),
            instance_types=types.assign(
                device=types["name"].str.split(".").str[0], digest=types["name"]
            ),
        )

    def _rows(
        self, workload: str, name: str, random: np.random.Generator
    ) -> Iterator[dict[str, object]]:
        if random.random() < 0.35:  # nobody ran it there
            return
        batches = _BATCHES[:6] if WORKLOADS[workload][1] > _LARGE else _BATCHES
        for layout in _layouts(TYPES[name][0]):
            placed = float(np.exp(random.normal(0, _PLACEMENT_SD))) if len(layout) > 1 else 1.0
            for batch in batches:
                if sum(layout) > 1 and random.random() < 0.4:
                    continue
                step_s, sync_s = self.step(workload, name, layout, batch)
                yield {
                    "workload": workload,
                    "cluster": f"{len(layout)}x{name}",
                    "layout": "+".join(map(str, layout)),
                    "batch_per_device": str(batch),
                    "step_s": step_s * placed * np.exp(random.normal(0, _NOISE_SD)),
                    "sync_s": sync_s * np.exp(random.normal(0, 2 * _NOISE_SD)),
                    "gradient_bytes": 4 * WORKLOADS[workload][0],
                    "kind": name,
                    "ranks": sum(layout),
                    "machines": len(layout),
                }


def _layouts(devices: int) -> Iterator[tuple[int, ...]]:
    """One device, even layouts of powers of two up to 64, uneven ones on large machines."""
    yield (1,)
    for ranks in (2, 4, 8, 16, 32, 64):
        for machines in range(1, _MOST_MACHINES + 1):
            if ranks % machines == 0 and ranks // machines <= devices:
                yield (ranks // machines,) * machines
    if devices >= 4:
        yield from _UNEVEN


def questions(runs: pd.DataFrame, *, seed: int) -> Iterator[Group]:
    """Yield the groups; workloads and types are held out in turn, whole."""
    random = np.random.default_rng(seed)
    workload, kind = runs["workload"].to_numpy(str), runs["kind"].to_numpy(str)
    ranks, machines = runs["ranks"].to_numpy(), runs["machines"].to_numpy()
    held_out = random.random(len(runs)) < 0.2
    yield Group(table="neighbours", name="all", known=~held_out, held_out=held_out)
    for name in sorted(set(workload)):
        of_workload, twelve = workload == name, np.zeros(len(runs), dtype=bool)
        twelve[random.choice(np.flatnonzero(of_workload), 12, replace=False)] = True
        held = of_workload & (ranks > 1)
        yield Group(table="one device known", name=name, known=~held, held_out=held)
        yield Group(table="three pilots", name=name, known=~held, held_out=held, choose=3)
        yield Group(
            table="twelve rows",
            name=name,
            known=~of_workload | twelve,
            held_out=of_workload & ~twelve,
        )
    for most, size in ((8, 16), (8, 64), (16, 64)):
        known, held_out = ranks <= most, ranks == size
        yield Group(
            table="larger clusters", name=f"{most} to {size}", known=known, held_out=held_out
        )
    for name in [name for name, machine in TYPES.items() if machine[0] > 1]:
        for table, out in (
            ("type known on one machine", machines > 1),
            ("type known by one device", ranks > 1),
        ):
            held = (kind == name) & out
            yield Group(table=table, name=name, known=~held, held_out=held)


def main(seed: int = 1, write: Write = False) -> None:
    """Print errors and coverage by question."""
    data = GpuWorld(seed).data()
    with single_thread():
        groups = questions(data.runs, seed=seed)
        parts = Parallel(n_jobs=-1)(delayed(score)(data, group, seed=seed) for group in groups)
    claims = [
        Claim(
            f"synthetic GPUs: {name}",
            "",
            f"{row['mean']:.1f} / {row['median']:.1f} %; covers {row['covers']:.0f} %",
        )
        for name, row in summary(pd.concat(parts)).iterrows()
    ]
    report("gpu_world", claims, write=write)


if __name__ == "__main__":
    typer.run(main)
