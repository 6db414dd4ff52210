"""Keeps hosts as moto says that instances are: starts and ends them, acts on what machines and the
market ask for.
"""

from __future__ import annotations

import base64
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from moto.ec2.models.instance_types import INSTANCE_TYPES

from tasks.providers.ec2.catalogue import baseline_gbps
from tests.world.account import Account
from tests.world.hosts import Hosts, Machine

_LOOK_S = 0.05
_UNKNOWN_GBPS = 1.0


class Keeper:
    """One thread that looks often; `look` makes it look now. `came` and `went` hear of hosts by
    their ids.
    """

    def __init__(
        self,
        account: Account,
        hosts: Hosts,
        *,
        came: Callable[[str], None],
        went: Callable[[str], None],
    ) -> None:
        self._account, self._hosts = account, hosts
        self._came, self._went = came, went
        self._off_at: dict[str, float] = {}  # unix moment at which a machine shuts down
        self._without: set[str] = set()  # instances that never get a host
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="emulated machines", daemon=True)
        self.faults: list[str] = []

    def open(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def look(self) -> None:
        """Hosts of instances that are over are gone when this returns; new ones come soon."""
        known = set(
            self._hosts.known()
        )  # first: a host that comes while this looks is not taken for one that is over
        for instance_id in known - {one.id for one in self._account.instances("running")}:
            self._end(instance_id)

    def _run(self) -> None:
        while not self._closed.wait(_LOOK_S):
            try:
                self._shut_down()
                self.look()
                self._boot()
            except (
                Exception
            ) as error:  # the world goes on, and the test may ask why a machine did not come
                self.faults.append(repr(error))

    def _boot(self) -> None:
        started = set(self._hosts.known()) | self._without
        for one in self._account.instances("running"):
            if one.id in started or self._closed.is_set():
                continue
            self._without.add(
                one.id
            )  # until it is there: a host that cannot be made is not tried for ever
            try:
                self._hosts.start(self._machine(one))
                self._came(one.id)
            except (OSError, KeyError):
                if one.id in {other.id for other in self._account.instances("running")}:
                    raise
                self._end(one.id)  # it was terminated while it was being made
            self._without.discard(one.id)

    def _shut_down(self) -> None:
        for instance_id in self._hosts.known():
            asked = self._hosts.folder(instance_id) / "shared" / "shutdown"
            minutes = _taken(asked)
            if minutes == "never":
                self._off_at.pop(instance_id, None)
            elif minutes:
                self._off_at[instance_id] = time.time() + int(minutes) * 60.0
            if time.time() >= self._off_at.get(instance_id, float("inf")):
                self._account.power_off(instance_id)

    def _end(self, instance_id: str) -> None:
        self._hosts.end(instance_id)
        self._went(instance_id)
        self._off_at.pop(instance_id, None)

    def _machine(self, one: Any) -> Machine:
        try:
            rate = baseline_gbps(INSTANCE_TYPES[one.instance_type])
        except ValueError:
            rate = _UNKNOWN_GBPS
        return Machine(
            instance_id=one.id,
            region=one.region_name,
            address=str(one.private_ip),
            bandwidth_gbps=rate,
            user_data=base64.b64decode(str(one.user_data or "")) or b"#!/bin/sh\n",
        )


def _taken(file: Path) -> str:
    """What a machine left there, which is taken away; empty where there is nothing."""
    with suppress(FileNotFoundError):
        text = file.read_text().strip()
        file.unlink()
        return text
    return ""
