"""Serves a rented EC2 machine as root, from boot to power-off: `python -m node.on_ec2.courier`.

The agent and the workloads run as an ordinary user, and the courier blocks that user from the
machine's credentials. The courier carries the mailbox and EC2's notices, and downloads the data
that the controller names. It retries after errors of S3 or of the disk, and always powers the
machine off at the end. For that it runs the `shutdown` on PATH; emulated hosts provide their own.
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
_QUIET_AFTER_S = 20.0  # after this long without a new file, the manifest is read less often
_QUIET_INBOX_EVERY_S = 5.0
_NOTICE_EVERY_S = 2.0  # AWS recommends 5 s; a notice comes two minutes before the end
_FLUSH_S = 20.0  # seconds to upload after a notice, or while the machine shuts down
_REST_S = 60.0  # at the end: seconds to upload all files; only records may take longer
_GRACE_S = 60.0  # the agent ends this long before the machine does, so that its files are uploaded
_LEFT = (0, 3)  # exit codes of the agent: after done.json, and at its deadline
_KEPT = (
    "PATH",
    "LANG",
    "LC_ALL",
    "LD_LIBRARY_PATH",
)  # environment variables that the agent inherits
_PATIENCE_S = 10.0  # seconds for the agent to end its launch
_DATA_REPORTED_EVERY_S = 10.0
_POWER_OFF_TRIES = 12
# The courier's /proc/PID/oom_score_adj: records must survive if a workload exhausts the memory.
_LAST_TO_DIE = "-500"


class AgentProcess:
    """The agent, running as an ordinary user.

    Its output goes to a file that belongs to root.
    """

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
        """Return the agent's exit code; None while it runs."""
        return self._process.poll()

    def end(self) -> None:
        """Ask the agent to end its launch; then kill all descendants of this process."""
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_PATIENCE_S)
        end_descendants()

    def last_output(self) -> str:
        """Return the last 1,000 characters of the agent's output."""
        return self._log.read_text(errors="replace").strip()[-1000:]


class Delivery:
    """Serves one machine: carries files and notices, and downloads data, while the agent runs.

    store: the machine's folders in S3.
    start: `start(rank, deadline_unix)` starts the agent.
    notice: a function that returns EC2's notice that it takes the machine back, or None.
    owner: the user id of the agent.
    deadline_s: seconds until the machine must end.
    data: the downloader of workloads' data. Its `mailbox` is the machine's mailbox.
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
        """Note that the machine shuts down. This is the handler of SIGTERM and SIGINT."""
        self._leaving = True

    def serve(self) -> str:
        """Serve until the agent ends and its files are uploaded, or the deadline nears.

        Returns why the machine could not serve, or an empty string. Raises OSError if the agent
        cannot be started.
        """
        self.publish("booted.json", {"booted_unix": time.time()})
        rank = self._wait_for_rank()
        if rank is None:
            never = "the controller gave this machine no place in the cluster before its deadline"
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
        """Write `body` as JSON to the store, without a retry; return True if that succeeded."""
        try:
            self._store.put(name, json.dumps(body).encode())
        except FAULTS as error:
            self._complain(f"{name} was not uploaded: {error}")
            return False
        return True

    def _wait_for_rank(self) -> int | None:
        """Wait for this machine's place in the cluster; return None if there is no time left."""
        while not self._over(before_s=self._grace_s):
            try:
                return self._inbox.rank()
            except FAULTS as error:
                self._complain(str(error))
                self._watch()
                time.sleep(_INBOX_EVERY_S)
        return None

    def _round(self, outbox: Outbox) -> None:
        """Upload, download, and look for notices once.

        Uploads come first, since a record matters more than a plan.
        """
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
        """Publish a new notice, and then upload all files, since the machine may end soon."""
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
        """Upload files while `waiting()` is true, also those that were uploaded shortly before.

        Stops at the latest at `until`, in seconds of time.monotonic().
        """
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
        """Start the requested downloads, and report their progress.

        Reports every _DATA_REPORTED_EVERY_S seconds, and when data are ready or failed.
        """
        with suppress(OSError):  # the controller has requested no data yet
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
        """Return True if the machine shuts down, or if at most `before_s` seconds are left."""
        return self._leaving or time.monotonic() >= self._ends - before_s

    def _complain(self, message: str) -> None:
        """Print to the machine's console, unless the previous message was the same."""
        if message != self._last_message:
            self._last_message = message
            print(f"srift: {message}", flush=True)


def _ended(states: dict[str, Any]) -> set[str]:
    """Return the digests of the data whose download has succeeded or failed."""
    return {digest for digest, state in states.items() if state["state"] != FETCHING}


def serve(given: argparse.Namespace) -> None:
    """Serve the machine; if that fails, write the reason to `failed.json`.

    Raises OSError if the metadata service does not name the machine.
    """
    ends = time.monotonic() + given.deadline_s
    metadata = Metadata()
    client = partial(s3_client, given.region, given.endpoint)
    machine = f"{given.role_id}:{metadata.require('instance-id')}"
    root = f"{given.prefix}/leases/{given.lease}/{machine}"
    # short timeouts, so that an unresponsive store does not delay a notice
    store = MachineStore(client(attempts=2, timeout_s=5.0), given.bucket, root)
    data = Fetcher(given.directory, client(attempts=8, timeout_s=30.0))
    try:
        reason = deliver(given, metadata, store, data, ends)
    except Exception as error:
        traceback.print_exc()
        reason = f"the courier failed: {error!r}"[:500]
    if reason:
        print(f"srift: {reason}", flush=True)
        store.client = data.client  # a client with longer timeouts, since nothing else waits now
        body = {"reason": reason, "failed_unix": time.time()}
        store.put("failed.json", json.dumps(body).encode())


def deliver(
    given: argparse.Namespace, metadata: Metadata, store: MachineStore, data: Fetcher, ends: float
) -> str:
    """Block the agent's user from the machine's credentials, and serve until the end.

    Returns why the machine could not serve, or an empty string. `ends` is the deadline in seconds
    of time.monotonic(). Raises OSError if the user does not exist or the agent cannot be started.
    """
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
    """Shut down, whereupon EC2 terminates the machine.

    If `shutdown` fails every time, the timer set at boot ends the machine.
    """
    for _ in range(_POWER_OFF_TRIES):
        with suppress(OSError):
            if subprocess.run(("shutdown", "-h", "now"), stdin=subprocess.DEVNULL).returncode == 0:
                return
        time.sleep(5.0)


def main() -> None:
    """Serve the machine, and power it off even if that fails."""
    parser = argparse.ArgumentParser(prog="node.on_ec2.courier")
    for name in ("bucket", "prefix", "region", "lease", "role-id", "user", "python"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--endpoint", help="address of an S3 that replaces AWS's")
    parser.add_argument("--deadline-s", type=float, required=True, help="seconds from now")
    parser.add_argument("--directory", type=Path, required=True, help="the machine's mailbox")
    given = parser.parse_args()
    os.umask(0o022)
    adopt_orphans()
    _score(os.getpid(), _LAST_TO_DIE)
    with suppress(OSError, ValueError):  # network cards such as EFA pin memory
        unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        resource.setrlimit(resource.RLIMIT_MEMLOCK, unlimited)
    try:
        serve(given)
    except Exception:
        traceback.print_exc()
    finally:
        power_off()


def _score(process: int, score: str) -> None:
    """Set how likely the kernel is to kill a process when memory runs out."""
    with suppress(OSError):
        Path(f"/proc/{process}/oom_score_adj").write_text(score)


if __name__ == "__main__":
    main()
