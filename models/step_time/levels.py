"""Fit the step-time formula with multi-level parameters.

Each parameter is a shared value plus deviations for the kind of device, the strategy and the cell:

    log step = log formula(setup; theta) + r(setup) + noise
    theta = all + kind + strategy + cell

formula.py has the equation. The seconds of one device are parameters too; one_device.py gives their
prior. A *cell* is a workload in one mode on one kind of device. A strategy other than DDP has the
same deviation on all kinds of device. r is a Gaussian process: similar setups of a cell have
similar residuals. Deviations without measurements keep their prior, so that no workload needs a
separate fit.

The fit is a linear regression around the most probable parameters. z are the whitened parameters: 0
is the prior mean and 1 is one prior standard deviation ("spread") above it. For the measurements of
a cell c, K_c is the covariance of r plus noise, and J_c has the derivatives of log step seconds
with respect to z:

    A = 1 + sum_c J_c' K_c^-1 J_c,      z ~ N(z_map, A^-1)                               (Laplace)

The spreads of the levels are learned by expectation-maximisation with pseudo-counts (empirical
Bayes). Calibration then leaves out one cell at a time and widens the spreads to cover the errors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import scipy

from ..domain.categorical import Keys
from ..domain.numeric import Z_90, FloatArray, IntArray
from .formula import LEVELS, MEAN, NAMES, Line, Times, moved_step_s, step_times
from .one_device import Points
from .setup_arrays import workload_and_mode

# Length scales of the residual's broad and narrow kernel, for each feature: octaves of batch, of
# machines and of devices per machine; imbalance; octaves of speed.
LENGTHS = np.array([[3.0, 1.5, 1.5, 0.5, 1.0], [1.0, 0.5, 0.5, 0.2, 0.3]])
# Initial standard deviations: broad kernel, narrow kernel, noise of one run.
SPREADS = np.array([0.05, 0.04, 0.03])
_PSEUDO = 4.0  # number of groups that the initial spreads count for
_LOOSER = (6.0, 3.0, 1.5, 1.0, 1.0, 1.0, 1.0)  # factor on the residual's spreads in each round
_TURNS, _LAST = 8, 10  # Gauss-Newton steps in each round, and in the last search
# Most rows that are used of a cell: while spreads are learned; in the last search; for predictions.
_SOUGHT_ON, _SEARCHED, _MOST = 120, 400, 1200
_FREEDOM = 2.0  # degrees of freedom of Student's t for outlying rows
_ENOUGH, _RESIDUAL_SD = (
    40,
    0.5,
)  # rows needed to learn a cell's spreads; prior sd of their log around those of the kind
_TAIL = 4.0  # degrees of freedom of Student's t for deviations
# Calibration: the number of cells that are left out; the rows that such a cell keeps in the second
# fit; Gauss-Newton steps; the largest factor on the variance.
_MOST_LEFT_OUT, _FEW, _LEFT_OUT_TURNS, _MOST_WIDER = 9, 6, 6, 9.0
_STEP = 1e-4
_LEARNED = ("z", "prior", "spread", "residual", "noisier", "widened", "widened_begun")
_SETTLED = 3e-4  # relative fall of the loss below which the search stops


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The inputs of the regression, with a row per setup. `kind` is the kind of device."""

    line: Line
    workload: Keys
    kind: Keys
    features: FloatArray  # (rows, 5) features of the residual's kernel
    point: IntArray  # (rows, members) positions in the list of all points; -1 for padding

    def take(self, at: IntArray) -> Rows:
        line = Line(*(getattr(self.line, name)[at] for name in Line.__slots__))
        return Rows(
            line=line,
            workload=self.workload.take(at),
            kind=self.kind.take(at),
            features=self.features[at],
            point=self.point[at],
        )

    def joined(self, other: Rows) -> Rows:
        """Return these rows followed by the rows of `other`. Point positions are not changed."""
        width = max(self.point.shape[1], other.point.shape[1])

        def wide(values: Any, padded: float = 0.0) -> Any:
            missing = width - values.shape[1] if values.ndim == 2 else 0
            if not missing:
                return values
            return np.pad(values, [(0, 0), (0, missing)], constant_values=padded)

        line = {
            name: np.concatenate(
                [wide(getattr(one.line, name), float(name == "middle_s")) for one in (self, other)]
            )
            for name in Line.__slots__
        }
        return Rows(
            line=Line(**line),
            workload=self.workload + other.workload,
            kind=self.kind + other.kind,
            features=np.concatenate([self.features, other.features]),
            point=np.concatenate([wide(one.point, -1) for one in (self, other)]),
        )


