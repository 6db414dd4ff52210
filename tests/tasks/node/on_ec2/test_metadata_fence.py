"""User code runs only where the metadata service has been shown to be out of its reach (on real hosts: tests/local)."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any

import pytest

from tasks.node.on_ec2 import metadata_fence as fence
from tasks.node.on_ec2.metadata_fence import Account, account, enforce


class Kernel:
    """Takes the rules of `tools`; those in `holding` keep the user out."""

    def __init__(self, tools: str, holding: str) -> None:
        self.tools, self.holding = tools.split(), holding.split()
        self.rules: list[str] = []

    def put(self, rule: str) -> str:
        tool = "ip6" if rule.startswith("ip -6") else rule.split()[0]
        if tool not in self.tools:
            return f"no {tool} here"
        self.rules.append(tool)
        return ""

    def tries(self) -> str:
        return "" if set(self.holding) & set(self.rules) else "it is in force and does not hold"


def test_one_rule_that_holds_is_enough_and_the_others_stand_behind_it() -> None:
    kernel = Kernel("ip ip6 iptables", "ip")
    assert enforce(kernel.put, kernel.tries) == ""
    assert kernel.rules == ["ip6", "ip", "iptables"]
    kernel.rules.remove("ip")
    kernel.holding = ["iptables"]
    assert kernel.tries() == "", "a network service that starts anew has dropped the routing rule"


@pytest.mark.parametrize("tools", ["iptables", "ip iptables"])
def test_a_rule_that_is_refused_or_does_not_hold_gives_way_to_the_next(tools: str) -> None:
    kernel = Kernel(tools, "iptables")
    assert enforce(kernel.put, kernel.tries) == ""


@pytest.mark.parametrize(("tools", "said"), [("ip iptables", "does not hold"), ("", "no iptables here")])
def test_where_none_holds_the_reason_names_each(tools: str, said: str) -> None:
    kernel = Kernel(tools, "")
    reason = enforce(kernel.put, kernel.tries)
    assert "none was run" in reason and said in reason and "ip:" in reason and "iptables:" in reason


def test_root_and_nobody_that_there_is_are_refused() -> None:
    with pytest.raises(OSError, match="root"):
        account("root")
    with pytest.raises(OSError, match="no user"):
        account("srift-no-such-user")


USER = Account(name="srift", uid=12345, gid=12346)


def test_a_process_of_the_user_has_no_group_of_ours_and_gains_no_rights(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}
    gained: list[str] = []
    monkeypatch.setattr(fence.subprocess, "Popen", lambda command, **options: asked.update(options))
    monkeypatch.setattr(fence, "gain_nothing", lambda: gained.append("nothing"))
    monkeypatch.setattr(fence, "die_with_parent", lambda: gained.append("dies"))
    fence.start_as(USER, ["true"], cwd="/")
    assert (asked["user"], asked["group"], asked["extra_groups"], asked["cwd"]) == (12345, 12346, [], "/")
    asked["preexec_fn"]()
    assert gained == ["nothing", "dies"]


def tried(monkeypatch: pytest.MonkeyPatch, code: int, root: OSError | None) -> str:
    """What trying as the user proves that ended with `code`, where root's own attempt meets `root`."""

    def connect(*_: object, **__: object) -> SimpleNamespace:
        if root is not None:
            raise root
        return SimpleNamespace(close=lambda: None)

    ended = SimpleNamespace(returncode=code, communicate=lambda timeout: (b"", b"no such file"))
    monkeypatch.setattr(fence, "start_as", lambda *_, **__: ended)
    monkeypatch.setattr(socket, "create_connection", connect)
    return fence._prove(USER, "/python", "169.254.169.254", 80)


def test_only_a_refusal_of_what_root_is_granted_proves_the_fence(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tried(monkeypatch, fence._REFUSED, None) == ""
    assert "root cannot reach it either" in tried(monkeypatch, fence._REFUSED, TimeoutError("timed out"))
    assert "does not hold" in tried(monkeypatch, fence._CONNECTED, None)
    assert "no such file" in tried(monkeypatch, 1, None)
