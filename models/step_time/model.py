"""Step time of a setup: compute from profiles, collectives from probes, overlapped, corrected, with intervals.

    log step = log physics(setup; parameters) + g(setup),     physics in physics/, g in residual/

One model serves one provider. It never reads a clock, a disk or a random global; equal data and seed give equal models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pandas as pd

from ..domain.categorical import numbered
from ..domain.cluster import InstanceType
from ..domain.numeric import Z_90, FloatArray, IntArray
from ..domain.setup_table import SetupArrays, column, read_setups, require_known
from ..domain.workload import Workload
from .dataset import (
    TrainingData,
    TrainingRows,
    definition_digests,
    flops_per_sample,
    one_device_rows,
    training_rows,
    workload_buckets,
)
from .machine_specs import Machine, read_machines
from .memory import MemoryModel, fit_memory
from .physics.compute import ComputeModel, fit_compute
from .physics.ddp_timeline import StepTimes, default_buckets, fit_collectives
from .physics.flops_prior import with_guess
from .physics.physics import Physics, by_timeline, fit_physics
from .residual.kernel import features_of, identities
from .residual.nearest import Nearness
from .residual.training_state import Learned, Measured

__all__ = ["StepTimeModel", "TrainingData", "fit"]

LIMITS = ("compute", "communication inside a node", "communication between nodes", "stragglers", "input")

# Floor of an exposed part above which communication, and of an imbalance above which stragglers, limit a step.
_LIMITED = 0.2
# Part of the slowest rank's compute above which making batches, and not the network, is what takes it.
_MOSTLY = 0.5
# Setups predicted at once: the columns of more would not fit a small machine. And setups bounded at once.
_CHUNK, _MANY = 2500, 20_000
# Setups whose covariance is held in memory at once.
MOST_JOINT = 4000
# Relative: what two orders of the same floating-point sums differ by at most, and then some.
_ROUNDING = 1e-9
# Rows of one workload that the physics is sought on: with fewer, which ones chance picks moves what a new workload
# is predicted by several per cent.
_MOST_SOUGHT_ON = 600


def bottlenecks(physics: StepTimes, setups: SetupArrays, compute: ComputeModel) -> list[str]:
    """One of LIMITS a setup. Input is named only where a profile told how long batches take to make."""
    exposed = 1 - physics.compute_s / physics.step_s
    uneven = (physics.compute_s - physics.mean_compute_s) / physics.step_s
    kind = np.take_along_axis(setups.kind, physics.slowest[:, None], axis=1)[:, 0]
    pairs, which = numbered(zip(setups.workloads.codes.tolist(), kind.tolist(), strict=True))
    curves = [compute.curve(setups.workloads.names[one], setups.names[at]) for one, at in pairs]
    made = (np.array([curve.input_part for curve in curves]) > _MOSTLY)[which]
    labels = np.where(uneven > _LIMITED, "stragglers", np.where(made, "input", "compute"))
    across = np.where(setups.instances > 1, "communication between nodes", "communication inside a node")
    return [str(one) for one in np.where((exposed > _LIMITED) & (exposed >= uneven), across, labels)]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimeModel:
    """Predicts step seconds with intervals; `fit` makes one, serialization.py stores it."""

    provider: str
    physics: Physics
    measured: Measured
    memory: MemoryModel = field(default_factory=MemoryModel)
    trained_on: tuple[str, ...] = ()  # run ids
    workload_digests: dict[str, str] = field(default_factory=dict)  # of the definitions that were measured, by name
    type_digests: dict[str, str] = field(default_factory=dict)
    _made: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def machines(self) -> dict[str, Machine]:
        """Instance types by name."""
        return self.physics.machines

    @property
    def workloads(self) -> tuple[str, ...]:
        """Workloads that can be predicted."""
        compute = self.physics.compute
        return tuple(sorted({*compute.flops, *(workload for workload, _ in compute.curves)}))

    @property
    def instance_types(self) -> tuple[str, ...]:
        """Instance types that can be predicted."""
        return tuple(sorted(self.machines))

    def met_workload(self, workload: Workload) -> bool:
        """Was this workload learned as it is defined today? One of the same name and another digest is another."""
        return workload.name in self.workloads and self.workload_digests.get(workload.name) == workload.digest

    def met_type(self, instance_type: InstanceType) -> bool:
        """The same of an instance type."""
        name = instance_type.name
        return name in self.machines and self.type_digests.get(name) == instance_type.digest

    def predict(self, setups: pd.DataFrame) -> pd.DataFrame:
        """Predict each setup (measurement columns; workload, cluster, batch_per_device required), on the same index.

        Columns: step_s with its 90 % interval step_low_s..step_high_s for one new measurement, samples_per_s, compute_s
        (the slowest rank alone), communication_s (all collectives), exposed_communication_s (the part not hidden),
        bottleneck (one of LIMITS), nearest_doublings (distance to the nearest measured setup of the workload, see
        residual/nearest.py; NaN where only its profile is known).
        Raises ValueError on an unknown workload or instance type (naming the nearest known), another provider,
        a strategy other than ddp or a precision other than fp32, and on text that cannot be read.
        """
        return self.predict_arrays(self._read(setups)).set_index(setups.index)

    def predict_arrays(self, arrays: SetupArrays) -> pd.DataFrame:
        """`predict` of setups that were read or planned, numbered from 0."""
        return pd.concat([self._predict(arrays.take(part)) for part in _chunks(arrays)], ignore_index=True)

    def _predict(self, arrays: SetupArrays) -> pd.DataFrame:
        step = self.physics.at(arrays)
        learned = self._learned()
        mean, spread = learned.posterior.moments(features_of(arrays, step, self.physics))
        factor, spread = np.exp(learned.held(mean)), learned.widened(mean, spread)
        times = step.times
        step_s = times.step_s * factor
        return pd.DataFrame(
            {
                "step_s": step_s,
                "step_low_s": step_s * np.exp(-Z_90 * spread),
                "step_high_s": step_s * np.exp(Z_90 * spread),
                "samples_per_s": arrays.samples / step_s,
                "compute_s": times.compute_s * factor,
                "communication_s": times.communication_s * factor,
                "exposed_communication_s": np.maximum(times.step_s - times.compute_s, 0) * factor,
                "bottleneck": bottlenecks(times, arrays, self.physics.compute),
                "nearest_doublings": self._nearness().doublings(arrays),
            }
        )

    def draws(self, setups: pd.DataFrame, *, count: int, seed: int) -> FloatArray:
        """(setups, count) step seconds, drawn jointly: what two setups share in error moves together.

        A setup's draws do not depend on what else is asked about. They come in pairs, one above what `predict` says
        and one as far below. Raises ValueError as `predict` does.
        """
        return self.draw_arrays(self._read(setups), count=count, seed=seed)

    def draw_arrays(self, arrays: SetupArrays, *, count: int, seed: int) -> FloatArray:
        """`draws` of setups that were read or planned."""
        drawn, learned = np.empty((len(arrays.workloads), count)), self._learned()
        for part in _chunks(arrays):
            own = arrays.take(part)
            step = self.physics.at(own)
            mean, spread, off = learned.posterior.draws(
                features_of(own, step, self.physics),
                identity=identities(own),
                measured=self._identities(),
                count=count,
                seed=seed,
            )
            wider = learned.widened(mean, spread) / spread
            drawn[part] = (step.times.step_s * np.exp(learned.held(mean)))[:, None] * np.exp(wider[:, None] * off)
        return drawn

    def least_seconds(self, arrays: SetupArrays) -> FloatArray:
        """(rows,) step seconds that no prediction of these setups undercuts: cheap, since nothing is looked up."""
        parts = [self.physics.seconds(arrays.take(part)) for part in _chunks(arrays, _MANY)]
        return np.concatenate(parts) * float(np.exp(self._learned().least)) * (1 - _ROUNDING)

    def joint(self, setups: pd.DataFrame) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Of log step seconds jointly: mean (setups,), covariance (setups, setups) and variance of a run's noise.

        Raises ValueError as `predict` does, and above 4,000 setups at once.
        """
        if len(setups) > MOST_JOINT:
            raise ValueError(f"{len(setups)} setups at once: at most {MOST_JOINT} jointly")
        arrays = self._read(setups)
        step = self.physics.at(arrays)
        learned = self._learned()
        mean, covariance, noise = learned.posterior.joint(features_of(arrays, step, self.physics))
        spread = np.sqrt(np.diag(covariance))
        wider = learned.widened(mean, spread) / spread  # correlations stay: a run is no noisier for being held
        covariance *= wider[:, None]
        covariance *= wider
        return np.log(step.times.step_s) + learned.held(mean), covariance, noise

    def compute_line(self, workload: str, instance_type: str) -> tuple[float, float]:
        """(a, k): forward and backward of one device take about a + k * batch seconds. Raises ValueError if unknown."""
        self._require([workload], [instance_type])
        return self.physics.compute.curve(workload, instance_type).line()

    def peak_bytes(self, workload: str, instance_type: str, batch: int) -> float:
        """Peak memory of one rank at `batch`; NaN where nothing is known of the workload."""
        return self.memory.peak_bytes(workload, instance_type, batch)

    def _require(self, workloads: list[str], types: list[str]) -> None:
        require_known(workloads, self.workloads, "workload")
        require_known(types, self.instance_types, "instance type")

    def _read(self, setups: pd.DataFrame) -> SetupArrays:
        for name, only in (("strategy", "ddp"), ("precision", "fp32"), ("provider", self.provider)):
            other = {str(one) for one in column(setups, name, only)} - {only, ""}
            if other:
                raise ValueError(f"{name} {sorted(other)[0]!r} is not predicted by this model, only {only!r}")
        arrays = read_setups(setups, {name: one.devices for name, one in self.machines.items()})
        self._require(list(arrays.workloads.distinct), list(arrays.names))
        return arrays

    def _learned(self) -> Learned:
        """What was measured, brought to bear; the same measurements give the same one."""
        if "learned" not in self._made:
            posterior = self._made.pop("posterior", None) or self.measured.posterior(self.physics)
            self._made["learned"] = Learned.of(posterior)
        made: Learned = self._made["learned"]
        return made

    def _identities(self) -> tuple[str, ...]:
        """Of what was measured: only draws ask for them."""
        if "identities" not in self._made:
            self._made["identities"] = identities(self.measured.setups)
        made: tuple[str, ...] = self._made["identities"]
        return made

    def _nearness(self) -> Nearness:
        if "nearness" not in self._made:
            self._made["nearness"] = Nearness(self.measured.setups)
        made: Nearness = self._made["nearness"]
        return made


