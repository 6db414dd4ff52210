"""Step time of a setup: compute from profiles, collectives from probes, overlapped, corrected, with intervals.

    log step = log physics(setup; parameters) + g(setup),     physics in overlap.py, g in correction.py

One model serves one provider. It never reads a clock, a disk or a random global; equal data and seed give equal models.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import pandas as pd

from .cloud import InstanceType
from .communication import CollectiveModel, fit_collectives
from .compute import ComputeModel, fit_compute
from .correction import Correction, Features
from .intervals import Z_90, calibrated
from .learning import (
    TrainingData,
    TrainingRows,
    definition_digests,
    fit_parameters,
    one_device_rows,
    training_rows,
    workload_buckets,
)
from .machines import Machine, read_machines
from .overlap import Buckets, StepParameters, StepTimes, lay_out, step_times
from .setups import BoolArray, FloatArray, SetupArrays, column, read_setups, require_known
from .workload import Workload

__all__ = ["StepTimeModel", "TrainingData", "fit"]

# Beyond this many setups their joint covariance no longer fits a small machine's memory: draw for the survivors.
MOST_JOINT = 4000
# Floor of an exposed part above which communication, and of an imbalance above which stragglers, limit a step.
_LIMITS = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimeModel:
    """Predicts step seconds with intervals; `fit` makes one, `to_json` stores it."""

    provider: str
    compute: ComputeModel
    collectives: CollectiveModel
    buckets: dict[str, Buckets]
    machines: dict[str, Machine]
    parameters: StepParameters
    correction: Correction
    trained_on: tuple[str, ...] = ()  # run ids
    workload_digests: dict[str, str] = field(default_factory=dict)  # of the definitions that were measured, by name
    type_digests: dict[str, str] = field(default_factory=dict)

    @property
    def workloads(self) -> tuple[str, ...]:
        """Workloads that can be predicted."""
        return tuple(sorted({workload for workload, _ in self.compute.curves}))

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
        bottleneck (compute, communication or stragglers; input is not measured yet and never named).
        Raises ValueError on an unknown workload or instance type (naming the nearest known), another provider,
        a strategy other than ddp or a precision other than fp32, and on text that cannot be read.
        """
        arrays = self._read(setups)
        physics, features = self._physics(arrays)
        mean, spread = self.correction.moments(features)
        factor = np.exp(mean)
        step = physics.step_s * factor
        exposed = np.maximum(physics.step_s - physics.compute_s, 0) * factor
        return pd.DataFrame(
            {
                "step_s": step,
                "step_low_s": step * np.exp(-Z_90 * spread),
                "step_high_s": step * np.exp(Z_90 * spread),
                "samples_per_s": arrays.samples / step,
                "compute_s": physics.compute_s * factor,
                "communication_s": physics.communication_s * factor,
                "exposed_communication_s": exposed,
                "bottleneck": _bottlenecks(physics),
            },
            index=setups.index,
        )

    def draws(self, setups: pd.DataFrame, *, count: int, seed: int) -> FloatArray:
        """(setups, count) step seconds, drawn jointly: what two setups share in error moves together.

        Raises ValueError as `predict` does, and above 4,000 setups at once.
        """
        if len(setups) > MOST_JOINT:
            raise ValueError(f"{len(setups)} setups at once: draw for at most {MOST_JOINT}")
        arrays = self._read(setups)
        physics, features = self._physics(arrays)
        mean, spread = self.correction.moments(features)
        shared = self.correction.covariance(features)
        values, vectors = np.linalg.eigh(shared)
        random = np.random.default_rng(seed)
        normal = random.standard_normal((len(setups), count))
        joint = vectors @ (np.sqrt(np.maximum(values, 0))[:, None] * normal)
        own = np.sqrt(np.maximum(spread**2 - np.diag(shared), 0))[:, None] * random.standard_normal(normal.shape)
        return np.asarray(physics.step_s[:, None] * np.exp(mean[:, None] + joint + own), dtype=float)

    def compute_line(self, workload: str, instance_type: str) -> tuple[float, float]:
        """(a, k): forward and backward of one device take about a + k * batch seconds. Raises ValueError if unknown."""
        self._require([workload], [instance_type])
        curve = self.compute.curve(workload, instance_type)
        if len(curve.batches) == 1:
            total, batch = curve.forward_s[0] + curve.backward_s[0], curve.batches[0]
            return 0.1 * total, 0.9 * total / batch
        batches, total_s = np.array(curve.batches), np.array(curve.forward_s) + np.array(curve.backward_s)
        slope, intercept = (float(one) for one in np.polyfit(batches, total_s, 1, w=1 / total_s))
        slope = max(slope, 0.05 * float(np.min(total_s / batches)))
        return max(intercept, 0.0), slope

    def peak_bytes(self, workload: str, instance_type: str, batch: int) -> float:
        """Peak memory of one device at `batch`, from profiles; NaN where the workload was never profiled."""
        return self.compute.peak_bytes(workload, instance_type, batch)

    def to_json(self) -> str:
        """The whole model as text; the model read back predicts exactly the same."""
        from .artifact import dump

        return dump(self)

    @classmethod
    def from_json(cls, text: str) -> StepTimeModel:
        """The model in `text`. Raises ValueError on text of another format."""
        from .artifact import load

        return load(text)

    def _require(self, workloads: list[str], types: list[str]) -> None:
        require_known(workloads, self.workloads, "workload")
        require_known(types, self.instance_types, "instance type")

    def _read(self, setups: pd.DataFrame) -> SetupArrays:
        for name, only in (("strategy", "ddp"), ("precision", "fp32"), ("provider", self.provider)):
            other = {str(one) for one in column(setups, name, only)} - {only, ""}
            if other:
                raise ValueError(f"{name} {sorted(other)[0]!r} is not predicted by this model, only {only!r}")
        arrays = read_setups(setups, {name: one.devices for name, one in self.machines.items()})
        self._require(list(arrays.workloads), [name for types in set(arrays.types) for name in types])
        return arrays

    def _physics(self, arrays: SetupArrays) -> tuple[StepTimes, Features]:
        line = lay_out(
            arrays,
            compute=self.compute,
            collectives=self.collectives,
            buckets=self.buckets,
            machines=self.machines,
        )
        physics = step_times(line, self.parameters)
        return physics, features_of(arrays, physics, self.compute, self.machines, line.distance)


