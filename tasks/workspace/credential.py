"""The credential of a home, `srift:PASSWORD`: who knows it may command the servers that `make up` starts there.

Kept in the file `credential` in SRIFT_HOME, which only its owner can read; made once, of 256 random bits.
"""

from __future__ import annotations

import base64
import fcntl
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

FILE = "credential"
_ADDRESS = "prefect-address"
USER = "srift"
_FORM = re.compile(rf"{USER}:[A-Za-z0-9_-]{{40,}}")


def make_credential(home: Path, say: Callable[[str], None]) -> str:
    """The credential of `home`, made if there is none. One that others may know is replaced, and `say` reports it.

    Of two processes that make it at once, both return the same. Raises OSError where the file cannot be written.
    """
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = home / FILE
    if fault := _fault(path):
        path.unlink()
        say(
            f"{path} {fault}: a new credential replaces it; programs and pages that use the old one are refused"
        )
    if not path.exists():
        draft = home / f".{FILE}-{secrets.token_hex(8)}"
        try:
            with os.fdopen(
                os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w"
            ) as file:
                file.write(new_credential() + "\n")
                file.flush()
                os.fsync(file.fileno())
            os.link(draft, path)
        except FileExistsError:
            pass  # another process was first
        finally:
            draft.unlink(missing_ok=True)
    return path.read_text().strip()


def read_credential(home: Path) -> str | None:
    """The credential of `home`; None where no server was ever started. Raises OSError where it cannot be read."""
    try:
        return (home / FILE).read_text(errors="replace").strip()
    except FileNotFoundError:
        return None


@contextmanager
def serving(home: Path, address: str) -> Iterator[None]:
    """While it lasts, Prefect's server at `address` (host:port) is known as that of `home`.

    The kernel drops the lock when this process dies: whoever listens there later is shown no credential.
    """
    with os.fdopen(os.open(home / _ADDRESS, os.O_CREAT | os.O_RDWR, 0o600), "r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.truncate()
        file.write(address + "\n")
        file.flush()
        yield


def served_at(home: Path) -> str | None:
    """The address (host:port) of Prefect's server of `home`; None where none is up."""
    try:
        with (home / _ADDRESS).open(errors="replace") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return file.read().strip()
            return None
    except OSError:
        return None


def new_credential() -> str:
    """A random one, kept nowhere."""
    return f"{USER}:{secrets.token_urlsafe(32)}"


def authorization(credential: str) -> str:
    """The value of the header Authorization that carries it."""
    return f"Basic {base64.b64encode(credential.encode()).decode()}"


def _fault(path: Path) -> str:
    """Why the file is no secret of its owner's; empty where it is one, or is not there."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return ""
    if not stat.S_ISREG(found.st_mode):
        return "is not a plain file"
    if found.st_uid != os.geteuid():
        return "belongs to another user"
    if found.st_mode & 0o077:
        return f"could be read or written by other users (mode {stat.S_IMODE(found.st_mode):o})"
    return (
        "" if _FORM.fullmatch(path.read_text(errors="replace").strip()) else "holds no credential"
    )
