"""Messages between single ranks, several under way at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

Message = tuple[Tensor, int]  # and the peer it goes to, or comes from


def exchange(
    sends: Iterable[Message], receives: Iterable[Message], group: dist.ProcessGroup
) -> None:
    """Send and receive at once; empty tensors are not sent.

    Raises RuntimeError if a peer does not answer within the group's timeout.
    """
    operations = [
        dist.P2POp(operation, tensor, group=group, group_peer=peer)
        for operation, messages in ((dist.isend, sends), (dist.irecv, receives))
        for tensor, peer in messages
        if tensor.numel()
    ]
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait()


def exchange_lists(
    sends: Sequence[Sequence[Tensor]],
    shapes: Sequence[Sequence[Sequence[int]]],
    like: Tensor,
    group: dist.ProcessGroup,
) -> list[list[Tensor]]:
    """Send each rank its tensors in one message; return each rank's tensors, of `shapes`.

    All have the type and device of `like`.
    """
    outgoing = [tensor.flatten() for tensors in sends for tensor in tensors]
    sent = torch.cat([like.new_empty(0), *outgoing])
    sent_sizes = [sum(tensor.numel() for tensor in tensors) for tensors in sends]
    sizes = [[torch.Size(shape).numel() for shape in theirs] for theirs in shapes]
    received_sizes = [sum(theirs) for theirs in sizes]
    received = sent.new_empty(sum(received_sizes))
    dist.all_to_all_single(received, sent, received_sizes, sent_sizes, group=group)
    return [
        [part.view(shape) for part, shape in zip(torch.split(message, own), theirs, strict=True)]
        for message, own, theirs in zip(
            torch.split(received, received_sizes), sizes, shapes, strict=True
        )
    ]
