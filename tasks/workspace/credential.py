"""Create and read the credential of the servers that `make up` starts.

The file SRIFT_HOME/credential has the text `srift:PASSWORD`.
"""

import os
import secrets
import stat
from pathlib import Path

FILE = "credential"
USER = "srift"


def make_credential(home: Path) -> str:
    """Return the text `srift:PASSWORD` from the credential file in `home`.

    Creates the file if it is missing. Replaces it, with a new password, if other users could read
    it.
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
    """Return True if `path` is a regular credential file that only this user can access."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return False
    closed = found.st_uid == os.geteuid() and not found.st_mode & 0o077
    return stat.S_ISREG(found.st_mode) and closed and path.read_bytes().startswith(b"srift:")
