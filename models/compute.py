"""Seconds of one device: forward, backward and optimizer by batch.

T(b) = a + k b at large [D]; measured batches are kept and joined by straight lines, since some workloads bend. A type
on which a workload was never profiled borrows another's curve: its time is scaled by the ratio of speeds (speeds.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from .arrays import FloatArray
from .curves import TELLING_SD, Curve, curves_from_runs, far_below
from .machines import Machine
from .setups import SetupArrays
from .speeds import CORES_SD, PEAK_SD, Speeds, Timed, learn_speeds

if TYPE_CHECKING:
    from .first_guess import FirstGuess

# And rows further off than this tell nothing of a type where there are others of the workload.
_HAZY_SD = 0.35
# Standard deviation of the log of a curve, by where it comes from.
_DOUBT = {"profile": 0.0, "runs": 0.01, "inferred": 0.1, "guessed": 0.6}
# Batches at which a first guess is made; beyond them it goes on as a measured curve does.
_GUESSED_AT = (8.0, 16.0, 32.0, 64.0, 128.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeModel:
    """Curves by (workload, type) where measured, and what stands in elsewhere.

    `guess` is for workloads of which nothing was measured at all, where `flops` tells their operations a sample.
    """

    curves: dict[tuple[str, str], Curve]
    machines: dict[str, Machine]
    speeds: Speeds = field(default_factory=Speeds)
    guess: FirstGuess | None = field(default=None, compare=False, repr=False)
    flops: dict[str, float] = field(default_factory=dict)
    _filled: dict[tuple[str, str], Curve] = field(default_factory=dict, compare=False, repr=False)

    def curve(self, workload: str, instance_type: str) -> Curve:
        """The measured curve, or the nearest type's scaled by the ratio of speeds.

        Raises ValueError if nothing was measured of the workload, and no first guess can be made.
        """
        pair = (workload, instance_type)
        if pair in self.curves:
            return self.curves[pair]
        if pair not in self._filled:
            self._filled[pair] = self._fill(workload, instance_type)
        return self._filled[pair]

    def _fill(self, workload: str, instance_type: str) -> Curve:
        near = self._nearest(workload, instance_type)
        if near is None:
            return self._guessed(workload, instance_type)[0]
        ratio = self.speeds.log(self.machines, near) - self.speeds.log(self.machines, instance_type)
        return self.curves[workload, near].scaled(float(np.exp(ratio)))

    def _nearest(self, workload: str, instance_type: str) -> str | None:
        """Whose curve stands in: that which tells the most of this type, of equals the nearest in speed."""
        wanted = self.speeds.log(self.machines, instance_type)
        others = [
            (
                float(np.hypot(_doubt_of(one), self._borrowing_sd(instance_type, name))),
                abs(self.speeds.log(self.machines, name) - wanted),
                name,
            )
            for (owner, name), one in self.curves.items()
            if owner == workload
        ]
        return min(others)[-1] if others else None

    def can_guess(self, instance_type: str) -> bool:
        """Can a first guess be made on the type? Only where the peak rate of its device is known."""
        return self.guess is not None and self.machines[instance_type].device_tflops is not None

    def _guessed(self, workload: str, instance_type: str) -> tuple[Curve, float]:
        """The first guess and its doubt. Raises ValueError where there is none."""
        tflops, flops = self.machines[instance_type].device_tflops, self.flops.get(workload)
        if self.guess is None or tflops is None or flops is None:
            raise ValueError(f"workload {workload!r} was never measured: it needs a profile or a run on one instance")
        return self.guess.curve(flops, tflops, _GUESSED_AT)

    def doubt(self, workload: str, instance_type: str) -> float:
        """Standard deviation of the log of the time on one device: 0 where profiled, most where it was filled in."""
        pair = (workload, instance_type)
        if pair in self.curves:
            return _doubt_of(self.curves[pair])
        near = self._nearest(workload, instance_type)
        if near is None:
            return self._guessed(workload, instance_type)[1]
        return float(np.hypot(_doubt_of(self.curves[workload, near]), self._borrowing_sd(instance_type, near)))

    def curve_doubt(self, workload: str, instance_type: str) -> float:
        """The same of the curve that stands for the pair, whatever is lost in borrowing it from another type."""
        if (workload, instance_type) in self.curves:
            return self.doubt(workload, instance_type)
        near = self._nearest(workload, instance_type)
        return _doubt_of(self.curves[workload, near]) if near else self._guessed(workload, instance_type)[1]

    def doubt_apart(self, workload: str, instance_type: str) -> float:
        """What a type's time is off by itself, beside what all types of the workload are off by (`curve_doubt`).

        How much of what curves are off by is shared nobody knows: both are counted. 0 on the type of the only curve,
        and for a first guess.
        """
        own = [name for owner, name in self.curves if owner == workload]
        if own in ([], [instance_type]):
            return 0.0
        if instance_type in own:
            return self.doubt(workload, instance_type)
        return self._borrowing_sd(instance_type, str(self._nearest(workload, instance_type)))

    def _borrowing_sd(self, instance_type: str, near: str) -> float:
        """Of the log of a time that is scaled from another type's."""
        return self.speeds.sd(self.machines, instance_type, near)

    def seconds(self, setups: SetupArrays) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
        """(rows, members) forward, backward, optimizer seconds and distance in log2 batch from the measured range."""
        forward, backward = np.zeros_like(setups.batch), np.zeros_like(setups.batch)
        optimizer, distance = np.zeros_like(setups.batch), np.zeros_like(setups.batch)
        for workload, name, at in setups.pairs():
            curve = self.curve(workload, name)
            batch = setups.batch[at]
            forward[at], backward[at] = curve.at(batch)
            optimizer[at] = curve.optimizer_s
            outside = np.maximum(batch / curve.batches[-1], curve.batches[0] / batch)
            distance[at] = np.log2(np.maximum(outside, 1.0))
        return forward, backward, optimizer, distance


