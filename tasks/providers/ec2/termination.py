"""Ends machines, looks whether they ended, and says so if they did not.

What cannot be ended stays on the lease for the reaper. Machines end themselves at their deadline.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta

from tasks.providers.ec2.api import ALIVE, Answer, Ec2Api
from tasks.providers.ec2.errors import AwsRefused
from tasks.providers.ec2.leases import Ec2Lease, Ec2Machine, utc

SHOWN = timedelta(seconds=120)  # EC2 shows machines by their tags some time after their launch
SETTLED = SHOWN + timedelta(seconds=240)  # boto3 may send a request again for four minutes
FORGOTTEN = timedelta(minutes=45)  # EC2 shows a terminated machine for about an hour
LATEST = timedelta(seconds=300)  # a machine's own timer may fire late: rounding, and its boot
LAST_WORDS_S = 25.0  # a courier uploads for twenty seconds after it was asked to stop
_LOOKS = 5
_LOOK_EVERY_S = 2.0
_ENDED_BY_CALL = "Client.UserInitiatedShutdown"
_GMT = re.compile(r"\((\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) GMT\)")
_LEFTOVERS = (  # they cost nothing, but fill quotas
    ("LaunchTemplates", "ec2:DescribeLaunchTemplates", "ec2:DeleteLaunchTemplate",
     "LaunchTemplateName"),
    ("PlacementGroups", "ec2:DescribePlacementGroups", "ec2:DeletePlacementGroup", "GroupName"),
    ("SecurityGroups", "ec2:DescribeSecurityGroups", "ec2:DeleteSecurityGroup", "GroupId"),
)  # fmt: skip


def lease_tags(lease_id: str, deployment: str, controller: str) -> dict[str, str]:
    """Tags by which all machines of a lease are found."""
    return {"srift:lease": lease_id, "srift:deployment": deployment, "srift:controller": controller}


def end_machines(api: Ec2Api, lease: Ec2Lease, tags: dict[str, str]) -> tuple[Ec2Lease, str]:
    """End every machine of the lease; the lease as known now, and why some may live on, or ""."""
    region, now = lease.region, api.clock.now()
    try:
        shown = api.instances(region, tags=tags)
        lease = lease.with_machines(*_strays(lease, shown))
        lease = lease.with_machines(*_never_seen(lease, now))
        alive = {
            str(described["InstanceId"])
            for described in shown
            if described["State"]["Name"] in ALIVE
        }
        ids = sorted(
            alive | {machine.instance_id for machine in lease.machines if not machine.ended_at}
        )
        known = api.instances(region, ids=ids) if ids else []
        young = {
            machine.instance_id for machine in lease.machines if now < machine.launched_at + SHOWN
        }
        stays = end_these(api, region, ids, young)
    except AwsRefused as error:
        return lease, f"machines of lease {lease.lease_id} could not be ended: {error}"
    if stays:
        return lease, f"machines of lease {lease.lease_id} do not end: {', '.join(sorted(stays))}"
    gone = {
        str(described["InstanceId"]): described
        for described in known
        if described["State"]["Name"] not in ALIVE
    }
    lease = _ended(lease, gone, alive, api.clock.now())
    return lease, not_answered(lease) if unsettled(lease, api.clock.now()) else ""


def unsettled(lease: Ec2Lease, now: datetime) -> bool:
    """Whether a request without an answer may still be served."""
    return any(
        not request.answered and now < request.asked_at + SETTLED for request in lease.requests
    )


def not_answered(lease: Ec2Lease) -> str:
    return f"a request of lease {lease.lease_id} was not answered, and machines may still come"


def await_shutdown(api: Ec2Api, lease: Ec2Lease) -> None:
    """Wait until terminated machines are down: until then they may upload measurements."""
    ids = [machine.instance_id for machine in lease.machines]
    give_up = api.clock.now() + timedelta(seconds=LAST_WORDS_S)
    while ids and api.clock.now() < give_up:
        with suppress(AwsRefused):
            found = api.instances(lease.region, ids=ids, states=("shutting-down",))
            if all(
                described.get("StateReason", {}).get("Code") != _ENDED_BY_CALL
                for described in found
            ):
                return
        api.clock.sleep(_LOOK_EVERY_S)


def end_these(api: Ec2Api, region: str, ids: Iterable[str], young: Iterable[str] = ()) -> set[str]:
    """Terminate, look, and terminate again; returns those that are alive. Raises AwsRefused.

    `young` machines that EC2 does not know are not gone: EC2 does not show them yet.
    """
    left = sorted(set(ids))
    for look in range(_LOOKS):
        if not left:
            break
        if look:
            api.clock.sleep(_LOOK_EVERY_S)
        unknown = api.terminate(region, left)
        alive = api.instances(region, ids=left, states=ALIVE)
        left = sorted({str(described["InstanceId"]) for described in alive} | (unknown & {*young}))
    return set(left)


def until(lease: Ec2Lease) -> str:
    return f"they end themselves by {lease.deadline_at:%Y-%m-%d %H:%M} UTC; `srift reap` ends them"


def tags_of(described: Answer) -> dict[str, str]:
    return {str(tag["Key"]): str(tag["Value"]) for tag in described.get("Tags", ())}


def tidy(
    api: Ec2Api, region: str, tags: Mapping[str, str], over: Callable[[dict[str, str]], bool]
) -> None:
    """Delete groups and templates with `tags` for which `over(tags)`. Failures are ignored."""
    filters = [{"Name": f"tag:{name}", "Values": [value]} for name, value in tags.items()]
    with suppress(AwsRefused):
        for key, describe, delete, name in _LEFTOVERS:
            for leftover in list(api.ask_all(key, describe, region, Filters=filters)):
                if over(tags_of(leftover)):
                    api.ask_unless(("gone", "busy"), delete, region, **{name: leftover[name]})


def _strays(lease: Ec2Lease, shown: Iterable[Answer]) -> list[Ec2Machine]:
    """Machines with the lease's tags that the controller never heard of. They have no rank."""
    known = {machine.instance_id for machine in lease.machines}
    strays = []
    for described in shown:
        group = tags_of(described).get("srift:node-group", "")
        request = lease.request_of(group)
        if described["InstanceId"] in known or request is None:
            continue
        strays.append(
            Ec2Machine(
                rank=-1,
                instance_id=str(described["InstanceId"]),
                instance_type=str(described["InstanceType"]),
                market="spot" if described.get("InstanceLifecycle") == "spot" else "on-demand",
                zone=str(described.get("Placement", {}).get("AvailabilityZone", "")),
                usd_per_hour=request.usd_per_hour,
                launched_at=utc(described["LaunchTime"]),
                current=False,
                group=group,
            )
        )
    return strays


