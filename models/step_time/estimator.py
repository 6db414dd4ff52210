"""The step-time model: measurements in, seconds with intervals and joint draws out; levels.py has what is learned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
import scipy

from ..domain.numeric import Z_90, FloatArray, IntArray
from ..domain.setup_table import SetupArrays, column, read_setups
from .dataset import TrainingData, TrainingRows, training_rows, workload_buckets
from .formula import ALL, CELL, KIND, WORKLOAD, Line, step_times
from .levels import LENGTHS, Block, Regression, Rows, kernel
from .machine_specs import Machine, read_machines
from .one_device import OneDevice

_USUAL_BYTES = 1e8  # of gradients where nobody's are told
# How far the log of one device's seconds may be off: measured alone; from several less what they waited; their compute
# guessed; and how far sync_s may be off as a part of it.
_ALONE_SD, _WAITED_SD, _GUESSED_SD, _WAITING_SD = 0.01, 0.08, 0.3, 0.05
_LEAST_COMPUTE, _COMPUTE_PART = 0.02, 0.7
_PSEUDO = 4.0
_START = {"all": ALL, "kind": KIND, "workload": WORKLOAD, "cell": CELL}


def device_kind(name: str, machine: Machine) -> str:
    """What a machine computes with: its accelerator's name, else the type's own."""
    return machine.device if machine.accelerated and machine.device else name


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What of a setup's seconds is known before any parameter: machines, seconds of one device, bytes."""

    machines: dict[str, Machine]
    alone: OneDevice
    gradient_bytes: dict[str, float]

    def kinds(self, setups: SetupArrays) -> list[str]:
        """(rows,) the kind of the machine with the slowest link; of equals the first by name."""
        rate = {name: self.machines[name].bandwidth_gbps for name in setups.names}
        order = {name: at for at, name in enumerate(sorted(setups.names, key=lambda one: (rate[one], one)))}
        names = sorted(order, key=order.__getitem__)
        first = setups.by_type({name: float(at) for name, at in order.items()}, np.inf).min(axis=1)
        kinds = [device_kind(name, self.machines[name]) for name in names]
        return [kinds[int(at)] for at in first]

    def lay_out(self, setups: SetupArrays) -> tuple[Rows, list[tuple[str, str, float]], FloatArray]:
        """Rows with `point` into the second, distinct (workload, device, batch), and these points' log seconds."""
        kind, batch, layout = setups.kind, setups.batch, setups.layout
        present = kind >= 0
        same = ((kind == kind[:, :1]) | ~present).all(axis=1) & ((batch == batch[:, :1]) | ~present).all(axis=1)
        if same.all():  # equal members: the one that holds most devices is the slowest
            kind, batch, layout = kind[:, :1], batch[:, :1], layout.max(axis=1, keepdims=True)
            present = kind >= 0
        triples = np.stack(
            [np.broadcast_to(setups.workloads.codes[:, None], kind.shape)[present], kind[present], batch[present]], axis=1
        )
        distinct, where = np.unique(triples, axis=0, return_inverse=True)
        devices = [device_kind(name, self.machines[name]) for name in setups.names]
        points = [(setups.workloads.names[int(w)], devices[int(k)], float(b)) for w, k, b in distinct.tolist()]
        place = np.full(kind.shape, -1, dtype=np.intp)
        place[present] = where.ravel()
        log_s, middle, least, fixed = self._seconds(points)
        sizes = setups.workloads.values(lambda name: self.gradient_bytes.get(name, 0.0))
        told = [one for one in self.gradient_bytes.values() if one > 0]
        gbps = setups.by_type({name: self.machines[name].bandwidth_gbps for name in setups.names}, np.inf)

        def of(values: FloatArray, padded: float) -> FloatArray:
            return np.where(present, values[place], padded)

        ranks, machines = setups.ranks, setups.instances
        line = Line(
            alone_s=of(np.exp(log_s), 0.0),
            middle_s=of(np.exp(middle), 1.0),
            least_s=of(np.exp(least), 0.0),
            fixed=of(fixed, 0.0),
            devices=np.where(present, layout, 0.0),
            machines=machines,
            ranks=ranks,
            most=setups.layout.max(axis=1),
            accumulation=setups.accumulation,
            gradient_bytes=np.where(sizes > 0, sizes, np.median(told) if told else _USUAL_BYTES),
            gbps=gbps.min(axis=1, initial=np.inf),
            optimizer_s=np.zeros(len(ranks)),
        )
        each = ranks / machines
        features = np.stack(
            [np.log2(setups.samples / setups.accumulation / ranks), np.log2(machines), np.log2(each), 1 - each / line.most],
            axis=1,
        )
        rows = Rows(
            line=line, workload=tuple(setups.workloads), kind=tuple(self.kinds(setups)), features=features, point=place
        )
        return rows, points, log_s

    def at(self, points: Sequence[tuple[str, str, float]]) -> Any:
        """The points as one_device.py has them."""
        names, kinds, batch = ([one[at] for one in points] for at in range(3))
        return self.alone.at([f"{one}|fp32" for one in names], kinds, np.array(batch, dtype=float))

    def _seconds(self, points: Sequence[tuple[str, str, float]]) -> tuple[FloatArray, ...]:
        """Log seconds of the points, of their workloads' middle and least batches there, and what does not grow."""
        many = len(points)
        if not many:
            return (np.zeros(0),) * 4
        pairs = sorted({one[:2] for one in points})
        asked = [(w, k, b * factor) for factor in (1.0, 2**0.5, 0.5**0.5) for w, k, b in points]
        for workload, kind in pairs:
            key = f"{workload}|fp32"
            asked += [(workload, kind, 2 ** self.alone.middle.get(key, 5.0)), (workload, kind, self.alone.reaches(key)[0])]
        found = self.alone.predict(self.at(asked))
        here, above, below = found[: 3 * many].reshape(3, many)
        places = {pair: at for at, pair in enumerate(pairs)}
        which = 3 * many + 2 * np.array([places[one[:2]] for one in points], dtype=np.intp)
        return here, found[which], found[which + 1], np.clip(1 - (above - below) / np.log(2), 0, 1)


