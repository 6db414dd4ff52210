"""The physical step of any setup, its slopes by each parameter, and the fit of the parameters to measured steps.

A workload that was profiled on machines of one device goes by the bucket timeline (ddp_timeline.py), any other by the
closed form (step_formula.py). Parameters are whitened: z = 0 is the prior, z = 1 one standard deviation of it away.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, dataclass, field, replace

import numpy as np
import scipy  # its parts are loaded where they are named: only a fit needs `optimize`, which takes long to import

from ...domain.categorical import Keys
from ...domain.numeric import FloatArray, IntArray
from ...domain.setup_table import SetupArrays
from ..machine_specs import Machine
from .collectives import log_link, log_rate
from .compute import ComputeModel
from .ddp_timeline import (
    PARAMETER_NAMES,
    PARAMETER_SD,
    Buckets,
    CollectiveModel,
    StepParameters,
    StepTimes,
    Timeline,
    lay_out,
    step_times,
)
from .step_formula import (
    MEAN,
    NAMES,
    OWN_SD,
    SD,
    STEP,
    TYPE_SD,
    ClosedLine,
    closed_slopes,
    closed_times,
    lay_out_closed,
)

PRIOR = np.log(np.array(astuple(StepParameters())))
# What a measurement and the physics may differ by, in logs, while parameters are sought; beyond it a row counts less.
_TIMELINE_SD, _CLOSED_SD = 0.06, 0.08
# Rows of one workload count for no more than so many [physics.md].
_COUNTS_FOR = 150
# The search ends when a turn lowers the loss by less than this part of it: predictions then differ by 0.3 % at most
# from those of eight digits, and it takes a third of the turns less.
_SETTLED = 1e-6
# Of the log of a link's rate: a doubling of the nominal one beyond those measured gives anything between nothing and
# twice the rate (the root of log(2)^2 / 12), and one that nobody told may be three times as fast or slow.
_DOUBLING_SD, _UNTOLD_SD = 0.2, 1.2
_SCALE, _GAMMA, _DRIVEN = (NAMES.index(one) for one in ("log_scale", "log_gamma", "log_driven"))
_SECONDS = ("step_s", "compute_s", "mean_compute_s", "communication_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class PhysicalStep:
    """`times` by the fitted parameters, and the slopes of log step: (rows, parameters) by whitened parameter.

    `offset` is slopes times the fitted z: log step at the prior is about log step_s - offset. `exposed` is the part of
    the step that answers to communication and not to compute.
    """

    times: StepTimes
    shared: FloatArray
    own: FloatArray  # by a workload's deviation
    by_type: FloatArray  # by an instance type's deviation
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
    closed: FloatArray = field(default_factory=lambda: np.zeros(len(NAMES)))  # z, shared by workloads and types
    own: dict[str, FloatArray] = field(default_factory=dict)  # z of each workload's deviation
    by_type: dict[str, FloatArray] = field(default_factory=dict)  # z of each instance type's deviation
    most_devices: float = np.inf  # of the largest cluster that was measured, of any workload
    links_gbps: tuple[float, float] = (0.0, np.inf)  # nominal, the slowest and the fastest that any exchange went over

    def at(self, setups: SetupArrays) -> PhysicalStep:
        """Seconds and slopes of every setup. Raises ValueError on a workload never measured."""
        told = setups.workloads.among(self.profiled)
        rows, timeline, closed = len(told), len(PARAMETER_NAMES), len(NAMES)
        shared, own, by_type = np.zeros((rows, timeline + closed)), np.zeros((rows, closed)), np.zeros((rows, closed))
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
                offset[picked] = slopes @ ((np.log(np.array(astuple(self.parameters))) - PRIOR) / PARAMETER_SD)
                exposed[picked] = np.clip(1 - times.compute_s / times.step_s, 0, 1)
                octaves[picked] = line.distance
            else:
                plain, values = self.closed_line(part), self._values(part)
                times, slopes = closed_times(plain, values), closed_slopes(plain, values)
                shared[picked, timeline:], own[picked], by_type[picked] = slopes * SD, slopes * OWN_SD, slopes * TYPE_SD
                offset[picked] = (slopes * (values - MEAN)).sum(axis=1)
                exposed[picked] = _exposed(plain, values, times.step_s)
                octaves[picked] = plain.outside
            for name in _SECONDS:
                getattr(step, name)[picked] = getattr(times, name)
            step.slowest[picked] = times.slowest
        return PhysicalStep(
            times=step, shared=shared, own=own, by_type=by_type, offset=offset, exposed=exposed, octaves=octaves
        )

    def seconds(self, setups: SetupArrays) -> FloatArray:
        """(rows,) the seconds of `at`, without slopes: for more setups than anybody would look at one by one."""
        told = setups.workloads.among(self.profiled)
        step = np.zeros(len(told))
        if told.any():
            picked = np.flatnonzero(told)
            step[picked] = step_times(self.timeline(setups.take(picked)), self.parameters).step_s
        if (~told).any():
            part = setups.take(np.flatnonzero(~told))
            step[~told] = closed_times(self.closed_line(part), self._values(part)).step_s
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
        line = lay_out_closed(setups, compute=self.compute, gradient_bytes=sizes, machines=self.machines)
        return replace(line, gbps=self.link_types(setups).values(lambda name: self.machines[name].bandwidth_gbps))

    def reaching(self, measured: SetupArrays) -> Physics:
        """The same, told how far measurements reach: by devices, and by links between machines."""
        over = self.link_types(measured).values(lambda name: self.machines[name].bandwidth_gbps)[measured.instances > 1]
        return replace(
            self,
            most_devices=float(measured.ranks.max(initial=1)),
            links_gbps=(float(over.min()), float(over.max())) if len(over) else (0.0, np.inf),
        )

    def link_types(self, setups: SetupArrays) -> Keys:
        """The type of each setup's machine that sends slowest, as far as learned; of equals the first by name."""
        driven = (MEAN + SD * self.closed)[_DRIVEN] + np.log(setups.ranks / setups.instances)
        link, slower = (
            setups.by_type({name: of(name) for name in setups.names}, 0.0) for of in (self._link, self._slower)
        )
        rate = np.where(setups.kind >= 0, log_rate(link, driven[:, None]) - slower, np.inf)
        by_name = setups.by_type({name: float(at) for at, name in enumerate(sorted(setups.names))}, np.inf)
        slowest = np.where(rate <= rate.min(axis=1)[:, None], by_name, np.inf).argmin(axis=1)
        return Keys(setups.names, setups.kind[np.arange(len(slowest)), slowest])

    def rate_doubt(self, name: str) -> float:
        """Of the log of the rate that a type's link gives, beyond what the parameters say: for residual/kernel.py."""
        machine, (least, most) = self.machines[name], self.links_gbps
        beyond = np.log2(max(machine.bandwidth_gbps / most, least / machine.bandwidth_gbps, 1.0))
        return float(np.hypot(_DOUBLING_SD * beyond, 0.0 if machine.link_told else _UNTOLD_SD))

    def _link(self, name: str) -> float:
        return log_link(self.machines[name].bandwidth_gbps, np.exp((MEAN + SD * self.closed)[_GAMMA]))

    def _slower(self, name: str) -> float:
        """Log of what a type's links are slower by than all types'."""
        return float(TYPE_SD[_SCALE] * self.by_type[name][_SCALE]) if name in self.by_type else 0.0

    def _values(self, setups: SetupArrays) -> FloatArray:
        """(rows, parameters) of the closed form."""
        own, by_type = _known(self.own, setups.workloads), _known(self.by_type, self.link_types(setups))
        return np.asarray(MEAN + SD * self.closed + OWN_SD * own + TYPE_SD * by_type, dtype=float)

    def _timeline_slopes(self, line: Timeline) -> FloatArray:
        logs = np.log(np.array(astuple(self.parameters)))
        return _slopes(lambda shift: np.log(step_times(line, step_parameters(logs + shift)).step_s), PARAMETER_SD)


