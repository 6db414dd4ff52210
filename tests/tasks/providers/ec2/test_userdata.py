"""The script that a machine is given: whole, small enough, of values that cannot mean anything else to a shell."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tasks.providers.base import NotSupported
from tasks.providers.ec2.userdata import MOST_BYTES, fitting, user_data

GOOD: dict[str, Any] = {
    "bucket": "srift-123",
    "prefix": "team/srift",
    "region": "us-east-1",
    "endpoint": None,
    "code_sha256": "ab" * 32,
    "lease_id": "20261120-abc",
    "role_id": "AROAEXAMPLEEXAMPLE",
    "deadline_s": 3601.0,
    "python": "/opt/pytorch/bin/python3",
}


def test_the_first_thing_it_does_is_to_set_its_own_end() -> None:
    lines = user_data(**GOOD).splitlines()
    assert lines[0] == "#!/bin/bash"
    work = [line for line in lines[1:] if not line.startswith("#")]
    assert work[0].startswith("shutdown -h +61 ")


def test_a_machine_that_boots_again_goes_down_for_its_timer_is_lost(tmp_path: Path) -> None:
    boots = tmp_path / "cloud" / "scripts" / "per-boot"
    boots.mkdir(parents=True)
    (tmp_path / "shutdown").write_text(f'#!/bin/sh\necho "$@" >>{tmp_path}/told\n')
    (tmp_path / "shutdown").chmod(0o755)
    script = user_data(**GOOD | {"python": "/no/such/python"}).partition("cat >")[0]  # as far as its folders
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SRIFT_BASE": str(tmp_path)}
    subprocess.run(["bash", "-c", script], env=environment, check=True)
    assert (tmp_path / "told").read_text().startswith("-h +61 ")
    subprocess.run([str(boots / "srift")], env=environment, check=True)
    assert (tmp_path / "told").read_text().splitlines()[1:] == ["-h now"]


def test_every_value_is_in_it_and_nothing_is_left_to_fill_in() -> None:
    script = user_data(**GOOD | {"endpoint": "http://10.0.0.1:5000"})
    for name in ("bucket", "prefix", "code_sha256", "lease_id", "role_id", "python"):
        assert GOOD[name] in script
    assert "--endpoint http://10.0.0.1:5000" in script
    assert re.search(r"@[a-z0-9_]+@", script) is None
    assert "--endpoint" not in user_data(**GOOD)


def test_it_is_a_script_for_bash_with_two_files_of_python_in_it(tmp_path: Path) -> None:
    script = user_data(**GOOD)
    assert subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True).stderr == ""
    embedded = re.findall(r"<<'(\w+)'\n(.*?)\n\1\n", script, re.DOTALL)
    assert len(embedded) == 3
    for _, code in embedded:
        compile(code, "embedded", "exec")


def test_it_leaves_a_thousand_bytes_of_what_ec2_takes() -> None:
    assert len(user_data(**GOOD | {"prefix": "p" * 100, "lease_id": "l" * 60}).encode()) < MOST_BYTES - 1000


def test_one_that_is_too_long_is_refused_with_its_size() -> None:
    with pytest.raises(NotSupported, match="20000 bytes"):
        fitting("x" * 20_000)
    assert fitting("x" * MOST_BYTES)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("bucket", ["My_Bucket", "b; reboot"]),
        ("prefix", ["", "a/../b", "/a", "a\n"]),
        ("region", ["us-east-1a"]),
        ("endpoint", ["ftp://x", "http://user:secret@host"]),
        ("code_sha256", ["ab"]),
        ("lease_id", ["$(reboot)"]),
        ("role_id", ["AROA:i-1"]),
        ("python", ["python3", "/opt/a b"]),
    ],
)
def test_a_value_that_is_none_is_refused_by_its_name(name: str, values: list[str]) -> None:
    for value in values:
        with pytest.raises(NotSupported, match=name):
            user_data(**GOOD | {name: value})


@pytest.mark.parametrize("deadline_s", [0.0, -1.0, float("nan"), float("inf"), 1e9])
def test_a_machine_without_an_end_is_refused(deadline_s: float) -> None:
    with pytest.raises(NotSupported, match="deadline"):
        user_data(**GOOD | {"deadline_s": deadline_s})