def _chunks(arrays: SetupArrays, size: int = _CHUNK) -> list[IntArray]:
    """Positions of so many setups at once, in order; one empty chunk for none."""
    many = len(arrays.workloads)
    return [np.arange(first, min(first + size, many)) for first in range(0, max(many, 1), size)]


def fit(data: TrainingData, *, seed: int) -> StepTimeModel:
    """Fit everything to one provider's measurements. Rows without a positive finite step time are left out.

    Raises ValueError if there is nothing to learn compute from, or rows of more than one provider.
    """
    rows = training_rows(data, seed=seed)
    machines = read_machines(data.instance_types, rows.types)
    compute = fit_compute(data.profiles, one_device_rows(rows, data.profiles), machines)
    if not compute.curves:
        raise ValueError("nothing to learn from: no profile and no run with a positive step time")
    physics = Physics(
        compute=with_guess(compute, flops_per_sample(data)),
        collectives=fit_collectives(data.probes, machines),
        buckets=workload_buckets(data, {workload for workload, _ in compute.curves}),
        machines=machines,
        profiled=by_timeline(compute),
    )
    known = {workload for workload, _ in compute.curves}
    kept = np.flatnonzero(rows.setups.workloads.among(known))
    rows = rows.take(kept)
    if len(kept):
        picked = _few_of_each(rows, seed=seed)
        physics = fit_physics(physics, rows.setups.take(picked), rows.step_s[picked])
    physics = physics.reaching(rows.setups)
    measured, posterior = Measured.of(
        physics, rows.setups, step_s=rows.step_s, repeats=rows.repeats, spread=rows.spread
    )
    return StepTimeModel(
        provider=rows.provider,
        physics=physics,
        measured=measured,
        memory=fit_memory(
            data.profiles,
            rows.setups,
            machines,
            gradient_bytes={name: sum(one.size_bytes) for name, one in physics.buckets.items()},
            flops_per_sample=flops_per_sample(data),
        ),
        trained_on=rows.run_ids,
        workload_digests=definition_digests(data.workloads, "workload"),
        type_digests=definition_digests(data.instance_types, "name"),
        _made={"posterior": posterior},
    )