def by_timeline(compute: ComputeModel) -> frozenset[str]:
    """Workloads that go by the timeline: the profiled, where every machine has one device.

    It knows neither how devices of one machine slow each other down nor what joins them, which the closed form learns.
    """
    if any(one.devices > 1 for one in compute.machines.values()):
        return frozenset()
    return frozenset(workload for (workload, _), one in compute.curves.items() if one.origin == "profile")


def _known(deviations: dict[str, FloatArray], keys: Keys) -> FloatArray:
    """(rows, parameters) z of each row's name, 0 where nothing is known of it."""
    none = np.zeros(len(NAMES))
    known = np.array([deviations.get(name, none) for name in keys.names]).reshape(-1, len(NAMES))
    return np.asarray(known[keys.codes], dtype=float)


def step_parameters(logs: FloatArray) -> StepParameters:
    """The timeline's parameters from their logs."""
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
    found = scipy.optimize.least_squares(
        residuals, np.zeros(len(PRIOR)), bounds=(-bound, bound), x_scale=PARAMETER_SD, max_nfev=25
    )
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

    def columns(self, slopes: FloatArray) -> scipy.sparse.csr_array:
        """(rows, len) derivative by z from (rows, parameters) that by each parameter."""
        rows, each = np.arange(len(slopes)), np.arange(len(self.moved))
        place = (self.row[:, None] * len(self.moved) + each).ravel()
        entries = (slopes[:, self.moved] * self.sd).ravel()
        return scipy.sparse.csr_array((entries, (np.repeat(rows, len(each)), place)), shape=(len(slopes), len(self)))

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

    def slopes(z: FloatArray) -> scipy.sparse.csr_array:
        at = values(z)
        error = (np.log(closed_times(line, at).step_s) - log_step) / _CLOSED_SD
        root = np.sqrt(1 + error**2)
        soft = np.abs(error) / (root * np.maximum(np.abs(_softened(error)), 1e-12))
        soft = (share * np.where(np.abs(error) < 1e-6, 1.0, soft))[:, None]
        each = soft * closed_slopes(line, at) / _CLOSED_SD
        top = scipy.sparse.hstack(
            [scipy.sparse.csr_array(each[:, moved] * SD[moved]), own.columns(each), by_type.columns(each)]
        )
        return scipy.sparse.csr_array(scipy.sparse.vstack([top, scipy.sparse.eye_array(len(z))]))

    start = np.zeros(int(ends[-1]) + len(by_type))
    found = scipy.optimize.least_squares(
        residuals, start, jac=slopes, bounds=(-6, 6), max_nfev=40, ftol=_SETTLED, tr_solver="lsmr"
    ).x
    shared = np.zeros(len(NAMES))
    shared[moved], mine, types_z = np.split(found, ends)
    return shared, own.by_name(mine), by_type.by_name(types_z)
