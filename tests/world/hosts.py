"""A real local host for each instance: namespaces, a shaped link, and its own user-data.

A region is one switch: a bridge in a network namespace, where the metadata service answers too.
Everything is ended by the numbers of processes that were started here.
"""

from __future__ import annotations

import ctypes
import os
import shlex
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tasks.providers.local import network as local_hosts
from tasks.providers.local.network import Host, HostPlan, Isolation, Network
from tasks.providers.local.processes import end, identify

HERE = Path(__file__).parent
VIEWS = ("/etc", "/opt", "/var", "/home", "/root", "/srv", "/tmp")  # /run comes first, by itself
TOOLS = ("shutdown", "poweroff", "halt", "systemctl")
MOST_GBPS = 20.0  # about what a link of this kernel carries at all
_ROOT = Isolation(kind="root")
_CLONE_NEWNET = 0x40000000


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What an instance is, as far as its host shows it."""

    instance_id: str
    region: str
    address: str
    bandwidth_gbps: float
    user_data: bytes


class Hosts:
    """The hosts of one world, below `folder`. Safe to ask from several threads."""

    def __init__(self, folder: Path, *, switched_on: Callable[[str, socket.socket], None]) -> None:
        self._folder, self._switched_on = folder, switched_on
        self._regions: dict[str, Network] = {}
        self._hosts: dict[str, Host] = {}
        self._machines: dict[str, Machine] = {}
        self._lock = threading.RLock()
        self._tag = f"srift-world-{os.getpid()}"

    @staticmethod
    def why_not() -> str:
        if os.geteuid() != 0:
            return "hosts of the emulated EC2 need root"
        if "overlay" not in Path("/proc/filesystems").read_text():
            return "the kernel has no overlay file system"
        return "" if local_hosts.detect().kind == "root" else local_hosts.detect().why_not

    def folder(self, instance_id: str) -> Path:
        """What stays of a host when it is gone: its console, and what it shared."""
        return self._folder / instance_id

    def start(self, machine: Machine) -> None:
        """Boot it: user-data runs. Raises ProviderError where the host cannot be made."""
        with self._lock:
            region = self._regions.get(machine.region) or self._open(machine.region)
            folder = self._laid_out(machine)
            plan = HostPlan(
                mark=f"{self._tag}:{machine.instance_id}",
                address=machine.address,
                prefix=16,
                bandwidth_gbps=min(MOST_GBPS, machine.bandwidth_gbps),
                command=(
                    "sh",
                    str(HERE / "boot.sh"),
                    str(folder),
                    _to_be_readable(),
                    *_views(folder),
                ),
                log=folder / "console.txt",
            )
            host = region.start(plan)
            self._hosts[machine.instance_id], self._machines[machine.instance_id] = host, machine
            host.go()

    def listening(self, instance_id: str, address: str, port: int) -> socket.socket:
        return _listening(self._hosts[instance_id].inner_pid, address, port)

    def instance_at(self, region: str, address: str) -> str | None:
        """Which machine has the address; None where none that lives has it."""
        with self._lock:
            found = [
                one
                for one, its in self._machines.items()
                if (its.region, its.address) == (region, address)
            ]
        return found[0] if found else None

    def alive(self) -> list[str]:
        with self._lock:
            return [one for one, host in self._hosts.items() if host.process.poll() is None]

    def known(self) -> list[str]:
        """Hosts that were started and not ended, whether or not they still run."""
        with self._lock:
            return list(self._hosts)

    def end(self, instance_id: str) -> None:
        """Take the host away with all that runs on it. Nothing happens where it is gone."""
        with self._lock:
            host = self._hosts.pop(instance_id, None)
            self._machines.pop(instance_id, None)
            if host is None:
                return
            end([process for pid in host.pids if (process := identify(pid)) is not None])
            _collect(host.process)

    def close(self) -> None:
        for instance_id in self.known():
            self.end(instance_id)
        with self._lock:
            for region in self._regions.values():
                region.close()
            self._regions.clear()

    def _open(self, name: str) -> Network:
        """The region's bridge, with the metadata service's address on it, beyond every
        host's link.
        """
        region = self._regions[name] = Network(_ROOT, {"LANG": "C"})
        region.open(self._folder / f"switch-{name}.txt")
        region.run("ip addr add 169.254.169.254/32 dev br0 && ip route add default dev br0")
        assert region.switch is not None
        self._switched_on(name, _listening(region.switch.pid, "169.254.169.254", 80))
        return region

    def _laid_out(self, machine: Machine) -> Path:
        folder = self.folder(machine.instance_id)
        stand_ins = folder / "shared" / "bin"
        stand_ins.mkdir(parents=True)
        (folder / "private").mkdir()
        shutil.copy(HERE / "shutdown.sh", stand_ins / TOOLS[0])
        (stand_ins / TOOLS[0]).chmod(0o755)
        for other in TOOLS[1:]:
            (stand_ins / other).symlink_to(TOOLS[0])
        (folder / "shared" / "user-data").write_bytes(machine.user_data)
        return folder


def _views(folder: Path) -> Sequence[str]:
    """Folders that get a private view, existing ones; that with the host's own folder last."""
    python = {f"/{Path(path).parts[1]}" for path in _python()} - {"/usr", "/bin", "/lib"}
    wanted = [
        one
        for one in dict.fromkeys((*VIEWS, *sorted(python)))
        if os.path.isdir(one) and one != "/run"
    ]
    return sorted(wanted, key=lambda one: folder.is_relative_to(one))


def _python() -> list[str]:
    return [sys.executable, os.path.realpath(sys.executable), sys.prefix, sys.base_prefix]


def _to_be_readable() -> str:
    above = {parent for path in _python() for parent in (Path(path), *Path(path).parents)}
    return shlex.join(
        sorted(str(one) for one in above if one.is_dir() and one.stat().st_mode & 0o005 != 0o005)
    )


def _collect(process: subprocess.Popen[bytes]) -> None:
    if process.stdin is not None:
        with suppress(BrokenPipeError):
            process.stdin.close()
    process.wait()


def _listening(pid: int, address: str, port: int) -> socket.socket:
    """A socket made in the network namespace of `pid`: it stays there, whichever thread
    serves it.
    """
    made: list[socket.socket | OSError] = []

    def make() -> None:
        try:
            space = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
            try:
                if ctypes.CDLL(None, use_errno=True).setns(space, _CLONE_NEWNET) != 0:
                    raise OSError(ctypes.get_errno(), "setns")
            finally:
                os.close(space)
            listening = socket.socket()
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind((address, port))
            listening.listen(64)
            made.append(listening)
        except OSError as error:
            made.append(error)

    thread = threading.Thread(target=make, name="in a namespace")
    thread.start()
    thread.join()
    if isinstance(made[0], OSError):
        raise made[0]
    return made[0]
