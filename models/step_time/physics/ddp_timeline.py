"""One optimizer step on a timeline: compute of every rank, buckets of gradients sent while backward still runs.

Bucket b is ready at r_b, when the latest rank has done the fraction f_b of its backward; one stream sends them [D]:

    e_0 = 0;  e_b = max(e_{b-1}, r_b) + c_b;   the step ends at max(latest backward, e_B)

Zero is the moment at which all ranks left the last all-reduce; each then runs its optimizer, its micro-steps without
sync, and the last forward. While bucket b is under way it takes u_b CPU seconds of each host's share, so backward
advances at the rate 1 - u_b / c_b: CPU work is conserved.

c_b is a ring all-reduce of S bytes over n ranks [P, physics.md]: 2 (n-1) alpha + 2 (n-1)/n S / B, B the slowest link.
Where the host's CPU is a quota the copying, reducing and system calls are paid from it [D]:

    wire = 2 (n-1)/n S / (efficiency B)
    cpu  = (base + 2 (n-1) message + 2 (n-1)/n S byte) / cores          of the smallest host
    c    = 2 (n-1) alpha + (wire^p + cpu^p)^(1/p)                       p = 1: one after the other; large p: hidden
"""

from __future__ import annotations

from dataclasses import asdict, astuple, dataclass, fields

import numpy as np
import pandas as pd
import scipy  # its parts are loaded where they are named: only a fit needs `optimize`, which takes long to import
from scipy.special import ndtri

from ...domain.cluster import parse_cluster
from ...domain.numeric import BoolArray, FloatArray
from ...domain.setup_table import SetupArrays
from ..machine_specs import Machine
from .compute import ComputeModel

_BYTES_PER_GBIT = 1.25e8
# Links inside one machine, where no probe has seen them: PCIe 3 x8 sustains about this.
INSIDE_GBPS = 50.0
# Spread of the log of each parameter that we believe before any probe; probes outweigh it soon.
_PRIOR_SD = np.array([1.5, 1.5, 1.5, 1.0, 0.04, 0.5])
# DDP's defaults: the first bucket 1 MiB, the rest 25 MiB [P]; for workloads whose buckets nobody recorded.
_FIRST_BUCKET, _BUCKET = 1 << 20, 25 << 20
# More buckets than this tell nothing new: they are made larger.
_MOST_BUCKETS = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveModel:
    """The parameters of the equation above; the defaults are the prior, from gloo over shaped links (traps.md)."""

    alpha_s: float = 1e-4
    base_cpu_s: float = 3e-4
    message_cpu_s: float = 5e-5
    byte_cpu_s: float = 6e-10
    efficiency: float = 0.93
    sharpness: float = 2.0

    def cpu_core_s(self, size_bytes: FloatArray, ranks: FloatArray) -> FloatArray:
        """CPU seconds, on a whole core, that one rank spends in one all-reduce. Arrays broadcast."""
        turns = np.maximum(ranks - 1, 0)
        moved = 2 * turns / np.maximum(ranks, 1) * size_bytes
        spent = (turns > 0) * self.base_cpu_s + 2 * turns * self.message_cpu_s + moved * self.byte_cpu_s
        return np.asarray(spent, dtype=float)

    def seconds(
        self, size_bytes: FloatArray, ranks: FloatArray, bandwidth_gbps: FloatArray, cores: FloatArray
    ) -> FloatArray:
        """Seconds of one all-reduce; `bandwidth_gbps` of the slowest link, `cores` of the smallest host.

        Never falls with bytes or ranks, never rises with bandwidth or cores; 0 for one rank.
        """
        turns = np.maximum(ranks - 1, 0)
        moved = 2 * turns / np.maximum(ranks, 1) * size_bytes
        wire = moved / (self.efficiency * bandwidth_gbps * _BYTES_PER_GBIT)
        cpu = self.cpu_core_s(size_bytes, ranks) / cores
        top = np.maximum(np.maximum(wire, cpu), np.finfo(float).tiny)
        both = top * ((wire / top) ** self.sharpness + (cpu / top) ** self.sharpness) ** (1 / self.sharpness)
        return np.asarray(2 * turns * self.alpha_s + (turns > 0) * both, dtype=float)

    def to_dict(self) -> dict[str, float]:
        """Plain numbers by parameter name."""
        return asdict(self)


