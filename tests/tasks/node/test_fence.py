"""User code runs only where the metadata service has been shown to be out of its reach (on real hosts: tests/local)."""

from __future__ import annotations

import pytest

from tasks.node.fence import account, fenced


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
    assert fenced(kernel.put, kernel.tries) == ""
    assert kernel.rules == ["ip6", "ip", "iptables"]
    kernel.rules.remove("ip")
    kernel.holding = ["iptables"]
    assert kernel.tries() == "", "a network service that starts anew has dropped the routing rule"


@pytest.mark.parametrize("tools", ["iptables", "ip iptables"])
def test_a_rule_that_is_refused_or_does_not_hold_gives_way_to_the_next(tools: str) -> None:
    kernel = Kernel(tools, "iptables")
    assert fenced(kernel.put, kernel.tries) == ""


@pytest.mark.parametrize(("tools", "said"), [("ip iptables", "does not hold"), ("", "no iptables here")])
def test_where_none_holds_the_reason_names_each(tools: str, said: str) -> None:
    kernel = Kernel(tools, "")
    reason = fenced(kernel.put, kernel.tries)
    assert "none was run" in reason and said in reason and "ip:" in reason and "iptables:" in reason


def test_root_and_nobody_that_there_is_are_refused() -> None:
    with pytest.raises(OSError, match="root"):
        account("root")
    with pytest.raises(OSError, match="no user"):
        account("srift-no-such-user")
