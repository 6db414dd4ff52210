"""Recomputing and compiling change no trained number, and what they cannot do is an error."""

import shutil

import pytest
import torch
from torch import nn

from tasks.node.switches import compiled_nothing, on, switch_on
from tests.tasks.node.test_workloads import BUILT_IN, HOME, load

COMPILER = "torch._inductor.compile_fx.compile_fx"


@pytest.fixture(autouse=True)
def nothing_compiled():
    yield
    torch.compiler.reset()


class Block(nn.Module):
    """Counts how often it computes."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer, self.calls = nn.Linear(8, 8), nn.Linear(8, 8), 0

    def forward(self, values):
        self.calls += 1
        return values + torch.dropout(self.outer(torch.relu(self.inner(values))), 0.3, train=True)


def stack():
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(4, 8), nn.Sequential(*[Block() for _ in range(3)]))


def plain():
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1), nn.Softplus())


def trained(switches, model):
    """Losses of five steps."""
    switch_on(model, switches)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for seed in range(5):
        torch.manual_seed(seed)
        loss = model(torch.randn(6, 4)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def test_recomputed_blocks_train_the_same_with_dropout():
    model = stack()
    assert trained("none", stack()) == trained("checkpointing", model)
    assert [block.calls for block in model[1]] == [10] * 3


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own imports
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
def test_a_compiled_model_trains_the_same(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    assert trained("compile", plain()) == pytest.approx(trained("none", plain()), rel=1e-5)
    assert not compiled_nothing("compile")


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch", "ignore:The .grad attribute")
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("name", BUILT_IN)
def test_something_is_compiled_of_each_workload(name, whole, monkeypatch):
    monkeypatch.setattr(COMPILER, lambda graph, *_, **__: graph.forward)
    built = load(HOME, name)
    switch_on(built.model, "compile", whole=whole)
    assert compiled_nothing("compile")
    built.loss_of(built.model, 4)
    assert not compiled_nothing("compile") and not compiled_nothing("none")


def test_unknown_switches_and_models_without_blocks_are_refused():
    assert on("none") == frozenset() and on("checkpointing+compile") == {"checkpointing", "compile"}
    with pytest.raises(ValueError, match="recompile"):
        on("checkpointing+recompile")
    with pytest.raises(ValueError, match="checkpointing"):
        switch_on(plain(), "checkpointing")
