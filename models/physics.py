"""The physical step of any setup, and how it answers to each parameter: buckets on a timeline, or the closed form.

A workload whose buckets were profiled goes by the timeline (overlap.py), any other by the closed form
(closed_form.py). Parameters are whitened: z = 0 is the prior, z = 1 one standard deviation of it away.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, dataclass, field, replace

import numpy as np
from scipy.optimize import least_squares

from .arrays import FloatArray
from .closed_form import MEAN, NAMES, OWN_SD, SD, STEP, ClosedLine, closed_slopes, closed_times, lay_out_closed
from .communication import CollectiveModel
from .compute import ComputeModel
from .keys import Keys
from .machines import Machine
from .overlap import PARAMETER_NAMES, PARAMETER_SD, Buckets, StepParameters, StepTimes, Timeline, lay_out, step_times
from .setups import SetupArrays

# What a measurement and the physics may differ by, in logs, while parameters are sought; beyond it a row counts less.
_TIMELINE_SD, _CLOSED_SD = 0.06, 0.08
# Rows of one workload count for no more than so many [physics.md].
_COUNTS_FOR = 150
# The search ends when a turn lowers the loss by less than this part of it: predictions then differ by 0.3 % at most
# from those of eight digits, and it takes a third of the turns less.
_SETTLED = 1e-6
_PRIOR = np.log(np.array(astuple(StepParameters())))


@dataclass(frozen=True, slots=True, kw_only=True)
class PhysicalStep:
    """`times` by the fitted parameters, and the slopes of log step: (rows, parameters) by whitened parameter.

    `offset` is slopes times the fitted z: log step at the prior is about log step_s - offset. `exposed` is the part of
    the step that answers to communication and not to compute.
    """

    times: StepTimes
    shared: FloatArray
    own: FloatArray
    offset: FloatArray
    exposed: FloatArray
    octaves: FloatArray  # log2 batch outside what was measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Physics:
    """All that turns a setup into seconds before anything is corrected."""

    compute: ComputeModel
    collectives: CollectiveModel
    buckets: dict[str, Buckets]
    machines: dict[str, Machine]
    profiled: frozenset[str]  # workloads that go by the timeline
    parameters: StepParameters = field(default_factory=StepParameters)
    closed: FloatArray = field(default_factory=lambda: np.zeros(len(NAMES)))  # z, shared by the workloads
    own: dict[str, FloatArray] = field(default_factory=dict)  # z of each workload's deviation
    most_devices: float = np.inf  # of the largest cluster that was measured, of any workload

    def at(self, setups: SetupArrays) -> PhysicalStep:
        """Seconds and slopes of every setup. Raises ValueError on a workload never measured."""
        told = setups.workloads.among(self.profiled)
        rows, timeline, closed = len(told), len(PARAMETER_NAMES), len(NAMES)
        shared, own = np.zeros((rows, timeline + closed)), np.zeros((rows, closed))
        offset, exposed, octaves = np.zeros(rows), np.zeros(rows), np.zeros(rows)
        step = StepTimes(**{name: np.zeros(rows) for name in _SECONDS}, slowest=np.zeros(rows, dtype=np.intp))
        for picked, by_timeline in ((np.flatnonzero(told), True), (np.flatnonzero(~told), False)):
            if not len(picked):
                continue
            part = setups.take(picked)
            if by_timeline:
                line = self.timeline(part)
                times, slopes = step_times(line, self.parameters), self._timeline_slopes(line)
                shared[picked, :timeline] = slopes
                offset[picked] = slopes @ ((np.log(np.array(astuple(self.parameters))) - _PRIOR) / PARAMETER_SD)
                exposed[picked] = np.clip(1 - times.compute_s / times.step_s, 0, 1)
                octaves[picked] = line.distance
            else:
                plain, deviation = self.closed_line(part), self._deviation(part)
                values = MEAN + SD * self.closed + OWN_SD * deviation
                times, slopes = closed_times(plain, values), closed_slopes(plain, values)
                shared[picked, timeline:], own[picked] = slopes * SD, slopes * OWN_SD
                offset[picked] = slopes @ (SD * self.closed) + (slopes * OWN_SD * deviation).sum(axis=1)
                exposed[picked] = _exposed(plain, values, times.step_s)
                octaves[picked] = plain.outside
            for name in _SECONDS:
                getattr(step, name)[picked] = getattr(times, name)
            step.slowest[picked] = times.slowest
        return PhysicalStep(times=step, shared=shared, own=own, offset=offset, exposed=exposed, octaves=octaves)

    def seconds(self, setups: SetupArrays) -> FloatArray:
        """(rows,) the seconds of `at`, without slopes: for more setups than anybody would look at one by one."""
        told = setups.workloads.among(self.profiled)
        step = np.zeros(len(told))
        if told.any():
            picked = np.flatnonzero(told)
            step[picked] = step_times(self.timeline(setups.take(picked)), self.parameters).step_s
        if (~told).any():
            part = setups.take(np.flatnonzero(~told))
            values = MEAN + SD * self.closed + OWN_SD * self._deviation(part)
            step[~told] = closed_times(self.closed_line(part), values).step_s
        return step

    def timeline(self, setups: SetupArrays) -> Timeline:
        """The setups laid out for the timeline."""
        return lay_out(
            setups,
            compute=self.compute,
            collectives=self.collectives,
            buckets=self.buckets,
            machines=self.machines,
        )

    def closed_line(self, setups: SetupArrays) -> ClosedLine:
        """The setups laid out for the closed form."""
        sizes = {name: float(sum(one.size_bytes)) for name, one in self.buckets.items()}
        return lay_out_closed(setups, compute=self.compute, gradient_bytes=sizes, machines=self.machines)

    def _deviation(self, setups: SetupArrays) -> FloatArray:
        none = np.zeros(len(NAMES))
        known = np.array([self.own.get(name, none) for name in setups.workloads.names]).reshape(-1, len(NAMES))
        return np.asarray(known[setups.workloads.codes], dtype=float)

    def _timeline_slopes(self, line: Timeline) -> FloatArray:
        logs = np.log(np.array(astuple(self.parameters)))
        return _slopes(lambda shift: np.log(step_times(line, _step_parameters(logs + shift)).step_s), PARAMETER_SD)


_SECONDS = ("step_s", "compute_s", "mean_compute_s", "communication_s")


def _step_parameters(logs: FloatArray) -> StepParameters:
    return StepParameters(**dict(zip(PARAMETER_NAMES, (float(one) for one in np.exp(logs)), strict=True)))


def _slopes(log_step: Callable[[FloatArray], FloatArray], scale: FloatArray) -> FloatArray:
    """(rows, parameters) derivative by each parameter, times its `scale`, by differences."""
    here = log_step(np.zeros(len(scale)))
    columns = [(log_step(STEP * one) - here) / STEP for one in np.diag(scale)]
    return np.stack(columns, axis=1) if columns else np.zeros((len(here), 0))


def _exposed(line: ClosedLine, values: FloatArray, step_s: FloatArray) -> FloatArray:
    """1 - d log step / d log compute."""
    longer = replace(
        line,
        alone_s=line.alone_s * (1 + STEP),
        fixed_s=line.fixed_s * (1 + STEP),
        optimizer_s=line.optimizer_s * (1 + STEP),
    )
    rise = closed_times(longer, values).step_s / step_s - 1
    return np.asarray(np.clip(1 - rise / STEP, 0, 1), dtype=float)


def fit_physics(physics: Physics, setups: SetupArrays, step_s: FloatArray) -> Physics:
    """The most probable parameters: robust least squares on log residuals, with the priors among them."""
    told = setups.workloads.among(physics.profiled)
    found = physics
    if told.any():
        part = setups.take(np.flatnonzero(told))
        found = replace(found, parameters=_fit_timeline(physics.timeline(part), part.workloads, step_s[told]))
    if (~told).any():
        part = setups.take(np.flatnonzero(~told))
        shared, own = _fit_closed(physics.closed_line(part), part.workloads, np.log(step_s[~told]))
        found = replace(found, closed=shared, own=own)
    return found


def _share(workloads: Keys) -> FloatArray:
    """(rows,) what a row's residual is worth, so that none of the workloads outweighs the others by its rows."""
    rows = np.maximum(np.bincount(workloads.codes, minlength=len(workloads.names)), 1)
    return np.asarray(np.sqrt(np.minimum(1.0, _COUNTS_FOR / rows))[workloads.codes], dtype=float)


