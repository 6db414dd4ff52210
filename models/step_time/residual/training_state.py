"""What was measured of one provider, and the regression on it brought to bear."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...domain.numeric import FloatArray
from ...domain.setup_table import SetupArrays
from ..physics.physics import Physics
from .calibration import calibrated
from .gp import Posterior
from .kernel import features_of


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
    def of(
        cls, physics: Physics, setups: SetupArrays, *, step_s: FloatArray, repeats: FloatArray, spread: FloatArray
    ) -> tuple[Measured, Posterior]:
        """The setups, with variances and scale learned around `physics`; and the regression on them, as `posterior`.

        `step_s` is the median of each setup's `repeats` runs, `spread` the standard deviation of their logs.
        """
        step = physics.at(setups)
        features = features_of(setups, step, physics)
        target = np.log(step_s / step.times.step_s) + step.offset
        found = calibrated(features, target, repeats, spread)
        measured = cls(
            setups=setups,
            step_s=step_s,
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
        found = Posterior(features, target, self.share, self.variances)
        return found.scaled(self.scale, self.noisiness, self.shared_scale)


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
