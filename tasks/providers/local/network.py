"""Local hosts as namespaces: a switch (a bridge in a network namespace) and hosts joined to it by
shaped links.

Nothing is named and nothing stands in the machine's own network namespace: links and namespaces end
with the processes that hold them. An ordinary user gets the same inside a user namespace. Never
decides who may have a host.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tasks.providers.base import ProviderError
from tasks.providers.local.processes import children

# an ordinary user's PATH on Debian lacks ip and tc
PATH = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"
_PACKAGES = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "nsenter": "util-linux"}
_HOST = ("unshare", "--net", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c")
# the shell stays, and collects orphans
_LOOPBACK = 'PATH="$PATH:/usr/sbin:/sbin" ip link set lo up; "$@"; exit $?'
_SWITCH = ("unshare", "--net")
_USER = ("unshare", "-Urnm")
_INSIDE_USER = ("nsenter", "-U", "--preserve-credentials", "-t")
_TRY = (
    "ip link add br0 type bridge && ip link add h0 type veth peer name eth0"
    " && tc qdisc add dev h0 root {tbf}"
)
# No IPv6 address of the link's own; a kernel without IPv6 refuses the words, and gives it none
# anyway.
_QUIET = "{{ ip link set {link} addrgenmode none 2>/dev/null || true; }}"
_TICKS_PER_S = 250  # CONFIG_HZ of Debian's kernels
_LEAST_BURST_BYTES = 65_536  # one segment as the kernel hands it over before splitting
_START_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Isolation:
    """What separates hosts here: "root" or "user" namespaces, or "none" and why."""

    kind: str
    why_not: str = ""

    @property
    def namespaces(self) -> bool:
        return self.kind != "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPlan:
    """One host to start. Its `mark` shows in the command line."""

    mark: str
    address: str
    bandwidth_gbps: float
    command: Sequence[str]
    log: Path
    prefix: int = 24  # bits of the address that name the network


@dataclass(slots=True)
class Host:
    """A host that waits for `go`. `inner_pid` is the first process inside its namespaces."""

    process: subprocess.Popen[bytes]
    inner_pid: int

    @property
    def pids(self) -> list[int]:
        return list(dict.fromkeys((self.process.pid, self.inner_pid)))

    def go(self) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(b"go\n")
            self.process.stdin.close()
        except BrokenPipeError:
            pass  # it died while it waited; its state says so


def missing_tools() -> list[str]:
    """Return a sentence for each Debian package whose programs are missing."""
    absent: dict[str, list[str]] = {}
    for tool, package in _PACKAGES.items():
        if shutil.which(tool, path=PATH) is None:
            absent.setdefault(package, []).append(tool)
    return [
        f"{' and '.join(tools)} missing: apt-get install {package}"
        for package, tools in absent.items()
    ]


def detect() -> Isolation:
    """Return the first kind of isolation in which a host can be made (about 20 ms each)."""
    missing = missing_tools()
    if missing:
        return Isolation(kind="none", why_not="; ".join(missing))
    script = _TRY.format(tbf=_tbf(0.1))
    tries: dict[str, tuple[str, ...]] = {"user": (*_USER, *_HOST, script)}
    if os.geteuid() == 0:
        tries = {"root": (*_HOST, script), **tries}
    reasons: list[str] = []
    for kind, command in tries.items():
        done = subprocess.run(
            command, capture_output=True, text=True, env={"PATH": PATH, "LANG": "C"}
        )
        if done.returncode == 0:
            return Isolation(kind=kind)
        reasons.append((done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1])
    return Isolation(kind="none", why_not="; ".join(dict.fromkeys(reasons)))


def without_network(isolation: Isolation, command: Sequence[str]) -> list[str]:
    """Return `command` without a network or sight of other processes, where namespaces work."""
    if not isolation.namespaces:
        return list(command)
    return [
        *(_USER if isolation.kind == "user" else ()),
        *_HOST,
        _LOOPBACK,
        "srift-check",
        *command,
    ]


def start_switch(
    isolation: Isolation, environment: Mapping[str, str], log: Path
) -> subprocess.Popen[bytes]:
    """Start a process that holds the namespace of the bridge."""
    return _start(
        (*(_SWITCH if isolation.kind == "root" else _USER), "sleep", "infinity"), environment, log
    )


def start_host(
    isolation: Isolation,
    switch: subprocess.Popen[bytes] | None,
    plan: HostPlan,
    environment: Mapping[str, str],
) -> Host:
    """A host that waits for `go`, then shapes its link and runs its agent. Raises ProviderError."""
    if switch is None:
        script = 'read -r go || exit 70; "$@" </dev/null; exit $?'
        process = _start(("sh", "-c", script, plan.mark, *plan.command), environment, plan.log)
        return Host(process, process.pid)
    script = (
        f"read -r go || exit 70; ip link set lo up && {_QUIET.format(link='eth0')} && "
        f"ip addr add {plan.address}/{plan.prefix} dev eth0 && ip link set eth0 up && "
        f"tc qdisc add dev eth0 root {_tbf(plan.bandwidth_gbps)} || exit 71; "
        '"$@" </dev/null; exit $?'  # the shell stays the first process and collects orphans
    )
    if isolation.kind == "user":
        _wait_for_user_namespace(switch)
    into_user = (*_INSIDE_USER, str(switch.pid)) if isolation.kind == "user" else ()
    process = _start((*into_user, *_HOST, script, plan.mark, *plan.command), environment, plan.log)
    return Host(process, 0)


def find_inner(host: Host) -> None:
    """Wait until the host's namespaces exist. Raises ProviderError."""
    until = time.monotonic() + _START_S
    while host.inner_pid == 0:
        found = children(host.process.pid)
        if found:
            host.inner_pid = found[0]
        elif host.process.poll() is not None or time.monotonic() > until:
            raise ProviderError(
                f"a host's namespaces could not be made (exit status {host.process.poll()})"
            )
        else:
            time.sleep(0.002)


