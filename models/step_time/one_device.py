"""Predict the seconds of one device from workload, kind of device and batch.

The model is a Gaussian process:

    log T1(w, k, b) = a_w + g_w x - u_w log(bandwidth_k) - v_w log(rate_k)
                      + s_w(x) + e_k + d_wk + h_wk x + r_wk(x)

w is a workload at a precision, k a kind of device, and x = log2(batch / middle batch of w).
Bandwidth (GB/s) and the arithmetic rate in use (TFLOP/s) are from the data sheet. g, u and v are
shared values plus a deviation for each workload. s and r are smooth curves plus a deviation for
each batch, because the seconds of some workloads do not rise with every larger batch. A kind
without a data sheet has a wider prior of e_k. If the operations of a sample are known, the prior of
a_w is centred on the seconds that these operations take at an efficiency that all workloads share.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import pandas as pd
import scipy

from ..domain.categorical import Keys, numbered
from ..domain.numeric import FloatArray, IntArray

# Prior means of g (per octave), u and v. Memory limits some operations of a network, arithmetic
# limits the rest [D].
_GROWTH, _BANDWIDTH, _RATE = 0.9 * np.log(2), 0.5, 0.5
# GB/s and TFLOP/s of a usual device; data sheets are relative to it.
_USUAL = (500.0, 20.0)
# Prior standard deviations of logs. The learned values maximise the marginal likelihood, with a
# prior around these values.
SPREADS: dict[str, float] = {
    "shared_growth": 0.1,
    "shared_bandwidth": 0.25,
    "shared_rate": 0.25,
    "growth": 0.1,  # of a workload, per octave
    "bandwidth": 0.15,
    "rate": 0.15,
    "curve": 0.3,
    "batch": 0.03,
    "kind": 0.12,
    "cell": 0.08,  # a workload on a kind of device
    "cell_growth": 0.02,
    "cell_curve": 0.06,
    "cell_batch": 0.02,
    "shared_work": 0.2,
    "efficiency": 0.4,  # deviation of a workload with known operations from the shared efficiency
    "run": 0.02,  # noise of a measurement, in addition to its stated standard deviation
}
_NAMES = tuple(SPREADS)
# Prior standard deviations of a workload's level a_w, of the shared efficiency, and of a kind of
# device without a data sheet.
_LEVEL, _SHARED_EFFICIENCY, _NO_SHEET = 5.0, 1.0, 1.5
# Prior mean of the shared efficiency, slope of log seconds in the log of a step's operations, and
# log seconds of 1e12 operations.
_EFFICIENCY, _BY_WORK = 0.4, -0.2
_USUAL_WORK = float(np.log(1e12 / (0.4 * _USUAL[1] * 1e12)))
_USUAL_OCTAVE = 5.0  # log2 of the middle batch, if no workload was measured
_OCTAVES = 2.5  # length scale of the curves, in octaves of batch
_FREEDOM = 4.0  # degrees of freedom of Student's t for outliers
_MOST = 700  # most points in the fit
_MOST_LEARNED = 400  # most points from which spreads are learned
# Degrees of freedom of Student's t for workloads' efficiency; rounds that learn the efficiency;
# rounds that also learn spreads.
_UNUSUAL_FREEDOM, _TURNS, _LEARNED = 2.0, 5, 2
_WAVES = 128  # random Fourier features of a curve, for draws
# One prior standard deviation of "run" is this factor; of all other spreads, it is 2. Noise differs
# most between providers.
_RUN_FACTOR = 4.0


# GB/s, TFLOP/s in use, and confidence: 1 with a data sheet, 0 if unknown.
Sheet = tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class Points:
    """The inputs of the Gaussian process; all arrays are (points,).

    `workload` and `kind` are numbers that identify the workload and the kind of device. A number is
    negative if the workload or kind was not measured.
    """

    workload: IntArray
    kind: IntArray
    octave: FloatArray  # log2(batch / middle batch of the workload)
    bandwidth: FloatArray  # log(GB/s / GB/s of the usual device); 0 if unknown
    rate: FloatArray  # log(TFLOP/s / TFLOP/s of the usual device); 0 if unknown
    sheet: FloatArray  # confidence in bandwidth and rate, 0 to 1
    work: FloatArray  # log seconds of the operations on the usual device; 0 if unknown
    work_known: FloatArray  # 1 if `work` is known, else 0
    own: FloatArray  # factor on the spread of the workload's efficiency; 0 if `work` is unknown

    def take(self, picked: IntArray) -> Points:
        return Points(*(getattr(self, name)[picked] for name in self.__slots__))


def _kernel(one: Points, other: Points, spread: Mapping[str, float]) -> FloatArray:
    """Return the prior covariance of log seconds, a row per `one` and a column per `other`."""
    same = one.workload[:, None] == other.workload
    kind = one.kind[:, None] == other.kind
    x, bandwidth, rate = (
        np.multiply.outer(getattr(one, name), getattr(other, name))
        for name in ("octave", "bandwidth", "rate")
    )
    apart = one.octave[:, None] - other.octave
    near, equal = np.exp(-0.5 * (apart / _OCTAVES) ** 2), np.abs(apart) < 1e-6

    def v(name: str) -> float:
        return spread[name] ** 2

    both = np.multiply.outer(one.work_known, other.work_known)
    own = v("efficiency") * np.multiply.outer(one.own, other.own)
    workload = (
        _LEVEL**2 * (1 - both)
        + own
        + v("growth") * x
        + v("bandwidth") * bandwidth
        + v("rate") * rate
    )
    workload = workload + v("curve") * near + v("batch") * equal
    cell = v("cell") + v("cell_growth") * x + v("cell_curve") * near + v("cell_batch") * equal
    of_kind = v("kind") + _NO_SHEET**2 * np.multiply.outer(1 - one.sheet, 1 - other.sheet)
    more = np.multiply.outer(
        one.work_known * (one.work - _USUAL_WORK), other.work_known * (other.work - _USUAL_WORK)
    )
    shared = (
        _SHARED_EFFICIENCY**2 * both
        + v("shared_work") * more
        + v("shared_growth") * x
        + v("shared_bandwidth") * bandwidth
        + v("shared_rate") * rate
    )
    return np.asarray(shared + same * workload + kind * of_kind + (same & kind) * cell, dtype=float)


def _mean(points: Points) -> FloatArray:
    by_sheet = _BANDWIDTH * points.bandwidth + _RATE * points.rate
    used_better = _BY_WORK * points.work_known * (points.work - _USUAL_WORK)
    return np.asarray(points.work + used_better + _GROWTH * points.octave - by_sheet, dtype=float)


class _Solved(NamedTuple):
    """The posterior of the Gaussian process.

    It consists of the kernel weights, the Cholesky factor of the measurements' covariance, and the
    standard deviations of their noise.
    """

    weights: FloatArray
    factor: FloatArray
    noise_sd: FloatArray


@dataclass(frozen=True, kw_only=True)
class OneDevice:
    """Predicts the log seconds of one device, with joint uncertainty.

    The seconds are those of a forward and a backward pass.
    """

    workloads: dict[str, int]  # the numbers of measured workloads, as in Points
    kinds: dict[str, int]  # the numbers of measured kinds of device
    middle: dict[str, float]  # log2 of the middle batch, by workload
    sheets: dict[str, Sheet]  # by kind, or by "kind|workload"
    flops: dict[str, float]  # operations of forward and backward for a sample, by workload
    unusual: dict[str, float]  # factor on the spread of the efficiency, by workload
    points: Points  # the measured points
    log_s: FloatArray  # (points,) their log seconds
    sd: FloatArray  # (points,) standard deviations of log_s
    spread: dict[str, float]

    @classmethod
    def fit(
        cls,
        points: pd.DataFrame,
        *,
        sheets: Mapping[str, Sheet],
        flops: Mapping[str, float] | None = None,
    ) -> OneDevice:
        """Fit the Gaussian process to measured points.

        Args:
            points: frame with columns workload, kind, batch, log_s (log seconds) and sd (the
                standard deviation of log_s).
            sheets: data sheets by kind of device. Keys "kind|workload" have the rate in the
                precision of a workload.
            flops: operations of forward and backward for a sample, by workload.

        Raises:
            ValueError: if there are no points.
        """
        batch, log_s, sd = (points[name].to_numpy(float) for name in ("batch", "log_s", "sd"))
        if not len(points):
            raise ValueError(
                "nothing to learn from: there is no profile and no run with a positive step time"
            )
        good = np.argsort(sd, kind="stable")[:_MOST]
        names, own = (
            points[name].astype(str).to_numpy()[good].tolist() for name in ("workload", "kind")
        )
        octaves = np.log2(batch[good])
        middle = {
            name: float(np.median(octaves[np.array(names) == name])) for name in sorted(set(names))
        }
        empty = np.zeros(0)
        model = cls(
            workloads={name: at for at, name in enumerate(sorted(set(names)))},
            kinds={name: at for at, name in enumerate(sorted(set(own)))},
            middle=middle,
            sheets=dict(sheets),
            flops=dict(flops or {}),
            unusual={},
            points=Points(*(np.zeros(0, dtype=np.intp),) * 2, *(empty,) * 7),
            log_s=log_s[good],
            sd=sd[good],
            spread=dict(SPREADS),
        )
        model = replace(model, points=model.at(names, own, batch[good]))
        for iteration in range(_TURNS if model.flops else 1):
            if len(good) > 8 and iteration < _LEARNED:
                model = replace(model, spread=_learned(model))
            model = replace(model, unusual=model._off())
            model = replace(model, points=model.at(names, own, batch[good]))
        return model

    def _off(self) -> dict[str, float]:
        """Return, for each workload, the factor by which to widen the spread of its efficiency.

        Most networks with equal operations take equal time, but some take twice as long. The factor
        gives the efficiency the tails of Student's t distribution, so that unusual networks hardly
        change what is expected of all other networks.
        """
        points, weights = self.points, self._solved.weights
        found = {}
        for name, number in self.workloads.items():
            mine = points.workload == number
            effect = (
                self.spread["efficiency"]
                * points.own[mine].max(initial=0.0) ** 2
                * float(weights[mine].sum())
            )
            found[name] = float(
                np.sqrt(max((_UNUSUAL_FREEDOM + effect**2) / (_UNUSUAL_FREEDOM + 1), 1.0))
            )
        return found

    def at(self, workload: Sequence[str], kind: Sequence[str], batch: FloatArray) -> Points:
        """Return one point for each position of `workload`, `kind` (of device) and `batch`.

        A workload or kind that was not measured is predicted from its prior.
        """
        owners, kinds = Keys.of(workload), Keys.of(kind)
        middle = owners.values(self.middle_of)
        octave = np.log2(batch) - middle
        pairs, which = numbered(zip(workload, kind, strict=True))
        sheets = [self.sheets.get(f"{k}|{w}") or self.sheets.get(k) for w, k in pairs]
        known = np.array([one or (*_USUAL, 0.0) for one in sheets]).reshape(-1, 3)[which]
        logs = np.log(known[:, :2] / np.array(_USUAL))
        flops = owners.values(lambda name: self.flops.get(name, 0.0))
        rate = _EFFICIENCY * _USUAL[1] * 1e12
        work = np.where(flops > 0, np.log(np.where(flops > 0, flops, 1.0) * 2**middle / rate), 0.0)
        return Points(
            owners.values(lambda name: _number(self.workloads, name)).astype(np.intp),
            kinds.values(lambda name: _number(self.kinds, name)).astype(np.intp),
            octave,
            logs[:, 0],
            logs[:, 1],
            known[:, 2],
            work,
            (flops > 0).astype(float),
            owners.values(lambda name: self.unusual.get(name, 1.0)) * (flops > 0),
        )

    def predict(self, points: Points) -> FloatArray:
        """Return a (points,) array: the median log seconds at each point."""
        near = _kernel(points, self.points, self.spread)
        return np.asarray(_mean(points) + near @ self._solved.weights, dtype=float)

    def covariance(self, one: Points, other: Points) -> FloatArray:
        """Return the posterior covariance of log seconds: a row per `one`, a column per `other`."""
        left, right = (
            scipy.linalg.solve_triangular(
                self._solved.factor, _kernel(self.points, each, self.spread), lower=True
            )
            for each in (one, other)
        )
        return np.asarray(_kernel(one, other, self.spread) - left.T @ right, dtype=float)

    def draws(self, points: Points, *, count: int, seed: int) -> FloatArray:
        """Return a (points, count) array: joint draws of the errors of predicted log seconds.

        A draw at a point does not depend on which other points are drawn. By Matheron's rule, draws
        from the prior are corrected with simulated measurements.
        """
        before = self._before(points, count=count, seed=seed)
        near = _kernel(points, self.points, self.spread)
        return np.asarray(before - near @ self._drawn_weights(count, seed))

    def _drawn_weights(self, count: int, seed: int) -> FloatArray:
        """Return a (measured points, count) array: kernel weights of simulated measurements.

        Only the weights for the last pair of `count` and `seed` are cached.
        """
        if (count, seed) not in self._drawn:
            known, solved = self.points, self._solved
            noise = np.random.default_rng([seed, 1]).standard_normal((len(known.octave), count))
            off = self._before(known, count=count, seed=seed) + solved.noise_sd[:, None] * noise
            self._drawn.clear()
            self._drawn[count, seed] = scipy.linalg.cho_solve((solved.factor, True), off)
        return self._drawn[count, seed]

    @cached_property
    def _drawn(self) -> dict[tuple[int, int], FloatArray]:
        return {}

    def _before(self, points: Points, *, count: int, seed: int) -> FloatArray:
        """Return a (points, count) array: draws from the prior, whose covariance is `_kernel`."""
        found = np.zeros((len(points.octave), count))

        def add(where: IntArray, what: object, values: FloatArray) -> None:
            """Add `values` (rows, columns) times random weights to the rows `where`.

            Calls with equal `what` use equal weights.
            """
            random = np.random.default_rng([seed, zlib.crc32(repr(what).encode())])
            found[where] += values @ random.standard_normal((values.shape[1], count))

        def curves(where: IntArray, what: object, of: str, batch: str) -> None:
            x, random = (
                points.octave[where],
                np.random.default_rng([seed, zlib.crc32(repr((what, "waves")).encode())]),
            )
            waves, phases = (
                random.standard_normal(_WAVES) / _OCTAVES,
                random.uniform(0, 2 * np.pi, _WAVES),
            )
            scale = self.spread[of] * np.sqrt(2 / _WAVES)
            add(where, (what, "curve"), scale * np.cos(np.multiply.outer(x, waves) + phases))
            for each in np.unique(np.round(x, 6)).tolist():
                own = where[np.round(x, 6) == each]
                add(own, (what, "batch", each), np.full((len(own), 1), self.spread[batch]))

        v, every = self.spread, np.arange(len(points.octave))
        more = points.work_known * (points.work - _USUAL_WORK)
        shared = [
            _SHARED_EFFICIENCY * points.work_known,
            v["shared_work"] * more,
            v["shared_growth"] * points.octave,
        ]
        shared += [v["shared_bandwidth"] * points.bandwidth, v["shared_rate"] * points.rate]
        add(every, "shared", np.stack(shared, axis=1))
        for kind in np.unique(points.kind).tolist():
            own = np.flatnonzero(points.kind == kind)
            add(
                own,
                ("kind", kind),
                np.stack([np.full(len(own), v["kind"]), _NO_SHEET * (1 - points.sheet[own])], 1),
            )
        for workload in np.unique(points.workload).tolist():
            own = np.flatnonzero(points.workload == workload)
            level = np.sqrt(
                _LEVEL**2 * (1 - points.work_known[own])
                + v["efficiency"] ** 2 * points.own[own] ** 2
            )
            parts = [
                level,
                v["growth"] * points.octave[own],
                v["bandwidth"] * points.bandwidth[own],
            ]
            add(
                own,
                ("workload", workload),
                np.stack([*parts, v["rate"] * points.rate[own]], axis=1),
            )
            curves(own, ("workload", workload), "curve", "batch")
            for kind in np.unique(points.kind[own]).tolist():
                cell = own[points.kind[own] == kind]
                flat = np.stack(
                    [np.full(len(cell), v["cell"]), v["cell_growth"] * points.octave[cell]], axis=1
                )
                add(cell, ("cell", workload, kind), flat)
                curves(cell, ("cell", workload, kind), "cell_curve", "cell_batch")
        return found

    def reaches(self, workload: str) -> tuple[float, float]:
        """Return the smallest and the largest measured batch of a workload; (1, 1) if it has none.

        Batches are samples of a device in a micro-step.
        """
        own = self.points.octave[self.points.workload == self.workloads.get(workload, -1)]
        middle = self.middle.get(workload, 0.0)
        return (2 ** (own.min() + middle), 2 ** (own.max() + middle)) if len(own) else (1.0, 1.0)

    def middle_of(self, workload: str) -> float:
        """Return log2 of the workload's middle batch.

        If the workload was not measured, return the median of all workloads' middle batches.
        """
        return self.middle.get(workload, self._usual_octave)

    @cached_property
    def _usual_octave(self) -> float:
        return float(np.median(list(self.middle.values()) or [_USUAL_OCTAVE]))

    @cached_property
    def _solved(self) -> _Solved:
        """Return the posterior. Outliers count less, as with noise of Student's t distribution."""
        off = self.log_s - _mean(self.points)
        known = _kernel(self.points, self.points, self.spread)
        noise = self.sd**2 + self.spread["run"] ** 2
        outlying = np.ones(len(off))
        for _ in range(4):
            covariance = known + np.diag(noise * outlying) + 1e-9 * np.eye(len(off))
            factor = np.asarray(np.linalg.cholesky(covariance), dtype=float)
            weights = scipy.linalg.cho_solve((factor, True), off)
            # leave-one-out residuals, so that an outlier does not hide itself
            inverse = scipy.linalg.cho_solve((factor, True), np.eye(len(off)))
            away = weights / np.diag(inverse) * np.sqrt(np.diag(inverse))
            outlying = np.maximum(1.0, (_FREEDOM + away**2) / (_FREEDOM + 1)) ** 2
        return _Solved(weights, factor, np.sqrt(noise * outlying))


