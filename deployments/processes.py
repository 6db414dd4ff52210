"""Processes that `make up` starts and ends."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import psutil


class UpError(Exception):
    """The operator can fix it; the message says how."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Child:
    """A process and its log."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    @classmethod
    def start(cls, name: str, line: Sequence[str], *, env: Mapping[str, str], log: Path) -> Self:
        """Start `line`. It ends with this script, and does not get the terminal's Ctrl-C."""
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as out:
            process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "TERM", *line],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
                umask=0o077,  # databases and logs are the operator's alone
            )
        return cls(name=name, process=process, log=log)

    def check(self) -> None:
        """Raises UpError with the end of the log if the process has ended."""
        if self.process.poll() is not None:
            tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-15:])
            raise UpError(f"{self.name} ended; the end of {self.log}:\n{tail}")

    def end(self, *, grace_s: float) -> int:
        """Terminate the process and its flow runs; return how many had to be killed.

        A worker waits for its runs, which have process groups of their own.
        """
        try:
            first = psutil.Process(self.process.pid)
            family = [first, *first.children(recursive=True)]
        except psutil.NoSuchProcess:
            return 0
        for one in family:
            with suppress(psutil.NoSuchProcess):
                if one == first or "prefect." in " ".join(one.cmdline()):
                    one.terminate()
        _, left = psutil.wait_procs(family, timeout=grace_s)
        for one in left:
            with suppress(psutil.NoSuchProcess):
                one.kill()
        psutil.wait_procs(left, timeout=5.0)
        self.process.wait()
        return sum(one != first for one in left)
