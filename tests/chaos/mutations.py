"""Guards taken out one at a time, each with the scenario in which that must be noticed.

A check that cannot fail is none.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import tasks.campaign.campaign
import tasks.execution.collect
import tasks.execution.job
import tasks.execution.mailbox
import tasks.execution.record_loader
import tasks.providers.ec2.cluster
import tasks.providers.ec2.machines
import tasks.providers.ec2.mailbox_s3
import tasks.providers.ec2.reaper
import tasks.providers.ec2.termination
import tasks.providers.ec2.userdata
from models.campaign.budget import Allowance
from models.domain.cluster import Cluster
from tasks.node.record import ANY, Devices
from tasks.providers.base import LeaseUnreadable, NotSwept
from tasks.providers.ec2.api import Ec2Api
from tasks.providers.ec2.machines import Ec2Machines
from tasks.providers.ec2.provider import Ec2Provider
from tasks.providers.ec2.userdata import NodeBoot
from tasks.providers.leases import LeaseFolder
from tests.chaos.controller import Campaigns
from tests.chaos.scenario import (
    TOO_MANY_FILES,
    UNKNOWN_KEY,
    ZONES,
    Death,
    Order,
    Scenario,
    Trouble,
    Visit,
    sweeps,
)
from tests.fake_ec2 import Fault
from warehouse import append

ONE = Order(types=((1, "g4dn.xlarge"),), market="spot", runs=(("profile", (0,)), ("train", (0,))))


@dataclass(frozen=True, slots=True)
class Mutation:
    """`without()` takes the guard out; then `says` is among the complaints about `scenario()`, and without it none."""

    name: str
    says: str
    scenario: Callable[[], Scenario]
    without: Callable[[], AbstractContextManager[Any]]
    prepare: Callable[[Campaigns], object] | None = None


def _hangs() -> Scenario:
    return Scenario(
        seed=1,
        orders=(ONE,),
        troubles=[Trouble(machine=0, kind="hangs", stage="ready", after_s=3.0)],
    )


def _killed(name: str, nth: int, away_s: float, after: bool = True, **words: Any) -> Scenario:
    return Scenario(
        seed=2,
        orders=(ONE,),
        deaths=[Death(name=name, nth=nth, after=after, away_s=away_s)],
        **words,
    )


def _uploaded_late() -> Scenario:
    late = [Trouble(machine=0, kind="uploads fail")]
    death = Death(name="disk:appear", nth=30, after=True, away_s=2.0)
    return Scenario(seed=22, orders=(ONE,), troubles=late, deaths=[death])


def _without_devices(kind: str) -> Scenario:
    return Scenario(seed=4, orders=(ONE,), troubles=[Trouble(machine=0, kind=kind)])


def _anything(cluster: Cluster, *, emulated: bool) -> tuple[Devices, ...]:
    return tuple(Devices(name=ANY, count=one.instance_type.devices) for one in cluster.members)


def _longer(boot: NodeBoot, deadline_s: float) -> str:
    text = tasks.providers.ec2.userdata.user_data(boot, deadline_s)
    return re.sub(r"shutdown -h \+\d+", "shutdown -h +600", text)


@contextmanager
def _without_keys() -> Iterator[None]:
    keyless = partial(append.append, keyed=False)
    with (
        patch.object(append, "append", keyless),
        patch.object(tasks.execution.record_loader, "append", keyless),
    ):
        yield


def _loosen(campaigns: Campaigns) -> None:
    with campaigns.warehouse.transact() as connection:
        for table in ("raw_runs", "raw_leases", "raw_machines"):
            connection.execute(f"create or replace table {table} as select * from {table}")


def _out(target: Any, name: str, instead: Any) -> Callable[[], AbstractContextManager[Any]]:
    return lambda: patch.object(target, name, instead)


def _fetched(self: Ec2Machines, lease: Any, *, pulls: int = 1) -> Any:
    return replace(lease, fetched=True)


PAIR = Order(
    types=((2, "g4dn.12xlarge"),),
    market="spot",
    runs=(("train", (0, 1)), ("profile", (0,)), ("train", (0, 1))),
)


def _visited(why: str) -> Scenario:
    return Scenario(seed=4, orders=(ONE,), visits=[Visit(after_s=30.0, why=why)])


def _blind() -> Scenario:
    expired = Fault(action="ec2:DescribeInstances", code="ExpiredToken", when=sweeps)
    return Scenario(seed=5, orders=(ONE,), faults=[expired])


def _not_found(action: str, code: str) -> Scenario:
    return Scenario(seed=6, orders=(ONE,), faults=[Fault(action=action, code=code)])


def _troubled(kind: str, stage: str = "running") -> Scenario:
    return Scenario(seed=7, orders=(PAIR,), troubles=[Trouble(machine=0, kind=kind, stage=stage)])


def _seeing(self: Ec2Provider, now: Any, *, all_of_them: bool = False) -> list[str]:
    try:
        return _REAP(self, now, all_of_them=all_of_them)
    except NotSwept as error:
        return error.done


def _absent(self: LeaseFolder[Any], lease_id: str) -> Any:
    try:
        return _READ(self, lease_id)
    except LeaseUnreadable:
        return None


def _in_order(found: Any, key: Any = None) -> list[Any]:
    return list(found) if key else sorted(found)


_REAP, _READ, _READ_ALL = Ec2Provider.reap, LeaseFolder.read, LeaseFolder.read_all


MUTATIONS = (
    Mutation("nothing is terminated", "alive after the last reaping",
             _hangs, _out(Ec2Api, "terminate", lambda *_: set())),
    Mutation("machines do not end themselves at their deadline", "alive past the deadline",
             lambda: _killed("disk:mailbox", 1, 9000.0), _out(tasks.providers.ec2.machines, "user_data", _longer)),
    Mutation("a dead controller's mailbox is not fetched", "was uploaded and is 0 times",
             lambda: _killed("disk:appear", 18, 60.0), _out(Ec2Machines, "fetched", _fetched)),
    Mutation("what is loaded again is loaded twice", "is 2 times in the",
             lambda: _killed("warehouse:commit", 0, 60.0), _without_keys, prepare=_loosen),
    Mutation("caps are not asked", "spent $",
             lambda: _killed("disk:mailbox", 1, 20_000.0, cap_usd=2.5),
             _out(tasks.campaign.campaign, "allowance", lambda *_: Allowance(deadline_s=14_400.0, worst_usd=0.0))),
    Mutation("machines that end are not heard out", "was uploaded, and the warehouse has interrupted",
             _uploaded_late, _out(tasks.providers.ec2.reaper, "await_shutdown", lambda *_: None)),
    Mutation("machines that were never heard of are not paid for", "and the ledger says 0.0",
             lambda: _killed("ec2:create_fleet", 0, 9000.0),
             _out(tasks.providers.ec2.termination, "_never_seen", lambda *_: [])),
    Mutation("refusals are no rows", "was refused a rung, and no row says so",
             lambda: Scenario(seed=3, orders=(ONE,), capacity={(zone, "spot"): 0 for zone in ZONES}),
             _out(tasks.execution.collect, "_refusal_rows", lambda *_: [])),
    Mutation("a reaper that could not look says that all is well", "though the reaper could not look through a region",
             _blind, _out(Ec2Provider, "reap", _seeing)),
    Mutation("a lease with a key that nobody knows is none", "ended as orphans, and their controller lived",
             lambda: _visited(UNKNOWN_KEY), _out(LeaseFolder, "read", _absent)),
    Mutation("a lease that cannot be opened is none", "ended as orphans, and their controller lived",
             lambda: _visited(TOO_MANY_FILES), _out(LeaseFolder, "read", _absent)),
    Mutation("machines are bought beside a lease that cannot be read",
             "machines were bought beside a lease that cannot be read",
             lambda: _killed("ec2:create_fleet", 0, 9000.0, unreadable=True),
             _out(LeaseFolder, "read_all", lambda self: (_READ_ALL(self)[0], {}))),
    Mutation("what was just made and is not found yet is given up", "was given up for what it had only just made",
             lambda: _not_found("ec2:CreateFleet", "InvalidLaunchTemplateName.NotFoundException"),
             _out(Ec2Api, "when_visible", lambda self, call: call())),
    Mutation("records are not counted first", "was uploaded, and the warehouse has failed",
             lambda: _troubled("floods"),
             lambda: patch.object(tasks.providers.ec2.mailbox_s3, "sorted", _in_order, create=True)),
    Mutation("names with a colon are taken, and so the detour below another machine's folder",
             "and every machine had spoken",
             lambda: _troubled("floods", "ready"),
             _out(tasks.providers.ec2.mailbox_s3, "_NAME", re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+:/-]*"))),
    Mutation("a notice may be nested as deeply as it likes", "RecursionError",
             lambda: _troubled("nests"), _out(tasks.providers.ec2.cluster, "json_of_node", json.loads)),
    Mutation("a heartbeat may be nested as deeply as it likes", "RecursionError",
             lambda: _troubled("nests"), _out(tasks.execution.mailbox, "json_of_node", json.loads)),
    Mutation("a record may be nested as deeply as it likes", "was taken for a measurement",
             lambda: _troubled("nests"), _out(tasks.execution.record_loader, "json_of_node", json.loads)),
    Mutation("machines are not given which devices they were bought for",
             "on a processor where a GPU was bought, and counts",
             lambda: _without_devices("no devices"), _out(tasks.execution.job, "expected_devices", _anything)),
    Mutation("nobody looks at the device that a record names", "on a processor where a GPU was bought, and counts",
             lambda: _without_devices("wrong device"),
             _out(tasks.execution.record_loader, "wrong_device", lambda *_: "")),
)  # fmt: skip
