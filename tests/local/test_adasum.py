"""Adasum on ranks that are processes of this machine: against the same in NumPy, in doubles and without halves."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from models.domain.numeric import FloatArray
from models.step_time.compression import adasum_bytes
from tasks.node.strategies import no_sync, strategy
from tasks.node.strategies.adasum import ADASUM, combine, pair

pytestmark = [pytest.mark.local, pytest.mark.enable_socket]

ROOT = Path(__file__).parents[2]
WORLDS = (2, 4, 8)
SIZES = (1, 700, 3, 1_200_000, 64, 1)
CPU = torch.device("cpu")
EXACT = 1e-6  # of a parameter's largest entry
KINDS = ("random", "orthogonal", "parallel", "zeros")
RATE = 0.1


def vector(kind: str, rank: int) -> Tensor:
    """What a rank has: every parameter another size and scale."""
    random = torch.Generator().manual_seed(1 if kind == "parallel" else rank)
    made = [
        10.0**place * (0.3 + torch.randn(size, generator=random))
        for place, size in enumerate(SIZES)
    ]
    if kind == "parallel":
        made = [(rank + 1) * one for one in made]
    if kind == "orthogonal":
        made = [one * (torch.arange(len(one)) % 8 == rank) for one in made]
    if kind == "zeros":
        made = [one * (rank == 1 or place == 2) for place, one in enumerate(made)]
    return torch.cat(made)


def reference(vectors: Sequence[FloatArray]) -> FloatArray:
    """One parameter's Adasum over 2^m ranks, by its definition."""
    if len(vectors) == 1:
        return vectors[0]
    a, b = (
        reference(some) for some in (vectors[: len(vectors) // 2], vectors[len(vectors) // 2 :])
    )
    product, first, second = a @ b, a @ a, b @ b
    return np.asarray((1 - product / (2 * first or 1)) * a + (1 - product / (2 * second or 1)) * b)


class Odd(torch.nn.Module):
    """Several buckets, a weight of one entry, and what is no number on the rank and step that are asked for."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(8, 700), torch.nn.Tanh(), torch.nn.Linear(700, 700)
        )
        self.scale = torch.nn.Parameter(torch.ones(1))
        self.frozen = torch.nn.Parameter(torch.ones(3), requires_grad=False)
        self.wrong = False

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = self.layers(inputs).mean(dim=1) * self.scale * self.frozen[0]
        return outputs * float("nan") if self.wrong else outputs


def batches(rank: int, step: int) -> Tensor:
    return torch.randn(2, 16, 8, generator=torch.Generator().manual_seed(100 * rank + step))


def backward(module: Any, inputs: Tensor) -> None:
    ((module(inputs) - inputs.mean(dim=1)) ** 2).mean().backward()


def flat(model: torch.nn.Module) -> Tensor:
    return torch.cat([one.detach().flatten() for one in model.parameters() if one.requires_grad])


def optimizer_of(name: str, model: torch.nn.Module) -> torch.optim.Optimizer:
    return (
        torch.optim.SGD(model.parameters(), lr=RATE)
        if name == "adasum"
        else torch.optim.Adam(model.parameters())
    )


def trained(name: str, group: dist.ProcessGroup, *, steps: int = 4, wrong: bool = False) -> Tensor:
    """(steps, weights) after each step of two micro-steps; rank 1 goes wrong in the last."""
    model = Odd()
    optimizer = optimizer_of(name, model)
    world = dist.get_world_size(group)
    module = strategy(name, machines=(1,) * world)(model, optimizer, group, CPU)
    found = []
    for step in range(steps):
        model.wrong = wrong and step == steps - 1 and dist.get_rank(group) == 1
        optimizer.zero_grad()
        first, second = batches(dist.get_rank(group), step)
        with no_sync(module):
            backward(module, first)
        backward(module, second)
        optimizer.step()
        found.append(flat(model))
    with no_sync(module):  # as a step without communication is measured: on this rank alone
        backward(module, first)
    optimizer.step()
    return torch.stack(found)


class Unhooked(torch.optim.Optimizer):
    """Changes weights without telling."""

    def __init__(self, weights: Any) -> None:
        self.param_groups = [{"params": list(weights)}]

    def step(self, closure: Any = None) -> None:
        """Nothing."""


def reason(wrong: Any) -> str:
    try:
        wrong()
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def unhooked(group: dist.ProcessGroup) -> Any:
    model = Odd()
    return strategy("adasum-delta")(model, Unhooked(model.parameters()), group, CPU)


def unused(name: str, group: dist.ProcessGroup) -> None:
    """Two steps that leave a parameter without gradient."""
    model = Odd()
    model.register_parameter("spare", torch.nn.Parameter(torch.ones(2)))
    optimizer = optimizer_of(name, model)
    module = strategy(name)(model, optimizer, group, CPU)
    for step in range(2):
        backward(module, batches(0, step)[0])
        optimizer.step()


def sparse(group: dist.ProcessGroup) -> None:
    table = torch.nn.Embedding(5, 2, sparse=True)
    module = strategy("adasum")(table, torch.optim.SGD(table.parameters(), lr=RATE), group, CPU)
    module(torch.tensor([dist.get_rank(group)])).sum().backward()


def main(rank: int, port: int, answer: Path) -> None:
    """One rank: all cases in one order."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=WORLDS[-1]
    )
    groups = {world: dist.new_group(list(range(world))) for world in WORLDS}
    hasty = dist.new_group([0, 1], timeout=timedelta(seconds=2))
    found: dict[Any, Any] = {}
    sent = [0]
    plain = dist.batch_isend_irecv

    def counted(asked: Any) -> Any:
        sent[0] += sum(
            one.tensor.numel() * one.tensor.element_size() for one in asked if one.op is dist.isend
        )
        return plain(asked)

    dist.batch_isend_irecv = counted
    for world, group in groups.items():
        for kind in KINDS if rank < world else ():
            values = vector(kind, rank)
            sent[0] = 0
            combine(values, SIZES, group)
            found[world, kind] = values
            found[world, kind, "bytes"] = sent[0]
    dist.batch_isend_irecv = plain
    if rank < 4:
        for name in ADASUM:
            found[name] = trained(name, groups[4])
            found[name, "wrong"] = trained(name, groups[4], wrong=True)
    if rank < 2:
        found["unhooked"] = reason(lambda: unhooked(groups[2]))
        found["sparse"] = reason(lambda: sparse(groups[2]))
        for name in ADASUM:
            found[name, "unused"] = reason(partial(unused, name, groups[2]))
    dist.barrier()
    if rank == 0:
        found["alone"] = reason(lambda: combine(torch.ones(8), [8], hasty))
    torch.save(found, answer)
    dist.barrier()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    """What each rank found."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    answers = [tmp_path_factory.mktemp("ranks") / str(rank) for rank in range(WORLDS[-1])]
    processes = [
        subprocess.Popen(
            [
                sys.executable,
                "-W",
                "ignore",
                "-m",
                "tests.local.test_adasum",
                str(rank),
                str(port),
                str(answer),
            ],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        for rank, answer in enumerate(answers)
    ]
    try:
        assert [one.wait(timeout=300) for one in processes] == [0] * WORLDS[-1]
    finally:
        for one in processes:
            one.kill()
    return [torch.load(one) for one in answers]


def by_parameter(values: Tensor, sizes: Sequence[int] = SIZES) -> list[FloatArray]:
    return [one.double().numpy() for one in values.split(list(sizes))]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_rank_has_the_sum_of_the_definition_of_every_parameter(
    ranks: list[dict[Any, Any]], kind: str, world: int
) -> None:
    given = [by_parameter(vector(kind, rank)) for rank in range(world)]
    found = [one[world, kind] for one in ranks[:world]]
    assert all(torch.equal(one, found[0]) for one in found), (
        "ranks that differ by a bit drift apart"
    )
    for place, own in enumerate(by_parameter(found[0])):
        expected = reference([one[place] for one in given])
        assert np.abs(own - expected).max() <= EXACT * np.abs(expected).max()
        if kind == "orthogonal":
            np.testing.assert_allclose(
                own, np.sum([one[place] for one in given], axis=0), rtol=EXACT
            )
        if kind == "parallel":
            np.testing.assert_allclose(
                own, np.mean([one[place] for one in given], axis=0), rtol=2 * EXACT
            )
        if kind == "zeros" and place != 2:
            np.testing.assert_allclose(own, given[1][place], rtol=EXACT)


@pytest.mark.parametrize("world", WORLDS)
def test_bytes_are_those_of_the_formula(ranks: list[dict[Any, Any]], world: int) -> None:
    formula = adasum_bytes(4.0 * sum(SIZES), len(SIZES), world)
    for one in ranks[:world]:
        assert one[world, "random", "bytes"] == pytest.approx(formula, abs=8 * world), (
            "halves of odd lengths"
        )


@pytest.mark.parametrize("name", ADASUM)
def test_steps_of_two_micro_steps_are_those_of_the_definition_with_the_users_own_optimizer(
    ranks: list[dict[Any, Any]], name: str
) -> None:
    found = [one[name] for one in ranks[:4]]
    assert all(torch.equal(one, found[0]) for one in found)
    models = [Odd() for _ in range(4)]
    optimizers = [optimizer_of(name, one) for one in models]
    for step, expected in enumerate(found[0]):
        begun = flat(models[0])
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            for part in batches(rank, step):
                backward(model, part)
            optimizer.step()
        sizes = [one.numel() for one in models[0].parameters() if one.requires_grad]
        changes = [by_parameter(flat(one) - begun, sizes) for one in models]
        combined = np.concatenate(
            [reference([one[at] for one in changes]) for at in range(len(sizes))]
        )
        now = begun + torch.from_numpy(combined).float()
        torch.testing.assert_close(expected, now, rtol=0, atol=3e-6)
        for model in models:
            trainable = [one for one in model.parameters() if one.requires_grad]
            torch.nn.utils.vector_to_parameters(expected.clone(), trainable)


@pytest.mark.parametrize("name", ADASUM)
def test_what_is_no_number_at_one_rank_is_none_at_all(
    ranks: list[dict[Any, Any]], name: str
) -> None:
    for one in ranks[:4]:
        begun, ended = one[name, "wrong"][-2:]
        assert begun.isfinite().all() and not ended.isfinite().all()


def test_a_rank_that_does_not_come_is_an_error_in_time(ranks: list[dict[Any, Any]]) -> None:
    assert "Timed out waiting 2000ms" in ranks[0]["alone"]


def test_what_cannot_be_combined_is_refused(ranks: list[dict[Any, Any]]) -> None:
    assert all("Unhooked calls no step hooks" in one["unhooked"] for one in ranks[:2])
    assert all("make embeddings with sparse=False" in one["sparse"] for one in ranks[:2])


@pytest.mark.parametrize("name", ADASUM)
def test_a_parameter_without_gradient_is_an_error_as_in_ddp(
    ranks: list[dict[Any, Any]], name: str
) -> None:
    assert all(
        "your module has parameters that were not used in producing loss" in one[name, "unused"]
        for one in ranks[:2]
    )


def test_a_pair_in_one_process_is_what_two_ranks_have(ranks: list[dict[Any, Any]]) -> None:
    torch.testing.assert_close(
        pair(vector("random", 0), vector("random", 1), SIZES), ranks[0][2, "random"]
    )


@pytest.mark.parametrize(
    ("machines", "fitting"),
    [((1,), "2 devices"), ((1, 1, 1), "2 or 4 devices"), ((4, 2), "4 or 8 devices")],
)
@pytest.mark.parametrize("name", ADASUM)
def test_ranks_that_do_not_pair_are_refused_naming_what_fits(
    name: str, machines: tuple[int, ...], fitting: str
) -> None:
    with pytest.raises(
        ValueError, match=rf"{name} on {sum(machines)} device.*take ddp, or {fitting}"
    ):
        strategy(name, machines=machines)
    strategy(name, machines=(1, 1, 2))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
