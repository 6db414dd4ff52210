"""Compute the seconds that data loading adds to a step.

A profile gives, for one sample, l seconds of a processor and v seconds of waiting for storage. Let
r be the step without loading, and s b the samples of a device in a step. A machine has k devices,
W loader workers for each device, and C processors (possibly a fraction of one):

    W = 0       step = r + s b (l / min(C, 1) + v)
    W > 0       workers  = s b (l / min(C, 1) + v) / W
                machine  = s b k l / C
      accelerators                step = max(r, workers, machine)
      the processor is the device
                step = max(r + min(machine, w rho r), rho r + machine, workers)

rho is the fraction of r spent on compute. If the processor is the device, workers and computing
threads share it. A worker starts with the step and gets the same share of the processor as one
computing thread [CFS, sched(7)], w = k / max(C, k). Loading during compute delays the step by at
most w rho r. The remaining samples are loaded while gradients are exchanged. A simulation of a
processor gives the same seconds (test_input.py). The slowest machine of a setup determines its
step. Waiting for shared storage is part of v only.

The formulas are inverted to get r from a measured step. Let x = step_s - input_s; then r = x. If
the processor is the device and W > 0, r = max(x - machine, sync_s + (x - sync_s) / (1 + w)). A
measurement without input_s counts as a step without waiting for batches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import pandas as pd

from ..domain.cluster import parse_cluster
from ..domain.numeric import BoolArray, FloatArray, IntArray
from ..domain.setup_table import column
from .dataset import TrainingData, valid_runs
from .machine_specs import Machine, read_machines
from .setup_arrays import SetupArrays, read_setups

# Standard deviations of the log seconds of a sample, by their source: a profile on the type; a
# profile on another type, scaled with the fixed work; an unscaled profile on another type, whose
# processor differs by a factor of up to 1.5 on EC2 [D].
_PROFILED_SD, _SCALED_SD, _ELSEWHERE_SD = 0.05, 0.15, 0.3
# Prior standard deviation of log(measured / expected loading seconds) of a workload, and the number
# of measurements that this prior counts as.
_OFF_SD, _PSEUDO = 0.15, 4.0
# Least slope of log step seconds in log loading seconds; a measurement with a smaller slope says
# too little about loading.
_INFORMATIVE = 0.3
_LEAST_REST = 0.02  # least share of a step that is not loading
_H, _EQUAL = 1e-4, 1e-9  # step of finite differences; tolerance for sums in different order


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """The data loading of setups, with an entry per setup in each (rows,) array.

    Seconds are 0 if the workload has no data loader.

    Attributes:
        workload: a number that identifies the workload.
        before_s: seconds of loading between two steps; 0 if the loader has workers.
        supply_s: least seconds of a step, because the workers produce batches no faster. On
            machines with accelerators, the processors set such a limit too.
        beside_s: `machine` of the module's formula if the processor is the device, else 0.
        crowd: w of the module's formula if the processor is the device, else 0.
        log_sd: standard deviation of the log of loading seconds.
        by_workers: True if more loader workers would shorten the step. False if more processors
            would.
    """

    workload: IntArray
    before_s: FloatArray
    supply_s: FloatArray
    beside_s: FloatArray
    crowd: FloatArray
    log_sd: FloatArray
    by_workers: BoolArray

    def step_s(
        self,
        rest_s: FloatArray,
        part: FloatArray,
        *,
        factor: FloatArray | float = 1.0,
        about: FloatArray | None = None,
    ) -> FloatArray:
        """Return step seconds including loading, in the shape of `rest_s`.

        Args:
            rest_s: (rows,) or (rows, draws) step seconds without loading.
            part: (rows,) fraction of `rest_s` that is compute.
            factor: the loading seconds are multiplied by `factor`.
            about: (rows,) expected value of `rest_s`, by default `rest_s` itself. It limits how
                much is loaded during compute. A limit that does not depend on the draw makes the
                log of a step convex in the logs of `rest_s` and `factor`.
        """
        about = rest_s if about is None else about
        tall = (slice(None),) + (None,) * (rest_s.ndim - 1)
        done = np.minimum(1.0, self.crowd * part * about / np.maximum(self.beside_s, 1e-30))
        first = rest_s + factor * (self.before_s + done * self.beside_s)[tall]
        second = part[tall] * rest_s + factor * self.beside_s[tall]
        return np.asarray(
            np.maximum(np.maximum(first, second), factor * self.supply_s[tall]), dtype=float
        )

    def slopes(self, rest_s: FloatArray, part: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Return two (rows,) arrays: derivatives of the log of step seconds.

        The first is with respect to the log of `rest_s`, the step seconds without loading. The
        second is with respect to the log of loading seconds. `part` is as in `step_s`.
        """
        up, down = np.exp(_H), np.exp(-_H)
        by_rest, by_load = (
            (
                np.log(self.step_s(rest_s * a, part, factor=b))
                - np.log(self.step_s(rest_s * c, part, factor=d))
            )
            / (2 * _H)
            for a, b, c, d in ((up, 1.0, down, 1.0), (1.0, up, 1.0, down))
        )
        return by_rest, by_load

    def joint(
        self, mean: FloatArray, covariance: FloatArray, noise: FloatArray, part: FloatArray
    ) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Return the mean, covariance and noise variance of log step seconds with loading.

        Args:
            mean: (rows,) mean of log step seconds without loading.
            covariance: (rows, rows) their covariance.
            noise: (rows,) their noise variance.
            part: as in `step_s`.

        The results have the shapes of these arguments. They are linearised about the mean.
        """
        rest = np.exp(mean)
        by_rest, by_load = self.slopes(rest, part)
        load = by_load * self.log_sd
        same = np.equal.outer(self.workload, self.workload)
        return (
            np.log(self.step_s(rest, part)),
            covariance * np.multiply.outer(by_rest, by_rest) + np.multiply.outer(load, load) * same,
            noise * np.maximum(by_rest, by_load) ** 2,
        )

    def helped_by(self, rest_s: FloatArray, part: FloatArray) -> list[str]:
        """Return, for each row, what would shorten its wait for batches.

        The answer is "loader workers" or "processors", or "" if the row does not wait.
        """
        step_s = self.step_s(rest_s, part)
        reached = self.by_workers & ((self.before_s > 0) | (self.supply_s >= (1 - _EQUAL) * step_s))
        helped = np.where(reached, "loader workers", "processors")
        return [str(one) for one in np.where(step_s > rest_s, helped, "")]

    def take(self, at: IntArray) -> Wait:
        return Wait(**{name: getattr(self, name)[at] for name in self.__slots__})


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaders:
    """What is known about the data loaders of workloads. A loader is the same in all modes.

    Attributes:
        workers: the number of loader workers for each device, by workload.
        samples: l and v of the module's docstring, by (workload, instance type).
        fixed_s: seconds that one processor needs for the fixed work, by instance type. Types with
            an accelerator are left out.
        off: mean and standard deviation of log(measured / expected loading seconds), by workload.
    """

    workers: dict[str, int] = field(default_factory=dict)
    samples: dict[tuple[str, str], tuple[float, float]] = field(default_factory=dict)
    fixed_s: dict[str, float] = field(default_factory=dict)
    off: dict[str, tuple[float, float]] = field(default_factory=dict)

    def sample(self, workload: str, name: str) -> tuple[float, float, float]:
        """Return l, v and the standard deviation of their logs on the instance type `name`.

        If the workload was not profiled on this type, its profiles on other types are used.
        """
        found = self.samples.get((workload, name))
        if found is not None:
            return *found, _PROFILED_SD
        others = {one: cost for (owner, one), cost in self.samples.items() if owner == workload}
        wait_s = float(np.median([waited_s for _, waited_s in others.values()]))
        scaled = [
            load_s * self.fixed_s[name] / self.fixed_s[one]
            for one, (load_s, _) in others.items()
            if {name, one} <= self.fixed_s.keys()
        ]
        if scaled:
            return float(np.median(scaled)), wait_s, _SCALED_SD
        logs = np.log([max(sum(one), 1e-12) for one in others.values()])
        apart = float(((logs - np.median(logs)) ** 2).sum())
        sd = np.sqrt((_PSEUDO * _ELSEWHERE_SD**2 + apart) / (_PSEUDO + len(logs) - 1))
        return float(np.median([load_s for load_s, _ in others.values()])), wait_s, float(sd)

    def wait(self, setups: SetupArrays, machines: Mapping[str, Machine]) -> Wait | None:
        """Return the loading of `setups`; None if none of their workloads has a loader."""
        if self.workers.keys().isdisjoint(setups.workloads.names):
            return None

        def costs(workload: str, name: str) -> tuple[float, ...]:
            if workload not in self.workers:
                return (0.0,) * 7
            machine = machines[name]
            load_s, wait_s, sd = self.sample(workload, name)
            longer, more_sd = self.off.get(workload, (0.0, _OFF_SD))
            share = np.exp(longer) * np.array(
                [load_s / min(machine.cores, 1.0) + wait_s, load_s / machine.cores]
            )
            return (
                *share.tolist(),
                machine.cores,
                float(not machine.accelerated),
                self.workers[workload],
                sd,
                more_sd,
            )

        alone_s, all_s, cores, device, workers, sd, more_sd = setups.by_pair(costs, [0.0] * 7)
        samples = setups.batch * setups.accumulation[:, None]
        own_s = samples * alone_s
        machine_s = samples * setups.layout * all_s
        some = workers > 0
        by_workers_s = np.where(some, own_s / np.maximum(workers, 1), 0.0).max(axis=1, initial=0.0)
        supply_s = np.where(some & (device == 0), machine_s, 0.0).max(axis=1, initial=0.0)
        before_s = np.where(some, 0.0, own_s).max(axis=1, initial=0.0)
        crowd = np.where(
            some & (device > 0),
            setups.layout / np.maximum(np.maximum(cores, setups.layout), 1e-9),
            0.0,
        )
        beside_s = np.where(some & (device > 0), machine_s, 0.0).max(axis=1, initial=0.0)
        # without workers, a worker would help if it could load while the device computes
        lone = ~some & (own_s > 0) & ((device == 0) | (cores > 1))
        return Wait(
            workload=setups.workloads.codes,
            before_s=before_s,
            supply_s=np.maximum(by_workers_s, supply_s),
            beside_s=beside_s,
            crowd=crowd.max(axis=1, initial=0.0),
            log_sd=np.hypot(sd, more_sd).max(axis=1, initial=0.0),
            by_workers=lone.any(axis=1)
            | (by_workers_s > (1 + _EQUAL) * np.maximum(supply_s, beside_s)),
        )


def separated(data: TrainingData) -> tuple[TrainingData, Loaders]:
    """Return a pair: the data after subtracting the seconds of loading, and the loaders.

    The caller has already applied `at_nominal_speed` to `data`. Measurements of
    workloads whose loading was not profiled stay unchanged.
    """
    profiles, runs = data.profiles, data.runs
    if (
        "load_s" not in profiles
        or not pd.to_numeric(profiles["load_s"], errors="coerce").notna().any()
    ):
        return data, Loaders()
    known = profiles[profiles["load_s"].notna() & profiles["loader_workers"].notna()]
    groups = known.groupby(["workload", "instance_type"])
    samples = {(str(one), str(name)): _sample(own) for (one, name), own in groups}
    workers = {str(one): int(own.max()) for one, own in known.groupby("workload")["loader_workers"]}
    of_loader = profiles["load_s"].notna()
    made_s = pd.to_numeric(profiles["input_s"], errors="coerce").where(of_loader, 0.0).fillna(0.0)
    rest_s = np.maximum(profiles["forward_s"] - made_s, _LEAST_REST * profiles["forward_s"])
    profiles = profiles.assign(forward_s=rest_s, input_s=profiles["input_s"].where(~of_loader, 0.0))
    runs = valid_runs(runs)
    seen = {one for name in column(runs, "cluster", "") for one in parse_cluster(str(name))}
    machines = read_machines(
        data.instance_types, seen | {str(one) for one in data.profiles["instance_type"]}
    )
    loaders = Loaders(
        workers=workers, samples=samples, fixed_s=_fixed_work(data.profiles, machines)
    )
    runs, off = _without_loading(runs, loaders, machines)
    return replace(data, runs=runs, profiles=profiles), replace(loaders, off=off)


def _sample(own: pd.DataFrame) -> tuple[float, float]:
    """Return l and v: the medians of the rows of one workload's profiles on one instance type."""
    load_s, wait_s = (
        float(pd.to_numeric(column(own, name, 0.0)).median()) for name in ("load_s", "load_wait_s")
    )
    return load_s, wait_s


