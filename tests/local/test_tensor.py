"""Tensor parallelism on ranks that are processes of this machine: against the same model whole, with all samples."""

from __future__ import annotations

import copy
import multiprocessing
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tasks.node.strategies import communicates_always, no_sync, refuse_model, strategy
from tasks.node.strategies.grid import TENSOR, shape_of
from tasks.node.strategies.tensor import Divided, refuse_optimizer
from tasks.node.workloads import transformer_lm

pytestmark = [pytest.mark.local, pytest.mark.enable_socket]

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
EXACT = {torch.float32: 1e-5, torch.float64: 1e-12}
STEPS, MICRO_STEPS, BATCH = 2, 2, 2
# What each number of processes trains: every grid that the claims name.
GRIDS = {4: ("tensor-1d", "tensor-2d"), 8: ("tensor-2.5d",), 16: ("tensor-2d",)}


class Odd(nn.Module):
    """Runs among layers that stay whole, a norm and a Sequential in one, a frozen weight, a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 16)
        self.run = nn.Sequential(
            nn.LayerNorm(16),
            nn.Linear(16, 32),
            nn.Sequential(nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 48, bias=False), nn.Tanh()),
            nn.Linear(48, 16),
            nn.BatchNorm1d(3),
            nn.Linear(16, 32),
            nn.ReLU(inplace=True),
            nn.Linear(32, 16),
        )
        self.run[2][1].bias.requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(1))
        self.wrong = False

    def forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = self.run(self.first(inputs)).mean(dim=-1) * self.scale
        return found * float("nan") if self.wrong else found


class Doubled(nn.LayerNorm):
    """Does more than torch's own."""

    def forward(self, inputs: Tensor) -> Tensor:
        return 2 * super().forward(inputs)


class Padded(nn.Module):
    """Layers of samples in the second dimension, norms after sums, masked; and one layer called by itself."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, activation="gelu")
        self.layers = nn.TransformerEncoder(
            layer, 2, norm=nn.LayerNorm(16), enable_nested_tensor=False
        )
        self.other = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0)
        self.last = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0),
            1,
            norm=Doubled(16),
            enable_nested_tensor=False,
        )
        self.head = nn.Linear(16, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        text = inputs.repeat(1, 1, 4)[..., :16].transpose(0, 1)
        padding = inputs[..., 0] > 1.5
        padding[:, 0] = False
        ahead = torch.ones(3, 3).triu(1).bool()
        hidden = self.layers(text, mask=ahead, src_key_padding_mask=padding)
        hidden = self.last(self.other(hidden, src_mask=torch.zeros(3, 3)))
        found: Tensor = self.head(hidden).squeeze(-1).transpose(0, 1)
        return found


class Language(nn.Module):
    """The built-in language model, of the numbers that others are given."""

    def __init__(self) -> None:
        super().__init__()
        self.model = transformer_lm.LanguageModel(16, 3, 16, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        tokens = (inputs[..., 0].abs() * 7).long() % 16
        found: Tensor = self.model(tokens).mean(dim=1)
        return found


MODELS: dict[str, Callable[[], nn.Module]] = {"odd": Odd, "padded": Padded, "language": Language}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "odd": lambda weights: torch.optim.Adagrad(weights, lr=0.05, initial_accumulator_value=1.0),
    "padded": lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9),
    "language": lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9),
}


def batches(rank: int, step: int) -> Tensor:
    return torch.randn(
        MICRO_STEPS, BATCH, 3, 5, generator=torch.Generator().manual_seed(100 * rank + step)
    )


def loss_of(module: Any, inputs: Tensor) -> Tensor:
    return ((module(inputs) - inputs.mean(dim=-1)) ** 2).mean()


def off(own: Tensor, expected: Tensor, largest: Tensor) -> float:
    """Largest difference, as a part of `largest`."""
    return float((own - expected).abs().max() / largest.detach().abs().max())


def apart(model: str, name: str, group: dist.ProcessGroup, dtype: torch.dtype) -> dict[str, float]:
    """How far this rank's losses, gradients and weights are from those of the model whole: the largest of each.

    Weights as parts of the largest of each parameter, gradients of the largest of all: some are 0 but for rounding.
    """
    torch.manual_seed(dist.get_rank(group))  # ranks begin with the first's weights
    mine = MODELS[model]().to(dtype)
    whole = copy.deepcopy(mine)
    for one in whole.parameters():
        dist.broadcast(one.data, group=group, group_src=0)
    paths = {one: path for path, one in mine.named_parameters()}
    expected, reference = dict(whole.named_parameters()), OPTIMIZERS[model](whole.parameters())
    optimizer = OPTIMIZERS[model](mine.parameters())
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    module = strategy(name, machines=(1,) * world)(mine, optimizer, group, CPU)
    assert isinstance(module, Divided) and communicates_always(module)
    cuts = {block: (paths[one], cut) for one, (block, cut) in module.blocks.of.items()}
    found = {
        "numbers": float(sum(one.numel() for one in cuts)),
        "weights": 0.0,
        "gradients": 0.0,
        "losses": 0.0,
    }
    for step in range(STEPS):
        optimizer.zero_grad()
        reference.zero_grad()
        for micro in range(MICRO_STEPS):
            every = [batches(one, step)[micro].to(dtype) for one in range(world)]
            losses = [loss_of(whole, inputs) for inputs in every]
            (torch.stack(losses).sum() / world).backward()
            with nullcontext() if micro == MICRO_STEPS - 1 else no_sync(module):
                loss = loss_of(module, every[rank])
                loss.backward()
            found["losses"] = max(
                found["losses"], off(loss.detach(), losses[rank].detach(), losses[rank])
            )
        largest = torch.stack(
            [one.grad.abs().max() for one in whole.parameters() if one.grad is not None]
        ).max()
        pairs = []
        for held in optimizer.param_groups[0]["params"]:
            path, cut = cuts.get(held, (paths.get(held, ""), lambda values: values))
            pairs.append((held, expected[path], cut))
            if held.requires_grad:
                found["gradients"] = max(
                    found["gradients"], off(held.grad, cut(expected[path].grad), largest)
                )
        optimizer.step()
        reference.step()
        for held, one, cut in pairs:
            found["weights"] = max(found["weights"], off(held.detach(), cut(one.detach()), one))
    return found


def wrong(name: str, group: dist.ProcessGroup) -> list[float]:
    """This rank's loss in two steps, of which the last rank goes wrong in the first."""
    torch.manual_seed(0)
    model = Odd()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.wrong = dist.get_rank(group) == dist.get_world_size(group) - 1
    module = strategy(name, machines=(1,) * dist.get_world_size(group))(
        model, optimizer, group, CPU
    )
    losses = []
    for _ in range(2):
        loss = loss_of(module, batches(dist.get_rank(group), 0)[0])
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return losses