def _never_seen(lease: Ec2Lease, now: datetime) -> list[Ec2Machine]:
    """Machines that may have come and gone unseen, counted until their latest end.

    Too much rather than too little: the caps must hold.
    """
    seen = {machine.group for machine in lease.machines}
    lost = (
        request
        for request in lease.requests
        if not request.answered and now > request.asked_at + FORGOTTEN and request.group not in seen
    )
    return [
        Ec2Machine(
            rank=-1,
            instance_id=f"unheard-{machine.group}-{number}",
            instance_type="",
            market="",
            zone="",
            usd_per_hour=machine.usd_per_hour,
            launched_at=machine.asked_at,
            ended_at=min(now, lease.deadline_at + LATEST),
            current=False,
            group=machine.group,
        )
        for machine in lost
        for number in range(machine.size)
    ]


def _ended(lease: Ec2Lease, gone: dict[str, Answer], alive: set[str], now: datetime) -> Ec2Lease:
    """Every machine with its end: now, or the moment that EC2 states, or its latest."""
    machines = []
    for machine in lease.machines:
        if machine.instance_id in alive:
            machine = replace(machine, ended_at=now)
        elif machine.ended_at is None:
            moment = _moment(gone.get(machine.instance_id, {})) or _latest(lease, machine)
            machine = replace(machine, ended_at=max(machine.launched_at, min(now, moment)))
        machines.append(machine)
    return replace(lease, machines=tuple(machines))


def _latest(lease: Ec2Lease, machine: Ec2Machine) -> datetime:
    """When the machine's own timer ends it; the timer starts with the machine."""
    request = lease.request_of(machine.group)
    late = machine.launched_at - request.asked_at if request is not None else timedelta(0)
    return lease.deadline_at + max(timedelta(0), late) + LATEST


def _moment(described: Answer) -> datetime | None:
    """The moment in "User initiated (2026-11-20 03:17:00 GMT)"."""
    found = _GMT.search(str(described.get("StateTransitionReason", "")))
    return datetime.strptime(found[1], "%Y-%m-%d %H:%M:%S").replace(tzinfo=UTC) if found else None
