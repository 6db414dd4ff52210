"""`srift check` runs a workload as on a host, without this shell's credentials."""

import pytest

from tasks.doctor.workload_check import CheckFailed, check_workload, problems
from tasks.providers.local.network import detect
from tasks.workspace.settings import load_settings
from tests.wheels import wheel

TOML = """
[local.instance_types.small]
cores = 1
memory_gib = 0.01
bandwidth_gbps = 1
usd_per_hour = 1
[workloads.net]
entrypoint = "mine.py:build"
samples = 1000
global_batch = 64
precisions = ["fp32", "bf16", "fp16"]
[workloads.imported]
samples = 1000
global_batch = 64
"""
BUILD = """
import os
import torch

def build():
    {first}
    print("a word of the workload's own")
    model = torch.nn.Linear(4, 1)
    def make_batch(batch):
        return torch.randn(batch, 4), torch.randn(batch, 1)
    return model, torch.nn.MSELoss(), make_batch, torch.optim.SGD(model.parameters(), lr=0.1)
"""


def project(folder, first="pass", toml=TOML):
    (folder / "srift.toml").write_text(toml)
    (folder / "mine.py").write_text(BUILD.format(first=first))
    return load_settings(folder / "srift.toml")


# An optimizer whose rate depends on its number of weights, of which `zero1` gives it a share.
ACROSS = """step = torch.optim.SGD.step
    def across(self, closure=None):
        self.param_groups[0]["lr"] = 0.1 / len(self.param_groups[0]["params"])
        return step(self, closure)
    torch.optim.SGD.step = across"""


@pytest.mark.parametrize(
    "first, key, text",
    [
        (ACROSS, "problem", "zero1 does not train like ddp"),
        ("os.sysconf = lambda _: 1", "notes", "zero1 was not compared with ddp"),  # no memory
    ],
)
def test_a_strategy_is_held_to_the_losses_of_ddp(tmp_path, first, key, text):
    # A CPU has no tf32.
    toml = TOML.replace('"fp32", "bf16", "fp16"]', '"tf32"]\nstrategies = ["zero1"]')
    settings = project(tmp_path, first, toml)
    (found,) = check_workload(settings, "net", timeout_s=120)["precisions"]
    assert text in str(found[key])


FOLDER = """
[workloads.net]
path = "repo"
entrypoint = "tasks:build"
requirements = "requirements.txt"
allow_builds = true
env = {WIDTH = "3"}
samples = 1000
global_batch = 64
"""
# In a module with the name of one of our packages, which machines do not have.
SEES = """
import glob, os, socket, subprocess
import greeting

assert greeting.WORD == "hello" and os.environ["WIDTH"] == "3" and os.path.exists("data.txt")
assert not [name for name in os.environ if name.startswith(("AWS", "PIP", "SRIFT"))]
assert not os.path.exists(os.path.expanduser("~/.aws"))
assert len(glob.glob("/proc/[0-9]*")) < 9, "other processes, with their environments, are in sight"
assert [name for _, name in socket.if_nameindex()] == ["lo"]
assert not os.access("/etc/passwd", os.W_OK) and subprocess.call(["umount", "/proc"])
"""
BACKEND = """
import glob, os, shutil

def build_wheel(folder, *_, **__):
    assert not os.path.exists("{secret}"), "the files of the operator are in sight"
    assert not os.access("/etc/passwd", os.W_OK) and len(glob.glob("/proc/[0-9]*")) < 9
    return os.path.basename(shutil.copy(glob.glob("*.whl")[0], folder))
"""
PYPROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
"""


@pytest.mark.skipif(not detect().namespaces, reason="no namespaces")
def test_a_folder_runs_with_its_requirements_and_variables_without_a_network_or_sight_of_others(
    tmp_path, monkeypatch, capfd
):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SRIFT_HOME", f"{tmp_path}/state")
    (tmp_path / ".aws").mkdir()
    (tmp_path / "srift.toml").write_text(FOLDER)
    repo = tmp_path / "repo"
    wheel(repo / "sd", "greeting", "1.0", "WORD = 'hello'\n")
    (repo / "sd/backend.py").write_text(BACKEND.format(secret=tmp_path / ".aws"))
    (repo / "sd/pyproject.toml").write_text(PYPROJECT)
    (repo / "tasks.py").write_text(SEES + BUILD.format(first="pass"))
    (repo / "data.txt").write_text("")
    (repo / "requirements.txt").write_text("--no-index\n./sd\n")
    settings = load_settings(tmp_path / "srift.toml")
    found = check_workload(settings, "net", timeout_s=120)
    assert [answer["problem"] for answer in found["precisions"]] == [""] and found["notes"] == []
    assert "requirements.txt" in capfd.readouterr().err
    (repo / "requirements.txt").write_text("--no-index\ntorch<2\n")
    with pytest.raises(CheckFailed, match="torch<2"):
        check_workload(settings, "net", timeout_s=120)


@pytest.mark.parametrize(
    "first, timeout_s",
    [
        ("import time; time.sleep(60)", 3),
        ("os.kill(os.getpid(), 9)", 60),
    ],
)
def test_a_workload_that_waits_or_dies_fails(tmp_path, first, timeout_s):
    with pytest.raises(CheckFailed):
        check_workload(project(tmp_path, first), "net", timeout_s=timeout_s)


READS = BUILD.replace("def build():", "def build(data):").format(
    first="import resource; assert resource.getrlimit(resource.RLIMIT_DATA)[0] > 0"
    '; assert open(data + "/x.txt").close() is None and "AWS_SECRET_ACCESS_KEY" not in os.environ'
)


@pytest.mark.parametrize("stated", ["images", "s3://mine-1/images"])
def test_it_reads_its_data_where_they_lie_and_says_so_plainly_where_they_are_not_here(
    tmp_path, stated, monkeypatch, capfd
):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("SRIFT_HOME", f"{tmp_path}/state")
    here = tmp_path / "images"
    here.mkdir()
    (here / "x.txt").write_text("x")
    settings = project(tmp_path, toml=TOML.replace("samples", f'data = "{stated}"\nsamples', 1))
    (tmp_path / "mine.py").write_text(READS)
    found = check_workload(settings, "net", timeout_s=120)
    assert problems(found) is None
    if stated.startswith("s3"):
        assert [answer["figures"] for answer in found["precisions"]] == [None] * 3
        assert "s3://mine-1/images/" in found["precisions"][0]["notes"][0]
        data = settings.data("net")
        data.fetched_below(settings.home).parent.mkdir(parents=True)
        here.rename(data.fetched_below(settings.home))  # as fetched for local hosts
        found = check_workload(settings, "net", timeout_s=120)
    assert [answer["precision"] for answer in found["precisions"]] == ["fp32", "bf16", "fp16"]
    for figures in (answer["figures"] for answer in found["precisions"]):
        assert (figures["parameters"], figures["gradient_bytes"]) == (5, 20)
        assert len(figures["losses"]) == 2 and figures["peak_bytes"] > 0
        assert figures["input_s"] > 0 and 0 < figures["step_s"] < 10
    assert (found["entrypoint"], found["batch"]) == ("mine.py:build", 16)
    assert any("small" in note for note in found["notes"])
    out, err = capfd.readouterr()
    assert out == "" and "a word of the workload's own" in err