def fit_collectives(probes: pd.DataFrame, machines: dict[str, Machine]) -> CollectiveModel:
    """Fit the parameters to all probes of a provider at once: log residuals, robust loss, priors on the log scale.

    Rows that are not positive, or of clusters that cannot be read, are left out; without rows the prior is returned.
    """
    prior = CollectiveModel()
    rows: list[tuple[float, float, float, float, float]] = []
    if {"cluster", "bytes", "seconds"} <= set(probes.columns):
        for cluster, size, seconds in zip(probes["cluster"], probes["bytes"], probes["seconds"], strict=True):
            names = parse_cluster(str(cluster))
            if len(names) > 1 and size > 0 and np.isfinite(seconds) and seconds > 0:
                own = [machines[name] for name in names]
                gbps, cores = min(one.bandwidth_gbps for one in own), min(one.cores for one in own)
                rows.append((float(size), float(len(names)), gbps, cores, float(seconds)))
    if not rows:
        return prior
    size, ranks, gbps, cores, seconds = np.array(rows).T
    start = np.log(np.array(astuple(prior)))
    upper = np.append(np.full(4, 10.0), [np.log(0.99) - start[4], np.log(8.0) - start[5]])
    lower = np.append(np.full(4, -10.0), [np.log(0.5) - start[4], np.log(1.0) - start[5]])

    def residuals(shift: FloatArray) -> FloatArray:
        model = _unpack(start + shift)
        error = np.log(model.seconds(size, ranks, gbps, cores) / seconds) / 0.1
        # soft_l1 by hand on the data alone: outliers are among the probes, not in the prior
        robust = np.sign(error) * np.sqrt(2 * (np.sqrt(1 + error**2) - 1))
        return np.concatenate([robust, shift / _PRIOR_SD])

    found = scipy.optimize.least_squares(residuals, np.zeros(6), bounds=(lower, upper), x_scale=_PRIOR_SD, max_nfev=60)
    return _unpack(start + found.x)


