"""The courier, a root process that runs on a rented EC2 machine from boot to power-off.

`python -m node.on_ec2.courier` starts the courier, which has these tasks:

- start the agent (the process that runs torchrun) as a user who cannot read the machine's
  credentials
- transfer files between the machine and S3
- upload EC2's interruption notices
- download the workloads' data if the controller (the process that launched the machine) requests
  them
- power the machine off at the end

If an operation on S3 or on the disk fails, the courier repeats it later.
"""

import argparse
import json
import os
import resource
import signal
import subprocess
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from ..agent import EXIT_DEADLINE, clean_environment
from ..data_paths import DATA_FILE
from ..processes import adopt_orphans, end_descendants
from .fetch import Fetcher
from .metadata import Metadata
from .metadata_fence import account, fence, start_as
from .s3 import FAULTS, MachineStore, s3_client
from .sync import Inbox, Outbox

POLL_S = 0.5
# Seconds between two downloads, and between two checks for an interruption notice. EC2 sends the
# notice two minutes before the interruption.
_EVERY_S = 2.0
_FLUSH_S = 20.0  # seconds for uploads while the machine shuts down
_GRACE_S = 60.0  # seconds for uploads between the end of the agent and the machine's deadline
_LOG = "agent.txt"  # the agent's output; the file belongs to root


@dataclass(kw_only=True)
class Delivery:
    """Starts a machine's agent, and transfers files, notices and data while the agent runs.

    store: the machine's folders in S3.
    start: a function; `start(rank, deadline_unix)` starts the agent and returns its process.
    notice: a function that returns EC2's interruption notice, or None.
    owner: the user id of the agent.
    ends: the machine's deadline, as a value of time.monotonic().
    data: downloads the workloads' data. `data.mailbox` is the local folder for the machine's files.
    sent: {name of a status file: content at its last upload}.
    next_at: value of time.monotonic() at which to download files and check for a notice again.
    leaving: True if the machine is shutting down.
    grace_s: the number of seconds between the agent's deadline and the machine's deadline.
    """

    store: MachineStore
    start: Callable[[int, float], subprocess.Popen[bytes]]
    notice: Callable[[], dict[str, str] | None]
    owner: int
    ends: float
    data: Fetcher
    sent: dict[str, Any] = field(default_factory=dict)
    next_at: float = 0.0
    last_message: str = ""
    leaving: bool = False

    def __post_init__(self) -> None:
        self.inbox = Inbox(self.data.mailbox, self.store.get)
        self.grace_s = min(_GRACE_S, (self.ends - time.monotonic()) / 5)

    def leave(self, *_: Any) -> None:
        """Set `leaving`, so that `serve` ends. This method is the handler of SIGTERM."""
        self.leaving = True

    def serve(self) -> str:
        """Run the agent and transfer files, until the agent has ended or the deadline is near.

        Returns "", or the reason why the machine could not do its work. Raises OSError if the agent
        cannot be started.
        """
        rank = None
        while rank is None and not self._over():
            with self._faults_printed():  # until the controller has assigned the rank
                rank = self.inbox.rank()
            if rank is None:
                time.sleep(1.0)
        if rank is None:
            return "" if self.leaving else "the controller assigned no rank before the deadline"
        folder = self.data.mailbox / f"node-{rank}"
        folder.mkdir(exist_ok=True)
        os.chown(folder, self.owner, -1)
        outbox = Outbox(folder, owner=self.owner, put=self.store.put)
        agent = self.start(rank, time.time() + self.ends - self.grace_s - time.monotonic())
        while agent.poll() is None and not self._over():
            self._round(outbox)
            time.sleep(POLL_S)
        code = agent.poll()
        end_descendants()
        until = min(self.ends, time.monotonic() + _FLUSH_S) if self.leaving else self.ends
        while True:
            with self._faults_printed():
                outbox.carry(due_only=False)
            if not outbox.records_wait() or time.monotonic() + _EVERY_S >= until:
                break
            time.sleep(_EVERY_S)
        if code in (None, 0, EXIT_DEADLINE):
            return ""
        output = (self.data.mailbox / _LOG).read_text(errors="replace").strip()[-1000:]
        return f"the agent ended with exit code {code}: {output}"

    def _publish(self, name: str, body: dict[str, Any] | None) -> None:
        """Upload `body` as the JSON file `name`, unless `body` is empty or already uploaded."""
        if body and self.sent.get(name) != body:
            self.store.put(name, json.dumps(body).encode())
            self.sent[name] = body

    def _round(self, outbox: Outbox) -> None:
        """Upload changed files. Every _EVERY_S seconds, also download files and check for a notice.

        Errors of S3, network and disk are printed, not raised.
        """
        with self._faults_printed():  # first, because a record matters more than a new plan
            outbox.carry()
        if time.monotonic() < self.next_at:
            return
        self.next_at = time.monotonic() + _EVERY_S
        with self._faults_printed():
            self.inbox.fetch()
        with suppress(OSError):  # the controller has requested no data yet
            self.data.request(json.loads((self.data.mailbox / DATA_FILE).read_text())["data"])
        with self._faults_printed():
            self._publish(DATA_FILE, dict(self.data.states))
            self._publish("notice.json", self.notice())

    def _over(self) -> bool:
        """Return True if the machine is shutting down, or if its deadline is near.

        The last `grace_s` seconds before the deadline are reserved for uploads.
        """
        return self.leaving or time.monotonic() >= self.ends - self.grace_s

    @contextmanager
    def _faults_printed(self) -> Iterator[None]:
        """Return a context manager that prints errors of S3, network and disk on the console.

        An error is not printed again if it equals the previous error.
        """
        try:
            yield
        except FAULTS as error:
            if str(error) != self.last_message:
                self.last_message = str(error)
                print(f"srift: {error}", flush=True)


