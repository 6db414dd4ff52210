"""Convert setups into the input rows of the regression in regressor.py."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from ..domain.numeric import FloatArray, IntArray
from ..domain.optimizer_state import checkpoint_bytes
from ..domain.workload import UPDATES_SHARED, Mode
from .bytes_sent import (
    COMMUNICATION,
    Volumes,
    seconds_per_value,
    selection_seconds,
    sent_between,
    tensor_bytes,
)
from .formula import BUCKET, RDMA_GBPS, Line, known_overlap
from .kernel import COLUMN, POINT_CODES, T1, WIDTH
from .machine_specs import Machine, device_kind, sheet_of
from .setup_arrays import SetupArrays
from .single_device import Transformer, prior

PROBE = "(all-reduce alone)"  # placeholder for the workload of all-reduces without training
# Default gradient bytes and default log2 of the batch, if no workload has known values.
_USUAL_BYTES, _USUAL_OCTAVE = 1e8, 5.0
_USUAL_TOKENS = 2.0**14  # default tokens of a device in a micro-step
_BLOCKS = 8.0  # blocks of weights in FSDP and ZeRO-2, if the layers are unknown (node/switches.py)
_BESIDE = 0.95  # fraction of compute during which blocks of weights can be gathered
_EVERYTHING = 1e18  # size of the last bucket if the backward pass waits for all exchanges

Cell = tuple[str, Mode, str]  # workload, one-device mode (`Mode.alone`), kind of device


@dataclass(frozen=True, kw_only=True)
class WorkloadFacts:
    """The facts of a workload. An unknown fact is 0, NaN or None.

    flops: floating-point operations of a sample.
    hidden_part: fraction of a one-device step that remains when the first gradient bucket is ready.
        Exchanges can run during this part.
    last_bucket_bytes: size of the gradient bucket that is ready last.
    divided: numbers of weights and activations in the layers that tensor parallelism splits.
    """

    gradient_bytes: float = 0.0
    checkpoint_bytes: float = 0.0
    flops: float = 0.0
    transformer: Transformer | None = None
    hidden_part: float = np.nan
    last_bucket_bytes: float = np.nan
    divided: Volumes = field(default_factory=Volumes)

    @property
    def state_bytes(self) -> float:
        """Return the bytes of weights and optimizer states.

        If no checkpoint was measured, the bytes are estimated for Adam.
        """
        return checkpoint_bytes(self.gradient_bytes, self.checkpoint_bytes)

    @property
    def blocks(self) -> float:
        """Return the number of blocks of weights that FSDP and ZeRO-2 gather one after another."""
        return self.transformer.layers if self.transformer else _BLOCKS


def code_of(*key: object) -> float:
    """Return a code: a number that identifies `key`, for example ("kind", "a100").

    Unlike hash(), the code is the same in all Python processes.
    """
    return float(zlib.crc32(repr(key).encode()))


class Points(NamedTuple):
    """The inputs from which the seconds of one device are predicted, with a row for each point.

    A point is a workload in a mode, on a kind of device, with a batch.
    """

    mean: FloatArray  # (points,) prior mean of log seconds
    inputs: FloatArray  # (points, WIDTH) inputs of the covariance (kernel.COLUMN)


@dataclass(frozen=True, kw_only=True)
class Rows(Line):
    """The inputs of the regression, with a row for each setup.

    The fields of `Line` are the inputs of the formula. `alone_s`, `middle_s` and `optimizer_s` are
    0 until `with_seconds` sets them. The middle batch is the median of the measured batches of the
    workload. A member is one machine of the cluster, or several equal machines. A cell is a
    (workload, mode, kind of device).

    Attributes:
        points: the batches whose seconds on one device are needed.
        point: (rows, members) position in `points` of the member's batch; -1 for padding, and for
            rows that measure an all-reduce without training.
        middle: (rows, members) position in `points` of the middle batch on the member's device.
        optimizer: (rows, members) seconds of the optimizer divided by the one-device seconds at the
            middle batch.
        codes: (rows, 4) codes (`code_of`) of the kind of device, the strategy, the cell, and the
            communication library. The kind and the library are those of the machine with the
            slowest link.
    """

    points: Points
    point: IntArray
    middle: IntArray
    optimizer: FloatArray
    codes: FloatArray
    features: FloatArray  # (rows, 5) features on which the residual depends
    noise_sd: FloatArray  # (rows,) known standard deviation of log seconds

    def __len__(self) -> int:
        return len(self.codes)

    @property
    def kind(self) -> FloatArray:
        return self.codes[:, 0]

    @property
    def cell(self) -> FloatArray:
        return self.codes[:, 2]

    def take(self, at: IntArray) -> Rows:
        return replace(
            self, **{name: values[at] for name, values in vars(self).items() if name != "points"}
        )

    def with_seconds(self, log_s: FloatArray) -> Rows:
        """Return the rows with their one-device seconds filled in.

        `log_s` is a (points,) array with the log of the seconds.
        """
        seconds = np.append(np.exp(log_s), 0.0)
        middle_s = seconds[self.middle]
        return replace(
            self,
            alone_s=seconds[self.point],
            middle_s=np.where(middle_s > 0, middle_s, 1.0),
            optimizer_s=self.optimizer * middle_s,
        )


@dataclass(frozen=True, kw_only=True)
class SetupFacts:
    """The facts from which the input of the regression is computed.

    A one-device mode (`Mode.alone`) has neither a multi-device strategy nor offload. The middle
    batch is the median of the measured batches.

    Attributes:
        machines: {instance type: its machine}.
        workloads: {workload: its facts}.
        octaves: {(workload, one-device mode): log2 of the smallest, the middle and the largest
            measured batch}.
        optimizer_part: {(workload, one-device mode, kind of device): the optimizer's seconds as a
            fraction of the one-device seconds at the middle batch}.
    """

    machines: dict[str, Machine]
    workloads: dict[str, WorkloadFacts]
    octaves: dict[tuple[str, Mode], FloatArray]
    optimizer_part: dict[Cell, float]

    def of(self, workload: str) -> WorkloadFacts:
        return self.workloads.get(workload, WorkloadFacts())

    def kinds(self, names: Iterable[str]) -> list[str]:
        return [device_kind(name, self.machines[name]) for name in names]

    def middle_of(self, workload: str, mode: Mode) -> float:
        """Return log2 of the middle batch of `workload` in the one-device mode `mode`.

        The middle batch is the first of these that exists:

        1. the median of the batches measured in `mode`
        2. 16,384 tokens, for a transformer
        3. the median of the middle batches of the workload's other modes
        4. the median of the middle batches of all workloads
        5. 32 samples
        """
        if (workload, mode) in self.octaves:
            return float(self.octaves[workload, mode][1])
        transformer = self.of(workload).transformer
        if transformer is not None:
            return float(np.log2(_USUAL_TOKENS / transformer.sequence))
        middles = [(name, middle) for (name, _), (_, middle, _) in self.octaves.items()]
        same = [middle for name, middle in middles if name == workload]
        return float(np.median(same or [middle for _, middle in middles] or [_USUAL_OCTAVE]))

    def lay_out(self, setups: SetupArrays) -> Rows:
        """Return the input rows of the regression for `setups`."""
        kind, present, names = setups.kind, setups.present, self.kinds(setups.names)
        groups = setups.groups()
        group = np.zeros(len(kind), np.intp)
        for at, (_, _, rows) in enumerate(groups):
            group[rows] = at
        cell = (group[:, None] * len(names) + kind)[present]
        cells, cell_of = np.unique(cell, return_inverse=True)
        keys: list[Cell] = []
        for at, name in zip(*np.divmod(cells, len(names)), strict=True):
            workload, mode, _ = groups[at]
            keys.append((workload, mode.alone, names[name]))
        # A complex number holds both values, because np.unique is slow for rows of two numbers.
        distinct, where = np.unique(cell_of + 1j * setups.batch[present], return_inverse=True)
        points = self.points(
            keys,
            np.append(distinct.real.astype(np.intp), np.arange(len(keys))),
            np.append(distinct.imag, [2 ** self.middle_of(*key[:2]) for key in keys]),
        )
        point, middle = np.full((2, *kind.shape), -1)
        point[present], middle[present] = where, len(distinct) + cell_of
        optimizer = np.zeros(kind.shape)
        optimizer[present] = np.array([self._optimizer(key) for key in keys])[cell_of]
        link = self._slowest_link(setups)
        codes = [
            (
                code_of("kind", names[name]),
                code_of("strategy", mode.strategy) * mode.of_several,
                code_of("mode", workload, mode, names[name]),
                code_of("library", each.has_accelerator, each.bandwidth_gbps >= RDMA_GBPS),
            )
            for workload, mode, _ in groups
            for name, each in enumerate(self.machines[name] for name in setups.names)
        ]
        return Rows(
            **self._exchange(setups, link),
            points=points,
            point=point,
            middle=middle,
            optimizer=optimizer,
            **dict.fromkeys(("alone_s", "middle_s", "optimizer_s"), np.zeros(kind.shape)),
            devices=setups.layout,
            count=setups.count,
            accumulation=setups.accumulation,
            codes=np.array(codes).reshape(-1, 4)[group * len(names) + link],
            features=self._features(setups, link),
            noise_sd=np.zeros(len(group)),
        )

    def points(self, cells: list[Cell], cell: IntArray, batch: FloatArray) -> Points:
        """Return the inputs from which the seconds of one device are predicted, a row per point.

        A point is a batch in a cell. A cell is a (workload, one-device mode, kind of device).

        cell: (points,) the position in `cells` of each point.
        batch: (points,) the batch of each point.
        """
        mean, inputs = np.zeros(len(batch)), np.zeros((len(batch), WIDTH))
        inputs[:, COLUMN["alone"]] = 1.0
        for place, (workload, mode, kind) in enumerate(cells):
            at = np.flatnonzero(cell == place)
            facts, middle = self.of(workload), self.middle_of(workload, mode)
            mean[at], inputs[at, T1], inputs[at, COLUMN["shape"]] = prior(
                batch[at],
                middle,
                sheet_of(kind, mode.precision, self.machines),
                flops=facts.flops,
                transformer=facts.transformer,
                recomputed="checkpointing" in mode.switches,
            )
            inputs[at, COLUMN["octave"]] = np.log2(batch[at]) - middle
            inputs[at, COLUMN["transformer"]] = facts.transformer is not None
            # Transformers of equal layers and width count as the same network, even if their
            # sequences differ in length.
            network = facts.transformer[1:3] if facts.transformer else workload
            inputs[at, POINT_CODES] = (
                code_of("kind", kind),
                code_of("network", network),
                code_of("workload", workload, mode),
                code_of("cell", workload, mode, kind),
            )
        return Points(mean, inputs)

    def _exchange(self, setups: SetupArrays, link: IntArray) -> dict[str, FloatArray]:
        """Return the fields of a `Line` that describe the exchange of gradients.

        If the layer sizes of a workload are unknown, tensor parallelism is assumed to send as many
        bytes as DDP.

        link: (rows,) position in `setups.names` of the instance type with the slowest link.
        """
        ranks, most = setups.ranks, setups.layout.max(axis=1)
        machines = [self.machines[name] for name in setups.names]
        gloo = setups.by_type([not each.has_accelerator for each in machines], 0.0).max(axis=1)
        per_value = setups.by_type([seconds_per_value(each) for each in machines], 0.0).max(axis=1)
        inside = [each.inside_gbps for each in machines]
        cores = [1.0 if each.has_accelerator else each.cores for each in machines]
        size, bucket, hidden_part, last_bytes, again, selection_s = np.zeros((6, len(ranks)))
        sent = np.ones(len(ranks))
        for workload, mode, at in setups.groups():
            strategy, volumes = mode.strategy, self.of(workload).divided
            size[at], bucket[at], hidden_part[at], last_bytes[at] = self._buckets(workload, mode)
            again[at] = mode.gathered
            selection_s[at] = selection_seconds(strategy, size[at], most[at], per_value[at])
            if not mode.divided:
                sent[at] = sent_between(strategy, setups.instances[at], ranks[at])
                sent[at] *= np.where(gloo[at] > 0, COMMUNICATION[strategy].on_gloo, 1.0)
            elif volumes.known:
                found = tensor_bytes(
                    strategy,
                    volumes,
                    size[at[0]],
                    ranks=ranks[at],
                    most=most[at],
                    samples=setups.samples[at] / ranks[at],
                    micro_steps=setups.accumulation[at],
                )
                dense = 2 * (ranks[at] - 1) / ranks[at] * size[at]
                sent[at] = np.nan_to_num(found / dense, nan=1.0)
        hidden, last_bucket = known_overlap(hidden_part, last_bytes)
        return {
            "gradient_bytes": size,
            "bucket_bytes": bucket,
            "hidden": hidden,
            "last_bucket": last_bucket,
            "gbps": np.array([each.bandwidth_gbps for each in machines])[link],
            "inside_gbps": setups.by_type(inside, np.inf).min(axis=1),
            "core": setups.by_type(cores, 1.0).min(axis=1, initial=1.0),
            "sent_between": sent,
            "selection_s": selection_s,
            "repeated": again * (setups.accumulation - 1),
        }

    def _features(self, setups: SetupArrays, link: IntArray) -> FloatArray:
        """Return a (rows, 5) array: the features on which the residual depends.

        1. log2 of the samples per device in a micro-step
        2. log2 of the number of machines
        3. log2 of the mean number of devices per machine
        4. 1 - (mean / maximum) of the devices per machine
        5. mean over machines of log2(peak fp32 rate of the machine / peak fp32 rate of the machine
           with the slowest network link)

        link: (rows,) position in `setups.names` of the instance type with the slowest link.
        """
        ranks, machines = setups.ranks, setups.instances
        each = ranks / machines
        log_speed = np.log2([self.machines[name].prior_speed for name in setups.names])
        ahead = setups.by_type(log_speed, 0.0) - log_speed[link][:, None]
        return np.column_stack(
            [
                np.log2(setups.samples / setups.accumulation / ranks),
                np.log2(machines),
                np.log2(each),
                1 - each / setups.layout.max(axis=1),
                (setups.count * ahead).sum(axis=1) / machines,
            ]
        )

    def _optimizer(self, cell: Cell) -> float:
        """Return the optimizer's seconds as a fraction of the forward and backward seconds.

        The batch is the median of the measured batches. If the kind of device has no profile, the
        result is the median over the other kinds. Without any profile, the result is 0.

        cell: a (workload, one-device mode, kind of device).
        """
        if cell in self.optimizer_part:
            return self.optimizer_part[cell]
        known = [share for key, share in self.optimizer_part.items() if key[:2] == cell[:2]]
        return float(np.median(known or [0.0]))

    def _buckets(self, workload: str, mode: Mode) -> tuple[float, ...]:
        """Return four numbers that describe the exchange of gradients.

        1. The bytes of all gradients, multiplied by `Communication.sent`. In bf16 and fp16, the
           factor of FSDP and ZeRO-2 is halved.
        2. The bytes of a bucket.
        3. The fraction of a step on one device that exchanges can overlap; NaN if unknown.
        4. The bytes of the last bucket; NaN if unknown.
        """
        facts, strategy = self.of(workload), COMMUNICATION[mode.strategy]
        known = [each.gradient_bytes for each in self.workloads.values() if each.gradient_bytes > 0]
        whole = facts.gradient_bytes or float(np.median(known or [_USUAL_BYTES]))
        factor = strategy.sent
        if mode.gathered and mode.precision in ("bf16", "fp16"):
            factor /= 2
        last, bucket, hidden = facts.last_bucket_bytes, float(BUCKET), facts.hidden_part
        if mode.gathered:  # A collective for each block of layers runs during nearly all compute.
            last, bucket, hidden = np.nan, max(bucket, whole / facts.blocks), _BESIDE
        if strategy.waits:
            last = _EVERYTHING
        if mode.strategy == UPDATES_SHARED:  # Weights are gathered after the backward pass.
            last += whole / 2
        return whole * factor, bucket, hidden, last

    def _slowest_link(self, setups: SetupArrays) -> IntArray:
        """Return a (rows,) array: the position in `setups.names` of the type with the slowest link.

        If several types have an equally slow link, the result is the first of them by name.
        """
        gbps = [self.machines[name].bandwidth_gbps for name in setups.names]
        order = np.lexsort((setups.names, gbps))
        first = setups.by_type(np.argsort(order), np.inf).min(axis=1)
        found: IntArray = order[first.astype(np.intp)]
        return found
