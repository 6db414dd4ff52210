"""Every strategy on eight ranks of this machine, against one process that has all samples."""

from __future__ import annotations

import copy
import multiprocessing
import os
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tasks.node.strategies import communicates_always, strategy
from tasks.node.strategies.adasum import ADASUM, combine
from tasks.node.strategies.compression import COMPRESSED, SparseExchange
from tasks.node.strategies.grid import TENSOR
from tasks.node.strategies.refusals import STRATEGIES
from tasks.node.strategies.replicas import no_sync
from tasks.node.strategies.servers import SERVED
from tasks.node.workloads.transformer_lm import LanguageModel
from tests.formulas import adasum_bytes, sparse_bytes

pytestmark = [pytest.mark.local, pytest.mark.enable_socket]

Answers = list[dict[Any, Any]]

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
RANKS, WORLD = 4, 8
STEPS, BATCH = 3, 4
EXACT = [name for name in STRATEGIES if name not in (*COMPRESSED, *ADASUM)]
SIZES = (1, 700, 3, 120_000, 64, 1)  # of Adasum's parameters
ROUNDS, VALUES, DENSITY = 6, 5003, 0.05  # of MSTopK
LAYOUTS = ((2, 2), (1, 1, 1, 1))


class Mixed(nn.Module):
    """Tables, linear runs among layers that stay whole, a frozen weight and a free parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.bag = nn.Embedding(50, 16, padding_idx=0), nn.EmbeddingBag(40, 16)
        self.run = nn.Sequential(
            nn.LayerNorm(16),
            nn.Linear(16, 32),
            nn.Sequential(nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 48, bias=False), nn.Tanh()),
            nn.Linear(48, 16),
            nn.Unflatten(1, (1, 16)),
            nn.Flatten(),
            nn.Linear(16, 32),
            nn.ReLU(inplace=True),
            nn.Linear(32, 16),
        )
        self.run[2][1].bias.requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(1))
        self.is_wrong = False

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.words(inputs[:, :3]).sum(dim=1) + self.bag(inputs[:, 2:])
        found: Tensor = self.run(hidden).mean(dim=1) * self.scale
        return found * torch.nan if self.is_wrong else found


class Encoders(nn.Module):
    """Masked layers with samples first and second, norms before and after, a frozen one in eval."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, activation="gelu")
        self.words = nn.Embedding(50, 16)
        self.layers = nn.TransformerEncoder(
            layer, 2, norm=nn.LayerNorm(16), enable_nested_tensor=False
        )
        frozen = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.5, batch_first=True)
        self.frozen = nn.TransformerEncoder(frozen, 1).eval().requires_grad_(False)
        self.other = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0)
        self.language = LanguageModel(50, 5, 16, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        words = self.words(inputs)
        padding = (inputs > 40).index_fill(1, torch.tensor([0]), False)
        text = (words + self.frozen(words, src_key_padding_mask=padding)).transpose(0, 1)
        mask = torch.ones(5, 5).triu(1).bool()
        hidden = self.layers(text, mask=mask, src_key_padding_mask=padding)
        hidden = self.other(hidden, src_mask=torch.zeros(5, 5, dtype=text.dtype))
        return hidden.mean(dim=(0, 2)) + self.language(inputs).mean(dim=(1, 2))


def batch_of(rank: int, step: int, samples: int = BATCH) -> Tensor:
    """Indices (samples, 5)."""
    random = torch.Generator().manual_seed(100 * rank + step)
    return torch.randint(40, (samples, 5), generator=random)


def loss_of(module: Any, inputs: Tensor) -> Tensor:
    return ((module(inputs) - inputs.double().mean(dim=1) / 20) ** 2).mean()


def adagrad(model: nn.Module, *, clips: bool = False) -> torch.optim.Optimizer:
    """Has states before the first step, and may clip in a hook."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    groups = [{"params": weights[:2], "lr": 0.02}, {"params": weights[2:]}]
    optimizer = torch.optim.Adagrad(groups, lr=0.05, initial_accumulator_value=1.0)

    def clip(*_: object) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)

    if clips:
        optimizer.register_step_pre_hook(clip)
    return optimizer


def weights_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [weight for group in optimizer.param_groups for weight in group["params"]]


def flat(weights: Sequence[Tensor]) -> Tensor:
    """What this rank holds of them."""
    return torch.cat([local(weight).detach().flatten() for weight in weights])


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def wrapped(name: str, model: nn.Module, optimizer: torch.optim.Optimizer, group: Any) -> nn.Module:
    ranks = dist.get_world_size(group)
    machines = (2, 2) if name == "ddp-mstopk" else (1,) * ranks
    return strategy(name, machines=machines)(model, optimizer, group, CPU)


def trained(
    name: str, kind: Callable[[], nn.Module], group: Any, samples: Sequence[int] = ()
) -> dict[str, Any]:
    """How far this rank's weights are from those of one process with all samples.

    After that a step goes wrong on rank 1: are weights still finite.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    samples = samples or (BATCH,) * ranks
    torch.manual_seed(rank)  # ranks begin with the first's weights
    model = kind().double()
    whole = copy.deepcopy(model)
    for weight in whole.parameters():
        dist.broadcast(weight.data, group=group, group_src=0)
    clips = name not in ("tables", *TENSOR)
    optimizer, reference = adagrad(model, clips=clips), adagrad(whole, clips=clips)
    pairs = list(zip(weights_of(optimizer), weights_of(reference), strict=True))
    module: Any = wrapped(name, model, optimizer, group)

    def step(number: int) -> None:
        optimizer.zero_grad()
        reference.zero_grad()
        for micro in range(2):
            every = [batch_of(other, 2 * number + micro, samples[other]) for other in range(ranks)]
            (loss_of(whole, torch.cat(every)) / 2).backward()
            with nullcontext() if micro else no_sync(module):
                scale = ranks * samples[rank] / sum(samples) / 2
                (loss_of(module, every[rank]) * scale).backward()
        optimizer.step()
        reference.step()

    for number in range(STEPS):
        step(number)
    cuts = module.blocks.of if name in TENSOR else {}
    apart, held = 0.0, weights_of(optimizer)
    left = [pair for pair in pairs if name != "tables" or pair[0].numel()]
    for mine, (old, expected) in zip(held, left, strict=True):
        value = mine.full_tensor() if isinstance(mine, DTensor) else mine
        target = cuts[old][1](expected) if old in cuts else expected
        apart = max(apart, float((value - target).abs().max() / target.abs().max()))
    inner: Any = getattr(optimizer.step, "__self__", optimizer)
    states = getattr(inner, "optim", inner).state.values()
    found = {
        "apart": apart,
        "weights": flat(held),
        "states": sum(
            local(one).numel() for state in states for one in state.values() if one.dim()
        ),
        "always": communicates_always(module),
        "owners": getattr(module, "owners", []),
    }
    model.is_wrong = rank == 1  # type: ignore[assignment]
    step(STEPS)
    return found | {"finite": bool(flat(held).isfinite().all())}


def error_of(act: Callable[[], Any]) -> str:
    """The class of what `act` raises."""
    try:
        act()
    except Exception as error:
        return type(error).__name__
    return ""


def refused(name: str, change: Callable[[Any, Tensor], Tensor], group: Any) -> str:
    """What two steps raise whose batches `change` makes from the model and a batch."""
    model = Mixed()
    module = wrapped(name, model, torch.optim.SGD(model.parameters(), lr=0.1), group)

    def steps() -> None:
        for step in range(2):
            loss_of(module, change(model, batch_of(0, step))).backward()

    return error_of(steps)


def computed(model: Mixed, inputs: Tensor) -> Tensor:
    """On one rank, from the first step on."""
    if dist.get_rank() == 1:
        model.words.register_forward_pre_hook(lambda _, given: (given[0] + 0,))
    return inputs


def dropped(model: Mixed, inputs: Tensor) -> Tensor:
    """In training alone, as token dropout does."""
    model.words.register_forward_pre_hook(
        lambda module, given: (given[0] + 0,) if module.training else given
    )
    return inputs


def longer(model: Mixed, inputs: Tensor) -> Tensor:
    return torch.cat([inputs] * 2) if dist.get_rank() == 3 else inputs


def wider(model: Mixed, inputs: Tensor) -> Tensor:
    return torch.cat([inputs, inputs], 1) if dist.get_rank() == 1 else inputs


def changing(model: Any, inputs: Tensor) -> Tensor:
    model.calls = getattr(model, "calls", 0) + 1
    return inputs[: 5 - model.calls]


def adasum_step(name: str, group: Any) -> dict[str, Any]:
    """How far a step of two micro-steps is from the definition."""
    torch.manual_seed(0)
    model = Mixed().double()
    copies = [copy.deepcopy(model) for _ in range(RANKS)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    module = wrapped(name, model, optimizer, group)
    for rank, trains in enumerate([*copies, module]):
        own = rank if rank < RANKS else dist.get_rank(group)
        with no_sync(trains):
            loss_of(trains, batch_of(own, 0)).backward()
        loss_of(trains, batch_of(own, 1)).backward()
    before = copy.deepcopy(model)
    optimizer.step()
    apart = 0.0
    models = (before, model, *copies)
    for begun, mine, *theirs in zip(*(each.parameters() for each in models), strict=True):
        if mine.requires_grad:
            gradients = [each.grad.flatten().numpy() for each in theirs]  # type: ignore[union-attr]
            change = ((begun - mine) / 0.1).detach().flatten().numpy()
            apart = max(apart, float(np.abs(change - definition(gradients)).max()))
    return {"apart": apart, "weights": flat(list(model.parameters()))}


def definition(vectors: Sequence[Any]) -> Any:
    """One parameter's Adasum over 2^m ranks."""
    if len(vectors) == 1:
        return vectors[0]
    half = len(vectors) // 2
    a, b = definition(vectors[:half]), definition(vectors[half:])
    product, first, second = a @ b, a @ a, b @ b
    return (1 - product / (2 * first or 1)) * a + (1 - product / (2 * second or 1)) * b


def vector(rank: int) -> Tensor:
    """What a rank has for Adasum: parameters of several scales, some zero on most ranks."""
    random = torch.Generator().manual_seed(rank)
    parts = [10.0**place * torch.randn(size, generator=random) for place, size in enumerate(SIZES)]
    return torch.cat([part * (rank == 1 or place > 2) for place, part in enumerate(parts)])


def counted(act: Callable[[], None]) -> Counter[int]:
    """Bytes that this rank sends to each other."""
    sent, plain = Counter[int](), dist.batch_isend_irecv

    def send(operations: Any) -> Any:
        for each in operations:
            sent[each.group_peer] += each.tensor.nbytes * (each.op is dist.isend)
        return plain(operations)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "batch_isend_irecv", send)
        act()
    return sent


def combined(group: Any) -> dict[str, Any]:
    values = vector(dist.get_rank())
    sent = counted(lambda: combine(values, SIZES, group))
    return {"values": values, "bytes": sent.total()}


def gradient(rank: int, turn: int) -> Tensor:
    return torch.randn(VALUES, generator=torch.Generator().manual_seed(100 * rank + turn))


def sparse(machines: tuple[int, ...], group: Any) -> dict[str, Any]:
    """Sums of each round, the residual, and bytes sent inside the machine and to others."""
    state, own, sums = SparseExchange(group, machines, density=DENSITY), dist.get_rank(group), []
    sent = counted(
        lambda: sums.extend(state.summed(0, gradient(own, turn)) for turn in range(ROUNDS))
    )
    inside = sum(count for rank, count in sent.items() if rank // machines[0] == own // machines[0])
    return {
        "sums": torch.stack(sums),
        "residual": state.residuals[0],
        "inside": inside,
        "between": sent.total() - inside,
    }


def pair_of_layers(name: str, group: Any) -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    return wrapped(name, model, torch.optim.SGD(model.parameters()), group)


def one_step(module: nn.Module) -> None:
    module(torch.ones(2, 4)).sum().backward()


def serve(rank: int, port: int, answer: Path) -> None:
    """One rank: all cases in one order."""
    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=WORLD)
    everyone, group = dist.group.WORLD, dist.new_group(range(RANKS))
    pairs = {
        name: dist.new_group([0, 1], timeout=timedelta(seconds=2))
        for name in ("ps-1", "tensor-1d", "adasum")
    }
    found = {"tensor-2.5d": trained("tensor-2.5d", Mixed, everyone), WORLD: combined(everyone)}
    found |= cases(group) if rank < RANKS else {}
    modules = {name: pair_of_layers(name, pairs[name]) for name in pairs} if rank < 2 else {}
    for name, module in modules.items() if rank == 0 else ():
        found[name, "alone"] = error_of(partial(one_step, module))
    torch.save(found, answer / str(rank))
    dist.barrier()


def cases(group: Any) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for name in STRATEGIES:
        if name != "tensor-2.5d":
            found[name] = trained(name, Mixed, group)
    for name in ("tensor-1d", "tensor-2d"):
        found[name, "encoders"] = trained(name, Encoders, group)
    found["unequal"] = trained("tables", Mixed, group, (2, 4, 6, 4))
    for change in (computed, dropped, wider, changing):
        found["tables", change.__name__] = refused("tables", change, group)
    found["tensor-1d", "longer"] = refused("tensor-1d", longer, group)
    for name in ADASUM:
        found[name, "step"] = adasum_step(name, group)
    found[RANKS] = combined(group)
    return found | {machines: sparse(machines, group) for machines in LAYOUTS}


def main(port: int, answer: Path) -> None:
    """All ranks, forked, so that torch is loaded once."""
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=serve, args=(rank, port, answer)) for rank in range(WORLD)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    sys.exit(max(abs(process.exitcode or 0) for process in processes))


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """What each rank found."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, "-W", "ignore", "-m", "tests.local.test_strategies"]
    subprocess.run(
        [*command, str(port), str(folder)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=True,
        timeout=200,
    )
    return [torch.load(folder / str(rank), weights_only=False) for rank in range(WORLD)]


@pytest.mark.parametrize("name", EXACT)
def test_a_step_is_that_of_one_process(answers: Answers, name: str) -> None:
    for answer in answers[: WORLD if name == "tensor-2.5d" else RANKS]:
        assert answer[name]["apart"] < 1e-10
        assert answer[name]["always"] is (name not in ("ddp", *SERVED))


@pytest.mark.parametrize("name", ["tensor-1d", "tensor-2d"])
def test_divided_encoders_train_as_one_process(answers: Answers, name: str) -> None:
    assert all(answer[name, "encoders"]["apart"] < 1e-10 for answer in answers[:RANKS])


def test_ranks_hold_shares_of_weights_and_states(answers: Answers) -> None:
    ranks = answers[:RANKS]
    whole = ranks[0]["ddp"]
    assert all(torch.equal(answer["zero1"]["weights"], whole["weights"]) for answer in ranks)
    for name in ("zero1", "fsdp", "zero2"):
        assert sum(answer[name]["states"] for answer in ranks) == whole["states"]
        assert max(answer[name]["states"] for answer in ranks) < 0.6 * whole["states"]
    sizes = {name: [len(answer[name]["weights"]) for answer in ranks] for name in EXACT}
    for name in ("fsdp", "zero2"):
        assert sum(sizes[name]) == sizes["ddp"][0]
    for name in TENSOR:
        assert len(set(sizes[name])) == 1 and sizes[name][0] < 0.65 * sizes["ddp"][0]


def test_each_table_lies_on_one_rank_the_one_with_fewest_samples(answers: Answers) -> None:
    assert sorted(answers[0]["tables"]["owners"]) == [0, 1]
    for answer in answers[:RANKS]:
        assert answer["unequal"]["apart"] < 1e-10 and answer["unequal"]["owners"] == [0, 0]


@pytest.mark.parametrize("name", COMPRESSED)
def test_compression_keeps_ranks_alike_and_learns(answers: Answers, name: str) -> None:
    ranks, plain = answers[:RANKS], answers[0]["ddp"]["weights"]
    own = ranks[0][name]["weights"]
    assert all(torch.equal(answer[name]["weights"], own) for answer in ranks)
    assert not torch.equal(own, plain)
    torch.manual_seed(0)
    begun = flat(weights_of(adagrad(Mixed().double())))
    assert (own - plain).norm() < 0.8 * (begun - plain).norm()


@pytest.mark.parametrize("name", [name for name in STRATEGIES if name not in TENSOR])
def test_all_ranks_hear_of_a_nan(answers: Answers, name: str) -> None:
    assert not any(answer[name]["finite"] for answer in answers[:RANKS])


def test_what_cannot_be_trained_is_refused_by_all_ranks(answers: Answers) -> None:
    for answer in answers[:RANKS]:
        for reason in ("computed", "dropped", "wider", "changing"):
            assert answer["tables", reason] == "ValueError", reason
        assert answer["tensor-1d", "longer"] == "ValueError"


@pytest.mark.parametrize("name", ["ps-1", "tensor-1d", "adasum"])
def test_a_missing_rank_is_an_error_within_the_timeout(answers: Answers, name: str) -> None:
    assert answers[0][name, "alone"] in ("RuntimeError", "DistBackendError")


@pytest.mark.parametrize("name", ADASUM)
def test_adasum_steps_are_those_of_the_definition(answers: Answers, name: str) -> None:
    for answer in answers[:RANKS]:
        assert answer[name, "step"]["apart"] < 1e-10
        assert torch.equal(answer[name, "step"]["weights"], answers[0][name, "step"]["weights"])


@pytest.mark.parametrize("world", [RANKS, WORLD])
def test_adasum_is_its_definition_and_sends_its_bytes(answers: Answers, world: int) -> None:
    found = [answer[world] for answer in answers[:world]]
    formula = adasum_bytes(4.0 * sum(SIZES), len(SIZES), world)
    for of_rank in found:
        assert torch.equal(of_rank["values"], found[0]["values"])
        assert of_rank["bytes"] == pytest.approx(formula, abs=8 * world)
    given = [vector(rank).double().split(list(SIZES)) for rank in range(world)]
    for own, *theirs in zip(found[0]["values"].double().split(list(SIZES)), *given, strict=True):
        expected = definition([each.numpy() for each in theirs])
        assert np.abs(own.numpy() - expected).max() <= 1e-6 * np.abs(expected).max()


def by_definition(machines: tuple[int, ...]) -> tuple[Any, Any]:
    """(rounds, values) MSTopK's sums, and (values,) the residuals, in NumPy."""
    devices = machines[0]
    share = ceil(VALUES / devices)
    residual = np.zeros((len(machines), devices, share))
    rounds = []
    for turn in range(ROUNDS):
        total = np.zeros((devices, share))
        for machine, own in enumerate(residual):
            ranks = range(machine * devices, (machine + 1) * devices)
            summed = sum(gradient(rank, turn).double().numpy() for rank in ranks)
            own += np.pad(summed, (0, share * devices - VALUES)).reshape(devices, share)
            for place in range(devices):
                picked = np.argsort(-np.abs(own[place]))[: ceil(DENSITY * share)]
                total[place, picked] += own[place, picked]
                own[place, picked] = 0
        rounds.append(total.reshape(-1)[:VALUES])
    return np.array(rounds), residual.sum(axis=0).reshape(-1)[:VALUES]


@pytest.mark.parametrize("machines", LAYOUTS)
def test_mstopk_sends_the_largest_entries_and_keeps_the_rest(
    answers: Answers, machines: tuple[int, ...]
) -> None:
    found = [answer[machines] for answer in answers[:RANKS]]
    sums, residual = by_definition(machines)
    kept = torch.stack([answer["residual"] for answer in found]).view(len(machines), -1).sum(dim=0)
    np.testing.assert_allclose(found[0]["sums"].numpy(), sums, atol=1e-5)
    np.testing.assert_allclose(kept[:VALUES].numpy(), residual, atol=1e-5)
    for answer in found:
        assert torch.equal(answer["sums"], found[0]["sums"])
        formula = ROUNDS * sparse_bytes(4 * VALUES, len(machines), machines[0], DENSITY)
        assert answer["between"] == pytest.approx(formula, rel=0.02)
        dense = ROUNDS * 2 * (machines[0] - 1) / machines[0] * 4 * VALUES
        assert answer["inside"] == pytest.approx(dense, rel=0.02)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