def serve(given: argparse.Namespace) -> None:
    """Run the agent and transfer files, until the agent ends or the machine's deadline is near.

    given: the command-line arguments of the courier.

    If the machine could not do its work, upload the reason as the file `failed.json`. Raises
    OSError if the metadata service does not return the machine's id.
    """
    ends = time.monotonic() + given.deadline_s
    metadata = Metadata()
    client = partial(s3_client, given.region, given.endpoint)
    machine = f"{given.role_id}:{metadata.get('instance-id')}"
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
        store.client = data.client  # this client has longer timeouts and more attempts
        store.put("failed.json", json.dumps({"reason": reason}).encode())


def deliver(
    given: argparse.Namespace, metadata: Metadata, store: MachineStore, data: Fetcher, ends: float
) -> str:
    """Block the agent's user from the machine's credentials, then run `Delivery.serve`.

    `ends` is the machine's deadline, as a value of time.monotonic(). Returns "", or the reason why
    the machine could not do its work.

    Raises:
        KeyError: the agent's user does not exist.
        OSError: the agent's user is root, the metadata service fails, or the agent cannot be
            started.
    """
    user, address = account(given.user), metadata.get("local-ipv4")
    reason = fence(user, metadata.base, given.python)
    if reason:
        return reason

    def start(rank: int, deadline_unix: float) -> subprocess.Popen[bytes]:
        """Start the agent as the user who cannot read the machine's credentials."""
        home = given.directory / f"node-{rank}"
        command = [given.python, "-m", "node", "--mailbox", str(given.directory)]
        command += ["--node", str(rank), "--address", address, "--deadline", str(deadline_unix)]
        with (given.directory / _LOG).open("wb") as log:
            agent = start_as(
                user,
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=home,
                env=clean_environment(home),
                start_new_session=True,
            )
        _score(agent.pid, "0")
        return agent

    delivery = Delivery(
        store=store,
        start=start,
        notice=metadata.notice,
        owner=user.pw_uid,
        ends=ends,
        data=data,
    )
    signal.signal(signal.SIGTERM, delivery.leave)
    return delivery.serve()


def main() -> None:
    """Run the courier, and power the machine off at the end even if the courier fails.

    EC2 terminates a machine that powers off, because Srift launches machines with
    InstanceInitiatedShutdownBehavior=terminate.
    """
    parser = argparse.ArgumentParser(prog="node.on_ec2.courier")
    for name in ("bucket", "prefix", "region", "lease", "role-id", "user", "python"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--endpoint", help="URL of a service that replaces AWS's S3")
    parser.add_argument("--deadline-s", type=float, required=True, help="seconds from now")
    parser.add_argument("--directory", type=Path, required=True, help="the machine's mailbox")
    given = parser.parse_args()
    os.umask(0o022)
    adopt_orphans()
    _score(os.getpid(), "-500")  # records must survive if a workload exhausts the memory
    with suppress(OSError, ValueError):  # network cards such as EFA pin memory
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (resource.RLIM_INFINITY,) * 2)
    try:
        serve(given)
    finally:
        # The command is found on PATH, because a host that emulates EC2 has its own `shutdown`. If
        # `shutdown` fails, the bootstrap script or a timer set at boot powers the machine off.
        subprocess.run(("shutdown", "-h", "now"), stdin=subprocess.DEVNULL)


def _score(process: int, score: str) -> None:
    """Set the OOM score adjustment of a process: -1000 (never killed) to 1000 (killed first)."""
    with suppress(OSError):
        Path(f"/proc/{process}/oom_score_adj").write_text(score)


if __name__ == "__main__":
    main()
