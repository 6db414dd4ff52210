"""Seconds of one device: forward, backward and optimizer by batch.

T(b) = a + k b at large [D]; measured batches are kept and joined by straight lines, since some workloads bend. A type
on which a workload was never profiled borrows another type's curve: its time is scaled by the ratio of speeds, a prior
(cores) times exp(delta), delta per type shrunk towards zero and learned from workloads that were profiled on both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from scipy.optimize import least_squares

from .arrays import FloatArray
from .machines import Machine
from .setups import SetupArrays

if TYPE_CHECKING:
    from .first_guess import FirstGuess

# With a single measured batch, the part of its time taken to be proportional to batch.
_PROPORTIONAL = 0.9
# Backward costs about twice forward (two products to one): the split where only the sum is known.
_FORWARD_PART = 1 / 3
# A curve is measured if one device was run alone at this many batches; such rows are off by less than this.
_FEWEST_BATCHES, _MEASURED_SD = 3, 0.1
# Rows that know how long they waited are off by less than this; without it a curve is a guess.
_INFERRED_SD = 0.2
# A time further than this from the line, in logs, is an outlier and not a bend.
_OUTLYING = 0.7
# Standard deviations of log speed: of a type around its prior, and of one workload around its type.
_TYPE_SD, _PAIR_SD = 0.2, 0.08
# The same of a curve, by where it comes from.
_DOUBT = {"profile": 0.0, "runs": 0.01, "inferred": 0.1, "guessed": 0.6}
# Batches at which a first guess is made; beyond them it goes on as a measured curve does.
_GUESSED_AT = (8.0, 16.0, 32.0, 64.0, 128.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One workload on one type: seconds at the measured batches, ascending.

    `origin` is profile, runs (of one device), inferred (from several, less their waiting),
    guessed (from several whose waiting nobody recorded), scaled (from another type) or flops (nothing was measured).
    """

    batches: tuple[float, ...]
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    optimizer_s: float
    origin: str
    input_part: float = 0.0  # of forward and backward, making the batch; 0 where nobody told

    def at(self, batch: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Forward and backward seconds of one micro-step at `batch`."""
        return _line(self.batches, self.forward_s, batch), _line(self.batches, self.backward_s, batch)

    def line(self) -> tuple[float, float]:
        """(a, k): forward and backward of one micro-step take about a + k * batch seconds, neither negative."""
        total = np.array(self.forward_s) + np.array(self.backward_s)
        if len(total) == 1:
            return (1 - _PROPORTIONAL) * float(total[0]), _PROPORTIONAL * float(total[0]) / self.batches[0]
        batches = np.array(self.batches)
        slope, intercept = (float(one) for one in np.polyfit(batches, total, 1, w=1 / total))
        slope = max(slope, 0.05 * float(np.min(total / batches)))
        return max(intercept, 0.0), slope

    def scaled(self, factor: float) -> Curve:
        """The same shape, `factor` times as long."""
        return Curve(
            batches=self.batches,
            forward_s=tuple(factor * one for one in self.forward_s),
            backward_s=tuple(factor * one for one in self.backward_s),
            optimizer_s=factor * self.optimizer_s,
            origin="scaled",
            input_part=self.input_part,
        )


def _line(batches: tuple[float, ...], seconds: tuple[float, ...], batch: FloatArray) -> FloatArray:
    """Straight lines between the points; outside, a line whose slope and intercept are never negative."""
    x, y = np.array(batches), np.array(seconds)
    if len(x) == 1:
        low_slope = high_slope = _PROPORTIONAL * y[0] / x[0]
    else:
        low_slope = float(np.clip((y[1] - y[0]) / (x[1] - x[0]), 0, y[0] / x[0]))
        back = max(-3, -len(x))
        high_slope = max((y[-1] - y[back]) / (x[-1] - x[back]), 0.0)
    inside = np.interp(batch, x, y)
    return np.asarray(
        inside - low_slope * np.maximum(x[0] - batch, 0) + high_slope * np.maximum(batch - x[-1], 0), dtype=float
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeModel:
    """Curves by (workload, type) where measured, and what stands in elsewhere.

    `guess` is for workloads of which nothing was measured at all, where `flops` tells their operations a sample.
    """

    curves: dict[tuple[str, str], Curve]
    delta: dict[str, float]  # log speed beyond the prior, by type
    machines: dict[str, Machine]
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
        others = [(name, one) for (owner, name), one in self.curves.items() if owner == workload]
        if not others:
            return self._guessed(workload, instance_type)[0]
        wanted = self._log_speed(instance_type)
        near = min(
            others, key=lambda item: (item[1].origin != "profile", abs(self._log_speed(item[0]) - wanted), item[0])
        )
        return near[1].scaled(float(np.exp(self._log_speed(near[0]) - wanted)))

    def can_guess(self, instance_type: str) -> bool:
        """Can a first guess be made on the type? Only where the peak rate of its device is known."""
        return self.guess is not None and self.machines[instance_type].device_tflops is not None

    def _guessed(self, workload: str, instance_type: str) -> tuple[Curve, float]:
        """The first guess and its doubt. Raises ValueError where there is none."""
        tflops, flops = self.machines[instance_type].device_tflops, self.flops.get(workload)
        if self.guess is None or tflops is None or flops is None:
            raise ValueError(f"workload {workload!r} was never measured: it needs a profile or a run on one instance")
        return self.guess.curve(flops, tflops, _GUESSED_AT)

    def _log_speed(self, instance_type: str) -> float:
        return float(np.log(self.machines[instance_type].prior_speed)) + self.delta.get(instance_type, 0.0)

    def doubt(self, workload: str, instance_type: str) -> float:
        """Standard deviation of the log of the time on one device: 0 where profiled, most where it was filled in."""
        pair = (workload, instance_type)
        if pair in self.curves:
            return _DOUBT[self.curves[pair].origin]
        sources = [_DOUBT[one.origin] for (owner, _), one in self.curves.items() if owner == workload]
        if not sources:
            return self._guessed(workload, instance_type)[1]
        from_source = min(sources)
        return float(np.hypot(from_source, _PAIR_SD if instance_type in self.delta else np.hypot(_PAIR_SD, _TYPE_SD)))

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


def fit_compute(profiles: pd.DataFrame, alone: pd.DataFrame, machines: dict[str, Machine]) -> ComputeModel:
    """Curves from `profiles`; for other pairs from `alone`.

    Its columns are workload, instance_type, batch, seconds of one device, and sd, how far their log may be off.
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
    for (workload, name), rows in alone.groupby(["workload", "instance_type"]):
        pair = (str(workload), str(name))
        if pair not in curves:
            curves[pair] = _curve_from_runs(rows)
    return ComputeModel(curves=curves, delta=_speeds(curves, machines), machines=machines)


def _input_part(rows: pd.DataFrame) -> float:
    if "input_s" not in rows:
        return 0.0
    part = (rows["input_s"] / (rows["forward_s"] + rows["backward_s"])).dropna()
    return float(np.clip(part.median(), 0, 1)) if len(part) else 0.0


def straight(x: FloatArray, y: FloatArray) -> tuple[float, float]:
    """Intercept and slope by least squares, neither negative; through the origin's side where only one x is known."""
    if len(np.unique(x)) == 1:
        middle = float(np.median(y))
        return (1 - _PROPORTIONAL) * middle, _PROPORTIONAL * middle / float(x[0])
    slope, intercept = (float(one) for one in np.polyfit(x, y, 1))
    if slope < 0:
        return float(np.mean(y)), 0.0
    return (intercept, slope) if intercept >= 0 else (0.0, float(x @ y / (x @ x)))


def _curve_from_runs(rows: pd.DataFrame) -> Curve:
    """Medians by batch where one device was measured at three batches or more, since some workloads bend [physics.md];
    else the robust straight line of all rows, each with its own doubt.
    """
    alone = rows[rows["sd"] == rows["sd"].min()]
    measured = len(alone["batch"].unique()) >= _FEWEST_BATCHES and float(alone["sd"].iloc[0]) < _MEASURED_SD
    middle = alone.groupby("batch")["seconds"].median().sort_index()
    batches = np.sort(rows["batch"].unique()).astype(float)
    if measured:
        batches, total = middle.index.to_numpy(float), middle.to_numpy(float)
        line = _robust_line(alone, batches)
        total = np.where(np.abs(np.log(total / line)) > _OUTLYING, line, total)
    else:
        total = _robust_line(rows, batches)
    return Curve(
        batches=tuple(float(one) for one in batches),
        forward_s=tuple(float(one) for one in _FORWARD_PART * total),
        backward_s=tuple(float(one) for one in (1 - _FORWARD_PART) * total),
        optimizer_s=0.0,
        origin="runs" if measured else "inferred" if float(rows["sd"].median()) < _INFERRED_SD else "guessed",
    )


def _robust_line(rows: pd.DataFrame, batches: FloatArray) -> FloatArray:
    """Seconds at `batches` of exp(i) + exp(j) batch, by log residuals; without contrast 0.9 of them grow with batch."""
    batch, seconds, sd = (rows[name].to_numpy(float) for name in ("batch", "seconds", "sd"))
    middle = float(np.median(batch))
    start = np.log(np.array([1 - _PROPORTIONAL, _PROPORTIONAL]) * float(np.median(seconds)))

    def residuals(logs: FloatArray) -> FloatArray:
        fitted = np.exp(logs[0]) + np.exp(logs[1]) * batch / middle
        return np.append(np.log(fitted / seconds) / sd, (logs - start) @ np.array([1.0, -1.0]) / 2)

    found = least_squares(residuals, start, loss="soft_l1", bounds=(start - 12, start + 12)).x
    return np.asarray(np.exp(found[0]) + np.exp(found[1]) * batches / middle, dtype=float)


def _speeds(curves: Mapping[tuple[str, str], Curve], machines: dict[str, Machine]) -> dict[str, float]:
    """delta by type: ridge solution of log(T(w, t) prior_speed(t)) = mu_w - delta_t + noise, at a middle batch of w."""
    rows: list[tuple[str, str, float]] = []
    for workload in sorted({owner for owner, _ in curves}):
        own = {name: one for (owner, name), one in curves.items() if owner == workload}
        shared = np.array([float(np.median([one.batches[len(one.batches) // 2] for one in own.values()]))])
        for name, one in sorted(own.items()):
            seconds = float(sum(part[0] for part in one.at(shared)))
            rows.append((workload, name, float(np.log(seconds * machines[name].prior_speed))))
    workloads, types = sorted({row[0] for row in rows}), sorted({row[1] for row in rows})
    if not rows:
        return {}
    design = np.zeros((len(rows), len(workloads) + len(types)))
    for at, (workload, name, _) in enumerate(rows):
        design[at, workloads.index(workload)] = 1
        design[at, len(workloads) + types.index(name)] = -1
    ridge = np.diag([1e-9] * len(workloads) + [(_PAIR_SD / _TYPE_SD) ** 2] * len(types))
    found = np.linalg.solve(design.T @ design + ridge, design.T @ np.array([row[2] for row in rows]))
    return {name: float(found[len(workloads) + at]) for at, name in enumerate(types)}
