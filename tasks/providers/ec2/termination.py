"""Ending machines, whoever launched them: asked until it is done, looked at afterwards, said plainly where it fails.

What cannot be ended now stays on the lease, so that the reaper tries again; the machines end themselves at their
deadline all the same.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TypeVar

from tasks.providers.ec2.api import ALIVE, Answer, Ec2Api
from tasks.providers.ec2.errors import AwsRefused
from tasks.providers.ec2.leases import Ec2Lease, Machine, utc

BACKOFF_S = (1.0, 2.0, 4.0, 8.0, 16.0)
SETTLED = timedelta(
    seconds=120
)  # EC2 shows a machine by its tags some seconds after it was asked for
FORGETS = timedelta(minutes=45)  # EC2 goes on showing a terminated machine for about an hour
LATEST = timedelta(
    seconds=300
)  # that a machine's timer may fire late: a minute's rounding, and its boot
LAST_WORDS_S = 25.0  # a courier that is asked to go down carries for twenty seconds what it has
_LOOKS = 5
_LOOK_EVERY_S = 2.0
_ENDED = "Client.UserInitiatedShutdown"
_GMT = re.compile(r"\((\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) GMT\)")
_LEFTOVERS = (  # groups and templates cost nothing, and fill up quotas
    (
        "LaunchTemplates",
        "ec2:DescribeLaunchTemplates",
        "ec2:DeleteLaunchTemplate",
        "LaunchTemplateName",
    ),
    ("PlacementGroups", "ec2:DescribePlacementGroups", "ec2:DeletePlacementGroup", "GroupName"),
    ("SecurityGroups", "ec2:DescribeSecurityGroups", "ec2:DeleteSecurityGroup", "GroupId"),
)
T = TypeVar("T")


def with_retries(api: Ec2Api, ask: Callable[[], T], *, new: bool = False) -> T:
    """`ask()`, again and again with longer pauses while AWS asks for fewer requests or does not answer. Bounded.

    `new`: it names what this lease has just made, which EC2 may not find yet: "gone" is asked again too.
    """
    for pause_s in BACKOFF_S:
        try:
            return ask()
        except AwsRefused as error:
            if error.kind not in (
                ("throttled", "unsure", "gone") if new else ("throttled", "unsure")
            ):
                raise
        api.clock.sleep(pause_s)
    return ask()


def lease_tags(lease_id: str, deployment: str, controller: str) -> dict[str, str]:
    """By which a lease's machines are found, heard of or not."""
    return {"srift:lease": lease_id, "srift:deployment": deployment, "srift:controller": controller}


def end_machines(api: Ec2Api, lease: Ec2Lease, tags: dict[str, str]) -> tuple[Ec2Lease, str]:
    """The lease with every machine of it ended, and ""; or with what is known, and why some may live on."""
    region = lease.region
    try:
        shown = with_retries(api, lambda: api.instances(region, tags=tags))
        lease = lease.with_machines(*(_stray(lease, one) for one in shown if _unknown(lease, one)))
        lease = lease.with_machines(*_unheard(lease, api.clock.now()))
        found = [one for one in shown if one["State"]["Name"] in ALIVE]
        alive = {str(one["InstanceId"]) for one in found}
        ids = sorted(alive | {one.instance_id for one in lease.machines if not one.ended_at})
        known = with_retries(api, lambda: api.instances(region, ids=ids)) if ids else []
        gone = [one for one in known if one["State"]["Name"] not in ALIVE]
        young = {
            one.instance_id for one in lease.machines if api.clock.now() < one.launched_at + SETTLED
        }
        stays = end_these(api, region, ids, young)
    except AwsRefused as error:
        return lease, f"machines of lease {lease.lease_id} in {region} could not be ended ({error})"
    if stays:
        return (
            lease,
            f"machines of lease {lease.lease_id} in {region} do not end: {', '.join(sorted(stays))}",
        )
    lease = _ended(lease, {str(one["InstanceId"]): one for one in gone}, alive, api.clock.now())
    waiting = [
        one for one in lease.asked if not one.answered and api.clock.now() < one.newest_at + SETTLED
    ]
    return lease, not_answered(lease) if waiting else ""


def not_answered(lease: Ec2Lease) -> str:
    """Why a lease is kept of which no machine is known to live."""
    return f"EC2 did not answer a request of lease {lease.lease_id} in {lease.region}: it may still have been served"


def await_shutdown(api: Ec2Api, lease: Ec2Lease) -> None:
    """Wait until machines that were ended from outside are down: until then they may still upload what they measured.

    They cost nothing any more.
    """
    ids = [one.instance_id for one in lease.machines]
    give_up = api.clock.now() + timedelta(seconds=LAST_WORDS_S)
    while ids and api.clock.now() < give_up:
        try:
            found = api.instances(lease.region, ids=ids, states=("shutting-down",))
        except AwsRefused:
            found = [
                {"StateReason": {"Code": _ENDED}}
            ]  # nobody knows: the time is what there is to go by
        if all(one.get("StateReason", {}).get("Code") != _ENDED for one in found):
            return
        api.clock.sleep(_LOOK_EVERY_S)