def _number(known: Mapping[str, int], name: str) -> int:
    """Return the number of `name` in `known`, or a negative checksum if it has none.

    Python's `hash` is not used, because it differs between processes.
    """
    return known.get(name, -1 - zlib.crc32(name.encode()))


def _learned(model: OneDevice) -> dict[str, float]:
    """Return the most probable spreads, given a sample of the measured points.

    The prior of the spreads is centred on SPREADS.
    """
    every = np.arange(len(model.log_s))
    picked = (
        every
        if len(every) <= _MOST_LEARNED
        else np.sort(np.random.default_rng(0).permutation(every)[:_MOST_LEARNED])
    )
    points, off = model.points.take(picked), (model.log_s - _mean(model.points))[picked]
    sd = model.sd[picked]
    start = np.log(np.array([SPREADS[name] for name in _NAMES]))
    free = 5.0
    believed = np.array([_RUN_FACTOR if name == "run" else 2.0 for name in _NAMES])

    def loss(shift: FloatArray) -> float:
        spread = dict(zip(_NAMES, np.exp(start + shift), strict=True))
        covariance = _kernel(points, points, spread) + np.diag(sd**2 + spread["run"] ** 2 + 1e-9)
        try:
            factor = np.linalg.cholesky(covariance)
        except np.linalg.LinAlgError:
            return 1e9
        white = scipy.linalg.solve_triangular(factor, off, lower=True)
        # with fewer than three points use Student's t: one outlier must not move a spread far
        fit = (
            0.5 * (free + len(off)) * np.log1p((white @ white) / free)
            if len(off) < 3
            else 0.5 * white @ white
        )
        return float(
            fit + np.log(np.diag(factor)).sum() + 0.5 * ((shift / np.log(believed)) ** 2).sum()
        )

    found = scipy.optimize.minimize(
        loss,
        np.zeros(len(start)),
        method="L-BFGS-B",
        options={"maxiter": 15},
        bounds=[(-3, 3)] * len(start),
    )
    return {name: float(one) for name, one in zip(_NAMES, np.exp(start + found.x), strict=True)}
