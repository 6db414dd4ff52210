"""Convert setups into the input rows of the regression in regressor.py."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field, fields, replace

import numpy as np

from ..domain.numeric import FloatArray, IntArray
from ..domain.workload import UPDATES_SHARED, Mode
from .compression import (
    in_turn,
    seconds_per_value,
    selection_seconds,
    sent_between,
    sent_everywhere,
    sums_everywhere,
)
from .formula import BUCKET, Line, known_overlap
from .machine_specs import Machine, device_kind, sheet_of
from .one_device import EFFECTS, Transformer, prior
from .setup_arrays import SetupArrays
from .tensor import NOTHING, Volumes, machine_bytes, weight_bytes

PROBE = "(all-reduce alone)"  # the workload that stands for all-reduces without training
_USUAL_BYTES, _USUAL_OCTAVE = 1e8, 5.0  # gradient bytes and log2 of the batch, if none is known
_USUAL_TOKENS = 2.0**14  # of a device and micro-step
_BLOCKS = 8.0  # blocks that a sharded mode gathers, if the layers are unknown
_BESIDE = 0.9  # fraction of compute beside which blocks are gathered
_EVERYTHING = 1e18  # bytes of the last bucket if no part of the exchange can be hidden

Cell = tuple[str, Mode, str]  # workload, mode of one device, kind of device


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadFacts:
    """The facts of a workload; 0, NaN or None if unknown.

    `hidden_part` is the fraction of one device's seconds that remains when the first bucket of
    gradients is ready. `divided` has the sizes of layers split by tensor parallelism.
    """

    gradient_bytes: float = 0.0
    checkpoint_bytes: float = 0.0
    flops: float = 0.0
    transformer: Transformer | None = None
    hidden_part: float = float("nan")
    last_bucket_bytes: float = float("nan")
    divided: Volumes = NOTHING

    def network(self, workload: str) -> object:
        """Return what identifies the network; a transformer's sequences may differ in length."""
        return self.transformer[1:3] if self.transformer else workload


