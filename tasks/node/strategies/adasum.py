"""Adasum [Maleki et al. 2020, "Scaling distributed training with adaptive summation"] instead of averaging.

    Adasum(a, b) = (1 - a.b / 2 |a|^2) a + (1 - a.b / 2 |b|^2) b      of each parameter by itself

Orthogonal vectors are added, parallel ones averaged, and a zero vector leaves the other. Dots are summed in float64.

adasum        gradients are combined as they come, by a hook of DistributedDataParallel, before the optimizer's step
adasum-delta  each rank makes its own optimizer's step; then what this changed in the weights is combined

Of 2^m ranks by recursive halving and doubling. At level k rank r and rank r xor 2^k hold one part each of two vectors:
each keeps a half of the part and sends the other; three doubles a parameter are summed over the 2^(k+1) ranks that
share the two vectors; each combines its half. After the last level halves are sent back. A rank sends 2 (P - 1) / P of
the values, as a ring does, and 24 m (m + 1) / 2 bytes a parameter. Every entry is combined by one rank and sent on, so
that all ranks have the same bits; no number at one rank is none at all of them.
"""

# No `from __future__ import annotations`: DistributedDataParallel compares a hook's annotations with the types.

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

GRADIENTS, DELTAS = ADASUM = ("adasum", "adasum-delta")
_BLOCK = 2**18  # values that are doubles at a time: they stay in a processor's cache


def refuse(name: str, machines: Sequence[int]) -> None:
    """Raises ValueError where so many devices, those of each machine, cannot be combined in pairs; says what can."""
    ranks = sum(machines)
    if ranks < 2 or ranks & (ranks - 1):
        below = 1 << (ranks.bit_length() - 1)
        fitting = "2 devices" if ranks < 2 else f"{below} or {2 * below} devices"
        raise ValueError(
            f"{name} on {ranks} device{'s' * (ranks != 1)}: vectors are combined in pairs, and these in pairs, so"
            f" that a power of two is needed; take ddp, or {fitting}"
        )


def wrapped(
    name: str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    group: dist.ProcessGroup,
    machines: Sequence[int],
) -> nn.Module:
    """`model` in DistributedDataParallel, which averages nothing; `machines` are the devices of each, in rank order.

    Raises ValueError as `refuse` does, and where the weights that `optimizer` changes cannot be told.
    """
    refuse(name, machines)
    module = DistributedDataParallel(model, process_group=group)
    if name == GRADIENTS:
        module.register_comm_hook(group, combine_gradients)
        return module
    if not getattr(
        type(optimizer).step, "hooked", False
    ):  # its class does not call torch's constructor
        raise ValueError(
            f"{name}: {type(optimizer).__name__} calls no step hooks, by which its changes are combined; call"
            f" torch.optim.Optimizer.__init__ in it, or take {GRADIENTS}"
        )
    deltas = Deltas(group, [one for one in model.parameters() if one.requires_grad])
    module.register_comm_hook(deltas, leave_gradients)
    optimizer.register_step_pre_hook(deltas.remember)
    optimizer.register_step_post_hook(deltas.combine)
    return module


