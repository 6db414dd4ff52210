"""How wide is honest: the correction's own spread, scaled until held-out groups fall inside as often as they should.

Groups are left out whole: a workload's multi-machine rows, a cluster, a workload on a cluster. Never random rows.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from .correction import Correction, Features, fit_correction
from .setups import BoolArray, FloatArray

# Half-width of a central 90 % interval, in standard deviations of a normal.
Z_90 = 1.6448536269514722
# Without held-out residuals the model's spread is widened by this [physics.md: too narrow by 1.3 on new workloads],
# which weighs as much as so many rows.
_PRIOR_SCALE, _PRIOR_ROWS = 1.15, 20
# The variances were fitted to the rows they are checked on: finding them too wide is no evidence, so never narrower.
_LEAST_SCALE, _MOST_SCALE = 1.0, 2.5


def calibrated(
    features: Features,
    target: FloatArray,
    repeats: FloatArray,
    several: BoolArray,
) -> Correction:
    """Fit the correction and set its `scale`. `several` marks rows of more than one rank."""
    plain = fit_correction(features, target, repeats)
    if len(target) < 10:
        return replace(plain, scale=_PRIOR_SCALE, _solved={})
    workload = tuple(f"{name} {many}" for name, many in zip(features.workload, several, strict=True))
    both = tuple(f"{one} {two}" for one, two in zip(features.workload, features.composition, strict=True))
    standardised = np.concatenate([plain.held_out(groups) for groups in (workload, features.composition, both)])
    seen = float(np.quantile(np.abs(standardised), 0.9)) / Z_90
    rows = len(target)
    scale = (rows * seen + _PRIOR_ROWS * _PRIOR_SCALE) / (rows + _PRIOR_ROWS)
    return replace(plain, scale=float(np.clip(scale, _LEAST_SCALE, _MOST_SCALE)), _solved={})
