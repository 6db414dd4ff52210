"""What strategies refuse, by the class of the error and the layer or counts that it names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tasks.node.strategies import STRATEGIES, refuse_model, refuse_training, strategy
from tasks.node.strategies.refusals import refuse_optimizer
from tasks.node.strategies.tables import Stub
from tasks.node.workloads.transformer_lm import LanguageModel


def sequence(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(*layers)


def pair() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))


def tied() -> nn.Module:
    model = nn.Sequential(nn.Embedding(4, 4), *pair())
    model[1].weight = model[3].weight = model[0].weight
    return model


def hooked() -> nn.Module:
    model = pair()
    model[2].register_forward_hook(lambda *_: None)
    return model


def patched() -> nn.Module:
    model = pair()
    model[2].forward = lambda inputs: inputs
    return model


@pytest.mark.parametrize(
    ("name", "machines", "fitting"),
    [
        ("tensor-1d", (1,), "2 or 3 devices"),
        ("tensor-2d", (4, 2), "4 or 9 devices"),
        ("tensor-2.5d", (2, 2), "8 or 12 devices"),
        ("adasum", (1,), "2 devices"),
        ("adasum", (1, 1, 1), "2 or 4 devices"),
        ("adasum-delta", (4, 2), "4 or 8 devices"),
        ("ddp-mstopk", (2, 1), "ddp-fp16 or ddp-powersgd"),
        ("ddp-mstopk", (4,), "ddp-fp16"),
        ("ps-4", (1, 1), "ddp or ps-1 or ps-2"),
        ("ps-1", (4,), "take ddp"),
        ("tables", (1,), "take ddp"),
        ("dpp", (1, 1), "adasum, adasum-delta"),
    ],
)
def test_machines_that_do_not_fit_are_refused_with_those_that_do(
    name: str, machines: tuple[int, ...], fitting: str
) -> None:
    with pytest.raises(ValueError, match=fitting):
        strategy(name, machines=machines)


@pytest.mark.parametrize("name", STRATEGIES)
def test_each_strategy_can_be_named(name: str) -> None:
    assert callable(strategy(name, machines=(1,) * 16))


@pytest.mark.parametrize(
    ("name", "switches"),
    [
        ("tensor-1d", "compile"),
        ("tables", "checkpointing"),
        ("ddp", "offload"),
        ("fsdp", "offload"),
    ],
)
def test_switches_that_do_not_fit_are_refused(name: str, switches: str) -> None:
    with pytest.raises(ValueError, match=switches):
        strategy(name, switches)
    strategy("zero2", "offload", torch.device("cuda"))


@pytest.mark.parametrize(
    ("name", "precision", "batches"),
    [
        ("zero1", "fp16", [4, 4]),
        ("adasum", "fp16", [4, 4]),
        ("adasum-delta", "fp32", [6, 2]),
        ("tensor-1d", "bf16", [6, 2]),
    ],
)
def test_scaled_gradients_and_unequal_batches_are_refused(
    name: str, precision: str, batches: list[int]
) -> None:
    with pytest.raises(ValueError, match=name):
        refuse_training(name, precision, batches)
    refuse_training(name, "bf16", [4, 4])
    refuse_training("ps-1", "fp16", [6, 2])


@pytest.mark.parametrize(
    ("name", "ranks", "model", "named"),
    [
        ("tensor-1d", 4, lambda: nn.Linear(4, 4), "nothing to divide"),
        ("tensor-1d", 2, hooked, "nothing to divide"),
        ("tensor-1d", 2, patched, "nothing to divide"),
        ("tensor-1d", 2, tied, "nothing to divide"),
        ("tensor-2d", 4, lambda: sequence(pair()[0], nn.Conv1d(4, 4, 1), pair()[0]), "nothing"),
        ("tensor-2d", 4, lambda: sequence(nn.Linear(4, 6), nn.Linear(6, 1)), ": 1 "),
        ("tensor-2d", 16, lambda: sequence(nn.Linear(4, 6), nn.Linear(6, 8)), "or 4 devices"),
        ("tensor-1d", 8, lambda: LanguageModel(16, 3, 16, 1), "self_attn .* or 2 or 4"),
        ("tensor-2.5d", 18, lambda: LanguageModel(16, 3, 16, 1), "self_attn .* or 8 or 12"),
        ("tables", 2, pair, "nn.Embedding"),
        ("tables", 2, lambda: sequence(nn.Embedding(3, 3, sparse=True)), ": 0 "),
        ("tables", 2, lambda: sequence(nn.Embedding(3, 3, max_norm=1.0)), ": 0 "),
        ("tables", 2, lambda: sequence(nn.Embedding(3, 3, scale_grad_by_freq=True)), ": 0 "),
        ("tables", 2, tied, ": 0 "),
    ],
)  # fmt: skip
def test_models_that_cannot_be_divided_are_refused_by_layer(
    name: str, ranks: int, model: Callable[[], nn.Module], named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        refuse_model(name, model(), (ranks,))


class Unhooked(torch.optim.Optimizer):
    """Calls no hooks."""

    def __init__(self, weights: Any) -> None:
        self.param_groups = [{"params": list(weights)}]
        self._optimizer_step_pre_hooks = self._optimizer_step_post_hooks = {}

    def step(self, closure: Any = None) -> None:
        """Nothing."""


def test_optimizers_that_need_whole_weights_hooks_or_none_are_refused() -> None:
    weights = [nn.Parameter(torch.ones(2, 2))]
    for kind in (torch.optim.Adafactor, torch.optim.LBFGS):
        with pytest.raises(ValueError, match=kind.__name__):
            refuse_optimizer("tensor-1d", kind(weights))
    with pytest.raises(ValueError, match="Unhooked"):
        refuse_optimizer("adasum-delta", Unhooked(weights))
    optimizer = torch.optim.SGD(weights)
    refuse_optimizer("tensor-1d", optimizer)
    optimizer.register_step_pre_hook(lambda *_: None)
    for name in ("tables", "tensor-2d"):
        with pytest.raises(ValueError, match=name):
            refuse_optimizer(name, optimizer)
    refuse_optimizer("fsdp", optimizer)


def test_a_table_takes_indices_alone_and_once() -> None:
    stub, indices = Stub("bags", nn.EmbeddingBag(4, 4)), torch.ones(2, 3, dtype=torch.long)
    for given in ({"offsets": torch.zeros(1)}, {"per_sample_weights": torch.ones(2, 3)}):
        with pytest.raises(ValueError, match="bags"):
            stub(indices, **given)
    stub.rows = torch.ones(2, 4)
    assert stub(indices, None).shape == (2, 4)
    with pytest.raises(ValueError, match="bags"):
        stub(indices, None)
