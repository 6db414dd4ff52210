"""Two steps on this machine find what is wrong with a workload, with the user's own line."""

import sys
from dataclasses import replace

import pytest

from tasks.node import check
from tasks.node.check import check_precision
from tests.tasks.node.test_loader import FILE

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


def answer(folder, old="", new="", precision="fp32"):
    assert old in GOOD
    (folder / "d1.py").write_text(GOOD.replace(old, new) if old else GOOD)
    return check_precision(folder, FILE, precision, batch=16)


FORWARD, NET = "self.last(self.first(x))", "    model = Net()"
LOADER = "torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*[torch.zeros({}, 4)] * 2))"


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("import torch\n", "import torch, nosuch\n", "'nosuch' (mine.py, line 2, in <module>); only the workload's code"),
        ("def build", "def built", "no function 'build' in the file of workload 'net'"),
        ("torch.randn(batch, 4)", "torch.rand(batch, 'a')", "(mine.py, line 18, in make_batch)"),
        (FORWARD, "self.first(x)[:, :1]", "last.weight, last.bias get no gradient"),
        ("nn.MSELoss()", "(lambda a, b: (a / 0).mean())", "the first loss is"),
        (NET, "    raise SystemExit(3)", "SystemExit: 3 (mine.py, line 15, in build)"),
        (NET, NET + ".cuda()", '`device="cuda"`'),
        (NET, "    model = open('rows.csv')", "files in `data`"),
        ("make_batch, torch", LOADER.format(9) + ", torch", "`global_batch`"),
    ],
)  # fmt: skip
def test_a_problem_is_named_with_the_users_line_and_a_hint(tmp_path, old, new, words):
    result = answer(tmp_path, old, new)
    assert words in result["problem"] and result["figures"] is None


@pytest.fixture
def nothing_imported():
    """A process serves one folder; this one serves one after the other."""
    path = list(sys.path)
    yield
    sys.path[:] = path
    for name in [name for name in sys.modules if name.partition(".")[0] == "pkg"]:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("changed", "text", "words"),
    [
        ("__init__", "", ""),
        ("net", "def broken(:\n", "SyntaxError: invalid syntax (pkg/net.py, line 1)"),
        ("net", "from pkg.train import build\n", "circular import) (pkg/train.py) (pkg/net.py, line 1, in <module>)"),
    ],
)  # fmt: skip
def test_a_folders_own_file_is_named_by_its_place_there(
    tmp_path, nothing_imported, changed, text, words
):
    network, build = GOOD.split("def build", 1)
    train = f"from pkg.net import Net, torch, nn\n\ndef build{build}"
    package = tmp_path / "workloads" / "c1" / "pkg"
    package.mkdir(parents=True)
    for name, code in ({"train": train, "net": network} | {changed: text}).items():
        (package / f"{name}.py").write_text(code)
    unpacked = {"file": "workloads/c1.tar.gz", "module": "pkg.train", "source": "pkg/train.py"}
    file = replace(FILE, **unpacked)
    problem = check_precision(tmp_path, file, "fp32", batch=16)["problem"]
    assert words in problem and str(tmp_path) not in problem and bool(problem) == bool(words)


RANDOM = "torch.randn(batch, 4), torch.randn(batch, 1)"


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (RANDOM, "torch.randn(9, 4), torch.randn(9, 1)", "with 16 in its shape"),
        ("(model.parameters(), lr", "(model.last.parameters(), lr", "first.weight, first.bias"),
        (FORWARD, "self.last(nn.BatchNorm1d(8)(self.first(x)))", "a batch of 1 sample fails"),
    ],
)
def test_what_may_not_be_meant_is_a_note(tmp_path, old, new, words):
    result = answer(tmp_path, old, new)
    assert result["problem"] == "" and result["figures"]
    assert any(words in note for note in result["notes"])


def test_gradients_that_a_hook_removes_took_part(tmp_path):
    old = "    return model, nn.MSELoss(), make_batch, torch.optim.SGD(model.parameters(), lr=0.1)"
    new = f"""    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    sgd.register_step_post_hook(lambda *_: model.zero_grad())
{old.partition(" torch.optim")[0]} sgd"""
    assert answer(tmp_path, old, new)["problem"] == ""


def test_a_busy_machine_is_a_note(tmp_path, monkeypatch):
    counters = iter([[0.0] * 5, [9.0] * 5])
    monkeypatch.setattr(check, "thread_counters", lambda: next(counters))
    assert "busy" in answer(tmp_path)["notes"][0]


def test_a_precision_that_this_machine_lacks_is_not_checked(tmp_path):
    result = answer(tmp_path, precision="tf32")
    assert result["problem"] == "" and result["figures"] is None
    assert "tf32" in result["notes"][0]
