"""`srift refresh` as a shell runs it, cut short: what was reported is in the warehouse, and nothing is left running."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.local.test_failures import PROJECT, TINY, known, left_over, project

pytestmark = pytest.mark.local

__all__ = ["project"]  # a fixture
ROOT = Path(__file__).parents[2]
SLOW = TINY.replace("import torch", "import os, time, torch").replace(
    "    return model,",
    """    def wait(*_):
        time.sleep(0.1)
        while os.path.exists({hold!r}):
            time.sleep(0.1)
    model.register_forward_hook(wait)
    return model,""",
)


class Srift:
    """The command in a process group of its own, as a shell starts it."""

    def __init__(self, project: Path) -> None:
        self.project, self.home, self.hold = project, project / "state", project / "hold"
        self.started: list[subprocess.Popen[str]] = []

    def start(self, *words: str) -> subprocess.Popen[str]:
        outside = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "MLFLOW_"))}
        process = subprocess.Popen(
            [sys.executable, "-c", "from flows.cli import main; main()", *words],
            cwd=self.project,
            env={**outside, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            # whoever runs the tests in the background of a script has SIGINT ignored, and that is inherited
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL) and None,
        )
        self.started.append(process)
        return process

    def end(self) -> None:
        """Whatever a test that failed left."""
        for process in self.started:
            if process.poll() is None:
                process.kill()
            process.communicate()

    def run(self, *words: str) -> tuple[int, str, str]:
        process = self.start(*words)
        out, err = process.communicate(timeout=90.0)
        return process.returncode, out, err

    def reported(self, process: subprocess.Popen[str]) -> set[str]:
        """Wait for the first record of a running refresh, which from then on gets no further and cannot end."""
        until = time.monotonic() + 300.0
        while not (found := {file.stem for file in self.home.glob("leases/*/mailbox/node-*/records/*.json")}):
            assert process.poll() is None and time.monotonic() < until, process.communicate()[1]
            threading.Event().wait(0.02)
        self.hold.touch()
        return found

    def left_over(self) -> list[str]:
        """As above, and servers that a refresh started for itself."""
        mine = str(self.home / "prefect")
        found = []
        for process in psutil.process_iter():
            try:
                if process.status() != psutil.STATUS_ZOMBIE and process.environ().get("PREFECT_HOME") == mine:
                    found.append(f"process {process.pid}: {' '.join(process.cmdline()[:5])}")
            except psutil.Error:
                pass
        return found + left_over(self.home)


@pytest.fixture
def srift(project: Path) -> Iterator[Srift]:
    """A refresh that takes a while on any machine, and as long as it is held after that."""
    made = Srift(project)
    (project / "tiny.py").write_text(SLOW.replace("{hold!r}", repr(str(made.hold))))
    (project / "srift.toml").write_text(PROJECT.replace("max_minutes = 2.0", "max_minutes = 20.0"))
    yield made
    made.end()


def test_ctrl_c_of_a_refresh_loads_what_was_reported_and_leaves_nothing(srift: Srift) -> None:
    process = srift.start("refresh")
    reported = srift.reported(process)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to everything in the foreground
    _, err = process.communicate(timeout=60.0)
    assert process.returncode == 1, err
    assert "interrupted: machines released, measurements loaded" in err and "Traceback" not in err
    assert srift.left_over() == []
    runs = known(srift.home)
    assert {runs[run_id] for run_id in reported} == {"measured"}
    assert "interrupted" in runs.values()
    assert list(srift.home.glob("leases/*/mailbox")) == []


def test_a_killed_refresh_is_made_up_for_by_the_reaper_which_leaves_a_live_one_alone(srift: Srift) -> None:
    process = srift.start("refresh")
    reported = srift.reported(process)
    code, _, err = srift.run("refresh")
    assert code == 1 and "nothing was started" in err and "Traceback" not in err
    assert json.loads(srift.run("reap", "--json")[1]) == {"ended": [], "not_swept": {}}
    assert process.poll() is None
    process.kill()
    process.communicate()
    assert left_over(srift.home) != []
    assert "has lost its controller: run `srift reap`" in srift.run("status")[1]
    code, out, err = srift.run("reap")
    assert code == 0 and "is gone" in out, err
    assert "2 flow runs whose process was killed are shown as crashed" in out, "refresh and measure"
    assert left_over(srift.home) == []
    assert {known(srift.home)[run_id] for run_id in reported} == {"measured"}
    assert srift.run("reap")[1].strip() == "nothing was left running"
    assert srift.left_over() == []