def features_of(
    arrays: SetupArrays, physics: StepTimes, compute: ComputeModel, machines: dict[str, Machine], octaves: FloatArray
) -> Features:
    """What the correction looks at, from the setup and its physical step."""
    slowest = tuple(types[at] for types, at in zip(arrays.types, physics.slowest, strict=True))
    cores = np.array([min(machines[name].cores for name in types) for types in arrays.types])
    gbps = np.array([min(machines[name].bandwidth_gbps for name in types) for types in arrays.types])
    exposed = np.clip(1 - physics.compute_s / physics.step_s, 0, 1)
    uneven = 1 - physics.mean_compute_s / physics.compute_s
    near = [np.log(arrays.ranks) / 0.7, np.log(cores) / 0.8, np.log(gbps), exposed / 0.3, uneven / 0.3]
    return Features(
        workload=arrays.workloads,
        slowest_type=slowest,
        composition=arrays.compositions,
        exposed=exposed,
        doubt=np.array([compute.doubt(*pair) for pair in zip(arrays.workloads, slowest, strict=True)]),
        octaves=octaves,
        near=np.stack(near, axis=1) if len(arrays.workloads) else np.zeros((0, len(near))),
    )


def _bottlenecks(physics: StepTimes) -> list[str]:
    exposed = 1 - physics.compute_s / physics.step_s
    uneven = (physics.compute_s - physics.mean_compute_s) / physics.step_s
    labels = np.where(uneven > _LIMITS, "stragglers", "compute")
    return [str(one) for one in np.where((exposed > _LIMITS) & (exposed >= uneven), "communication", labels)]


def fit(data: TrainingData, *, seed: int) -> StepTimeModel:
    """Fit everything to one provider's measurements. Rows without a positive finite step time are left out.

    Raises ValueError if there is nothing to learn compute from, or rows of more than one provider.
    """
    rows = training_rows(data, seed=seed)
    machines = read_machines(data.instance_types, rows.types)
    compute = fit_compute(data.profiles, one_device_rows(rows, data.profiles), machines)
    if not compute.curves:
        raise ValueError("nothing to learn from: no profile and no run with a positive step time")
    collectives = fit_collectives(data.probes, machines)
    buckets = workload_buckets(data, {workload for workload, _ in compute.curves})
    model = StepTimeModel(
        provider=rows.provider,
        compute=compute,
        collectives=collectives,
        buckets=buckets,
        machines=machines,
        parameters=StepParameters(),
        correction=calibrated(*_empty()),
        trained_on=rows.run_ids,
        workload_digests=definition_digests(data.workloads, "workload"),
        type_digests=definition_digests(data.instance_types, "name"),
    )
    if not len(rows.step_s):
        return model
    return _learn(model, rows)


def _learn(model: StepTimeModel, rows: TrainingRows) -> StepTimeModel:
    line = lay_out(
        rows.setups,
        compute=model.compute,
        collectives=model.collectives,
        buckets=model.buckets,
        machines=model.machines,
    )
    parameters = fit_parameters(line, rows.step_s)
    physics = step_times(line, parameters)
    features = features_of(rows.setups, physics, model.compute, model.machines, line.distance)
    correction = calibrated(features, np.log(rows.step_s / physics.step_s), rows.repeats, rows.setups.ranks > 1)
    return replace(model, parameters=parameters, correction=correction)


def _empty() -> tuple[Features, FloatArray, FloatArray, BoolArray]:
    none = np.zeros(0)
    features = Features(
        workload=(),
        slowest_type=(),
        composition=(),
        exposed=none,
        doubt=none,
        octaves=none,
        near=np.zeros((0, 5)),
    )
    return features, none, none, np.zeros(0, dtype=bool)
