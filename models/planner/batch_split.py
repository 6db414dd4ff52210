"""Divide a global batch among machines and micro-steps so that unequal machines finish together.

An optimizer step consists of one or more micro-steps (accumulation steps). The cluster processes B
samples in each micro-step.

- d_i: the number of devices of machine i
- a_i, k_i: a device of machine i needs a fixed a_i seconds, and k_i seconds for each sample
- b_i: the samples that each device of machine i gets in a micro-step
- tau: the seconds after which all machines finish a micro-step

    tau = a_i + k_i b_i, and the sum of d_i b_i is B. Therefore:
    tau = (B + sum(d_i a_i / k_i)) / sum(d_i / k_i)
    b_i = (tau - a_i) / k_i, rounded to whole samples
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations

import numpy as np

from ..domain.cluster import Cluster, InstanceType, Offer
from ..domain.numeric import FloatArray, IntArray
from ..domain.workload import Mode, Setup, Workload
from ..step_time.machine_specs import computes
from ..step_time.model import StepTimeModel
from ..step_time.setup_arrays import SetupArrays

_ROUNDING = 1e-9  # tolerance in samples
ACCUMULATION_STEPS = (1, 2, 4)

Line = tuple[float, float]  # (a, k): forward and backward of one device take a + k * batch seconds


def finish_together(
    lines: Sequence[Line], total: int, devices: Sequence[int]
) -> tuple[int, ...] | None:
    """Return the samples per device of each machine, so that all machines finish together.

    Returns None if the devices cannot share `total` samples.

    lines: the pair (a, k) of each machine: a device computes b samples in a + k b seconds.
    total: the number of samples to share.
    devices: the number of devices of each machine.
    """
    each = np.array([devices], np.int64)
    a, k = np.array(lines, float).T[:, None]
    (samples,) = split_groups(a, k, count=np.ones_like(each), devices=each, total=total).tolist()
    return tuple(samples) if any(samples) else None


def split_groups(
    a: FloatArray,
    k: FloatArray,
    *,
    count: IntArray,
    devices: IntArray,
    total: int,
    equal: bool = False,
) -> IntArray:
    """Split `total` samples among the machines of each cluster, for many clusters at once.

    All arrays have the shape (clusters, types):

        count      the number of machines of the type; 0 in padding
        devices    the number of devices of one machine of the type
        a, k       a device of the type computes b samples in a + k b seconds, with k > 0
        result     the samples per device, summed over the machines of the type

    For example, a result of 7 for three machines means 3, 2 and 2 samples per device. The result is
    0 for all types of a cluster if its devices cannot share the samples.

    equal: True if the caller keeps only splits with the same batch on every device. `_even_out` is
        then skipped.
    """
    present = count > 0
    weight = count * devices / k
    tau = (total + (weight * a).sum(axis=1)) / weight.sum(axis=1)
    ideal = np.where(present, (tau[:, None] - a) / k, np.inf)
    possible = ideal.min(axis=1) >= 1 - _ROUNDING
    floor = np.floor(np.where(present & possible[:, None], ideal, 1.0) + _ROUNDING)
    samples = np.maximum(1, floor).astype(np.int64) * count
    left = total - (samples * devices).sum(axis=1)
    possible &= left >= 0
    active = np.flatnonzero(possible & (left > 0))
    # Rounding down left some samples. Each sample goes to the type that would finish first with it.
    while len(active):
        n, d = count[active], devices[active]
        able = (n > 0) & (d <= left[active, None])
        stuck = ~able.any(axis=1)
        possible[active[stuck]] = False
        each = np.maximum(n, 1)
        after = np.where(able, a[active] + k[active] * (samples[active] // each + 1), np.inf)
        taker, row = after.argmin(axis=1), np.arange(len(active))
        without = each[row, taker] - samples[active, taker] % each[row, taker]
        given = np.where(stuck, 0, np.minimum(without, left[active] // d[row, taker].clip(1)))
        samples[active, taker] += given
        left[active] -= given * d[row, taker]
        active = active[~stuck & (left[active] > 0)]
    if not equal:
        _even_out(samples, a, k, count, devices, np.flatnonzero(possible))
    return np.where(possible[:, None], samples, 0)


def _even_out(
    samples: IntArray,
    a: FloatArray,
    k: FloatArray,
    count: IntArray,
    devices: IntArray,
    rows: IntArray,
) -> None:
    """Move samples from small to large machines, as long as this shortens the step.

    A large machine has more devices than a small machine. `split_groups` gives a machine one sample
    per device at a time. If fewer samples are left than a large machine has devices, small machines
    get them. The small machines may then be the slowest.

    A move takes samples from small machines, and gives one sample to each device of a large
    machine. It is possible only if the large machine has a multiple of the small machine's devices.

    samples: (clusters, types) the split, changed in place: samples per device, summed over the
        machines of the type.
    rows: the positions of the clusters to change.
    a, k, count, devices: see `split_groups`.
    """
    for giver, taker in permutations(range(samples.shape[1]), 2):
        ratio, rest = np.divmod(devices[:, taker], np.maximum(devices[:, giver], 1))
        both = (count[:, giver] > 0) & (count[:, taker] > 0)
        active = rows[(both & (ratio > 1) & (rest == 0))[rows]]
        while active.size:
            n, moved = count[active], samples[active]
            moved[:, giver] -= ratio[active]
            moved[:, taker] += 1
            before, after = (
                np.where(n > 0, a[active] + k[active] * -(-each // np.maximum(n, 1)), 0).max(axis=1)
                for each in (samples[active], moved)
            )
            shorter = (after < before - 1e-12) & (moved[:, giver] >= n[:, giver])
            active = active[shorter]
            samples[active] = moved[shorter]


def global_batches(least: int, most: int) -> tuple[int, ...]:
    """Return the global batches to compare: `least`, its doublings below `most`, and `most`."""
    doublings = [least * 2**power for power in range((most // least).bit_length())]
    return tuple(sorted({*doublings, most}))


# Reasons why a cluster has no batch split. In messages: "2 with too little memory".
OBSTACLES = (
    "that run no tolerated mode",
    "whose devices cannot share the batch",
    "with too little memory",
)


@dataclass(frozen=True, kw_only=True)
class BatchSplits:
    """A table of batch splits, sorted by cluster, mode, global batch and accumulation steps.

    A batch split says how many samples each device of a cluster gets. Each array has one row per
    split, except `obstacle`, which has one entry per cluster.

    Attributes:
        mode: (splits,) positions in `modes`.
        cluster: (splits,) positions among the enumerated clusters.
        kind: (splits, types) positions in `types`, or -1 for padding.
        count: (splits, types) numbers of machines of each type.
        samples: (splits, types) the result of `split_groups` for a micro-step.
        total: (splits,) global batches.
        steps: (splits,) numbers of accumulation steps.
        obstacle: (clusters,) the reason why a cluster has no split, as a position in OBSTACLES; -1
            if the cluster has splits. If the modes have different reasons, the highest position
            is stored.
    """

    workload: str
    modes: tuple[Mode, ...]
    types: tuple[InstanceType, ...]
    mode: IntArray
    cluster: IntArray
    kind: IntArray
    count: IntArray
    samples: IntArray
    total: IntArray
    steps: IntArray
    obstacle: IntArray

    def __len__(self) -> int:
        return len(self.cluster)

    @property
    def device(self) -> IntArray:
        """Return a (splits,) array: a code for the kind of device of the cluster.

        The code is -1 if the cluster has several kinds of device.
        """
        names = sorted({instance_type.device for instance_type in self.types})
        code = np.array([names.index(instance_type.device) for instance_type in self.types] + [-1])[
            self.kind
        ]
        first = code[:, :1]
        return np.where(((code == first) | (code < 0)).all(axis=1), first[:, 0], -1)

    def arrays(self, rows: IntArray | slice = slice(None)) -> SetupArrays:
        """Return the batch splits at positions `rows` as input of the step-time model.

        The arrays have two columns for each instance type, because samples do not always divide
        evenly. In the first column, each device gets one sample more than in the second column.
        """
        kind, number, samples = (column[rows] for column in (self.kind, self.count, self.samples))
        count = np.maximum(number, 1)
        batch, odd = samples // count, samples % count
        double = (len(kind), 2 * kind.shape[1])
        machines = np.stack([odd, number - odd], axis=2).reshape(double)
        batches = np.stack([batch + 1, batch], axis=2).reshape(double)
        kinds = np.repeat(kind, 2, axis=1)
        devices = np.array([instance_type.devices for instance_type in self.types] + [0])[kinds]
        present = machines > 0
        return SetupArrays(
            workloads=(self.workload,),
            workload=np.zeros(len(kind), np.intp),
            modes=self.modes,
            mode=self.mode[rows],
            names=tuple(instance_type.name for instance_type in self.types),
            kind=np.where(present, kinds, -1),
            count=machines.astype(float),
            batch=np.where(present, batches, 0).astype(float),
            layout=np.where(present, devices, 0).astype(float),
            accumulation=self.steps[rows].astype(float),
        )

    def setup(self, at: int, offers: Mapping[str, Offer]) -> Setup:
        """Return the batch split at position `at` as a setup.

        `offers` maps the name of each instance type to its offer.
        """
        members: list[Offer] = []
        batches: list[int] = []
        columns = (self.kind[at], self.count[at], self.samples[at])
        for kind, count, samples in zip(*(column.tolist() for column in columns), strict=True):
            if kind >= 0:
                batch, odd = divmod(samples, count)
                members += [offers[self.types[kind].name]] * count
                batches += [batch + 1] * odd + [batch] * (count - odd)
        return Setup(
            workload=self.workload,
            cluster=Cluster(members=tuple(members)),
            layout=tuple(offer.instance_type.devices for offer in members),
            batch_per_device=tuple(batches),
            accumulation_steps=int(self.steps[at]),
            mode=self.modes[self.mode[at]],
        )


def splits_of(
    workload: Workload,
    types: Sequence[InstanceType],
    counts: IntArray,
    *,
    totals: Sequence[int],
    model: StepTimeModel,
) -> BatchSplits:
    """Return all batch splits of each cluster in each mode of the workload.

    Every device gets at least one sample in a micro-step, and the samples fit in its memory. There
    are splits with 1, 2 and 4 accumulation steps (ACCUMULATION_STEPS), if these numbers divide the
    global batch. If the batch needs accumulation to fit in memory, there is also a split with the
    smallest divisor of the global batch that suffices, such as 3 or 8.

    Args:
        workload: the workload with its allowed modes.
        types: the instance types.
        counts: (clusters, types) numbers of machines of each type.
        totals: the global batches to split.
        model: predicts memory and the seconds of one device.
    """
    width = int((counts > 0).sum(axis=1).max())
    order = np.argsort(counts == 0, axis=1, kind="stable")[:, :width]
    count = np.take_along_axis(counts, order, axis=1)
    kind = np.where(count > 0, order, -1)
    devices = np.array([instance_type.devices for instance_type in types] + [0], np.int64)
    present = devices[kind]
    ranks, machines = (count * present).sum(axis=1), count.sum(axis=1)
    fewest = np.where(kind >= 0, present, devices.max()).min(axis=1)
    largest = present.max(axis=1)
    shards = 2 ** np.floor(np.log2(ranks)).astype(np.int64)
    splits: list[tuple[IntArray, ...]] = []
    obstacle = np.zeros(len(counts), np.intp)
    lines = {
        alone: model.compute_lines(
            workload.name, [instance_type.name for instance_type in types], alone
        )
        for alone in {mode.alone for mode in workload.modes}
    }
    for number, mode in enumerate(workload.modes):
        a, k = np.vstack([lines[mode.alone], (0.0, 1.0)]).T
        computing = np.array(
            [*(computes(instance_type.device, mode) for instance_type in types), True], bool
        )
        able = computing[kind].all(axis=1) & mode.runs_on(machines, fewest, largest, ranks)
        rows = np.flatnonzero(able)
        # Sharded state is divided by the number of ranks. Rounding this number down to a power of
        # two overestimates memory slightly, and keeps the number of memory queries small.
        shared_by = np.where(mode.sharded, shards[rows], 1)
        powers, power = np.unique(shared_by, return_inverse=True)
        limits = _largest_batches(model, workload.name, mode, types, powers, max(totals))
        for total in totals:
            fitted, lacking = np.zeros((2, len(rows)), bool)
            small = np.arange(1, math.isqrt(total) + 1)
            small = small[total % small == 0]
            for steps in np.union1d(small, total // small).tolist():
                at = np.flatnonzero(lacking & ~fitted | (steps in ACCUMULATION_STEPS))
                kinds, each = kind[rows[at]], count[rows[at]]
                samples = split_groups(
                    a[kinds],
                    k[kinds],
                    count=each,
                    devices=devices[kinds],
                    total=total // steps,
                    equal=mode.of_equal_batches,
                )
                most = -(-samples // np.maximum(each, 1))
                limit = limits[power[at, None], int(steps > 1), kinds]
                possible = samples.any(axis=1)
                kept = possible & ((each == 0) | (most <= limit)).all(axis=1)
                fitted[at] |= kept
                lacking[at] |= possible & ~kept
                if mode.of_equal_batches:
                    kept &= ((each == 0) | (samples == each * most[:, :1])).all(axis=1)
                constant = (np.full(kept.sum(), value) for value in (number, total, steps))
                splits.append((rows[at][kept], samples[kept], *constant))
            obstacle[rows] = np.maximum(obstacle[rows], 1 + lacking)
    cluster, samples, numbers, total_of, steps_of = (
        np.concatenate(column) for column in zip(*splits, strict=True)
    )
    obstacle[cluster] = -1
    order = np.lexsort((steps_of, total_of, numbers, cluster))
    return BatchSplits(
        workload=workload.name,
        modes=workload.modes,
        types=tuple(types),
        mode=numbers[order],
        cluster=cluster[order],
        kind=kind[cluster[order]],
        count=count[cluster[order]],
        samples=samples[order],
        total=total_of[order],
        steps=steps_of[order],
        obstacle=obstacle,
    )


def _largest_batches(
    model: StepTimeModel,
    workload: str,
    mode: Mode,
    types: Sequence[InstanceType],
    powers: IntArray,
    most: int,
) -> IntArray:
    """Return a (powers, 2, types + 1) array: the largest batch that fits in a device's memory.

    The axes of the array are:

    1. the number of devices that share sharded state: the powers of two in `powers`
    2. without and with gradient accumulation
    3. the instance type; the last entry is for padding, and is always `most`

    A batch is 0 if no sample fits. It is `most` if `most` samples fit, or if memory needs are
    unknown.
    """
    found = np.full((len(powers), 2, len(types) + 1), most)
    for row, steps, column in np.ndindex(len(powers), 2, len(types)):
        kind, ranks = types[column], int(powers[row])
        needs = model.memory.needs(workload, mode, kind.name, ranks, accumulates=steps > 0)
        largest = needs.largest_batch(kind.device_memory_gib * 2**30)
        found[row, steps, column] = min(largest, most)
    return found