def code_of(*key: object) -> float:
    """Return a number that identifies a group, the same in all processes."""
    return float(zlib.crc32(repr(key).encode()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Points:
    """Distinct (workload, mode, kind of device, batch) whose one-device seconds are needed.

    All arrays have a row per point. `codes` identify kind, network, workload in a mode, and the
    workload on the kind.
    """

    mean: FloatArray  # prior mean of log seconds
    effects: FloatArray  # (points, effects) values of one_device.EFFECTS
    octave: FloatArray  # log2(batch / middle batch)
    shape: FloatArray  # (points, 4) log2 of a transformer's width, tokens and sequence; recomputing
    codes: FloatArray  # (points, 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The inputs of the regression, with a row per setup.

    `point` (rows, members) are positions in `points`; -1 for padding, and for machines without
    compute. `middle` has the points of the middle batches. Optimizer seconds are `optimizer` (rows,
    members) times those of the middle batch.
    """

    line: Line
    points: Points
    point: IntArray
    middle: IntArray
    optimizer: FloatArray
    kind: FloatArray  # codes
    strategy: FloatArray
    cell: FloatArray
    features: FloatArray  # (rows, 5) features of the residual
    noise_sd: FloatArray  # known standard deviation of log seconds

    def __len__(self) -> int:
        return len(self.kind)

    def take(self, at: IntArray) -> Rows:
        picked = {
            each.name: getattr(self, each.name)[at]
            for each in fields(self)
            if each.name not in ("line", "points")
        }
        line = Line(*(getattr(self.line, name)[at] for name in Line.__slots__))
        return Rows(line=line, points=self.points, **picked)

    def as_probes(self, probes: IntArray, size: FloatArray) -> Rows:
        """Return the rows with those at `probes` as all-reduces of `size` bytes without compute."""
        gradient_bytes, features = self.line.gradient_bytes.copy(), self.features.copy()
        point, middle = self.point.copy(), self.middle.copy()
        point[probes] = middle[probes] = -1
        gradient_bytes[probes], features[probes, 0] = size, np.log2(size)
        line = replace(self.line, gradient_bytes=gradient_bytes)
        return replace(self, line=line, point=point, middle=middle, features=features)

    def with_seconds(self, log_s: FloatArray) -> Line:
        """Return the formula's input if the points take exp(`log_s`) (points,) seconds."""
        seconds = np.append(np.exp(log_s), 0.0)
        middle_s = seconds[self.middle]
        return replace(
            self.line,
            alone_s=seconds[self.point],
            middle_s=np.where(middle_s > 0, middle_s, 1.0),
            optimizer_s=self.optimizer * middle_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SetupFacts:
    """The facts from which the regression's input is computed.

    Attributes:
        machines: the machine of each instance type.
        workloads: the facts of each workload.
        middle: log2 of the middle batch of each workload in a mode of one device.
        batches: the smallest and the largest measured batch.
        optimizer_part: the optimizer's seconds of each cell, divided by the seconds of a
            micro-step at the middle batch.
        input_part: the fraction of a cell's one-device seconds spent on making batches.
    """

    machines: dict[str, Machine]
    workloads: dict[str, WorkloadFacts]
    middle: dict[tuple[str, Mode], float] = field(default_factory=dict)
    batches: dict[tuple[str, Mode], tuple[float, float]] = field(default_factory=dict)
    optimizer_part: dict[Cell, float] = field(default_factory=dict)
    input_part: dict[Cell, float] = field(default_factory=dict)

    def of(self, workload: str) -> WorkloadFacts:
        return self.workloads.get(workload, WorkloadFacts())

    def kinds(self, names: tuple[str, ...]) -> list[str]:
        return [device_kind(name, self.machines[name]) for name in names]

    def middle_of(self, workload: str, mode: Mode) -> float:
        """Return log2 of the middle batch, of the same workload or of all if it is unknown."""
        if (workload, mode) in self.middle:
            return self.middle[workload, mode]
        transformer = self.of(workload).transformer
        if transformer is not None:
            return float(np.log2(_USUAL_TOKENS / transformer.sequence))
        same = [octave for (name, _), octave in self.middle.items() if name == workload]
        return float(np.median(same or [*self.middle.values()] or [_USUAL_OCTAVE]))

    def lay_out(self, setups: SetupArrays) -> Rows:
        """Return the regression's rows of `setups`."""
        kind, batch, layout, count = setups.kind, setups.batch, setups.layout, setups.count
        present = kind >= 0
        alike = [(each == each[:, :1]) | ~present for each in (kind, batch, layout)]
        if all(each.all() for each in alike):  # one member stands for all
            kind, batch, layout = kind[:, :1], batch[:, :1], layout[:, :1]
            count = setups.instances[:, None]
            present = kind >= 0
        names = self.kinds(setups.names)
        alone = [(workload, mode.alone) for workload, mode, _ in setups.groups()]
        group = np.zeros(len(kind), dtype=np.intp)
        for at, (_, _, rows) in enumerate(setups.groups()):
            group[rows] = at
        pair = np.broadcast_to(group[:, None], kind.shape)[present] * len(names) + kind[present]
        batches, size = np.unique(batch[present], return_inverse=True)
        distinct, where = np.unique(pair * len(batches) + size.ravel(), return_inverse=True)
        cells, size_of = np.divmod(distinct, max(len(batches), 1))
        pairs, cell_of = np.unique(cells, return_inverse=True)
        keys = [(*alone[code // len(names)], names[code % len(names)]) for code in pairs.tolist()]
        points = self._points(
            [keys[at] for at in cell_of.tolist()] + keys,
            np.concatenate([batches[size_of], [2 ** self.middle_of(*key[:2]) for key in keys]]),
        )
        point, middle = np.full((2, *kind.shape), -1, dtype=np.intp)
        point[present] = where.ravel()
        middle[present] = len(distinct) + cell_of[where.ravel()]
        optimizer = np.append([self._optimizer(key) for key in keys], 0.0)[
            np.where(present, middle - len(distinct), -1)
        ]
        link = self._by_link(setups)
        kinds = np.array([code_of("kind", name) for name in names])
        groups = [(workload, mode) for workload, mode, _ in setups.groups()]
        cells = np.array([[code_of("mode", *key, name) for name in names] for key in groups])
        strategies = [code_of("strategy", mode.strategy) * mode.of_several for _, mode in groups]
        return Rows(
            line=self._line(setups, group, np.where(present, [layout, count], 0.0), link),
            points=points,
            point=point,
            middle=middle,
            optimizer=optimizer,
            kind=kinds[link],
            strategy=np.array(strategies)[group],
            cell=cells.reshape(len(groups), len(names))[group, link],
            features=self._features(setups, link),
            noise_sd=np.zeros(len(group)),
        )

    def points_of(self, workload: str, mode: Mode, instance_type: str, batch: FloatArray) -> Points:
        """Return a point for each batch of a workload on one device of an instance type."""
        (kind,) = self.kinds((instance_type,))
        return self._points([(workload, mode, kind)] * len(batch), batch)

    def _points(self, keys: list[Cell], batch: FloatArray) -> Points:
        sheets = {
            key: sheet_of(key[2], key[1].precision, self.machines) for key in dict.fromkeys(keys)
        }
        found = [
            prior(
                size,
                self.middle_of(*key[:2]),
                sheets[key],
                flops=self.of(key[0]).flops,
                transformer=self.of(key[0]).transformer,
                recomputed="checkpointing" in key[1].switches,
            )
            for key, size in zip(keys, batch.tolist(), strict=True)
        ]
        codes = {
            key: (
                code_of("kind", key[2]),
                code_of("network", self.of(key[0]).network(key[0])),
                code_of("workload", *key[:2]),
                code_of("cell", *key),
            )
            for key in sheets
        }
        middle = np.array([self.middle_of(*key[:2]) for key in keys])
        return Points(
            mean=np.array([mean for mean, _, _ in found]),
            effects=np.array([effects for _, effects, _ in found]).reshape(-1, len(EFFECTS)),
            octave=np.log2(batch) - middle,
            shape=np.array([shape for _, _, shape in found]).reshape(-1, 4),
            codes=np.array([codes[key] for key in keys]).reshape(-1, 4),
        )

    def _line(self, setups: SetupArrays, group: IntArray, used: FloatArray, link: IntArray) -> Line:
        """Return the formula's input without the seconds of one device.

        `used` (2, rows, members) are the devices used on a machine, and the equal machines.
        """
        exchange = [self._exchange(workload, mode) for workload, mode, _ in setups.groups()]
        size, bucket, hidden, last, again = np.array(exchange).reshape(-1, 5).T[:, group]
        ranks, machines = setups.ranks, setups.instances
        most = setups.layout.max(axis=1, initial=0)
        gbps = np.array([self.machines[name].bandwidth_gbps for name in setups.names])
        inside = {name: self.machines[name].inside_gbps for name in setups.names}
        core = {
            name: 1.0 if self.machines[name].accelerated else self.machines[name].cores
            for name in setups.names
        }
        sent, selection_s = self._compression(setups, size, most)
        none = np.zeros_like(used[0])
        return Line(
            alone_s=none,
            middle_s=none,
            optimizer_s=none,
            devices=used[0],
            count=used[1],
            machines=machines,
            ranks=ranks,
            most=most,
            accumulation=setups.accumulation,
            gradient_bytes=size,
            bucket_bytes=bucket,
            hidden=hidden,
            last_bucket=last,
            gbps=gbps[link],
            inside_gbps=setups.by_type(inside, np.inf).min(axis=1, initial=np.inf),
            core=setups.by_type(core, np.inf).min(axis=1, initial=1.0),
            sent_between=sent,
            selection_s=selection_s,
            repeated=again * (setups.accumulation - 1),
        )

    def _features(self, setups: SetupArrays, link: IntArray) -> FloatArray:
        """Return a (rows, 5) array: the features of the residual."""
        ranks, machines = setups.ranks, setups.instances
        each = ranks / machines
        features = [
            np.log2(setups.samples / setups.accumulation / ranks),
            np.log2(machines),
            np.log2(each),
            1 - each / setups.layout.max(axis=1, initial=0),
            self._variety(setups, link),
        ]
        return np.stack(features, axis=1)

    def _optimizer(self, cell: Cell) -> float:
        """Return the optimizer part of a cell, or its median over other kinds of device."""
        if cell in self.optimizer_part:
            return self.optimizer_part[cell]
        known = [part for key, part in self.optimizer_part.items() if key[:2] == cell[:2]]
        return float(np.median(known)) if known else 0.0

    def _exchange(self, workload: str, mode: Mode) -> tuple[float, ...]:
        """Return the bytes of gradients and of a bucket, and three more fields of a Line.

        These fields are `hidden`, `last_bucket` and `repeated`.

        FSDP gathers weights twice and sums gradients; ZeRO-2 gathers weights once and sums
        gradients; ZeRO-1 gathers weights after an all-reduce. An all-reduce sends each gradient
        twice [D].
        """
        facts, strategy = self.of(workload), mode.strategy
        known = [each.gradient_bytes for each in self.workloads.values() if each.gradient_bytes > 0]
        whole = facts.gradient_bytes or (float(np.median(known)) if known else _USUAL_BYTES)
        part = 1.5 if strategy in ("fsdp", UPDATES_SHARED) else sent_everywhere(strategy)
        if mode.gathered and mode.precision in ("bf16", "fp16"):
            part /= 2
        last, bucket, hidden = facts.last_bucket_bytes, float(BUCKET), facts.hidden_part
        if mode.gathered:  # a collective for each block of layers, beside nearly all compute
            blocks = facts.transformer.layers if facts.transformer else _BLOCKS
            last, bucket, hidden = float("nan"), max(bucket, whole / blocks), _BESIDE
        if in_turn(strategy):
            last = _EVERYTHING
        if strategy == UPDATES_SHARED:  # gathers weights after the backward pass
            last += whole / 2
        return whole * part, bucket, *known_overlap(hidden, last), float(mode.gathered)

    def _compression(
        self, setups: SetupArrays, size: FloatArray, most: FloatArray
    ) -> tuple[FloatArray, FloatArray]:
        """Return the fields `sent_between` and `selection_s` of a Line."""
        sent, selection_s = np.ones_like(size), np.zeros_like(size)
        machines = [self.machines[name] for name in setups.names]
        gloo = dict(
            zip(setups.names, (float(not each.accelerated) for each in machines), strict=True)
        )
        rates = {
            name: seconds_per_value(machine)
            for name, machine in zip(setups.names, machines, strict=True)
        }
        by_gloo = setups.by_type(gloo, 0.0).max(axis=1, initial=0.0) > 0
        for workload, mode, at in setups.groups():
            strategy = mode.strategy
            if not mode.sends_otherwise:
                sent[at] = np.where(by_gloo[at], sums_everywhere(strategy), 1.0)
            elif mode.divided:
                picked = setups.take(at)
                sent[at] = self._divided(workload, strategy, picked, size[at], most[at])
            else:
                picked = setups.take(at)
                per_value = picked.by_type(rates, 0.0).max(axis=1)
                sent[at] = sent_between(strategy, picked.instances, picked.ranks)
                selection_s[at] = selection_seconds(strategy, size[at], most[at], per_value)
        return sent, selection_s

    def _divided(
        self,
        workload: str,
        strategy: str,
        setups: SetupArrays,
        size: FloatArray,
        most: FloatArray,
    ) -> FloatArray:
        """Return a (rows,) array: bytes a machine sends in tensor parallelism, relative to DDP.

        The ratio is 1 if the sizes of the layers are unknown.
        """
        divided = self.of(workload).divided
        if not divided.known:
            return np.ones_like(size)
        ranks = setups.ranks
        found = machine_bytes(
            strategy, divided, size[0], ranks=ranks, most=most, samples=setups.samples / ranks
        )
        again = weight_bytes(strategy, divided.weights, ranks=ranks, most=most)
        found += (setups.accumulation - 1) * again
        return np.nan_to_num(found / (2 * (ranks - 1) / ranks * size), nan=1.0)

    def _by_link(self, setups: SetupArrays) -> IntArray:
        """Return, for each row, the position in `names` of the type with the slowest link."""
        order = sorted(
            range(len(setups.names)),
            key=lambda at: (self.machines[setups.names[at]].bandwidth_gbps, setups.names[at]),
        )
        place = {setups.names[at]: float(rank) for rank, at in enumerate(order)}
        first = setups.by_type(place, np.inf).min(axis=1, initial=np.inf)
        return np.asarray(np.array(order)[first.astype(np.intp)], dtype=np.intp)

    def _variety(self, setups: SetupArrays, link: IntArray) -> FloatArray:
        """Return the mean over machines of log2(speed / speed of the one with the slowest link)."""
        speed = {name: float(np.log2(self.machines[name].prior_speed)) for name in setups.names}
        slowest = np.array([speed[name] for name in setups.names])[link]
        ahead = (setups.by_type(speed, 0.0) - slowest[:, None]) * setups.present
        return np.asarray((setups.count * ahead).sum(axis=1) / setups.instances, dtype=float)
