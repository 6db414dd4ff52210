"""What this machine is: a fingerprint by which only measurements of like machines are pooled, and its interfaces."""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import socket
import struct
from pathlib import Path

_SIOCGIFADDR = 0x8915  # linux/sockios.h


def cpu() -> str:
    """The processor's name as the kernel tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.machine()


def fingerprint() -> str:
    """Twelve hex digits of processor, core count and architecture."""
    described = f"{cpu()}|{os.cpu_count()}|{platform.machine()}"
    return hashlib.sha256(described.encode()).hexdigest()[:12]


def interface_of(address: str) -> str:
    """Name of the network interface that carries IPv4 `address`; `lo` where none says so."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(sock.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:
                continue  # an interface without an address
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return "lo"