def _alone_points(rows: TrainingRows, machines: Mapping[str, Machine]) -> pd.DataFrame:
    """workload, kind, batch, log seconds of a micro-step on one device, sd."""
    setups = rows.setups
    ranks, layout = setups.ranks, setups.layout.max(axis=1)
    first = setups.kind[:, 0]
    even = ((setups.kind == first[:, None]) | (setups.kind < 0)).all(axis=1)
    even &= ((setups.batch == setups.batch[:, :1]) | (setups.kind < 0)).all(axis=1)
    known = np.isfinite(rows.sync_s)
    waited = np.where(ranks == 1, 0.0, np.where(known, rows.sync_s, (1 - _COMPUTE_PART) * rows.step_s))
    seconds = np.maximum(rows.step_s - waited, _LEAST_COMPUTE * rows.step_s)
    sd = np.sqrt(_WAITED_SD**2 + (_WAITING_SD * waited / seconds) ** 2 + (0.03 * (layout - 1)) ** 2)
    sd = np.where(ranks == 1, _ALONE_SD, np.where(known, sd, _GUESSED_SD))
    found = pd.DataFrame(
        {
            "workload": list(setups.workloads),
            "kind": [device_kind(setups.names[one], machines[setups.names[one]]) for one in first.tolist()],
            "batch": setups.batch[:, 0],
            "log_s": np.log(seconds / setups.accumulation),
            "sd": sd,
            "alone": ranks == 1,
        }
    )[even]
    keys = ["workload", "kind", "batch"]
    alone = found[found["alone"]].groupby(keys, as_index=False).agg(log_s=("log_s", "median"), sd=("sd", "first"))
    others = found[~found["alone"]]
    others = others[~pd.MultiIndex.from_frame(others[keys]).isin(pd.MultiIndex.from_frame(alone[keys]))]
    others = others.assign(weight=others["sd"] ** -2, weighed=others["log_s"] * others["sd"] ** -2)
    pooled = others.groupby(keys, as_index=False).agg(weight=("weight", "sum"), weighed=("weighed", "sum"))
    # rows of one batch share what slows them
    pooled = pooled.assign(log_s=pooled["weighed"] / pooled["weight"], sd=np.hypot(0.04, pooled["weight"] ** -0.5))
    return pd.concat([alone, pooled[[*keys, "log_s", "sd"]]], ignore_index=True)


