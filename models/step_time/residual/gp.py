"""Bayesian regression on the effects: linear in what setups share, with small blocks for what only neighbours share.

    y = Phi beta + local + noise,   beta ~ N(0, I),   local and noise independent between blocks (Lambda)

y is log(measured / physics) + offset. The smooth families' part outside Phi is kept as variance of each setup alone
(as FITC does; the blocks are those of PIC: Snelson and Ghahramani 2006, 2007). The cost is linear in the number of
setups.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass

import numpy as np
from scipy.linalg import cho_solve, solve_triangular

from ...domain.categorical import Keys
from ...domain.numeric import BoolArray, FloatArray, IntArray
from .kernel import (
    LINEAR,
    LOCAL,
    SMOOTH,
    UNCHECKED,
    Features,
    Term,
    bell,
    blocks,
    covariance,
    each_with_all,
    noise_variance,
    terms,
)

# Keys of one family that have a column: those met most often; what the others share is left to each alone.
_MOST_KEYS = 400
# Most columns that stand for the smooth families, and the variance that they may leave out.
_MOST_SMOOTH, _LEFT_OUT = 300, 4e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Local:
    """Setups as the local families see them.

    (families, rows) codes of their keys, and weights times the root of the variance; (families,) `by_batch` says which
    look at the (rows,) `batch` too.
    """

    codes: IntArray
    weight: FloatArray
    by_batch: BoolArray
    batch: FloatArray

    @classmethod
    def of(cls, features: Features, variances: Mapping[str, float], tables: Mapping[str, Keys] | None = None) -> Local:
        """By each family's table in `tables`, so that codes compare with another's; -1 for a key that is not in it."""
        told = terms(features)
        codes = [told[name].keys.within(tables[name]) if tables else told[name].keys.codes for name in LOCAL]
        return cls(
            codes=np.stack(codes),
            weight=np.stack([np.sqrt(variances[name]) * told[name].weight for name in LOCAL]),
            by_batch=np.array([told[name].batch for name in LOCAL]),
            batch=features.batch,
        )

    @staticmethod
    def tables(features: Features) -> dict[str, Keys]:
        """Each family's keys, to compare others' by."""
        told = terms(features)
        return {name: told[name].keys for name in LOCAL}

    @property
    def variance(self) -> FloatArray:
        """(rows,) of all families together."""
        return np.asarray((self.weight**2).sum(axis=0), dtype=float)

    def take(self, picked: IntArray) -> Local:
        """The rows at these positions."""
        return Local(
            codes=self.codes[:, picked],
            weight=self.weight[:, picked],
            by_batch=self.by_batch,
            batch=self.batch[picked],
        )

    def covariance(self, other: Local) -> FloatArray:
        """(rows, others) of all families together."""
        near = bell(self.batch[:, None], other.batch[:, None])
        total = np.zeros(near.shape)
        for at, by_batch in enumerate(self.by_batch):
            found = self.weight[at, :, None] * other.weight[at, None, :]
            found *= self.codes[at, :, None] == other.codes[at, None, :]
            total += found * near if by_batch else found
        return total


def keyed_normals(seed: int, family: str, keys: Keys, count: int) -> FloatArray:
    """(keys, count) standard normals; rows of equal keys are equal, rows of different keys independent."""
    drawn = np.empty((len(keys.names), count))
    for code in keys.met:
        drawn[code] = _generator(seed, family, keys.names[code]).standard_normal(count)
    return drawn[keys.codes]


def local_draws(at: Features, variances: Mapping[str, float], count: int, *, seed: int) -> FloatArray:
    """(setups, count) of what only neighbours share, before any measurement.

    A family that looks at the batch too is a wave of a random frequency, cos(w b) u + sin(w b) v with w, u and v
    normal: its covariance over batches b is exactly exp(-(b - b')^2 / 2), and it is the same curve whichever b are
    asked for.
    """
    told = terms(at)
    total = np.zeros((len(at.exposed), count))
    for name in LOCAL:
        term, scale = told[name], np.sqrt(variances[name])
        used = np.flatnonzero(term.weight)
        if not len(used):
            continue
        value = keyed_normals(seed, name, term.keys.take(used), 3 * count if term.batch else count)
        if term.batch:
            angle = value[:, 2 * count :] * at.batch[used, None]
            value = np.cos(angle) * value[:, :count] + np.sin(angle) * value[:, count : 2 * count]
        total[used] += scale * term.weight[used, None] * value
    return total


def _generator(seed: int, family: str, key: str) -> np.random.Generator:
    return np.random.default_rng([seed, zlib.crc32(f"{family}|{key}".encode())])


class Basis:
    """Columns of Phi for any setups: parameters, one column a key of each linear family, pivots of the smooth ones."""

    def __init__(self, features: Features, variances: dict[str, float]) -> None:
        self._variances = variances
        told = terms(features)
        # in this order, so that the first columns of a whitener are what is unsure of these, all else being known
        names = (*UNCHECKED, *(name for name in LINEAR if name not in UNCHECKED))
        self._keys = {name: _places(told[name]) for name in names}
        self._pivots, factor = self._pivot(features)
        # the inverse once: products are several times as quick as solving for thousands of setups
        self._whitener = solve_triangular(factor, np.eye(len(factor)), lower=True).T

    @property
    def unchecked(self) -> int:
        """How many columns, the first, are of families whose doubts no group that is left out can check."""
        return sum(len(self._keys[name]) for name in UNCHECKED)

    def at(self, features: Features) -> tuple[FloatArray, FloatArray]:
        """(rows, columns) of Phi, and the (rows,) variance that belongs to each setup alone."""
        told = terms(features)
        alone = np.zeros(len(features.exposed))
        columns: list[FloatArray] = []
        for name, known in self._keys.items():
            term = told[name]
            block = np.zeros((len(alone), len(known)))
            place = term.keys.places(known)
            met = np.flatnonzero(place >= 0)
            scale = np.sqrt(self._variances[name])
            block[met, place[met]] = scale * term.weight[met]
            alone[place < 0] += (scale * term.weight[place < 0]) ** 2
            columns.append(block)
        columns.append(features.shared)
        if self._pivots is not None:
            smooth = covariance(SMOOTH, self._variances, features, self._pivots) @ self._whitener
            alone += np.maximum(self._smooth_diagonal(told) - (smooth**2).sum(axis=1), 0)
            columns.append(smooth)
        else:
            alone += self._smooth_diagonal(told)
        return np.concatenate(columns, axis=1), alone

    def unmet(self, features: Features) -> Iterator[tuple[str, IntArray, Keys, FloatArray]]:
        """Family by family the rows whose key nobody has measured, their keys and weights.

        Such an effect is as unknown as before, but shared by all rows of its key.
        """
        told = terms(features)
        for name, known in self._keys.items():
            term = told[name]
            picked = np.flatnonzero((term.keys.places(known) < 0) & (term.weight != 0))
            if len(picked):
                yield name, picked, term.keys.take(picked), np.sqrt(self._variances[name]) * term.weight[picked]

    def _smooth_diagonal(self, told: dict[str, Term]) -> FloatArray:
        parts = [self._variances[name] * told[name].weight ** 2 for name in SMOOTH]
        return np.asarray(np.sum(parts, axis=0), dtype=float)

    def _pivot(self, features: Features) -> tuple[Features | None, FloatArray]:
        """Training setups that span the smooth families best, by pivoted Cholesky, and their factor."""
        left, across = self._smooth_diagonal(terms(features)), each_with_all(SMOOTH, self._variances, features)
        most = min(_MOST_SMOOTH, len(left))
        rows, chosen = np.zeros((most, len(left))), []
        for at in range(most):
            best = int(np.argmax(left))
            if left[best] < _LEFT_OUT:
                break
            rows[at] = (across(best) - rows[:at, best] @ rows[:at]) / np.sqrt(left[best])
            left = np.maximum(left - rows[at] ** 2, 0)
            chosen.append(best)
        if not chosen:
            return None, np.zeros((0, 0))
        pivots = features.take(np.array(chosen))
        return pivots, cholesky(covariance(SMOOTH, self._variances, pivots, pivots) + 1e-10 * np.eye(len(chosen)))


def _places(term: Term) -> dict[str, int]:
    """Column of each key: also of one that no setup answers to yet, since its later setups share what they err by."""
    times = np.bincount(term.keys.codes, minlength=len(term.keys.names)).tolist()
    met = Counter({name: many for name, many in zip(term.keys.names, times, strict=True) if many})
    kept = sorted(key for key, _ in met.most_common(_MOST_KEYS))
    return {key: at for at, key in enumerate(kept)}


def cholesky(covariance: FloatArray) -> FloatArray:
    """Lower factor."""
    return np.asarray(np.linalg.cholesky(covariance), dtype=float)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Block:
    """What was measured of one workload on one arrangement; `factor` is the Cholesky factor of its Lambda."""

    rows: IntArray  # which of the measured setups
    local: Local
    noise: FloatArray  # variance of each setup's own
    factor: FloatArray
    whitener: FloatArray  # factor^-1
    phi: FloatArray  # whitened: factor^-1 Phi
    target: FloatArray  # whitened


@dataclass(frozen=True, slots=True, kw_only=True)
class _Projection:
    """A setup's effect is psi beta + constant, give or take variances: its own, and what only neighbours share.

    `halves` by block: the setups in it, and whitener @ covariance of what was measured there with them.
    """

    psi: FloatArray
    constant: FloatArray
    alone: FloatArray
    local: FloatArray
    halves: dict[str, tuple[IntArray, FloatArray]]


class Posterior:
    """The regression given measurements: `target` is log(measured / physics) + offset, `share` scales its noise."""

    def __init__(
        self,
        features: Features,
        target: FloatArray,
        share: FloatArray,
        variances: dict[str, float],
    ) -> None:
        self.variances, self.share = variances, share
        self.scale, self.shared_scale = 1.0, 1.0
        self.noisiness: dict[str, float] = {}
        self._given = (features, target, share)
        self._basis = Basis(features, variances)
        phi, alone = self._basis.at(features)
        self._alone = alone
        noise = share * noise_variance(features, variances) + alone
        self._tables, local = Local.tables(features), Local.of(features, variances)
        self._blocks: dict[str, _Block] = {}
        for key, picked in blocks(features).groups().items():
            own = local.take(picked)
            apart = noise[picked] + 1e-10
            factor = cholesky(own.covariance(own) + np.diag(apart))
            whitener = solve_triangular(factor, np.eye(len(picked)), lower=True)
            whitened = whitener @ np.column_stack([phi[picked], target[picked]])
            self._blocks[key] = _Block(
                rows=picked,
                local=own,
                noise=apart,
                factor=factor,
                whitener=whitener,
                phi=whitened[:, :-1],
                target=whitened[:, -1],
            )
        width = phi.shape[1]
        stacked = [one.phi for one in self._blocks.values()]
        whole = np.concatenate(stacked) if stacked else np.zeros((0, width))
        answers = np.concatenate([one.target for one in self._blocks.values()]) if stacked else np.zeros(0)
        self._precision = np.eye(width) + whole.T @ whole
        self._right = whole.T @ answers
        self._factor = np.linalg.cholesky(self._precision)
        self._beta = cho_solve((self._factor, True), self._right)
        self._whitener = solve_triangular(self._factor, np.eye(width), lower=True).T

    @property
    def columns(self) -> int:
        """Of Phi."""
        return len(self._right)

    @property
    def _narrowing(self) -> FloatArray:
        """(columns,) factor on each column of the whitener, whose square is the covariance of beta.

        The first columns are what is unsure of the unchecked families, all else being known: nothing gets wider by it.
        """
        factor = np.full(self.columns, self.shared_scale)
        factor[: self._basis.unchecked] = 1.0
        return factor

    def _project(self, at: Features) -> _Projection:
        psi, alone = self._basis.at(at)
        seen = Local.of(at, self.variances, self._tables)
        local, constant = seen.variance, np.zeros(len(alone))
        halves: dict[str, tuple[IntArray, FloatArray]] = {}
        for key, picked in blocks(at).groups().items():
            block = self._blocks.get(key)
            if block is None:
                continue
            half = block.whitener @ block.local.covariance(seen.take(picked))
            psi[picked] -= half.T @ block.phi
            constant[picked] = half.T @ block.target
            local[picked] = np.maximum(local[picked] - (half**2).sum(axis=0), 0)
            halves[key] = (picked, half)
        return _Projection(psi=psi, constant=constant, alone=alone, local=local, halves=halves)

    def moments(self, at: Features) -> tuple[FloatArray, FloatArray]:
        """Mean and standard deviation of log(step / physics) for one new measurement of each setup."""
        found = self._project(at)
        return found.psi @ self._beta + found.constant - at.offset, self._spread(found, at)

    def _spread(self, found: _Projection, at: Features) -> FloatArray:
        shared = ((found.psi @ self._whitener * self._narrowing) ** 2).sum(axis=1)
        variance = shared + found.alone + found.local + self._noise(at)
        return np.asarray(self.scale * np.sqrt(variance), dtype=float)

    @property
    def fitted(self) -> FloatArray:
        """Mean of log(step / physics) of what was measured: that, less what each setup's own noise explains."""
        features, target, _ = self._given
        found = target - features.offset
        for one in self._blocks.values():
            found[one.rows] -= one.noise * (one.whitener.T @ (one.target - one.phi @ self._beta))
        return found

    def scaled(
        self, scale: float, noisiness: dict[str, float] | None = None, shared_scale: float | None = None
    ) -> Posterior:
        """The same with every spread times `scale`, and with the others where given, instead of those it has.

        `noisiness` is a factor by workload on the variance of a new measurement across machines, `shared_scale` one on
        the standard deviation of what the columns say that groups left out can check.
        """
        other = copy(self)
        other.scale = scale
        other.noisiness = self.noisiness if noisiness is None else noisiness
        other.shared_scale = self.shared_scale if shared_scale is None else shared_scale
        return other

    def _noise(self, at: Features) -> FloatArray:
        """(rows,) variance of one new measurement of each setup."""
        factor = at.workload.values(lambda name: self.noisiness.get(name, 1.0))
        return noise_variance(at, self.variances) * np.where(at.instances > 1, factor, 1.0)

    def draws(
        self, at: Features, *, identity: Sequence[str], measured: Sequence[str], count: int, seed: int
    ) -> tuple[FloatArray, FloatArray, FloatArray]:
        """`moments`, and (setups, count) of what log(step / physics) may be off its mean by, drawn jointly.

        `identity` tells the setups apart, and `measured` those that were measured.
        What two setups share in error moves together. A setup's draws are the same whatever else is asked about, so
        that some may be drawn for now and others later; and they come in pairs of opposite sign, so that its mean is
        their mean and their middle.
        """
        found, half = self._project(at), -(-count // 2)
        normal = np.random.default_rng(seed).standard_normal((len(self._beta), half))
        joint = found.psi @ (self._whitener @ (self._narrowing[:, None] * normal))
        alone = found.alone + self._noise(at)
        for name, picked, keys, weight in self._basis.unmet(at):
            joint[picked] += weight[:, None] * keyed_normals(seed, name, keys, half)
            alone[picked] -= weight**2
        joint += local_draws(at, self.variances, half, seed=seed)
        for key, (picked, across) in found.halves.items():  # Matheron's rule: less what was measured says of the draw
            block = self._blocks[key]
            seen = local_draws(self._given[0].take(block.rows), self.variances, half, seed=seed)
            named = Keys.of(measured[row] for row in block.rows.tolist())
            seen += np.sqrt(block.noise)[:, None] * keyed_normals(seed, "seen", named, half)
            joint[picked] -= across.T @ (block.whitener @ seen)
        joint += np.sqrt(np.maximum(alone, 0))[:, None] * keyed_normals(seed, "alone", Keys.of(identity), half)
        off = self.scale * np.concatenate([joint, -joint], axis=1)[:, :count]
        mean = found.psi @ self._beta + found.constant - at.offset
        return mean, self._spread(found, at), np.asarray(off, dtype=float)

    def joint(self, at: Features) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Of log(step / physics) jointly: mean (setups,), covariance (setups, setups), noise variance (setups,).

        The covariance is of what a setup is, without the noise of one new measurement of it.
        """
        found = self._project(at)
        half, alone = found.psi @ self._whitener * self._narrowing, found.alone.copy()
        covariance = half @ half.T
        for _, picked, keys, weight in self._basis.unmet(at):
            for own in keys.groups().values():
                covariance[np.ix_(picked[own], picked[own])] += np.outer(weight[own], weight[own])
            alone[picked] -= weight**2
        local = Local.of(at, self.variances)
        for key, picked in blocks(at).groups().items():
            mine = local.take(picked)
            shared = mine.covariance(mine)
            if key in found.halves:
                seen = found.halves[key][1]
                shared = shared - seen.T @ seen
            covariance[np.ix_(picked, picked)] += shared
        covariance += np.diag(np.maximum(alone, 0) + 1e-12)
        noise = self._noise(at)
        return found.psi @ self._beta + found.constant - at.offset, self.scale**2 * covariance, self.scale**2 * noise

    def left_out(self) -> tuple[FloatArray, FloatArray]:
        """Residuals of the training setups with each alone left out, and their variances but for its own noise.

        (rows,) each; from the inverse of the covariance of them all [Rasmussen and Williams 2006, 5.12].
        """
        residual, variance = np.zeros(len(self.share)), np.zeros(len(self.share))
        for one in self._blocks.values():
            half = self._whitener.T @ (one.phi.T @ one.whitener)
            precision = (one.whitener**2).sum(axis=0) - (half**2).sum(axis=0)
            residual[one.rows] = one.whitener.T @ (one.target - one.phi @ self._beta) / precision
            variance[one.rows] = np.maximum(1 / precision - one.noise + self._alone[one.rows], 0)
        return residual, variance

    def held_out(self, groups: Keys, features: Features) -> tuple[IntArray, FloatArray]:
        """Training setups with their whole group left out: which, and (3, rows) residuals, shared and other variance.

        The shared variance is that of what the columns say of them then; the other that of noise and of their block.
        `groups` are unions of blocks; rows of the group "" are left alone.
        """
        keys = blocks(features)
        found: list[tuple[IntArray, FloatArray]] = [(np.zeros(0, dtype=np.intp), np.zeros((3, 0)))]
        for group, rows in groups.groups().items():
            if not group:
                continue
            own = [self._blocks[key] for key in sorted(keys.take(rows).distinct)]
            phi, target = np.concatenate([one.phi for one in own]), np.concatenate([one.target for one in own])
            residual, half, noise = self._without(phi, target)
            first = 0
            for one in own:
                at, first = slice(first, first + len(one.target)), first + len(one.target)
                # back from whitened to the setups' own scale
                besides = (one.factor**2).sum(axis=1)
                shared = ((half[:, at] @ one.factor.T) ** 2).sum(axis=0) + (noise - 1) * besides
                found.append((one.rows, np.stack([one.factor @ residual[at], np.maximum(shared, 0), besides])))
        return np.concatenate([one for one, _ in found]), np.concatenate([one for _, one in found], axis=1)

    def _without(self, phi: FloatArray, target: FloatArray) -> tuple[FloatArray, FloatArray, float]:
        """Residuals of the given whitened training rows had they been left out, (rows,); their covariance is
        half^T half + noise I, half (any, rows).
        """
        rows, columns = phi.shape
        if rows < columns:  # cheaper by rows: what they tell of beta is taken back by Woodbury's identity
            half = phi @ self._whitener
            factor = cholesky(np.eye(rows) - half @ half.T)
            left = cho_solve((factor, True), target - phi @ self._beta)
            return left, solve_triangular(factor, np.eye(rows), lower=True), 0.0
        factor = cholesky(self._precision - phi.T @ phi + 1e-9 * np.eye(columns))
        left = target - phi @ cho_solve((factor, True), self._right - phi.T @ target)
        return left, solve_triangular(factor, phi.T, lower=True), 1.0