def half(group: dist.ProcessGroup) -> str:
    """The dtype of what is sent in bf16, and the loss against that in 32 bits."""
    torch.manual_seed(0)
    model, sent, plain = Language(), set(), dist.batch_isend_irecv
    module = strategy("tensor-2d", machines=(1,) * 4)(
        model, torch.optim.SGD(model.parameters(), lr=0.1), group, CPU
    )
    dist.batch_isend_irecv = lambda asked: (
        sent.update(one.tensor.dtype for one in asked) or plain(asked)
    )
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(module, batches(dist.get_rank(group), 0)[0])
    loss.backward()
    dist.batch_isend_irecv = plain
    assert all(
        one.grad is not None and one.grad.dtype == torch.float32 for one in module.parameters()
    )
    return " ".join(sorted(str(one) for one in sent))


class Skipping(nn.Module):
    """A run whose last pair may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.run = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.rest = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.run(inputs)


def unused(name: str, group: dist.ProcessGroup) -> str:
    model = Skipping()
    module = strategy(name, machines=(1,) * 4)(
        model, torch.optim.SGD(model.parameters(), lr=0.1), group, CPU
    )
    try:
        module(torch.ones(2, 4)).sum().backward()
    except RuntimeError as error:
        return str(error)
    return ""


def uneven(name: str, group: dist.ProcessGroup) -> str:
    """What a rank says where the last one's batch is larger from the first step on."""
    model = layers(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    module = strategy(name, machines=(1,) * 4)(
        model, torch.optim.SGD(model.parameters(), lr=0.1), group, CPU
    )
    try:
        module(torch.ones(2 + (dist.get_rank(group) == 3), 4)).sum().backward()
    except ValueError as error:
        return str(error)
    return ""


def frozen(name: str, group: dist.ProcessGroup, biases: bool) -> list[float]:
    """Losses of three steps of a model whose divided layers, or their biases, are frozen, and whose head is not."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)), nn.Flatten(), nn.Linear(4, 1)
    )
    for path, one in model[0].named_parameters():
        one.requires_grad_(biases and path.endswith("weight"))
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.1)
    module = strategy(name, machines=(1,) * 4)(model, optimizer, group, CPU)
    losses = []
    for step in range(3):
        optimizer.zero_grad()
        loss = module(torch.full((2, 4), 1.0 + step)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def alone(group: dist.ProcessGroup) -> str:
    """What a rank says whose peers do not come."""
    model = Skipping()
    try:
        module = strategy("tensor-1d", machines=(1, 1))(
            model, torch.optim.SGD(model.parameters(), lr=0.1), group, CPU
        )
        if dist.get_rank(group) == 0:
            module(torch.ones(2, 4)).sum().backward()
    except RuntimeError as error:
        return str(error)
    return ""


def serve(rank: int, world: int, port: int, answer: Path) -> None:
    """One rank: all cases in one order."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world
    )
    group = dist.group.WORLD
    assert group is not None
    found: dict[Any, Any] = {}
    for name in GRIDS[world]:
        for model in MODELS:
            for dtype in list(EXACT)[: 1 + (world == 4)]:
                found[name, model, dtype] = apart(model, name, group, dtype)
        if world == 4:
            found[name, "wrong"] = wrong(name, group)
            found[name, "unused"] = unused(name, group)
            found[name, "uneven"] = uneven(name, group)
            found[name, "frozen"] = [frozen(name, group, biases) for biases in (False, True)]
    if world == 4:
        found["half"] = half(group)
        hasty = dist.new_group([0, 1], timeout=timedelta(seconds=2))
        found["alone"] = alone(hasty) if rank < 2 else ""
    torch.save(found, answer / str(rank))
    dist.barrier()


