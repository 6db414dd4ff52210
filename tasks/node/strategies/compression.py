"""Data parallelism that sends gradients in fewer bytes: hooks of DistributedDataParallel.

ddp-fp16      torch's hook: 16-bit numbers are summed
ddp-powersgd  torch's hook: a matrix is sent as a product of two narrow ones, with error feedback
ddp-mstopk    only the largest entries travel between machines, with error feedback. For M machines
              of n devices, and a bucket of d values:
                1. each machine sums the gradient; each device has d/n of the sum
                2. a device adds its residual and picks the largest p d/n entries; the rest is its
                   new residual
                3. devices of one place on all machines exchange these as (position, value)
                4. each machine gathers the sums of its devices
              All ranks sum in one order and so have the same bits [Shi et al. 2021].

Nothing is compressed until DistributedDataParallel has rebuilt its buckets, after the first step.
Entries that are not finite are sent first, so that every rank receives them as in ddp.
"""

# DistributedDataParallel compares a hook's annotations with types: no `annotations` import.

from dataclasses import dataclass, field
from math import ceil

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.futures import Future

from .messages import swap
from .mstopk import largest

FP16, POWERSGD, MSTOPK = COMPRESSED = ("ddp-fp16", "ddp-powersgd", "ddp-mstopk")

DENSITY = 0.01  # share of the entries that is sent, as in Shi et al. (2021)
POWERSGD_RANK = 4  # loses no accuracy on the tasks of Vogels et al. (2019), who try 1, 2 and 4
_DENSE_STEPS = 2  # the minimum of torch's PowerSGD; the warm-up has as many


def powersgd_hook(
    state: PowerSGDState,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> Future[Tensor]:
    """Send one bucket at a time: gloo's two threads would wait for each other over several."""
    exchanged = powerSGD_hook(state, bucket)
    exchanged.wait()
    return exchanged


def powersgd_state(group: dist.ProcessGroup) -> PowerSGDState:
    return PowerSGDState(
        group, matrix_approximation_rank=POWERSGD_RANK, start_powerSGD_iter=_DENSE_STEPS
    )


@dataclass(slots=True)
class SparseExchange:
    """State of `sparse_hook` on a rank; `residuals` by bucket, of this rank's share of it."""

    group: dist.ProcessGroup
    machines: tuple[int, ...]
    density: float = DENSITY
    steps: int = 0
    residuals: dict[int, Tensor] = field(default_factory=dict)

    def summed(self, index: int, gradient: Tensor) -> Tensor:
        """(d,) the sum over ranks of `gradient` (d,) of bucket `index`, less the residuals.

        Every rank must call it. Raises RuntimeError if a rank does not answer in time.
        """
        devices, share = self.machines[0], ceil(len(gradient) / self.machines[0])
        machine, place = divmod(dist.get_rank(self.group), devices)
        inside = range(machine * devices, (machine + 1) * devices)
        across = range(place, len(self.machines) * devices, devices)
        values = gradient.float()
        if share * devices > len(values):
            values = nn.functional.pad(values, (0, share * devices - len(values)))
        received = swap(values.view(devices, share).unbind(), inside, self.group)
        if index not in self.residuals:
            self.residuals[index] = torch.zeros_like(received[0])
        own = self.residuals[index]
        for theirs in received:  # in place: a bucket may be one large table
            own += theirs
        count = ceil(self.density * share)
        picked = largest(own, count)
        sent = torch.cat([picked.to(torch.int32), own[picked].view(torch.int32)])
        own[picked] = 0.0
        total = received[0].zero_()
        for theirs in swap([sent] * len(across), across, self.group):
            total[theirs[:count].long()] += theirs[count:].view(torch.float32)
        whole = torch.cat(swap([total] * devices, inside, self.group))
        return whole[: len(gradient)].to(gradient.dtype)


def sparse_hook(
    state: SparseExchange,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> Future[Tensor]:
    """Average a bucket over ranks by `state`; dense in the first steps."""
    gradient = bucket.buffer()
    is_dense = state.steps < _DENSE_STEPS
    state.steps += bucket.is_last()
    if is_dense:
        return allreduce_hook(state.group, bucket)
    future: Future[Tensor] = Future()
    ranks = dist.get_world_size(state.group)
    future.set_result(state.summed(bucket.index(), gradient.div_(ranks)))
    return future
