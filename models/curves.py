"""Seconds of one device by batch, of one workload on one type: measured points, or a line through what runs tell.

A line is a + k batch. Where a type's few runs do not tell a from k, what other types say of a / k stands in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy.optimize import least_squares

from .arrays import BoolArray, FloatArray

# With a single measured batch, the part of its time taken to be proportional to batch.
_PROPORTIONAL = 0.9
# Backward costs about twice forward (two products to one): the split where only the sum is known.
_FORWARD_PART = 1 / 3
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
    found = least_squares(residuals, start, loss="soft_l1", bounds=(start - 12, start + 12))
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
        forward_s=tuple(float(one) for one in _FORWARD_PART * total),
        backward_s=tuple(float(one) for one in (1 - _FORWARD_PART) * total),
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

    found = least_squares(residuals, start, loss="soft_l1", bounds=(start - 12, start + 12)).x
    return np.asarray(np.exp(found[0]) + np.exp(found[1]) * batches / middle, dtype=float)
