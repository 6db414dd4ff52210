"""`python -m node.on_ec2.courier`: a rented machine's first process of ours, as root, from boot to
power-off.

It keeps the user whose code is measured from the machine's credentials, starts the agent as that
user, carries the mailbox and EC2's notices, fetches the data that the controller names, and powers
the machine off whatever happens. It retries a store or a disk that fails for as long as the machine
lives. `shutdown` is the program on PATH: an emulated host has its own.
"""

from __future__ import annotations

import argparse
import json
import os
import pwd
import resource
import signal
import subprocess
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from ..data import FETCHING
from ..data import FILE as DATA_FILE
from ..processes import adopt_orphans, end_descendants
from .fetch import Fetcher
from .metadata import Metadata
from .metadata_fence import account, fence, start_as
from .s3 import FAULTS, MachineStore, s3_client
from .sync import LONGEST_PAUSE_S, Inbox, Outbox

POLL_S = 0.5
_INBOX_EVERY_S = 1.0
_QUIET_AFTER_S = 20.0  # without news from either side the manifest is read less often
_QUIET_INBOX_EVERY_S = 5.0
_NOTICE_EVERY_S = 2.0  # AWS says five; a notice comes two minutes before the end
_FLUSH_S = 20.0  # after a notice, or while the machine goes down
_REST_S = 60.0  # at the end, for files that are no records
_GRACE_S = 60.0  # before the machine's own end, to carry what the agent leaves
_LEFT = (0, 3)  # the agent's exit codes: as asked, or at its deadline
_KEPT = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH")  # nothing else reaches the agent
_PATIENCE_S = 10.0
_DATA_REPORTED_EVERY_S = 10.0
_POWER_OFF_TRIES = 12
# of /proc/PID/oom_score_adj: memory that a workload eats must not cost its records
_LAST_TO_DIE = "-500"


class AgentProcess:
    """The agent as an ordinary user; its output goes to a file that it cannot write otherwise."""

    def __init__(
        self,
        user: pwd.struct_passwd,
        python: str,
        directory: Path,
        address: str,
        rank: int,
        deadline_unix: float,
    ) -> None:
        home, self._log = directory / f"node-{rank}", directory / "agent.txt"
        command = [python, "-m", "node", "--mailbox", str(directory), "--node", str(rank)]
        command += ["--address", address, "--deadline", str(deadline_unix)]
        environment = {name: os.environ[name] for name in _KEPT if name in os.environ} | {
            "HOME": str(home),
            "USER": user.pw_name,
            "LOGNAME": user.pw_name,
            "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        with self._log.open("wb") as log:
            self._process = start_as(
                user,
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=home,
                env=environment,
                start_new_session=True,
            )
        _score(self._process.pid, "0")

    def poll(self) -> int | None:
        """Return its exit code; None while it runs."""
        return self._process.poll()

    def end(self) -> None:
        """Let it end its launch, then end all that is left below this process."""
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_PATIENCE_S)
        end_descendants()

    def last_output(self) -> str:
        """Return the end of its output."""
        return self._log.read_text(errors="replace").strip()[-1000:]


