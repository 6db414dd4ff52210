"""Run a local host for each running instance of moto, in namespaces and with a shaped link.

A host executes the user-data of its instance. A region is a bridge in a network namespace, which
also has the region's metadata service. One thread starts and ends hosts when moto's instances start
and end.
"""

import base64
import ctypes
import os
import shlex
import shutil
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moto.ec2.models.instance_types import INSTANCE_TYPES

from tasks.providers.ec2.catalogue import baseline_gbps
from tasks.providers.local.network import Host, HostNetwork, Isolation, detect

HERE = Path(__file__).parent
METADATA = "169.254.169.254"
_VIEWS = ("/etc", "/opt", "/var", "/home", "/root", "/srv", "/tmp")  # boot.sh adds /run
_TOOLS = ("shutdown", "poweroff", "halt", "systemctl")
_MOST_GBPS = 20.0  # about what a link of this kernel carries at all
_UNKNOWN_GBPS = 1.0
_LOOK_S = 0.05
_CLONE_NEWNET = 0x40000000


@dataclass
class Machine:
    """The host of an instance.

    `server` is the AWS API on the host's loopback. `off_at` is the Unix time at which the host
    shuts down; it is infinite if no shutdown is planned.
    """

    host: Host
    region: str
    address: str
    server: Any = None
    off_at: float = float("inf")


class Machines:
    """The hosts of the running instances of `account`, with their files below `folder`.

    `serve(service, name, socket)` starts a server on a listening socket: the AWS API ("api") for an
    instance, or the metadata service ("metadata") for a region. `faults` lists the errors of the
    emulation itself.
    """

    def __init__(self, account, folder, port, serve):
        self._account, self._folder, self._port, self._serve = account, folder, port, serve
        self._regions = {}
        self._machines = {}
        self._hostless = set()  # a host that cannot be started is not tried again
        self._lock = threading.RLock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="emulated machines", daemon=True)
        self.faults = []

    def open(self):
        self._thread.start()

    def close(self):
        self._closed.set()
        self._thread.join()
        for instance_id in self.known():
            self._end(instance_id)
        for region in self._regions.values():
            region.close()

    def folder(self, instance_id):
        """Return the folder with a machine's console output and shared files, which outlive it."""
        return self._folder / instance_id

    def known(self):
        """Return the ids of the instances whose hosts were started and not yet ended."""
        with self._lock:
            return list(self._machines)

    def instance_at(self, region, address):
        with self._lock:
            for instance_id, machine in self._machines.items():
                if (machine.region, machine.address) == (region, address):
                    return instance_id
        return None

    def end_terminated(self):
        """End the hosts of all instances that no longer run, and return when they have ended."""
        known = set(self.known())  # first: a host that comes meanwhile is not over
        for instance_id in known - {machine.id for machine in self._account.instances("running")}:
            self._end(instance_id)

    def _run(self):
        while not self._closed.wait(_LOOK_S):
            try:
                self._shut_down()
                self.end_terminated()
                for instance in self._account.instances("running"):
                    if not self._closed.is_set():
                        self._boot(instance)
            except Exception as error:  # the world goes on; tests read `faults`
                self.faults.append(repr(error))

    def _boot(self, instance):
        """Start the host of an instance, unless the instance has a host or failed to start one."""
        if instance.id in self._machines or instance.id in self._hostless:
            return
        self._hostless.add(instance.id)
        try:
            with self._lock:
                self._start(instance)
        except (OSError, KeyError):
            if instance.id in {machine.id for machine in self._account.instances("running")}:
                raise
            self._end(instance.id)  # it was terminated while it was being started
        self._hostless.discard(instance.id)

    def _start(self, instance):
        name = instance.region_name
        region = self._regions.get(name) or self._open_region(name)
        folder = self.folder(instance.id)
        tools = folder / "shared/bin"
        tools.mkdir(parents=True)
        (folder / "private").mkdir()
        shutil.copy(HERE / "shutdown.sh", tools / _TOOLS[0])
        (tools / _TOOLS[0]).chmod(0o755)
        for other in _TOOLS[1:]:
            (tools / other).symlink_to(_TOOLS[0])
        user_data = base64.b64decode(str(instance.user_data or "")) or b"#!/bin/sh\n"
        (folder / "shared/user-data").write_bytes(user_data)
        try:
            gbps = baseline_gbps(INSTANCE_TYPES[instance.instance_type])
        except ValueError:
            gbps = _UNKNOWN_GBPS
        python = [sys.executable, os.path.realpath(sys.executable), sys.prefix, sys.base_prefix]
        command = ["sh", f"{HERE}/boot.sh", str(folder), _closed_above(python)]
        address = str(instance.private_ip)
        host = region.start(
            f"srift-world-{os.getpid()}:{instance.id}",
            [*command, *_views(folder, python)],
            folder / "console.txt",
            address=address,
            bandwidth_gbps=min(_MOST_GBPS, gbps),
        )
        machine = Machine(host, name, address)
        self._machines[instance.id] = machine
        machine.host.go()
        listening = _listening(machine.host.inner.pid, "127.0.0.1", self._port)
        machine.server = self._serve("api", instance.id, listening)

    def _open_region(self, name):
        """Create the bridge of a region, and start the region's metadata service on it."""
        region = self._regions[name] = HostNetwork(Isolation(kind="root"), {"LANG": "C"})
        region.open(self._folder / f"switch-{name}.txt")
        region.run(f"ip addr add {METADATA}/32 dev br0 && ip route add default dev br0")
        self._serve("metadata", name, _listening(region.switch.pid, METADATA, 80))
        return region

    def _shut_down(self):
        """Power off the machines whose shutdown is due. shutdown.sh requests it from inside."""
        for instance_id, machine in list(self._machines.items()):
            request = self.folder(instance_id) / "shared/shutdown"
            with suppress(FileNotFoundError):
                minutes = request.read_text().strip()
                request.unlink()
                wait_s = float("inf") if minutes == "never" else int(minutes) * 60.0
                machine.off_at = time.time() + wait_s
            if time.time() >= machine.off_at:
                self._account.power_off(instance_id)

    def _end(self, instance_id):
        """End a host and all its processes, if the host exists."""
        with self._lock:
            machine = self._machines.pop(instance_id, None)
        if machine is not None:
            if machine.server is not None:  # its socket would keep the link alive
                machine.server.shutdown()
                machine.server.server_close()
            machine.host.end()
            machine.host.process.wait()


