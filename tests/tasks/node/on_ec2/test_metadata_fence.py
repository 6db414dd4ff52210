"""User code runs only where the metadata service has been shown to be out of its reach (on real
hosts: tests/local).
"""

from __future__ import annotations

import pwd
import socket
from types import SimpleNamespace
from typing import Any

import pytest

from tasks.node.on_ec2 import metadata_fence as fence
from tasks.node.on_ec2.metadata_fence import account

USER = pwd.struct_passwd(("srift", "x", 12345, 12346, "", "/", "/bin/sh"))


@pytest.mark.parametrize(
    ("tools", "holding", "said"),
    [
        ("ip6 ip iptables", "ip", ""),
        (
            "ip6 ip iptables",
            "iptables",
            "",
        ),  # a network service that starts anew has dropped the routing rule
        ("iptables", "iptables", ""),
        ("ip iptables", "", "does not hold"),
        ("", "", "no iptables here"),
        ("ip6", "ip6", "ip: "),
    ],
)
def test_one_rule_that_holds_is_enough_and_without_one_no_code_runs(
    monkeypatch: pytest.MonkeyPatch, tools: str, holding: str, said: str
) -> None:
    """A kernel that takes the rules of `tools`, of which those in `holding` keep the user out."""
    rules: list[str] = []

    def apply(words: list[str]) -> str:
        tool = "ip6" if words[:2] == ["ip", "-6"] else words[0]
        assert "12345" in " ".join(words) and ("169.254.169.254" in " ".join(words)) is (
            tool != "ip6"
        )
        if tool not in tools.split():
            return f"no {tool} here"
        rules.append(tool)
        return ""

    def prove(*_: object) -> str:
        return "" if set(holding.split()) & set(rules) else "it is in force and does not hold"

    monkeypatch.setattr(fence, "_apply", apply)
    monkeypatch.setattr(fence, "_prove", prove)
    reason = fence.fence(USER, "http://169.254.169.254", "/python")
    assert rules == tools.split()
    assert said in reason and ("none was run" in reason) is bool(said) is bool(reason)


def test_root_and_nobody_that_there_is_are_refused() -> None:
    with pytest.raises(OSError, match="root"):
        account("root")
    with pytest.raises(OSError, match="no user"):
        account("srift-no-such-user")


def test_a_process_of_the_user_has_no_group_of_ours_and_gains_no_rights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: dict[str, Any] = {}
    gained: list[str] = []
    monkeypatch.setattr(fence.subprocess, "Popen", lambda command, **options: asked.update(options))
    monkeypatch.setattr(fence, "gain_nothing", lambda: gained.append("nothing"))
    monkeypatch.setattr(fence, "die_with_parent", lambda: gained.append("dies"))
    fence.start_as(USER, ["true"], cwd="/")
    assert (asked["user"], asked["group"], asked["extra_groups"], asked["cwd"]) == (
        12345,
        12346,
        [],
        "/",
    )
    asked["preexec_fn"]()
    assert gained == ["nothing", "dies"]


def tried(monkeypatch: pytest.MonkeyPatch, code: int, root: OSError | None) -> str:
    """What trying as the user proves that ended with `code`, where root's own attempt
    meets `root`.
    """

    def connect(*_: object, **__: object) -> SimpleNamespace:
        if root is not None:
            raise root
        return SimpleNamespace(close=lambda: None)

    ended = SimpleNamespace(returncode=code, communicate=lambda timeout: (b"", b"no such file"))
    monkeypatch.setattr(fence, "start_as", lambda *_, **__: ended)
    monkeypatch.setattr(socket, "create_connection", connect)
    return fence._prove(USER, "/python", "169.254.169.254", 80)


def test_only_a_refusal_of_what_root_is_granted_proves_the_fence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert tried(monkeypatch, fence._REFUSED, None) == ""
    assert "root cannot" in tried(monkeypatch, fence._REFUSED, TimeoutError("timed out"))
    assert "does not hold" in tried(monkeypatch, fence._CONNECTED, None)
    assert "no such file" in tried(monkeypatch, 1, None)
