"""A synthetic market of GPU machines and a model fitted to synthetic runs, for timing the planner.

A device's seconds fall with its speed, gradients go round a ring, and runs have a few per cent of
noise. Nothing of it is stored or published.
"""

from collections.abc import Sequence
from datetime import UTC, datetime

import numpy as np
import pandas as pd

from models.domain.cluster import InstanceType, Offer, cluster_name
from models.domain.workload import Goal, Workload
from models.step_time.dataset import TrainingData
from models.step_time.model import StepTimeModel, fit

AS_OF = datetime(2026, 11, 20, tzinfo=UTC)
BY_ROWS, PROFILED = "known by rows", "profiled"
GRADIENT_BYTES = 440_000_000
SAMPLES, GLOBAL_BATCH = 20_000_000, 1024
_SPEEDS = (
    8.0,
    8.0,
    16.0,
    16.0,
    31.0,
    31.0,
    30.0,
    78.0,
    156.0,
    495.0,
)  # TFLOP/s, from a T4 to an H100
_DEVICES = (1, 4, 1, 8, 1, 4, 8, 8, 8, 8)
_GIB = (16, 16, 16, 16, 24, 24, 24, 48, 40, 80)
_GBPS = (5.0, 50.0, 2.5, 25.0, 5.0, 40.0, 100.0, 200.0, 400.0, 3200.0)
_USD = (0.526, 3.912, 3.06, 24.48, 1.006, 5.672, 13.35, 30.13, 21.96, 55.04)


def spread(count: int) -> list[int]:
    """Places of `count` of the ten types, from the smallest to the largest."""
    return [int(at) for at in np.linspace(0, len(_SPEEDS) - 1, count).round()]


def types() -> list[InstanceType]:
    """Ten, from a small machine with one device to a large one with eight."""
    return [
        InstanceType(
            name=f"gpu{at}.{_DEVICES[at]}x",
            provider="ec2",
            devices=_DEVICES[at],
            device=f"gpu{at}",
            cores=8.0 * _DEVICES[at],
            memory_gib=64.0 * _DEVICES[at],
            device_memory_gib=float(_GIB[at]),
            bandwidth_gbps=_GBPS[at],
            device_tflops=_SPEEDS[at],
        )
        for at in range(len(_SPEEDS))
    ]


def offers(
    sold: Sequence[InstanceType], markets: Sequence[str] = ("on-demand", "spot")
) -> list[Offer]:
    """Each type in each market; larger machines are interrupted more often."""
    usd = {f"gpu{at}.{_DEVICES[at]}x": price for at, price in enumerate(_USD)}
    return [
        Offer(
            instance_type=kind,
            market=market,
            zone="made-up-1a",
            region="made-up-1",
            usd_per_hour=usd[kind.name] * (0.4 if market == "spot" else 1.0),
            interruptions_per_hour=0.002 * kind.devices if market == "spot" else 0.0,
            price_as_of=AS_OF,
        )
        for kind in sold
        for market in markets
    ]


def workload(name: str, *goals: Goal) -> Workload:
    """One of BY_ROWS and PROFILED, with the goals that need no limit."""
    return Workload(
        name=name,
        digest="made-up",
        samples=SAMPLES,
        global_batch_least=GLOBAL_BATCH,
        global_batch_most=GLOBAL_BATCH,
        goals=(*goals, Goal(goal="cheapest"), Goal(goal="fastest")),
        gradient_bytes=GRADIENT_BYTES,
    )


def champion(sold: Sequence[InstanceType], *, runs: int = 160, seed: int = 0) -> StepTimeModel:
    """Fit a model to `runs` runs of up to eight machines and profiles of PROFILED on every type."""
    random = np.random.default_rng(seed)
    rows = [_run(sold, str(random.choice([BY_ROWS, PROFILED])), random) for _ in range(runs)]
    rows += [
        _run([kind], BY_ROWS, random, machines=1, batch=batch)
        for kind in sold
        for batch in (4, 16, 64)
    ]
    profiles = [_profile(kind, batch, random) for kind in sold for batch in (2, 8, 32, 128)]
    buckets = [
        {
            "provider": "ec2",
            "workload": PROFILED,
            "bucket": at,
            "bytes": GRADIENT_BYTES / 8,
            "ready_fraction": (at + 1) / 8,
        }
        for at in range(8)
    ]
    described = [
        {
            "provider": "ec2",
            "name": kind.name,
            "devices": kind.devices,
            "device": kind.device,
            "cores": kind.cores,
            "bandwidth_gbps": kind.bandwidth_gbps,
            "device_tflops": kind.device_tflops,
            "digest": kind.digest,
        }
        for kind in sold
    ]
    facts = [
        {"provider": "ec2", "workload": name, "gradient_bytes": GRADIENT_BYTES, "digest": "made-up"}
        for name in (BY_ROWS, PROFILED)
    ]
    data = TrainingData(
        runs=pd.DataFrame(rows),
        profiles=pd.DataFrame(profiles),
        buckets=pd.DataFrame(buckets),
        probes=pd.DataFrame(),
        workloads=pd.DataFrame(facts),
        instance_types=pd.DataFrame(described),
    )
    return fit(data, seed=seed)


def _compute_s(instance: InstanceType, batch: int) -> float:
    return 0.004 + 0.3 * batch / float(instance.device_tflops or 1.0)


def _profile(instance: InstanceType, batch: int, random: np.random.Generator) -> dict[str, object]:
    seconds = _compute_s(instance, batch) * float(np.exp(random.normal(0, 0.02)))
    return {
        "provider": "ec2",
        "workload": PROFILED,
        "instance_type": instance.name,
        "batch": batch,
        "forward_s": seconds / 3,
        "backward_s": 2 * seconds / 3,
        "optimizer_s": 0.002,
        "peak_bytes": 3e9 + 2.5e8 * batch,
    }


def _run(
    sold: Sequence[InstanceType],
    name: str,
    random: np.random.Generator,
    *,
    machines: int | None = None,
    batch: int | None = None,
) -> dict[str, object]:
    """Measure one setup of one or two types."""
    pair = [
        sold[at] for at in sorted(random.choice(len(sold), size=min(2, len(sold)), replace=False))
    ]
    count = machines or int(random.choice([1, 1, 2, 3, 4, 6, 8]))
    first = count if machines or random.random() < 0.7 else int(random.integers(0, count + 1))
    members = sorted(
        [pair[0]] * first + [pair[-1]] * (count - first), key=lambda member: member.name
    )
    base = batch or int(random.choice([4, 8, 16, 32, 64]))
    speed = float(np.mean([float(kind.device_tflops or 1.0) for kind in members]))
    shares = [max(1, round(base * float(kind.device_tflops or 1.0) / speed)) for kind in members]
    layout = [1] if machines else [kind.devices for kind in members]
    ranks = sum(layout)
    compute = max(_compute_s(member, share) for member, share in zip(members, shares, strict=True))
    gbps = min(kind.bandwidth_gbps for kind in members) if count > 1 else 100.0
    ring = (
        0.0
        if ranks == 1
        else 2 * (ranks - 1) / ranks * GRADIENT_BYTES * 8e-9 / (0.6 * gbps) + 0.002 * count
    )
    step = compute + max(0.25 * ring, ring - 0.5 * compute)
    return {
        "provider": "ec2",
        "workload": name,
        "cluster": cluster_name([kind.name for kind in members]),
        "layout": "+".join(str(devices) for devices in layout),
        "batch_per_device": "+".join(str(share) for share in shares),
        "accumulation_steps": 1,
        "step_s": step * float(np.exp(random.normal(0, 0.04))),
        "sync_s": None,
    }
