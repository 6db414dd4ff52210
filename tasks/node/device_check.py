"""Check that a machine has the devices that were paid for.

GPUs may be unusable for some time after boot, for example on p4d and p5 until NVIDIA's fabric
manager runs (CUDA error 802). Each check runs in a new process, because torch does not initialise
CUDA again in a process where CUDA has failed. This module imports only the standard library.
"""

import json
import re
import subprocess
import sys
import time
from collections.abc import Sequence

from .record import ANY, Devices

_WITHIN_S = 60.0  # maximum seconds that a driver needs after the first check
_PAUSE_S = 2.0
_LOOK_S = 30.0  # maximum seconds of a later check, which opens up to 8 GPUs one after another
_LOG_TAIL = 300  # characters of torch's output
# The addition fails if torch lists the device, but has no kernels for the device.
_LOOK = """
import json, torch
found = []
for device in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
    (torch.zeros(1, device=f"cuda:{device}") + 1).item()
    found.append(torch.cuda.get_device_name(device))
print(json.dumps(found))
"""
_FRACTION = re.compile(r" 1/\d+$")  # a fraction of a device in a provider's name, such as "L4 1/8"
_PROFILE = re.compile(r"\d+[abcq]$|mig$")  # a virtual device in torch's name ("NVIDIA L4-3Q")


def is_named(expected: str, name: str) -> bool:
    """Return True if `name`, torch's name of a device, matches `expected`, the provider's name.

    Every word of `expected` must be a word of `name`. For example, "NVIDIA A100-SXM4-40GB" matches
    "A100", but not "A10". A virtual GPU matches only if `expected` ends with a fraction. For
    example, "NVIDIA L4-3Q" matches "L4 1/8", but not "L4". The fraction itself need not be in
    `name`. Every name matches ANY.
    """
    if expected == ANY:
        return True
    whole, parts = _FRACTION.subn("", expected)
    words = _words(name)
    return _words(whole) <= words and (parts > 0 or not any(map(_PROFILE.match, words)))


def wrong_device(expected: Sequence[str], used: Sequence[str]) -> str:
    """Return an error message if a run used a device that is not the expected device, else "".

    Both arguments have one device name per machine. Machines without an entry in `expected` are not
    checked.
    """
    for wanted, got in zip(expected, used, strict=False):
        if not is_named(wanted, got):
            return f"the run used {got}, but {wanted} was expected"
    return ""


def wait_for_devices(expected: Devices, most_s: float) -> str:
    """Wait until torch can use the expected devices. Return "", or an error message.

    The first check may take minutes on a new machine. If it fails, the check is repeated for up to
    _WITHIN_S more seconds. All checks together take at most `most_s` seconds.
    """
    ends = time.monotonic() + most_s
    until = None
    while True:
        names, output = torch_sees(ends - time.monotonic())
        if sum(is_named(expected.name, name) for name in names) >= expected.count:
            return ""
        until = until or min(time.monotonic() + _WITHIN_S, ends - _LOOK_S)
        if time.monotonic() >= until:
            return (
                f"this machine should have {expected.count} x {expected.name}, but torch can use"
                f" {', '.join(names) or 'no GPU'} ({output})"
            )
        time.sleep(_PAUSE_S)


def torch_sees(within_s: float) -> tuple[list[str], str]:
    """Return torch's names of the usable devices, and torch's warnings or error output.

    A new process lists the devices. The list is empty if the new process fails or takes more than
    `within_s` seconds.
    """
    command = (sys.executable, "-c", _LOOK)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=within_s)
    except subprocess.TimeoutExpired:
        return [], f"torch did not respond within {within_s:.0f} s"
    output = " ".join(done.stderr.split())[-_LOG_TAIL:]
    if done.returncode:
        return [], output or f"exit status {done.returncode}"
    return json.loads(done.stdout.splitlines()[-1]), output


def _words(name: str) -> set[str]:
    return set(re.findall(r"[a-z0-9]+", name.lower()))
