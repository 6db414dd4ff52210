"""What the courier lets the agent see, and that nobody's code runs behind a fence that does not hold."""

from __future__ import annotations

import argparse
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tasks.node.on_ec2 import courier
from tasks.node.on_ec2.metadata_fence import Account

USER = Account(name="srift", uid=12345, gid=12345)
SECRETS = ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "SRIFT_BASE")


def test_the_agent_sees_where_programs_are_and_nothing_of_the_machines_rights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in SECRETS:
        monkeypatch.setenv(name, "secret")
    started: dict[str, Any] = {}

    def start_as(user: Account, command: list[str], **options: Any) -> SimpleNamespace:
        started.update(options, user=user, command=command)
        return SimpleNamespace(pid=2**30)  # none has that number

    monkeypatch.setattr(courier, "start_as", start_as)
    courier.AgentProcess(USER, "/python", tmp_path, rank=3, address="10.0.0.4", deadline_unix=9.0)
    assert started["user"] == USER and started["command"][:5] == ["/python", "-m", "node", "--mailbox", str(tmp_path)]
    assert "secret" not in started["env"].values()
    assert set(started["env"]) <= {
        *("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH"),
        *("HOME", "USER", "LOGNAME", "PYTHONPATH", "PYTHONDONTWRITEBYTECODE"),
    }
    assert started["env"]["HOME"] == str(tmp_path / "node-3") and started["env"]["PATH"]


def delivered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, reason: str) -> str:
    """What comes of a machine whose fence says `reason`; "served" where user code could have run."""
    monkeypatch.setattr(courier, "account", lambda _: USER)
    monkeypatch.setattr(courier, "fence", lambda *_: reason)
    monkeypatch.setattr(courier.signal, "signal", lambda *_: None)
    monkeypatch.setattr(courier, "Delivery", lambda **_: SimpleNamespace(serve=lambda: "served", leave=None))
    arguments = argparse.Namespace(user="srift", python="/python", directory=tmp_path)
    metadata: Any = SimpleNamespace(address=lambda: "10.0.0.4", base="http://169.254.169.254", notice=None)
    store: Any = None
    return courier.deliver(arguments, metadata, store, ends=1e12)


def test_nothing_is_served_behind_a_fence_that_does_not_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert delivered(monkeypatch, tmp_path, "it does not hold") == "it does not hold"
    assert delivered(monkeypatch, tmp_path, "") == "served"
