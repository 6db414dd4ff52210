"""Embedding tables that lie whole on one rank each, beside data parallelism for all else [Naumov et al. 2019].

    tables  each nn.Embedding and nn.EmbeddingBag of an unmodified model lies on one rank, the largest first, where
            fewest numbers lie so far; ranks send it their indices, and it sends rows, or sums of rows, back

Gradients go the other way, and a step is that of ddp, up to rounding. What a rank sends for a table grows with its
samples and not with the table. Where ranks have unequal batches, tables lie on those alone that have the smallest:
hosts with much memory look up for hosts that compute.

All tables are looked up in one exchange before the model's own forward pass, so each has to be given a part of what the
model is given, as it is: at the first step a pass without gradients tells which part. What a table is given that the
model has computed, of another size than in the first step, or twice a step, is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

TABLES = "tables"
_KINDS = (nn.Embedding, nn.EmbeddingBag)

Table = nn.Embedding | nn.EmbeddingBag


def refuse(name: str, machines: Sequence[int]) -> None:
    """Raises ValueError where there is no second device."""
    if sum(machines) < 2:
        raise ValueError(f"{name} on 1 device: there is nothing to share out; take ddp")


def refuse_model(name: str, model: nn.Module) -> None:
    """Raises ValueError where a model has no table, or one that cannot lie elsewhere."""
    found = _tables(model)
    if not found:
        raise ValueError(f"{name}: this model has no nn.Embedding and no nn.EmbeddingBag; take ddp")
    uses = [id(part) for module in model.modules() for part in module.children()]
    for path, table in found.items():
        if table.sparse or table.max_norm is not None or table.scale_grad_by_freq:
            raise ValueError(
                f"{name}: {path} has sparse gradients, max_norm or scale_grad_by_freq, which it cannot have elsewhere;"
                " take ddp"
            )
        shared = sum(
            table.weight is one
            for module in model.modules()
            for one in module.parameters(recurse=False)
        )
        if uses.count(id(table)) > 1 or shared > 1:
            raise ValueError(
                f"{name}: {path} is in two places of the model, which have to have it both; take ddp"
            )


def wrapped(
    name: str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    group: dist.ProcessGroup,
    machines: Sequence[int],
) -> nn.Module:
    """The model, each of its tables on one rank, whose `optimizer` trains it. Raises ValueError as the refusals do."""
    refuse(name, machines)
    refuse_model(name, model)
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        raise ValueError(
            f"{name}: a hook of the optimizer's steps, such as one that clips, sees a table on one rank alone;"
            " take ddp or fsdp"
        )
    return Elsewhere(model, optimizer, group)


@dataclass(frozen=True, slots=True)
class Part:
    """Which numbers of which of the model's inputs a table is given."""

    leaf: int
    of_leaf: tuple[torch.Size, tuple[int, ...]]  # its size and strides
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, path: str, leaves: Sequence[Tensor]) -> Tensor:
        """The indices. Raises ValueError where the input they are of is laid out otherwise than in the first step."""
        leaf = leaves[self.leaf]
        if (leaf.shape, leaf.stride()) != self.of_leaf:
            changed = (
                f"a part of {tuple(leaf.shape)} numbers, and of {tuple(self.of_leaf[0])} before"
            )
            raise ValueError(
                f"{TABLES}: {path} is given {changed}; take ddp, or batches of one size"
            )
        return leaf.as_strided(self.size, self.stride, leaf.storage_offset() + self.offset)


class _Seat(nn.Module):
    """Where a table was: answers with what has come of it, or notes what it is asked."""

    def __init__(self, path: str, width: int, pools: bool) -> None:
        super().__init__()
        self.path, self.width, self.pools = path, width, pools
        self.asked: list[Tensor] = []
        self.answer: Tensor | None = None
        self.notes = False

    def forward(
        self, input: Tensor, *others: Any, **named: Any
    ) -> Tensor:  # as torch's own calls it
        """Raises ValueError where more than indices is given, or once too often."""
        if any(one is not None for one in (*others, *named.values())):
            raise ValueError(
                f"{TABLES}: {self.path} is given offsets or weights beside indices; take ddp"
            )
        if self.notes:
            self.asked.append(input)
            size = input.shape[:1] if self.pools else input.shape
            return torch.zeros(*size, self.width, device=input.device)
        if self.answer is None:
            raise ValueError(f"{TABLES}: {self.path} is asked twice in a step; take ddp")
        answer, self.answer = self.answer, None
        return answer


@dataclass(slots=True)
class Settled:
    """What the first step told: by table its part and owner, and samples of each rank."""

    parts: list[Part]
    owners: list[int]
    samples: list[int]


