"""Two steps on this machine tell what is wrong with a workload, with the user's own line, before anything is bought."""

from __future__ import annotations

import sys
from collections.abc import Iterator
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
        result = answer(tmp_path, precision=precision)
        assert (result["precision"], result["problem"]) == (precision, "")
        figures = result["figures"]
        assert (
            figures["parameters"] == 49
            and figures["gradient_bytes"] == 196
            and len(figures["losses"]) == 2
        )
        assert figures["input_s"] > 0 and 0 < figures["step_s"] < 10 and figures["peak_bytes"] > 0


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            "import torch\n",
            "import torch, nosuch\n",
            "No module named 'nosuch' (mine.py, line 2, in <module>)",
        ),
        ("    model = Net()", "    model = Net(", "was never closed (mine.py, line 15"),
        ("def build", "def built", "no function 'build' in the file of workload 'net'"),
        ("torch.randn(batch, 4)", "torch.rand(batch, 'a')", "(mine.py, line 18, in make_batch)"),
        (
            "self.last(self.first(x))",
            "self.last(x)",
            "multiplied (16x4 and 8x1) (mine.py, line 12, in forward)",
        ),
        (
            "self.last(self.first(x))",
            "self.first(x)[:, :1]",
            "last.weight, last.bias had no part in the loss",
        ),
        ("nn.MSELoss()", "(lambda a, b: (a - b).sum(1))", "the loss must be one number"),
        ("nn.MSELoss()", "(lambda a, b: (a / 0).mean())", "not a number to train with"),
        (
            "    model = Net()",
            "    model = Net().requires_grad_(False)",
            "the model has no parameter to train",
        ),
        (
            "    model = Net()",
            "    raise SystemExit(3)",
            "SystemExit: 3 (mine.py, line 15, in build)",
        ),
    ],
)
def test_what_keeps_it_from_training_is_said_with_the_users_line(
    tmp_path: Path, old: str, new: str, said: str
) -> None:
    result = answer(tmp_path, (old, new))
    assert said in result["problem"] and result["figures"] is None


GPU_SAID = '`device="cuda"`'
LOADER = "torch.utils.data.DataLoader(torch.utils.data.TensorDataset({rows}), batch_size=2{more})"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            "model = Net()",
            "model = Net().cuda()",
            GPU_SAID,
        ),
        ("model = Net()", 'model = Net().to("cuda")', GPU_SAID),
        (
            "torch.randn(batch, 4)",
            'torch.randn(batch, 4, device="cuda")',
            GPU_SAID,
        ),
        (
            "model = Net()",
            "model = Net(); raise RuntimeError('No CUDA GPUs are available')",
            GPU_SAID,
        ),
        (
            "model = Net()",
            "model = open('rows.csv')",
            'state `data = "FOLDER"` under [workloads.net]',
        ),
        (
            "    model = Net()",
            f"    {LOADER.format(rows='torch.zeros(0, 4)', more=', shuffle=True')}\n    model = Net()",
            'data = "FOLDER"',
        ),
        (
            "make_batch, torch",
            f"{LOADER.format(rows='torch.zeros(0, 4), torch.zeros(0, 1)', more='')}, torch",
            'data = "FOLDER"',
        ),
        (
            "make_batch, torch",
            f"{LOADER.format(rows='torch.zeros(9, 4), torch.zeros(9, 1)', more='')}, torch",
            "`global_batch`",
        ),
        (
            "model = Net()",
            "import os; os.environ['WIDTH_OF_NET']",
            'state `env = { WIDTH_OF_NET = "..." }` under [workloads.net]',
        ),
    ],
)
def test_what_to_do_is_said_where_the_errors_own_words_do_not(
    tmp_path: Path, old: str, new: str, said: str
) -> None:
    assert said in answer(tmp_path, (old, new))["problem"]


def of_folder(folder: Path, **files: str) -> dict[str, Any]:
    """The answer for a folder whose `train` takes Net from `net`, with `files` written over."""
    class_, build = GOOD.split("def build", 1)
    code = {
        "train": f"from pkg.net import Net, torch, nn\n\ndef build{build}",
        "net": class_,
        "__init__": "",
    } | files
    own = folder / "workloads" / "c1" / "pkg"
    own.mkdir(parents=True)
    for name, text in code.items():
        (own / f"{name}.py").write_text(text)
    file = WorkloadFile(
        name="net",
        digest="d1",
        file="workloads/c1.tar.gz",
        function="build",
        module="pkg.train",
        source="pkg/train.py",
    )
    return checked(folder, file, "fp32", batch=16)


@pytest.fixture
def nothing_imported() -> Iterator[None]:
    """A process serves one folder; this one serves one after the other."""
    path = list(sys.path)
    yield
    sys.path[:] = path
    for name in [name for name in sys.modules if name.partition(".")[0] == "pkg"]:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({}, ""),
        (
            {"net": "import torch\nfrom torch import nn\nNet = nosuch\n"},
            "(pkg/net.py, line 3, in <module>)",
        ),
        ({"net": "def broken(:\n"}, "SyntaxError: invalid syntax (pkg/net.py, line 1)"),
        (
            {"net": "from pkg.train import build\n"},
            "circular import) (pkg/train.py) (pkg/net.py, line 1, in <module>)",
        ),
        (
            {"train": "from pkg.nett import Net\n"},
            "No module named 'pkg.nett' (pkg/train.py, line 1, in <module>)",
        ),
        (
            {"train": "import sys\nsys.exit(2)\n"},
            "SystemExit: 2 (pkg/train.py, line 2, in <module>)",
        ),
        (
            {"train": "def buidl(): ...\n"},
            "no function 'build' in the file of workload 'net'; did you mean 'buidl'?",
        ),
    ],
)
def test_a_folders_own_file_is_named_by_its_place_there(
    tmp_path: Path, nothing_imported: None, files: dict[str, str], said: str
) -> None:
    result = of_folder(tmp_path, **files)
    assert (
        (said in result["problem"] and str(tmp_path) not in result["problem"])
        if said
        else result["problem"] == ""
    )
    assert ("requirements" in result["problem"]) is ("No module" in said)


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
            "first.weight, first.bias",
        ),
        (
            "        return torch.randn(",
            "        torch.zeros(3000, 3000).exp().sum()\n        return torch.randn(",
            "of a step",
        ),
        (
            "self.last(self.first(x))",
            "self.last(nn.BatchNorm1d(8)(self.first(x)))",
            "a batch of 1 fails",
        ),
    ],
)
def test_what_may_not_be_meant_is_a_note(tmp_path: Path, old: str, new: str, said: str) -> None:
    result = answer(tmp_path, (old, new))
    assert (
        result["problem"] == ""
        and result["figures"]
        and any(said in note for note in result["notes"])
    )


def test_a_precision_that_this_machine_lacks_is_not_checked_and_no_other_is_instead(
    tmp_path: Path,
) -> None:
    result = answer(tmp_path, precision="tf32")
    assert result["problem"] == "" and result["figures"] is None
    assert "tf32" in result["notes"][0]
