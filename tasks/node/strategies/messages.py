"""Send tensors between pairs of ranks."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

Message = tuple[Tensor, int]  # the tensor, and the group rank of its receiver or sender


def exchange(send: Message, receive: Message, group: dist.ProcessGroup) -> None:
    """Send and receive a message at the same time, and wait until both are complete.

    Empty messages are skipped. Raises RuntimeError if a peer does not respond within the group's
    timeout.
    """
    operations = [
        dist.P2POp(operation, tensor, group=group, group_peer=peer)
        for operation, (tensor, peer) in ((dist.isend, send), (dist.irecv, receive))
        if tensor.numel()
    ]
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait()


def swap(
    sends: Sequence[Tensor],
    peers: Sequence[int],
    group: dist.ProcessGroup,
    shapes: Sequence[Sequence[int]] | None = None,
) -> list[Tensor]:
    """Send `sends[i]` to `peers[i]`, and return the tensors that the peers send to this rank.

    peers: the ranks that exchange tensors. This rank must be one of them.
    shapes: the shapes of the received tensors. None means the shapes of the sent tensors.

    Autograd can differentiate this function.
    """
    contiguous = [tensor.contiguous() for tensor in sends]
    shapes = [tensor.shape for tensor in sends] if shapes is None else shapes
    return list(_Swap.apply(peers, group, shapes, *contiguous))  # type: ignore[no-untyped-call]


class _Swap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, peers: Any, group: Any, shapes: Any, *sends: Tensor) -> Any:
        ctx.back = partial(swap, peers=peers, group=group, shapes=[each.shape for each in sends])
        received = [sends[0].new_empty(shape) for shape in shapes]
        index = peers.index(dist.get_rank(group))
        received[index].copy_(
            sends[index]
        )  # a copy, because the caller may change the result in place
        # one peer at a time, because simultaneous exchanges would overload this rank's link
        for distance in range(1, len(peers)):
            to, source = (index + distance) % len(peers), (index - distance) % len(peers)
            exchange((sends[to], peers[to]), (received[source], peers[source]), group)
        return tuple(received)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, *ctx.back(gradients)


def completed_future(values: Tensor) -> Future[Tensor]:
    """Return a completed future with result `values`, as DDP expects from a hook."""
    future: Future[Tensor] = Future()
    future.set_result(values)
    return future
