"""Run local hosts in network namespaces, and connect them by links with limited bandwidth.

The links meet at a bridge in a separate network namespace. Namespaces and links disappear when
their processes end. The hosts of an ordinary user run inside a user namespace.
"""

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import psutil

from ..base import ProviderError
from .processes import end

# an ordinary user's PATH on Debian lacks ip and tc
PATH = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"
_TOOLS = ("ip", "tc", "unshare", "nsenter", "setpriv")
# Namespaces without names, and links outside the main namespace, end with their processes.
_HOST = ("unshare", "--net", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c")
# In each script, the shell stays the first process of its namespace, and reaps orphans.
_LOOPBACK = 'PATH="$PATH:/usr/sbin:/sbin" ip link set lo up; "$@"; exit $?'
_AGENT = '"$@" </dev/null; exit $?'
_HOLDER = {"root": ("unshare", "--net"), "user": ("unshare", "-Urnm")}
# Run a command without the privileges of root. Root becomes `nobody` (65534) with the right to read
# every file, because Python and data are often in folders that only root can read.
_POWERLESS = {
    "root": """setpriv --reuid=65534 --regid=65534 --clear-groups --no-new-privs \
--bounding-set=-all,+dac_read_search --inh-caps=-all,+dac_read_search \
--ambient-caps=-all,+dac_read_search""",
    "user": "setpriv --no-new-privs --bounding-set=-all --inh-caps=-all --ambient-caps=-all",
    "none": "",
}
# Run a command in a new root folder that has only the system's files and the paths before "--".
# The working directory is `code`. The command owns and may write `code` and `environment`. Root
# owns `environment` again when all processes of the command have ended.
_ALONE = r"""
set -e; umask 022; code=$1 environment=$2 new=${1%/*}/root
read -r first outside users </proc/self/uid_map
if [ "$users" = 1 ]; then owner=0 groups=--keep-groups; else owner=65534 groups=--clear-groups; fi
chown -hR "$owner:$owner" "$code" "$environment"
mkdir "$new"; mount -t tmpfs none "$new"; mkdir -m 1777 "$new/tmp"
inside() { unshare --root="$new" --wd="$code" setpriv --reuid="$owner" --regid="$owner" "$groups" \
  --no-new-privs --bounding-set=-all --inh-caps=-all "$@"; }
for path in /usr /bin /sbin /lib /lib64 /etc /dev /proc /run/systemd/resolve "$@"; do
  case $path in --) break ;; /*) ;; *) continue ;; esac
  [ -e "$path" ] || continue
  if [ -d "$path" ]; then mkdir -p "$new$path"
  elif [ ! -e "$new$path" ]; then mkdir -p "$new${path%/*}"; : >"$new$path"; fi
  mount --rbind "$path" "$new$path"
  case $path in "$code" | "$environment" | /dev | /proc) ;;
  *) mount -o remount,bind,ro "$new$path" ;; esac
done
until [ "$1" = -- ]; do
  [ ! -e "$new/$1" ] || inside test -r "$1" ||
    { echo "user nobody cannot read $1: run chmod -R go+rX $1"; exit 1; }
  shift
done; shift
status=0; inside "$@" || status=$?
[ $$ != 1 ] || kill -9 -1 2>/dev/null || :
chown -hR 0:0 "$environment"
exit $status
"""
_BRIDGE = "ip link set lo up && ip link add br0 type bridge && ip link set br0 up"
# A kernel without IPv6 rejects `addrgenmode`, but gives links no IPv6 address anyway.
_QUIET = "{{ ip link set {link} addrgenmode none 2>/dev/null || true; }}"
_TICKS_PER_S = 250  # CONFIG_HZ of Debian's kernels
_LEAST_BURST_BYTES = 65_536  # size of one segment before the kernel splits it into packets
_START_S = 10.0
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Isolation:
    """How hosts are separated: by Linux namespaces, or not at all.

    kind: "root" (namespaces that root creates), "user" (namespaces inside a user namespace), or
        "none".
    why_not: why hosts cannot be separated; "" if they can.
    """

    kind: str
    why_not: str = ""

    @property
    def namespaces(self) -> bool:
        return self.kind != "none"

    def give(self, *folders: Path) -> None:
        """Create `folders` if they are missing, and let the processes of hosts write to them."""
        for folder in folders:
            folder.mkdir(exist_ok=True)
            if self.kind == "root":
                os.chown(folder, 65534, 65534)

    def powerless(self, command: Sequence[str]) -> list[str]:
        """Return a command that runs `command` without the privileges of root.

        Returns `command` unchanged if this computer cannot create namespaces.
        """
        return [*_POWERLESS[self.kind].split(), *command]


@dataclass(frozen=True)
class Host:
    """A running host, whose agent (the program that measures) starts when `go` is called.

    process: the process that Srift started: `unshare` or `nsenter`, or `sh` without namespaces.
    inner: the first process inside the host's namespaces. Without namespaces, `inner` and `process`
        are the same process.
    """

    process: subprocess.Popen[bytes]
    inner: psutil.Process

    def processes(self) -> list[psutil.Process]:
        """Return the host's first process and descendants; [] if the first process has ended."""
        with suppress(psutil.NoSuchProcess):
            return [self.inner, *self.inner.children(recursive=True)]
        return []

    def go(self) -> None:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # the host has died, which its `NodeState` reports
            self.process.stdin.write(b"go\n")
            self.process.stdin.close()

    def end(self) -> None:
        """Kill all processes of the host, which ends its namespaces."""
        processes = self.processes()
        self.process.kill()
        end(processes)


class HostNetwork:
    """The hosts of one launch, and the links with limited bandwidth between them.

    If this computer cannot create namespaces, hosts are plain processes on the loopback address.
    """

    def __init__(self, isolation: Isolation, environment: Mapping[str, str]) -> None:
        self._isolation = isolation
        self._environment = {**environment, "PATH": PATH}
        self._processes: list[subprocess.Popen[bytes]] = []
        self.switch: subprocess.Popen[bytes] | None = None

    def open(self, log: Path) -> None:
        """Start the process that keeps the network bridge alive, if namespaces are available.

        log: file for the output of the process.
        Raises ProviderError on failure. After a failure, the caller must call `close`.
        """
        if self._isolation.namespaces:
            holder = (*_HOLDER[self._isolation.kind], "sleep", "infinity")
            self.switch = switch = self._spawn(holder, log)
            process, ours = Path(f"/proc/{switch.pid}"), os.readlink("/proc/self/ns/net")
            # wait until the process is root in its user namespace and has a network namespace
            _await(
                switch,
                lambda: (
                    (process / "uid_map").read_text().split()[:1] == ["0"]
                    and os.readlink(process / "ns/net") != ours
                ),
            )
            self.run(_BRIDGE)

    def start(
        self,
        mark: str,
        command: Sequence[str],
        log: Path,
        *,
        address: str,
        bandwidth_gbps: float,
    ) -> Host:
        """Start a host that runs `command` when `Host.go` is called.

        mark: text that identifies the host, and becomes a command-line argument of its first
            processes (see `HostMark`).
        log: file for the output of `command`.
        address: IPv4 address of the host.
        bandwidth_gbps: limit of the host's network rate in each direction, in Gbit/s.

        If this computer cannot create namespaces, `address` and `bandwidth_gbps` are ignored.

        Raises ProviderError if the host cannot be started or connected to the bridge.
        """
        if self.switch is None:
            agent = ("sh", "-c", f"read -r go || exit 70; {_AGENT}", mark, *command)
            process = self._spawn(agent, log)
            return Host(process, psutil.Process(process.pid))
        script = (
            f"read -r go || exit 70; ip link set lo up && {_QUIET.format(link='eth0')} && "
            f"ip addr add {address}/16 dev eth0 && ip link set eth0 up && "
            f"tc qdisc add dev eth0 root {_tbf(bandwidth_gbps)} || exit 71; {_AGENT}"
        )
        user = self._enter if self._isolation.kind == "user" else ()
        process = self._spawn((*user, *_HOST, script, mark, *command), log)
        [inner, *_] = _await(process, psutil.Process(process.pid).children)
        link = f"h{len(self._processes) - 2}"  # the first process holds the bridge
        self.run(
            f"ip link add {link} type veth peer name eth0 netns {inner.pid}"
            f" && {_QUIET.format(link=link)} && ip link set {link} master br0 up"
            f" && tc qdisc add dev {link} root {_tbf(bandwidth_gbps)}"
        )
        return Host(process, inner)

    def run(self, script: str) -> None:
        """Run a shell script in the network namespace that has the bridge between the hosts.

        Raises ProviderError with the script's error output if the script fails.
        """
        done = _shell((*self._enter, "-n", "sh", "-c", script))
        if done.returncode != 0:
            raise ProviderError(
                "the network between the hosts could not be created:"
                f" {done.stderr.strip() or f'exit status {done.returncode}'}"
            )

    def close(self) -> None:
        """Kill all processes of this network, and wait until they are gone."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.communicate()  # closes its input and waits

    @property
    def _enter(self) -> Sequence[str]:
        """Return the first words of an `nsenter` command that targets the network bridge's process.

        If the bridge is inside a user namespace, the command enters the user namespace. Callers
        append options for other kinds of namespaces, and the program to run.
        """
        assert self.switch is not None
        user = ("-U", "--preserve-credentials") if self._isolation.kind == "user" else ()
        return ("nsenter", *user, "-t", str(self.switch.pid))

    def _spawn(self, command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
        """Start a process in a separate session, so that Ctrl-C does not reach it."""
        with log.open("ab") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self._environment,
                cwd=log.parent,
                start_new_session=True,
            )
        self._processes.append(process)
        return process


def detect() -> Isolation:
    """Return the isolation that this computer can give to local hosts.

    `Isolation.kind` is "root" only if the current user is root.
    """
    missing = [tool for tool in _TOOLS if shutil.which(tool, path=PATH) is None]
    if missing:
        hint = f"{', '.join(missing)} missing: apt-get install iproute2 util-linux"
        return Isolation(kind="none", why_not=hint)
    reasons = []
    script = (
        "ip link add br0 type bridge && ip link add h0 type veth peer name eth0"
        f" && tc qdisc add dev h0 root {_tbf(0.1)}"
    )
    for kind in ("root", "user") if os.geteuid() == 0 else ("user",):
        user = _HOLDER["user"] if kind == "user" else ()
        done = _shell((*user, *_HOST, f"{script} && {_POWERLESS[kind]} true"))
        if done.returncode == 0:
            return Isolation(kind=kind)
        reasons.append((done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1])
    return Isolation(kind="none", why_not="; ".join(dict.fromkeys(reasons)))


def without_network(isolation: Isolation, command: Sequence[str]) -> list[str]:
    """Return a command that runs `command` without a network and without the privileges of root.

    Returns `command` unchanged if this computer cannot create namespaces.
    """
    if not isolation.namespaces:
        return list(command)
    user = _HOLDER["user"] if isolation.kind == "user" else ()
    return [*user, *_HOST, _LOOPBACK, "srift-check", *isolation.powerless(command)]


def without_files(
    isolation: Isolation, paths: Sequence[object], command: Sequence[str]
) -> list[str]:
    """Return a command that runs `command` with network access, but hides this user's files.

    `command` sees only the system's files and `paths`. The first path is its working directory.

    paths: the folder with the code, the folder of the Python environment, and other paths.
        `command` may write to the two folders. The other paths are read-only.

    Returns `command` unchanged if this computer cannot create namespaces.
    """
    if not isolation.namespaces:
        return list(command)
    space = ("unshare", "-Urm" if isolation.kind == "user" else "-m", *_HOST[2:], _ALONE)
    return [*space, "srift-install", *map(str, paths), "--", *command]


def _shell(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": PATH, "LANG": "C"}
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def _tbf(bandwidth_gbps: float) -> str:
    """Return the arguments of `tc` that limit one direction of a link to `bandwidth_gbps`."""
    # The token bucket holds at least the bytes that the link sends in one timer tick.
    burst_bytes = max(_LEAST_BURST_BYTES, round(bandwidth_gbps * 1e9 / 8 / _TICKS_PER_S))
    return f"tbf rate {round(bandwidth_gbps * 1e6)}kbit burst {burst_bytes}b latency 50ms"


def _await(process: subprocess.Popen[bytes], ready: Callable[[], T]) -> T:
    """Call `ready` until its result is truthy, and return the result.

    Raises ProviderError after _START_S seconds, or when `process` ends.
    """
    until = time.monotonic() + _START_S
    while time.monotonic() < until and process.poll() is None:
        if found := ready():
            return found
        time.sleep(0.002)
    raise ProviderError(
        f"a process in a network namespace was not ready within {_START_S:.0f} s, or ended early"
        f" (exit status {process.poll()}; None means that the process still runs)"
    )
