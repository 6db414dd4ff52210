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

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from .messages import exchange_lists
from .replicas import no_sync, refuse_unlike

TABLES = "tables"

Table = nn.Embedding | nn.EmbeddingBag
Lists = list[list[Tensor]]  # for each rank


def tables_of(model: nn.Module) -> dict[str, Table]:
    return {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag)
    }


@dataclass(frozen=True, slots=True)
class View:
    """Where in the model's inputs a table's indices lie."""

    input: int
    input_layout: tuple[torch.Size, tuple[int, ...]]  # size and strides
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, path: str, indices: Tensor, inputs: Sequence[Tensor]) -> View:
        """Raises ValueError if the indices are no view of an input with a row a sample."""
        for place, tensor in enumerate(inputs):
            is_view = (
                tensor.untyped_storage().data_ptr() == indices.untyped_storage().data_ptr()
                and tensor.dtype == indices.dtype
            )
            if is_view and indices.dim() and len(indices) == len(inputs[0]):
                layout = tensor.shape, tensor.stride()
                offset = int(indices.storage_offset() - tensor.storage_offset())
                return cls(place, layout, tuple(indices.shape), indices.stride(), offset)
        raise ValueError(
            f"{TABLES}: {path} is given what the model computes, not a part of the batch. Use ddp."
        )

    def indices(self, path: str, inputs: Sequence[Tensor]) -> Tensor:
        """Raises ValueError if the input has another layout than in the first step."""
        tensor = inputs[self.input]
        if (tensor.shape, tensor.stride()) != self.input_layout:
            before, now = tuple(self.input_layout[0]), tuple(tensor.shape)
            raise ValueError(
                f"{TABLES}: {path} is given {now} indices, after {before} in the first step."
                " Use ddp, or batches of one size."
            )
        offset = tensor.storage_offset() + self.offset
        return tensor.as_strided(self.size, self.stride, offset)


class Stub(nn.Module):
    """Takes a table's place: returns what was looked up, or records the call."""

    def __init__(self, path: str, table: Table) -> None:
        super().__init__()
        self.path, self.width, self.empty = path, table.embedding_dim, table.weight.new_empty(0)
        self.is_bag = isinstance(table, nn.EmbeddingBag)
        self.is_recording = False
        self.calls: list[Tensor] = []
        self.rows: Tensor | None = None

    def forward(self, input: Tensor, *others: Any, **named: Any) -> Tensor:
        """Raises ValueError for other arguments than indices, and for a second call in a step."""
        if any(value is not None for value in (*others, *named.values())):
            raise ValueError(f"{TABLES}: {self.path} takes offsets or weights. Use ddp.")
        if self.is_recording:
            self.calls.append(input)
            return self.empty.new_zeros(self.answer_shape(input.shape))
        if self.rows is None:
            raise ValueError(f"{TABLES}: {self.path} is called twice in a step. Use ddp.")
        rows, self.rows = self.rows, None
        return rows

    def answer_shape(self, indices: Sequence[int]) -> tuple[int, ...]:
        return (*(indices[:1] if self.is_bag else indices), self.width)


