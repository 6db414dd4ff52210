"""Describe this machine: cores, network interface and fingerprint.

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
from contextlib import suppress
from pathlib import Path

_SIOCGIFADDR = 0x8915  # linux/sockios.h
_CPUS = Path("/sys/devices/system/cpu")


def cores() -> int:
    """Return the number of physical cores that this process may use."""
    threads = os.sched_getaffinity(0)
    siblings = [_CPUS / f"cpu{thread}" / "topology" / "thread_siblings_list" for thread in threads]
    try:
        return len({file.read_text() for file in siblings})
    except OSError:  # the kernel hides the topology
        return len(threads)


def fingerprint() -> str:
    """Return twelve hex digits that identify CPU model, core count and architecture."""
    kind = platform.machine()
    names = re.findall(r"^model name\s*:\s*(.*\S)", Path("/proc/cpuinfo").read_text(), re.M)
    described = f"{names[0] if names else kind}|{os.cpu_count()}|{kind}"
    return hashlib.sha256(described.encode()).hexdigest()[:12]


def interface_of(address: str) -> str:
    """Return the name of the network interface with this IPv4 address; "lo" if there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without an address
                answer = fcntl.ioctl(
                    sock.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode())
                )
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return "lo"
