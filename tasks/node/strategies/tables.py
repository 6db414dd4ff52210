"""Embedding tables on one rank each, beside data parallelism for all else [Naumov et al. 2019].

    tables  each nn.Embedding and nn.EmbeddingBag of an unmodified model lies on one rank, the
            largest first, where the fewest rows' numbers lie so far; ranks send it their indices,
            and it sends rows, or sums of rows, back

Gradients go the other way, and a step is that of ddp, up to rounding. What a rank sends for a table
grows with its samples, not with the table. If ranks have unequal batches, tables lie only on the
ranks with the smallest: hosts with much memory look up for hosts that compute.

All tables are looked up in one exchange before the model's forward pass. So the indices of each
must be a view of the model's inputs; a pass without gradients at the first step finds which. A
table is refused if its indices are computed, if their shape changes, or if it is called twice in a
step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from .messages import exchange
from .replicas import no_sync, of_ranks

TABLES = "tables"

Table = nn.Embedding | nn.EmbeddingBag
Layout = tuple[torch.Size, tuple[int, ...]]  # and strides
Shape = Callable[[int, int], tuple[int, ...]]  # of a table on a rank


def tables_of(model: nn.Module) -> dict[str, Table]:
    return {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag)
    }


def _layout(tensor: Tensor) -> Layout:
    return tensor.shape, tensor.stride()


def _is_same(tensor: Tensor, other: Tensor) -> bool:
    return _layout(tensor) == _layout(other) and tensor.data_ptr() == other.data_ptr()


class View(NamedTuple):
    """Where in an input of the model a table's indices lie."""

    input: int
    layout: Layout  # of the input
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, calls: list[Tensor] | None, inputs: Sequence[Tensor]) -> View | None:
        """Return None unless the only call's indices are a view of an input, with a row a sample."""
        if not calls or len(calls) > 1 or not calls[0].dim():
            return None
        indices = calls[0]
        storage = indices.untyped_storage().data_ptr()
        for place, tensor in enumerate(inputs):
            is_view = tensor.untyped_storage().data_ptr() == storage
            if is_view and tensor.dtype == indices.dtype and len(indices) == len(inputs[0]):
                offset = int(indices.storage_offset() - tensor.storage_offset())
                return cls(place, _layout(tensor), *_layout(indices), offset)
        return None

    def indices(self, inputs: Sequence[Tensor]) -> Tensor:
        """Raises ValueError if the input has another layout than in the first step."""
        tensor = inputs[self.input]
        if _layout(tensor) != self.layout:
            raise ValueError(
                f"{TABLES}: a batch has size {tuple(tensor.shape)}, after {tuple(self.layout[0])}"
                " in the first step; use ddp, or batches of one size"
            )
        return tensor.as_strided(self.shape, self.stride, tensor.storage_offset() + self.offset)


class Stub(nn.Module):
    """Takes a table's place: returns what was looked up, or records the call."""

    def __init__(self, path: str, table: Table) -> None:
        super().__init__()
        self.path, self.width, self.like = path, table.embedding_dim, table.weight.new_empty(0)
        self.is_bag = isinstance(table, nn.EmbeddingBag)
        self.calls: list[Tensor] | None = None  # while they are recorded
        self.expected: Tensor | None = None  # indices that were looked up
        self.rows = self.like

    def forward(self, input: Tensor, *others: Any, **named: Any) -> Tensor:
        """Raises ValueError if this is not what was looked up, or the second call in a step."""
        if self.calls is not None:
            self.calls.append(input)
            return self.like.new_zeros(self.rows_shape(input.shape))
        expected, self.expected = self.expected, None
        has_others = any(value is not None for value in (*others, *named.values()))
        if has_others or expected is None or not _is_same(input, expected):
            raise self.refusal()
        return self.rows

    def refusal(self) -> ValueError:
        return ValueError(
            f"{TABLES}: {self.path} needs a part of the batch, once a step and of one size on all"
            " ranks, and neither offsets nor weights; use ddp"
        )

    def rows_shape(self, indices: Sequence[int]) -> tuple[int, ...]:
        return (*(indices[:1] if self.is_bag else indices), self.width)


