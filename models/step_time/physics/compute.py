"""Seconds of one device: forward, backward and optimizer by batch, from profiles or from what runs tell.

T(b) = a + k b at large [D]; measured batches are kept and joined by straight lines, since some workloads bend. Where a
type's few runs do not tell a from k, what other types say of a / k stands in. A type on which a workload was never
profiled borrows another's curve: its time is scaled by the ratio of speeds (device_speed.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import pandas as pd
import scipy  # its parts are loaded where they are named: only a fit needs `optimize`, which takes long to import

from ...domain.numeric import BoolArray, FloatArray
from ...domain.setup_table import SetupArrays
from ..machine_specs import Machine
from .device_speed import CORES_SD, PEAK_SD, Speeds, Timed, learn_speeds

# With a single measured batch, the part of its time taken to be proportional to batch.
_PROPORTIONAL = 0.9
# Backward costs about twice forward (two products to one): the split where only the sum is known.
FORWARD_PART = 1 / 3
# A curve is measured if one device was run alone at this many batches; such rows are off by less than this.
_FEWEST_BATCHES, _MEASURED_SD = 3, 0.1
# Rows further off than this tell less of a type than another type does, and a curve of such rows alone is a guess.
TELLING_SD = 0.25
# How far a measured curve's points may be off where they say how other types bend.
_POINT_SD = 0.03
# Standard deviations of log(a / k): where nothing is known of it, and of one type around the others.
_BEND_SD, _TYPE_BEND_SD = 2.0, 0.7
# A second point beside the only batch that was measured, so that the two say how the line goes on.
_BESIDE = np.array([1.0, 1.01])
# A time further than this from the line, in logs, is an outlier and not a bend; told by so many rows.
_OUTLYING, _TELL_OUTLIERS = 0.7, 4
# And rows further off than this tell nothing of a type where there are others of the workload.
_HAZY_SD = 0.35
# Standard deviation of the log of a curve, by where it comes from.
_DOUBT = {"profile": 0.0, "runs": 0.01, "inferred": 0.1, "guessed": 0.6}
# Batches at which a first guess is made; beyond them it goes on as a measured curve does.
_GUESSED_AT = (8.0, 16.0, 32.0, 64.0, 128.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One workload on one type: seconds at the measured batches, ascending.

    `origin` is profile, runs (of one device), inferred (from several, less their waiting), guessed (from several whose
    waiting is unknown or nearly all), scaled (from another type) or flops (nothing was measured).
    """

    batches: tuple[float, ...]
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    optimizer_s: float
    origin: str
    input_part: float = 0.0  # of forward and backward, making the batch; 0 where nobody told
    off: float = 0.0  # how far its log may be off at least, by the best of its rows

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
            off=self.off,
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


def straight(x: FloatArray, y: FloatArray) -> tuple[float, float]:
    """Intercept and slope by least squares, neither negative; through the origin's side where only one x is known."""
    if len(np.unique(x)) == 1:
        middle = float(np.median(y))
        return (1 - _PROPORTIONAL) * middle, _PROPORTIONAL * middle / float(x[0])
    slope, intercept = (float(one) for one in np.polyfit(x, y, 1))
    if slope < 0:
        return float(np.mean(y)), 0.0
    return (intercept, slope) if intercept >= 0 else (0.0, float(x @ y / (x @ x)))


def curves_from_runs(rows: pd.DataFrame, known: Mapping[str, Curve]) -> dict[str, Curve]:
    """By instance type, of one workload's rows, for types that are not among the `known` ones.

    `rows` have instance_type, batch, seconds, sd. What is known of other types says how a type bends.
    """
    points = pd.concat([rows, *(_points(name, one) for name, one in known.items())])
    return {
        str(name): _curve_from_runs(own, _bend(points[points["instance_type"] != name]))
        for name, own in rows.groupby("instance_type")
        if str(name) not in known
    }


def _points(name: str, curve: Curve) -> pd.DataFrame:
    """As runs would tell it, which take the optimizer's time too."""
    seconds = np.add(curve.forward_s, curve.backward_s) + curve.optimizer_s
    return pd.DataFrame({"instance_type": name, "batch": curve.batches, "seconds": seconds, "sd": _POINT_SD})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bend:
    """What is thought of log(a / k) of a line a + k batch before it is measured, and how far that may be off."""

    log_samples: float
    sd: float

    @classmethod
    def of(cls, batch: FloatArray) -> _Bend:
        """Where nothing tells: at a middle batch most of the time is proportional to it."""
        return cls(log_samples=float(np.log((1 - _PROPORTIONAL) / _PROPORTIONAL * np.median(batch))), sd=_BEND_SD)


