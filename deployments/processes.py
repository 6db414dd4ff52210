"""Processes that `make up` starts and ends, and what may be asked of a port on loopback."""

from __future__ import annotations

import socket
import subprocess
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import psutil

HOST = "127.0.0.1"


class UpError(Exception):
    """Something that the operator can put right. The message says what and how."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Child:
    """One process started here, with the log it writes to."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    @classmethod
    def start(
        cls,
        name: str,
        line: Sequence[str],
        *,
        cwd: Path,
        env: Mapping[str, str],
        log: Path,
        inherits: Sequence[int] = (),
    ) -> Self:
        """Start `line` with its output in `log` and the open files `inherits`, to end when this script is killed.

        In a session of its own: a Ctrl-C reaches this script alone, so that the order of ending is ours.
        """
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as out:
            process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "TERM", *line],
                cwd=cwd,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
                pass_fds=inherits,
                umask=0o077,  # databases of runs and models, and logs, are nobody else's
            )
        return cls(name=name, process=process, log=log)

    def check(self) -> None:
        """Raise UpError with the end of the log if the process has ended."""
        if self.process.poll() is not None:
            tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-15:])
            raise UpError(
                f"{self.name} ended with {self.process.returncode}; the end of {self.log}:\n{tail}"
            )

    def end(self, *, grace_s: float) -> list[int]:
        """SIGTERM to the process and to the flow runs it supervises, then SIGKILL to whatever is left after `grace_s`.

        A worker alone would wait for its runs to finish, and they have process groups of their own. Returns the ids of
        processes that had to be killed, the first one left out: a worker often survives its SIGTERM.
        """
        try:
            first = psutil.Process(self.process.pid)
            family = [first, *first.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []
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
        return [one.pid for one in left if one != first]


def listen(port: int) -> socket.socket | None:
    """A socket that listens on the loopback port, None where that is taken.

    Handed to the server that is to serve it: no other user's program can be there first and be shown the credential.
    """
    listening = socket.socket()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((HOST, port))
        listening.listen(128)
    except OSError:
        listening.close()
        return None
    return listening


def answers(url: str, headers: Mapping[str, str]) -> bool:
    """Whether `url` answers 200 now."""
    try:
        with urllib.request.urlopen(
            urllib.request.Request(url, headers=dict(headers)), timeout=5
        ) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
