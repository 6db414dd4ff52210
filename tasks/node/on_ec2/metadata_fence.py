"""Keeps one user of this machine away from the metadata service, and proves it, before any of that
user's code runs.

The service gives the machine's credentials to whoever asks. A routing rule by user id and a packet
filter are put in force, whatever the kernel and its tools have of the two; what counts is that a
process of that user cannot connect.
"""

from __future__ import annotations

import os
import pwd
import socket
import subprocess
import urllib.parse
from collections.abc import Sequence

from ..processes import die_with_parent, gain_nothing

_RULES = (
    "ip rule add pref 10 to {host}/32 uidrange {uid}-{uid} prohibit",
    "iptables -w -I OUTPUT -d {host} -m owner --uid-owner {uid} -j REJECT",
)
# where the service also answers over IPv6, which our launches leave off
_ALSO = "ip -6 rule add pref 10 to fd00:ec2::254/128 uidrange {uid}-{uid} prohibit"
_CONNECTED, _REFUSED = 40, 41
_TIMEOUT_S = 2.0
_TRY = f"""
import socket, sys
try:
    socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout={_TIMEOUT_S}).close()
except OSError:
    sys.exit({_REFUSED})
sys.exit({_CONNECTED})
"""
_PATIENCE_S = 60.0  # of a machine that has just come up


def account(name: str) -> pwd.struct_passwd:
    """Return the user called `name`. Raises OSError if there is none or it is root."""
    try:
        found = pwd.getpwnam(name)
    except KeyError:
        raise OSError(f"there is no user {name} on this machine") from None
    if found.pw_uid == 0:
        raise OSError(f"{name} is root, which no rule can keep from the metadata service")
    return found


def start_as(
    user: pwd.struct_passwd, command: Sequence[str], **options: object
) -> subprocess.Popen[bytes]:
    """Start a process of `user` that ends with this one, without our groups or set-uid rights."""
    return subprocess.Popen(  # type: ignore[call-overload, no-any-return]
        command,
        user=user.pw_uid,
        group=user.pw_gid,
        extra_groups=[],
        preexec_fn=_confine,
        **options,
    )


def fence(user: pwd.struct_passwd, base: str, python: str) -> str:
    """Fence `user` from the service at `base`; return why not, in which case none of their code may
    run.

    Both rules are put in force, since one may go: systemd-networkd drops foreign routing rules when
    it restarts.
    """
    parts = urllib.parse.urlsplit(base)
    host, port = str(parts.hostname), parts.port or (443 if parts.scheme == "https" else 80)
    outcomes, in_force = [], False
    for rule in (_ALSO, *_RULES):
        problem = _apply(rule.format(host=host, uid=user.pw_uid).split())
        if rule != _ALSO:
            in_force |= not problem
            outcomes.append(f"{rule.split()[0]}: {problem or 'in force'}")
    problem = _prove(user, python, host, port) if in_force else "none could be put in force"
    if not problem:
        return ""
    outcomes.append(problem)
    return f"user code could reach the metadata service, so none was run ({'; '.join(outcomes)})"


def _prove(user: pwd.struct_passwd, python: str, host: str, port: int) -> str:
    """Connect as `user`. Only a refusal counts, and only if root can connect."""
    command = (python, "-I", "-c", _TRY, host, str(port))
    try:
        started = start_as(user, command, env={"PATH": os.defpath}, cwd="/", stderr=subprocess.PIPE)
        _, outcomes = started.communicate(timeout=_PATIENCE_S)
    except (OSError, subprocess.SubprocessError) as error:
        return f"{python} could not be started as user {user.pw_name}: {error}"
    if started.returncode == _CONNECTED:
        return "it is in force and does not hold"
    if started.returncode != _REFUSED:
        last = outcomes.decode(errors="replace").strip()[-300:]
        return f"{python} failed as user {user.pw_name}: {last}"
    try:
        socket.create_connection((host, port), timeout=_TIMEOUT_S).close()
    except OSError as error:
        return f"root cannot reach it either ({error}), which proves nothing"
    return ""


def _apply(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE_S)
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    return "" if done.returncode == 0 else (done.stderr.strip() or f"exit status {done.returncode}")


def _confine() -> None:
    gain_nothing()
    die_with_parent()  # after the change of user, which clears it
