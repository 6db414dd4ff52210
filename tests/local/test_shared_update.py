"""Optimizers whose work and states ranks share: weights after each step have the bits that they have without."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing import spawn

from tasks.node.strategies import communicates_always, strategy

pytestmark = [pytest.mark.local, pytest.mark.enable_socket]

WORLD, STEPS = 3, 5
CPU = torch.device("cpu")
KINDS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adam": torch.optim.Adam,
    "adamw": lambda groups: torch.optim.AdamW(groups, weight_decay=0.1, amsgrad=True),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.1, initial_accumulator_value=0.5),
}


class Odd(torch.optim.SGD):
    """Is not made as it says of itself."""

    def __init__(self, weights: Any, model: str) -> None:
        super().__init__(weights, lr=0.1)
        self.model = model


def network() -> nn.Sequential:
    """Two groups, a frozen weight, and one of another type."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 300), nn.Tanh(), nn.Linear(300, 20), nn.Linear(20, 1))
    model[2].bias.requires_grad_(False)
    return model


def trained(name: str, kind: str, group: dist.ProcessGroup) -> tuple[torch.Tensor, int]:
    """(STEPS, weights) after each step, clipped, of two micro-steps, with changing rates; and values of states."""
    model = network()
    first, *others = (one for one in model.parameters() if one.requires_grad)
    optimizer = KINDS[kind]([{"params": [first], "lr": 0.02}, {"params": others}])

    def clip(*_: object) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)

    optimizer.register_step_pre_hook(clip)
    module = strategy(name)(model, optimizer, group, CPU)
    assert communicates_always(module) is (name == "zero1")
    found = []
    for step in range(STEPS):
        optimizer.zero_grad()
        inputs = torch.randn(
            8, 16, generator=torch.Generator().manual_seed(10 * dist.get_rank(group) + step)
        )
        module(inputs).square().mean().backward()
        optimizer.step()
        for held in optimizer.param_groups:
            held["lr"] *= 0.9
        found.append(torch.cat([one.detach().flatten() for one in model.parameters()]))
    inner = getattr(optimizer.step, "__self__", optimizer)
    states = getattr(inner, "optim", inner).state.values()
    values = sum(
        one.numel()
        for state in states
        for one in state.values()
        if torch.is_tensor(one) and one.dim()
    )
    return torch.stack(found), values


def main(rank: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=WORLD
    )
    reversed_ranks = dist.new_group([*range(WORLD)][::-1], sort_ranks=False)
    found: dict[Any, Any] = {(kind, one): trained(one, kind, dist.group.WORLD) for kind in KINDS
                             for one in ("ddp", "zero1")}  # fmt: skip
    found["reversed"] = trained("zero1", "adam", reversed_ranks)
    try:
        strategy("zero1")(network(), Odd(network().parameters(), "m"), dist.group.WORLD, CPU)
    except ValueError as error:
        found["refused"] = str(error)
    torch.save(found, Path(folder) / str(rank))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore")
def test_weights_have_the_bits_of_plain_steps_and_each_rank_holds_a_share_of_the_states(
    tmp_path: Path,
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    spawn(main, (port, str(tmp_path)), nprocs=WORLD)
    ranks = [torch.load(tmp_path / str(rank)) for rank in range(WORLD)]
    for kind in KINDS:
        plain, whole = ranks[0][kind, "ddp"]
        assert not torch.equal(plain[0], plain[-1])
        for found in ranks:
            assert torch.equal(found[kind, "zero1"][0], plain), kind
        shares = [found[kind, "zero1"][1] for found in ranks]
        assert sum(shares) == whole and max(shares) < 0.6 * whole, (
            "the largest weight has over a third of all"
        )
    assert torch.allclose(ranks[0]["reversed"][0], ranks[1]["reversed"][0])
    assert all(
        "zero1: no Odd can be made of this one's groups" in found["refused"] for found in ranks
    )
