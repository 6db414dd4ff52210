"""Start and end the child processes of `make up`."""

import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import psutil

GRACE_S = 30.0  # seconds in which a run can release its machines and load its records


class UpError(Exception):
    """`make up` cannot start or continue. The message names the fix or shows the end of a log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Child:
    """A child process and its log file."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    @classmethod
    def start(cls, name: str, line: Sequence[str], *, env: Mapping[str, str], log: Path) -> Self:
        """Start the command `line`, and write its output to a new file at `log`.

        The process ends when this script ends. Ctrl-C in the terminal does not reach the process.
        """
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as out:
            process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "TERM", *line],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
                umask=0o077,  # other users must not read databases and logs
            )
        return cls(name=name, process=process, log=log)

    def check(self) -> None:
        """Raise UpError with the end of the log if the process has ended."""
        if self.process.poll() is not None:
            tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-15:])
            raise UpError(f"{self.name} ended. The last lines of {self.log} are:\n{tail}")

    def end(self) -> int:
        """Terminate the process and its flow runs, and kill what remains after 30 seconds.

        Flow runs are child processes in separate process groups. They are terminated too, because a
        worker waits for its flow runs before it ends. Returns the number of descendant processes
        that had to be killed.
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
        _, left = psutil.wait_procs(family, timeout=GRACE_S)
        for one in left:
            with suppress(psutil.NoSuchProcess):
                one.kill()
        psutil.wait_procs(left, timeout=5.0)
        self.process.wait()
        return sum(one != first for one in left)
