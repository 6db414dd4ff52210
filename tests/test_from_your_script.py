"""What docs/from-your-script.md says: ordinary scripts become workloads by 20 lines at most, and pass the check."""

from __future__ import annotations

import difflib
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
MOST_CHANGED = 20
# As `python SCRIPT`; torchvision, which both libraries import where it is there, as a node would import it.
RUN = """
import runpy, sys
from tasks.node.torchvision_operators import declare_what_did_not_load
declare_what_did_not_load()
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def blocks(language: str) -> list[str]:
    """The page's blocks of code in a language."""
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def changes(script: str) -> list[str]:
    before, after = (
        (EXAMPLES / folder / script).read_text().splitlines() for folder in ("before", "after")
    )
    return list(
        difflib.unified_diff(before, after, f"before/{script}", f"after/{script}", lineterm="", n=2)
    )


def test_the_page_shows_every_change_and_they_are_few_and_only_add() -> None:
    changed = [changes(script) for script, *_ in SCRIPTS.values()]
    assert blocks("diff") == ["\n".join(lines) + "\n" for lines in changed]
    for lines in changed:
        assert 0 < len([line for line in lines[2:] if line[0] in "+-"]) <= MOST_CHANGED
        assert not [line for line in lines[2:] if line[0] == "-"], "a script trains as before"


def test_what_else_the_page_shows_is_from_the_files() -> None:
    assert len(blocks("python")) == len(SCRIPTS) and len(blocks("toml")) == 1
    for shown, (script, *_) in zip(blocks("python"), SCRIPTS.values(), strict=True):
        assert shown in (EXAMPLES / "before" / script).read_text()
    assert blocks("toml")[0] in (EXAMPLES / "srift.toml").read_text()


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_original_trains(name: str, tmp_path: Path) -> None:
    script, *words = SCRIPTS[name]
    command = [sys.executable, "-c", RUN, str(EXAMPLES / "before" / script), *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "loss" in done.stdout or "max_epochs=1" in done.stderr + done.stdout


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_workload_passes_the_check_which_prints_what_the_page_says(name: str) -> None:
    command = [sys.executable, "-c", "from flows.cli import main; main()", "check", name]
    done = subprocess.run(command, cwd=EXAMPLES, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    last = blocks("console")[1]
    (shown,) = re.findall(rf"\$ srift check {name}\n(.*?)(?=\$|\Z)", last, re.DOTALL)
    head, columns, *rows = [
        line for line in done.stdout.splitlines() if not line.startswith("note:")
    ]  # of a busy machine
    said_head, said_columns, *said_rows = shown.splitlines()
    assert (head, columns.split()) == (said_head, said_columns.split())
    assert [row.split()[:2] for row in rows] == [row.split()[:2] for row in said_rows] and len(
        rows
    ) == 2
