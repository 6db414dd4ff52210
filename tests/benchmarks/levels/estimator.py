"""The step-time model: measurements in, seconds with intervals and joint draws out; levels.py has what is learned."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import pandas as pd
import scipy

from models.domain.numeric import Z_90, FloatArray, IntArray
from models.domain.setup_table import SetupArrays, read_setups
from models.step_time.dataset import TrainingData, TrainingRows, training_rows, workload_buckets
from models.step_time.machine_specs import Machine, read_machines

from .formula import Line, Times
from .levels import LENGTHS, Block, Regression, Rows, kernel
from .one_device import OneDevice

_USUAL_BYTES = 1e8  # of gradients where nobody's are told
# How far the log of one device's seconds may be off: measured; profiled; from several less what they waited; their
# compute guessed; and how far sync_s may be off as a part of it.
_ALONE_SD, _PROFILED_SD, _WAITED_SD, _GUESSED_SD, _WAITING_SD = 0.01, 0.02, 0.08, 0.3, 0.05
_LEAST_COMPUTE, _COMPUTE_PART = 0.02, 0.7
_PSEUDO = 4.0
# Of the log of a step, a doubling of devices beyond those measured: another algorithm may begin there.
_BEYOND_SD = 0.1
_MOST_SETUPS = 9000  # learned from: about 1,200 of each cell are looked at
_CURVE = np.array([[2.5]])  # octaves over which what is unknown of one device's curve is alike, in draws
_WAVES = 128  # random features of each part of the residual, for draws
MOST_JOINT = 4000  # setups whose covariance is held in memory at once
FORMAT = "srift-step-time-8"


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
            [np.broadcast_to(setups.workloads.codes[:, None], kind.shape)[present], kind[present], batch[present]],
            axis=1,
        )
        distinct, where = np.unique(triples, axis=0, return_inverse=True)
        devices = [device_kind(name, self.machines[name]) for name in setups.names]
        points = [(setups.workloads.names[int(w)], devices[int(k)], float(b)) for w, k, b in distinct.tolist()]
        place = np.full(kind.shape, -1, dtype=np.intp)
        place[present] = where.ravel()
        log_s, middle, least = self._seconds(points)
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
            [
                np.log2(setups.samples / setups.accumulation / ranks),
                np.log2(machines),
                np.log2(each),
                1 - each / line.most,
            ],
            axis=1,
        )
        rows = Rows(
            line=line, workload=tuple(setups.workloads), kind=tuple(self.kinds(setups)), features=features, point=place
        )
        return rows, points, log_s

    def at(self, points: Sequence[tuple[str, str, float]]) -> Any:
        """The points as one_device.py has them."""
        names, kinds = [f"{one[0]}|fp32" for one in points], [one[1] for one in points]
        return self.alone.at(names, kinds, np.array([one[2] for one in points], dtype=float))

    def _seconds(self, points: Sequence[tuple[str, str, float]]) -> tuple[FloatArray, ...]:
        """Log seconds of the points, of of their workloads' middle and least batches there."""
        many = len(points)
        if not many:
            return (np.zeros(0),) * 3
        pairs = sorted({one[:2] for one in points})
        asked = list(points)
        for workload, kind in pairs:
            key = f"{workload}|fp32"
            asked += [
                (workload, kind, 2 ** self.alone.middle.get(key, 5.0)),
                (workload, kind, self.alone.reaches(key)[0]),
            ]
        found = self.alone.predict(self.at(asked))
        places = {pair: at for at, pair in enumerate(pairs)}
        which = many + 2 * np.array([places[one[:2]] for one in points], dtype=np.intp)
        return found[:many], found[which], found[which + 1]


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
    both: pd.DataFrame = pd.concat([alone, pooled[[*keys, "log_s", "sd"]]], ignore_index=True)
    return both


