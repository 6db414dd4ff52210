"""Place each embedding table on one rank, and train the rest of the model with DDP.

    tables  each nn.Embedding and nn.EmbeddingBag of an unmodified model is on one rank, its owner.
            Tables are placed in descending order of size, each on the rank with the fewest table
            weights so far. Ranks send their indices to the owner, which returns rows, or sums of
            rows [Naumov et al. 2019]

Gradients travel the opposite way, so a step equals that of ddp up to rounding. The bytes that a
rank sends for a table grow with the rank's samples, not with the table. If the ranks' batches
differ, only the ranks with the smallest batch own tables. Hosts with much memory can then look up
rows for hosts with fast devices.

All ranks must call the tables in the same order. The shape of a rank's indices must not change
between steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from .messages import exchange
from .replicas import of_ranks

TABLES = "tables"

Table = nn.Embedding | nn.EmbeddingBag


def tables_of(model: nn.Module) -> dict[str, Table]:
    return {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag)
    }


def distribute(
    model: nn.Module, optimizer: torch.optim.Optimizer, group: dist.ProcessGroup
) -> nn.Module:
    """Move each embedding table of `model` to one rank, and return the module to call.

    A `Lookup` replaces each table. Every rank of the group must call this function. The first
    forward pass chooses the tables' ranks.
    """
    lookups = []
    for path, table in tables_of(model).items():
        dist.broadcast(table.weight.data, group=group, group_src=0)
        lookups.append(Lookup(path, table, group))
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, lookups[-1])
    module = model
    if any(weight.requires_grad for weight in model.parameters()):
        module = DistributedDataParallel(model, process_group=group)
    module.register_forward_pre_hook(
        partial(_choose_owners, lookups, optimizer, group), with_kwargs=True
    )
    return module


def _choose_owners(
    lookups: list[Lookup],
    optimizer: torch.optim.Optimizer,
    group: dist.ProcessGroup,
    _: nn.Module,
    *inputs: Any,
) -> None:
    """Choose the owner of each table, and free the tables that other ranks own.

    This is a forward pre-hook, which does nothing after the first forward pass.
    """
    if lookups[0].owner >= 0:
        return
    samples = next(len(leaf) for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor))
    by_rank = of_ranks(samples, group)
    held = {rank: 0 for rank, count in enumerate(by_rank) if count == min(by_rank)}
    for lookup in sorted(lookups, key=lambda lookup: -lookup.size):
        lookup.owner = min(held, key=lambda rank: (held[rank], rank))
        held[lookup.owner] += lookup.size
    freed = {each.table[0].weight for each in lookups if each.owner != each.rank}
    for held_by in optimizer.param_groups:
        held_by["params"] = [weight for weight in held_by["params"] if weight not in freed]
    for weight in freed:
        optimizer.state.pop(weight, None)
        weight.data = weight.data.new_empty(0)


class Lookup(nn.Module):
    """A module that replaces an embedding table whose weights are on one rank, the table's owner.

    It sends the indices to the owner, and returns the rows that the owner sends back. `owner`, the
    owner's rank, is -1 until the first forward pass.
    """

    def __init__(self, path: str, table: Table, group: dist.ProcessGroup) -> None:
        super().__init__()
        # The table is in a tuple, so that it is no submodule.
        self.path, self.group, self.table = path, group, (table,)
        self.rank = dist.get_rank(group)
        self.owner, self.size = -1, table.weight.numel()
        self.shapes: list[torch.Size] = []  # shape of each rank's indices
        # An input that requires a gradient makes autograd call _Rows.backward on all ranks.
        self.start = table.weight.new_zeros((), requires_grad=True)

    def forward(self, input: Tensor, *others: Any, **named: Any) -> Tensor:
        """Return the table's rows, or sums of rows, for the indices `input`.

        Raises ValueError if other arguments are passed, or if the shape of the indices changes.
        """
        self.shapes = self.shapes or of_ranks(input.shape, self.group)
        has_others = any(value is not None for value in (*others, *named.values()))
        if has_others or input.shape != self.shapes[self.rank]:
            raise ValueError(
                f"strategy {TABLES}: the only input of {self.path} must be indices of the same"
                f" shape as in the first step, {tuple(self.shapes[self.rank])}; use strategy ddp"
            )
        indices = self.to_owner(input.to(torch.int32), self.shapes)
        # Look up the indices of all ranks together, because each lookup makes a dense gradient.
        answers = (
            self.table[0](torch.cat(indices)).split(list(map(len, indices))) if indices else ()
        )
        rows: Tensor = _Rows.apply(self, self.start, *answers)  # type: ignore[no-untyped-call]
        return rows

    def to_owner(self, values: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
        """Send `values` to the table's owner.

        Returns the values of all ranks if this rank is the owner, and [] on other ranks. `shapes`
        has the shape of each rank's values.
        """
        mine = shapes if self.rank == self.owner else ()
        received = [values.new_empty(shape) for shape in mine]
        messages = [(tensor, rank) for rank, tensor in enumerate(received)]
        exchange([(values.contiguous(), self.owner)], messages, self.group)
        if received:
            received[self.rank] = values
        return received

    def row_shapes(self) -> list[tuple[int, ...]]:
        """Return the shape of the tensor of rows that each rank receives, in rank order."""
        is_bag, width = isinstance(self.table[0], nn.EmbeddingBag), self.table[0].embedding_dim
        return [(*(shape[:1] if is_bag else shape), width) for shape in self.shapes]


class _Rows(torch.autograd.Function):
    """Sends rows from the table's owner to each rank. The backward pass returns their gradients.

    `answers` are the rows for each rank, in rank order. Only the owner passes them. The owner
    divides the gradients by the number of ranks, so that they are averaged as in DDP.
    """

    @staticmethod
    def forward(ctx: Any, lookup: Lookup, start: Tensor, *answers: Tensor) -> Tensor:
        ctx.lookup = lookup
        rows = start.new_empty(lookup.row_shapes()[lookup.rank])
        sends = [(answer, rank) for rank, answer in enumerate(answers)]
        exchange(sends, [(rows, lookup.owner)], lookup.group)
        return rows.copy_(answers[lookup.rank]) if answers else rows

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        by_rank = ctx.lookup.to_owner(gradients[0], ctx.lookup.row_shapes())
        return None, None, *(gradient / len(ctx.lookup.shapes) for gradient in by_rank)
