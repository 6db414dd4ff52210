"""Tests that start hosts never meet: `make test` hands all of them to one process, and a new file has to say so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.lanes import EMULATED, HOSTS, lane

HERE = Path(__file__).parent
WITHOUT = {"test_courier_s3.py", "test_ec2_machine.py", "test_node_loopback.py"}
FILES = {
    "local/test_cut_short.py": "hosts",
    "local/test_end_to_end.py": "hosts",
    "models/test_one.py": "alone",
    "models/test_two.py": "alone",
}
SAYS = "import os\ndef test_where(): print('in', __file__, os.environ['PYTEST_XDIST_WORKER'])\n"


def test_every_file_beside_real_hosts_says_whether_it_starts_them() -> None:
    assert {file.name for file in (HERE / "local").glob("test_*.py")} == {*EMULATED, *HOSTS} | WITHOUT
    assert lane("tests/local/test_failures.py") == "hosts" and lane("tests/local/test_world.py") == "emulated"
    assert lane("tests/models/test_failures.py") == "tests/models/test_failures.py"


def test_two_processes_share_files_and_one_has_all_that_start_hosts(tmp_path: Path) -> None:
    for name in FILES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(SAYS)
    (tmp_path / "conftest.py").write_text(
        f"import sys\nsys.path.insert(0, {str(HERE.parent)!r})\n"
        "from tests.conftest import pytest_xdist_make_scheduler\n"
    )
    words = ["--numprocesses", "2", "--dist", "loadfile", "--no-loadscope-reorder", "-rP", "--import-mode=importlib"]
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", *words], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    told = [line.split()[1:] for line in ran.stdout.splitlines() if line.startswith("in ")]
    workers = {str(Path(file).relative_to(tmp_path)): worker for file, worker in told}
    assert workers.keys() == FILES.keys()
    assert workers["local/test_cut_short.py"] == workers["local/test_end_to_end.py"]
    assert len(set(workers.values())) == 2
