"""What strategies refuse, by the strategy, layer or alternative that the error names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tasks.node.strategies import strategy
from tasks.node.strategies.refusals import (
    STRATEGIES,
    refuse_model,
    refuse_optimizer,
    refuse_training,
)
from tasks.node.workloads.transformer_lm import LanguageModel

CUDA = torch.device("cuda")


def pair(features: int = 4) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, features), nn.ReLU(), nn.Linear(features, 4))


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
    ("name", "machines"),
    [
        *(("tensor-1d", (1,)), ("tensor-2d", (4, 2)), ("tensor-2.5d", (2, 2)), ("tables", (1,))),
        *(("adasum", (1,)), ("adasum", (1, 1, 1)), ("adasum-delta", (4, 2))),
        *(("ddp-mstopk", (2, 1)), ("ddp-mstopk", (4,)), ("ps-4", (1, 1)), ("ps-1", (4,))),
    ],
)
def test_machines_that_do_not_fit_are_refused(name: str, machines: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=f"{name} .*use ddp"):
        strategy(name, machines=machines)


@pytest.mark.parametrize("name", STRATEGIES)
def test_each_strategy_can_be_named(name: str) -> None:
    assert callable(strategy(name, machines=(1,) * 16))
    with pytest.raises(ValueError, match=name):
        strategy("dpp", machines=(1,) * 16)


@pytest.mark.parametrize(
    "given",
    [
        *(("tensor-1d", "compile"), ("tables", "checkpointing"), ("fsdp", "offload")),
        *(("ddp", "offload", CUDA), ("fsdp", "offloaded", CUDA)),
    ],
)
def test_switches_that_do_not_fit_are_refused(given: Any) -> None:
    with pytest.raises(ValueError, match=given[1]):
        strategy(*given)
    strategy("zero2", "offload", CUDA)


@pytest.mark.parametrize(
    ("name", "precision", "batches"),
    [
        *(("zero1", "fp16", [4, 4]), ("adasum", "fp16", [4, 4])),
        *(("adasum-delta", "fp32", [6, 2]), ("tensor-1d", "bf16", [6, 2])),
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
        *(("tensor-1d", 2, model, "nothing") for model in (nn.Linear(4, 4), hooked(), patched())),
        ("tensor-1d", 2, tied(), "nothing"),
        (
            "tensor-2d",
            4,
            nn.Sequential(nn.Linear(4, 4), nn.Conv1d(4, 4, 1), *pair()[1:]),
            "nothing",
        ),
        ("tensor-2d", 4, pair(features=5), " 0 "),
        ("tensor-1d", 8, LanguageModel(16, 3, 16, 1), "self_attn"),
        ("tensor-2.5d", 18, LanguageModel(16, 3, 16, 1), "self_attn"),
        ("tables", 2, pair(), "nn.Embedding"),
        ("tables", 2, nn.Sequential(nn.Embedding(3, 3, sparse=True)), ": 0 "),
        ("tables", 2, nn.Sequential(nn.Embedding(3, 3, max_norm=1.0)), ": 0 "),
        ("tables", 2, nn.Sequential(nn.Embedding(3, 3, scale_grad_by_freq=True)), ": 0 "),
        ("tables", 2, tied(), ": 0 "),
    ],
)
def test_models_that_cannot_be_divided_are_refused_by_layer(
    name: str, ranks: int, model: nn.Module, named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        refuse_model(name, model, (ranks,))


class Unhooked(torch.optim.Optimizer):
    """Calls no hooks, as wrappers of optimizers do not."""

    def __init__(self) -> None:
        pass

    def step(self, closure: Any = None) -> None:
        """Nothing."""


def test_optimizers_that_need_whole_weights_hooks_or_none_are_refused() -> None:
    weights = [nn.Parameter(torch.ones(2, 2))]
    with pytest.raises(ValueError, match="Unhooked"):
        refuse_optimizer("adasum-delta", Unhooked())
    for kind in (torch.optim.Adafactor, torch.optim.LBFGS):
        with pytest.raises(ValueError, match=kind.__name__):
            refuse_optimizer("tensor-1d", kind(weights))
    optimizer = torch.optim.SGD(weights)
    refuse_optimizer("tensor-1d", optimizer)
    optimizer.register_step_pre_hook(lambda *_: None)
    for name in ("tables", "tensor-2d"):
        with pytest.raises(ValueError, match=name):
            refuse_optimizer(name, optimizer)
    refuse_optimizer("fsdp", optimizer)
