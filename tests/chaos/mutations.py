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
import tasks.providers.ec2.launch
import tasks.providers.ec2.machines
import tasks.providers.ec2.mailbox_s3
import tasks.providers.ec2.reaper
import tasks.providers.ec2.survey
import tasks.providers.ec2.termination
import tasks.providers.ec2.userdata
from models.campaign.budget import Allowance
from models.domain.cluster import Cluster
from tasks.node.record import ANY, Devices
from tasks.providers.base import LeaseUnreadable, NotSwept
from tasks.providers.ec2.api import Ec2Api
from tasks.providers.ec2.leases import Asked
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
    many_tries,
    sweeps,
)
from tests.fake_ec2 import Fault
from warehouse import append

ONE = Order(types=((1, "g4dn.xlarge"),), market="spot", runs=(("profile", (0,)), ("train", (0,))))
Prepare = Callable[[Campaigns], object] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutation:
    """`without()` takes the guard out; then `says` is among the complaints about `scenario()`, and without it none."""

    name: str
    scenario: Callable[[], Scenario]
    without: Callable[[], AbstractContextManager[Any]]
    says: str
    prepare: Prepare = None


def _hangs() -> Scenario:
    return Scenario(seed=1, orders=(ONE,), troubles=[Trouble(machine=0, kind="hangs", stage="ready", after_s=3.0)])


def _killed(name: str, nth: int, away_s: float, after: bool = True, **words: Any) -> Scenario:
    return Scenario(seed=2, orders=(ONE,), deaths=[Death(name=name, nth=nth, after=after, away_s=away_s)], **words)


def _many_tries() -> Scenario:
    one = Scenario(seed=8, orders=(ONE,), lag_s=60.0)
    many_tries(one, "RequestLimitExceeded")
    return one


def _without_devices(kind: str) -> Scenario:
    return Scenario(seed=4, orders=(ONE,), troubles=[Trouble(machine=0, kind=kind)])


def _anything(cluster: Cluster, *, emulated: bool) -> tuple[Devices, ...]:
    return tuple(Devices(name=ANY, count=one.instance_type.devices) for one in cluster.members)


def _longer(boot: NodeBoot, deadline_s: float) -> str:
    text = tasks.providers.ec2.userdata.user_data(boot, deadline_s)
    return re.sub(r"shutdown -h \+\d+", "shutdown -h +600", text)


@contextmanager
def _without_keys() -> Iterator[None]:
    with patch.object(append, "append", partial(append.append, keyed=False)):
        yield


def _loosen(campaigns: Campaigns) -> None:
    with campaigns.warehouse.transact() as connection:
        for table in ("raw_records", "raw_leases", "raw_machines"):
            connection.execute(f"create or replace table {table} as select * from {table}")


def _out(target: Any, name: str, instead: Any) -> Callable[[], AbstractContextManager[Any]]:
    return lambda: patch.object(target, name, instead)


def _fetched(self: Ec2Machines, lease: Any, *, patient: bool) -> Any:
    return replace(lease, fetched=True)


