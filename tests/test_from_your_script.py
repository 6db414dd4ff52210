"""docs/from-your-script.md: its scripts train, and pass the check as workloads."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples" / "from-your-script"
PAGE = (ROOT / "docs" / "from-your-script.md").read_text()
SCRIPTS = {
    "loop": ("loop.py", "--epochs", "1", "--samples", "128"),
    "trainer": ("with_trainer.py", "--steps", "2", "--width", "32"),
    "lightning": ("with_lightning.py", "--epochs", "1", "--rows", "256"),
}
# Both libraries import torchvision if it is there; a node declares its operators first.
RUN = """
import runpy, sys
from tasks.node.torchvision_operators import declare_what_did_not_load
declare_what_did_not_load()
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_the_page_shows_the_files():
    scripts = "".join(path.read_text() for path in EXAMPLES.glob("*.py"))
    shown = re.findall(r"```(python|toml)\n(.*?)```", PAGE, re.DOTALL)
    assert len(shown) == 2 * len(SCRIPTS) + 1
    for language, text in shown:
        assert text in (scripts if language == "python" else (EXAMPLES / "srift.toml").read_text())


def run(*command, folder):
    done = subprocess.run(
        [sys.executable, "-c", *command], cwd=folder, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_script_trains(name, tmp_path):
    script, *words = SCRIPTS[name]
    printed = run(RUN, str(EXAMPLES / script), *words, folder=tmp_path)
    assert "loss" in printed or "max_epochs=1" in printed


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_workload_passes_the_check(name):
    printed = run("from flows.cli import main; main()", "check", name, folder=EXAMPLES)
    assert re.findall(r"^(fp32|bf16) ", printed, re.MULTILINE) == ["fp32", "bf16"]
