"""Bayesian regression on the effects: linear in what setups share, with small blocks for what only neighbours share.

    y = Phi beta + local + noise,   beta ~ N(0, I),   local and noise independent between blocks (Lambda)

y is log(measured / physics) + offset. The smooth families' part outside Phi is kept as variance of each setup alone
(as FITC does; the blocks are those of PIC: Snelson and Ghahramani 2006, 2007). The cost is linear in the number of
setups.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from scipy.linalg import cho_solve, solve_triangular

from .basis import Basis, cholesky
from .effects import LOCAL, blocks, correlation, noise_variance, terms
from .features import Features, Keys
from .setups import FloatArray

Places = np.ndarray[tuple[int, ...], np.dtype[np.intp]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Block:
    """What was measured of one workload on one arrangement; `factor` is the Cholesky factor of its Lambda."""

    features: Features
    factor: FloatArray
    whitener: FloatArray  # factor^-1
    phi: FloatArray  # whitened: factor^-1 Phi
    target: FloatArray  # whitened


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
    ) -> None:
        """`ahead` are setups that will be asked about: what they share among each other is told apart too."""
        self.variances, self.scale = variances, scale
        self._given = (features, target, share)
        self._basis = Basis(features if ahead is None else features.joined(ahead), variances)
        phi, alone = self._basis.at(features)
        noise = share * noise_variance(features, variances) + alone
        self._blocks: dict[str, _Block] = {}
        for key, picked in _grouped(blocks(features)).items():
            own = features.take(picked)
            factor = cholesky(self._local(own, own) + np.diag(noise[picked] + 1e-10))
            whitener = solve_triangular(factor, np.eye(len(picked)), lower=True)
            whitened = whitener @ np.column_stack([phi[picked], target[picked]])
            self._blocks[key] = _Block(
                features=own, factor=factor, whitener=whitener, phi=whitened[:, :-1], target=whitened[:, -1]
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

    def _local(self, left: Features, right: Features) -> FloatArray:
        ours, theirs = terms(left), terms(right)
        total = np.zeros((len(left.exposed), len(right.exposed)))
        for name in LOCAL:
            total += self.variances[name] * correlation(name, left, right, ours[name], theirs[name])
        return total

    def _project(self, at: Features) -> tuple[FloatArray, FloatArray, FloatArray]:
        """psi, constant and own variance: the setup's effect is psi beta + constant, give or take its own variance."""
        psi, own = self._basis.at(at)
        told = terms(at)
        own = own + np.sum([self.variances[name] * told[name].weight ** 2 for name in LOCAL], axis=0)
        constant = np.zeros(len(own))
        for key, picked in _grouped(blocks(at)).items():
            block = self._blocks.get(key)
            if block is None:
                continue
            across = self._local(at.take(picked), block.features)
            half = block.whitener @ across.T
            psi[picked] -= half.T @ block.phi
            constant[picked] = half.T @ block.target
            own[picked] = np.maximum(own[picked] - (half**2).sum(axis=0), 0)
        return psi, constant, own

    def moments(self, at: Features) -> tuple[FloatArray, FloatArray]:
        """Mean and standard deviation of log(step / physics) for one new measurement of each setup."""
        psi, constant, own = self._project(at)
        shared = ((psi @ self._whitener) ** 2).sum(axis=1)
        spread = np.sqrt(shared + own + noise_variance(at, self.variances))
        return psi @ self._beta + constant - at.offset, self.scale * spread

    def draws(self, at: Features, *, count: int, seed: int) -> FloatArray:
        """(setups, count) of log(step / physics), drawn jointly: what two setups share in error moves together."""
        psi, constant, own = self._project(at)
        unmet = self._basis.unmet(at)
        random = np.random.default_rng(seed)
        normal = random.standard_normal((len(self._beta), count))
        joint = psi @ solve_triangular(self._factor, normal, lower=True, trans="T")
        joint += unmet @ random.standard_normal((unmet.shape[1], count))
        own = np.maximum(own - (unmet**2).sum(axis=1), 0)
        joint += self._local_draws(at, own, random, count)
        alone = np.sqrt(noise_variance(at, self.variances))[:, None] * random.standard_normal((len(own), count))
        middle = psi @ self._beta + constant - at.offset
        return np.asarray(middle[:, None] + self.scale * (joint + alone), dtype=float)

    def joint(self, at: Features) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Of log(step / physics) jointly: mean (setups,), covariance (setups, setups), noise variance (setups,).

        The covariance is of what a setup is, without the noise of one new measurement of it.
        """
        psi, constant, own = self._project(at)
        half, unmet = psi @ self._whitener, self._basis.unmet(at)
        covariance = half @ half.T + unmet @ unmet.T
        for picked, local in self._local_left(at, np.maximum(own - (unmet**2).sum(axis=1), 0)):
            covariance[np.ix_(picked, picked)] += local
        noise = noise_variance(at, self.variances)
        return psi @ self._beta + constant - at.offset, self.scale**2 * covariance, self.scale**2 * noise

    def _local_draws(self, at: Features, own: FloatArray, random: np.random.Generator, count: int) -> FloatArray:
        """(setups, count) of what only neighbours share: one workload on one arrangement errs together."""
        found = np.zeros((len(own), count))
        for picked, local in self._local_left(at, own):
            found[picked] = cholesky(local) @ random.standard_normal((len(picked), count))
        return found

    def _local_left(self, at: Features, own: FloatArray) -> Iterator[tuple[Places, FloatArray]]:
        """Positions of each block's setups and the covariance of what only they share, given what was measured."""
        for key, picked in _grouped(blocks(at)).items():
            mine = at.take(picked)
            shared = self._local(mine, mine)
            block = self._blocks.get(key)
            if block is not None:
                half = block.whitener @ self._local(mine, block.features).T
                shared = shared - half.T @ half
            yield picked, shared + np.diag(np.maximum(own[picked] - np.diag(shared), 0) + 1e-12)

    def choose(self, candidates: Features, targets: Features, *, count: int) -> list[int]:
        """Positions of the candidates whose measurement tells most about the targets, one after another.

        Each next one lowers the mean variance of the targets' log step most, given those before it [D]: measuring c
        lowers that of t by cov(t, c)^2 / var(c). What only neighbours share is left out of account.
        """
        aware = Posterior(*self._given, self.variances, ahead=targets)
        ours, _, own = aware._project(candidates)
        theirs, _, _ = aware._project(targets)
        noise = own + noise_variance(candidates, self.variances)
        left, right = (solve_triangular(aware._factor, one.T, lower=True) for one in (ours, theirs))
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

    def held_out(self, groups: Keys, features: Features) -> FloatArray:
        """Standardised residuals of the training setups with their whole group left out.

        `groups` are unions of blocks; rows of the group "" are left alone.
        """
        members: dict[str, set[str]] = {}
        for group, key in zip(groups, blocks(features), strict=True):
            if not group:
                continue
            members.setdefault(group, set()).add(key)
        found: list[FloatArray] = []
        for keys in members.values():
            own = [self._blocks[key] for key in sorted(keys)]
            phi, target = np.concatenate([one.phi for one in own]), np.concatenate([one.target for one in own])
            factor = np.linalg.cholesky(self._precision - phi.T @ phi + 1e-9 * np.eye(len(self._right)))
            beta = cho_solve((factor, True), self._right - phi.T @ target)
            for one in own:
                # back from whitened to the setups' own scale
                residual = one.factor @ (one.target - one.phi @ beta)
                half = solve_triangular(factor, (one.factor @ one.phi).T, lower=True)
                spread = (half**2).sum(axis=0) + (one.factor**2).sum(axis=1)
                found.append(residual / np.sqrt(spread))
        return np.concatenate(found) if found else np.zeros(0)


def _grouped(keys: Keys) -> dict[str, Places]:
    places: dict[str, list[int]] = {}
    for at, key in enumerate(keys):
        places.setdefault(key, []).append(at)
    return {key: np.array(where, dtype=np.intp) for key, where in places.items()}
