"""One optimizer step where no bucket profile exists: overlap in closed form, after Pollux [P, physics.md].

    step = (s - 1) t + t - f t + ((f t)^p + (C - L)^p)^(1/p) + L       s accumulation steps; f: what hides an exchange
    t    = T1(b) [1 + sigma h (T1 / T1_max)^eta] + c a (k - 1)/3     k devices on the machine share its cores and links
    h    = ((k - 1)/3)^q;  q at most 2, eta at least -1;  a: the part of T1 that does not grow with the batch
    C    = sigma_C beta(layout) 2 (n - 1)/n G^nu / B^gamma + alpha m (1 + G / 25 MB)          on m machines
           its own scale and no m on one machine; 0 on one device
    L    = the exchange of the last bucket, which nothing is left to hide: of min(G, 25 MB tau) bytes [DDP's buckets]

T1 is the workload's curve on the type (compute.py), times exp(doubt level) where it was not measured alone, and what of
it grows with the batch times exp(doubt tilt x) besides, x octaves from the middle of the curve.
Each parameter has a value for all, learned around a prior, and a deviation by workload or by instance type where one is
sensible: what joins the devices of a machine (PCIe or NVLink: some 10 to 300 GB/s by NVIDIA's data sheets [D]) stands
in no catalogue of instances, and types give one job more or less of their nominal rate.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .arrays import BoolArray, FloatArray, IntArray
from .compute import ComputeModel
from .machines import Machine
from .overlap import StepTimes
from .setups import SetupArrays

# Reference of the scales: bytes, gigabit/s between machines, and what PCIe 3 x16 sustains inside one.
_BYTES, _GBPS, _INSIDE_GBPS, _BUCKET = 1e8, 50.0, 96.0, 25 << 20
_BYTES_PER_GBIT = 1.25e8
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
# Parameters of a rank's own compute, and of how it and the exchange overlap; all others are of the exchange.
_OF_COMPUTE = {"log_slowdown", "slowdown_batch", "log_contention", "log_crowding", "level", "tilt"}
_OF_OVERLAP = {"log_sharpness", "logit_hidden"}
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
    guess = float(np.median(told)) if told else _BYTES
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


def exchanges(line: ClosedLine, value: dict[str, FloatArray]) -> tuple[FloatArray, FloatArray]:
    """(rows,) seconds of one exchange of all gradients, and of its last bucket alone."""
    sizes = line.gradient_bytes * np.exp(line.untold * value["size"])
    last = np.minimum(sizes, _BUCKET * np.exp(value["log_last"]))
    return collective_seconds(line, value, sizes), collective_seconds(line, value, last)


def collective_seconds(line: ClosedLine, value: dict[str, FloatArray], sizes: FloatArray) -> FloatArray:
    """(rows,) seconds of one exchange of so many bytes; `value` holds each parameter, (rows,) or a scalar."""
    ranks = (line.count * line.devices).sum(axis=1)
    machines = line.count.sum(axis=1)
    each = ranks / machines
    uneven = 1 - each / line.devices.max(axis=1)
    two, spread, dense = machines == 2, np.log(np.maximum(machines, 2) / 2), np.log(each)
    shape = value["machines"] * spread + value["machines_devices"] * spread * dense
    shape = shape + np.where(
        two,
        value["two"] + value["two_devices"] * dense + value["two_imbalance"] * uneven,
        value["devices"] * dense + value["imbalance"] * uneven,
    )
    ring = 2 * (ranks - 1) / np.maximum(ranks, 1) * (sizes / _BYTES) ** (1 + value["bytes"]) * _BYTES
    buckets = 1 + sizes / _BUCKET
    nominal = _GBPS * (line.gbps / _GBPS) ** np.exp(value["log_gamma"])
    across = np.exp(value["log_scale"] + shape) * ring / (nominal * _BYTES_PER_GBIT)
    across = across + np.exp(value["log_alpha"]) * machines * buckets
    inside = np.exp(value["log_inside"] + value["inside_devices"] * dense) * ring / (_INSIDE_GBPS * _BYTES_PER_GBIT)
    inside = inside + np.exp(value["log_inside_alpha"]) * buckets
    return np.where(machines > 1, across, np.where(ranks > 1, inside, 0.0))


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


def _step_s(alone: _Alone, sent: tuple[FloatArray, FloatArray], value: dict[str, FloatArray]) -> FloatArray:
    whole, last = sent
    hidden, early = alone.last_s / (1 + np.exp(-value["logit_hidden"])), np.maximum(whole - last, 0.0)
    power = 1 + np.exp(value["log_sharpness"])
    top = np.maximum(np.maximum(hidden, early), 1e-30)
    both = top * ((hidden / top) ** power + (early / top) ** power) ** (1 / power)
    return np.asarray(alone.before_s + alone.last_s - hidden + both + last, dtype=float)


def closed_times(line: ClosedLine, values: FloatArray) -> StepTimes:
    """The equation of the module's docstring; `values` is (rows, parameters) in the order of NAMES."""
    value = _by_name(values)
    alone, sent = _alone(line, value), exchanges(line, value)
    return StepTimes(
        step_s=_step_s(alone, sent, value),
        compute_s=alone.before_s + alone.last_s,
        mean_compute_s=alone.mean_s,
        communication_s=sent[0],
        slowest=alone.slowest,
    )


def closed_slopes(line: ClosedLine, values: FloatArray) -> FloatArray:
    """(rows, parameters) derivative of log step by each parameter, by differences.

    A parameter is moved where it is at work alone, in the compute, the exchanges or their overlap.
    """
    value = _by_name(values)
    alone, sent = _alone(line, value), exchanges(line, value)
    logs = np.log(_step_s(alone, sent, value))
    slopes = np.zeros(values.shape)
    for at, name in enumerate(NAMES):
        moved = value | {name: value[name] + STEP}
        if name in _OF_COMPUTE:
            after = _step_s(_alone(line, moved), sent, value)
        elif name in _OF_OVERLAP:
            after = _step_s(alone, sent, moved)
        else:
            after = _step_s(alone, exchanges(line, moved), value)
        slopes[:, at] = (np.log(after) - logs) / STEP
    return slopes
