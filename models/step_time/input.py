"""Compute the seconds that data loading adds to a step.

To load one sample, the loader uses l seconds of CPU time and waits v seconds for storage. A profile
measures l and v.

- r: the seconds of a step without loading. rho: the fraction of r spent on compute.
- s: the number of micro-steps of a step. b: the samples per device in a micro-step.
- k: the number of devices of a machine. W: the number of loader workers for each device.
- C: the number of CPU cores of a machine, which can be below 1.

In T_workers seconds, the workers of a device load its samples of a step. In T_cores seconds, all
cores of a machine load the samples of all its devices, without the waiting for storage:

    T_workers = s b (l / min(C, 1) + v) / W
    T_cores   = s b k l / C

The slowest machine of a setup determines the seconds of a step:

    without workers (W = 0)              step = r + s b (l / min(C, 1) + v)
    with workers and accelerators        step = max(r, T_workers, T_cores)
    with workers, the CPU is the device  step = max(r + min(T_cores, w rho r), rho r + T_cores,
                                                    T_workers)

If the CPU is the device, workers and computing threads share its cores. A worker gets the same
share of the CPU as a computing thread [CFS, sched(7)]. A device has 1 / w computing threads, where
w = k / max(C, k). Compute takes rho r seconds without loading, and at most (1 + w) rho r seconds
with loading. The remaining samples are loaded while gradients are exchanged. A simulation of a CPU
gives the same seconds (test_input.py). v is assumed not to change if machines share storage.

The formulas are inverted to compute r from a measured step of step_s seconds. In this step, a rank
waits input_s seconds for batches and sync_s seconds for communication. Let x = step_s - input_s:

    CPU is the device, W > 0    r = max(x - T_cores, sync_s + (x - sync_s) / (1 + w))
    otherwise                   r = x

If input_s is missing, it counts as 0.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import pandas as pd

from ..domain.numeric import BoolArray, FloatArray, IntArray
from ..domain.setup_table import column
from .dataset import TrainingData, numbers
from .machine_specs import Machine
from .setup_arrays import SetupArrays, read_setups

# Standard deviations of the log seconds to load a sample. The seconds come from a profile on the
# instance type or on another type. The speeds of EC2's CPUs differ by a factor of up to 1.5
# (derived for Srift).
_PROFILED_SD, _ELSEWHERE_SD = 0.05, 0.3
# Prior standard deviation of log(measured / expected loading seconds) of a workload; number of
# measurements that this prior counts as.
_OFF_SD, _PSEUDO = 0.15, 4.0
# Minimum slope of log step seconds in log loading seconds. A measurement with a smaller slope says
# too little about loading.
_INFORMATIVE = 0.3
_LEAST_REST = 0.02  # minimum share of a step that is not loading
_H, _EQUAL = 1e-4, 1e-9  # step of finite differences; relative rounding error of seconds


@dataclass(frozen=True, kw_only=True)
class Wait:
    """The seconds that data loading takes in each setup. Each field is a (rows,) array.

    All seconds are 0 if no profile measured the data loader of the workload. The module's docstring
    defines T_workers, T_cores and w.

    Attributes:
        workload: a number that identifies the workload.
        before_s: seconds of loading between two steps; 0 if the loader has workers.
        supply_s: lower bound of the step seconds: T_workers, or max(T_workers, T_cores) with
            accelerators; 0 if the loader has no workers.
        beside_s: T_cores if the loader has workers and the CPU is the device, else 0.
        crowd: w if the loader has workers and the CPU is the device, else 0. Loading delays
            compute by at most this fraction.
        log_sd: the standard deviation of the log of loading seconds.
        by_workers: True if more loader workers would shorten a step that waits for batches. False
            if more CPU cores would shorten it.
    """

    workload: IntArray
    before_s: FloatArray
    supply_s: FloatArray
    beside_s: FloatArray
    crowd: FloatArray
    log_sd: FloatArray
    by_workers: BoolArray

    def step_s(
        self, rest_s: FloatArray, compute_share: FloatArray, *, factor: FloatArray | float = 1.0
    ) -> FloatArray:
        """Return a (rows,) array: step seconds including loading.

        Args:
            rest_s: (rows,) step seconds without loading.
            compute_share: (rows,) fraction of `rest_s` that is compute.
            factor: a factor on all loading seconds.
        """
        compute_s = compute_share * rest_s
        done = np.minimum(1.0, self.crowd * compute_s / np.maximum(self.beside_s, 1e-30))
        first = rest_s + factor * (self.before_s + done * self.beside_s)
        second = compute_s + factor * self.beside_s
        return np.maximum(np.maximum(first, second), factor * self.supply_s)

    def slopes(
        self, rest_s: FloatArray, compute_share: FloatArray
    ) -> tuple[FloatArray, FloatArray]:
        """Return two (rows,) arrays: derivatives of log step seconds including loading.

        The first is the derivative with respect to log `rest_s`. The second is the derivative with
        respect to the log of the loading seconds.

        Args:
            rest_s: (rows,) step seconds without loading.
            compute_share: (rows,) fraction of `rest_s` that is compute.
        """

        def log_step(rest: float, loading: float) -> FloatArray:
            return np.log(self.step_s(rest_s * np.exp(rest), compute_share, factor=np.exp(loading)))

        by_rest = log_step(_H, 0.0) - log_step(-_H, 0.0)
        by_load = log_step(0.0, _H) - log_step(0.0, -_H)
        return by_rest / (2 * _H), by_load / (2 * _H)

    def joint(
        self, mean: FloatArray, covariance: FloatArray, noise: FloatArray, compute_share: FloatArray
    ) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Return the mean, covariance and noise variance of log step seconds with loading.

        Args:
            mean: (rows,) mean of log step seconds without loading.
            covariance: (rows, rows) covariance of log step seconds without loading.
            noise: (rows,) noise variance of log step seconds without loading.
            compute_share: (rows,) fraction of the step seconds without loading that is compute.

        The results have the shapes of the first three arguments. The covariance and the noise are
        linearised at the mean.
        """
        rest = np.exp(mean)
        by_rest, by_load = self.slopes(rest, compute_share)
        load = by_load * self.log_sd
        same = np.equal.outer(self.workload, self.workload)
        return (
            np.log(self.step_s(rest, compute_share)),
            covariance * np.multiply.outer(by_rest, by_rest) + np.multiply.outer(load, load) * same,
            noise * np.maximum(by_rest, by_load) ** 2,
        )

    def helped_by(self, rest_s: FloatArray, compute_share: FloatArray) -> list[str]:
        """Return what would shorten the wait for batches, as a text for each row.

        A text is "loader workers", "processors" (CPU cores), or "" if the step does not wait.

        rest_s: (rows,) step seconds without loading.
        compute_share: (rows,) fraction of `rest_s` that is compute.
        """
        step_s = self.step_s(rest_s, compute_share)
        reached = self.by_workers & ((self.before_s > 0) | (self.supply_s >= (1 - _EQUAL) * step_s))
        helped = np.where(reached, "loader workers", "processors")
        labels: list[str] = np.where(step_s > rest_s, helped, "").tolist()
        return labels