def _fixed_work(profiles: pd.DataFrame, machines: Mapping[str, Machine]) -> dict[str, float]:
    """Return the seconds that one processor needs for the fixed work, by instance type.

    Types with an accelerator are left out.
    """
    usual = pd.to_numeric(column(profiles, "usual_reference_s", np.nan), errors="coerce")
    by_type = usual.groupby(profiles["instance_type"].astype(str)).median()
    return {
        str(name): float(seconds) * machines[str(name)].cores
        for name, seconds in by_type.items()
        if seconds > 0 and not machines[str(name)].accelerated
    }


def _without_loading(
    runs: pd.DataFrame, loaders: Loaders, machines: Mapping[str, Machine]
) -> tuple[pd.DataFrame, dict[str, tuple[float, float]]]:
    """Return a pair: the runs with step_s and sync_s freed of loading, and `Loaders.off`."""
    base = column(runs, "workload", "").to_numpy(str)
    places = np.flatnonzero(np.isin(base, list(loaders.workers)))
    if not len(places):
        return runs, {}
    own = runs.iloc[places]
    setups = read_setups(own, {name: one.devices for name, one in machines.items()})
    wait = loaders.wait(setups, machines)
    assert wait is not None
    step, sync, waited = (
        pd.to_numeric(column(own, name, np.nan), errors="coerce").to_numpy(float)
        for name in ("step_s", "sync_s", "input_s")
    )
    device_s = np.maximum(step - np.nan_to_num(waited), _LEAST_REST * step)
    synced = np.minimum(np.nan_to_num(sync), (1 - _LEAST_REST) * device_s)
    slowed = synced + (device_s - synced) / (1 + wait.crowd)
    rest = np.maximum(np.maximum(device_s - wait.beside_s, slowed), _LEAST_REST * step)
    part = np.clip(1 - synced / rest, 0.0, 1.0)
    numbers = {"step_s": rest, "sync_s": np.minimum(sync, (1 - _LEAST_REST) * rest)}
    changed = {}
    for name, values in numbers.items():
        whole = pd.to_numeric(column(runs, name, np.nan), errors="coerce").to_numpy(float).copy()
        whole[places] = values
        changed[name] = whole
    # a row says nothing about loading seconds if compute hides all loading
    informative = np.isfinite(waited) & ((wait.beside_s == 0) | (device_s - wait.beside_s < slowed))
    by_load = wait.slopes(rest, part)[1]
    informative &= by_load > _INFORMATIVE
    longer = np.log(step / wait.step_s(rest, part)) / np.maximum(by_load, _INFORMATIVE)
    off = {}
    for name in sorted(set(base[places][informative].tolist())):
        found = longer[informative & (base[places] == name)]
        mean = float(found.sum() / (len(found) + _PSEUDO))
        apart = float(((found - mean) ** 2).sum())
        off[name] = mean, float(np.sqrt((_PSEUDO * _OFF_SD**2 + apart) / (_PSEUDO + len(found))))
    return runs.assign(**changed), off