@dataclass(slots=True)
class Block:
    """The rows of one cell (a workload in one mode on one kind of device) in the regression."""

    name: tuple[str, str]
    at: IntArray  # positions of the rows
    columns: IntArray  # positions in z
    factor: FloatArray = field(default_factory=lambda: np.zeros((0, 0)))  # Cholesky factor of K_c
    slopes: FloatArray = field(default_factory=lambda: np.zeros((0, 0)))  # J_c
    off: FloatArray = field(default_factory=lambda: np.zeros(0))  # log measured - log formula at z
    # (rows,) factors on the variance of the noise: above 1 for outliers
    outlying: FloatArray = field(default_factory=lambda: np.zeros(0))
    neighbours: Neighbours | None = None  # computed after the fit


@dataclass(frozen=True, slots=True)
class Neighbours:
    """The measurements of a fitted cell, prepared for predictions.

    Measurements with equal features are pooled into one "place": their precision-weighted mean.
    Pooling does not change predictions [D]. Let E (rows, places) indicate the place of each row, D
    be the noise of the rows, and k any covariances. Then

        k E' (E K E' + D)^-1 y = k (K + N)^-1 N E' D^-1 y,      N = (E' D^-1 E)^-1
    """

    features: FloatArray  # (places, 5)
    place: IntArray  # (rows,)
    weight: FloatArray  # (rows,) weight in the mean of its place
    factor: FloatArray  # Cholesky of K + N
    solved: FloatArray  # slopes and residuals at the places, whitened by `factor`

    def whitened(self, values: FloatArray) -> FloatArray:
        """Pool and whiten `values` (rows, columns); return a (places, columns) array."""
        return _whitened(self.factor, self.place, self.weight[:, None] * values)


def _whitened(factor: FloatArray, place: IntArray, weighed: FloatArray) -> FloatArray:
    pooled = np.zeros((len(factor), weighed.shape[1]))
    np.add.at(pooled, place, weighed)
    return np.asarray(scipy.linalg.solve_triangular(factor, pooled, lower=True), dtype=float)


def distinct(features: FloatArray) -> tuple[FloatArray, IntArray]:
    """Return a pair: the distinct rows of `features`, and each row's position among them."""
    found, place = np.unique(features, axis=0, return_inverse=True)
    return found, np.asarray(place, dtype=np.intp).reshape(-1)


class Columns:
    """Assigns the columns of z to deviations of each level and to workloads' one-device seconds.

    `cells` are the (workload, kind of device) pairs of the measurements. `points` is the number of
    columns for the one-device seconds of each workload.
    """

    def __init__(self, cells: Sequence[tuple[str, str]], points: dict[str, int]) -> None:
        sizes: dict[tuple[str, object], int] = {}
        met = {("all", "")} | {key for cell in cells for key in self.keys(*cell)}
        for level in LEVELS:
            for key in sorted((key for key in met if key[0] == level), key=repr):
                sizes[key] = int((LEVELS[level] > 0).sum())
        sizes |= {("alone", workload): many for workload, many in sorted(points.items())}
        ends = np.cumsum([0, *sizes.values()]).tolist()
        self.groups = {
            key: np.arange(*pair) for key, pair in zip(sizes, pairwise(ends), strict=True)
        }
        self.count = ends[-1]

    def keys(self, workload: str, kind: str) -> list[tuple[str, object]]:
        """Return the (level, name) keys of all deviations that affect a cell.

        A deviation without measurements has a key but no column in z. DDP has no deviation at the
        level of strategies.
        """
        mode = workload_and_mode(workload)[1]
        strategy: list[tuple[str, object]] = (
            [("strategy", mode.strategy)] if mode.of_several else []
        )
        return [("all", ""), ("kind", kind), *strategy, ("cell", (workload, kind))]

    def of(self, workload: str, kind: str) -> IntArray:
        """Return the columns of z that affect a cell; columns of one-device seconds come last."""
        keys = [*self.keys(workload, kind), ("alone", workload)]
        return np.concatenate([self.groups[key] for key in keys if key in self.groups])


