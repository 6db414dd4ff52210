"""The courier's work: the mailbox carried between a rented machine's disk and the store, and the agent looked after.

A store or a disk that fails is tried again for as long as the machine lives; a notice of EC2's has everything carried
at once; when the agent has left, records are carried before anything else ends.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from .inbox import Inbox, place
from .outbox import Outbox

POLL_S = 0.5
_INBOX_EVERY_S = 1.0
_NOTICE_EVERY_S = 2.0  # AWS says five; a notice comes two minutes before the end
_FLUSH_S = 20.0  # after a notice, or while the machine goes down
_REST_S = 60.0  # at the end, for what is no record
_GRACE_S = 60.0  # before the machine's own end, to carry what the agent leaves
_LONGEST_PAUSE_S = 10.0
_LEFT = (0, 3)  # the agent's exit codes: as told, or at its deadline


class Agent(Protocol):
    """The agent's process."""

    def poll(self) -> int | None:
        """Its exit code; None while it runs."""

    def end(self) -> None:
        """End it and everything below it."""

    def said(self) -> str:
        """The end of what it said."""


class Store(Protocol):
    """This machine's part of the store."""

    def get(self, name: str) -> bytes:
        """What the controller wrote. Raises OSError."""

    def put(self, name: str, content: bytes) -> None:
        """For the controller to read. Raises OSError."""


class Delivery:
    """One machine. `start(rank, deadline_unix)` gives the agent, of user id `owner`; it and `notice` raise OSError."""

    def __init__(
        self,
        *,
        directory: Path,
        store: Store,
        start: Callable[[int, float], Agent],
        notice: Callable[[], dict[str, str] | None],
        owner: int,
        deadline_s: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._directory, self._store, self._start, self._notice = directory, store, start, notice
        self._owner, self._clock, self._sleep = owner, clock, sleep
        self._ends, self._grace_s = clock() + deadline_s, min(_GRACE_S, deadline_s / 5)
        self._inbox = Inbox(directory, store.get)
        self._outbox: Outbox | None = None
        self._noticed: dict[str, str] = {}
        self._next_inbox = self._next_notice = float("-inf")
        self._complained = ""
        self._told_to_leave = False

    def leave(self, *_: Any) -> None:
        """The machine goes down (a signal's handler): end soon."""
        self._told_to_leave = True

    def serve(self) -> str:
        """Until there is nothing left to do. Returns the reason if it is none that anybody asked for."""
        self.tell("booted.json", {"booted_unix": time.time()})
        rank = self._wait_for_rank()
        if rank is None:
            return "" if self._told_to_leave else "the controller gave this machine no place before its deadline"
        outbox = self._outbox = self._own_folder(rank)
        self._pass_on()  # what came before there was a folder
        try:
            agent = self._start(rank, time.time() + self._ends - self._grace_s - self._clock())
        except OSError as error:
            return f"the agent could not be started: {error}"
        while agent.poll() is None and not self._over(before_s=self._grace_s / 2):
            self._round(outbox)
            self._sleep(POLL_S)
        code = agent.poll()
        agent.end()
        self._empty()
        return "" if code is None or code in _LEFT else f"the agent ended with exit code {code}: {agent.said()}"

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
                self._sleep(_INBOX_EVERY_S)
        return None

    def _own_folder(self, rank: int) -> Outbox:
        folder = self._directory / f"node-{rank}"
        folder.mkdir(exist_ok=True)
        os.chown(folder, self._owner, -1)
        return Outbox(folder, owner=self._owner, put=self._store.put, clock=self._clock)

    def _round(self, outbox: Outbox) -> None:
        """Twice a second: out first, for a record is worth more than a plan."""
        try:
            if outbox.carry():
                self._complain(outbox.problem)
            if self._clock() >= self._next_inbox:
                self._next_inbox = self._clock() + _INBOX_EVERY_S
                self._inbox.fetch()
        except OSError as error:
            self._complain(str(error))
        self._watch()

    def _watch(self) -> None:
        """Pass on a notice the first time it is seen."""
        if self._clock() < self._next_notice:
            return
        self._next_notice = self._clock() + _NOTICE_EVERY_S
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
        told = False
        if self._outbox is not None:
            with suppress(OSError):  # a full disk
                place(self._outbox.folder / "notice.json", json.dumps(body).encode(), self._owner)
                told = True
            self._flush(self._outbox, until=self._clock() + _FLUSH_S)
        if not told and not self.tell("notice.json", body):
            self._noticed = {}  # it is seen again in a moment

    def _empty(self) -> None:
        """At the end: everything for a minute, then records for as long as the machine lives."""
        assert self._outbox is not None
        short = self._told_to_leave
        self._flush(self._outbox, until=min(self._ends, self._clock() + (_FLUSH_S if short else _REST_S)))
        if not short and self._outbox.records_waiting():
            self._flush(self._outbox, until=self._ends)

    def _flush(self, outbox: Outbox, *, until: float) -> None:
        pause_s = POLL_S
        while outbox.flush(until):
            self._complain(outbox.problem)
            if self._clock() + pause_s >= until:
                return
            self._sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _over(self, *, before_s: float) -> bool:
        return self._told_to_leave or self._clock() >= self._ends - before_s

    def _complain(self, message: str) -> None:
        """To the machine's console, once in a row."""
        if message != self._complained:
            self._complained = message
            print(f"srift: {message}", flush=True)
