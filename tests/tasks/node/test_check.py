"""Two steps on this machine tell what is wrong with a workload, with the user's own line, before anything is bought."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tasks.node.check import checked
from tasks.node.record import WorkloadFile

GOOD = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.last = nn.Linear(8, 1)

    def forward(self, x):
        return self.last(self.first(x))

def build():
    model = Net()

    def make_batch(batch):
        return torch.randn(batch, 4), torch.randn(batch, 1)

    return model, nn.MSELoss(), make_batch, torch.optim.SGD(model.parameters(), lr=0.1)
"""


def answer(folder: Path, *changes: tuple[str, str], precision: str = "fp32") -> dict[str, Any]:
    text = GOOD
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    (folder / "d1.py").write_text(text)
    file = WorkloadFile(name="net", digest="d1", file="d1.py", function="build", source="mine.py")
    return checked(folder, file, precision, batch=16)


def test_a_workload_that_trains_has_figures_and_no_problem(tmp_path: Path) -> None:
    for precision in ("fp32", "bf16", "fp16"):
        told = answer(tmp_path, precision=precision)
        assert (told["precision"], told["problem"]) == (precision, "")
        figures = told["figures"]
        assert figures["parameters"] == 49 and figures["gradient_bytes"] == 196 and len(figures["losses"]) == 2
        assert figures["input_s"] > 0 and 0 < figures["step_s"] < 10 and figures["peak_bytes"] > 0


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("import torch\n", "import torch, nosuch\n", "No module named 'nosuch' (mine.py, line 2, in <module>)"),
        ("    model = Net()", "    model = Net(", "was never closed (mine.py, line 15"),
        ("def build", "def built", "no function 'build' in the file of workload 'net'"),
        ("torch.randn(batch, 4)", "torch.rand(batch, 'a')", "(mine.py, line 18, in make_batch)"),
        ("self.last(self.first(x))", "self.last(x)", "multiplied (16x4 and 8x1) (mine.py, line 12, in forward)"),
        ("self.last(self.first(x))", "self.first(x)[:, :1]", "last.weight, last.bias had no part in the loss"),
        ("nn.MSELoss()", "(lambda a, b: (a - b).sum(1))", "the loss must be one number"),
        ("nn.MSELoss()", "(lambda a, b: (a / 0).mean())", "not a number to train with"),
        ("    model = Net()", "    model = Net().requires_grad_(False)", "the model has no parameter to train"),
        ("    model = Net()", "    raise SystemExit(3)", "SystemExit: 3 (mine.py, line 15, in build)"),
    ],
)
def test_what_keeps_it_from_training_is_said_with_the_users_line(tmp_path: Path, old: str, new: str, said: str) -> None:
    told = answer(tmp_path, (old, new))
    assert said in told["problem"] and told["figures"] is None


def test_an_error_in_torchs_code_names_the_part_of_the_model(tmp_path: Path) -> None:
    told = answer(tmp_path, ("Net()\n", "nn.Sequential(nn.Linear(4, 8), nn.Linear(9, 1))\n"))
    assert "(in the model's part 1, a Linear)" in told["problem"]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            "torch.randn(batch, 4), torch.randn(batch, 1)",
            "torch.randn(9, 4), torch.randn(9, 1)",
            "with 16 in its shape",
        ),
        (
            "(model.parameters(), lr",
            "(model.last.parameters(), lr",
            "the optimizer does not have first.weight, first.bias",
        ),
        (
            "        return torch.randn(",
            "        torch.zeros(3000, 3000).exp().sum()\n        return torch.randn(",
            "of a step",
        ),
        ("self.last(self.first(x))", "self.last(nn.BatchNorm1d(8)(self.first(x)))", "a batch of 1 fails"),
    ],
)
def test_what_may_not_be_meant_is_a_note(tmp_path: Path, old: str, new: str, said: str) -> None:
    told = answer(tmp_path, (old, new))
    assert told["problem"] == "" and told["figures"] and any(said in note for note in told["notes"])


def test_a_precision_that_this_machine_lacks_is_not_checked_and_no_other_is_instead(tmp_path: Path) -> None:
    told = answer(tmp_path, precision="tf32")
    assert told["problem"] == "" and told["figures"] is None
    assert told["notes"][0].startswith("not checked in tf32: tf32 needs an NVIDIA GPU")
