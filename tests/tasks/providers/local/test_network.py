"""What is asked of `ip` where a kernel does not know IPv6; nothing is started but stand-ins of the tools."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tasks.providers.local import network as local_hosts
from tasks.providers.local.network import Host, HostPlan, Isolation

IP = """#!/bin/sh
echo "$@" >> {log}
case "$*" in *addrgenmode*) echo "RTNETLINK answers: Address family not supported by protocol" >&2; exit 2;; esac
"""
AS_TOLD = '#!/bin/sh\nwhile [ "$1" != sh ]; do shift; done\nexec "$@"\n'


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What `ip` was asked, on a kernel booted with ipv6.disable=1."""
    log = tmp_path / "asked"
    for name, text in {
        "ip": IP.format(log=log),
        "tc": "#!/bin/sh\n",
        "unshare": AS_TOLD,
        "nsenter": AS_TOLD,
    }.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setattr(local_hosts, "PATH", f"{tmp_path}:{os.defpath}")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return log


def test_a_kernel_without_ipv6_can_have_hosts(tmp_path: Path, asked: Path) -> None:
    plan = HostPlan(
        mark="a",
        address="10.77.0.1",
        bandwidth_gbps=0.2,
        command=["sh", "-c", "exit 0"],
        log=tmp_path / "log",
    )
    with subprocess.Popen(["true"]) as switch:
        host = local_hosts.start_host(Isolation(kind="root"), switch, plan, {})
        host.go()
        assert host.process.wait(10) == 0, (tmp_path / "log").read_text()
        local_hosts.join(Isolation(kind="root"), switch, [(Host(host.process, 7), plan)])
    assert (
        "link set eth0 up" in asked.read_text() and "link set h0 master br0 up" in asked.read_text()
    )
