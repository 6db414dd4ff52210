"""Create and store the user name and password for Srift's Prefect and MLflow servers.

The file SRIFT_HOME/credential has the text `srift:PASSWORD`.
"""

import secrets
from pathlib import Path

FILE = "credential"
USER = "srift"


def new_credential() -> str:
    """Return the text `srift:PASSWORD` with a new password.

    A server must not reuse a password after a restart. While the server was stopped, a browser may
    have sent the password to another user's server on the same port.
    """
    return f"{USER}:{secrets.token_urlsafe(32)}"


def store_credential(home: Path, credential: str) -> None:
    """Write `credential` to a file in `home` that only this user can read."""
    path = home / FILE
    path.unlink(missing_ok=True)
    path.touch(0o600, exist_ok=False)
    path.write_text(f"{credential}\n")