PAIR = Order(
    types=((2, "g4dn.12xlarge"),), market="spot", runs=(("train", (0, 1)), ("profile", (0,)), ("train", (0, 1)))
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


def _without_retries(api: Any, ask: Callable[[], Any], *, new: bool = False) -> Any:
    return tasks.providers.ec2.termination.with_retries(api, ask)


def _in_order(found: Any, key: Any = None) -> list[Any]:
    return list(found) if key else sorted(found)


_REAP, _READ, _READ_ALL = Ec2Provider.reap, LeaseFolder.read, LeaseFolder.read_all


def _first_by_id(subnets: Any, *_: Any) -> dict[str, str]:
    return {one["AvailabilityZone"]: one["SubnetId"] for one in sorted(subnets, key=lambda one: one["SubnetId"])[::-1]}


MUTATIONS = (
    Mutation(
        name="nothing is terminated",
        scenario=_hangs,
        without=_out(Ec2Api, "terminate", lambda *_: set()),
        says="alive after the last reaping",
    ),
    Mutation(
        name="machines do not end themselves at their deadline",
        scenario=lambda: _killed("disk:mailbox", 1, 9000.0),
        without=_out(tasks.providers.ec2.machines, "user_data", _longer),
        says="alive past the deadline",
    ),
    Mutation(
        name="a dead controller's mailbox is not fetched",
        scenario=lambda: _killed("disk:appear", 18, 60.0),
        without=_out(Ec2Machines, "fetched", _fetched),
        says="was uploaded and is 0 times",
    ),
    Mutation(
        name="what is loaded again is loaded twice",
        scenario=lambda: _killed("warehouse:commit", 0, 60.0),
        without=_without_keys,
        says="is 2 times in the",
        prepare=_loosen,
    ),
    Mutation(
        name="caps are not asked",
        scenario=lambda: _killed("disk:mailbox", 1, 20_000.0, cap_usd=2.5),
        without=_out(tasks.campaign.campaign, "allowance", lambda *_: Allowance(deadline_s=14_400.0, worst_usd=0.0)),
        says="spent $",
    ),
    Mutation(
        name="machines that end are not heard out",
        scenario=lambda: Scenario(
            seed=22,
            orders=(ONE,),
            troubles=[Trouble(machine=0, kind="uploads fail")],
            deaths=[Death(name="disk:appear", nth=30, after=True, away_s=2.0)],
        ),
        without=_out(tasks.providers.ec2.reaper, "await_shutdown", lambda *_: None),
        says="was uploaded, and the warehouse has interrupted",
    ),
    Mutation(
        name="machines that were never heard of are not paid for",
        scenario=lambda: _killed("ec2:create_fleet", 0, 9000.0),
        without=_out(tasks.providers.ec2.termination, "_unheard", lambda *_: []),
        says="and the ledger says 0.0",
    ),
    Mutation(
        name="a request counts from the first of its launch",
        scenario=_many_tries,
        without=_out(Asked, "newest_at", property(lambda self: self.asked_at)),
        says="and the ledger says 0.0",
    ),
    Mutation(
        name="refusals are no rows",
        scenario=lambda: Scenario(seed=3, orders=(ONE,), capacity={(zone, "spot"): 0 for zone in ZONES}),
        without=_out(tasks.execution.collect, "_refusal_rows", lambda *_: []),
        says="was refused a rung, and no row says so",
    ),
    Mutation(
        name="a reaper that could not look says that all is well",
        scenario=_blind,
        without=_out(Ec2Provider, "reap", _seeing),
        says="though the reaper could not look through a region",
    ),
    Mutation(
        name="a lease with a key that nobody knows is none",
        scenario=lambda: _visited(UNKNOWN_KEY),
        without=_out(LeaseFolder, "read", _absent),
        says="ended as orphans, and their controller lived",
    ),
    Mutation(
        name="a lease that cannot be opened is none",
        scenario=lambda: _visited(TOO_MANY_FILES),
        without=_out(LeaseFolder, "read", _absent),
        says="ended as orphans, and their controller lived",
    ),
    Mutation(
        name="machines are bought beside a lease that cannot be read",
        scenario=lambda: _killed("ec2:create_fleet", 0, 9000.0, unreadable=True),
        without=_out(LeaseFolder, "read_all", lambda self: (_READ_ALL(self)[0], {})),
        says="machines were bought beside a lease that cannot be read",
    ),
    Mutation(
        name="what was just made and is not found yet is given up",
        scenario=lambda: _not_found("ec2:CreateFleet", "InvalidLaunchTemplateName.NotFoundException"),
        without=_out(tasks.providers.ec2.launch, "with_retries", _without_retries),
        says="was given up for what it had only just made",
    ),
    Mutation(
        name="records are not counted first",
        scenario=lambda: _troubled("floods"),
        without=lambda: patch.object(tasks.providers.ec2.mailbox_s3, "sorted", _in_order, create=True),
        says="was uploaded, and the warehouse has failed",
    ),
    Mutation(
        name="names with a colon are taken, and so the detour below another machine's folder",
        scenario=lambda: _troubled("floods", "ready"),
        without=_out(tasks.providers.ec2.mailbox_s3, "_NAME", re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+:/-]*")),
        says="and every machine had spoken",
    ),
    Mutation(
        name="a notice may be nested as deeply as it likes",
        scenario=lambda: _troubled("nests"),
        without=_out(tasks.providers.ec2.cluster, "json_of_node", json.loads),
        says="RecursionError",
    ),
    Mutation(
        name="a heartbeat may be nested as deeply as it likes",
        scenario=lambda: _troubled("nests"),
        without=_out(tasks.execution.mailbox, "json_of_node", json.loads),
        says="RecursionError",
    ),
    Mutation(
        name="a record may be nested as deeply as it likes",
        scenario=lambda: _troubled("nests"),
        without=_out(tasks.execution.record_loader, "json_of_node", json.loads),
        says="was taken for a measurement",
    ),
    Mutation(
        name="machines are not told which devices they were bought for",
        scenario=lambda: _without_devices("no devices"),
        without=_out(tasks.execution.job, "expected_devices", _anything),
        says="on a processor where a GPU was bought, and counts",
    ),
    Mutation(
        name="nobody looks at the device that a record names",
        scenario=lambda: _without_devices("wrong device"),
        without=_out(tasks.execution.record_loader, "wrong_device", lambda *_: ""),
        says="on a processor where a GPU was bought, and counts",
    ),
    Mutation(
        name="the first subnet of a zone is taken, wherever it leads",
        scenario=lambda: Scenario(seed=4, orders=(ONE,), pairs=True),
        without=_out(tasks.providers.ec2.survey, "_one_a_zone", _first_by_id),
        says="launched into a subnet without a way out",
    ),
)