def _bend(rows: pd.DataFrame) -> _Bend | None:
    """What a workload's rows on other types say of its line on one more; None without rows.

    One log(a / k) fits them all, each type at its own speed; where their batches do not differ it stays unknown.
    """
    if not len(rows):
        return None
    batch, seconds, sd = (rows[name].to_numpy(float) for name in ("batch", "seconds", "sd"))
    which = pd.factorize(rows["instance_type"])[0]
    before = _Bend.of(batch)
    levels = np.array([np.log(np.median(seconds[which == at])) for at in range(which.max() + 1)])
    middle = float(np.median(batch))

    def residuals(z: FloatArray) -> FloatArray:
        samples = np.exp(z[0])
        fitted = z[1:][which] + np.log((samples + batch) / (samples + middle))
        return np.append((fitted - np.log(seconds)) / sd, (z[0] - before.log_samples) / before.sd)

    start = np.append(before.log_samples, levels)
    found = scipy.optimize.least_squares(residuals, start, loss="soft_l1", bounds=(start - 12, start + 12))
    jacobian = np.asarray(found.jac, dtype=float)
    off = float(np.linalg.pinv(jacobian.T @ jacobian)[0, 0])
    return _Bend(log_samples=float(found.x[0]), sd=float(np.hypot(_TYPE_BEND_SD, np.sqrt(off))))


def _curve_from_runs(rows: pd.DataFrame, bend: _Bend | None) -> Curve:
    """Medians by batch where one device was measured at three batches or more, since some workloads bend [physics.md];
    else the robust straight line of all rows, each with its own doubt, bent as other types' are.
    """
    alone = rows[rows["sd"] == rows["sd"].min()]
    measured = len(alone["batch"].unique()) >= _FEWEST_BATCHES and float(alone["sd"].iloc[0]) < _MEASURED_SD
    middle = alone.groupby("batch")["seconds"].median().sort_index()
    batches = np.sort(rows["batch"].unique()).astype(float)
    if measured:
        batches, total = middle.index.to_numpy(float), middle.to_numpy(float)
        line = _robust_line(alone, batches, bend)
        total = np.where(np.abs(np.log(total / line)) > _OUTLYING, line, total)
    else:
        batches = batches if len(batches) > 1 else batches * _BESIDE
        total = _robust_line(rows, batches, bend)
    return Curve(
        batches=tuple(float(one) for one in batches),
        forward_s=tuple(float(one) for one in FORWARD_PART * total),
        backward_s=tuple(float(one) for one in (1 - FORWARD_PART) * total),
        optimizer_s=0.0,
        origin="runs" if measured else "inferred" if float(rows["sd"].median()) < TELLING_SD else "guessed",
        off=float(rows["sd"].min()),
    )


def far_below(rows: pd.DataFrame) -> BoolArray:
    """(rows,) of one workload: far quicker than the line of the type's other rows says? Few rows cannot tell."""
    found = np.zeros(len(rows), dtype=bool)
    for own in rows.groupby("instance_type").indices.values():
        if len(own) >= _TELL_OUTLIERS:
            mine = rows.iloc[own]
            line = _robust_line(mine, mine["batch"].to_numpy(float), None)
            found[own] = np.log(mine["seconds"].to_numpy(float) / line) < -_OUTLYING
    return found


def _robust_line(rows: pd.DataFrame, batches: FloatArray, bend: _Bend | None) -> FloatArray:
    """Seconds at `batches` of exp(i) + exp(j) batch, by log residuals; without contrast as bent as was thought."""
    batch, seconds, sd = (rows[name].to_numpy(float) for name in ("batch", "seconds", "sd"))
    middle, before = float(np.median(batch)), bend or _Bend.of(batch)
    start = np.log(np.array([1 - _PROPORTIONAL, _PROPORTIONAL]) * float(np.median(seconds)))

    def residuals(logs: FloatArray) -> FloatArray:
        fitted = np.exp(logs[0]) + np.exp(logs[1]) * batch / middle
        away = logs[0] - logs[1] + np.log(middle) - before.log_samples
        return np.append(np.log(fitted / seconds) / sd, away / before.sd)

    found = scipy.optimize.least_squares(residuals, start, loss="soft_l1", bounds=(start - 12, start + 12)).x
    return np.asarray(np.exp(found[0]) + np.exp(found[1]) * batches / middle, dtype=float)


class FlopsPrior(Protocol):
    """Curve of a workload of which only the FLOPs are known (flops_prior.py)."""

    def curve(self, flops_per_sample: float, device_tflops: float, batches: tuple[float, ...]) -> tuple[Curve, float]:
        """The curve at `batches`, and the standard deviation of its log."""

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, exactly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeModel:
    """Curves by (workload, type) where measured, and what stands in elsewhere.

    `guess` is for workloads of which nothing was measured at all, where `flops` tells their operations a sample.
    """

    curves: dict[tuple[str, str], Curve]
    machines: dict[str, Machine]
    speeds: Speeds = field(default_factory=Speeds)
    guess: FlopsPrior | None = field(default=None, compare=False, repr=False)
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