class Elsewhere(nn.Module):
    """Called as the model is. Every rank of the group must call it."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, group: dist.ProcessGroup
    ) -> None:
        super().__init__()
        self.optimizer = optimizer
        self.rank, self.many = dist.get_rank(group), dist.get_world_size(group)
        device = next(model.parameters()).device
        self.group = group
        self.tables = _tables(model)
        for table in self.tables.values():
            dist.broadcast(table.weight.data, group=group, group_src=0)
        self.seats = [
            _Seat(path, one.embedding_dim, isinstance(one, nn.EmbeddingBag))
            for path, one in self.tables.items()
        ]
        for seat in self.seats:
            _put(model, seat.path, seat)
        whole = any(one.requires_grad for one in model.parameters())
        self.module = DistributedDataParallel(model, process_group=group) if whole else model
        self.start = torch.zeros((), requires_grad=True, device=device)
        self.settled: Settled | None = None
        self.mine: dict[int, Table] = {}

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Raises ValueError where a table is asked for what cannot be told beforehand."""
        leaves = [one for one in tree_leaves((inputs, named)) if isinstance(one, Tensor)]
        if self.settled is None:
            self.settled = self._settle(inputs, named, leaves)
        asked = [
            one.of(path, leaves) for path, one in zip(self.tables, self.settled.parts, strict=True)
        ]
        for seat, answer in zip(self.seats, _Looked.apply(self.start, self, asked), strict=True):  # type: ignore[no-untyped-call]
            seat.answer = answer
        found = self.module(*inputs, **named)
        for seat in self.seats:
            if seat.answer is not None:
                raise ValueError(f"{TABLES}: {seat.path} is not asked in every step; take ddp")
        return found

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients of all but tables stay as each rank has them."""
        inner: AbstractContextManager[None] = nullcontext()
        if isinstance(self.module, DistributedDataParallel):
            inner = self.module.no_sync()
        with inner:
            yield

    def _settle(
        self, inputs: tuple[Any, ...], named: dict[str, Any], leaves: Sequence[Tensor]
    ) -> Settled:
        """What a pass without gradients tells, agreed on by all ranks; leaves each table with its owner alone."""
        problem, parts = "", []
        try:
            parts = self._parts(inputs, named, leaves)
        except ValueError as error:
            problem = str(error)
        told: list[Any] = [None] * self.many
        dist.all_gather_object(told, (problem, [one.size for one in parts]), group=self.group)
        for problem, _ in told:
            if problem:
                raise ValueError(problem)
        for rank, (_, sizes) in enumerate(told):
            for path, first, own in zip(self.tables, told[0][1], sizes, strict=True):
                if own[1:] != first[1:]:
                    raise ValueError(
                        f"{TABLES}: {path} is given indices of {first} on rank 0, of {own} on rank {rank}; take ddp, or"
                        " batches padded alike"
                    )
        samples = [int(sizes[0][0]) for _, sizes in told]
        owners = self._owners([rank for rank, many in enumerate(samples) if many == min(samples)])
        left = set()
        for place, (owner, table) in enumerate(zip(owners, self.tables.values(), strict=True)):
            if owner == self.rank:
                self.mine[place] = table
            else:
                left.add(table.weight)
        for held in self.optimizer.param_groups:
            held["params"] = [one for one in held["params"] if one not in left]
        for weight in left:
            self.optimizer.state.pop(weight, None)
            weight.data = weight.data.new_empty(0)
        return Settled(parts, owners, samples)

    def _parts(
        self, inputs: tuple[Any, ...], named: dict[str, Any], leaves: Sequence[Tensor]
    ) -> list[Part]:
        model = (
            self.module.module if isinstance(self.module, DistributedDataParallel) else self.module
        )
        training = {module: module.training for module in model.modules()}
        for seat in self.seats:
            seat.notes = True
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                model.eval()(*inputs, **named)
        finally:
            for module, before in training.items():
                module.training = before
            for seat in self.seats:
                seat.notes = False
        parts = []
        for seat in self.seats:
            if len(seat.asked) != 1:
                raise ValueError(
                    f"{TABLES}: {seat.path} is asked {len(seat.asked)} times in a step, not once; take ddp"
                )
            parts.append(
                _part(seat.path, seat.asked.pop(), leaves, int(next(iter(leaves)).shape[0]))
            )
        return parts

    def _owners(self, able: Sequence[int]) -> list[int]:
        """By table the rank it lies on: the largest first, each where fewest bytes lie so far."""
        lies = dict.fromkeys(able, 0)
        found: dict[str, int] = {}
        for path, table in sorted(self.tables.items(), key=lambda one: -one[1].weight.numel()):
            found[path] = min(lies, key=lambda rank: (lies[rank], rank))
            lies[found[path]] += table.weight.numel()
        return [found[path] for path in self.tables]

    def numbers(self, place: int, rank: int, width: int = 0) -> int:
        """How many indices a rank has for a table, or numbers of `width` come back for them."""
        settled = self.settled
        assert settled is not None
        own = (settled.samples[rank], *settled.parts[place].size[1:])
        if width and self.seats[place].pools:
            own = own[:1]
        return prod(own) * max(width, 1)

    def swapped(
        self, given: Sequence[Tensor], to_owners: bool, widths: Sequence[int]
    ) -> list[Tensor]:
        """All numbers of each table to its owner, or from it to all; (numbers,) one a rank and table of its own, or a
        table."""
        owners = self.settled.owners if self.settled is not None else []
        ranks, places = range(self.many), range(len(owners))
        away = [
            sum(self.numbers(one, self.rank, widths[one]) for one in places if owners[one] == to)
            for to in ranks
        ]
        here = [sum(self.numbers(one, rank, widths[one]) for one in self.mine) for rank in ranks]
        sent, received = (away, here) if to_owners else (here, away)
        outgoing = list(torch.split(torch.cat([one.reshape(-1) for one in given]), sent))
        incoming = [outgoing[self.rank].new_empty(many) for many in received]
        incoming[self.rank] = outgoing[self.rank]
        asked = [
            dist.P2POp(how, one, group=self.group, group_peer=peer)
            for peer in ranks
            if peer != self.rank
            for how, one in ((dist.isend, outgoing[peer]), (dist.irecv, incoming[peer]))
            if one.numel()
        ]
        for work in dist.batch_isend_irecv(asked) if asked else ():
            work.wait()
        return incoming


class _Looked(torch.autograd.Function):
    """What all tables answer a rank, in the order of seats."""

    @staticmethod
    def forward(
        ctx: Any, start: Tensor, state: Elsewhere, asked: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        settled = state.settled
        assert settled is not None
        places, ranks = range(len(asked)), range(state.many)
        by_owner = [
            asked[one].to(torch.int32)
            for rank in ranks
            for one in places
            if settled.owners[one] == rank
        ]
        plain = [0] * len(asked)
        got = state.swapped(by_owner, True, plain)
        ctx.state, ctx.looked = state, []
        rows = []
        for rank_numbers, rank in zip(got, ranks, strict=True):
            pieces = torch.split(rank_numbers, [state.numbers(one, rank) for one in state.mine])
            shapes = [(settled.samples[rank], *settled.parts[one].size[1:]) for one in state.mine]
            rows.append([piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)])
        for at, table in enumerate(state.mine.values()):
            with torch.enable_grad():
                ctx.looked.append(table(torch.cat([own[at] for own in rows])))
        answers = [
            [part.detach() for part in torch.split(one, settled.samples)] for one in ctx.looked
        ]
        ctx.widths = [seat.width for seat in state.seats]
        back = [own[rank] for rank in ranks for own in answers] or [start.new_empty(0)]
        came = state.swapped(back, False, ctx.widths)
        found: list[Tensor] = [start] * len(asked)
        for owner, numbers in enumerate(came):
            theirs = [place for place in places if settled.owners[place] == owner]
            sizes = [state.numbers(place, state.rank, ctx.widths[place]) for place in theirs]
            for place, answer in zip(theirs, torch.split(numbers, sizes), strict=True):
                shape = asked[place].shape[:1] if state.seats[place].pools else asked[place].shape
                found[place] = answer.view(*shape, ctx.widths[place])
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        state, settled = ctx.state, ctx.state.settled
        ranks = range(state.many)
        by_owner = [
            one
            for rank in ranks
            for one, owner in zip(gradients, settled.owners, strict=True)
            if owner == rank
        ]
        came = state.swapped(by_owner, True, ctx.widths)
        pieces = [
            torch.split(numbers, [state.numbers(one, rank, ctx.widths[one]) for one in state.mine])
            for rank, numbers in zip(ranks, came, strict=True)
        ]
        for at, looked in enumerate(ctx.looked):
            if looked.requires_grad:
                gradient = torch.cat([own[at] for own in pieces]).view(looked.shape) / state.many
                torch.autograd.backward(looked, gradient)
        return None, None, None


def _part(path: str, indices: Tensor, leaves: Sequence[Tensor], samples: int) -> Part:
    """Where in the inputs the indices lie. Raises ValueError where they do not."""
    for at, leaf in enumerate(leaves):
        same = (
            leaf.untyped_storage().data_ptr() == indices.untyped_storage().data_ptr()
            and leaf.dtype == indices.dtype
        )
        if same and indices.dim() and indices.shape[0] == samples:
            offset = int(indices.storage_offset() - leaf.storage_offset())
            return Part(
                at, (leaf.shape, leaf.stride()), tuple(indices.shape), indices.stride(), offset
            )
    raise ValueError(
        f"{TABLES}: {path} is given what the model computes, not a part of the batch with a row a sample, so that it"
        " cannot be looked up beforehand; take ddp"
    )


def _tables(model: nn.Module) -> dict[str, Table]:
    return {path: one for path, one in model.named_modules() if isinstance(one, _KINDS)}


def _put(model: nn.Module, path: str, seat: nn.Module) -> None:
    above, _, name = path.rpartition(".")
    setattr(model.get_submodule(above), name, seat)
