"""The parameters of the physics are sought: robust least squares on log residuals, with the priors among them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import least_squares
from scipy.sparse import csr_array, eye_array, hstack, vstack

from .arrays import FloatArray, IntArray
from .closed_form import MEAN, NAMES, OWN_SD, SD, TYPE_SD, ClosedLine, closed_slopes, closed_times
from .keys import Keys
from .overlap import PARAMETER_SD, StepParameters, Timeline, step_times
from .physics import PRIOR, Physics, step_parameters
from .setups import SetupArrays

# What a measurement and the physics may differ by, in logs, while parameters are sought; beyond it a row counts less.
_TIMELINE_SD, _CLOSED_SD = 0.06, 0.08
# Rows of one workload count for no more than so many [physics.md].
_COUNTS_FOR = 150
# The search ends when a turn lowers the loss by less than this part of it: predictions then differ by 0.3 % at most
# from those of eight digits, and it takes a third of the turns less.
_SETTLED = 1e-6


def fit_physics(physics: Physics, setups: SetupArrays, step_s: FloatArray) -> Physics:
    """The most probable parameters: robust least squares on log residuals, with the priors among them."""
    told = setups.workloads.among(physics.profiled)
    found = physics
    if told.any():
        part = setups.take(np.flatnonzero(told))
        found = replace(found, parameters=_fit_timeline(physics.timeline(part), part.workloads, step_s[told]))
    if (~told).any():
        part = setups.take(np.flatnonzero(~told))
        log_step = np.log(step_s[~told])
        shared, own, by_type = _fit_closed(
            physics.closed_line(part), part.workloads, physics.link_types(part), log_step
        )
        found = replace(found, closed=shared, own=own, by_type=by_type)
    return found


def _share(workloads: Keys) -> FloatArray:
    """(rows,) what a row's residual is worth, so that none of the workloads outweighs the others by its rows."""
    rows = np.maximum(np.bincount(workloads.codes, minlength=len(workloads.names)), 1)
    return np.asarray(np.sqrt(np.minimum(1.0, _COUNTS_FOR / rows))[workloads.codes], dtype=float)


def _fit_timeline(line: Timeline, workloads: Keys, step_s: FloatArray) -> StepParameters:
    share = _share(workloads)

    def residuals(shift: FloatArray) -> FloatArray:
        error = np.log(step_times(line, step_parameters(PRIOR + shift)).step_s / step_s) / _TIMELINE_SD
        return np.concatenate([share * _softened(error), shift / PARAMETER_SD])

    bound = 3 * PARAMETER_SD
    found = least_squares(residuals, np.zeros(len(PRIOR)), bounds=(-bound, bound), x_scale=PARAMETER_SD, max_nfev=25)
    return step_parameters(PRIOR + found.x)


def _softened(error: FloatArray) -> FloatArray:
    """Residuals whose square is the soft_l1 loss: by hand, since outliers are among the data, not in the prior."""
    return np.asarray(np.sign(error) * np.sqrt(2 * (np.sqrt(1 + error**2) - 1)), dtype=float)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Deviations:
    """Part of the closed form's z: some parameters' deviations by the names in `keys`."""

    names: tuple[str, ...]
    row: IntArray  # (rows,) place of each row's name
    moved: IntArray  # which parameters
    sd: FloatArray  # of those

    @classmethod
    def of(cls, keys: Keys, sd: FloatArray) -> _Deviations:
        names, moved = tuple(sorted(keys.distinct)), np.flatnonzero(sd > 0)
        row = keys.places({name: at for at, name in enumerate(names)})
        return cls(names=names, row=row, moved=moved, sd=sd[moved])

    def __len__(self) -> int:
        return len(self.names) * len(self.moved)

    def at(self, z: FloatArray) -> FloatArray:
        """(rows, moved) what the rows' parameters deviate by."""
        return np.asarray(self.sd * z.reshape(len(self.names), -1)[self.row], dtype=float)

    def columns(self, slopes: FloatArray) -> csr_array:
        """(rows, len) derivative by z from (rows, parameters) that by each parameter."""
        rows, each = np.arange(len(slopes)), np.arange(len(self.moved))
        place = (self.row[:, None] * len(self.moved) + each).ravel()
        entries = (slopes[:, self.moved] * self.sd).ravel()
        return csr_array((entries, (np.repeat(rows, len(each)), place)), shape=(len(slopes), len(self)))

    def by_name(self, z: FloatArray) -> dict[str, FloatArray]:
        """z of every parameter, 0 where it does not deviate."""
        whole = np.zeros((len(self.names), len(NAMES)))
        whole[:, self.moved] = z.reshape(len(self.names), -1)
        return dict(zip(self.names, whole, strict=True))


def _fit_closed(
    line: ClosedLine, workloads: Keys, types: Keys, log_step: FloatArray
) -> tuple[FloatArray, dict[str, FloatArray], dict[str, FloatArray]]:
    """Shared z, each workload's and each type's: only parameters that have a prior width are moved at all."""
    moved, own, by_type = np.flatnonzero(SD > 0), _Deviations.of(workloads, OWN_SD), _Deviations.of(types, TYPE_SD)
    rows, ends = len(log_step), np.cumsum([len(moved), len(own)])

    def values(z: FloatArray) -> FloatArray:
        shared, mine, types_z = np.split(z, ends)
        whole = np.tile(MEAN, (rows, 1))
        whole[:, moved] += SD[moved] * shared
        whole[:, own.moved] += own.at(mine)
        whole[:, by_type.moved] += by_type.at(types_z)
        return whole

    share = _share(workloads)

    def residuals(z: FloatArray) -> FloatArray:
        error = (np.log(closed_times(line, values(z)).step_s) - log_step) / _CLOSED_SD
        return np.concatenate([share * _softened(error), z])

    def slopes(z: FloatArray) -> csr_array:
        at = values(z)
        error = (np.log(closed_times(line, at).step_s) - log_step) / _CLOSED_SD
        root = np.sqrt(1 + error**2)
        soft = np.abs(error) / (root * np.maximum(np.abs(_softened(error)), 1e-12))
        soft = (share * np.where(np.abs(error) < 1e-6, 1.0, soft))[:, None]
        each = soft * closed_slopes(line, at) / _CLOSED_SD
        top = hstack([csr_array(each[:, moved] * SD[moved]), own.columns(each), by_type.columns(each)])
        return csr_array(vstack([top, eye_array(len(z))]))

    start = np.zeros(int(ends[-1]) + len(by_type))
    found = least_squares(residuals, start, jac=slopes, bounds=(-6, 6), max_nfev=40, ftol=_SETTLED, tr_solver="lsmr").x
    shared = np.zeros(len(NAMES))
    shared[moved], mine, types_z = np.split(found, ends)
    return shared, own.by_name(mine), by_type.by_name(types_z)
