"""Data parallelism through parameter servers [Li et al. 2014], which sum what all devices send them and send it back.

    ps-S    the first device of each of the first S machines is a server, beside what it trains; each has an Sth of
            every bucket

Gradients are pushed and their mean is pulled, so that the optimizer's step is every device's own, as in ddp, and is the
same step: one server sums an entry, and sends it to all. Of P devices, each on its own machine, a server
receives (P - 1) / S of all gradients and then sends as much; a ring sends and receives 2 (P - 1) / P.

In round r of a push rank i sends to rank i + r, where that is a server; of a pull a server i sends to rank i + r. So it
has one peer at a time. A bucket is pushed and pulled while the backward pass goes on, one bucket after the other.
"""

# No `from __future__ import annotations`: DistributedDataParallel compares a hook's annotations with the types.

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

SERVED = ("ps-1", "ps-2", "ps-4")


def refuse(name: str, machines: Sequence[int]) -> None:
    """Raises ValueError where `machines`, the devices of each, have no place for as many servers; says what has."""
    count = servers_of(name)
    if len(machines) < max(count, 2):
        fitting = [one for one in SERVED if servers_of(one) <= len(machines) > 1]
        raise ValueError(
            f"{name} on {len(machines)} machine{'s' * (len(machines) != 1)}: servers lie between machines, at most one"
            f" on each; take {' or '.join(['ddp', *fitting])}"
        )


def servers_of(name: str) -> int:
    """How many servers the strategy called `name` has."""
    return int(name.removeprefix("ps-"))


def wrapped(
    name: str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    group: dist.ProcessGroup,
    machines: Sequence[int],
) -> nn.Module:
    """`model` in DistributedDataParallel with servers; `machines` are the devices of each, in rank order.

    Raises ValueError as `refuse` does.
    """
    refuse(name, machines)
    module = DistributedDataParallel(model, process_group=group)
    first = [0, *accumulate(machines)][: servers_of(name)]
    module.register_comm_hook(Servers(group, tuple(first)), through_servers)
    return module


@dataclass(slots=True)
class Servers:
    """One rank's end of the exchange; `ranks` are the servers."""

    group: dist.ProcessGroup
    ranks: tuple[int, ...]
    thread: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, "parameter-servers")
    )

    def exchange(self, values: Tensor, found: Future[Tensor]) -> None:
        """Puts the mean over ranks, or why there is none, into `found`."""
        try:
            found.set_result(self.averaged(values))
        except Exception as error:
            found.set_exception(error)  # type: ignore[arg-type]  # it takes any object, as torch's own callers do

    @torch.no_grad()
    def averaged(self, values: Tensor) -> Tensor:
        """(n,) `values` with the mean over ranks in their place. Every rank must call it.

        Raises RuntimeError where one does not come within the group's timeout.
        """
        rank, many = dist.get_rank(self.group), dist.get_world_size(self.group)
        part_of = dict(zip(self.ranks, torch.tensor_split(values, len(self.ranks)), strict=True))
        own = part_of.get(rank)
        received = None if own is None else torch.empty_like(own)
        for ahead in range(1, many):
            server = (rank + ahead) % many
            self._swap(part_of.get(server), server, received, (rank - ahead) % many)
            if own is not None and received is not None:
                own += received
        if own is not None:
            own /= many
        for ahead in range(1, many):
            server = (rank - ahead) % many
            self._swap(own, (rank + ahead) % many, part_of.get(server), server)
        return values

    def _swap(self, given: Tensor | None, to: int, received: Tensor | None, sender: int) -> None:
        """Sends and receives at once; None and what is empty are not sent."""
        asked = [
            dist.P2POp(how, what, group=self.group, group_peer=peer)
            for how, what, peer in ((dist.isend, given, to), (dist.irecv, received, sender))
            if what is not None and what.numel()
        ]
        for work in dist.batch_isend_irecv(asked) if asked else ():
            work.wait()


def through_servers(
    state: Servers,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> Future[Tensor]:
    """The mean of a bucket over ranks; on a processor beside the backward pass."""
    found: Future[Tensor] = Future()
    values = bucket.buffer()
    if values.is_cuda:  # another thread would exchange on a stream of its own, beside what still computes the bucket
        state.exchange(values, found)
    else:
        state.thread.submit(state.exchange, values, found)
    return found
