"""The wording of messages: the one place that compares it, with a stored text.

Write it anew with `python -m tests.flows.test_messages`.
"""

import os
import re
import shlex
import tempfile
from contextlib import chdir
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
)


def transcript():
    """Return each command with its exit code and all that it prints."""
    parts = []
    for command in COMMANDS:
        result = CliRunner().invoke(app, shlex.split(command))
        parts.append(f"$ srift {command}\n[{result.exit_code}] {result.output}")
    text = "\n".join(parts).replace(str(Path.cwd()), "PROJECT")
    return re.sub(r"[ \t]+$", "", text, flags=re.MULTILINE)


def test_messages_are_those_that_are_stored(own_environment, monkeypatch, tmp_path):
    machines = "tasks.providers.local.provider.LocalProvider"
    monkeypatch.setattr(machines, lambda *_, **__: DescribedMachines())
    write_project(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SRIFT_HOME", str(tmp_path / "state"))
    assert transcript() == STORED.read_text()


if __name__ == "__main__":
    with (
        tempfile.TemporaryDirectory() as folder,
        chdir(folder),
        pytest.MonkeyPatch.context() as patch,
    ):
        write_project(Path(folder))
        os.environ["SRIFT_HOME"] = str(Path(folder) / "state")
        machines = "tasks.providers.local.provider.LocalProvider"
        patch.setattr(machines, lambda *_, **__: DescribedMachines())
        STORED.write_text(transcript())