def _profile_points(profiles: pd.DataFrame, machines: Mapping[str, Machine]) -> pd.DataFrame:
    """The same of profiles: forward and backward of one device."""
    columns = ["workload", "kind", "batch", "log_s", "sd"]
    if not {"workload", "instance_type", "batch", "forward_s", "backward_s"} <= set(profiles.columns):
        return pd.DataFrame(columns=columns)
    good = profiles[(profiles["batch"] > 0) & (profiles["forward_s"] > 0) & (profiles["backward_s"] > 0)]
    kinds = [device_kind(str(one), machines[str(one)]) for one in good["instance_type"]]
    log_s = np.log((good["forward_s"] + good["backward_s"]).to_numpy(float))
    found = good[["workload", "batch"]].assign(kind=kinds, log_s=log_s, sd=_PROFILED_SD)
    return found.groupby(["workload", "kind", "batch"], as_index=False).agg(
        log_s=("log_s", "median"), sd=("sd", "first")
    )


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
    _setups: SetupArrays | None = field(default=None, repr=False)
    _points: dict[str, Any] = field(default_factory=dict, repr=False)
    _inverse: FloatArray | None = field(default=None, repr=False)
    _reach: dict[str, float] = field(default_factory=dict, repr=False)
    _root: FloatArray | None = field(default=None, repr=False)

    def fit(self, data: TrainingData) -> StepTimeRegressor:
        """Learn from the runs of plain ddp in fp32. Raises ValueError where there is nothing to learn from."""
        rows = training_rows(data, seed=self.seed, most=_MOST_SETUPS)
        machines = read_machines(data.instance_types, rows.types)
        points = pd.concat([_alone_points(rows, machines), _profile_points(data.profiles, machines)], ignore_index=True)
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
        rows = rows.take(several)
        self._lay_out(rows.setups, np.log(rows.step_s), rows.repeats)
        assert self.regression is not None
        self.regression.fit(seed=self.seed)
        return self

    def _lay_out(self, setups: SetupArrays, log_step: FloatArray, repeats: FloatArray) -> None:
        assert self.known is not None
        self._setups, self._points, self._reach, self._inverse, self._root = setups, {}, {}, None, None
        laid, points, log_s = self.known.lay_out(setups)
        alone, offsets = {}, {}
        for workload in sorted({one[0] for one in points}):
            own = [at for at, one in enumerate(points) if one[0] == workload]  # together: they are sorted by workload
            at = self.known.at([points[one] for one in own])
            covariance = self.known.alone.covariance(at, at) + 1e-8 * np.eye(len(own))
            factor = np.asarray(np.linalg.cholesky(covariance), dtype=float)
            alone[workload], offsets[workload] = (log_s[own], factor), own[0]
            self._points[workload] = (at, factor)
        self.regression = Regression(laid, log_step, repeats, alone=alone, offsets=offsets)

    # predictions

    def predict(self, setups: pd.DataFrame) -> pd.DataFrame:
        """Predict each setup (measurement columns; workload, cluster, batch_per_device required), on the same index.

        Columns: step_s with its 90 % interval step_low_s..step_high_s for one new measurement, samples_per_s, compute_s
        (the slowest rank alone), communication_s (all collectives), exposed_communication_s (the part not hidden).
        Raises ValueError on an unknown instance type, and on text that cannot be read.
        """
        return self.predict_arrays(self._read(setups)).set_index(setups.index)

    def predict_arrays(self, arrays: SetupArrays) -> pd.DataFrame:
        """`predict` of setups that were read or planned, numbered from 0."""
        assert self.known is not None and self.regression is not None
        many = len(arrays.workloads)
        mean, variance, factor, compute, communication = np.zeros((5, many))
        covariance = self._covariance()
        for part in self._parts(arrays):
            own = covariance[np.ix_(part.columns, part.columns)]
            level = ((part.slopes @ own) * part.slopes).sum(axis=1)
            level += sum((one**2).sum(axis=1) for _, one in part.unknown)
            mean[part.at], variance[part.at] = part.mean, part.widened**2 * level + part.near + part.noise
            factor[part.at] = np.exp(part.mean) / part.times.step_s
            compute[part.at], communication[part.at] = part.times.compute_s, part.times.communication_s
        step, spread = np.exp(mean), np.sqrt(variance)
        compute = np.minimum(compute * factor, step)
        return pd.DataFrame(
            {
                "step_s": step,
                "step_low_s": np.exp(mean - Z_90 * spread),
                "step_high_s": np.exp(mean + Z_90 * spread),
                "samples_per_s": arrays.samples / step,
                "compute_s": compute,
                "communication_s": communication * factor,
                "exposed_communication_s": step - compute,
            }
        )

    def _read(self, setups: pd.DataFrame) -> SetupArrays:
        assert self.known is not None
        return read_setups(setups, {name: one.devices for name, one in self.known.machines.items()})

    def _groups(self, rows: Rows) -> list[tuple[tuple[str, str], IntArray]]:
        places: dict[tuple[str, str], list[int]] = {}
        for at, cell in enumerate(zip(rows.workload, rows.kind, strict=True)):
            places.setdefault(cell, []).append(at)
        return [(cell, np.array(own)) for cell, own in sorted(places.items())]

    def joint(self, setups: pd.DataFrame) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Of log step seconds jointly: mean (setups,), covariance (setups, setups) and variance of a run's noise.

        Raises ValueError above 4,000 setups at once, and as `predict` does.
        """
        if len(setups) > MOST_JOINT:
            raise ValueError(f"{len(setups)} setups at once: at most {MOST_JOINT} jointly")
        assert self.regression is not None
        arrays = self._read(setups)
        many = len(setups)
        mean, noise, wider = np.zeros(many), np.zeros(many), np.zeros(many)
        slopes = np.zeros((many, self.regression.columns.count))
        unknown: dict[object, FloatArray] = {}
        near = np.zeros((many, many))
        for part in self._parts(arrays):
            mean[part.at], noise[part.at], wider[part.at] = part.mean, part.noise, part.widened
            slopes[np.ix_(part.at, part.columns)] = part.slopes
            for key, own in part.unknown:
                unknown.setdefault(key, np.zeros((many, own.shape[1])))[part.at] = own
            alike = kernel(part.features, part.features, part.spread) * np.multiply.outer(part.several, part.several)
            near[np.ix_(part.at, part.at)] = part.wider**2 * (alike - part.white.T @ part.white)
        level = slopes @ self._covariance() @ slopes.T
        for own in unknown.values():
            level += own @ own.T
        return mean, level * np.multiply.outer(wider, wider) + near, noise

    def draws(self, setups: pd.DataFrame, *, count: int, seed: int) -> FloatArray:
        """(setups, count) step seconds, drawn jointly: what two setups share in error moves together.

        A setup's draws do not depend on what else is asked about. They come in pairs, one above what `predict` says
        and one as far below. Raises ValueError as `predict` does.
        """
        return self.draw_arrays(self._read(setups), count=count, seed=seed)

    def draw_arrays(self, arrays: SetupArrays, *, count: int, seed: int) -> FloatArray:
        """`draws` of setups that were read or planned."""
        assert self.regression is not None
        many = len(arrays.workloads)
        half = (count + 1) // 2
        root = np.linalg.cholesky(self._covariance()) if self._root is None else self._root
        self._root = np.asarray(root, dtype=float)
        shared = self._root @ np.random.default_rng([seed, 0]).standard_normal((len(self._root), half))
        mean, off = np.zeros(many), np.zeros((many, half))
        for part in self._parts(arrays):
            own = part.slopes @ shared[part.columns]
            for key, slopes in part.unknown:
                if key[0] == "alone":  # a curve in batch whose draws do not depend on which batches are asked
                    sd = np.sqrt((slopes**2).sum(axis=1))
                    curve = _Field.draw(_CURVE, np.ones(1), random=_random(seed, key), count=half)
                    own += sd[:, None] * curve.at(part.features[:, :1])
                else:
                    own += slopes @ _random(seed, key).standard_normal((slopes.shape[1], half))
            field_ = _Field.of(part, seed=seed, count=half)
            near = field_.at(part.features) * part.several[:, None]
            if part.block is not None and part.white.shape[0]:
                measured = self.regression.rows.features[part.block.at]
                noise = _random(seed, ("noise", part.cell)).standard_normal((len(measured), half))
                sd = part.spread[2] * np.sqrt(part.block.outlying / self.regression.repeats[part.block.at])
                told = field_.at(measured) + sd[:, None] * noise
                near -= part.white.T @ scipy.linalg.solve_triangular(part.block.factor, told, lower=True)
            mean[part.at], off[part.at] = part.mean, part.widened * own + part.wider * near
        paired = np.stack([off, -off], axis=2).reshape(many, -1)[:, :count]
        return np.asarray(np.exp(mean[:, None] + paired), dtype=float)

    def _covariance(self) -> FloatArray:
        assert self.regression is not None
        inverse = np.linalg.inv(self.regression.precision) if self._inverse is None else self._inverse
        self._inverse = np.asarray(inverse, dtype=float)
        return self._inverse

    def _parts(self, arrays: SetupArrays) -> Iterator[_Part]:
        """The setups cell by cell."""
        assert self.known is not None and self.regression is not None
        fit = self.regression
        rows, points, _ = self.known.lay_out(arrays)
        blocks = {block.name: block for block in fit.blocks}
        for (workload, kind), at in self._groups(rows):
            own = rows.take(at)
            used, place = np.unique(own.point[own.point >= 0], return_inverse=True)
            where = np.full(own.point.shape, 0, dtype=np.intp)
            where[own.point >= 0] = place
            asked = self.known.at([points[one] for one in used])
            tied, moved, left = self._tied(workload, asked)
            moves = np.where(own.point >= 0, moved[where], 0.0)
            base, by, by_alone, times = fit.slopes(own, workload, kind, fit.z, moves)
            point = np.take_along_axis(where, times.slowest[:, None], axis=1)[:, 0]
            keys = fit.columns.keys(workload, kind)
            met = [key for key in keys if key in fit.columns.groups]
            slopes = np.concatenate([fit.design(by, met), by_alone[:, None] * tied[point]], axis=1)
            unknown: list[tuple[tuple[str, object], FloatArray]] = [
                (key, fit.design(by, [key]) * _heavier(fit, key[0])) for key in keys if key not in fit.columns.groups
            ]
            unknown.append((("alone", (workload, kind)), by_alone[:, None] * _root(left)[point]))
            beyond = np.log2(np.maximum(own.line.ranks / self._reached(kind), 1.0))
            unknown.append((("beyond", kind), _BEYOND_SD * beyond[:, None]))
            several = (own.line.ranks > 1).astype(float)
            spread, wider = fit.residual_of(workload, kind)
            near, mean, block = several * (spread[:2] ** 2).sum(), base, blocks.get((workload, kind))
            white = np.zeros((0, len(at)))
            if block is not None:
                cross = kernel(own.features, fit.rows.features[block.at], spread) * several[:, None]
                white = scipy.linalg.solve_triangular(block.factor, cross.T, lower=True)
                solved = fit.solved(block)
                mean = base + white.T @ solved[:, -1]
                slopes = slopes - white.T @ solved[:, :-1]
                near = np.maximum(near - (white**2).sum(axis=0), 0.0)
            yield _Part(
                cell=(workload, kind),
                at=at,
                mean=mean,
                times=times,
                columns=fit.columns.of(workload, kind),
                slopes=slopes,
                unknown=unknown,
                near=near * wider**2,
                noise=float(spread[2] * wider) ** 2,
                spread=spread,
                wider=wider,
                widened=fit.wider_levels(workload, kind),
                features=own.features,
                several=several,
                white=white,
                block=block,
            )

    def _reached(self, kind: str) -> float:
        """Devices of the largest cluster of a kind that was measured; no limit where it never ran on several."""
        assert self.regression is not None
        if not self._reach:
            for name, ranks in zip(self.regression.rows.kind, self.regression.rows.line.ranks.tolist(), strict=True):
                self._reach[name] = max(self._reach.get(name, 2.0), ranks)
        return self._reach.get(kind, np.inf)

    def _tied(self, workload: str, asked: Any) -> tuple[FloatArray, FloatArray, FloatArray]:
        """(asked, columns) by the points that were learned with, what these moved, and the covariance that is left."""
        assert self.known is not None and self.regression is not None
        alone = self.known.alone
        if workload not in self._points:
            many = len(asked.octave)
            return np.zeros((many, 0)), np.zeros(many), alone.covariance(asked, asked)
        trained, factor = self._points[workload]
        cross = alone.covariance(trained, asked)
        tied = scipy.linalg.solve_triangular(factor, cross, lower=True).T
        moved = tied @ self.regression.z[self.regression.columns.groups["alone", workload]]
        return tied, moved, alone.covariance(asked, asked) - tied @ tied.T

    # as text and back

    def to_dict(self) -> dict[str, Any]:
        """Plain values that `from_dict` reads."""
        assert self.known is not None and self.regression is not None and self._setups is not None
        setups, fit = self._setups, self.regression
        return {
            "format": FORMAT,
            "seed": self.seed,
            "provider": self.provider,
            "machines": {name: asdict(one) for name, one in self.known.machines.items()},
            "alone": self.known.alone.to_dict(),
            "gradient_bytes": self.known.gradient_bytes,
            "rows": {
                "workloads": list(setups.workloads),
                "types": [list(one) for one in setups.types],
                "batch": setups.batch.tolist(),
                "layout": setups.layout.tolist(),
                "accumulation": setups.accumulation.tolist(),
                "log_step": fit.log_step.tolist(),
                "repeats": fit.repeats.tolist(),
            },
            "fit": fit.to_dict(),
        }

    @classmethod
    def from_dict(cls, body: Mapping[str, Any]) -> StepTimeRegressor:
        """The inverse of `to_dict`. Raises ValueError on another format."""
        if body.get("format") != FORMAT:
            raise ValueError(f"not a step-time model of the format {FORMAT}")
        model = cls(seed=body["seed"], provider=body["provider"])
        model.known = Known(
            machines={name: Machine(**one) for name, one in body["machines"].items()},
            alone=OneDevice.from_dict(body["alone"]),
            gradient_bytes=dict(body["gradient_bytes"]),
        )
        rows = body["rows"]
        width = max((len(one) for one in rows["types"]), default=1)
        setups = SetupArrays.of(
            rows["workloads"],
            rows["types"],
            batch=np.array(rows["batch"], dtype=float).reshape(-1, width),
            layout=np.array(rows["layout"], dtype=float).reshape(-1, width),
            accumulation=np.array(rows["accumulation"], dtype=float),
        )
        model._lay_out(setups, np.array(rows["log_step"]), np.array(rows["repeats"]))
        assert model.regression is not None
        model.regression.read(body["fit"])
        return model


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """Setups of one cell as the regression sees them."""

    cell: tuple[str, str]
    at: IntArray
    mean: FloatArray
    times: Times  # by the formula alone
    columns: IntArray  # of z
    slopes: FloatArray
    unknown: list[tuple[tuple[str, object], FloatArray]]  # slopes by what was never measured
    near: FloatArray  # variance of the residual
    noise: float  # variance of one run
    spread: FloatArray
    wider: float  # factor on the residual's and the noise's spread
    widened: float  # factor on the levels' spread
    features: FloatArray
    several: FloatArray  # 1 for more than one device
    white: FloatArray
    block: Block | None


@dataclass(frozen=True, slots=True)
class _Field:
    """Draws of a process before any row is known, by random Fourier features: the same whatever else is asked."""

    waves: FloatArray
    phases: FloatArray
    weights: FloatArray

    @classmethod
    def of(cls, part: _Part, *, seed: int, count: int) -> _Field:
        """`count` draws of the residual of a cell."""
        return cls.draw(LENGTHS, part.spread[:2], random=_random(seed, ("field", part.cell)), count=count)

    @classmethod
    def draw(cls, lengths: FloatArray, spread: FloatArray, *, random: np.random.Generator, count: int) -> _Field:
        """`count` draws of a sum of processes, each with a row of `lengths` and a `spread`."""
        parts, features = lengths.shape
        waves = random.standard_normal((parts, _WAVES, features)) / lengths[:, None, :]
        phases = random.uniform(0, 2 * np.pi, (parts, _WAVES))
        scale = spread[:, None, None] * np.sqrt(2 / _WAVES)
        weights = scale * random.standard_normal((parts, _WAVES, count))
        return cls(waves.reshape(-1, features), phases.ravel(), weights.reshape(-1, count))

    def at(self, features: FloatArray) -> FloatArray:
        """(rows, count)."""
        return np.asarray(np.cos(features @ self.waves.T + self.phases) @ self.weights, dtype=float)


def _random(seed: int, key: object) -> np.random.Generator:
    return np.random.default_rng([seed, zlib.crc32(repr(key).encode())])


def _heavier(fit: Regression, level: str) -> float:
    """Student's t against a normal at 90 %, with as many degrees of freedom as groups and pseudo-groups."""
    groups = sum(name == level for name, _ in fit.columns.groups)
    return float(scipy.stats.t.ppf(0.95, groups + _PSEUDO) / Z_90)


def _root(covariance: FloatArray) -> FloatArray:
    values, vectors = np.linalg.eigh(0.5 * (covariance + covariance.T))
    return np.asarray(vectors * np.sqrt(np.maximum(values, 0.0)), dtype=float)
