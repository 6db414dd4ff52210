"""`python -m node.on_ec2.courier`: a rented machine's first process of ours, as root, from boot to power-off.

It keeps the user whose code is measured from the machine's credentials, starts the agent as that user, carries the
mailbox and EC2's notices, fetches the data that the controller names, and whatever happens powers the machine off. A
store or a disk that fails is tried again for as long as the machine lives; when the agent has left, records are carried
before anything else ends. `shutdown` is the one on PATH: an emulated host has its own.
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
from ..record import write_file
from .fetch import DataBucket, Fetcher
from .metadata import Metadata
from .metadata_fence import account, fence, start_as
from .s3 import Bucket
from .sync import LONGEST_PAUSE_S, Inbox, Outbox

POLL_S = 0.5
_INBOX_EVERY_S = 1.0
_QUIET_AFTER_S = 20.0  # without news from either side, from when on it is asked for less often
_QUIET_INBOX_EVERY_S = 5.0
_NOTICE_EVERY_S = 2.0  # AWS says five; a notice comes two minutes before the end
_FLUSH_S = 20.0  # after a notice, or while the machine goes down
_REST_S = 60.0  # at the end, for what is no record
_GRACE_S = 60.0  # before the machine's own end, to carry what the agent leaves
_LEFT = (0, 3)  # the agent's exit codes: as asked, or at its deadline
_KEPT = (
    "PATH",
    "LANG",
    "LC_ALL",
    "LD_LIBRARY_PATH",
)  # of the environment; nothing else reaches the agent
_PATIENCE_S = 10.0
_DATA_REPORTED_EVERY_S = 10.0  # while data come
_DATA_ATTEMPTS, _DATA_TIMEOUT_S = 8, 30.0  # nothing else waits for that connection
_TIMEOUT_S = 5.0  # a store that is silent must not keep a notice waiting
_POWER_OFF_TRIES = 12
_LAST_TO_DIE = (
    "-500"  # of /proc/PID/oom_score_adj: memory that a workload eats must not cost its records
)


class MachineStore:
    """`in/` and `out/` under this machine's own identity."""

    def __init__(self, bucket: Bucket, root: str) -> None:
        self._bucket, self._root = bucket, root

    def get(self, name: str) -> bytes:
        """Raises OSError."""
        return self._bucket.get(f"{self._root}/in/{name}")

    def put(self, name: str, content: bytes) -> None:
        """Raises OSError."""
        self._bucket.put(f"{self._root}/out/{name}", content)


class AgentProcess:
    """The agent as an ordinary user; what it says goes to a file that it cannot write otherwise."""

    def __init__(
        self,
        user: pwd.struct_passwd,
        python: str,
        directory: Path,
        address: str,
        rank: int,
        deadline_unix: float,
    ) -> None:
        own, self._log = directory / f"node-{rank}", directory / "agent.txt"
        command = [
            *(python, "-m", "node", "--mailbox", str(directory), "--node", str(rank)),
            *("--address", address, "--deadline", str(deadline_unix)),
        ]
        with self._log.open("wb") as log:
            self._process = start_as(
                user,
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=own,
                env=environment(user, own),
                start_new_session=True,
            )
        _score(self._process.pid, "0")

    def poll(self) -> int | None:
        """Its exit code; None while it runs."""
        return self._process.poll()

    def end(self) -> None:
        """Let it end its launch, then end whatever is left below this process."""
        with suppress(OSError):
            self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_PATIENCE_S)
        end_descendants()

    def said(self) -> str:
        """The end of what it said."""
        try:
            return self._log.read_text(errors="replace").strip()[-1000:]
        except OSError:
            return ""


def environment(user: pwd.struct_passwd, home: Path) -> dict[str, str]:
    """What the agent sees: where to find programs and its own code, and nothing of the machine's rights."""
    return {name: os.environ[name] for name in _KEPT if name in os.environ} | {
        "HOME": str(home),
        "USER": user.pw_name,
        "LOGNAME": user.pw_name,
        "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
        "PYTHONDONTWRITEBYTECODE": "1",
    }