def why_not():
    """Return why this computer cannot emulate machines, or "" if it can."""
    if os.geteuid() != 0:
        return "hosts of the emulated EC2 need root"
    if "overlay" not in Path("/proc/filesystems").read_text():
        return "the kernel has no overlay file system"
    isolation = detect()
    return "" if isolation.kind == "root" else isolation.why_not


def _views(folder, python):
    """Return the existing folders that each host sees as a private, writable copy.

    The folder that contains `folder`, the host's files, comes last.
    """
    of_python = {f"/{Path(path).parts[1]}" for path in python} - {"/usr", "/bin", "/lib", "/run"}
    views = filter(os.path.isdir, {*_VIEWS, *of_python})
    return sorted(views, key=lambda view: (folder.is_relative_to(view), view))


def _closed_above(python):
    """Return the folders above Python that other users cannot read, quoted for a shell."""
    above = {parent for path in python for parent in (Path(path), *Path(path).parents)}
    closed = (path for path in above if path.is_dir() and path.stat().st_mode & 0o005 != 0o005)
    return shlex.join(sorted(map(str, closed)))


def _listening(pid, address, port):
    """Return a socket that listens in the network namespace of the process `pid`."""

    def make():
        with open(f"/proc/{pid}/ns/net") as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), "setns")
        return socket.create_server((address, port), backlog=64)

    with ThreadPoolExecutor(1) as thread:  # a thread enters the namespace and ends there
        return thread.submit(make).result()
