"""Whether a machine has the devices that it was bought for. Standard library.

Drivers may need a while after boot: p4d and p5 have none before NVIDIA's fabric manager runs
(CUDA's error 802). A process whose CUDA failed once never tries again [torch], so each look is a
process of its own.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

from .record import ANY, Devices

DEVICES_WITHIN_S = 60.0  # after the first look: what a driver may need after boot
_PAUSE_S = 2.0
_LOOK_S = 30.0  # most of a look after the first: 8 GPUs are opened one after the other
_LOG_TAIL = 300  # characters of torch's words
# a device that torch names and has no code for is none: an addition shows it
_LOOK = """
import json, torch
found = []
for device in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
    (torch.zeros(1, device=f"cuda:{device}") + 1).item()
    found.append(torch.cuda.get_device_name(device))
print(json.dumps(found))
"""
_PART = re.compile(r" 1/\d+$")  # of a provider's name: a part of a device, as "L4 1/8"
_PROFILE = re.compile(r"\d+[abcq]$|mig$")  # of torch's: a virtual device, as "NVIDIA L4-3Q"


def is_named(expected: str, name: str) -> bool:
    """True if `name`, torch's name of a device, is of the kind that a provider calls `expected`.

    Torch adds maker, memory and form ("NVIDIA A100-SXM4-40GB" is an A100), and may change the order
    of the words: all words of `expected` must be there, whole (an A10 is no A10G, an L40S no L4). A
    part of a device ("L4 1/8") may be named by its virtual profile or by the whole device's name; a
    whole one is never a virtual part.
    """
    if expected == ANY or name == expected:
        return True
    wanted, words = _words(_PART.sub("", expected)), _words(name)
    is_part = _PART.search(expected) is not None
    return wanted <= words and (is_part or not any(map(_PROFILE.match, words)))


def missing_devices(expected: Devices, names: Sequence[str]) -> str:
    """Return why `names`, the devices that torch can use, are not as expected; empty if
    they are.
    """
    if sum(is_named(expected.name, name) for name in names) >= expected.count:
        return ""
    counted = ", ".join(f"{list(names).count(name)} x {name}" for name in dict.fromkeys(names))
    return (
        f"this machine was bought for {expected.count} x {expected.name}, and torch can use"
        f" {counted or 'no GPU'}"
    )


def wrong_device(expected: Sequence[Devices], used: Sequence[Devices]) -> str:
    """Return why a run was not on the expected devices; empty if it was, or if they are unknown."""
    for wanted, got in zip(expected, used, strict=False):
        if not all(is_named(wanted.name, name) for name in got.name.split("+")):
            return f"it ran on {got.name} where {wanted.name} was expected"
    return ""


def wait_for_devices(
    expected: Devices,
    look: Callable[[float], tuple[list[str], str]],
    *,
    wait_s: float,
    most_s: float,
) -> str:
    """Look until the devices are there; return why they are not.

    The first look reads torch from a slow disk, for minutes on a new machine. So `wait_s` count
    from its end, and `most_s` limit everything. `look` gets the seconds that it may take.
    """
    ends = time.monotonic() + most_s
    until = None
    while True:
        names, output = look(ends - time.monotonic())
        problem = missing_devices(expected, names)
        if not problem:
            return ""
        now = time.monotonic()
        until = min(now + wait_s, ends - _LOOK_S) if until is None else until
        if now >= until:
            return f"{problem} ({output})" if output else problem
        time.sleep(_PAUSE_S)


def torch_sees(within_s: float) -> tuple[list[str], str]:
    """Return the devices that torch can use in another process, and its warnings or error."""
    command = (sys.executable, "-c", _LOOK)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=within_s)
    except subprocess.TimeoutExpired:
        return [], f"torch did not answer within {within_s:.0f} s"
    output = " ".join(done.stderr.split())[-_LOG_TAIL:]
    if done.returncode:
        return [], output or f"exit status {done.returncode}"
    return json.loads(done.stdout.splitlines()[-1]), output


def _words(name: str) -> set[str]:
    return set(re.findall(r"[a-z0-9]+", name.lower()))