def combine_gradients(
    group: dist.ProcessGroup,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> Future[Tensor]:
    """A bucket's gradients over ranks; parameters are never divided among buckets.

    A bucket at a time: of several under way, ranks might send them in different orders.
    """
    values = bucket.buffer()
    if values.is_sparse:
        raise RuntimeError(
            f"{GRADIENTS}: sparse gradients are not combined; make embeddings with sparse=False"
        )
    wide = _wide(values)
    combine(wide, [one.numel() for one in bucket.gradients()], group)
    return _found(values if wide is values else values.copy_(wide))


@dataclass(slots=True)
class Deltas:
    """The weights of one rank; `due` once its gradients are those of a whole step, which is to be combined.

    A step without communication, as measured for `sync_s`, stays the rank's own.
    """

    group: dist.ProcessGroup
    weights: list[Tensor]
    due: bool = False
    before: Tensor = field(default_factory=lambda: torch.empty(0))

    def remember(self, *_: Any) -> None:
        """Before the optimizer's step."""
        if self.due:
            self.before = self._flat()

    @torch.no_grad()
    def combine(self, *_: Any) -> None:
        """After it: weights are those before and the combined change, alike on all ranks."""
        if not self.due:
            return
        self.due = False
        sizes = [one.numel() for one in self.weights]
        change = self._flat().sub_(self.before)
        combine(change, sizes, self.group)
        for weight, now in zip(
            self.weights, torch.split(self.before.add_(change), sizes), strict=True
        ):
            weight.copy_(now.view(weight.shape))
        self.before = torch.empty(0)

    def _flat(self) -> Tensor:
        return _wide(torch.cat([one.detach().reshape(-1) for one in self.weights]))


def leave_gradients(
    deltas: Deltas,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> Future[Tensor]:
    """A bucket as it is on this rank."""
    deltas.due |= bucket.is_last()
    return _found(bucket.buffer())


def combine(values: Tensor, sizes: Sequence[int], group: dist.ProcessGroup) -> None:
    """Puts the Adasum over `group`, 2^m ranks, in place of `values` (n,): parameters of `sizes` one after another.

    Every rank must call it. Raises RuntimeError where one does not come within the group's timeout.
    """
    rank, begin, end = dist.get_rank(group), 0, len(values)
    halvings = []
    for distance in _doublings(dist.get_world_size(group)):
        peer, middle = rank ^ distance, (begin + end) // 2
        halves = (begin, middle), (middle, end)
        first = not rank & distance
        (begin, end), given = halves if first else halves[::-1]
        own, theirs = values[begin:end], torch.empty_like(values[begin:end])
        _swap(values[slice(*given)], theirs, peer, group)
        inside = parts(sizes, begin, end)
        dots = dots_of(own, theirs, inside) if first else dots_of(theirs, own, inside)
        for near in _doublings(2 * distance):
            others = torch.empty_like(dots)
            _swap(dots, others, rank ^ near, group)
            dots += others
        blend(own, theirs, factors(dots) if first else factors(dots).flip(1), inside)
        halvings.append((peer, slice(begin, end), slice(*given)))
    for peer, mine, given_back in reversed(halvings):
        _swap(values[mine], values[given_back], peer, group)


def pair(first: Tensor, second: Tensor, sizes: Sequence[int]) -> Tensor:
    """(n,) the Adasum of two vectors (n,) of parameters of `sizes`, as two ranks have it."""
    inside = parts(sizes, 0, len(first))
    own = first.clone()
    blend(own, second, factors(dots_of(first, second, inside)), inside)
    return own


def parts(sizes: Sequence[int], begin: int, end: int) -> list[slice]:
    """By parameter which of the values from `begin` to `end` are its own, counted from `begin`; maybe none."""
    found, at = [], 0
    for size in sizes:
        low, high = (min(max(one, begin), end) - begin for one in (at, at + size))
        found.append(slice(low, high))
        at += size
    return found


def dots_of(first: Tensor, second: Tensor, inside: Sequence[slice]) -> Tensor:
    """(parameters, 3) first.second, |first|^2 and |second|^2 of each, as doubles."""
    found = torch.zeros(len(inside), 3, dtype=torch.float64, device=first.device)
    for row, part in zip(found, inside, strict=True):
        for some, others in zip(
            *(torch.split(one[part], _BLOCK) for one in (first, second)), strict=True
        ):
            a, b = some.double(), others.double()
            row += torch.stack([a @ b, a @ a, b @ b])
    return found


def factors(dots: Tensor) -> Tensor:
    """(parameters, 2) what the first and the second vector are multiplied by before they are added."""
    product, squares = dots[:, :1], dots[:, 1:]
    return torch.where(squares == 0, 1.0, 1 - product / (2 * squares))


def blend(own: Tensor, theirs: Tensor, by: Tensor, inside: Sequence[slice]) -> None:
    """Puts by[:, 0] own + by[:, 1] theirs of each parameter in place of `own`."""
    for (mine, other), part in zip(by, inside, strict=True):
        own[part].mul_(mine).add_(theirs[part] * other)


def _doublings(below: int) -> Iterator[int]:
    """1, 2, 4 ... `below` / 2."""
    return (1 << level for level in range(below.bit_length() - 1))


def _swap(given: Tensor, received: Tensor, peer: int, group: dist.ProcessGroup) -> None:
    """Sends and receives at once; what is empty is not sent."""
    wanted = [(dist.isend, given.contiguous()), (dist.irecv, received)]
    asked = [
        dist.P2POp(how, what, group=group, group_peer=peer) for how, what in wanted if what.numel()
    ]
    for work in dist.batch_isend_irecv(asked) if asked else ():
        work.wait()


def _wide(values: Tensor) -> Tensor:
    """As 32 bits at least."""
    return values if values.dtype in (torch.float32, torch.float64) else values.float()


def _found(values: Tensor) -> Future[Tensor]:
    future: Future[Tensor] = Future()
    future.set_result(values)
    return future
