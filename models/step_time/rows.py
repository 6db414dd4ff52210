"""Convert setups and measurements into the input rows of the regression in levels.py."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pandas as pd
import scipy

from ..domain.categorical import Keys
from ..domain.cluster import parse_cluster
from ..domain.numeric import FloatArray
from .compression import seconds_per_value, selection_seconds, sent_between, sums_everywhere
from .dataset import Exchange, TrainingRows, sent
from .formula import Line, known_overlap
from .levels import Rows
from .machine_specs import Machine, device_kind
from .one_device import OneDevice, Points
from .setup_arrays import SetupArrays, variant, workload_and_mode
from .tensor import machine_bytes, weight_bytes

# Name of the workload that stands for all-reduces without training.
PROBE = "(all-reduce alone)"
_USUAL_BYTES = 1e8  # gradient bytes, if no workload has known bytes
# Standard deviations of one device's log seconds, by their source: runs on one device; profiles;
# runs on several devices, after subtracting sync_s; runs on several devices without sync_s. The
# last number is the relative error of sync_s.
_ALONE_SD, _PROFILED_SD, _WAITED_SD, _GUESSED_SD, _WAITING_SD = 0.01, 0.01, 0.08, 0.6, 0.05
# Fraction of a step that is compute: at least, and if sync_s is unknown.
_LEAST_COMPUTE, _COMPUTE_PART = 0.02, 0.7
# Additional standard deviations: for rows of one batch that are pooled; for each device of a
# machine after the first.
_POOLED_SD, _CROWDED_SD = 0.04, 0.03

# The number of repeated setups that the prior of the noise counts as; the least spread at which the
# runs of a setup contradict each other.
_FEW_REPEATED, _LEAST_CONTRADICTION = 4, 0.03

Point = tuple[str, str, float]  # workload, kind of device, batch


@dataclass(frozen=True, slots=True, kw_only=True)
class SetupFacts:
    """The facts from which the regression's input is computed. A kind is a kind of device.

    Attributes:
        machines: the machine of each instance type.
        alone: predicts the seconds of one device.
        exchanges: the exchange of each group.
        optimizer_part: for each (group, kind), the optimizer's seconds divided by one device's
            seconds of a micro-step at the middle batch.
        input_part: for each (group, kind), the fraction of one device's seconds spent on making
            batches.
        slowness: for each kind, the log of (exchange time of the kind / exchange time that all
            kinds share).
    """

    machines: dict[str, Machine]
    alone: OneDevice
    exchanges: dict[str, Exchange]
    optimizer_part: dict[tuple[str, str], float] = field(default_factory=dict)
    input_part: dict[tuple[str, str], float] = field(default_factory=dict)
    slowness: dict[str, float] = field(default_factory=dict)

    def kinds(self, setups: SetupArrays) -> Keys:
        """Return, for each row, the kind of device of the machine with the slowest link.

        Among equal links, the first instance type in alphabetical order counts.
        """
        names = self._by_link(setups)
        order = {name: at for at, name in enumerate(names)}
        first = setups.by_type({name: float(at) for name, at in order.items()}, np.inf).min(axis=1)
        return Keys.of(device_kind(name, self.machines[name]) for name in names).take(
            first.astype(np.intp)
        )

    def lay_out(self, setups: SetupArrays) -> tuple[Rows, list[Point], FloatArray]:
        """Return three values: the regression's rows, the points that they need, and log seconds.

        A point is a distinct (group, kind of device, batch) whose one-device seconds are needed.
        The log seconds (points,) are the predictions of these seconds.
        """
        kind, batch, layout, count = setups.kind, setups.batch, setups.layout, setups.count
        present = kind >= 0
        same = ((kind == kind[:, :1]) | ~present).all(axis=1) & (
            (batch == batch[:, :1]) | ~present
        ).all(axis=1)
        if same.all():  # equal members: the machine with the most devices is the slowest
            kind, batch, layout = kind[:, :1], batch[:, :1], layout.max(axis=1, keepdims=True)
            count = setups.instances[:, None]
            present = kind >= 0
        batches, size_at = np.unique(batch[present], return_inverse=True)
        pair = (
            np.broadcast_to(setups.workloads.codes[:, None], kind.shape)[present]
            * len(setups.names)
            + kind[present]
        )
        distinct, where = np.unique(pair * len(batches) + size_at.ravel(), return_inverse=True)
        pair, size_at = np.divmod(distinct, max(len(batches), 1))
        devices = [device_kind(name, self.machines[name]) for name in setups.names]
        owners = (divmod(one, len(devices)) for one in pair.tolist())
        points = [
            (setups.workloads.names[workload], devices[at], size)
            for (workload, at), size in zip(owners, batches[size_at].tolist(), strict=True)
        ]
        place = np.full(kind.shape, -1, dtype=np.intp)
        place[present] = where.ravel()
        log_s, middle = self._seconds(points)
        optimizer = np.array([self._optimizer(*one[:2]) for one in points])

        def of(values: FloatArray, padded: float) -> FloatArray:
            return np.where(present, values[place] if len(values) else 0.0, padded)

        ranks, machines = setups.ranks, setups.instances
        exchange = [self._exchange(name) for name in setups.workloads.names]
        size, hidden, last = np.array(exchange).reshape(-1, 3).T[:, setups.workloads.codes]
        most = setups.layout.max(axis=1, initial=0)
        line = Line(
            alone_s=of(np.exp(log_s), 0.0),
            middle_s=of(np.exp(middle), 1.0),
            optimizer_s=of(optimizer * np.exp(middle), 0.0),
            devices=np.where(present, layout, 0.0),
            count=np.where(present, count, 0.0),
            machines=machines,
            ranks=ranks,
            most=most,
            accumulation=setups.accumulation,
            gradient_bytes=size,
            hidden=hidden,
            last_bucket=last,
            **self._compression(setups, size, most),
            **self._links(setups),
        )
        each = ranks / machines
        features = np.stack(
            [
                np.log2(setups.samples / setups.accumulation / ranks),
                np.log2(machines),
                np.log2(each),
                1 - each / line.most,
                self._variety(setups),
            ],
            axis=1,
        )
        rows = Rows(
            line=line,
            workload=setups.workloads,
            kind=self.kinds(setups),
            features=features,
            point=place,
        )
        return rows, points, log_s

    def lay_out_probes(self, probes: pd.DataFrame) -> Rows:
        """Return the regression's rows for probes, which are all-reduces without training.

        `probes` has columns `cluster` and `bytes`. Probes are rows of a workload without compute.
        """
        types = [parse_cluster(str(one)) for one in probes["cluster"]]
        most = max((len(one) for one in types), default=1)
        ones = np.array([[float(at < len(one)) for at in range(most)] for one in types]).reshape(
            -1, most
        )
        setups = SetupArrays.of(
            [PROBE] * len(types), types, batch=ones, layout=ones, accumulation=np.ones(len(types))
        )
        machines, many = setups.instances, len(types)
        nothing, size = np.zeros((many, 1)), probes["bytes"].to_numpy(float)
        line = Line(
            alone_s=nothing,
            middle_s=nothing + 1,
            optimizer_s=nothing,
            devices=nothing + 1,
            count=machines[:, None],
            machines=machines,
            ranks=machines,
            most=np.ones(many),
            accumulation=np.ones(many),
            gradient_bytes=size,
            hidden=np.zeros(many),
            last_bucket=np.zeros(many),
            sent_between=np.ones(many),
            selection_s=np.zeros(many),
            **self._links(setups),
        )
        features = np.stack(
            [
                np.log2(size),
                np.log2(machines),
                np.zeros(many),
                np.zeros(many),
                self._variety(setups),
            ],
            axis=1,
        )
        point = np.full((many, 1), -1, dtype=np.intp)
        return Rows(
            line=line,
            workload=Keys.of([PROBE] * many),
            kind=self.kinds(setups),
            features=features,
            point=point,
        )

    def at(self, points: Sequence[Point]) -> Points:
        return self.alone.at(
            [one[0] for one in points],
            [one[1] for one in points],
            np.array([one[2] for one in points], dtype=float),
        )

    def _links(self, setups: SetupArrays) -> dict[str, FloatArray]:
        """Return two fields of a Line: `gbps` of the slowest link, `core` of the smallest host."""
        slowest = self._by_link(setups)
        order = setups.by_type({name: float(at) for at, name in enumerate(slowest)}, np.inf).min(
            axis=1, initial=np.inf
        )
        gbps = np.array([self.machines[name].bandwidth_gbps for name in slowest])
        cores = {name: 1.0 if one.accelerated else one.cores for name, one in self.machines.items()}
        return {
            "gbps": gbps[order.astype(np.intp)] if len(order) else np.zeros(0),
            "core": setups.by_type(cores, np.inf).min(axis=1, initial=1.0),
        }

    def _compression(
        self, setups: SetupArrays, size: FloatArray, most: FloatArray
    ) -> dict[str, FloatArray]:
        """Return the Line fields `sent_between` and `selection_s`, which depend on the strategy.

        `size` (rows,) are the gradient bytes. `most` (rows,) is the number of devices on the
        fullest machine.
        """
        sent, chosen = np.ones_like(size), np.zeros_like(size)
        modes = [workload_and_mode(name)[1] for name in setups.workloads.names]
        gloo = {name: float(not one.accelerated) for name, one in self.machines.items()}
        by_gloo = setups.by_type(gloo, 0.0).max(axis=1, initial=0.0) > 0
        for code in np.flatnonzero([one.of_several for one in modes]).tolist():
            strategy = modes[code].strategy
            at = np.flatnonzero(setups.workloads.codes == code)
            own = setups.take(at)
            if not modes[code].sends_otherwise:
                sent[at] = np.where(by_gloo[at], sums_everywhere(strategy), 1.0)
                continue
            if modes[code].divided:
                sent[at] = self._divided(setups.workloads.names[code], own, size[at], most[at])
                continue
            rates = {name: seconds_per_value(machine) for name, machine in self.machines.items()}
            per_value = own.by_type(rates, 0.0).max(axis=1)
            sent[at] = sent_between(strategy, own.instances, own.ranks)
            chosen[at] = selection_seconds(strategy, size[at], most[at], per_value)
        return {"sent_between": sent, "selection_s": chosen}

    def _divided(
        self, workload: str, setups: SetupArrays, size: FloatArray, most: FloatArray
    ) -> FloatArray:
        """Return a (rows,) array: bytes a machine sends in tensor parallelism, relative to DDP.

        DDP sends 2 (n - 1)/n times the gradient bytes on n ranks. The ratio is 1 if the sizes of
        the layers are unknown. Arguments are as in `_compression`.
        """
        divided = self.exchanges.get(workload, Exchange(0.0)).divided
        if not divided.known:
            return np.ones_like(size)
        ranks, samples = setups.ranks, setups.samples / setups.ranks
        strategy, gradients = (
            workload_and_mode(workload)[1].strategy,
            self.exchanges[workload].gradient_bytes,
        )
        found = machine_bytes(strategy, divided, gradients, ranks=ranks, most=most, samples=samples)
        again = weight_bytes(strategy, divided.weights, ranks=ranks, most=most)
        found += (setups.accumulation - 1) * again
        return np.nan_to_num(found / (2 * (ranks - 1) / ranks * size), nan=1.0)

    def _by_link(self, setups: SetupArrays) -> list[str]:
        """Return the instance types sorted from the slowest to the fastest link."""

        def rate(name: str) -> float:
            machine = self.machines[name]
            return float(np.log(machine.bandwidth_gbps)) - self.slowness.get(
                device_kind(name, machine), 0.0
            )

        return sorted(setups.names, key=lambda one: (rate(one), one))

    def _variety(self, setups: SetupArrays) -> FloatArray:
        """Return a (rows,) array: how much faster a cluster is than its slowest-linked machine.

        The value is the mean, for all machines, of log2(speed / speed of the machine with the
        slowest link).
        """
        log_speed = {name: float(np.log2(self.machines[name].prior_speed)) for name in setups.names}
        speed = setups.by_type(log_speed, 0.0)
        order = setups.by_type(
            {name: float(at) for at, name in enumerate(self._by_link(setups))}, np.inf
        )
        own = np.take_along_axis(speed, order.argmin(axis=1)[:, None], axis=1)
        return np.asarray(
            (setups.count * (speed - own) * setups.present).sum(axis=1) / setups.instances,
            dtype=float,
        )

    def _exchange(self, workload: str) -> tuple[float, float, float]:
        """Return a group's values of the Line fields gradient_bytes, hidden and last_bucket."""
        own = self.exchanges.get(workload, Exchange(0.0))
        if not own.gradient_bytes > 0:  # take the median over workloads, sent in this mode
            plain = {
                name: one
                for name, one in self.exchanges.items()
                if not workload_and_mode(name)[1].of_several
            }
            known = [one.gradient_bytes for one in plain.values() if one.gradient_bytes > 0]
            own = sent(
                replace(own, gradient_bytes=float(np.median(known)) if known else _USUAL_BYTES),
                workload,
            )
        return own.gradient_bytes, *known_overlap(own.hidden_part, own.last_bucket_bytes)

    def _optimizer(self, workload: str, kind: str) -> float:
        """Return the `optimizer_part` of a group on a kind of device.

        If the group was not profiled on this kind, return the median of the kinds on which it was
        profiled. Return 0 if it was never profiled.
        """
        if (workload, kind) in self.optimizer_part:
            return self.optimizer_part[workload, kind]
        known = [one for (owner, _), one in self.optimizer_part.items() if owner == workload]
        return float(np.median(known)) if known else 0.0

    def _seconds(self, points: Sequence[Point]) -> tuple[FloatArray, FloatArray]:
        """Return two (points,) arrays of one-device log seconds.

        The first is at each point's batch, the second at the middle batch of the point's group.
        """
        many = len(points)
        if not many:
            return np.zeros(0), np.zeros(0)
        pairs = sorted({one[:2] for one in points})
        middle = [(workload, kind, 2 ** self.alone.middle_of(workload)) for workload, kind in pairs]
        found = self.alone.predict(self.at([*points, *middle]))
        places = {pair: many + at for at, pair in enumerate(pairs)}
        return found[:many], found[[places[one[:2]] for one in points]]


