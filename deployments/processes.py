"""Watch and end the child processes of `make up`."""

import subprocess
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

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

    def check(self) -> None:
        """Raise UpError with the end of the log if the process has ended."""
        if self.process.poll() is not None:
            tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-15:])
            raise UpError(f"{self.name} ended. The last lines of {self.log} are:\n{tail}")

    def end(self) -> int:
        """Terminate the process and its flow runs, and kill what remains after GRACE_S seconds.

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
