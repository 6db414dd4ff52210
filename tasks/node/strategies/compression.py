"""Data parallelism whose gradients are sent in fewer bytes: hooks of DistributedDataParallel.

ddp-fp16      torch's own: numbers of 16 bits are summed
ddp-powersgd  torch's own: each matrix as a product of two narrow ones; what they miss stays for the next step
ddp-mstopk    between machines the largest entries alone are sent; what is not sent stays for the next step. Of M
              machines with n devices each, and for a bucket of d values:
                1. inside each machine the gradient is summed, each device having d/n of it
                2. to that a device adds what it kept, and picks the largest p d/n entries: the rest it keeps
                3. devices of one place on all machines send these to each other, as (position, value), and sum them
                4. inside each machine the devices' parts are put together
              Every rank sums in one order, so that all have the same bits [Shi et al. 2021].

Nothing is compressed until DistributedDataParallel has arranged its buckets anew, after the first step. An entry that
is no finite number is sent before all others, so that every rank hears of it as in plain data parallelism.
"""

# No `from __future__ import annotations`: DistributedDataParallel compares a hook's annotations with the types.

from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from math import ceil

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    fp16_compress_hook,
)
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from .mstopk import largest

FP16, POWERSGD, MSTOPK = COMPRESSED = ("ddp-fp16", "ddp-powersgd", "ddp-mstopk")

DENSITY = 0.01  # part of the entries that is sent: what Shi et al. (2021) train with
POWERSGD_RANK = (
    4  # of each matrix: loses no accuracy on the tasks of Vogels et al. (2019), who try 1, 2 and 4
)
_DENSE_STEPS = 2  # the least that torch's PowerSGD allows; as many as are made to warm up


def refuse(name: str, machines: Sequence[int]) -> None:
    """Raises ValueError where `name` cannot train on `machines`, the devices of each, and says what can."""
    if name == MSTOPK and (len(machines) < 2 or len(set(machines)) > 1):
        layout = "+".join(map(str, machines))
        raise ValueError(
            f"{name} on {layout} devices: it needs at least 2 machines with equally many devices each, between which"
            f" the largest entries are exchanged; take ddp, {FP16} or {POWERSGD}, or a layout as 1+1 or 4+4"
        )
    if name == POWERSGD and find_spec("numpy") is None:
        raise ValueError(
            f"{name}: torch's PowerSGD needs numpy, which this machine's Python lacks; install it there"
        )


def wrapped(
    name: str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    group: dist.ProcessGroup,
    machines: Sequence[int],
) -> nn.Module:
    """`model` in DistributedDataParallel with the hook called `name`; `machines`: the devices of each, in rank order.

    Raises ValueError as `refuse` does.
    """
    refuse(name, machines)
    module = DistributedDataParallel(model, process_group=group)
    if name == FP16:
        module.register_comm_hook(group, fp16_compress_hook)
    elif name == POWERSGD:
        state = PowerSGDState(
            group, matrix_approximation_rank=POWERSGD_RANK, start_powerSGD_iter=_DENSE_STEPS
        )
        module.register_comm_hook(state, _powersgd_in_turn)
    else:
        module.register_comm_hook(SparseExchange(group, tuple(machines)), sparse_hook)
    return module


def _powersgd_in_turn(
    state: PowerSGDState,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> Future[Tensor]:
    """A bucket at a time: of several under way, gloo's two threads would wait for each other, and ranks would send them
    in different orders."""
    exchanged = powerSGD_hook(state, bucket)
    exchanged.wait()
    return exchanged


@dataclass(slots=True)
class SparseExchange:
    """The state of `sparse_hook` on one rank; `kept` is by bucket what was not sent yet, of this rank's part of it."""

    group: dist.ProcessGroup
    machines: tuple[int, ...]
    density: float = DENSITY
    dense_steps: int = _DENSE_STEPS
    steps: int = 0
    kept: dict[int, Tensor] = field(default_factory=dict)

    def summed(self, index: int, gradient: Tensor) -> Tensor:
        """(d,) the sum over ranks of `gradient` (d,) of bucket `index`, but for what stays. Every rank must call it.

        Raises RuntimeError where the bucket has another size than before, or a rank does not come in time.
        """
        devices, values = self.machines[0], gradient.to(torch.float32)
        part = ceil(len(values) / devices)
        if part * devices > len(values):
            values = nn.functional.pad(values, (0, part * devices - len(values)))
        machine, place = divmod(dist.get_rank(self.group), devices)
        inside = range(machine * devices, (machine + 1) * devices)
        received = self._swap(values.view(devices, part), inside)
        if index not in self.kept:
            self.kept[index] = torch.zeros_like(received[0])
        own = self.kept[index]
        if len(own) != part:
            raise RuntimeError(f"bucket {index} has {part} values a device, and had {len(own)}")
        for one in (
            received
        ):  # where they were kept: a bucket may be one large table, and a copy of it a whole one
            own += one
        count = ceil(self.density * part)
        picked = largest(own, count)
        sent = torch.cat([picked.to(torch.int32), own[picked].view(torch.int32)])
        own[picked] = 0.0
        peers = range(place, len(self.machines) * devices, devices)
        total = received[0].zero_()
        for other in self._swap(sent.expand(len(peers), -1), peers):
            total[other[:count].long()] += other[count:].view(torch.float32)
        whole = self._swap(total.expand(devices, -1), inside)
        return whole.reshape(-1)[: len(gradient)].to(gradient.dtype)

    def _swap(self, mine: Tensor, peers: range) -> Tensor:
        """(peers, size) what each of `peers` has for this rank, which is one of them and has `mine` (peers, size)."""
        if len(peers) == 1:
            return mine
        splits = [
            mine.shape[1] if rank in peers else 0 for rank in range(dist.get_world_size(self.group))
        ]
        received = torch.empty(mine.shape, dtype=mine.dtype, device=mine.device)
        dist.all_to_all_single(
            received.view(-1), mine.reshape(-1), splits, splits, group=self.group
        )
        return received


def sparse_hook(
    state: SparseExchange,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> Future[Tensor]:
    """The mean of a bucket over ranks, by `state`; dense in the first steps."""
    gradient = bucket.buffer()
    dense = state.steps < state.dense_steps
    state.steps += bucket.is_last()
    if dense:
        return allreduce_hook(state.group, bucket)
    found: Future[Tensor] = Future()
    found.set_result(state.summed(bucket.index(), gradient.div_(dist.get_world_size(state.group))))
    return found
