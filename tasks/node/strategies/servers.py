"""Average gradients through parameter servers [Li et al. 2014].

    ps-S    S servers each average 1/S of each gradient bucket. Each of the first S machines has one
            server: its first device. Servers also train

Ranks push gradients and pull their mean, so every rank takes the same optimizer step as in ddp. On
P machines with one device each, a server receives (P - 1) / S of the gradient bytes in the push. It
sends (P - 1) / S in the pull. In a ring all-reduce, a rank receives and sends 2 (P - 1) / P of the
gradient bytes.

With W ranks, a push or a pull has W - 1 rounds. In round r of a push, rank i sends to rank
(i + r) mod W, if that rank is a server. In round r of a pull, server i sends to rank (i + r) mod W.
A server therefore receives from one peer at a time in a push, and sends to one peer at a time in a
pull. Buckets are exchanged one after another.
"""

# DistributedDataParallel compares a hook's annotations with types: no `annotations` import.

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from .messages import exchange, swap

SERVED = ("ps-1", "ps-2", "ps-4")


def servers_of(name: str) -> int:
    return int(name.removeprefix("ps-"))


class Servers:
    """Exchanges gradients between a rank and the parameter servers of the strategy `name`.

    machines: a list with the number of devices of each machine.
    ranks: the ranks that are servers.
    thread: exchanges buckets one after another, if the run uses CPUs.
    """

    def __init__(self, name: str, machines: Sequence[int], group: dist.ProcessGroup) -> None:
        self.group = group
        self.ranks = [0, *accumulate(machines)][: servers_of(name)]
        self.thread = ThreadPoolExecutor(1, "parameter-servers")

    @torch.no_grad()
    def mean(self, values: Tensor) -> Tensor:
        """Return the mean of `values` over ranks. Every rank must call this method.

        `values` and the mean have shape (n,). `values` is overwritten on servers.
        """
        rank, ranks = dist.get_rank(self.group), dist.get_world_size(self.group)
        shares = [values[:0]] * ranks
        for server, share in zip(self.ranks, values.tensor_split(len(self.ranks)), strict=True):
            shares[server] = share
        total, received = shares[rank], torch.empty_like(shares[rank])
        for ahead in range(1, ranks):
            server, source = (rank + ahead) % ranks, (rank - ahead) % ranks
            exchange((shares[server], server), (received, source), self.group)
            total += received
        total /= ranks
        shapes = [share.shape for share in shares]
        return torch.cat(swap([total] * ranks, range(ranks), self.group, shapes))

    def average(
        self,
        bucket: dist.GradBucket,  # type: ignore[name-defined]
    ) -> Future[Tensor]:
        """Average a bucket over ranks (the DDP hook of the parameter-server strategies).

        On a CPU, a thread exchanges the bucket while the backward pass continues.
        """
        future: Future[Tensor] = Future()
        values = bucket.buffer()

        def answer() -> None:
            try:
                future.set_result(self.mean(values))
            except Exception as error:
                future.set_exception(error)  # type: ignore[arg-type]

        # Another thread would use another CUDA stream, which does not wait for the bucket.
        if values.is_cuda:
            answer()
        else:
            self.thread.submit(answer)
        return future
