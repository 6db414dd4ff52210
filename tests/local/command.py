"""The command `srift` in a stranger's folder, as a shell runs it, and what it must not leave
running.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tasks.providers.local.provider import LocalProvider
from tests.local.hosts import left_over, wait_for
from warehouse.database import Warehouse

SCRIPT = Path(sys.executable).with_name("srift")
SRIFT = (
    [str(SCRIPT)]
    if SCRIPT.exists()
    else [sys.executable, "-c", "from flows.cli import main; main()"]
)
OURS = ("SRIFT_", "PREFECT_", "MLFLOW_", "COVERAGE", "PYTEST")


def known(home: Path) -> dict[str, str]:
    """Status by run, of all that the warehouse holds."""
    records = Warehouse(home / "warehouse.duckdb").select("raw_runs")
    return dict(zip(records["run_id"], records["status"], strict=True))


@dataclass
class Project:
    """A stranger's folder; its state lies in `home`."""

    folder: Path
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    @property
    def home(self) -> Path:
        return self.folder / "state"

    def start(self, *words: str) -> subprocess.Popen[str]:
        """The command in a process group of its own, without a terminal."""
        outside = {name: value for name, value in os.environ.items() if not name.startswith(OURS)}
        process = subprocess.Popen(
            [*SRIFT, *words],
            cwd=self.folder / "jobs",
            env=outside | {"SRIFT_HOME": str(self.home)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            # whoever runs the tests in the background of a script has SIGINT ignored, and that is
            # inherited
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL) and None,
        )
        self.started.append(process)
        return process

    def run(self, *words: str) -> tuple[int, str, str]:
        process = self.start(*words)
        out, err = process.communicate(timeout=400.0)
        return process.returncode, out, err

    def json(self, *words: str) -> Any:
        code, out, err = self.run(*words, "--json")
        assert code == 0, err
        return json.loads(out)

    def nothing_is_left(self, within_s: float = 10.0) -> None:
        """A server that the command started may take a moment to end after it."""
        wait_for(lambda: not left_over(self.home), within_s, lambda: left_over(self.home))

    def end(self) -> None:
        """Whatever a test that failed left."""
        for process in self.started:
            if process.poll() is None:
                process.kill()
            process.communicate()
        LocalProvider(self.home, {}, self.home, "").reap(datetime.now(UTC), all_of_them=True)