def join(
    isolation: Isolation,
    switch: subprocess.Popen[bytes],
    hosts: Sequence[tuple[Host, HostPlan]],
    *,
    first: int = 0,
) -> None:
    """Make a shaped link to each host, and first the bridge; `first` hosts were joined before.

    Raises ProviderError with what `ip` or `tc` printed.
    """
    bridge = ["ip link set lo up", "ip link add br0 type bridge", "ip link set br0 up"]
    lines = ["set -e", *(bridge if first == 0 else [])]
    for index, (host, plan) in enumerate(hosts, first):
        lines += [
            f"ip link add h{index} type veth peer name eth0 netns {host.inner_pid}",
            _QUIET.format(link=f"h{index}"),
            f"ip link set h{index} master br0 up",
            f"tc qdisc add dev h{index} root {_tbf(plan.bandwidth_gbps)}",
        ]
    into_user = ("-U", "--preserve-credentials") if isolation.kind == "user" else ()
    done = subprocess.run(
        ("nsenter", "-t", str(switch.pid), *into_user, "-n", "sh", "-c", "\n".join(lines)),
        capture_output=True,
        text=True,
        env={"PATH": PATH, "LANG": "C"},
    )
    if done.returncode != 0:
        raise ProviderError(
            f"the hosts could not be joined: {done.stderr.strip() or done.returncode}"
        )


def _tbf(bandwidth_gbps: float) -> str:
    """Token bucket of one direction. It must hold what one timer tick lets through."""
    burst_bytes = max(_LEAST_BURST_BYTES, round(bandwidth_gbps * 1e9 / 8 / _TICKS_PER_S))
    return shlex.join(
        [
            "tbf",
            "rate",
            f"{round(bandwidth_gbps * 1e6)}kbit",
            "burst",
            f"{burst_bytes}b",
            "latency",
            "50ms",
        ]
    )


def _wait_for_user_namespace(switch: subprocess.Popen[bytes]) -> None:
    """Wait until the holder is root of its namespace. Raises ProviderError."""
    until = time.monotonic() + _START_S
    mine = os.readlink("/proc/self/ns/net")
    while time.monotonic() < until and switch.poll() is None:
        mapped = Path(f"/proc/{switch.pid}/uid_map").read_text().split()[:1] == ["0"]
        if mapped and os.readlink(f"/proc/{switch.pid}/ns/net") != mine:
            return
        time.sleep(0.002)
    raise ProviderError(f"the switch's namespaces could not be made (exit status {switch.poll()})")


def _start(
    command: Sequence[str], environment: Mapping[str, str], log: Path
) -> subprocess.Popen[bytes]:
    """Start in another session, so that Ctrl-C in a terminal reaches the controller alone."""
    with log.open("ab") as output:
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**environment, "PATH": PATH},
            cwd=log.parent,
            start_new_session=True,
        )
