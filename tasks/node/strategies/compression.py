"""Compress gradients in communication hooks of DistributedDataParallel.

ddp-fp16      torch's hook: gradients are averaged in 16-bit floats
ddp-powersgd  torch's hook: a matrix is sent as the product of two narrow matrices, with error
              feedback
ddp-mstopk    only the largest entries are sent between machines, with error feedback. Each machine
              has n devices. Of the d values of a bucket, the fraction p is sent:
                1. Each machine sums the gradients of its devices. Each device holds d/n of the sum.
                2. A device adds its residual and picks the largest p d/n entries. The other entries
                   become its new residual.
                3. The devices with the same index on all machines exchange their picked entries as
                   (position, value), and sum them.
                4. Each machine gathers the sums of its devices.
              All ranks sum in the same order, so they end with the same bits [Shi et al. 2021].

ddp-powersgd and ddp-mstopk do not compress the first steps, because DistributedDataParallel
rebuilds its buckets after the first step. ddp-mstopk picks infinities and NaN before all other
entries, so that every rank receives these entries, as in ddp.
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

from .messages import completed_future, swap
from .mstopk import largest

FP16, POWERSGD, MSTOPK = COMPRESSED = ("ddp-fp16", "ddp-powersgd", "ddp-mstopk")

# Fraction of the entries that is sent: the value of Shi et al. (2021). It is no setting, because
# runs of kind `learn` reject the strategy for workloads that learn too little with it.
DENSITY = 0.01
POWERSGD_RANK = 4  # with rank 4, the tasks of Vogels et al. (2019) lose no accuracy
DENSE_STEPS = 2  # number of uncompressed first steps; the minimum of torch's PowerSGD


def powersgd_hook(
    state: PowerSGDState,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> Future[Tensor]:
    """Run torch's PowerSGD hook, and block until its messages are exchanged.

    Without the wait, several buckets would be exchanged at once, and gloo's two threads could
    deadlock.
    """
    exchanged = powerSGD_hook(state, bucket)
    exchanged.wait()
    return exchanged


@dataclass
class SparseExchange:
    """The state of strategy ddp-mstopk on a rank, and its exchange of gradients.

    machines: a list with the number of devices of each machine. All numbers must be equal.
    density: the fraction of the entries that is sent.
    residuals: {index of a bucket: the values that this rank has not sent yet}.
    steps: the number of finished steps.
    """

    group: dist.ProcessGroup
    machines: tuple[int, ...]
    density: float = DENSITY
    steps: int = 0
    residuals: dict[int, Tensor] = field(default_factory=dict)

    def exchange_largest(self, index: int, gradient: Tensor) -> Tensor:
        """Sum `gradient` over ranks, but send only the largest entries between machines.

        `gradient` and the result have shape (d,). The result is 0 at entries that no machine sends.
        Unsent values stay in `residuals[index]`, and are added to the bucket's next gradient. Every
        rank must call this method.

        index: the number of the gradient's bucket.

        Raises RuntimeError if a rank does not respond within the group's timeout.
        """
        devices, share = self.machines[0], ceil(len(gradient) / self.machines[0])
        machine, place = divmod(dist.get_rank(self.group), devices)
        inside = range(machine * devices, (machine + 1) * devices)
        across = range(place, len(self.machines) * devices, devices)
        values = nn.functional.pad(gradient.float(), (0, share * devices - len(gradient)))
        received = swap(values.view(devices, share).unbind(), inside, self.group)
        if index not in self.residuals:
            self.residuals[index] = torch.zeros_like(received[0])
        residual = self.residuals[index]
        for theirs in received:  # in place, to save memory for large embedding tables
            residual += theirs
        count = ceil(self.density * share)
        picked = largest(residual, count)
        sent = torch.cat([picked.to(torch.int32), residual[picked].view(torch.int32)])
        residual[picked] = 0.0
        total = received[0].zero_()
        for theirs in swap([sent] * len(across), across, self.group):
            total[theirs[:count].long()] += theirs[count:].view(torch.float32)
        whole = torch.cat(swap([total] * devices, inside, self.group))
        return whole[: len(gradient)].to(gradient.dtype)

    def average(
        self,
        bucket: dist.GradBucket,  # type: ignore[name-defined]
    ) -> Future[Tensor]:
        """Average the largest entries of a bucket over ranks (the DDP hook of ddp-mstopk).

        In the first DENSE_STEPS steps, all entries are averaged.
        """
        is_dense = self.steps < DENSE_STEPS
        self.steps += bucket.is_last()
        if is_dense:
            return allreduce_hook(self.group, bucket)
        gradient = bucket.buffer().div_(dist.get_world_size(self.group))
        return completed_future(self.exchange_largest(bucket.index(), gradient))