@dataclass
class StepTimeRegressor:
    """Seconds of a step: `fit` learns from one provider's frames; then `predict`, `draws` and `joint`.

    `sheets`: memory bandwidth in GB/s and TFLOP/s of the arithmetic that really runs, by kind of device.
    """

    seed: int = 0
    sheets: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    known: Known | None = None
    regression: Regression | None = None
    provider: str = "local"

    def fit(self, data: TrainingData) -> StepTimeRegressor:
        """Learn from the runs of plain ddp in fp32. Raises ValueError where there is nothing to learn from."""
        rows = training_rows(data, seed=self.seed)
        machines = read_machines(data.instance_types, rows.types)
        points = _alone_points(rows, machines)
        alone = OneDevice.fit(
            [f"{one}|fp32" for one in points["workload"]],
            list(points["kind"]),
            points["batch"].to_numpy(float),
            points["log_s"].to_numpy(float),
            points["sd"].to_numpy(float),
            sheets=self.sheets,
        )
        buckets = workload_buckets(data, set(rows.setups.workloads))
        sizes = {name: float(sum(one.size_bytes)) for name, one in buckets.items()}
        self.known = Known(machines=machines, alone=alone, gradient_bytes=sizes)
        self.provider = rows.provider
        several = np.flatnonzero(rows.setups.ranks > 1)
        self._regress(rows.take(several))
        return self

    def _regress(self, rows: TrainingRows) -> None:
        assert self.known is not None
        laid, points, log_s = self.known.lay_out(rows.setups)
        alone, offsets = {}, {}
        self._points: dict[str, Any] = {}
        for workload in sorted({one[0] for one in points}):
            own = [at for at, one in enumerate(points) if one[0] == workload]  # contiguous: np.unique sorts by workload
            at = self.known.at([points[one] for one in own])
            covariance = self.known.alone.covariance(at, at)
            factor = np.linalg.cholesky(covariance + 1e-8 * np.eye(len(own)))
            alone[workload], offsets[workload] = (log_s[own], factor), own[0]
            self._points[workload] = (at, factor)
        self.regression = Regression(laid, np.log(rows.step_s), rows.repeats, alone=alone, offsets=offsets)
        self.regression.fit(seed=self.seed)

    # predictions

    def predict(self, setups: pd.DataFrame) -> pd.DataFrame:
        """step_s with its 90 % interval step_low_s..step_high_s for one new measurement, on the same index."""
        arrays = self._read(setups)
        mean, level, near, noise = self._moments(arrays)
        spread = np.sqrt(level + near + noise)
        return pd.DataFrame(
            {
                "step_s": np.exp(mean),
                "step_low_s": np.exp(mean - Z_90 * spread),
                "step_high_s": np.exp(mean + Z_90 * spread),
            },
            index=setups.index,
        )

    def _read(self, setups: pd.DataFrame) -> SetupArrays:
        assert self.known is not None
        return read_setups(setups, {name: one.devices for name, one in self.known.machines.items()})

    def _groups(self, rows: Rows) -> list[tuple[tuple[str, str], IntArray]]:
        places: dict[tuple[str, str], list[int]] = {}
        for at, cell in enumerate(zip(rows.workload, rows.kind, strict=True)):
            places.setdefault(cell, []).append(at)
        return [(cell, np.array(own)) for cell, own in sorted(places.items())]

    def _moments(self, arrays: SetupArrays) -> tuple[FloatArray, ...]:
        """(rows,) mean log seconds and the variances of levels, of the residual and of one run."""
        found = np.zeros((4, len(arrays.workloads)))
        for cell, at, mean, columns, slopes, more, near, noise in self._parts(arrays):
            covariance = self._covariance()[np.ix_(columns, columns)]
            level = np.einsum("ij,jk,ik->i", slopes, covariance, slopes)
            level = self._widening(cell[1]) ** 2 * (level + sum((one**2).sum(axis=1) for _, one in more))
            found[:, at] = mean, level, near, np.full(len(at), noise)
        return tuple(found)

    def _widening(self, kind: str) -> float:
        assert self.regression is not None
        return self.regression.widened.get(kind, self.regression.widened.get("", 1.0))

    def _covariance(self) -> FloatArray:
        assert self.regression is not None
        if getattr(self, "_inverse", None) is None:
            self._inverse = np.linalg.inv(self.regression.precision)
        return self._inverse

    def _parts(self, arrays: SetupArrays) -> Any:
        """By cell: rows, mean, columns of z with slopes, (key, slopes) of what is unknown, residual variance, noise."""
        assert self.known is not None and self.regression is not None
        fit = self.regression
        rows, points, log_s = self.known.lay_out(arrays)
        blocks = {block.name: block for block in fit.blocks}
        for (workload, kind), at in self._groups(rows):
            own = rows.take(at)
            used = np.unique(own.point[own.point >= 0])
            where = np.full(len(points), 0, dtype=np.intp)
            where[used] = np.arange(len(used))
            asked = self.known.at([points[one] for one in used])
            if workload in self._points:
                trained, factor = self._points[workload]
                cross = self.known.alone.covariance(asked, trained)
                tied = scipy.linalg.solve_triangular(factor, cross.T, lower=True).T
                z_alone = fit.z[fit.columns.groups["alone", workload]]
                moved = tied @ z_alone
            else:
                tied, moved = np.zeros((len(used), 0)), np.zeros(len(used))
            left = self.known.alone.covariance(asked, asked) - tied @ tied.T
            drift = np.where(own.point >= 0, moved[where[np.maximum(own.point, 0)]], 0.0)
            base, by, by_alone, slowest = fit.slopes(own, workload, kind, fit.z, drift)
            keys = fit.columns.keys(workload, kind)
            met = [key for key in keys if key in fit.columns.groups]
            point = where[np.take_along_axis(own.point, slowest[:, None], axis=1)[:, 0]]
            slopes = np.concatenate([fit.design(by, met), by_alone[:, None] * tied[point]], axis=1)
            columns = fit.columns.of(workload, kind)
            several = own.line.ranks > 1
            more: list[tuple[object, FloatArray]] = []
            for key in keys:
                if key not in fit.columns.groups:
                    more.append((key, fit.design(by, [key]) * _heavier(fit, key[0])))
            root = _root(left)
            more.append((("alone", workload, kind), by_alone[:, None] * root[point]))
            spread, wider = fit.residual_of(workload, kind)
            near = np.where(several, (spread[:2] ** 2).sum(), 0.0)
            mean = base
            block: Block | None = blocks.get((workload, kind))
            if block is not None and several.any():
                cross = kernel(own.features, fit.rows.features[block.at], spread) * several[:, None]
                white = scipy.linalg.solve_triangular(block.factor, cross.T, lower=True)
                solved = scipy.linalg.solve_triangular(block.factor, np.column_stack([block.slopes, block.off]), lower=True)
                mean = base + white.T @ solved[:, -1]
                slopes = slopes - white.T @ solved[:, :-1]
                near = np.maximum(near - (white**2).sum(axis=0), 0.0)
            yield (workload, kind), at, mean, columns, slopes, more, near * wider**2, float(spread[2] * wider) ** 2


def _heavier(fit: Regression, level: str) -> float:
    """Student's t against a normal at 90 %, with as many degrees of freedom as groups and pseudo-groups."""
    groups = sum(name == level for name, _ in fit.columns.groups)
    return float(scipy.stats.t.ppf(0.95, groups + _PSEUDO) / Z_90)


def _root(covariance: FloatArray) -> FloatArray:
    values, vectors = np.linalg.eigh(0.5 * (covariance + covariance.T))
    return np.asarray(vectors * np.sqrt(np.maximum(values, 0.0)), dtype=float)


__all__ = ["StepTimeRegressor", "LENGTHS", "column", "step_times"]
