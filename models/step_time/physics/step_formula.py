"""One optimizer step where no bucket profile exists: overlap in closed form, after Pollux [P, physics.md].

    step = (s - 1) t + t - f t + ((f t)^p + (C - L)^p)^(1/p) + L       s accumulation steps; f: what hides an exchange
    t    = T1(b) [1 + sigma h (T1 / T1_max)^eta] + c a (k - 1)/3     k devices on the machine share its cores and links
    h    = ((k - 1)/3)^q;  q at most 2, eta at least -1;  a: the part of T1 that does not grow with the batch
    C, L   the exchange of all gradients and of the last bucket alone (collectives.py)

T1 is the workload's curve on the type (compute.py), times exp(doubt level) where it was not measured alone, and what of
it grows with the batch times exp(doubt tilt x) besides, x octaves from the middle of the curve.
Each parameter has a value for all, learned around a prior, and a deviation by workload or by instance type where one is
sensible: what joins the devices of a machine (PCIe or NVLink: some 10 to 300 GB/s by NVIDIA's data sheets [D]) stands
in no catalogue of instances, and types give one job more or less of their nominal rate.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.special import xlogy

from ...domain.numeric import BoolArray, FloatArray, IntArray
from ...domain.setup_table import SetupArrays
from ..machine_specs import Machine
from .collectives import Wires
from .compute import ComputeModel
from .ddp_timeline import StepTimes

# Of gradients where no workload's are told.
_USUAL_BYTES = 1e8
# Most that crowding grows with the devices on a machine: beyond those measured a steeper one is no physics.
_STEEPEST = 2.0
# Of the log of a curve by octaves of batch: above -log 2, so that what is proportional to the batch still grows.
_LEAST_TILT = -0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """Prior mean and standard deviation over all, and of one workload's or one instance type's deviation (0: none)."""

    mean: float
    sd: float
    own_sd: float = 0.0
    type_sd: float = 0.0


# Priors are wide where any value is possible and narrow where data seldom identify the term [physics.md].
PARAMETERS: dict[str, Parameter] = {
    "log_scale": Parameter(mean=1.8, sd=1.0, own_sd=0.1, type_sd=0.3),  # between machines, against the nominal rate
    "machines": Parameter(mean=0.1, sd=0.1, own_sd=0.06),  # slope in log(m / 2)
    "two": Parameter(mean=0.2, sd=0.5, own_sd=0.08),  # two machines: another algorithm
    "devices": Parameter(mean=0.1, sd=0.3, own_sd=0.05),  # slope in the log of devices a machine, m > 2
    "two_devices": Parameter(mean=0.3, sd=0.4, own_sd=0.08),  # the same where m = 2
    "imbalance": Parameter(mean=0.0, sd=0.5, own_sd=0.1),
    "two_imbalance": Parameter(mean=0.0, sd=0.5),
    "machines_devices": Parameter(mean=0.0, sd=0.2),
    "log_gamma": Parameter(mean=-0.2, sd=0.2),  # links seldom give all of their nominal rate to one job
    "log_driven": Parameter(mean=4.6, sd=0.7),  # gigabit/s by a device: network cards of 100 are shared by few
    "bytes": Parameter(mean=0.0, sd=0.15),  # nu - 1
    "log_alpha": Parameter(mean=-7.0, sd=1.0),
    "log_sharpness": Parameter(mean=0.7, sd=0.4),  # log(p - 1)
    "log_last": Parameter(mean=-0.7, sd=0.5, own_sd=0.3),  # log tau: the last bucket is filled by half on average
    "log_inside": Parameter(mean=0.5, sd=1.0, own_sd=0.25, type_sd=1.2),
    "inside_devices": Parameter(mean=0.3, sd=0.5),
    "log_inside_alpha": Parameter(mean=-8.0, sd=1.5),
    "logit_hidden": Parameter(mean=0.7, sd=0.8, own_sd=0.4),
    "log_slowdown": Parameter(mean=-2.0, sd=0.8, own_sd=0.8),
    "slowdown_batch": Parameter(mean=0.0, sd=0.5, own_sd=0.5),  # eta
    "log_contention": Parameter(mean=-2.0, sd=1.0, own_sd=0.4),
    "log_crowding": Parameter(mean=0.5, sd=0.5),  # log q
    "size": Parameter(mean=0.0, sd=0.0, own_sd=1.5),  # of gradients whose bytes nobody told
    "level": Parameter(mean=0.0, sd=0.0, own_sd=1.0),
    "tilt": Parameter(mean=0.0, sd=0.0, own_sd=0.5),
}
NAMES = tuple(PARAMETERS)
# Parameters of a rank's own compute: their slopes are taken by differences.
_OF_COMPUTE = {"log_slowdown", "slowdown_batch", "log_contention", "log_crowding", "level", "tilt"}
# By how much a parameter is moved to learn its slope: the curve over it and the rounding under it both stay below 1e-4.
STEP = 1e-4
MEAN, SD, OWN_SD, TYPE_SD = np.array([(one.mean, one.sd, one.own_sd, one.type_sd) for one in PARAMETERS.values()]).T


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedLine:
    """What the parameters do not change; (rows, members) or (rows,)."""

    alone_s: FloatArray  # (rows, members) T1 of one micro-step
    part: FloatArray  # (rows, members) T1 / T1_max
    fixed_s: FloatArray  # (rows, members) a
    optimizer_s: FloatArray  # (rows, members)
    devices: FloatArray  # (rows, members); 0 where padded
    count: FloatArray  # (rows, members) equal machines
    doubt: FloatArray  # (rows, members) of T1's curve
    octaves: FloatArray  # (rows, members) log2 batch from the middle of the curve
    outside: FloatArray  # (rows,) log2 batch outside what was measured, of the worst member
    accumulation: FloatArray
    gradient_bytes: FloatArray
    untold: FloatArray  # (rows,) 1 where the bytes are a guess
    gbps: FloatArray

    @property
    def present(self) -> BoolArray:
        """(rows, members): is there an instance?"""
        return self.devices > 0


def lay_out_closed(
    setups: SetupArrays,
    *,
    compute: ComputeModel,
    gradient_bytes: dict[str, float],
    machines: dict[str, Machine],
) -> ClosedLine:
    """Everything about `setups` that is known before the parameters. Raises ValueError on a workload never measured."""
    forward, backward, optimizer, distance = compute.seconds(setups)
    alone = forward + backward
    told = [one for one in gradient_bytes.values() if one > 0]
    guess = float(np.median(told)) if told else _USUAL_BYTES
    sizes = setups.workloads.values(lambda name: gradient_bytes.get(name, 0.0))

    def of_curve(workload: str, name: str) -> tuple[float, float, float, float]:
        curve = compute.curve(workload, name)
        longest = max(map(sum, zip(curve.forward_s, curve.backward_s, strict=True)))
        return curve.line()[0], longest, compute.curve_doubt(workload, name), curve.batches[len(curve.batches) // 2]

    fixed, longest, doubt, middle = setups.by_pair(of_curve, (0.0, 1.0, 0.0, 1.0))
    present = setups.kind >= 0
    octaves = np.log2(np.where(present, setups.batch, 1.0) / middle)
    gbps = setups.by_type({name: machines[name].bandwidth_gbps for name in setups.names}, np.inf)
    return ClosedLine(
        alone_s=alone,
        part=np.where(present, alone / longest, 1.0),
        fixed_s=np.maximum(fixed, 0.02 * alone),
        optimizer_s=optimizer,
        devices=setups.layout,
        count=setups.count,
        doubt=doubt,
        octaves=np.clip(octaves, -4, 4),
        outside=distance.max(axis=1, initial=0.0),
        accumulation=setups.accumulation,
        gradient_bytes=np.where(sizes > 0, sizes, guess),
        untold=(sizes <= 0).astype(float),
        gbps=gbps.min(axis=1, initial=np.inf),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Alone:
    """A step's compute, (rows,): seconds of the slowest rank before the last backward and in it, the ranks' mean."""

    before_s: FloatArray
    last_s: FloatArray
    mean_s: FloatArray
    slowest: IntArray


def _by_name(values: FloatArray) -> dict[str, FloatArray]:
    return {name: values[:, at] for at, name in enumerate(NAMES)}


def _alone(line: ClosedLine, value: dict[str, FloatArray]) -> _Alone:
    tall = {name: one[:, None] for name, one in value.items()}
    others = np.maximum(line.devices - 1, 0) / 3
    crowd = np.where(others > 0, np.maximum(others, 1e-9) ** np.minimum(np.exp(tall["log_crowding"]), _STEEPEST), 0.0)
    drift, alone = np.exp(line.doubt * tall["level"]), _tilted(line, tall["tilt"])
    part = np.maximum(line.part * alone / np.where(line.present, line.alone_s, 1.0), 1e-6)
    # below -1 a step would take the longer the smaller its batch is
    slower = 1 + np.exp(tall["log_slowdown"]) * crowd * part ** np.maximum(tall["slowdown_batch"], -1.0)
    micro = drift * (alone * slower + np.exp(tall["log_contention"]) * line.fixed_s * others)
    micro = np.where(line.present, micro, 0.0)
    last = micro.max(axis=1, initial=0.0)
    compute = line.accumulation[:, None] * micro + np.where(line.present, line.optimizer_s, 0.0)
    slowest = compute.argmax(axis=1)
    return _Alone(
        before_s=np.take_along_axis(compute, slowest[:, None], axis=1)[:, 0] - last,
        last_s=last,
        mean_s=(line.count * compute).sum(axis=1) / np.maximum(line.count.sum(axis=1), 1),
        slowest=slowest,
    )


def _tilted(line: ClosedLine, tilt: FloatArray) -> FloatArray:
    """(rows, members) T1: its growth with the batch is another as far as the curve is doubted; `tilt` is (rows, 1)."""
    grows = np.maximum(line.alone_s - line.fixed_s, 0.0)
    stretch = np.exp(np.maximum(line.doubt * tilt, _LEAST_TILT) * line.octaves)
    return np.asarray(line.alone_s - grows + grows * stretch, dtype=float)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Overlap:
    """What hides an exchange, what of the exchange it may hide, and the p-norm of both; (rows,)."""

    hidden_s: FloatArray
    early_s: FloatArray
    both_s: FloatArray
    power: FloatArray

    @classmethod
    def of(cls, alone: _Alone, wires: Wires, value: dict[str, FloatArray]) -> _Overlap:
        """Of the last backward pass and all buckets but the last."""
        hidden = alone.last_s / (1 + np.exp(-value["logit_hidden"]))
        early = np.maximum(wires.whole.seconds - wires.last.seconds, 0.0)
        power = 1 + np.exp(value["log_sharpness"])
        top = np.maximum(np.maximum(hidden, early), 1e-30)
        both = top * ((hidden / top) ** power + (early / top) ** power) ** (1 / power)
        return cls(hidden_s=hidden, early_s=early, both_s=both, power=power)

    def answers(self, part_s: FloatArray) -> FloatArray:
        """(rows,) derivative of the norm by one of its two."""
        return np.asarray((part_s / self.both_s) ** (self.power - 1), dtype=float)

    @property
    def by_sharpness(self) -> FloatArray:
        """(rows,) derivative of the norm by log(p - 1)."""
        parts = [one / self.both_s for one in (self.hidden_s, self.early_s)]
        entropy = sum(xlogy(one**self.power, one) for one in parts)
        return np.asarray(self.both_s * entropy * (self.power - 1) / self.power, dtype=float)


def _step_s(alone: _Alone, wires: Wires, value: dict[str, FloatArray]) -> FloatArray:
    overlap = _Overlap.of(alone, wires, value)
    shown = overlap.both_s - overlap.hidden_s + wires.last.seconds
    return np.asarray(alone.before_s + alone.last_s + shown, dtype=float)


def closed_times(line: ClosedLine, values: FloatArray) -> StepTimes:
    """The equation of the module's docstring; `values` is (rows, parameters) in the order of NAMES."""
    value = _by_name(values)
    alone, wires = _alone(line, value), Wires(line, value)
    return StepTimes(
        step_s=_step_s(alone, wires, value),
        compute_s=alone.before_s + alone.last_s,
        mean_compute_s=alone.mean_s,
        communication_s=wires.whole.seconds,
        slowest=alone.slowest,
    )


def closed_slopes(line: ClosedLine, values: FloatArray) -> FloatArray:
    """(rows, parameters) derivative of log step by each parameter: of the compute's by differences."""
    value = _by_name(values)
    alone, wires = _alone(line, value), Wires(line, value)
    overlap, step = _Overlap.of(alone, wires, value), _step_s(alone, wires, value)
    early = overlap.answers(overlap.early_s)
    by = {name: early * whole + (1 - early) * last for name, (whole, last) in wires.slopes().items()}
    unhidden = 1 / (1 + np.exp(value["logit_hidden"]))
    by["logit_hidden"] = (overlap.answers(overlap.hidden_s) - 1) * overlap.hidden_s * unhidden
    by["log_sharpness"] = overlap.by_sharpness
    for name in _OF_COMPUTE:
        moved = value | {name: value[name] + STEP}
        by[name] = step * np.log(_step_s(_alone(line, moved), wires, value) / step) / STEP
    return np.stack([by[name] for name in NAMES], axis=1) / step[:, None]
