"""How fast one device is against another: what their data sheets say, and what workloads that ran on both tell.

    log T(w, t) = mu_w - log speed(t) + noise;   log speed(t) = log prior(t) + delta_device(t) + [accelerator] gamma

delta and gamma are normal around 0, so that what nobody ran on both stays as doubtful as the figures are: peak rates of
GPUs differ by up to a factor of two from what networks get of them, and cores of a CPU tell little of a GPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from ...domain.numeric import FloatArray
from ..machine_specs import Machine

# Standard deviations of log speed: of cores and of a device's peak rate as a measure of it, of a figure that nobody
# told, and of accelerators as a whole against cores.
CORES_SD, PEAK_SD, _UNTOLD_SD, _ACCELERATOR_SD = 0.2, 0.4, 1.2, 1.0
# Of one workload's time around what the speeds say: on machines without accelerators, and on a device (ten networks on
# two GPUs are off by 0.13 between them [single_gpu_step_times.csv]); and of one device between two types of machine.
_CORES_NOISE, _DEVICE_NOISE, _SAME_DEVICE_SD = 0.08, 0.12, 0.05
# Workload, type, seconds of one device, and how far their log may be off.
Timed = tuple[str, str, float, float]
_NOTHING = np.zeros(1), np.array([[_ACCELERATOR_SD**2]])


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """What is known of delta by device, in the order of `devices`, and last of gamma: mean and covariance."""

    devices: tuple[str, ...] = ()
    mean: FloatArray = field(default_factory=lambda: _NOTHING[0])
    covariance: FloatArray = field(default_factory=lambda: _NOTHING[1])

    def log(self, machines: Mapping[str, Machine], name: str) -> float:
        """Log speed of one device of the type."""
        one = machines[name]
        return float(np.log(one.prior_speed) + self._weights(name, one) @ self.mean)

    def sd(self, machines: Mapping[str, Machine], name: str, other: str) -> float:
        """Standard deviation of the log of the ratio of one workload's times on two types; 0 on one and the same."""
        if name == other:
            return 0.0
        one, two = machines[name], machines[other]
        noise = sum(noise_of(machine) ** 2 for machine in (one, two))
        if device_of(name, one) == device_of(other, two):
            return float(np.hypot(_SAME_DEVICE_SD, np.sqrt(noise) / 2))  # a network likes a device, not a machine
        weights = self._weights(name, one) - self._weights(other, two)
        alone = sum(prior_sd(a) ** 2 for at, a in ((name, one), (other, two)) if device_of(at, a) not in self.devices)
        return float(np.sqrt(weights @ self.covariance @ weights + alone + noise))

    def _weights(self, name: str, machine: Machine) -> FloatArray:
        weights = np.zeros(len(self.mean))
        device = device_of(name, machine)
        if device in self.devices:
            weights[self.devices.index(device)] = 1.0
        weights[-1] = float(machine.accelerated)
        return weights


def device_of(name: str, machine: Machine) -> str:
    """What a type shares its speed with: all machines with its accelerator, or none."""
    return f"device {machine.device}" if machine.accelerated and machine.device else name


def prior_sd(machine: Machine) -> float:
    """Of the log of its speed as it is told."""
    return _UNTOLD_SD if not machine.speed_told else PEAK_SD if machine.accelerated else CORES_SD


def noise_of(machine: Machine) -> float:
    """Of the log of one workload's time there."""
    return _DEVICE_NOISE if machine.accelerated else _CORES_NOISE


def learn_speeds(times: Iterable[Timed], machines: Mapping[str, Machine]) -> Speeds:
    """A linear regression with the priors above; seconds of one workload are at one batch."""
    rows = list(times)
    if not rows:
        return Speeds()
    workloads = sorted({workload for workload, *_ in rows})
    sure: dict[str, float] = {}
    for _, name, *_ in rows:
        device, sd = device_of(name, machines[name]), prior_sd(machines[name])
        sure[device] = min(sd, sure.get(device, sd))
    devices = tuple(sorted(sure))
    design, target = np.zeros((len(rows), len(workloads) + len(devices) + 1)), np.zeros(len(rows))
    for at, (workload, name, seconds, off) in enumerate(rows):
        machine = machines[name]
        noise = np.hypot(noise_of(machine), off)
        design[at, workloads.index(workload)] = 1.0
        design[at, len(workloads) + devices.index(device_of(name, machine))] = -1.0
        design[at, -1] = -float(machine.accelerated)
        target[at] = np.log(seconds * machine.prior_speed)
        design[at], target[at] = design[at] / noise, target[at] / noise
    priors = [1e-9] * len(workloads) + [sure[one] ** -2 for one in devices] + [_ACCELERATOR_SD**-2]
    covariance = np.asarray(np.linalg.inv(design.T @ design + np.diag(priors)), dtype=float)
    found, own = covariance @ (design.T @ target), len(workloads)
    return Speeds(devices=devices, mean=found[own:], covariance=covariance[own:, own:])
