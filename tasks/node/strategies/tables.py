"""Place each embedding table on one rank, and train the rest of the model with DDP.

    tables  each table (nn.Embedding or nn.EmbeddingBag) is on one rank, its owner. Tables are
            placed in descending order of size. Each table goes to the rank with the fewest table
            weights so far. To look up rows, ranks send their indices to the owner. The owner sends
            rows back, or sums of rows for an nn.EmbeddingBag [Naumov et al. 2019]

In the backward pass, ranks send the gradients of the rows to the owner. A step equals a step of ddp
up to rounding. The bytes that a rank sends for a table depend on the rank's batch, not on the size
of the table.

If the ranks' batches differ, only the ranks with the smallest batch own tables. For example, slow
hosts with much memory train small batches, own the tables, and look up rows for fast hosts.

All ranks must call the tables in the same order. The shape of a rank's indices must not change
between steps.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .messages import swap
from .replicas import Cut, of_ranks, retarget

TABLES = "tables"

Table = nn.Embedding | nn.EmbeddingBag


def tables_of(model: nn.Module) -> dict[str, Table]:
    return {path: module for path, module in model.named_modules() if isinstance(module, Table)}


def distribute(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    group: dist.ProcessGroup,
    batch_by_rank: Sequence[int],
) -> nn.Module:
    """Move each embedding table of `model` to one rank, and return the module to call.

    A `Lookup` replaces each table. Every rank of the group must call this function.

    batch_by_rank: the samples of each rank. Only ranks with the fewest samples own tables.
    """
    least = min(batch_by_rank)
    held = {rank: 0 for rank, batch in enumerate(batch_by_rank) if batch == least}
    freed: dict[Tensor, tuple[nn.Parameter, Cut]] = {}
    tables = tables_of(model).items()
    for path, table in sorted(tables, key=lambda each: -each[1].weight.numel()):
        owner = min(held, key=held.__getitem__)
        held[owner] += table.weight.numel()
        dist.broadcast(table.weight.data, group=group, group_src=0)
        lookup = Lookup(path, table, group, owner)
        model.set_submodule(path, lookup)
        if owner != lookup.rank:
            freed[table.weight] = nn.Parameter(lookup.nothing), lambda values: values.new_empty(0)
    retarget(optimizer, freed)
    if any(weight.requires_grad for weight in model.parameters()):
        return DistributedDataParallel(model, process_group=group)
    return model


class Lookup(nn.Module):
    """A module that replaces an embedding table. It gets rows from the rank that owns the table."""

    def __init__(self, path: str, table: Table, group: dist.ProcessGroup, owner: int) -> None:
        super().__init__()
        # In a tuple, nn.Module does not register the table as a submodule.
        self.path, self.group, self.table = path, group, (table,)
        self.rank, self.owner = dist.get_rank(group), owner
        self.shapes: list[torch.Size] = []  # shape of each rank's indices
        # Ranks without the table send this empty tensor. It requires a gradient if the table does,
        # so that the backward pass exchanges gradients on all ranks.
        self.nothing = table.weight.new_empty(0, requires_grad=table.weight.requires_grad)
        if table.weight.requires_grad:  # gradients are averaged, as in DDP
            weight: Any = table.weight
            weight.register_hook(lambda gradient: gradient / dist.get_world_size(group))

    def forward(self, input: Tensor, *others: Any, **named: Any) -> Tensor:
        """Return the table's rows, or sums of rows, for the indices `input`.

        Raises ValueError if other arguments are passed, or if the shape of the indices changes.
        """
        self.shapes = self.shapes or of_ranks(input.shape, self.group)
        has_others = any(value is not None for value in (*others, *named.values()))
        if has_others or input.shape != self.shapes[self.rank]:
            raise ValueError(
                f"strategy {TABLES}: the only input of the embedding table {self.path} must be"
                f" indices of shape {tuple(self.shapes[self.rank])}, as in the first step. Use"
                " strategy ddp"
            )
        ranks, is_mine = range(len(self.shapes)), self.rank == self.owner
        indices = input.to(torch.int32)
        sent = [indices if rank == self.owner else indices.new_empty(0) for rank in ranks]
        lookups = swap(sent, ranks, self.group, self.shapes if is_mine else [(0,)] * len(ranks))
        rows: Sequence[Tensor] = [self.nothing] * len(ranks)
        if is_mine:  # one lookup for all ranks, because each lookup makes a dense gradient
            rows = self.table[0](torch.cat(lookups)).split(list(map(len, lookups)))
        is_bag = isinstance(self.table[0], nn.EmbeddingBag)
        shape = (*(input.shape[:1] if is_bag else input.shape), self.table[0].embedding_dim)
        shapes = [shape if rank == self.owner else (0,) for rank in ranks]
        return swap(rows, ranks, self.group, shapes)[self.owner]