def _unpack(logs: FloatArray) -> CollectiveModel:
    alpha, base, message, byte, efficiency, sharpness = (float(value) for value in np.exp(logs))
    return CollectiveModel(
        alpha_s=alpha,
        base_cpu_s=base,
        message_cpu_s=message,
        byte_cpu_s=byte,
        efficiency=efficiency,
        sharpness=max(sharpness, 1.0),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepParameters:
    """What probes and profiles cannot tell: learned from training runs around these priors (medians)."""

    collective_scale: float = 1.0  # an all-reduce inside training against the same in a probe
    contention: float = 1.0  # CPU seconds taken from backward against the collective's own
    ddp_byte_cpu_s: float = 4e-10  # copying into buckets and dividing, core seconds a byte
    ddp_cpu_s: float = 5e-4  # hooks and bookkeeping, core seconds a step
    jitter: float = 0.015  # relative spread of a rank's compute from step to step; the slowest rank counts

    def to_dict(self) -> dict[str, float]:
        """Plain numbers by parameter name."""
        return asdict(self)


# Standard deviation of the log of each parameter before any run, in the order of the fields.
PARAMETER_SD = np.array([0.25, 0.5, 1.0, 1.0, 0.7])
PARAMETER_NAMES = tuple(one.name for one in fields(StepParameters))


@dataclass(frozen=True, slots=True, kw_only=True)
class Buckets:
    """A workload's gradient buckets in ready order: bytes, and the fraction of backward at which each is ready."""

    size_bytes: tuple[float, ...]
    ready: tuple[float, ...]


def default_buckets(gradient_bytes: float) -> Buckets:
    """DDP's default buckets, ready in proportion to the bytes behind them."""
    sizes: list[float] = []
    left = max(gradient_bytes, 0.0)
    while left > 0:
        sizes.append(min(left, max(float(_BUCKET if sizes else _FIRST_BUCKET), gradient_bytes / _MOST_BUCKETS)))
        left -= sizes[-1]
    total = max(sum(sizes), 1.0)
    return Buckets(size_bytes=tuple(sizes), ready=tuple(float(one) / total for one in np.cumsum(sizes)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Inputs of the recursion that the learned parameters do not change; (rows, members) unless said otherwise."""

    before: FloatArray  # optimizer, micro-steps without sync and the last forward
    backward: FloatArray
    count: FloatArray  # equal machines; 0 where padded
    cores: FloatArray
    contended: FloatArray  # part of a host's communication CPU that backward must yield: 0 with a core to spare
    ready: FloatArray  # (rows, buckets)
    collective_s: FloatArray  # (rows, buckets)
    cpu_core_s: FloatArray  # (rows, buckets)
    gradient_bytes: FloatArray  # (rows,)
    ranks: FloatArray
    distance: FloatArray  # (rows,) log2 batch outside what was measured, of the worst member

    @property
    def present(self) -> BoolArray:
        """(rows, members): is there an instance?"""
        return self.count > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """(rows,) seconds: the step, the slowest rank's compute, the ranks' mean, all communication; the slowest member."""

    step_s: FloatArray
    compute_s: FloatArray
    mean_compute_s: FloatArray
    communication_s: FloatArray
    slowest: np.ndarray[tuple[int, ...], np.dtype[np.intp]]


def lay_out(
    setups: SetupArrays,
    *,
    compute: ComputeModel,
    collectives: CollectiveModel,
    buckets: dict[str, Buckets],
    machines: dict[str, Machine],
) -> Timeline:
    """Everything about `setups` that profiles and probes tell. Raises ValueError on a workload never measured."""
    forward, backward, optimizer, distance = compute.seconds(setups)
    present, repeats = setups.present, setups.accumulation[:, None]
    cores = setups.by_type({name: machines[name].cores for name in setups.names}, 1.0)
    gbps = setups.by_type({name: machines[name].bandwidth_gbps for name in setups.names}, np.inf)
    slowest_gbps = np.where(setups.instances > 1, gbps.min(axis=1, initial=np.inf), INSIDE_GBPS)
    least_cores = np.where(present, cores, np.inf).min(axis=1, initial=np.inf)
    own = setups.workloads.distinct
    size, ready = _bucket_arrays([buckets[name] for name in own])
    owner = setups.workloads.places({name: at for at, name in enumerate(own)})
    size, ready = size[owner], ready[owner]
    ranks = setups.ranks[:, None]
    seconds = collectives.seconds(size, ranks, slowest_gbps[:, None], least_cores[:, None])
    return Timeline(
        before=optimizer + (repeats - 1) * (forward + backward) + forward,
        backward=backward,
        count=setups.count,
        cores=cores,
        contended=np.clip(2 - cores, 0, 1),
        ready=ready,
        collective_s=np.where(size > 0, seconds, 0.0),
        cpu_core_s=np.where(size > 0, collectives.cpu_core_s(size, ranks), 0.0),
        gradient_bytes=size.sum(axis=1),
        ranks=setups.ranks,
        distance=distance.max(axis=1, initial=0.0),
    )


def _bucket_arrays(own: list[Buckets]) -> tuple[FloatArray, FloatArray]:
    """(workloads, buckets) bytes and ready fractions; no bytes where padded."""
    width = max((len(one.size_bytes) for one in own), default=0)
    size, ready = np.zeros((len(own), width)), np.ones((len(own), width))
    for row, one in enumerate(own):
        size[row, : len(one.size_bytes)] = one.size_bytes
        ready[row, : len(one.ready)] = one.ready
    return size, ready


def step_times(line: Timeline, parameters: StepParameters) -> StepTimes:
    """Run the recursion of the module's docstring on every row at once."""
    many = (line.ranks > 1)[:, None]
    slack = 1 + parameters.jitter * _slowest_of(line.ranks)[:, None]
    extra = parameters.ddp_byte_cpu_s * line.gradient_bytes[:, None] + parameters.ddp_cpu_s
    backward = slack * line.backward + many * extra / line.cores
    before = slack * line.before
    collective = parameters.collective_scale * line.collective_s
    taken: FloatArray | None = None
    if line.contended[line.present].any():  # machines with cores to spare have nothing to yield
        each = parameters.contention * line.contended[:, :, None] * line.cpu_core_s[:, None, :] / line.cores[:, :, None]
        taken = np.where(line.present[:, :, None], each, 0.0)
        # the stream cannot be quicker than the CPU that it takes from a rank
        collective = np.maximum(collective, taken.max(axis=1, initial=0.0))
    starts: list[FloatArray] = []
    ends: list[FloatArray] = []
    end = np.zeros(len(before))
    for at in range(collective.shape[1]):
        work = before + line.ready[:, at : at + 1] * backward
        ready = _finish(work, line.present, starts, ends, taken)
        start = np.where(collective[:, at] > 0, np.maximum(end, ready.max(axis=1, initial=0.0)), end)
        end = start + collective[:, at]
        starts.append(start)
        ends.append(end)
    compute = np.where(line.present, before + backward, 0)
    finish = _finish(before + backward, line.present, starts, ends, taken).max(axis=1, initial=0.0)
    return StepTimes(
        step_s=np.maximum(finish, end),
        compute_s=compute.max(axis=1, initial=0.0),
        mean_compute_s=(line.count * compute).sum(axis=1) / np.maximum(line.count.sum(axis=1), 1),
        communication_s=collective.sum(axis=1),
        slowest=compute.argmax(axis=1),
    )


def _finish(
    work: FloatArray,
    present: BoolArray,
    starts: list[FloatArray],
    ends: list[FloatArray],
    taken: FloatArray | None,
) -> FloatArray:
    """When each rank has done `work` seconds of compute, yielding `taken[..., j]` while communication j lasts."""
    time = work
    for at, (start, end) in enumerate(zip(starts, ends, strict=True)):
        if taken is None:
            break
        length = np.maximum((end - start)[:, None], 1e-30)
        rate = np.maximum(1 - np.minimum(taken[:, :, at], length) / length, 1e-6)
        inside = np.maximum(time - start[:, None], 0)
        time = time + np.minimum(inside * (1 / rate - 1), np.minimum(taken[:, :, at], length))
    return np.where(present, time, 0.0)


def _slowest_of(ranks: FloatArray) -> FloatArray:
    """Expected largest of n standard normals (Blom's approximation); 0 for one."""
    return np.where(ranks > 1, ndtri((np.maximum(ranks, 1) - 0.375) / (np.maximum(ranks, 1) + 0.25)), 0.0)
