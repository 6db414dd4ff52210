"""Strategies that compress gradients, on ranks that are processes of this machine: against the same in NumPy."""

from __future__ import annotations

import sys
from datetime import timedelta
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from models.step_time.compression import sparse_bytes
from tasks.node.strategies import strategy
from tasks.node.strategies.compression import COMPRESSED, SparseExchange
from tasks.node.strategies.servers import SERVED
from tests.local.ranks import answers_of

pytestmark = [pytest.mark.local, pytest.mark.enable_socket]

WORLD, ROUNDS, VALUES, DENSITY = 4, 6, 5003, 0.05
LAYOUTS = {"1x2": (2,), "2x1": (1, 1), "2x2": (2, 2), "4x1": (1, 1, 1, 1)}
CPU = torch.device("cpu")


def gradient(rank: int, turn: int) -> torch.Tensor:
    return torch.randn(VALUES, generator=torch.Generator().manual_seed(100 * rank + turn))


def exchanged(group: dist.ProcessGroup, machines: tuple[int, ...]) -> dict[str, Any]:
    """What a rank gets in each of the rounds, what it kept, and bytes that it sent to its own machine and to others."""
    state = SparseExchange(group, machines, density=DENSITY)
    own = dist.get_rank(group)
    sent = {"inside": 0, "between": 0}
    plain = dist.all_to_all_single

    def counted(
        received: Any, mine: torch.Tensor, to: list[int], *others: Any, **named: Any
    ) -> Any:
        for rank, many in enumerate(to):
            if rank != own:
                sent["inside" if rank // machines[0] == own // machines[0] else "between"] += (
                    many * mine.element_size()
                )
        return plain(received, mine, to, *others, **named)

    dist.all_to_all_single = counted
    try:
        got = [state.summed(0, gradient(dist.get_rank(), turn)) for turn in range(ROUNDS)]
    finally:
        dist.all_to_all_single = plain
    return {"got": torch.stack(got), "kept": state.kept[0], **sent}