@dataclass(frozen=True, kw_only=True)
class Loaders:
    """Facts about the data loaders of workloads. A workload has the same loader in all modes.

    Attributes:
        workers: {workload: number of loader workers for each device}.
        samples: {(workload, instance type): (l, v)}. To load one sample, the loader uses l
            seconds of CPU time and waits v seconds for storage.
        off: {workload: (mean, standard deviation) of log(measured / expected loading seconds)}.
    """

    workers: dict[str, int] = field(default_factory=dict)
    samples: dict[tuple[str, str], tuple[float, float]] = field(default_factory=dict)
    off: dict[str, tuple[float, float]] = field(default_factory=dict)

    def sample(self, workload: str, name: str) -> tuple[float, float, float]:
        """Return three numbers about the loading of a sample on the instance type `name`.

        The numbers are the seconds of CPU time, the seconds of waiting for storage, and the
        standard deviation of the log of their sum. If the workload was not profiled on this type,
        the seconds are medians of profiles on other types.
        """
        if (workload, name) in self.samples:
            return *self.samples[workload, name], _PROFILED_SD
        others = np.array([cost for (name, _), cost in self.samples.items() if name == workload])
        load_s, wait_s = np.median(others, axis=0).tolist()
        logs = np.log(np.maximum(others.sum(axis=1), 1e-12))
        return load_s, wait_s, _shrunk_sd(_ELSEWHERE_SD, logs - np.median(logs), len(logs) - 1)

    def wait(self, setups: SetupArrays, machines: Mapping[str, Machine]) -> Wait:
        """Return the seconds that data loading takes in each of `setups`."""

        def costs(workload: str, name: str) -> tuple[float, ...]:
            if workload not in self.workers:
                return 0.0, 0.0, 0.0
            cores = machines[name].cores
            load_s, wait_s, sd = self.sample(workload, name)
            log_factor, factor_sd = self.off.get(workload, (0.0, _OFF_SD))
            factor = np.exp(log_factor)
            return (
                factor * (load_s / min(cores, 1.0) + wait_s),
                factor * load_s / cores,
                np.hypot(sd, factor_sd),
            )

        def slowest(values: FloatArray, where: BoolArray) -> FloatArray:
            most: FloatArray = np.where(where, values, 0.0).max(axis=1)
            return most

        costs_of = [
            [costs(workload, name) for name in setups.names] for workload in setups.workloads
        ]
        table = np.array(costs_of).reshape(len(setups.workloads), len(setups.names), 3)
        # Padding gets the costs of another instance type, but has no samples.
        worker_s, all_s, sd = np.moveaxis(table[setups.workload[:, None], setups.kind], -1, 0)
        known = [machines[name] for name in setups.names]
        cores = setups.by_type([each.cores for each in known], 1.0)
        trains = setups.by_type([not each.has_accelerator for each in known], 0.0) > 0
        known_workers = np.array([self.workers.get(name, 0) for name in setups.workloads])
        workers = known_workers[setups.workload][:, None]
        has_workers = workers > 0
        samples = setups.batch * setups.accumulation[:, None]
        device_s, machine_s = samples * worker_s, samples * setups.layout * all_s
        by_workers_s = slowest(device_s / np.maximum(workers, 1), has_workers)
        supply_s = slowest(machine_s, has_workers & ~trains)
        beside_s = slowest(machine_s, has_workers & trains)
        # Without workers, a worker would help if it could load samples while the device computes.
        lone = ~has_workers & (device_s > 0) & (~trains | (cores > 1))
        return Wait(
            workload=setups.workload,
            before_s=slowest(device_s, ~has_workers),
            supply_s=np.maximum(by_workers_s, supply_s),
            beside_s=beside_s,
            crowd=slowest(setups.layout / np.maximum(cores, setups.layout), has_workers & trains),
            log_sd=slowest(sd, setups.present),
            by_workers=lone.any(axis=1)
            | (by_workers_s > (1 + _EQUAL) * np.maximum(supply_s, beside_s)),
        )


