"""Recomputing and compiling change no number that is trained, and what they cannot do is said."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from tasks.node import workloads
from tasks.node.entrypoint import build, try_once
from tasks.node.launch import explain
from tasks.node.precision import Arithmetic
from tasks.node.record import WorkloadFile
from tasks.node.switches import blocks, compiled_nothing, on, switch_on

WORKLOADS = Path(workloads.__file__).parent


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
    torch.compiler.reset()


class Block(nn.Module):
    """Counts how often it computes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.one, self.two, self.calls = nn.Linear(width, width), nn.Linear(width, width), 0

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return values + torch.dropout(self.two(torch.relu(self.one(values))), 0.3, train=True)


class Stack(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first = nn.Linear(4, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        values = self.first(values)
        for block in self.blocks:
            values = block(values)
        return values.square().mean()


def trained(switches: str, model: nn.Module) -> list[float]:
    """Losses of five steps."""
    switch_on(model, switches)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for seed in range(5):
        torch.manual_seed(seed)
        optimizer.zero_grad()
        loss = model(torch.randn(6, 4))
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def stack() -> Stack:
    torch.manual_seed(7)
    return Stack()


def test_blocks_that_are_recomputed_compute_twice_a_step_and_train_the_same_dropout_too() -> None:
    plain, other = stack(), stack()
    assert trained("none", plain) == trained("checkpointing", other)
    assert [block.calls for block in plain.blocks] == [5] * 3 and [
        block.calls for block in other.blocks
    ] == [10] * 3


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning"
)  # of what compiling imports of torch itself
@pytest.mark.skipif(
    not any((Path(one) / "g++").exists() for one in os.get_exec_path()), reason="no C++ compiler"
)
def test_a_compiled_model_trains_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")

    def plain() -> nn.Module:
        torch.manual_seed(7)
        return nn.Sequential(
            nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1), nn.Flatten(0), nn.Softplus()
        )

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = plain()

        def forward(self, values: torch.Tensor) -> torch.Tensor:
            return self.net(values).mean()

    assert trained("compile", Loss()) == pytest.approx(trained("none", Loss()), rel=1e-5)
    assert not compiled_nothing("compile")


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch", "ignore:The .grad attribute")
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("name", sorted(path.stem for path in WORKLOADS.glob("[!_]*.py")))
def test_something_is_compiled_of_each_workload_whole_and_by_blocks(
    name: str, whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "torch._inductor.compile_fx.compile_fx", lambda graph, *_, **__: graph.forward
    )
    file = WorkloadFile(name=name, digest=name, file=f"{name}.py", function="build")
    built = build(WORKLOADS, file, seed=0, rank=0, computing=Arithmetic())
    switch_on(built.model, "compile", whole=whole)
    assert compiled_nothing("compile"), "before the first step"
    try_once(built, 4)
    assert not compiled_nothing("compile") and not compiled_nothing("none")


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
def test_a_graph_that_does_not_compile_is_an_error_in_one_line_and_nothing_is_trained_uncompiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("no kernel for this graph")

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", refuse)
    model = stack()
    with pytest.raises(Exception, match="no kernel for this graph") as error:
        trained("compile", model)
    said = explain(error.value)
    assert "no kernel for this graph" in said and "\n" not in said
    assert all(one.grad is None for one in model.parameters())


def test_a_model_of_single_layers_has_nothing_to_recompute() -> None:
    with pytest.raises(ValueError, match="no part of several layers"):
        switch_on(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1)), "checkpointing")


def test_unknown_switches_are_refused_by_name() -> None:
    assert on("none") == frozenset() and on("checkpointing+compile") == {"checkpointing", "compile"}
    with pytest.raises(
        ValueError, match="unknown switch 'recompile'; known: checkpointing, compile, offload"
    ):
        on("checkpointing+recompile")


def test_layers_of_a_transformer_are_blocks_and_what_uses_weights_of_its_parts_is_not_taken_apart() -> (
    None
):
    layer = nn.TransformerEncoderLayer(8, 2, 16)
    model = nn.Sequential(
        nn.Embedding(10, 8), nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    )
    assert [type(one).__name__ for one in blocks(model)] == [
        "Embedding",
        *["TransformerEncoderLayer"] * 4,
    ]