class Odd(torch.nn.Module):
    """Two buckets, a weight of one entry, and a gradient that is no number on the rank and step that are asked for."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(8, 700), torch.nn.Tanh(), torch.nn.Linear(700, 700)
        )
        self.scale = torch.nn.Parameter(torch.ones(1))
        self.wrong = False

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs = self.layers(inputs).mean(dim=1) * self.scale
        return outputs * float("nan") if self.wrong else outputs


def trained(
    name: str, group: dist.ProcessGroup, machines: tuple[int, ...], *, wrong: bool = False
) -> torch.Tensor:
    """(weights,) after some steps of a model whose rank 1 goes wrong in the last but one."""
    model = Odd()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    module = strategy(name, machines=machines)(model, optimizer, group, CPU)
    random = torch.Generator().manual_seed(dist.get_rank())
    for step in range(10):
        model.wrong = wrong and step == 8 and dist.get_rank() == 1
        inputs = torch.randn(16, 8, generator=random)
        optimizer.zero_grad()
        ((module(inputs) - inputs.mean(dim=1)) ** 2).mean().backward()
        optimizer.step()
    return torch.cat([one.detach().flatten() for one in model.parameters()])


def alone(module: Any) -> str:
    """What a rank says whose peer makes no step."""
    try:
        for _ in range(3):  # powersgd begins with a step of plain sums
            module(torch.ones(2, 8)).sum().backward()
    except RuntimeError as error:
        return str(error)
    return ""


def main(rank: int, port: int, answer: Path) -> None:
    """One rank: all cases in one order."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=WORLD
    )
    pair = dist.new_group([0, 1])
    assert dist.group.WORLD is not None
    found: dict[str, Any] = {}
    for label, machines in LAYOUTS.items():
        group = dist.group.WORLD if sum(machines) == WORLD else pair
        if rank < sum(machines):
            found[label] = exchanged(group, machines)
    for name in ("ddp", *COMPRESSED, *SERVED):
        machines = LAYOUTS["4x1" if name in SERVED else "2x2"]
        found[name] = trained(name, dist.group.WORLD, machines)
        found[f"{name} wrong"] = trained(name, dist.group.WORLD, machines, wrong=True)
    hasty = {
        name: dist.new_group([0, 1], timeout=timedelta(seconds=2))
        for name in (*COMPRESSED, "ps-1", "ps-2")
    }
    lost: dict[str, Any] = {}
    for name, group in hasty.items() if rank < 2 else ():
        assert group is not None
        model = Odd()
        lost[name] = strategy(name, machines=(1, 1))(
            model, torch.optim.SGD(model.parameters()), group, CPU
        )
    if rank == 0:
        found |= {f"{name} alone": alone(module) for name, module in lost.items()}
    found["ps-2 inside"] = trained("ps-2", dist.group.WORLD, LAYOUTS["2x2"])
    torch.save(found, answer)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank found."""
    return answers_of("test_compression", WORLD, tmp_path_factory.mktemp("ranks"))


def in_numpy(machines: tuple[int, ...]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """(rounds, values) what every rank is to get; (values,) what all keep in the end."""
    devices = machines[0]
    part = ceil(VALUES / devices)
    count = ceil(DENSITY * part)
    kept = np.zeros((len(machines), devices, part))
    rounds = []
    for turn in range(ROUNDS):
        total = np.zeros((devices, part))
        for machine in range(len(machines)):
            summed = sum(
                gradient(machine * devices + one, turn).double().numpy() for one in range(devices)
            )
            own = kept[machine] + np.pad(summed, (0, part * devices - VALUES)).reshape(
                devices, part
            )
            for place in range(devices):
                picked = np.argsort(-np.abs(own[place]))[:count]
                total[place, picked] += own[place, picked]
                own[place, picked] = 0
            kept[machine] = own
        rounds.append(total.reshape(-1)[:VALUES])
    return np.array(rounds), kept.sum(axis=0).reshape(-1)[:VALUES]


@pytest.mark.parametrize("label", LAYOUTS)
def test_what_every_rank_gets_is_what_the_algorithm_says_and_what_is_not_sent_stays(
    ranks: list[dict[str, Any]], label: str
) -> None:
    machines = LAYOUTS[label]
    taking_part = [one[label] for one in ranks[: sum(machines)]]
    expected, left = in_numpy(machines)
    for one in taking_part:
        assert torch.equal(one["got"], taking_part[0]["got"]), (
            "ranks that differ by a bit drift apart"
        )
    np.testing.assert_allclose(taking_part[0]["got"].numpy(), expected, atol=1e-5)
    whole = sum(
        gradient(rank, turn).double() for rank in range(sum(machines)) for turn in range(ROUNDS)
    )
    kept = (
        torch.stack([one["kept"].double() for one in taking_part])
        .view(len(machines), -1)
        .sum(dim=0)[:VALUES]
    )
    np.testing.assert_allclose(kept.numpy(), left, atol=1e-5)
    np.testing.assert_allclose(
        (taking_part[0]["got"].double().sum(dim=0) + kept).numpy(), whole.numpy(), atol=1e-4
    )


@pytest.mark.parametrize("label", LAYOUTS)
def test_bytes_between_machines_are_those_of_the_formula(
    ranks: list[dict[str, Any]], label: str
) -> None:
    machines = LAYOUTS[label]
    formula = ROUNDS * sparse_bytes(4 * VALUES, len(machines), machines[0], DENSITY)
    for one in ranks[: sum(machines)]:
        assert one[label]["between"] == pytest.approx(formula, rel=0.02)
        dense = ROUNDS * 2 * (machines[0] - 1) / machines[0] * 4 * VALUES
        assert one[label]["inside"] == pytest.approx(dense, rel=0.02)


@pytest.mark.parametrize("name", COMPRESSED)
def test_ranks_stay_alike_and_learn_and_one_that_goes_wrong_is_heard_of_by_all(
    ranks: list[dict[str, Any]], name: str
) -> None:
    assert all(torch.equal(one[name], ranks[0][name]) for one in ranks)
    plain, begun = (
        ranks[0]["ddp"],
        torch.cat([one.detach().flatten() for one in Odd().parameters()]),
    )
    assert not torch.equal(ranks[0][name], plain), "nothing was compressed"
    assert (ranks[0][name] - plain).norm() < 0.8 * (begun - plain).norm()
    assert all(not one[f"{name} wrong"].isfinite().all() for one in ranks)


@pytest.mark.parametrize("name", [*SERVED, "ps-2 inside"])
def test_parameter_servers_make_the_same_step_as_a_ring_and_tell_all_of_what_is_no_number(
    ranks: list[dict[str, Any]], name: str
) -> None:
    assert all(torch.equal(one[name], ranks[0][name]) for one in ranks)
    torch.testing.assert_close(ranks[0][name], ranks[0]["ddp"], rtol=1e-5, atol=1e-6)
    assert all(
        not one.get(f"{name} wrong", torch.tensor(torch.nan)).isfinite().all() for one in ranks
    )


@pytest.mark.parametrize("name", [*COMPRESSED, "ps-1", "ps-2"])
def test_a_rank_whose_peer_does_not_come_is_told_in_time(
    ranks: list[dict[str, Any]], name: str
) -> None:
    assert "Timed out waiting 2000ms" in ranks[0][f"{name} alone"]


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
