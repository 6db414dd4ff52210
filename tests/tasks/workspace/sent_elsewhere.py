"""Functions that other processes import."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from models.domain.numeric import FloatArray


def whose(_: object, seconds: float = 0.0) -> int:
    time.sleep(seconds)
    return os.getpid()


def killed_elsewhere(number: int, here: int) -> int:
    if number == 3 and os.getpid() != here:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def killed_once(number: int, mark: Path, here: int) -> int:
    if number == 3 and os.getpid() != here and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def hangs_elsewhere(number: int, here: int) -> int:
    if number == 3 and os.getpid() != here:
        time.sleep(30)
    return number


def cleared(array: FloatArray) -> float:
    array[:] = 0
    return float(array.sum())


def fails_at(number: int, at: int) -> int:
    if number == at:
        raise ValueError(f"{number} is not wanted")
    return number


def fails_elsewhere(number: int, here: int) -> int:
    if number == 3 and os.getpid() != here:
        raise MemoryError("none is left")
    return number
