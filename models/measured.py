"""What was measured of one provider, and the regression on it brought to bear."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .arrays import FloatArray
from .features import features_of
from .intervals import calibrated
from .learning import TrainingRows
from .physics import Physics
from .regression import Posterior
from .setups import SetupArrays


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The setups that were measured: their median step, what scales their noise, and what was learned of variances."""

    setups: SetupArrays
    step_s: FloatArray
    share: FloatArray
    variances: dict[str, float]
    scale: float
    noisiness: dict[str, float]  # by workload
    shared_scale: float

    @classmethod
    def of(cls, physics: Physics, rows: TrainingRows) -> tuple[Measured, Posterior]:
        """The rows, with variances and scale learned around `physics`; and the regression on them, as `posterior`."""
        step = physics.at(rows.setups)
        features = features_of(rows.setups, step, physics)
        target = np.log(rows.step_s / step.times.step_s) + step.offset
        found = calibrated(features, target, rows.repeats, rows.spread)
        measured = cls(
            setups=rows.setups,
            step_s=rows.step_s,
            share=found.share,
            variances=found.variances,
            scale=found.scale,
            noisiness=found.noisiness,
            shared_scale=found.shared_scale,
        )
        return measured, found

    def posterior(self, physics: Physics) -> Posterior:
        """The regression on them around `physics`."""
        step = physics.at(self.setups)
        features = features_of(self.setups, step, physics)
        target = np.log(self.step_s / step.times.step_s) + step.offset
        return Posterior(
            features,
            target,
            self.share,
            self.variances,
            self.scale,
            noisiness=self.noisiness,
            shared_scale=self.shared_scale,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """The regression brought to bear, and the least and largest log factor that it has on what was measured."""

    posterior: Posterior
    least: float
    most: float

    @classmethod
    def of(cls, posterior: Posterior) -> Learned:
        """The range is that of `posterior` on what it was given."""
        seen = posterior.fitted
        return cls(posterior=posterior, least=float(seen.min(initial=0.0)), most=float(seen.max(initial=0.0)))

    def held(self, correction: FloatArray) -> FloatArray:
        """The log factor kept within that range, 0 in it: no extrapolation corrects the physics by more."""
        return np.asarray(np.clip(correction, self.least, self.most), dtype=float)

    def widened(self, correction: FloatArray, spread: FloatArray) -> FloatArray:
        """`spread` of the log factor, wider by what it would have been beyond where it is held."""
        return np.asarray(np.hypot(spread, correction - self.held(correction)), dtype=float)