class DistributedTables(nn.Module):
    """A model whose tables lie on one rank each. Every rank of the group must call it."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, group: dist.ProcessGroup
    ) -> None:
        super().__init__()
        self.optimizer, self.group = optimizer, group
        self.rank, self.ranks = dist.get_rank(group), range(dist.get_world_size(group))
        self.tables = tables_of(model)
        weight = next(iter(self.tables.values())).weight
        self.start = weight.new_zeros((), requires_grad=True)  # makes a lookup part of the graph
        self.stubs = []
        for path, table in self.tables.items():
            dist.broadcast(table.weight.data, group=group, group_src=0)
            self.stubs.append(Stub(path, table))
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, self.stubs[-1])
        self.module = model
        if any(weight.requires_grad for weight in model.parameters()):
            self.module = DistributedDataParallel(model, process_group=group)
        self.views: list[View] = []
        self.samples: list[int] = []  # of each rank
        self.owners: list[int] = []  # of each table
        self.places: list[list[int]] = []  # of the tables of each rank
        self.own: list[Table] = []

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Raises ValueError if a table cannot be looked up before the forward pass."""
        tensors = [leaf for leaf in tree_leaves((inputs, named)) if isinstance(leaf, Tensor)]
        if not self.views:
            self._distribute(inputs, named, tensors)
        indices = [
            view.indices(path, tensors) for path, view in zip(self.tables, self.views, strict=True)
        ]
        found = _Lookup.apply(self.start, self, indices)  # type: ignore[no-untyped-call]
        for stub, rows in zip(self.stubs, found, strict=True):
            stub.rows = rows
        output = self.module(*inputs, **named)
        for stub in self.stubs:
            if stub.rows is not None:
                raise ValueError(f"{TABLES}: {stub.path} is not called in every step. Use ddp.")
        return output

    def no_sync(self) -> AbstractContextManager[None]:
        """Leave all gradients but the tables' on their ranks."""
        return no_sync(self.module)

    def to_owners(self, values: Sequence[Tensor], *, are_rows: bool) -> Lists:
        """For each of this rank's tables: the `values` of all ranks, indices or rows."""
        own = self.places[self.rank]
        sends = [[values[place] for place in places] for places in self.places]
        shapes = [[self._shape(place, rank, are_rows) for place in own] for rank in self.ranks]
        found = exchange_lists(sends, shapes, values[0], self.group)
        return [list(of_ranks) for of_ranks in zip(*found, strict=True)]

    def from_owners(self, answers: Lists) -> list[Tensor]:
        """The rows of all tables; `answers` has the rows for each rank of each own table."""
        sends = [[rows[rank] for rows in answers] for rank in self.ranks]
        shapes = [
            [self._shape(place, self.rank, True) for place in places] for places in self.places
        ]
        found = exchange_lists(sends, shapes, self.start, self.group)
        by_owner = [iter(rows) for rows in found]
        return [next(by_owner[owner]) for owner in self.owners]

    def _shape(self, place: int, rank: int, is_rows: bool) -> tuple[int, ...]:
        shape = (self.samples[rank], *self.views[place].size[1:])
        return self.stubs[place].answer_shape(shape) if is_rows else shape

    def _distribute(
        self, inputs: tuple[Any, ...], named: dict[str, Any], tensors: Sequence[Tensor]
    ) -> None:
        """Find each table's indices, agree on owners, and free the tables of other ranks."""
        problem, views = "", []
        try:
            views = self._find_views(inputs, named, tensors)
        except ValueError as error:
            problem = str(error)
        answers: list[Any] = [None] * len(self.ranks)
        dist.all_gather_object(answers, (problem, len(tensors[0])), group=self.group)
        for problem, _ in answers:
            if problem:
                raise ValueError(problem)
        widths = {path: view.size[1:] for path, view in zip(self.tables, views, strict=True)}
        refuse_unlike(f"{TABLES}: indices", widths, self.group)
        self.samples = [samples for _, samples in answers]
        self.views, self.owners = views, self._choose_owners()
        self.places = [
            [place for place, owner in enumerate(self.owners) if owner == rank]
            for rank in self.ranks
        ]
        tables = list(self.tables.values())
        self.own = [tables[place] for place in self.places[self.rank]]
        freed = {table.weight for table in tables} - {table.weight for table in self.own}
        for held in self.optimizer.param_groups:
            held["params"] = [weight for weight in held["params"] if weight not in freed]
        for weight in freed:
            self.optimizer.state.pop(weight, None)
            weight.data = weight.data.new_empty(0)

    def _find_views(
        self, inputs: tuple[Any, ...], named: dict[str, Any], tensors: Sequence[Tensor]
    ) -> list[View]:
        training = {module: module.training for module in self.module.modules()}
        model = self.module
        if isinstance(model, DistributedDataParallel):
            model = model.module
        for stub in self.stubs:
            stub.is_recording = True
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                model.eval()(*inputs, **named)
        finally:
            torch.clear_autocast_cache()  # else DDP finds weights without gradients
            for module, was_training in training.items():
                module.training = was_training
            for stub in self.stubs:
                stub.is_recording = False
        for stub in self.stubs:
            if len(stub.calls) != 1:
                raise ValueError(
                    f"{TABLES}: {stub.path} is called {len(stub.calls)} times in a step, not once."
                    " Use ddp."
                )
        return [View.of(stub.path, stub.calls.pop(), tensors) for stub in self.stubs]

    def _choose_owners(self) -> list[int]:
        """The rank of each table: largest tables first, each where the fewest numbers lie."""
        held = {rank: 0 for rank, count in enumerate(self.samples) if count == min(self.samples)}
        sizes = [table.weight.numel() for table in self.tables.values()]
        owners = [0] * len(sizes)
        for place in sorted(range(len(sizes)), key=lambda place: -sizes[place]):
            owners[place] = min(held, key=lambda rank: (held[rank], rank))
            held[owners[place]] += sizes[place]
        return owners


class _Lookup(torch.autograd.Function):
    """The rows that the tables have for a rank's indices."""

    @staticmethod
    def forward(
        ctx: Any, start: Tensor, state: DistributedTables, indices: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        by_table = state.to_owners([tensor.to(torch.int32) for tensor in indices], are_rows=False)
        with torch.enable_grad():
            ctx.found = [
                table(torch.cat(of_ranks))
                for table, of_ranks in zip(state.own, by_table, strict=True)
            ]
        ctx.state = state
        answers = [list(rows.detach().split(state.samples)) for rows in ctx.found]
        return tuple(state.from_owners(answers))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        by_table = ctx.state.to_owners(gradients, are_rows=True)
        for rows, of_ranks in zip(ctx.found, by_table, strict=True):
            if rows.requires_grad:
                mean = torch.cat(of_ranks) / len(ctx.state.ranks)
                torch.autograd.backward(rows, mean)
        return None, None, None
