"""The built-in workloads, loaded as nodes load them, and entrypoints that do not fit."""

from collections import UserDict
from pathlib import Path
from typing import Any

import pytest
import torch

from tasks import node
from tasks.node.device import to_device
from tasks.node.entrypoint import WorkloadError, build
from tasks.node.precision import Arithmetic
from tasks.node.record import WorkloadFile
from tasks.node.steps import take_step

HOME = Path(node.__file__).parent / "workloads"
BUILT_IN = sorted(path.stem for path in HOME.glob("*.py") if path.stem != "__init__")

ELSEWHERE = """
import torch

def build():
    torch.set_float32_matmul_precision("high")
    model = torch.nn.Linear(2, 1, device="cpu")
    def make_batch(batch):
        inputs = {"x": [torch.ones(batch, 2, device="cpu")], "name": "kept"}
        return inputs, torch.ones(batch, device="cpu")
    loss = torch.nn.CrossEntropyLoss(weight=torch.ones(3))
    return model, loss, make_batch, torch.optim.SGD(model.parameters(), lr=0.1)
"""


def load(folder, name, *, rank=0, device="cpu", shared=False, **given):
    file = WorkloadFile(name=name, digest="d", file=f"{name}.py", function="build", arguments=given)
    computing = Arithmetic("fp32", torch.device(device))
    return build(folder, file, seed=0, rank=rank, computing=computing, shared=shared)


@pytest.mark.parametrize("name", BUILT_IN)
def test_ranks_train_from_equal_weights_on_other_samples(name):
    built, other = (load(HOME, name, rank=rank) for rank in (0, 1))
    assert all(map(torch.equal, built.model.parameters(), other.model.parameters()))
    assert take_step(built, built.model, [2], scale=1 / 2) > 0
    assert not all(map(torch.equal, built.model.parameters(), other.model.parameters()))
    count, size = built.sizes.values()
    assert 1_000_000 <= size == 4 * count <= 16_000_000
    first, second = (load(HOME, name, rank=rank).make_batch(700)[0] for rank in (0, 1))
    assert len(first) == 700 and not torch.equal(first, second)


@pytest.mark.parametrize("shared", [False, True])
def test_tensors_made_elsewhere_are_moved_but_a_model_to_be_sharded(tmp_path, shared):
    (tmp_path / "own.py").write_text(ELSEWHERE)
    built = load(tmp_path, "own", device="meta", shared=shared)
    inputs, target = built.make_batch(3)
    loss = built.loss
    assert inputs["name"] == "kept"
    for moved in (inputs["x"][0], target, loss.weight):
        assert moved.device.type == "meta"
    assert next(built.model.parameters()).device.type == ("cpu" if shared else "meta")
    assert torch.get_float32_matmul_precision() == "highest"


class Encoding(UserDict[str, Any]):
    """A batch that moves itself, as transformers' BatchEncoding."""

    def to(self, device):
        return Encoding({name: tensor.to(device) for name, tensor in self.items()})


def test_a_batch_that_can_move_itself_stays_what_it_is():
    moved = to_device((Encoding(tokens=torch.ones(3)), None), torch.device("meta"))
    assert isinstance(moved[0], Encoding) and moved[1] is None
    assert moved[0]["tokens"].device.type == "meta"


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ("def build(): return 1, 2", "optimizer"),
        ("def build(): return 1, len, len, 2", "model"),
        (
            "from torch import nn, optim\ndef build():\n  a, b = nn.Linear(2, 2), nn.Linear(2, 2)\n"
            "  return a, len, len, optim.SGD([*a.parameters(), *b.parameters()])",
            "outside the model",
        ),
    ],
)
def test_an_entrypoint_that_does_not_fit_is_refused(tmp_path, source, named):
    (tmp_path / "own.py").write_text(source)
    with pytest.raises(WorkloadError, match=named):
        load(tmp_path, "own")