class Delivery:
    """One machine's service. `start(rank, deadline_unix)` returns the agent, of user id `owner`.

    `data` fetches what the controller names; its mailbox is the machine's.
    """

    def __init__(
        self,
        *,
        store: MachineStore,
        start: Callable[[int, float], AgentProcess],
        notice: Callable[[], dict[str, str] | None],
        owner: int,
        deadline_s: float,
        data: Fetcher,
    ) -> None:
        self._store, self._start, self._notice, self._owner = store, start, notice, owner
        self._data, self._directory = data, data.mailbox
        self._reported_data: dict[str, Any] = {}
        self._reported_data_at = self._next_inbox = self._next_notice = float("-inf")
        self._ends, self._grace_s = time.monotonic() + deadline_s, min(_GRACE_S, deadline_s / 5)
        self._inbox = Inbox(data.mailbox, store.get)
        self._outbox: Outbox | None = None
        self._notice_sent: dict[str, str] | None = None
        self._news_at = time.monotonic()
        self._last_message = ""
        self._leaving = False

    def leave(self, *_: Any) -> None:
        """Handle a signal: the machine goes down."""
        self._leaving = True

    def serve(self) -> str:
        """Serve until nothing is left to do. Returns why the machine could not, or an empty string.

        Raises OSError if the agent cannot be started.
        """
        self.publish("booted.json", {"booted_unix": time.time()})
        rank = self._wait_for_rank()
        if rank is None:
            never = "the controller gave this machine no place before its deadline"
            return "" if self._leaving else never
        folder = self._directory / f"node-{rank}"
        folder.mkdir(exist_ok=True)
        os.chown(folder, self._owner, -1)
        outbox = self._outbox = Outbox(folder, owner=self._owner, put=self._store.put)
        agent = self._start(rank, time.time() + self._ends - self._grace_s - time.monotonic())
        while agent.poll() is None and not self._over(before_s=self._grace_s / 2):
            self._round(outbox)
            time.sleep(POLL_S)
        code = agent.poll()
        self._data.stop()
        agent.end()
        rest_s = _FLUSH_S if self._leaving else _REST_S
        self._flush(outbox.waiting, min(self._ends, time.monotonic() + rest_s))
        if not self._leaving:
            self._flush(outbox.records_wait, self._ends)
        if code is None or code in _LEFT:
            return ""
        return f"the agent ended with exit code {code}: {agent.last_output()}"

    def publish(self, name: str, body: dict[str, Any]) -> bool:
        """Write straight to the store, once; whether it took it."""
        try:
            self._store.put(name, json.dumps(body).encode())
        except FAULTS as error:
            self._complain(f"{name} was not carried: {error}")
            return False
        return True

    def _wait_for_rank(self) -> int | None:
        while not self._over(before_s=self._grace_s):
            try:
                return self._inbox.rank()
            except FAULTS as error:
                self._complain(str(error))
                self._watch()
                time.sleep(_INBOX_EVERY_S)
        return None

    def _round(self, outbox: Outbox) -> None:
        """Carry out first, for a record matters more than a plan."""
        try:
            now = time.monotonic()
            if outbox.carry():
                self._news_at = now
            if now >= self._next_inbox:
                if self._inbox.fetch():
                    self._news_at = now
                quiet = now >= self._news_at + _QUIET_AFTER_S
                self._next_inbox = now + (_QUIET_INBOX_EVERY_S if quiet else _INBOX_EVERY_S)
        except FAULTS as error:
            self._complain(str(error))
        self._fetch_data()
        self._watch()

    def _watch(self) -> None:
        """Pass on a notice the first time it is seen, and everything else: the machine may go."""
        if time.monotonic() < self._next_notice:
            return
        self._next_notice = time.monotonic() + _NOTICE_EVERY_S
        with suppress(OSError):
            notice = self._notice()
            if notice and notice != self._notice_sent:
                if self.publish("notice.json", notice | {"seen_unix": time.time()}):
                    self._notice_sent = notice
                if self._outbox is not None:
                    self._flush(self._outbox.waiting, time.monotonic() + _FLUSH_S)

    def _flush(self, waiting: Callable[[], object], until: float) -> None:
        """Upload everything, as long as something is `waiting`."""
        pause_s = POLL_S
        while self._outbox is not None:
            try:
                self._outbox.carry(until=until, due_only=False)
            except FAULTS as error:
                self._complain(str(error))
            if not waiting() or time.monotonic() + pause_s >= until:
                return
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _fetch_data(self) -> None:
        """Start to fetch requested data, and report progress: every ten seconds, and when data are
        ready or failed.
        """
        with suppress(OSError):  # nothing was requested yet
            self._data.request(json.loads((self._directory / DATA_FILE).read_text())["data"])
        states = self._data.states()
        soon = time.monotonic() < self._reported_data_at + _DATA_REPORTED_EVERY_S
        if states == self._reported_data or (
            soon and _ended(states) == _ended(self._reported_data)
        ):
            return
        self._reported_data_at = time.monotonic()
        if self.publish(DATA_FILE, states):
            self._reported_data = states

    def _over(self, *, before_s: float) -> bool:
        return self._leaving or time.monotonic() >= self._ends - before_s

    def _complain(self, message: str) -> None:
        """Print to the machine's console, once in a row."""
        if message != self._last_message:
            self._last_message = message
            print(f"srift: {message}", flush=True)


