"""Describe this machine: CPU, cores, GPUs, network interface and fingerprint.

The fingerprint identifies the kind of hardware. Srift combines only measurements with the same
fingerprint.
"""

import fcntl
import hashlib
import os
import platform
import re
import socket
import struct
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_SIOCGIFADDR = 0x8915  # linux/sockios.h
_CPUS = Path("/sys/devices/system/cpu")


def cpu() -> str:
    """Return the CPU's model name, or its architecture if the kernel reports no model name."""
    found = re.search(r"^model name\s*:\s*(.*\S)", Path("/proc/cpuinfo").read_text(), re.M)
    return found[1] if found else platform.machine()


def cores() -> int:
    """Return the number of physical cores that this process may use."""
    threads = os.sched_getaffinity(0)
    siblings = [_CPUS / f"cpu{thread}" / "topology" / "thread_siblings_list" for thread in threads]
    try:
        return len({file.read_text() for file in siblings})
    except OSError:  # the kernel hides the topology
        return len(threads)


def gpus() -> list[str]:
    """Return the model name of each NVIDIA GPU, as the driver reports it."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return []
    files = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
    return [
        model for file in files for model in re.findall(r"^Model:\s*(.*\S)", file.read_text(), re.M)
    ]


def fingerprint() -> str:
    """Return twelve hex digits that identify CPU model, core count, architecture and GPUs."""
    described = "|".join([cpu(), str(os.cpu_count()), platform.machine(), *gpus()])
    return hashlib.sha256(described.encode()).hexdigest()[:12]


def torch_version() -> str:
    """Return the version of the installed torch without importing it; "" if there is none."""
    try:
        return version("torch")
    except PackageNotFoundError:
        return ""


def interface_of(address: str) -> str:
    """Return the name of the network interface with this IPv4 address; "lo" if there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(
                    sock.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode())
                )
            except OSError:
                continue  # an interface without an address
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return "lo"