def end_these(api: Ec2Api, region: str, ids: Iterable[str], young: Iterable[str] = ()) -> set[str]:
    """Terminate, look, and terminate again; those that are still alive then. Raises AwsRefused.

    One of `young` that EC2 does not know is not gone: it was launched a moment ago, and EC2 will know it.
    """
    left = sorted(set(ids))
    for look in range(_LOOKS):
        if not left:
            break
        if look:
            api.clock.sleep(_LOOK_EVERY_S)
        unknown = with_retries(api, partial(api.terminate, region, left))
        alive = with_retries(api, partial(api.instances, region, ids=left, states=ALIVE))
        left = sorted({str(one["InstanceId"]) for one in alive} | (unknown & {*young}))
    return set(left)


def until(lease: Ec2Lease) -> str:
    """When what cannot be ended ends itself."""
    return f"what still runs ends itself by {lease.deadline_at:%Y-%m-%d %H:%M} UTC; `srift reap` tries again before"


def tags_of(one: Answer) -> dict[str, str]:
    """Of an instance or a group."""
    return {str(tag["Key"]): str(tag["Value"]) for tag in one.get("Tags", ())}


def tidy(api: Ec2Api, region: str, deployment: str, over: Callable[[dict[str, str]], bool]) -> None:
    """Delete groups and templates of leases that are over, by their tags. What is still in use waits for another day.

    They cost nothing, so a failure is not reported.
    """
    filters = [{"Name": "tag:srift:deployment", "Values": [deployment]}]
    with suppress(AwsRefused):
        for key, describe, delete, name in _LEFTOVERS:
            for one in list(api.ask_all(key, describe, region, Filters=filters)):
                if over(
                    tags_of(one)
                ):  # one that is gone is no error, nor is one that its machines still leave
                    api.ask_unless(("gone", "busy"), delete, region, **{name: one[name]})


def _unknown(lease: Ec2Lease, one: Answer) -> bool:
    return all(machine.instance_id != one["InstanceId"] for machine in lease.machines)


def _stray(lease: Ec2Lease, one: Answer) -> Machine:
    """A machine that was asked for and not heard of. No rank is its."""
    asked = lease.request_of(tags_of(one).get("srift:node-group", ""))
    return Machine(
        rank=-1,
        instance_id=str(one["InstanceId"]),
        instance_type=str(one["InstanceType"]),
        market="spot" if one.get("InstanceLifecycle") == "spot" else "on-demand",
        zone=str(one.get("Placement", {}).get("AvailabilityZone", "")),
        usd_per_hour=asked.usd_per_hour if asked else None,
        launched_at=utc(one["LaunchTime"]),
        current=False,
        group=tags_of(one).get("srift:node-group", ""),
    )


def _unheard(lease: Ec2Lease, now: datetime) -> list[Machine]:
    """Machines that were asked for, not heard of, and may have come and gone since: counted to the last moment.

    Rather too much than too little: what nobody knows must not be spent a second time.
    """
    return [
        Machine(
            rank=-1,
            instance_id=f"unheard-{one.group}-{number}",
            instance_type="",
            market="",
            zone="",
            usd_per_hour=one.usd_per_hour,
            launched_at=one.asked_at,
            ended_at=min(now, lease.deadline_at + LATEST),
            current=False,
            group=one.group,
        )
        for one in lease.asked
        if not one.answered
        and now > one.asked_at + FORGETS
        and all(machine.group != one.group for machine in lease.machines)
        for number in range(one.size)
    ]


def _ended(lease: Ec2Lease, gone: dict[str, Answer], alive: set[str], now: datetime) -> Ec2Lease:
    """Every machine with the moment of its end: now, unless it was `gone` before; its latest where nobody knows."""
    machines = []
    for one in lease.machines:
        if one.instance_id in alive:
            one = replace(one, ended_at=now)
        elif one.ended_at is None:
            described = gone.get(one.instance_id)
            moment = (_moment(described) if described is not None else None) or _latest(lease, one)
            one = replace(one, ended_at=max(one.launched_at, min(now, moment)))
        machines.append(one)
    return replace(lease, machines=tuple(machines))


def _latest(lease: Ec2Lease, machine: Machine) -> datetime:
    """When its own timer ends it: its user-data counts from when it was first asked for, and it from its launch."""
    asked = lease.request_of(machine.group)
    late = machine.launched_at - asked.asked_at if asked is not None else timedelta(0)
    return lease.deadline_at + max(timedelta(0), late) + LATEST


def _moment(one: Answer) -> datetime | None:
    """The moment in "User initiated (2026-11-20 03:17:00 GMT)"."""
    found = _GMT.search(str(one.get("StateTransitionReason", "")))
    return datetime.strptime(found[1], "%Y-%m-%d %H:%M:%S").replace(tzinfo=UTC) if found else None
