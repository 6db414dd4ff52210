"""docs/from-your-script.md: its scripts train, and pass the check as workloads."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from flows.cli import app

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples/from-your-script"
PAGE = (ROOT / "docs/from-your-script.md").read_text()
SCRIPTS = {
    "loop": "loop.py --epochs 1 --samples 128",
    "trainer": "with_trainer.py --steps 2 --width 32",
    "lightning": "with_lightning.py --epochs 1 --rows 256",
}
# Both libraries import torchvision if it is there; a node declares its operators first.
RUN = """
import json, runpy, sys
from tasks.node.torchvision_operators import declare_what_did_not_load
declare_what_did_not_load()
for sys.argv in json.loads(sys.argv[1]):
    runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_the_page_shows_the_files():
    scripts = "".join(path.read_text() for path in EXAMPLES.glob("*.py"))
    shown = re.findall(r"```(python|toml)\n(.*?)```", PAGE, re.DOTALL)
    assert len(shown) == 2 * len(SCRIPTS) + 1
    for language, text in shown:
        assert text in (scripts if language == "python" else (EXAMPLES / "srift.toml").read_text())


@pytest.mark.slow
def test_the_scripts_train(tmp_path):
    """In one process, which imports torch once."""
    lines = json.dumps([f"{EXAMPLES}/{script}".split() for script in SCRIPTS.values()])
    command = [sys.executable, "-c", RUN, lines]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    for word in ("epoch 1: loss", "train_loss", "max_epochs=1"):
        assert word in done.stdout + done.stderr, word


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_the_workload_passes_the_check(name, clean_environment, monkeypatch, capfd):
    monkeypatch.chdir(EXAMPLES)
    app(["check", name], standalone_mode=False)
    printed = capfd.readouterr().out
    assert re.findall(r"^(fp32|bf16) ", printed, re.MULTILINE) == ["fp32", "bf16"]
