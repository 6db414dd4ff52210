"""A test run that is ended from outside takes with it whatever its tests had started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tasks.providers.local.processes import end, identify

HERE = Path(__file__).parent
# A run whose shell put it into the background ignores interrupts, and so would what it starts.
CONFTEST = f"""
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.path.insert(0, {str(HERE.parent)!r})
from tests.conftest import pytest_configure
"""
STARTS = """
import os, subprocess, time

def start(environment):
    quiet = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    return subprocess.Popen(["sleep", "1000"], start_new_session=True, env=environment, **quiet).pid

def test_that_starts_what_it_does_not_end(tmp_path):
    host = {"PYTHONPATH": f"{tmp_path}/leases/one/code"}
    started = [start(None)]
    if not os.fork():  # as the hosts of a refresh that was killed: nobody's children
        started += [start(None), start(host)]
        (tmp_path / "started").write_text(" ".join(map(str, started)))
        os._exit(0)
    os.wait()  # reported only then: what interrupts the hooks of a fork is printed and lost
    with open(os.environ["FIFO"], "w") as fifo:
        fifo.write((tmp_path / "started").read_text())
    time.sleep(1000)
"""


@pytest.mark.parametrize(("number", "workers"), [(signal.SIGINT, 0), (signal.SIGTERM, 1)])
def test_what_a_run_has_started_ends_with_it(
    tmp_path: Path, number: signal.Signals, workers: int
) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_one.py").write_text(STARTS)
    os.mkfifo(tmp_path / "fifo")
    environment = {key: value for key, value in os.environ.items() if key != "PYTEST_RUN_OF_SRIFT"}
    run = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "pytest",
            "-n",
            str(workers),
            "-p",
            "no:cacheprovider",
            "--import-mode=importlib",
        ],
        cwd=tmp_path,
        env=environment | {"FIFO": str(tmp_path / "fifo"), "TMPDIR": str(tmp_path)},
        stdout=subprocess.DEVNULL,
    )
    with (tmp_path / "fifo").open() as fifo:
        started = [found for pid in fifo.read().split() if (found := identify(int(pid)))]
    other = subprocess.Popen(
        ["sleep", "1000"], env={"PATH": os.environ["PATH"]}
    )  # none of the run's
    try:
        assert len(started) == 3
        run.send_signal(number)
        assert run.wait(timeout=60) == pytest.ExitCode.INTERRUPTED
        assert [one for one in started if identify(one.pid) == one] == []
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()
        end(started)