def _shrunk_sd(prior_sd: float, off: FloatArray, freedom: int) -> float:
    """Return the standard deviation of `off`, shrunk towards `prior_sd`.

    `off` is an (n,) array of deviations with `freedom` degrees of freedom.
    """
    return float(np.sqrt((_PSEUDO * prior_sd**2 + (off**2).sum()) / (_PSEUDO + freedom)))


def separate_loading(
    data: TrainingData, machines: Mapping[str, Machine]
) -> tuple[TrainingData, Loaders]:
    """Return `data` without the seconds of data loading, and facts about the loaders.

    Measurements of workloads whose loading was not profiled stay unchanged.

    data: measurements at nominal speed (`at_nominal_speed`), with valid runs only (`valid_runs`).
    machines: the machine of each measured instance type.
    """
    loaded = column(data.profiles, "load_s", np.nan).notna()
    if not loaded.any():
        return data, Loaders()
    profiles = data.profiles.assign(load_wait_s=numbers(data.profiles, "load_wait_s", 0.0))
    known = profiles[loaded]
    costs = known.groupby(["workload", "instance_type"])[["load_s", "load_wait_s"]].median()
    workers = known.groupby("workload")["loader_workers"].max()
    loaders = Loaders(
        workers={str(name): int(count) for name, count in workers.items()},
        samples=dict(zip(costs.index, costs.itertuples(index=False, name=None), strict=True)),
    )
    made_s = np.where(loaded, np.nan_to_num(numbers(profiles, "input_s")), 0.0)
    forward_s = profiles["forward_s"]
    profiles = profiles.assign(
        forward_s=np.maximum(forward_s - made_s, _LEAST_REST * forward_s),
        input_s=profiles["input_s"].where(~loaded, 0.0),
    )
    runs, off = _without_loading(data.runs, loaders, machines)
    return replace(data, runs=runs, profiles=profiles), replace(loaders, off=off)


def _without_loading(
    runs: pd.DataFrame, loaders: Loaders, machines: Mapping[str, Machine]
) -> tuple[pd.DataFrame, dict[str, tuple[float, float]]]:
    """Return `runs` with loading excluded from `step_s`, and the errors of the loading seconds.

    The errors are {workload: (mean, standard deviation) of log(measured / expected loading
    seconds)}, as in `Loaders.off`.
    """
    loaded = column(runs, "workload", "").isin(list(loaders.workers)).to_numpy(bool)
    rows = runs[loaded]
    setups = read_setups(rows, {name: machine.devices for name, machine in machines.items()})
    wait = loaders.wait(setups, machines)
    step, sync, waited = (numbers(rows, name) for name in ("step_s", "sync_s", "input_s"))
    device_s = np.maximum(step - np.nan_to_num(waited), _LEAST_REST * step)
    synced = np.minimum(np.nan_to_num(sync), (1 - _LEAST_REST) * device_s)
    slowed = synced + (device_s - synced) / (1 + wait.crowd)
    rest = np.maximum(np.maximum(device_s - wait.beside_s, slowed), _LEAST_REST * step)
    compute_share = np.clip(1 - synced / rest, 0.0, 1.0)
    step_s, sync_s = numbers(runs, "step_s"), numbers(runs, "sync_s")
    step_s[loaded], sync_s[loaded] = rest, np.minimum(sync, (1 - _LEAST_REST) * rest)
    by_load = wait.slopes(rest, compute_share)[1]
    longer = np.log(step / wait.step_s(rest, compute_share)) / np.maximum(by_load, _INFORMATIVE)
    # A row says nothing about loading seconds if all loading runs during compute.
    hidden = (wait.beside_s > 0) & (device_s - wait.beside_s >= slowed)
    informative = np.isfinite(waited) & ~hidden & (by_load > _INFORMATIVE)
    off = {}
    for code, name in enumerate(setups.workloads):
        found = longer[informative & (setups.workload == code)]
        if len(found):
            mean = float(found.sum() / (len(found) + _PSEUDO))
            off[name] = mean, _shrunk_sd(_OFF_SD, found - mean, len(found))
    return runs.assign(step_s=step_s, sync_s=sync_s), off
