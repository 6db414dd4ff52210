"""The user-data on a host of its own: what the user whose code runs can see and do, and that the
machine goes off.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.local.hosts import HERE, wait_for
from tests.local.machine import INSTANCE, ROLE, Machine, end, machine, needs_root, over

pytestmark = [pytest.mark.local, needs_root]
AGENT = HERE / "standin" / "confined.py"


@pytest.fixture
def rented() -> Iterator[Machine]:
    base = Path(
        tempfile.mkdtemp(prefix="srift-machine-")
    )  # pytest's own folders are closed to other users
    base.chmod(0o755)
    try:
        with machine(base) as made:
            yield made
    finally:
        shutil.rmtree(base, ignore_errors=True)


def say(rented: Machine, **bodies: object) -> None:
    """As the controller does: the files, then the manifest that names them."""
    files = {f"{name}.json": json.dumps(body) for name, body in bodies.items()}
    for name, body in bodies.items():
        rented.put(f"{name}.json", body)
    digests = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in files.items()}
    rented.put("manifest.json", {"files": digests})


def test_a_machine_serves_as_a_user_without_rights_and_then_goes_off(rented: Machine) -> None:
    booted = rented.boot(rented.script(AGENT))
    try:
        wait_for(lambda: rented.out("booted.json"))
        rented.put("node.json", {"node": 0, "nodes": 1})
        ready = wait_for(lambda: rented.out("ready.json"))
        assert rented.shutdowns() == ["-h +2 srift: the deadline of lease lease-1"]
        assert set(ready["ids"]) == {65534}
        assert ready["metadata"] != "done" and ready["cluster"] == "done"
        assert not [name for name in ready["environment"] if name.startswith("AWS")]
        assert "very-secret" not in json.dumps(ready) and "leaks" not in json.dumps(ready)
        assert (ready["code"], ready["beside_code"], ready["mailbox"]) == ("PermissionError",) * 3
        assert (ready["death_signal"], ready["no_new_privileges"]) == (9, "1")
        assert set(ready["capabilities"]) == {"0" * 16}
        assert ready["address"] == "10.77.0.2" and 0 < ready["left_s"] < 90
        say(rented, plan={"attempt": 1})
        record = wait_for(lambda: rented.out("records/run+1.json"))
        assert record == {"plan": '{"attempt": 1}'}
        wait_for(lambda: rented.out("heartbeat.json"))
        (rented.folder / "meta-data" / "spot").mkdir()
        (rented.folder / "meta-data" / "spot" / "instance-action").write_text(
            '{"action": "terminate", "time": "T"}'
        )
        notice = wait_for(lambda: rented.out("notice.json"))
        assert (notice["kind"], notice["action"], notice["at"]) == (
            "interruption",
            "terminate",
            "T",
        )
        say(rented, plan={"attempt": 1}, done={})
        over(booted)
    finally:
        end(booted)
    assert rented.shutdowns()[1:] == ["-h now"] * 2
    assert rented.out("failed.json") is None
    assert not (rented.own / "out" / "secret.json").exists()


def test_where_no_rule_holds_no_code_of_the_users_runs(rented: Machine) -> None:
    for tool in ("ip", "iptables"):
        rented.program(tool, "exit 0")  # says yes and does nothing
    rented.put("node.json", {"node": 0, "nodes": 1})
    booted = rented.boot(rented.script(AGENT))
    try:
        over(booted)
    finally:
        end(booted)
    assert "none was run" in rented.out("failed.json")["reason"]
    assert "does not hold" in rented.out("failed.json")["reason"]
    assert rented.out("ready.json") is None and rented.out("booted.json") is None
    assert "-h now" in rented.shutdowns()


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"code_sha256": "0" * 64}, "not the one that was asked for"),
        ({"python": "/opt/none/python3"}, "no /opt/none/python3"),
    ],
)
def test_a_machine_that_cannot_start_says_why_and_goes_off(
    rented: Machine, changed: dict[str, str], reason: str
) -> None:
    other = rented.folder / "bucket" / "srift" / "code" / f"{'0' * 64}.tar.gz"
    other.parent.mkdir(parents=True)
    other.write_bytes(b"not what was asked for")
    booted = rented.boot(rented.script(AGENT, **changed))
    try:
        over(booted)
    finally:
        end(booted)
    assert reason in rented.out("failed.json")["reason"]
    assert rented.shutdowns()[0].startswith("-h +2") and rented.shutdowns()[-1] == "-h now"
    assert (rented.own.name, rented.out("ready.json")) == (f"{ROLE}:{INSTANCE}", None)
