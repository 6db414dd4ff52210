"""The command `srift` in a stranger's folder, as a shell runs it."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from tasks.providers.local.provider import LocalProvider
from tests.local.hosts import left_over, wait_for

SRIFT = (sys.executable, "-c", "from flows.cli import main; main()")
OURS = ("SRIFT_", "PREFECT_", "MLFLOW_", "COVERAGE", "PYTEST")


def outside(*others):
    """This process's environment without our variables and those that begin as `others`."""
    names = (*OURS, *others)
    return {name: value for name, value in os.environ.items() if not name.startswith(names)}


@dataclass
class Project:
    """A stranger's folder; its state lies in `home`."""

    folder: Path
    started: list = field(default_factory=list)

    @classmethod
    def made(cls, folder, files):
        """Yield a project with `files`, and end what its commands left running."""
        for name, text in ({"jobs/__init__.py": ""} | dict(files)).items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(text)
        project = cls(folder)
        try:
            yield project
        finally:
            for process in project.started:
                process.kill()
                process.communicate()
            LocalProvider(project.home, {}, folder, "").reap(datetime.max.replace(tzinfo=UTC))

    @property
    def home(self):
        return self.folder / "state"

    def start(self, *words):
        """Start the command in a process group of its own, without a terminal."""
        process = subprocess.Popen(
            [*SRIFT, *words],
            cwd=self.folder / "jobs",
            env=outside() | {"SRIFT_HOME": str(self.home)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            # tests in the background of a script inherit an ignored SIGINT
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL) and None,
        )
        self.started.append(process)
        return process

    def run(self, *words):
        process = self.start(*words)
        out, err = process.communicate(timeout=600.0)
        return process.returncode, out, err

    def json(self, *words):
        code, out, err = self.run(*words, "--json")
        assert code == 0, err
        return json.loads(out)

    def nothing_is_left(self):
        """Wait: a server that the command started may end a moment after it."""
        wait_for(lambda: not left_over(self.home), 60.0, lambda: left_over(self.home))