class DistributedTables(nn.Module):
    """A model whose tables lie on one rank each. Every rank of the group must call it."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, group: dist.ProcessGroup
    ) -> None:
        super().__init__()
        self.optimizer, self.group = optimizer, group
        self.rank, self.ranks = dist.get_rank(group), range(dist.get_world_size(group))
        tables = tables_of(model)
        self.tables, self.stubs = list(tables.values()), []
        for path, table in tables.items():
            dist.broadcast(table.weight.data, group=group, group_src=0)
            self.stubs.append(Stub(path, table))
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, self.stubs[-1])
        # makes the exchange a part of the graph on ranks without tables too
        self.start = self.tables[0].weight.new_zeros((), requires_grad=True)
        self.module = model
        if any(weight.requires_grad for weight in model.parameters()):
            self.module = DistributedDataParallel(model, process_group=group)
        self.views: list[View] = []
        self.samples: list[int] = []  # of each rank
        self.owners: list[int] = []  # of each table
        self.own: list[int] = []  # this rank's tables

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Raises ValueError if a table cannot be looked up before the forward pass."""
        tensors = [leaf for leaf in tree_leaves((inputs, named)) if isinstance(leaf, Tensor)]
        if not self.views:
            self._distribute(inputs, named, tensors)
        indices = [view.indices(tensors) for view in self.views]
        by_table = self.to_owners([each.to(torch.int32) for each in indices], self._index_shape)
        answers = [self.tables[at](each) for at, each in zip(self.own, by_table, strict=True)]
        rows = _Answers.apply(self, self.start, *answers)  # type: ignore[no-untyped-call]
        for stub, *looked_up in zip(self.stubs, indices, rows, strict=True):
            stub.expected, stub.rows = looked_up
        return self.module(*inputs, **named)

    def no_sync(self) -> AbstractContextManager[None]:
        """Leave all gradients but the tables' on their ranks."""
        return no_sync(self.module)

    def to_owners(self, values: Sequence[Tensor], shape: Shape) -> list[Tensor]:
        """Send each table's `values` to its rank; return all ranks' values of this rank's tables.

        `shape` gives that of a table's values on a rank.
        """
        received = [
            [values[0].new_empty(shape(place, rank)) for rank in self.ranks] for place in self.own
        ]
        exchange(
            [(value.contiguous(), owner) for value, owner in zip(values, self.owners, strict=True)],
            [message for by_rank in received for message in zip(by_rank, self.ranks, strict=True)],
            self.group,
        )
        return [torch.cat(by_rank) for by_rank in received]

    def to_askers(self, answers: Sequence[Tensor]) -> list[Tensor]:
        """Send ranks their rows of this rank's tables; return this rank's rows of all tables."""
        rows = [
            self.start.new_empty(self.row_shape(place, self.rank))
            for place in range(len(self.stubs))
        ]
        by_rank = [torch.split(answer, self.samples) for answer in answers]
        sends = [message for parts in by_rank for message in zip(parts, self.ranks, strict=True)]
        exchange(sends, zip(rows, self.owners, strict=True), self.group)
        return rows

    def row_shape(self, place: int, rank: int) -> tuple[int, ...]:
        return self.stubs[place].rows_shape(self._index_shape(place, rank))

    def _index_shape(self, place: int, rank: int) -> tuple[int, ...]:
        return (self.samples[rank], *self.views[place].shape[1:])

    def _distribute(
        self, inputs: tuple[Any, ...], named: dict[str, Any], tensors: Sequence[Tensor]
    ) -> None:
        """Find each table's indices, agree on owners, and free the tables of other ranks."""
        self._record(inputs, named)
        views = [View.of(stub.calls, tensors) for stub in self.stubs]
        for stub in self.stubs:
            stub.calls = None
        shapes = [view and view.shape[1:] for view in views]
        by_rank = of_ranks((len(tensors[0]), shapes), self.group)
        for stub, *found in zip(self.stubs, *(theirs for _, theirs in by_rank), strict=True):
            if None in found or len(set(found)) > 1:
                raise stub.refusal()
        self.views = [view for view in views if view]
        self.samples = [samples for samples, _ in by_rank]
        self.owners = self._choose_owners()
        self.own = [place for place, owner in enumerate(self.owners) if owner == self.rank]
        freed = {table.weight for table in self.tables}
        freed -= {self.tables[place].weight for place in self.own}
        for held in self.optimizer.param_groups:
            held["params"] = [weight for weight in held["params"] if weight not in freed]
        for weight in freed:
            self.optimizer.state.pop(weight, None)
            weight.data = weight.data.new_empty(0)

    def _record(self, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Have stubs record the indices that they are given, in a pass without gradients."""
        model = self.module
        if isinstance(model, DistributedDataParallel):
            model = model.module
        training = {module: module.training for module in model.modules()}
        for stub in self.stubs:
            stub.calls = []
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            model.eval()(*inputs, **named)
        torch.clear_autocast_cache()  # else DDP finds weights without gradients
        for module, was_training in training.items():
            module.training = was_training

    def _choose_owners(self) -> list[int]:
        """The rank of each table: largest tables first, each where the fewest numbers lie."""
        held = {rank: 0 for rank, count in enumerate(self.samples) if count == min(self.samples)}
        sizes = [table.weight.numel() for table in self.tables]
        owners = [0] * len(sizes)
        for place in sorted(range(len(sizes)), key=lambda place: -sizes[place]):
            owners[place] = min(held, key=lambda rank: (held[rank], rank))
            held[owners[place]] += sizes[place]
        return owners


class _Answers(torch.autograd.Function):
    """Rows of all tables for this rank's samples, from rows of its tables for all samples."""

    @staticmethod
    def forward(
        ctx: Any, state: DistributedTables, start: Tensor, *answers: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.state = state
        return tuple(state.to_askers(answers))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        by_table = ctx.state.to_owners(gradients, ctx.state.row_shape)
        return None, None, *(summed / len(ctx.state.ranks) for summed in by_table)
