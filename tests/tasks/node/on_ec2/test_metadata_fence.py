"""User code runs only where the metadata service is out of its reach (real hosts: tests/local)."""

import pwd
import socket
from types import SimpleNamespace

import pytest

from tasks.node.on_ec2 import metadata_fence as fence

USER = pwd.struct_passwd(("srift", "x", 12345, 12346, "", "/", "/bin/sh"))


@pytest.mark.parametrize("holding", ["ip", "iptables", ""])
def test_one_rule_that_holds_is_enough_and_without_one_no_code_runs(monkeypatch, holding):
    """A kernel that takes the rules of the tool `holding`; a restarted service drops a rule."""
    rules = []

    def apply(words):
        assert "12345" in " ".join(words)
        assert ("169.254.169.254" in words or "169.254.169.254/32" in words) is ("-6" not in words)
        rules.append(words[0])
        return "" if words[0] == holding else f"no {words[0]} here"

    monkeypatch.setattr(fence, "_apply", apply)
    monkeypatch.setattr(fence, "_prove", lambda *_: "" if holding in rules else "does not hold")
    reason = fence.fence(USER, "http://169.254.169.254", "/python")
    assert rules == ["ip", "iptables", "ip"]
    assert ("was not run" in reason and "no iptables" in reason) is (not holding) is bool(reason)


@pytest.mark.parametrize("name", ["root", "srift-no-such-user"])
def test_root_and_unknown_users_are_refused(name):
    with pytest.raises((KeyError, OSError), match=name):
        fence.account(name)


def test_a_process_of_the_user_has_no_group_of_ours_and_gains_no_rights(monkeypatch):
    given = {}
    confined = []
    monkeypatch.setattr(fence.subprocess, "Popen", lambda command, **options: given.update(options))
    for name in ("gain_nothing", "die_with_parent"):
        monkeypatch.setattr(fence, name, lambda name=name: confined.append(name))
    fence.start_as(USER, ["true"], cwd="/")
    given.pop("preexec_fn")()
    assert given == {"user": 12345, "group": 12346, "extra_groups": [], "cwd": "/"}
    assert confined == ["gain_nothing", "die_with_parent"]


@pytest.mark.parametrize(
    ("code", "root", "named"),
    [
        (fence._REFUSED, None, ""),
        (fence._REFUSED, TimeoutError("timed out"), "root cannot"),
        (fence._CONNECTED, None, "can still connect"),
        (1, None, "no such file"),
    ],
)
def test_only_a_refusal_of_what_root_is_granted_proves_the_fence(monkeypatch, code, root, named):
    """The user's attempt ends with `code`, and root's meets the error `root`."""

    def connect(*_, **__):
        if root is not None:
            raise root
        return SimpleNamespace(close=lambda: None)

    ended = SimpleNamespace(returncode=code, communicate=lambda timeout: (b"", b"no such file"))
    monkeypatch.setattr(fence, "start_as", lambda *_, **__: ended)
    monkeypatch.setattr(socket, "create_connection", connect)
    problem = fence._prove(USER, "/python", "169.254.169.254", 80)
    assert named in problem and bool(problem) is bool(named)