Parts = dict[tuple[str, str], float]


def one_device_points(
    rows: TrainingRows, profiles: pd.DataFrame, machines: Mapping[str, Machine]
) -> tuple[pd.DataFrame, Parts, Parts]:
    """Return one-device training points, and the `optimizer_part` and `input_part` of SetupFacts.

    The frame of points has columns workload, kind, batch, log_s (log seconds of a micro-step
    without the optimizer) and sd (the standard deviation of log_s).
    """
    profiled = _profile_points(profiles, machines)
    optimizer: Parts = {}
    making: Parts = {}
    groups: dict[Any, pd.DataFrame] = dict(iter(profiled.groupby(["workload", "kind"])))
    for pair, own in groups.items():
        middle = float(np.exp(own["log_s"].iloc[len(own) // 2]))
        optimizer[pair] = float(own["optimizer_s"].median()) / middle
        making[pair] = float(np.clip(own["input_part"].median(), 0, 1))
    columns = ["workload", "kind", "batch", "log_s", "sd"]
    points = pd.concat(
        [_run_points(rows, machines, profiled), profiled[columns]], ignore_index=True
    )
    return points, optimizer, making


def _run_points(
    rows: TrainingRows, machines: Mapping[str, Machine], profiled: pd.DataFrame
) -> pd.DataFrame:
    """Return one-device points from runs on one device, and from runs on equal machines.

    The seconds spent on communication are subtracted from runs on several devices. `profiled` are
    the points of profiles, from which the optimizer's share of a step is known.
    """
    setups = rows.setups
    ranks, layout = setups.ranks, setups.layout.max(axis=1, initial=0)
    first = setups.kind[:, 0] if setups.kind.shape[1] else np.zeros(0, dtype=np.intp)
    even = ((setups.kind == first[:, None]) | (setups.kind < 0)).all(axis=1)
    even &= ((setups.batch == setups.batch[:, :1]) | (setups.kind < 0)).all(axis=1)
    kinds = [device_kind(setups.names[one], machines[setups.names[one]]) for one in first.tolist()]
    batch = setups.batch[:, 0] if setups.batch.shape[1] else np.zeros(0)
    asked = {
        "workload": list(setups.workloads),
        "kind": kinds,
        "batch": batch,
        "accumulation": setups.accumulation,
    }
    spent = rows.step_s * _optimizer_shares(profiled, pd.DataFrame(asked))
    known = np.isfinite(rows.sync_s)
    waited = np.where(
        ranks == 1, 0.0, np.where(known, rows.sync_s, (1 - _COMPUTE_PART) * rows.step_s)
    )
    seconds = np.maximum(rows.step_s - waited - spent, _LEAST_COMPUTE * rows.step_s)
    sd = np.sqrt(
        _WAITED_SD**2 + (_WAITING_SD * waited / seconds) ** 2 + (_CROWDED_SD * (layout - 1)) ** 2
    )
    sd = np.where(
        ranks == 1,
        np.hypot(_ALONE_SD, run_noise(rows) / np.sqrt(rows.repeats)),
        np.where(known, sd, _GUESSED_SD),
    )
    found = pd.DataFrame(
        {
            "workload": list(setups.workloads),
            "kind": kinds,
            "batch": batch,
            "log_s": np.log(seconds / setups.accumulation),
            "sd": sd,
            "alone": ranks == 1,
            "known": known,
        }
    )[even]
    keys = ["workload", "kind", "batch"]
    alone = (
        found[found["alone"]]
        .groupby(keys, as_index=False)
        .agg(log_s=("log_s", "median"), sd=("sd", "first"))
    )
    copies = pd.concat([alone.iloc[:0], *_copies(alone, setups.workloads.names)], ignore_index=True)
    alone, cell = pd.concat([alone, copies], ignore_index=True), keys[:2]
    measured = pd.MultiIndex.from_frame(found[cell]).isin(pd.MultiIndex.from_frame(copies[cell]))
    others = found[
        ~found["alone"] & (found["known"] | ~measured)
    ]  # no guessed compute if the single-device mode was measured
    others = others[
        ~pd.MultiIndex.from_frame(others[keys]).isin(pd.MultiIndex.from_frame(alone[keys]))
    ]
    # guessed compute is at most the shortest value of the same batch
    shortest = others.groupby(keys)["log_s"].transform("min")
    others = others.assign(log_s=others["log_s"].where(others["known"], shortest))
    others = others.assign(weight=others["sd"] ** -2, weighed=others["log_s"] * others["sd"] ** -2)
    pooled = others.groupby(keys, as_index=False).agg(
        weight=("weight", "sum"), weighed=("weighed", "sum")
    )
    pooled = pooled.assign(
        log_s=pooled["weighed"] / pooled["weight"],
        sd=np.hypot(_POOLED_SD, pooled["weight"] ** -0.5),
    )
    both: pd.DataFrame = pd.concat([alone, pooled[[*keys, "log_s", "sd"]]], ignore_index=True)
    return both


def _copies(alone: pd.DataFrame, workloads: Sequence[str]) -> Iterator[pd.DataFrame]:
    """Yield copies of one-device points for the modes that need several devices.

    In such a mode, each device computes as in the corresponding single-device mode.
    """
    for name in workloads:
        workload, mode = workload_and_mode(name)
        if mode.of_several:
            yield alone[alone["workload"] == variant(workload, mode.alone)].assign(workload=name)


def run_noise(rows: TrainingRows) -> float:
    """Return the standard deviation of log seconds among repeated runs of a setup.

    It is the median of all setups with repeated runs. Each setup's sample standard deviation is
    first divided by sqrt(chi^2_0.5(n - 1) / (n - 1)), its median for n runs if the true value is 1.
    """
    again = rows.repeats > 1
    freedom = rows.repeats[again] - 1
    spreads = rows.spread[again] / np.sqrt(scipy.special.chdtri(freedom, 0.5) / freedom)
    return float(np.median(np.append(spreads, np.full(_FEW_REPEATED, _ALONE_SD))))


def run_weights(rows: TrainingRows) -> FloatArray:
    """Return a (rows,) array: the effective number of runs of each setup.

    It is smaller than the number of runs if they disagree by more than the usual noise.
    """
    usual = max(run_noise(rows), _LEAST_CONTRADICTION)
    return np.asarray(rows.repeats / np.maximum(rows.spread / usual, 1.0) ** 2, dtype=float)


def _optimizer_shares(profiled: pd.DataFrame, asked: pd.DataFrame) -> FloatArray:
    """Return, for each row of `asked`, the optimizer's fraction of a one-device step.

    `asked` has columns workload, kind, batch and accumulation. `profiled` are the points of
    profiles. If the workload was not profiled on this kind of device, the fraction is the median of
    the kinds on which it was profiled. The fraction is 0 if the workload was never profiled.
    """
    found = np.zeros(len(asked))
    profiles: dict[Any, pd.DataFrame] = dict(iter(profiled.groupby(["workload", "kind"])))
    groups: dict[Any, Any] = dict(asked.groupby(["workload", "kind"]).indices)
    for pair, at in groups.items():
        kinds = [pair] if pair in profiles else [one for one in profiles if one[0] == pair[0]]
        batch, steps = (asked[name].to_numpy(float)[at] for name in ("batch", "accumulation"))
        shares = []
        for own in (profiles[one] for one in kinds):
            seconds = np.exp(
                np.interp(np.log(batch), np.log(own["batch"].to_numpy(float)), own["log_s"])
            )
            spent = float(own["optimizer_s"].median())
            shares.append(spent / (spent + steps * seconds))
        found[at] = np.median(shares, axis=0) if shares else 0.0
    return found


def _profile_points(profiles: pd.DataFrame, machines: Mapping[str, Machine]) -> pd.DataFrame:
    """Return one-device points from profiles, with additional columns optimizer_s and input_part.

    `log_s` is the log of forward plus backward seconds. Profiles of one workload, kind of device
    and batch are reduced to their medians.
    """
    keys = ["workload", "kind", "batch"]
    if not {"workload", "instance_type", "batch", "forward_s", "backward_s"} <= set(
        profiles.columns
    ):
        return pd.DataFrame(columns=[*keys, "log_s", "sd", "optimizer_s", "input_part"])
    good = profiles[
        (profiles["batch"] > 0) & (profiles["forward_s"] > 0) & (profiles["backward_s"] > 0)
    ]
    kinds = [device_kind(str(one), machines[str(one)]) for one in good["instance_type"]]
    seconds = good["forward_s"] + good["backward_s"]
    nothing = pd.Series(0.0, index=good.index)
    found = good[["workload", "batch"]].assign(
        kind=kinds,
        log_s=np.log(seconds.to_numpy(float)),
        sd=_PROFILED_SD,
        optimizer_s=good.get("optimizer_s", nothing).fillna(0.0).clip(lower=0.0),
        input_part=(good.get("input_s", nothing) / seconds).fillna(0.0),
    )
    columns = {name: (name, "median") for name in ("log_s", "sd", "optimizer_s", "input_part")}
    return found.groupby(keys, as_index=False).agg(**columns)