def _doubt_of(curve: Curve) -> float:
    """Of the log of a curve's seconds; a guess is as doubtful as the best of the rows that it is made of."""
    return max(_DOUBT[curve.origin], curve.off) if curve.origin == "guessed" else _DOUBT[curve.origin]


def fit_compute(profiles: pd.DataFrame, alone: pd.DataFrame, machines: dict[str, Machine]) -> ComputeModel:
    """Curves from `profiles`; for other pairs from `alone`.

    Its columns are workload, instance_type, batch, seconds of one device, and sd, how far their log may be off. Rows
    that tell little are left out where others tell more of the workload, and bounded by each other where none does.
    """
    curves: dict[tuple[str, str], Curve] = {}
    if len(profiles):
        good = profiles[(profiles["batch"] > 0) & (profiles["forward_s"] > 0) & (profiles["backward_s"] > 0)]
        for (workload, name), rows in good.groupby(["workload", "instance_type"]):
            pair = (str(workload), str(name))
            middle = rows.groupby("batch")[["forward_s", "backward_s", "optimizer_s"]].median().sort_index()
            curves[pair] = Curve(
                batches=tuple(float(one) for one in middle.index),
                forward_s=tuple(float(one) for one in middle["forward_s"]),
                backward_s=tuple(float(one) for one in middle["backward_s"]),
                optimizer_s=max(float(np.nan_to_num(middle["optimizer_s"].median())), 0.0),
                origin="profile",
                input_part=_input_part(rows),
            )
    hazy: list[tuple[pd.DataFrame, pd.DataFrame]] = []
    for workload, rows in alone.groupby("workload"):
        told, guessed = rows[rows["sd"] < TELLING_SD], rows[rows["sd"] < _HAZY_SD]
        hazy.append((rows if guessed.empty else guessed, told))
        known = {name: one for (owner, name), one in curves.items() if owner == workload}
        curves |= {(str(workload), name): one for name, one in curves_from_runs(told, known).items()}
    speeds = _speeds(curves, machines)
    for rows, told in hazy:
        bounded = rows.assign(seconds=_least_after(rows, machines, speeds))
        workload = str(rows["workload"].iloc[0])
        known = {name: one for (owner, name), one in curves.items() if owner == workload}
        unknown = bounded[~bounded["instance_type"].isin(told["instance_type"])]
        curves |= {(workload, name): one for name, one in curves_from_runs(unknown, known).items()}
    return ComputeModel(curves=curves, speeds=_speeds(curves, machines), machines=machines)


def _least_after(rows: pd.DataFrame, machines: Mapping[str, Machine], speeds: Speeds) -> FloatArray:
    """Seconds of rows that tell little of one workload, none much longer than a device of that speed in another row.

    No batch takes longer than a larger one does, whatever the larger one waited for. Of two types this is true as far
    as speeds that somebody told are; accelerators and cores say nothing of each other. An outlier bounds nothing.
    """
    batch, seconds = rows["batch"].to_numpy(float), rows["seconds"].to_numpy(float)
    telling, least = np.where(far_below(rows), np.inf, seconds), seconds.copy()
    for own in rows.groupby("instance_type").indices.values():
        least[own] = np.minimum(least[own], _least_from(batch[own], telling[own]))
    types = [str(name) for name in rows["instance_type"]]
    speed = np.array([np.exp(speeds.log(machines, name)) for name in types])
    for accelerated, sd in ((False, CORES_SD), (True, PEAK_SD)):
        alike = [machines[name].speed_told and machines[name].accelerated == accelerated for name in types]
        own = np.flatnonzero(alike)
        across = np.exp(sd) * _least_from(batch[own], (telling * speed)[own]) / speed[own]
        least[own] = np.minimum(least[own], across)
    return np.asarray(least, dtype=float)


def _least_from(batch: FloatArray, seconds: FloatArray) -> FloatArray:
    """(rows,) the least seconds of all rows of as large a batch."""
    order = np.lexsort((seconds, -batch))
    found = np.empty_like(seconds)
    found[order] = np.minimum.accumulate(seconds[order])
    return found


def _input_part(rows: pd.DataFrame) -> float:
    if "input_s" not in rows:
        return 0.0
    part = (rows["input_s"] / (rows["forward_s"] + rows["backward_s"])).dropna()
    return float(np.clip(part.median(), 0, 1)) if len(part) else 0.0


def _speeds(curves: Mapping[tuple[str, str], Curve], machines: Mapping[str, Machine]) -> Speeds:
    """From one device's seconds of every workload at a batch in the middle of its curves."""
    times: list[Timed] = []
    for workload in sorted({owner for owner, _ in curves}):
        own = {name: one for (owner, name), one in curves.items() if owner == workload}
        shared = np.array([float(np.median([one.batches[len(one.batches) // 2] for one in own.values()]))])
        times += [
            (workload, name, float(sum(part[0] for part in one.at(shared))), _doubt_of(one))
            for name, one in sorted(own.items())
        ]
    return learn_speeds(times, machines)
