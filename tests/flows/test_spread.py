import json
import os
import subprocess
import sys

import pytest

from tasks.providers.local.cpu_shares import usable_cores

# in a process of its own, because Prefect keeps the settings of the first flow of a process
SCRIPT = """
import json, os
from prefect import flow
from flows.spread import each_by_task

def negated(value):
    return -value, os.getpid() == int(os.environ["SPREADING"])

@flow
def spread():
    os.environ["SPREADING"] = str(os.getpid())
    return [each_by_task("", processes=own)(negated, range(4)) for own in (False, True)]

if __name__ == "__main__":
    print(json.dumps(spread()))
"""


@pytest.mark.slow
@pytest.mark.local
@pytest.mark.skipif(usable_cores() < 2, reason="one core: processes are not used")
def test_results_come_in_order_from_threads_and_from_processes(tmp_path):
    file = tmp_path / "spread.py"
    file.write_text(SCRIPT)
    found = subprocess.run(
        [sys.executable, file],
        env={**os.environ, "PREFECT_HOME": str(tmp_path), "PYTHONPATH": os.getcwd()},
        stdout=subprocess.PIPE,
        check=True,
        timeout=300,
    )
    threads, processes = json.loads(found.stdout.splitlines()[-1])
    numbers = [0, -1, -2, -3]
    assert threads == [[each, True] for each in numbers]
    assert processes == [[each, False] for each in numbers]