def _ended(states: dict[str, Any]) -> set[str]:
    return {digest for digest, state in states.items() if state["state"] != FETCHING}


def serve(given: argparse.Namespace) -> None:
    """Serve from the first look at the metadata service to the last upload. Raises OSError where it
    cannot begin.
    """
    ends = time.monotonic() + given.deadline_s
    metadata = Metadata()
    client = partial(s3_client, given.region, given.endpoint)
    machine = f"{given.role_id}:{metadata.require('instance-id')}"
    root = f"{given.prefix}/leases/{given.lease}/{machine}"
    # a store that is silent must not keep a notice waiting
    store = MachineStore(client(attempts=2, timeout_s=5.0), given.bucket, root)
    data = Fetcher(given.directory, client(attempts=8, timeout_s=30.0))
    try:
        reason = deliver(given, metadata, store, data, ends)
    except Exception as error:
        traceback.print_exc()
        reason = f"the courier failed: {error!r}"[:500]
    if reason:
        print(f"srift: {reason}", flush=True)
        store.client = data.client  # at the end nothing else waits
        body = {"reason": reason, "failed_unix": time.time()}
        store.put("failed.json", json.dumps(body).encode())


def deliver(
    given: argparse.Namespace, metadata: Metadata, store: MachineStore, data: Fetcher, ends: float
) -> str:
    """Return why the machine could not serve, or an empty string. Raises OSError."""
    user, address = account(given.user), metadata.require("local-ipv4")
    reason = fence(user, metadata.base, given.python)
    if reason:
        return reason
    delivery = Delivery(
        store=store,
        start=partial(AgentProcess, user, given.python, given.directory, address),
        notice=metadata.notice,
        owner=user.pw_uid,
        deadline_s=ends - time.monotonic(),
        data=data,
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, delivery.leave)
    return delivery.serve()


def power_off() -> None:
    """Shut down: the machine terminates when it is off. The timer set at boot stands
    behind this.
    """
    for _ in range(_POWER_OFF_TRIES):
        with suppress(OSError):
            if subprocess.run(("shutdown", "-h", "now"), stdin=subprocess.DEVNULL).returncode == 0:
                return
        time.sleep(5.0)


def main() -> None:
    """Serve, and power off whatever came of it."""
    parser = argparse.ArgumentParser(prog="node.on_ec2.courier")
    for name in ("bucket", "prefix", "region", "lease", "role-id", "user", "python"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--endpoint", help="of an S3 that stands in for AWS's")
    parser.add_argument("--deadline-s", type=float, required=True, help="from now")
    parser.add_argument("--directory", type=Path, required=True, help="the machine's mailbox")
    given = parser.parse_args()
    os.umask(0o022)
    adopt_orphans()
    _score(os.getpid(), _LAST_TO_DIE)
    with suppress(OSError, ValueError):  # fast network cards pin memory
        unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        resource.setrlimit(resource.RLIMIT_MEMLOCK, unlimited)
    try:
        serve(given)
    except Exception:
        traceback.print_exc()
    finally:
        power_off()


def _score(process: int, score: str) -> None:
    with suppress(OSError):
        Path(f"/proc/{process}/oom_score_adj").write_text(score)


if __name__ == "__main__":
    main()
