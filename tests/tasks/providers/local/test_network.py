"""Links on a kernel without IPv6; stand-ins of `ip`, `tc`, `unshare` and `nsenter` are started."""

import os

from tasks.providers.local import network as local_hosts
from tasks.providers.local.network import HostNetwork, Isolation

INSIDE = '#!/bin/sh\nwhile [ "$1" != sh ] && [ "$1" != sleep ]; do shift; done\n'
STAND_INS = {
    "ip": """#!/bin/sh
echo "$@" >> {log}
case "$*" in *addrgenmode*) echo "Address family not supported by protocol" >&2; exit 2;; esac
""",
    "tc": "#!/bin/sh\n",
    "unshare": INSIDE + '"$@"; exit $?\n',  # the host's first process is its child
    "nsenter": INSIDE + 'exec "$@"\n',
}


def test_a_kernel_without_ipv6_can_have_hosts(tmp_path, monkeypatch):
    log = tmp_path / "requests"
    for name, text in STAND_INS.items():
        (tmp_path / name).write_text(text.format(log=log) if name == "ip" else text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setattr(local_hosts, "PATH", f"{tmp_path}:{os.defpath}")
    monkeypatch.setattr(local_hosts, "_await_namespaces", lambda _: None)
    network = HostNetwork(Isolation(kind="root"), {})
    network.open(tmp_path / "switch")
    command = ["sh", "-c", "exit 0"]
    host = network.start("a", command, tmp_path / "log", address="10.77.0.1", bandwidth_gbps=0.2)
    host.go()
    assert network._processes[1].wait(10) == 0, (tmp_path / "log").read_text()
    network.close()
    assert "link set eth0 up" in log.read_text() and "link set h0 master br0 up" in log.read_text()