def kernel(one: FloatArray, other: FloatArray, spread: FloatArray) -> FloatArray:
    """Return the covariance of a cell's residual, with shape (rows of `one`, rows of `other`).

    `one` and `other` have a row of features per setup. `spread` starts with the standard deviations
    of the broad and of the narrow kernel.
    """
    found = np.zeros((len(one), len(other)))
    for length, own in zip(LENGTHS, spread, strict=False):
        a, b = one / length, other / length
        apart = (a**2).sum(axis=1)[:, None] + (b**2).sum(axis=1) - 2 * a @ b.T
        found += own**2 * np.exp(-0.5 * np.maximum(apart, 0))
    return found


class Regression:
    """The multi-level regression that the module's docstring describes."""

    def __init__(
        self,
        rows: Rows,
        log_step: FloatArray,
        weight: FloatArray,
        *,
        alone: dict[str, tuple[FloatArray, FloatArray]],
        offsets: dict[str, int],
        points: dict[str, tuple[Points, FloatArray]],
    ) -> None:
        """Prepare the regression; `fit` or `restore` follows.

        Args:
            rows: the input rows.
            log_step: (rows,) log of measured step seconds.
            weight: (rows,) effective number of runs of a row.
            alone: for each workload, the prior of one device's log seconds: the mean (points,)
                and a factor (points, columns) of the covariance.
            offsets: for each workload, the position of its first point in the list of all points.
            points: for each workload, its points and the matrix that maps their log seconds to
                columns of z.
        """
        self.points = points
        self.rows, self.log_step, self.weight, self.alone, self.offsets = (
            rows,
            log_step,
            weight,
            alone,
            offsets,
        )
        cells = list(zip(rows.workload, rows.kind, strict=True))
        self.columns = Columns(
            cells, {name: factor.shape[1] for name, (_, factor) in alone.items()}
        )
        self.spread = {level: one.copy() for level, one in LEVELS.items()}
        self.residual: dict[tuple[str, str], FloatArray] = {
            cell: SPREADS.copy() for cell in sorted(set(cells))
        }
        self.z = np.zeros(self.columns.count)
        places: dict[tuple[str, str], list[int]] = {}
        for at, cell in enumerate(cells):
            places.setdefault(cell, []).append(at)
        self.blocks = [
            Block(
                name=cell,
                at=np.array(own),
                columns=self.columns.of(*cell),
                outlying=np.ones(len(own)),
            )
            for cell, own in sorted(places.items())
        ]
        self.noisier: dict[tuple[str, str], float] = {}
        # Factors on the levels' spreads by kind of device; "" stands for any other kind. The first
        # applies to cells without measurements, the second to cells with few measurements.
        self.widened: dict[str, float] = {}
        self.widened_begun: dict[str, float] = {}
        self.precision = np.eye(self.columns.count)
        self.prior = np.ones(self.columns.count)  # prior precisions of z, with Student's tails

    # values and derivatives of the formula

    def times(self, rows: Rows, workload: str, kind: str, drift: FloatArray) -> Times:
        """Evaluate the formula with the learned parameters for `rows`, which belong to one cell.

        `drift` (rows, members) is added to one device's log seconds.
        """
        return step_times(
            _moved(rows.line, drift), np.tile(self.values(workload, kind, self.z), (len(drift), 1))
        )

    def values(self, workload: str, kind: str, z: FloatArray) -> FloatArray:
        """Return a (parameters,) array: the formula's parameters for a cell, given `z`."""
        found = MEAN.copy()
        for key in self.columns.keys(workload, kind):
            if key in self.columns.groups:
                moved = LEVELS[key[0]] > 0
                found[moved] += self.spread[key[0]][moved] * z[self.columns.groups[key]]
        return found

    def log_alone(self, workload: str, z: FloatArray) -> FloatArray:
        """Return a (points,) array: log seconds of one device at a workload's points, given `z`."""
        mean, factor = self.alone[workload]
        return np.asarray(mean + factor @ z[self.columns.groups["alone", workload]], dtype=float)

    def slopes(
        self, rows: Rows, values: FloatArray, drift: FloatArray
    ) -> tuple[FloatArray, FloatArray, FloatArray, Times]:
        """Return log step seconds, two arrays of their derivatives, and the times.

        The first derivatives (rows, parameters) are with respect to the parameters, the second
        (rows,) with respect to the log seconds of one device. `values` (rows, parameters) are the
        parameters. `drift` (rows, members) is added to one device's log seconds.
        """
        line = _moved(rows.line, drift)
        here = step_times(line, values)
        base: FloatArray = np.log(here.step_s)
        found: FloatArray = (np.log(moved_step_s(line, values, by=_STEP)) - base[:, None]) / _STEP
        longer = step_times(_moved(line, np.full_like(drift, _STEP)), values)
        by_alone: FloatArray = (np.log(longer.step_s) - base) / _STEP
        return base, found, by_alone, here

    def design(self, by: FloatArray, known: Sequence[tuple[str, object]]) -> FloatArray:
        """Return a (rows, columns) array: derivatives with respect to the columns of z.

        `known` are the keys of the deviations to which these columns belong. `by` (rows,
        parameters) are the derivatives with respect to the parameters.
        """
        return np.concatenate(
            [
                by[:, LEVELS[level] > 0] * self.spread[level][LEVELS[level] > 0]
                for level, _ in known
            ],
            axis=1,
        )

    def _state(
        self, blocks: Sequence[Block], z: FloatArray
    ) -> tuple[Rows, FloatArray, FloatArray, FloatArray]:
        """Return the rows of all blocks and three arrays: parameters, drift and point positions.

        The parameters are (rows, parameters). The drift (rows, members) is the change of one
        device's log seconds from their prior mean. `z` determines both. The last array (rows,
        members) has positions in the list of the workload's points, and -1 for padding.
        """
        rows = self.rows.take(
            np.concatenate([block.at for block in blocks] or [np.zeros(0, dtype=np.intp)])
        )
        sizes = [len(block.at) for block in blocks]
        values = [self.values(*block.name, z) for block in blocks]
        offsets = np.repeat([self.offsets[block.name[0]] for block in blocks], sizes)
        place = np.where(rows.point >= 0, rows.point - offsets[:, None], -1)
        drift, first = np.zeros(place.shape), 0
        for block, size in zip(blocks, sizes, strict=True):
            own = slice(first, first := first + size)
            moved = self.log_alone(block.name[0], z) - self.alone[block.name[0]][0]
            drift[own] = np.append(moved, 0.0)[place[own]]  # padding (-1) reads the appended 0
        return rows, np.repeat(np.reshape(values, (-1, len(NAMES))), sizes, axis=0), drift, place

    def _sides(
        self, blocks: Sequence[Block], z: FloatArray
    ) -> Iterator[tuple[Block, FloatArray, FloatArray]]:
        """Yield (block, residuals, slopes) for each block.

        Residuals are log measured minus log computed seconds, and slopes are the derivatives of log
        computed seconds with respect to z. The formula is evaluated once for all blocks together,
        to save time.
        """
        rows, values, drift, place = self._state(blocks, z)
        base, by, by_alone, times = self.slopes(rows, values, drift)
        slowest, first = np.take_along_axis(place, times.slowest[:, None], axis=1)[:, 0], 0
        for block in blocks:
            own = slice(first, first := first + len(block.at))
            factor = self.alone[block.name[0]][1]
            factor = np.vstack([factor, np.zeros(factor.shape[1])])
            design = self.design(by[own], self.columns.keys(*block.name))
            slopes = np.concatenate([design, by_alone[own, None] * factor[slowest[own]]], axis=1)
            yield block, self.log_step[block.at] - base[own], slopes

    def slowness(self) -> dict[str, float]:
        """Return, for each kind of device, how much slower than usual its exchanges are.

        The value is the log of (exchange time of the kind / exchange time that all kinds share).
        """
        place = NAMES.index("log_scale")
        moved = LEVELS["kind"] > 0
        at, spread = int(moved[:place].sum()), self.spread["kind"][place]
        kinds = {name: own for (level, name), own in self.columns.groups.items() if level == "kind"}
        return {str(name): float(spread * self.z[own[at]]) for name, own in kinds.items()}

    def neighbours(self, block: Block) -> Neighbours:
        """Return the prepared measurements of a fitted cell; the first call computes them."""
        if block.neighbours is None:
            features, place = distinct(self.rows.features[block.at])
            precision = 1 / self._noise(block)
            whole = np.bincount(place, precision)
            weight, spread = precision / whole[place], self.residual[block.name]
            factor = np.asarray(
                np.linalg.cholesky(kernel(features, features, spread) + np.diag(1 / whole)),
                dtype=float,
            )
            sides = weight[:, None] * np.column_stack([block.slopes, block.off])
            block.neighbours = Neighbours(
                features, place, weight, factor, _whitened(factor, place, sides)
            )
        return block.neighbours

    def _noise(self, block: Block) -> FloatArray:
        """Return a (rows,) array: the noise variance of each measurement of a cell."""
        noise = self.residual[block.name][2] ** 2 / self.weight[block.at] * block.outlying
        return np.asarray(noise + 1e-8, dtype=float)

    def learned(self) -> dict[str, Any]:
        """Return the results of `fit` and `calibrate` in the form that `restore` expects."""
        blocks = tuple((block.name, block.at, block.outlying) for block in self.blocks)
        return {name: getattr(self, name) for name in _LEARNED} | {"blocks": blocks}

    def restore(self, learned: Mapping[str, Any]) -> None:
        """Restore the results that `learned` returned for a regression on the same rows."""
        for name in _LEARNED:
            setattr(self, name, learned[name])
        self.blocks = [
            Block(name, at, self.columns.of(*name), outlying=outlying)
            for name, at, outlying in learned["blocks"]
        ]
        self._factor()
        self._linearise(self.z)

    # the fit

    def fit(self, *, seed: int) -> None:
        """Learn the spreads from a sample of each cell's rows, then the parameters from more rows.

        `seed` determines which rows are sampled.
        """
        whole = self.blocks
        self.blocks = self._some(_SOUGHT_ON, seed)
        for at, looser in enumerate(_LOOSER):
            if looser > 1:  # start with a wide residual, so that a poor start pulls less
                self.residual = dict.fromkeys(self.residual, looser * SPREADS)
            self._factor()
            self._search(_TURNS)
            self._weigh()
            if looser == 1:
                self._learn_residual()
            if at:
                self._learn_spreads()
        self.blocks = whole
        self.blocks = self._some(_SEARCHED, seed)
        self._factor()
        self._search(3)
        self._weigh()
        self._factor()
        self._search(_LAST)
        # allow a larger residual: the formula may not fit the cell
        self._learn_residual(2.7)
        for block in self.blocks:  # few rows cannot show a small spread
            if len(block.at) < _ENOUGH:
                usual = self._of_kind(block.name[1], self.residual, SPREADS)
                self.residual[block.name] = np.maximum(self.residual[block.name], usual)
        searched, self.blocks = {one.name: one for one in self.blocks}, whole
        self.blocks = self._some(_MOST, seed)
        for block in self.blocks:  # keep the outlier factors of rows used in the search
            outlying = dict(
                zip(
                    searched[block.name].at.tolist(),
                    searched[block.name].outlying.tolist(),
                    strict=True,
                )
            )
            block.outlying = np.array([outlying.get(at, 1.0) for at in block.at.tolist()])
        self._factor()
        self._linearise(self.z)
        self._weigh(prior=False)
        self._factor()
        self._linearise(self.z)
        self._judge_noise()

    def _some(self, most: int, seed: int) -> list[Block]:
        found = []
        for block in self.blocks:
            random = np.random.default_rng([seed, len(block.at)])
            picked = np.sort(random.permutation(len(block.at))[:most])
            found.append(
                Block(block.name, block.at[picked], block.columns, outlying=block.outlying[picked])
            )
        return found

    def _factor(self) -> None:
        for block in self.blocks:
            spread, features = self.residual[block.name], self.rows.features[block.at]
            covariance = kernel(features, features, spread) + np.diag(self._noise(block))
            block.factor = np.asarray(np.linalg.cholesky(covariance), dtype=float)

    def _linearise(self, z: FloatArray) -> tuple[float, FloatArray]:
        """Compute and store each block's slopes and residuals at `z`, and the precision of z.

        Return the loss and its gradient with respect to z.
        """
        self.precision = np.diag(self.prior)
        gradient, loss = self.prior * z, 0.5 * float(z @ (self.prior * z))
        for block, off, slopes in self._sides(self.blocks, z):
            block.off, block.slopes = off, slopes
            white = scipy.linalg.solve_triangular(
                block.factor, np.column_stack([block.slopes, block.off]), lower=True
            )
            slopes, off = white[:, :-1], white[:, -1]
            loss += 0.5 * float(off @ off)
            gradient[block.columns] -= slopes.T @ off
            self.precision[np.ix_(block.columns, block.columns)] += slopes.T @ slopes
        return loss, gradient

    def _loss(self, z: FloatArray) -> float:
        loss, first = 0.5 * float(z @ (self.prior * z)), 0
        rows, values, drift, _ = self._state(self.blocks, z)
        log_s = np.log(step_times(_moved(rows.line, drift), values).step_s)
        for block in self.blocks:
            off = self.log_step[block.at] - log_s[first : (first := first + len(block.at))]
            white = scipy.linalg.solve_triangular(block.factor, off, lower=True)
            loss += 0.5 * float(white @ white)
        return loss

    def _search(self, rounds: int) -> None:
        """Take up to `rounds` Gauss-Newton steps. Each step is halved until the loss falls."""
        for _ in range(rounds):
            loss, gradient = self._linearise(self.z)
            step = -scipy.linalg.cho_solve(scipy.linalg.cho_factor(self.precision), gradient)
            step *= min(1.0, 3.0 / max(float(np.abs(step).max(initial=0.0)), 1e-12))
            for _ in range(6):
                reached = self._loss(self.z + step)
                if reached < loss:
                    break
                step *= 0.5
            else:
                return
            self.z = self.z + step
            if loss - reached < _SETTLED * abs(loss) + 0.05:
                break
        self._linearise(self.z)

    def _weigh(self, *, prior: bool = True) -> None:
        """Update the factor by which the noise of outlying rows is increased.

        It follows from the row's leave-one-out residual in its cell. If `prior` is True, the prior
        precisions of the deviations are updated too.
        """
        for block in self.blocks:
            inverse = scipy.linalg.cho_solve((block.factor, True), np.eye(len(block.at)))
            away = (inverse @ block.off) / np.sqrt(np.diag(inverse))
            block.outlying = np.maximum(1.0, block.outlying * (_FREEDOM + away**2) / (_FREEDOM + 1))
            block.outlying = np.minimum(block.outlying, 1e4)
        for (level, _), at in self.columns.groups.items():
            if prior and level in ("kind", "strategy", "cell"):
                self.prior[at] = (_TAIL + 1) / (_TAIL + self.z[at] ** 2)

    def _learn_spreads(self) -> None:
        covariance = np.linalg.inv(self.precision)
        for level in list(LEVELS)[1:]:
            own = [at for (name, _), at in self.columns.groups.items() if name == level]
            moved = LEVELS[level] > 0
            second = sum(
                (self.prior[at] * (self.z[at] ** 2 + np.diag(covariance)[at]) for at in own),
                np.zeros(int(moved.sum())),
            )
            old = self.spread[level][moved]
            new = np.sqrt(
                (_PSEUDO * LEVELS[level][moved] ** 2 + old**2 * second) / (_PSEUDO + len(own))
            )
            self.spread[level][moved] = new
            for at in own:
                self.z[at] *= old / new

    def _learn_residual(self, most: float = 0.5) -> None:
        """Set each cell's residual spreads to the values with the largest posterior probability.

        Their prior is centred on the usual spreads of the cell's kind of device. A spread may
        exceed its value in SPREADS at most by the factor exp(`most`).
        """
        usual = {
            kind: self._of_kind(kind, self.residual, SPREADS)
            for kind in {one.name[1] for one in self.blocks}
        }
        for block in self.blocks:
            features = self.rows.features[block.at]
            each = [kernel(features, features, np.eye(2)[at]) for at in range(2)]
            centre = usual[block.name[1]]

            def loss(
                shift: FloatArray,
                block: Block = block,
                each: Any = each,
                centre: FloatArray = centre,
            ) -> float:
                broad, narrow, noise = (centre * np.exp(shift)) ** 2
                own = noise / self.weight[block.at] * block.outlying + 1e-8
                factor = np.linalg.cholesky(broad * each[0] + narrow * each[1] + np.diag(own))
                white = scipy.linalg.solve_triangular(factor, block.off, lower=True)
                fit = 0.5 * float(white @ white) + float(np.log(np.diag(factor)).sum())
                return fit + 0.5 * float((shift**2).sum()) / _RESIDUAL_SD**2

            bounds = list(
                zip(
                    np.log(0.3 * SPREADS / centre),
                    np.log(np.exp(most) * SPREADS / centre),
                    strict=True,
                )
            )
            start = np.clip(np.log(self.residual[block.name] / centre), *np.array(bounds).T)
            found = scipy.optimize.minimize(
                loss, start, method="L-BFGS-B", bounds=bounds, options={"maxiter": 6}
            )
            self.residual[block.name] = centre * np.exp(found.x)

    def _of_kind(self, kind: str, values: dict[tuple[str, str], Any], default: Any) -> Any:
        """Return the geometric median of the `values` of the large cells of a kind of device.

        If the kind has no large cell, the large cells of all kinds are used. If no kind has a large
        cell, all cells are used. If `values` is empty, `default` is returned.
        """
        many = {one.name: len(one.at) for one in self.blocks}
        enough = {cell: one for cell, one in values.items() if many.get(cell, 0) >= _ENOUGH}
        own = (
            [one for cell, one in enough.items() if cell[1] == kind]
            or list(enough.values())
            or list(values.values())
            or [default]
        )
        return np.exp(np.median(np.log(own), axis=0))

    def _judge_noise(self) -> None:
        """Learn a factor on the noise of each cell, by cross-validation across clusters.

        Rows of one cluster have errors in common, so they are left out together. The errors are
        computed as if the cell's parameters still had their prior.
        """
        for block in self.blocks:
            before = block.slopes / np.sqrt(self.prior[block.columns])
            inverse = np.linalg.inv(block.factor @ block.factor.T + before @ before.T)
            solved = inverse @ (block.off + block.slopes @ self.z[block.columns])
            spread = (
                self.residual[block.name][2] ** 2 / self.weight[block.at] * (block.outlying - 1)
            )
            _, cluster = np.unique(
                self.rows.features[block.at, 1:].round(6), axis=0, return_inverse=True
            )
            away = np.zeros(len(block.at))
            for one in range(cluster.max() + 1):
                own = np.flatnonzero(cluster == one)
                left = np.linalg.inv(inverse[np.ix_(own, own)])
                away[own] = np.abs(left @ solved[own]) / np.sqrt(
                    np.maximum(np.diag(left) - spread[own], 1e-6)
                )
            self.noisier[block.name] = float(np.clip(np.quantile(away, 0.9) / Z_90, 0.8, 4.0))

    def residual_of(self, workload: str, kind: str) -> tuple[FloatArray, float]:
        """Return a pair: the spreads of a cell's residual, and the factor by which to widen them.

        A cell with few rows gets the usual factor of the cells of its kind of device, or of all
        cells.
        """
        many = {one.name: len(one.at) for one in self.blocks}.get((workload, kind), 0)
        noisier = self.noisier if many >= _ENOUGH else {}
        wider = noisier.get((workload, kind), float(self._of_kind(kind, self.noisier, 1.3)))
        spread = self.residual.get((workload, kind), self._of_kind(kind, self.residual, SPREADS))
        return spread, wider

    def calibrate(self, *, seed: int) -> None:
        """Learn the factors that widen the levels' spreads for cells without rows or with few rows.

        Some cells are left out, one at a time. Two fits predict such a cell: the first uses none of
        its rows, the second a few. Both keep the spreads that `fit` learned.
        """
        kept = self.z, self.prior, self.precision, self.blocks
        ratios: dict[tuple[tuple[str, str], bool], float] = {}
        self.blocks = self._some(_SOUGHT_ON, seed)
        self._factor()
        every = self.blocks
        # the cells of probes have no seconds of one device
        cells = [at for at, block in enumerate(every) if len(self.alone[block.name[0]][0])]
        order = np.random.default_rng(seed).permutation(cells)[:_MOST_LEFT_OUT]
        for at in order.tolist() if len(cells) > 2 else []:
            out, others = every[at], [*every[:at], *every[at + 1 :]]
            self.z, self.prior = kept[0].copy(), kept[1].copy()
            lost = self.columns.groups["cell", out.name]
            self.z[lost], self.prior[lost] = 0.0, 1.0
            few = np.random.default_rng(seed).permutation(len(out.at))[:_FEW]
            some = Block(out.name, out.at[few], out.columns, outlying=np.ones(len(few)))
            for blocks in (others, [*others, some]):
                self.blocks = blocks
                self._factor()
                self._search(_LEFT_OUT_TURNS)
                ((_, missed, slopes),) = self._sides([out], self.z)
                known = np.eye(len(self.z))[:, out.columns]
                covariance = scipy.linalg.cho_solve(scipy.linalg.cho_factor(self.precision), known)[
                    out.columns
                ]
                shared = float(np.median(((slopes @ covariance) * slopes).sum(axis=1)))
                spread, wider = self.residual_of(*out.name)
                excess = float(np.quantile(missed**2, 0.9)) / Z_90**2 - wider**2 * float(
                    (spread**2).sum()
                )
                ratios[out.name, blocks is not others] = min(
                    max(excess, 0.0) / max(shared, 1e-6), _MOST_WIDER
                )
        self.z, self.prior, self.precision, self.blocks = kept
        many = len(ratios) // 2
        # Student's t instead of the normal, because few cells are left out
        few_groups = float(scipy.special.stdtrit(max(many - 1, 1) + 1, 0.95) / Z_90)
        for begun, widened in ((False, self.widened), (True, self.widened_begun)):
            shown = {cell: one for (cell, own), one in ratios.items() if own == begun}
            pooled = (_PSEUDO + sum(shown.values())) / (_PSEUDO + many)
            for kind in sorted({one for _, one in shown}):
                own_ratios = [one for (_, name), one in shown.items() if name == kind]
                square = (_PSEUDO * pooled + sum(own_ratios)) / (_PSEUDO + len(own_ratios))
                widened[kind] = few_groups * float(np.sqrt(square))
            widened[""] = few_groups * float(np.sqrt(max(pooled, 1.0)))

    def calibrate_as(self, other: Regression) -> None:
        """Copy the factors that `calibrate` learned for a regression on nearly the same rows."""
        self.widened, self.widened_begun = dict(other.widened), dict(other.widened_begun)

    def wider_levels(self, workload: str, kind: str) -> float:
        """Return the factor by which to widen the levels' spreads for a cell.

        The factor is 1 for a cell with many rows, since these rows determine its parameters.
        """
        many = {one.name: len(one.at) for one in self.blocks}.get((workload, kind), 0)
        if many >= _ENOUGH:
            return 1.0
        widened = self.widened_begun if many else self.widened
        return widened.get(kind, widened.get("", 1.0))


def _moved(line: Line, drift: FloatArray) -> Line:
    """Return the line with `drift` (rows, members) added to one device's log seconds."""
    return replace(line, alone_s=line.alone_s * np.exp(drift))
