"""Whether a machine has the devices that it was bought for: waits for them, else fails its runs.
Standard library.

`python -m node.device_check --mailbox DIR --plan FILE --node I --wait-s S -- COMMAND` becomes
COMMAND as soon as torch can use the devices that the plan expects of node I. Drivers may need a
while after boot: p4d and p5 have none before NVIDIA's fabric manager runs (CUDA's error 802). A
process whose CUDA failed once never tries again [torch], so each look is a process of its own. The
first one reads torch from a new machine's slow disk, for minutes where it must be: S seconds count
from its end, and everything takes at most the plan's join_s.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from .processes import EXIT_MAILBOX, EXIT_NO_DEVICE, exit_line
from .record import ANY, Devices, Plan, plan_from_json, write_failed_records

_PAUSE_S = 2.0
_LOOK_S = 30.0  # what a look after the first may take: 8 GPUs are opened one after the other
_LOG_TAIL = 300  # characters of what torch said
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
_PROFILE = re.compile(
    r"\d+[abcq]$|mig$"
)  # of torch's: the part that a virtual device is, as "NVIDIA L4-3Q"


def is_named(expected: str, name: str) -> bool:
    """Whether `name`, torch's name of a device, is of the kind that a provider calls `expected`.

    Torch adds maker, memory and form ("NVIDIA A100-SXM4-40GB" is an A100), and may change the order
    of the words: all words of `expected` must be there, whole (an A10 is no A10G, an L40S no L4). A
    part of a device ("L4 1/8") may be named by its virtual profile or by the whole device's name; a
    whole one is never a virtual part.
    """
    if expected == ANY or name == expected:
        return True
    part = _PART.search(expected)
    wanted = _words(expected[: part.start()] if part else expected)
    words = _words(name)
    if part is None and any(_PROFILE.match(word) for word in words):
        return False
    return wanted <= words


def missing_devices(expected: Devices, names: Sequence[str]) -> str:
    """Return why `names`, the devices that torch can use, are not as expected; empty if
    they are.
    """
    right = sum(is_named(expected.name, name) for name in names)
    if right >= expected.count:
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
    """Look until the devices are there, for `wait_s` after the first look; return why they are not.

    Looks at least once, and for `most_s` at most: `look` gets the seconds that it may take.
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


def torch_sees(within_s: float, python: str = sys.executable) -> tuple[list[str], str]:
    """Return the devices that torch can use in another process, and its warnings or error."""
    try:
        done = subprocess.run(
            (python, "-c", _LOOK), capture_output=True, text=True, timeout=within_s
        )
    except subprocess.TimeoutExpired:
        return [], f"torch did not answer within {within_s:.0f} s"
    except (OSError, subprocess.SubprocessError) as error:
        return [], str(error)[-_LOG_TAIL:]
    output = " ".join(done.stderr.split())[-_LOG_TAIL:]
    try:
        found = json.loads(done.stdout.strip().splitlines()[-1])
    except (ValueError, IndexError):
        return [], output or f"exit status {done.returncode}"
    return [str(name) for name in found], output


def give_up(mailbox: Path, plan: Plan, node: int, reason: str) -> tuple[int, str]:
    """Fail the runs that need `node`, which lacks its devices; return the exit status and the last
    line.
    """
    try:
        write_failed_records(mailbox, plan, node, f"node {node}: {reason}")
    except OSError as error:
        return EXIT_MAILBOX, f"node {node} could not write its records: {error.strerror}; {reason}"
    return EXIT_NO_DEVICE, reason


def arguments(program: str) -> argparse.Namespace:
    """Parse `--mailbox DIR --plan FILE --node I [--wait-s S] -- COMMAND`."""
    parser = argparse.ArgumentParser(prog=program)
    parser.add_argument("--mailbox", type=Path, required=True)
    parser.add_argument("--plan", type=Path, required=True)
    parser.add_argument("--node", type=int, required=True)
    parser.add_argument("--wait-s", type=float, default=0.0)
    split = sys.argv.index("--")
    given = parser.parse_args(sys.argv[1:split])
    given.command = sys.argv[split + 1 :]
    return given


def leave_with(code: int, reason: str) -> NoReturn:
    """Exit with the reason as the last line."""
    print(exit_line(code, reason), file=sys.stderr, flush=True)
    sys.exit(code)


def main() -> NoReturn:
    """Become the command, or leave with the reason as the last line."""
    given = arguments("node.device_check")
    plan = plan_from_json(given.plan.read_text())
    expected = plan.expected[given.node]
    reason = wait_for_devices(expected, torch_sees, wait_s=given.wait_s, most_s=plan.join_s)
    if reason:
        leave_with(*give_up(given.mailbox, plan, given.node, reason))
    os.execv(given.command[0], given.command)


def _words(name: str) -> set[str]:
    return set(re.findall(r"[a-z0-9]+", name.lower()))


if __name__ == "__main__":
    main()
