"""Measured rows as the planner's setups, with prices: for questions where only what was measured may be chosen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import numpy as np
import pandas as pd

from models.campaign.pilots import choose_pilots
from models.campaign.value_of_information import choice_set_of
from models.domain.cluster import Cluster, InstanceType, Offer, parse_cluster
from models.domain.numeric import FloatArray
from models.domain.setup_table import row_key, rows_of
from models.domain.workload import Goal, Setup, Workload
from models.step_time.model import StepTimeModel

STEPS = 100_000  # of a job, so that start-up hardly counts
PILOT_HOSTS = 4  # a pilot of `srift recommend` runs on so many machines at most
_PILOT_DEADLINE = 2.0  # as a multiple of the least predicted hours
_AS_OF = datetime(2026, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Distinct setups with the median of their measured seconds, how often each ran, and the place of its first row."""

    setups: tuple[Setup, ...]
    step_s: FloatArray
    runs: FloatArray
    places: np.ndarray[tuple[int, ...], np.dtype[np.intp]]

    @property
    def global_batch(self) -> FloatArray:
        """(setups,) samples of a step."""
        return np.array([one.global_batch for one in self.setups], dtype=float)

    @property
    def usd_per_hour(self) -> FloatArray:
        """(setups,) dollars an hour of the whole cluster."""
        return np.array([one.cluster.total_usd_per_hour for one in self.setups], dtype=float)

    def frame(self) -> pd.DataFrame:
        """The setups as measurement columns."""
        return frame_of(self.setups)

    def take(
        self, places: Sequence[int] | np.ndarray[tuple[int, ...], np.dtype[np.intp]]
    ) -> Measured:
        """The setups at these places."""
        return Measured(
            setups=tuple(self.setups[at] for at in places),
            step_s=self.step_s[places],
            runs=self.runs[places],
            places=self.places[places],
        )


def measured_setups(
    runs: pd.DataFrame, devices: Mapping[str, int], usd: Mapping[str, float]
) -> Measured:
    """The setups of `runs` whose machines all have a price in `usd` (an hour by instance type), in order of first rows.

    Rows that differ only in the order of their machines are one setup. `devices` stands in for an empty layout.
    """
    provider = str(runs["provider"].iloc[0]) if "provider" in runs and len(runs) else "ec2"
    seconds: dict[object, list[float]] = {}
    found: dict[object, tuple[int, Setup]] = {}
    offers: dict[str, Offer] = {}
    for at, row in enumerate(rows_of(runs)):
        types = parse_cluster(str(row["cluster"]))
        if not all(name in usd for name in types):
            continue
        key = row_key(row, devices)
        seconds.setdefault(key, []).append(float(row["step_s"]))
        if key in found:
            continue
        workload, mode, machines, steps = key
        members = [
            offers.setdefault(name, _offer(name, devices, usd[name], provider))
            for name, _, _ in machines
        ]
        setup = Setup(
            workload=workload,
            cluster=Cluster(members=tuple(members)),
            layout=tuple(used for _, used, _ in machines),
            batch_per_device=tuple(share for _, _, share in machines),
            accumulation_steps=steps,
            **mode._asdict(),
        )
        found[key] = (at, setup)
    return Measured(
        setups=tuple(setup for _, setup in found.values()),
        step_s=np.array([np.median(seconds[key]) for key in found], dtype=float),
        runs=np.array([len(seconds[key]) for key in found], dtype=float),
        places=np.array([at for at, _ in found.values()], dtype=np.intp),
    )


def _offer(name: str, devices: Mapping[str, int], usd_per_hour: float, provider: str) -> Offer:
    kind = InstanceType(
        name=name,
        provider=provider,
        devices=devices.get(name, 1),
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
    return pd.DataFrame([one.row() for one in setups])


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
    """Positions of the pilots that `srift recommend` would name among `setups` of one workload; those of one device are
    known already.

    It is asked for the cheapest cluster within twice the least predicted hours, at the global batch that most of the
    setups have. A run on up to four machines may be a pilot, every setup may be chosen.
    """
    sizes = Counter(one.global_batch for one in setups if sum(one.layout) > 1)
    if not sizes:
        return []
    batch = max(sorted(sizes), key=lambda size: sizes[size])
    rivals = [one for one in setups if one.global_batch == batch]
    predicted = model.predict(frame_of(rivals))
    deadline = _PILOT_DEADLINE * STEPS * float(predicted["step_s"].min()) / 3600
    goal = Goal(goal="cheapest_within_deadline", hours=deadline)
    choice_set = choice_set_of(job(setups[0].workload, batch, goal), rivals, predicted)
    buyable = [
        at
        for at, one in enumerate(setups)
        if one.global_batch == batch and sum(one.layout) > 1 and len(one.layout) <= PILOT_HOSTS
    ]
    candidates = frame_of([setups[at] for at in buyable])
    chosen = choose_pilots(
        choice_set, candidates, model.joint, goal=goal.goal, count=count, seed=seed
    ).chosen
    return [buyable[at] for at in chosen]