def _fit_timeline(line: Timeline, workloads: Keys, step_s: FloatArray) -> StepParameters:
    share = _share(workloads)

    def residuals(shift: FloatArray) -> FloatArray:
        error = np.log(step_times(line, _step_parameters(_PRIOR + shift)).step_s / step_s) / _TIMELINE_SD
        return np.concatenate([share * _softened(error), shift / PARAMETER_SD])

    bound = 3 * PARAMETER_SD
    found = least_squares(residuals, np.zeros(len(_PRIOR)), bounds=(-bound, bound), x_scale=PARAMETER_SD, max_nfev=25)
    return _step_parameters(_PRIOR + found.x)


def _softened(error: FloatArray) -> FloatArray:
    """Residuals whose square is the soft_l1 loss: by hand, since outliers are among the data, not in the prior."""
    return np.asarray(np.sign(error) * np.sqrt(2 * (np.sqrt(1 + error**2) - 1)), dtype=float)


def _fit_closed(line: ClosedLine, workloads: Keys, log_step: FloatArray) -> tuple[FloatArray, dict[str, FloatArray]]:
    """Shared z, and each workload's z: only parameters that have a prior width are moved at all."""
    names = sorted(workloads.distinct)
    owner = workloads.places({name: at for at, name in enumerate(names)})
    moved, deviating = np.flatnonzero(SD > 0), np.flatnonzero(OWN_SD > 0)
    rows, parts = len(log_step), len(moved)

    def values(z: FloatArray) -> FloatArray:
        whole = np.tile(MEAN, (rows, 1))
        whole[:, moved] += SD[moved] * z[:parts]
        whole[:, deviating] += OWN_SD[deviating] * z[parts:].reshape(len(names), -1)[owner]
        return whole

    share = _share(workloads)

    def residuals(z: FloatArray) -> FloatArray:
        error = (np.log(closed_times(line, values(z)).step_s) - log_step) / _CLOSED_SD
        return np.concatenate([share * _softened(error), z])

    def slopes(z: FloatArray) -> FloatArray:
        at = values(z)
        error = (np.log(closed_times(line, at).step_s) - log_step) / _CLOSED_SD
        root = np.sqrt(1 + error**2)
        soft = np.abs(error) / (root * np.maximum(np.abs(_softened(error)), 1e-12))
        soft = (share * np.where(np.abs(error) < 1e-6, 1.0, soft))[:, None]
        each = soft * closed_slopes(line, at) / _CLOSED_SD
        own = np.zeros((rows, len(names), len(deviating)))
        own[np.arange(rows), owner] = each[:, deviating] * OWN_SD[deviating]
        top = np.concatenate([each[:, moved] * SD[moved], own.reshape(rows, -1)], axis=1)
        return np.concatenate([top, np.eye(len(z))])

    start = np.zeros(parts + len(names) * len(deviating))
    found = least_squares(residuals, start, jac=slopes, bounds=(-6, 6), max_nfev=40, ftol=_SETTLED).x
    shared = np.zeros(len(NAMES))
    shared[moved] = found[:parts]
    own_z = np.zeros((len(names), len(NAMES)))
    own_z[:, deviating] = found[parts:].reshape(len(names), -1)
    return shared, dict(zip(names, own_z, strict=True))
