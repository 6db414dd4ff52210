"""The wording of messages: the one place that compares it, with a stored text.

Write it anew with `python -m tests.flows.test_messages`.
"""

import re
import shlex
import tempfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flows.cli import app
from tests.installed import DescribedMachines, write_project

STORED = Path(__file__).with_name("messages.txt")
COMMANDS = (
    "table",
    "recommend conv --deadline 2h",
    "recommend conv",
    "recommend conv --deadline soon",
    "recommend convv --deadline 2h --provider local",
    "refresh --provider ec2",
    "refresh --provider ec2 --max-usd 5",
    "refresh --dry-run --provider moon",
    "measure convv --dry-run",
    "size conv",
    "import",
    "import none.csv",
    "forget --list",
    "reap",
    "check lm2",
    "restore",
    "recommend resnet50-imagenet --deadline 2h --provider local",
)


def transcript(folder, patch):
    """Return each command with its exit code and all that it prints, in a new project."""
    machines = "tasks.providers.local.provider.LocalProvider"
    patch.setattr(machines, lambda *_, **__: DescribedMachines())
    patch.chdir(folder)
    patch.setenv("SRIFT_HOME", str(folder / "state"))
    write_project(folder)
    parts = []
    for command in COMMANDS:
        result = CliRunner().invoke(app, shlex.split(command))
        parts.append(f"$ srift {command}\n[{result.exit_code}] {result.output}")
    text = "\n".join(parts).replace(str(folder), "PROJECT")
    return re.sub(r"[ \t]+$", "", text, flags=re.MULTILINE)


def test_messages_are_those_that_are_stored(own_environment, monkeypatch, tmp_path):
    assert transcript(tmp_path, monkeypatch) == STORED.read_text()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        STORED.write_text(transcript(Path(folder), patch))
