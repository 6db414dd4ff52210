"""Block a user of this machine from EC2's metadata service, and verify this before user code runs.

The service gives the machine's credentials to every process that requests them. Routing rules and
a packet filter block the user's connections. To verify the block, root and a process of the user
try to connect. The block works if only root succeeds.
"""

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
    # The service can also listen on an IPv6 address, although Srift launches disable IPv6 access.
    "ip -6 rule add pref 10 to fd00:ec2::254/128 uidrange {uid}-{uid} prohibit",
)
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
_PATIENCE_S = 60.0  # time limit of a command, generous because the machine has just booted


def account(name: str) -> pwd.struct_passwd:
    """Return the account of the user `name`.

    Raises KeyError if the user does not exist, and OSError if the user is root.
    """
    found = pwd.getpwnam(name)
    if found.pw_uid == 0:
        raise OSError(f"{name} is root, and no rule can block root from the metadata service")
    return found


def start_as(
    user: pwd.struct_passwd, command: Sequence[str], **options: object
) -> subprocess.Popen[bytes]:
    """Start `command` as `user`, and return the new process.

    The kernel kills the new process when this process ends. The new process has no supplementary
    groups, and cannot gain privileges through set-uid programs. `options` are keyword arguments of
    Popen.
    """
    return subprocess.Popen(  # type: ignore[call-overload, no-any-return]
        command,
        user=user.pw_uid,
        group=user.pw_gid,
        extra_groups=[],
        preexec_fn=_confine,
        **options,
    )


def fence(user: pwd.struct_passwd, base: str, python: str) -> str:
    """Block `user` from the metadata service at the URL `base`. Return "", or why the block failed.

    If the block failed, the caller must not run any code as `user`.

    python: the path of a Python interpreter. A process of `user` runs it to verify the block.
    """
    parts = urllib.parse.urlsplit(base)
    host, port = str(parts.hostname), parts.port or 80
    # One rule is enough to block the user, but a rule may disappear later. For example,
    # systemd-networkd deletes the routing rules of other programs when it restarts.
    problems = [_apply(rule.format(host=host, uid=user.pw_uid).split()) for rule in _RULES]
    problem = _prove(user, python, host, port)
    if not problem:
        return ""
    outcomes = "; ".join(filter(None, [*problems, problem]))
    return f"user code was not run, because it could reach the metadata service ({outcomes})"


def _prove(user: pwd.struct_passwd, python: str, host: str, port: int) -> str:
    """Verify that root can connect to the metadata service, but `user` cannot.

    Returns "", or why the verification failed.
    """
    command = (python, "-I", "-c", _TRY, host, str(port))
    try:
        started = start_as(user, command, env={"PATH": os.defpath}, cwd="/", stderr=subprocess.PIPE)
        _, outcomes = started.communicate(timeout=_PATIENCE_S)
    except (OSError, subprocess.SubprocessError) as error:
        return f"{python} could not be started as user {user.pw_name}: {error}"
    if started.returncode == _CONNECTED:
        return "the user can still connect"
    if started.returncode != _REFUSED:
        last = outcomes.decode(errors="replace").strip()[-300:]
        return f"{python} failed as user {user.pw_name}: {last}"
    try:
        socket.create_connection((host, port), timeout=_TIMEOUT_S).close()
    except OSError as error:
        return f"root cannot reach the service either ({error}), so the block cannot be verified"
    return ""


def _apply(command: Sequence[str]) -> str:
    """Run a command that adds a routing or firewall rule. Return "", or why the command failed."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE_S)
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    return "" if done.returncode == 0 else (done.stderr.strip() or f"exit status {done.returncode}")


def _confine() -> None:
    gain_nothing()
    die_with_parent()  # called last, because a change of user would clear the setting