class Delivery:
    """One machine. `start(rank, deadline_unix)` gives the agent, of user id `owner`; it and `notice` raise OSError.

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
        self._data, self._reported_data, self._reported_data_at = (
            data,
            dict[str, Any](),
            float("-inf"),
        )
        self._directory, self._store, self._start, self._notice, self._owner = (
            data.mailbox,
            store,
            start,
            notice,
            owner,
        )
        self._ends, self._grace_s = time.monotonic() + deadline_s, min(_GRACE_S, deadline_s / 5)
        self._inbox = Inbox(data.mailbox, store.get)
        self._outbox: Outbox | None = None
        self._noticed: dict[str, str] = {}
        self._next_inbox = self._next_notice = float("-inf")
        self._news_at = time.monotonic()
        self._complained = ""
        self._leaving = False
        self._refused = ""  # what was reported of files that are too much

    def leave(self, *_: Any) -> None:
        """The machine goes down (a signal's handler): end soon."""
        self._leaving = True

    def serve(self) -> str:
        """Until there is nothing left to do. Returns the reason if it is none that anybody asked for."""
        self.tell("booted.json", {"booted_unix": time.time()})
        rank = self._wait_for_rank()
        if rank is None:
            return (
                ""
                if self._leaving
                else "the controller gave this machine no place before its deadline"
            )
        outbox = self._outbox = self._own_folder(rank)
        self._pass_on()  # what came before there was a folder
        try:
            agent = self._start(rank, time.time() + self._ends - self._grace_s - time.monotonic())
        except OSError as error:
            return f"the agent could not be started: {error}"
        while agent.poll() is None and not self._over(before_s=self._grace_s / 2):
            self._round(outbox)
            time.sleep(POLL_S)
        code = agent.poll()
        self._data.stop()
        agent.end()
        self._empty()
        return (
            ""
            if code is None or code in _LEFT
            else f"the agent ended with exit code {code}: {agent.said()}"
        )

    def tell(self, name: str, body: dict[str, Any]) -> bool:
        """Say it straight to the store, once. Returns whether it came there."""
        try:
            self._store.put(name, json.dumps(body).encode())
        except OSError as error:
            self._complain(f"{name} was not carried: {error}")
            return False
        return True

    def _wait_for_rank(self) -> int | None:
        while not self._over(before_s=self._grace_s):
            try:
                return self._inbox.rank()
            except OSError as error:
                self._complain(str(error))
                self._watch()
                time.sleep(_INBOX_EVERY_S)
        return None

    def _own_folder(self, rank: int) -> Outbox:
        folder = self._directory / f"node-{rank}"
        folder.mkdir(exist_ok=True)
        os.chown(folder, self._owner, -1)
        return Outbox(folder, owner=self._owner, put=self._store.put)

    def _round(self, outbox: Outbox) -> None:
        """Twice a second: out first, for a record matters more than a plan."""
        try:
            if outbox.carry():
                self._complain(outbox.problem)
            self._news_at = max(self._news_at, outbox.news_at)  # what was carried may be answered
            self._tell_refused(outbox)
            if time.monotonic() >= self._next_inbox:
                quiet = time.monotonic() >= self._news_at + _QUIET_AFTER_S
                self._next_inbox = time.monotonic() + (
                    _QUIET_INBOX_EVERY_S if quiet else _INBOX_EVERY_S
                )
                if self._inbox.fetch():
                    self._news_at, self._next_inbox = (
                        time.monotonic(),
                        time.monotonic() + _INBOX_EVERY_S,
                    )
        except OSError as error:
            self._complain(str(error))
        self._fetch_data()
        self._watch()

    def _watch(self) -> None:
        """Pass on a notice the first time it is seen."""
        if time.monotonic() < self._next_notice:
            return
        self._next_notice = time.monotonic() + _NOTICE_EVERY_S
        try:
            notice = self._notice()
        except OSError:
            return  # asked again in a moment
        if notice is not None and notice != self._noticed:
            self._noticed = notice
            self._pass_on()

    def _pass_on(self) -> None:
        """The notice, and everything else at once: the machine may go."""
        if not self._noticed:
            return
        body = {**self._noticed, "seen_unix": time.time()}
        written = False
        if self._outbox is not None:
            with suppress(OSError):  # a full disk
                write_file(
                    self._outbox.folder / "notice.json",
                    json.dumps(body).encode(),
                    owner=self._owner,
                )
                written = True
            self._flush(self._outbox, until=time.monotonic() + _FLUSH_S)
        if not written and not self.tell("notice.json", body):
            self._noticed = {}  # it is seen again in a moment

    def _empty(self) -> None:
        """At the end: everything for a minute, then records for as long as the machine lives."""
        assert self._outbox is not None
        short = self._leaving
        self._flush(
            self._outbox, until=min(self._ends, time.monotonic() + (_FLUSH_S if short else _REST_S))
        )
        if not short and self._outbox.records_waiting():
            self._flush(self._outbox, until=self._ends)
        self._tell_refused(self._outbox)

    def _flush(self, outbox: Outbox, *, until: float) -> None:
        pause_s = POLL_S
        while outbox.flush(until):
            self._complain(outbox.problem)
            if time.monotonic() + pause_s >= until:
                return
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _tell_refused(self, outbox: Outbox) -> None:
        """That files are left behind, once: not each of them."""
        if (
            outbox.refused
            and not self._refused
            and self.tell("refused.json", {"reason": outbox.refused})
        ):
            self._refused = outbox.refused

    def _fetch_data(self) -> None:
        """Begin with data that are asked for, and tell how far they are: when all has come or failed, and meanwhile."""
        with suppress(OSError):  # nothing is asked for, or not yet
            self._data.ask(json.loads((self._directory / DATA_FILE).read_text())["data"])
        states = self._data.states()
        if states == self._reported_data:
            return
        ended = {digest for digest, state in states.items() if state["state"] != FETCHING}
        known = {
            digest for digest, state in self._reported_data.items() if state["state"] != FETCHING
        }
        if ended == known and time.monotonic() < self._reported_data_at + _DATA_REPORTED_EVERY_S:
            return
        self._reported_data_at = time.monotonic()
        if self.tell(DATA_FILE, states):
            self._reported_data = states

    def _over(self, *, before_s: float) -> bool:
        return self._leaving or time.monotonic() >= self._ends - before_s

    def _complain(self, message: str) -> None:
        """To the machine's console, once in a row."""
        if message != self._complained:
            self._complained = message
            print(f"srift: {message}", flush=True)


def serve(arguments: argparse.Namespace) -> None:
    """From the first look at the metadata service to the last upload. Raises OSError where it cannot even begin."""
    ends = time.monotonic() + arguments.deadline_s
    metadata = Metadata()
    bucket = Bucket(
        arguments.bucket,
        region=arguments.region,
        endpoint=arguments.endpoint,
        keys=metadata.keys,
        attempts=2,
        timeout_s=_TIMEOUT_S,
    )
    own = f"{arguments.role_id}:{metadata.instance_id()}"
    store = MachineStore(bucket, f"{arguments.prefix}/leases/{arguments.lease}/{own}")
    try:
        reason = deliver(arguments, metadata, store, ends)
    except Exception as error:
        traceback.print_exc()
        reason = f"the courier failed: {error!r}"[:500]
    if reason:
        print(f"srift: {reason}", flush=True)
        bucket.attempts = 6  # nothing else waits any more
        try:
            store.put(
                "failed.json", json.dumps({"reason": reason, "failed_unix": time.time()}).encode()
            )
        except OSError as error:
            print(f"srift: nor could that be reported: {error}", flush=True)


def deliver(
    arguments: argparse.Namespace, metadata: Metadata, store: MachineStore, ends: float
) -> str:
    """Empty, or why the machine could not serve. Raises OSError."""
    user, address = account(arguments.user), metadata.address()
    reason = fence(user, metadata.base, arguments.python)
    if reason:
        return reason
    delivery = Delivery(
        store=store,
        start=partial(AgentProcess, user, arguments.python, arguments.directory, address),
        notice=metadata.notice,
        owner=user.pw_uid,
        deadline_s=ends - time.monotonic(),
        data=Fetcher(
            arguments.directory,
            lambda name: DataBucket(
                name,
                region=arguments.region,
                endpoint=arguments.endpoint,
                keys=metadata.keys,
                attempts=_DATA_ATTEMPTS,
                timeout_s=_DATA_TIMEOUT_S,
            ),
        ),
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, delivery.leave)
    return delivery.serve()


def power_off() -> None:
    """The machine terminates when it is off. The timer that was set at boot stands behind this."""
    for _ in range(_POWER_OFF_TRIES):
        with suppress(OSError):
            if subprocess.run(("shutdown", "-h", "now"), stdin=subprocess.DEVNULL).returncode == 0:
                return
        time.sleep(5.0)


def main() -> None:
    """Serve, and power off whatever came of it."""
    parser = argparse.ArgumentParser(
        prog="node.on_ec2.courier", description="Serve one rented machine of a Srift cluster."
    )
    parser.add_argument("--bucket", required=True)
    parser.add_argument("--prefix", required=True)
    parser.add_argument("--region", required=True)
    parser.add_argument("--endpoint", help="of an S3 that stands in for AWS's")
    parser.add_argument("--lease", required=True)
    parser.add_argument(
        "--role-id", required=True, help="of the machine's role: half of what IAM calls its user id"
    )
    parser.add_argument(
        "--user", required=True, help="whom the agent and the workloads run as; not root"
    )
    parser.add_argument("--python", required=True, help="the Python that has torch")
    parser.add_argument(
        "--deadline-s", type=float, required=True, help="seconds from now to the machine's end"
    )
    parser.add_argument("--directory", type=Path, required=True, help="the machine's mailbox")
    arguments = parser.parse_args()
    os.umask(0o022)
    adopt_orphans()
    _score(os.getpid(), _LAST_TO_DIE)
    with suppress(OSError, ValueError):  # fast network cards pin memory
        resource.setrlimit(
            resource.RLIMIT_MEMLOCK, (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        )
    try:
        serve(arguments)
    except Exception:
        traceback.print_exc()
    finally:
        power_off()


def _score(process: int, score: str) -> None:
    with suppress(OSError):
        Path(f"/proc/{process}/oom_score_adj").write_text(score)


if __name__ == "__main__":
    main()
