"""Create the password for the servers of `make up`, in SRIFT_HOME, as the text `srift:PASSWORD`."""

import os
import secrets
import stat
from pathlib import Path

FILE = "credential"
USER = "srift"


def make_credential(home: Path) -> str:
    """Return the text `srift:PASSWORD` that is stored in `home`.

    Creates it if it is missing. Creates a new password if other users could read the file.
    """
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = home / FILE
    if not _is_private(path):
        path.unlink(missing_ok=True)
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(f"{USER}:{secrets.token_urlsafe(32)}\n")
    return path.read_text().strip()


def _is_private(path: Path) -> bool:
    """Return True if `path` is a plain file with a credential that only this user can read."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return False
    closed = found.st_uid == os.geteuid() and not found.st_mode & 0o077
    return stat.S_ISREG(found.st_mode) and closed and path.read_bytes().startswith(b"srift:")
