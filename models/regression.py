"""Bayesian regression on the effects: linear in what setups share, with small blocks for what only neighbours share.

    y = Phi beta + local + noise,   beta ~ N(0, I),   local and noise independent between blocks (Lambda)

y is log(measured / physics) + offset. The smooth families' part outside Phi is kept as variance of each setup alone
(as FITC does; the blocks are those of PIC: Snelson and Ghahramani 2006, 2007). The cost is linear in the number of
setups.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass

import numpy as np
from scipy.linalg import cho_solve, solve_triangular

from .arrays import FloatArray, IntArray
from .basis import Basis, cholesky
from .chance import keyed_normals, local_draws
from .effects import blocks, noise_variance
from .features import Features
from .keys import Keys
from .local import Local


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
        scale: float = 1.0,
        ahead: Features | None = None,
        noisiness: dict[str, float] | None = None,
        shared_scale: float = 1.0,
    ) -> None:
        """`ahead` are setups that will be asked about: what they share among each other is told apart too.

        `noisiness` is a factor by workload on the variance of a new measurement across machines, `shared_scale` one on
        the standard deviation of what the columns say that groups left out can check.
        """
        self.variances, self.share, self.scale = variances, share, scale
        self.noisiness, self.shared_scale = noisiness or {}, shared_scale
        self._given = (features, target, share)
        self._basis = Basis(features if ahead is None else features.joined(ahead), variances)
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
        """The same with every spread times `scale`, and with the others where given, instead of those it has."""
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

    def choose(self, candidates: Features, targets: Features, *, count: int) -> list[int]:
        """Positions of the candidates whose measurement tells most about the targets, one after another.

        Each next one lowers the mean variance of the targets' log step most, given those before it [D]: measuring c
        lowers that of t by cov(t, c)^2 / var(c). What only neighbours share is left out of account.
        """
        aware = Posterior(*self._given, self.variances, ahead=targets)
        ours, theirs = aware._project(candidates), aware._project(targets)
        noise = ours.alone + ours.local + noise_variance(candidates, self.variances)
        left, right = (solve_triangular(aware._factor, one.psi.T, lower=True) for one in (ours, theirs))
        chosen: list[int] = []
        for _ in range(min(count, len(noise))):
            spread = (left**2).sum(axis=0)
            gain = ((right.T @ left) ** 2).sum(axis=0) / (spread + noise)
            gain[chosen] = -1.0
            best = int(np.argmax(gain))
            chosen.append(best)
            one = left[:, best].copy()
            # the symmetric root of I - u u^T / (noise + u^T u)
            shrink = (1 - np.sqrt(noise[best] / (noise[best] + spread[best]))) / max(spread[best], 1e-30)
            left = left - shrink * np.outer(one, one @ left)
            right = right - shrink * np.outer(one, one @ right)
        return chosen

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