def _few_of_each(rows: TrainingRows, *, seed: int) -> np.ndarray[tuple[int, ...], np.dtype[np.intp]]:
    """Rows of each workload, by chance where there are more than the physics is sought on."""
    drawn = np.argsort(np.random.default_rng(seed).permutation(len(rows.step_s)))
    each = [own[np.argsort(drawn[own])][:_MOST_SOUGHT_ON] for own in rows.setups.workloads.groups().values()]
    return np.sort(np.concatenate(each))


def introduced(model: StepTimeModel, workload: Workload) -> StepTimeModel | None:
    """The model, able to guess at `workload` on types whose device's peak rate is known.

    It predicts every other workload as before. None where the workload's FLOPs are unknown, where something of that
    name was measured (as it is defined now or was once), or where the model was fitted before there were guesses.
    """
    name, flops = workload.name, workload.flops_per_sample
    if flops is None:
        return None
    found = all_introduced(model, {name: flops}, {name: float(workload.gradient_bytes or 0)})
    return found if name in found.physics.compute.flops else None


def all_introduced(
    model: StepTimeModel, flops_per_sample: Mapping[str, float], gradient_bytes: Mapping[str, float]
) -> StepTimeModel:
    """The same for every workload in `flops_per_sample` that can be; `gradient_bytes` are absent or 0 where unknown."""
    compute, buckets, memory = model.physics.compute, dict(model.physics.buckets), model.memory
    measured = {owner for owner, _ in compute.curves}
    new = {name: flops for name, flops in flops_per_sample.items() if name not in measured}
    if compute.guess is None or not new:
        return model
    for name, flops in new.items():
        size = gradient_bytes.get(name, 0.0)
        buckets[name] = default_buckets(size)
        memory = memory.with_facts(name, gradient_bytes=size, flops_per_sample=flops)
    compute = replace(compute, flops=compute.flops | new, _filled={})
    return replace(model, physics=replace(model.physics, compute=compute, buckets=buckets), memory=memory)
