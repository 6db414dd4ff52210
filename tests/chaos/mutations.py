"""Guards taken out one at a time, each with the scenario in which that must be noticed.

A check that cannot fail is none.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import tasks.collect
import tasks.providers.ec2_ending
import tasks.providers.ec2_machines
import tasks.providers.ec2_reaper
import tasks.providers.ec2_userdata
import tasks.serve
from models.caps import Allowance
from tasks.providers.ec2_machines import Ec2Machines
from tasks.providers.ec2_machines_api import MachinesApi
from tests.chaos.controller import Campaigns
from tests.chaos.scenario import Death, Order, Scenario, Trouble
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


def _longer(**words: Any) -> str:
    text = tasks.providers.ec2_userdata.user_data(**words)
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


MUTATIONS = (
    Mutation(
        name="nothing is terminated",
        scenario=_hangs,
        without=_out(MachinesApi, "terminate", lambda *_: None),
        says="alive after the last reaping",
    ),
    Mutation(
        name="machines do not end themselves at their deadline",
        scenario=lambda: _killed("disk:mailbox", 1, 9000.0),
        without=_out(tasks.providers.ec2_machines, "user_data", _longer),
        says="alive past the deadline",
    ),
    Mutation(
        name="a dead controller's mailbox is not fetched",
        scenario=lambda: _killed("disk:appear", 20, 60.0),
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
        without=_out(tasks.serve, "allowance", lambda *_: Allowance(deadline_s=14_400.0, worst_usd=0.0)),
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
        without=_out(tasks.providers.ec2_reaper, "hear_out", lambda *_: None),
        says="was uploaded, and the warehouse has interrupted",
    ),
    Mutation(
        name="machines that were never heard of are not paid for",
        scenario=lambda: _killed("ec2:create_fleet", 0, 9000.0),
        without=_out(tasks.providers.ec2_ending, "_unheard", lambda *_: []),
        says="and the ledger says 0.0",
    ),
    Mutation(
        name="refusals are no rows",
        scenario=lambda: Scenario(seed=3, orders=(ONE,), capacity={("us-east-1a", "spot"): 0}),
        without=_out(tasks.collect, "_refused", lambda *_: []),
        says="was refused a rung, and no row says so",
    ),
)
