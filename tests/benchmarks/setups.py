"""Measured rows as the planner's setups with prices, for choices among measured setups only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import numpy as np
import pandas as pd

from models.campaign.pilots import choose_pilots
from models.campaign.value_of_information import choice_set_of
from models.domain.cluster import Cluster, InstanceType, Offer, parse_cluster, parse_numbers
from models.domain.numeric import FloatArray, IntArray
from models.domain.workload import Goal, Setup, Workload
from models.step_time.model import StepTimeModel

STEPS = 100_000  # of a job: start-up hardly counts
PILOT_HOSTS = 4
_PILOT_DEADLINE = 2.0  # multiple of the least predicted hours
_AS_OF = datetime(2026, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Distinct setups, the median of their measured seconds, and the place of their first row."""

    setups: tuple[Setup, ...]
    step_s: FloatArray
    places: IntArray

    @property
    def global_batch(self) -> FloatArray:
        """(setups,) samples of a step."""
        return np.array([setup.global_batch for setup in self.setups], dtype=float)

    def take(self, places: IntArray) -> Measured:
        """The setups at these places."""
        setups = tuple(self.setups[at] for at in places)
        return Measured(setups=setups, step_s=self.step_s[places], places=self.places[places])


def measured_setups(
    runs: pd.DataFrame, devices: Mapping[str, int], usd: Mapping[str, float]
) -> Measured:
    """The setups of `runs` on machines with a price in `usd`, by instance type and hour.

    Rows that differ only in the order of their machines are one setup. `devices` stand in for an
    empty layout.
    """
    offers = {name: _offer(name, devices.get(name, 1), price) for name, price in usd.items()}
    seconds: dict[Setup, list[float]] = {}
    first: dict[Setup, int] = {}
    for at, row in enumerate(runs.to_dict("records")):
        types = parse_cluster(str(row["cluster"]))
        if any(name not in usd for name in types):
            continue
        layout = row.get("layout") or "+".join(str(devices.get(name, 1)) for name in types)
        used = parse_numbers(str(layout), len(types), "layout")
        batches = parse_numbers(str(row["batch_per_device"]), len(types), "batch_per_device")
        machines = sorted(zip(types, used, batches, strict=True))
        setup = Setup(
            workload=str(row["workload"]),
            cluster=Cluster(members=tuple(offers[name] for name, _, _ in machines)),
            layout=tuple(count for _, count, _ in machines),
            batch_per_device=tuple(batch for _, _, batch in machines),
            accumulation_steps=int(row.get("accumulation_steps") or 1),
        )
        first.setdefault(setup, at)
        seconds.setdefault(setup, []).append(float(row["step_s"]))
    return Measured(
        setups=tuple(first),
        step_s=np.array([np.median(times_s) for times_s in seconds.values()], dtype=float),
        places=np.array(list(first.values()), dtype=np.intp),
    )


def _offer(name: str, devices: int, usd_per_hour: float) -> Offer:
    kind = InstanceType(
        name=name,
        provider="ec2",
        devices=devices,
        device=name,
        cores=1.0,
        memory_gib=1.0,
        device_memory_gib=1.0,
        bandwidth_gbps=1.0,
    )
    return Offer(
        instance_type=kind,
        market="on-demand",
        zone="measured",
        region="measured",
        usd_per_hour=usd_per_hour,
        interruptions_per_hour=0.0,
        price_as_of=_AS_OF,
    )


def frame_of(setups: Sequence[Setup]) -> pd.DataFrame:
    """Setups as measurement columns."""
    return pd.DataFrame([setup.row() for setup in setups])


def job(name: str, global_batch: int, *goals: Goal) -> Workload:
    """A long job of `name` at one global batch."""
    return Workload(
        name=name,
        digest="measured",
        samples=STEPS * global_batch,
        global_batch_least=global_batch,
        global_batch_most=global_batch,
        goals=goals,
    )


def recommended_pilots(
    model: StepTimeModel, setups: Sequence[Setup], *, count: int, seed: int
) -> list[int]:
    """Positions of the pilots that `srift recommend` would name among `setups` of one workload.

    The question is for the cheapest cluster within twice the least predicted hours, at the global
    batch of most setups. A pilot runs on several devices of at most four machines.
    """
    sizes = Counter(setup.global_batch for setup in setups if sum(setup.layout) > 1)
    if not sizes:
        return []
    batch = max(sorted(sizes), key=lambda size: sizes[size])
    rivals = [setup for setup in setups if setup.global_batch == batch]
    predicted = model.predict(frame_of(rivals))
    deadline = _PILOT_DEADLINE * STEPS * float(predicted["step_s"].min()) / 3600
    goal = Goal(goal="cheapest_within_deadline", hours=deadline)
    choice_set = choice_set_of(job(setups[0].workload, batch, goal), rivals, predicted)
    buyable = [
        at
        for at, setup in enumerate(setups)
        if setup.global_batch == batch
        and sum(setup.layout) > 1
        and len(setup.layout) <= PILOT_HOSTS
    ]
    candidates = frame_of([setups[at] for at in buyable])
    chosen = choose_pilots(
        choice_set, candidates, model.joint, goal=goal.goal, count=count, seed=seed
    ).chosen
    return [buyable[at] for at in chosen]