def main(world: int, port: int, answer: Path) -> None:
    """All ranks, forked: torch is loaded once."""
    started = multiprocessing.get_context("fork")
    processes = [
        started.Process(target=serve, args=(rank, world, port, answer)) for rank in range(world)
    ]
    for one in processes:
        one.start()
    for one in processes:
        one.join()
    sys.exit(max(abs(one.exitcode or 0) for one in processes))


@pytest.fixture(scope="module", params=sorted(GRIDS))
def ranks(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[Any, Any]]:
    """What each of so many ranks found."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    answer = tmp_path_factory.mktemp("ranks")
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "tests.local.test_tensor",
        str(request.param),
        str(port),
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([*command, str(answer)], cwd=ROOT, env=environment, check=True, timeout=300)
    return [torch.load(answer / str(rank)) for rank in range(request.param)]


@pytest.mark.parametrize("dtype", EXACT)
@pytest.mark.parametrize("model", MODELS)
def test_a_divided_model_trains_as_the_whole_one_does(
    ranks: list[dict[Any, Any]], model: str, dtype: torch.dtype
) -> None:
    for name in GRIDS[len(ranks)]:
        if (name, model, dtype) not in ranks[0]:
            continue
        found = [one[name, model, dtype] for one in ranks]
        for what in ("losses", "gradients", "weights"):
            assert max(one[what] for one in found) <= EXACT[dtype], (name, what)
        whole, (rows, columns, _) = MODELS[model](), shape_of(name, len(ranks))
        numbers = sum(one.numel() for one in whole.parameters())
        assert {one["numbers"] for one in found} == {found[0]["numbers"]}, (
            "ranks hold as much as each other"
        )
        assert 0 < found[0]["numbers"] < 1.4 * numbers / (rows * columns)


def test_what_is_no_number_at_one_rank_is_seen_and_hangs_nobody(
    ranks: list[dict[Any, Any]],
) -> None:
    for name in GRIDS[len(ranks)] if len(ranks) == 4 else ():
        first = [one[name, "wrong"][0] for one in ranks]
        last = [one[name, "wrong"][1] for one in ranks]
        assert first[-1] != first[-1] and not any(one != one for one in first[:-1])
        assert all(one != one for one in last), (
            "weights of a rank that nothing reached would train on"
        )


def test_in_bf16_products_are_sent_in_16_bits(ranks: list[dict[Any, Any]]) -> None:
    if len(ranks) == 4:
        assert {one["half"] for one in ranks} == {"torch.bfloat16 torch.float32"}


def test_a_block_without_gradient_and_a_rank_that_does_not_come_are_errors(
    ranks: list[dict[Any, Any]],
) -> None:
    if len(ranks) == 4:
        for name in GRIDS[4]:
            assert all(
                "a step computed no gradient of rest.parts" in one[name, "unused"] for one in ranks
            )
        assert "Timed out waiting 2000ms" in ranks[0]["alone"]


def test_inputs_of_different_sizes_are_refused_by_all_ranks(ranks: list[dict[Any, Any]]) -> None:
    for name in GRIDS[4] if len(ranks) == 4 else ():
        assert all(
            "[(2, 4)] on rank 0, [(3, 4)] on rank 3; take ddp" in one[name, "uneven"]
            for one in ranks
        )


@pytest.mark.parametrize("kind", [torch.optim.Adafactor, torch.optim.LBFGS])
def test_an_optimizer_that_looks_at_whole_weights_and_a_hook_of_its_steps_are_refused(
    kind: Any,
) -> None:
    weights = [nn.Parameter(torch.ones(2, 2))]
    with pytest.raises(
        ValueError,
        match=f"tensor-1d: {kind.__name__} may look at more of a weight.*take ddp, or one",
    ):
        refuse_optimizer("tensor-1d", kind(weights))
    optimizer = torch.optim.SGD(weights)
    refuse_optimizer("tensor-1d", optimizer)
    optimizer.register_step_pre_hook(lambda *_: None)
    with pytest.raises(ValueError, match=r"a hook of the optimizer's steps, .* take ddp or fsdp"):
        refuse_optimizer("tensor-1d", optimizer)


def test_layers_that_are_frozen_whole_or_in_part_hold_up_no_step(
    ranks: list[dict[Any, Any]],
) -> None:
    for name in GRIDS[4] if len(ranks) == 4 else ():
        whole, in_part = ranks[0][name, "frozen"]
        assert len(whole) == len(in_part) == 3 and whole[0] == pytest.approx(in_part[0])


@pytest.mark.parametrize(
    ("name", "machines", "shape"),
    [
        ("tensor-1d", (3, 3), (1, 6, 1)),
        ("tensor-2d", (2, 2), (2, 2, 1)),
        ("tensor-2d", (16,), (4, 4, 1)),
        ("tensor-2.5d", (8,), (2, 2, 2)),
        ("tensor-2.5d", (4, 4, 4, 4), (2, 2, 4)),
        ("tensor-2.5d", (18,), (3, 3, 2)),
        ("tensor-2.5d", (32, 32), (4, 4, 4)),
    ],
)
def test_ranks_are_a_grid_with_the_largest_side_that_fits(
    name: str, machines: tuple[int, ...], shape: tuple[int, int, int]
) -> None:
    strategy(name, machines=machines)
    assert shape_of(name, sum(machines)) == shape


@pytest.mark.parametrize(
    ("name", "machines", "fitting"),
    [
        ("tensor-1d", (1,), "1 device: it needs at least 2; take ddp, or 2 or 3 devices"),
        (
            "tensor-2d",
            (4, 2),
            "6 devices: it needs q x q with q of 2 or more; take ddp, or 4 or 9 devices",
        ),
        (
            "tensor-2.5d",
            (2, 2),
            "4 devices: it needs q x q x d with q and d of 2 or more; take ddp, or 8 or 12",
        ),
        ("tensor-2.5d", (9,), "9 devices: it needs .*; take ddp, or 8 or 12 devices"),
    ],
)
def test_ranks_that_are_no_grid_are_refused_naming_what_fits(
    name: str, machines: tuple[int, ...], fitting: str
) -> None:
    with pytest.raises(ValueError, match=f"{name} on {fitting}"):
        strategy(name, machines=machines)


@pytest.mark.parametrize("name", TENSOR)
def test_what_is_switched_on_beside_it_is_refused(name: str) -> None:
    with pytest.raises(
        ValueError, match=f"{name} with compile: divided layers are neither recomputed nor compiled"
    ):
        strategy(name, "compile", machines=(1,) * 36)


def layers(*modules: nn.Module) -> nn.Module:
    return nn.Sequential(*modules)


@pytest.mark.parametrize(
    ("name", "ranks", "model", "said"),
    [
        ("tensor-1d", 4, lambda: nn.Linear(4, 4), "this model has nothing to divide: .*; take ddp$"),
        ("tensor-2d", 4, lambda: layers(nn.Linear(4, 4), nn.Conv1d(4, 4, 1), nn.Linear(4, 4)), "nothing to divide"),
        ("tensor-2d", 4, lambda: layers(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 1)),
         r"4 devices: 2 \(Linear of 6 to 1 features\) does not divide by 2; take ddp$"),
        ("tensor-2d", 16, lambda: layers(nn.Linear(4, 6), nn.Linear(6, 8)),
         r"16 devices: 0 \(Linear of 4 to 6 features\) does not divide by 4; take ddp, or 4 devices"),
        ("tensor-1d", 8, Language, r"layers.0.self_attn \(attention of 4 heads\) does not divide by 8; take ddp, or 2"),
        ("tensor-2.5d", 18, Language, r"model.layers.layers.0.self_attn .* divide by 3; take ddp, or 8 or 12 or 16"),
    ],
)  # fmt: skip
def test_a_layer_that_does_not_divide_is_named_with_what_fits(
    name: str, ranks: int, model: Callable[[], nn.Module], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        refuse_model(name, model(), (ranks,))


class Tied(nn.Module):
    """Two linear layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.run = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        self.run[2].weight = self.run[0].weight


def hooked() -> nn.Module:
    model = layers(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    model[2].register_forward_hook(lambda *_: None)
    return model


def patched() -> nn.Module:
    model = layers(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    model[2].forward = lambda inputs: inputs
    return model


@pytest.mark.parametrize("model", [Tied, hooked, patched])
def test_what_does_more_than_torchs_own_layers_stays_whole(model: Any) -> None:
    with pytest.raises(ValueError, match="nothing to divide"):
        refuse_model("tensor-1d", model(), (2,))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
