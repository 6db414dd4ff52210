"""End machines, check that they ended, and report machines that still run.

If a machine does not end, its lease (the record of the launch) stays open, and the next `srift
reap` tries again. Every machine also ends itself at its deadline.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial

from .api import ALIVE, STILL_ALIVE, Answer, Ec2Api, Filters
from .errors import AwsRefused
from .leases import Ec2Lease, Ec2Machine

SHOWN = timedelta(seconds=120)  # EC2 may need this long to list a new machine with its tags
SETTLED = SHOWN + timedelta(seconds=240)  # boto3 may also retry a request for four minutes
FORGOTTEN = timedelta(minutes=45)  # EC2 lists a terminated machine for about an hour
LATEST = timedelta(seconds=300)  # boot and rounding may delay a machine's shutdown this long
LAST_WORDS_S = 25.0  # a machine uploads its last files for up to 20 s while it shuts down
_LOOKS = 5
_LOOK_EVERY_S = 2.0
_ENDED_BY_CALL = "Client.UserInitiatedShutdown"
_LEFTOVERS = (  # resources that cost nothing, but count toward AWS's quotas
    ("LaunchTemplates", "ec2:DescribeLaunchTemplates", "ec2:DeleteLaunchTemplate",
     "LaunchTemplateName"),
    ("PlacementGroups", "ec2:DescribePlacementGroups", "ec2:DeletePlacementGroup", "GroupName"),
    ("SecurityGroups", "ec2:DescribeSecurityGroups", "ec2:DeleteSecurityGroup", "GroupId"),
)  # fmt: skip


def end_machines(api: Ec2Api, lease: Ec2Lease) -> tuple[Ec2Lease, str]:
    """End every machine of the launch. Return (updated lease, problem).

    The problem says why some machines may still run; "" if all machines have ended.
    """
    region, now, name = lease.region, api.now(), f"lease {lease.lease_id}"
    try:
        shown = api.instances(region, lease.filters)
        lease = lease.with_machines(*_unheard(lease, shown, now))
        alive = {each for each, found in shown.items() if found["State"]["Name"] in ALIVE}
        running = {each.instance_id: each for each in lease.machines if not each.ended_at}
        young = [each for each, machine in running.items() if now < machine.launched_at + SHOWN]
        stays = end_these(api, region, alive | running.keys(), young)
    except AwsRefused as error:
        return lease, f"machines of {name} could not be ended: {error}"
    if stays:
        return lease, f"machines of {name} do not end: {', '.join(stays)}"
    now = api.now()
    for machine in lease.machines:
        ended_at = machine.ended_at or _latest(lease, machine)
        if machine.instance_id in alive:
            ended_at = now
        ended_at = max(machine.launched_at, min(now, ended_at))
        lease = lease.with_machines(replace(machine, ended_at=ended_at))
    return lease, not_answered(lease) if may_still_launch(lease, now) else ""


def may_still_launch(lease: Ec2Lease, now: datetime) -> bool:
    """Return True if AWS may still launch machines for an unanswered request of the lease."""
    return any(
        not request.answered and now < request.asked_at + SETTLED for request in lease.requests
    )


def not_answered(lease: Ec2Lease) -> str:
    return f"a request of lease {lease.lease_id} was not answered, and its machines may still start"


def await_shutdown(api: Ec2Api, lease: Ec2Lease) -> None:
    """Wait for at most LAST_WORDS_S seconds until machines that Srift terminated are shut down.

    Machines may upload measurements while they shut down.
    """
    ids = [machine.instance_id for machine in lease.machines]
    for _ in api.looks(_LOOK_EVERY_S, LAST_WORDS_S if ids else 0.0):
        with suppress(AwsRefused):
            down: Filters = {"instance-id": ids, "instance-state-name": "shutting-down"}
            found = api.instances(lease.region, down)
            if all(machine["StateReason"]["Code"] != _ENDED_BY_CALL for machine in found.values()):
                return


def end_these(api: Ec2Api, region: str, ids: Iterable[str], young: Sequence[str] = ()) -> list[str]:
    """Terminate the machines `ids`, and return the ids of machines that still run.

    Tries up to _LOOKS times.

    young: ids of new machines. A new machine that EC2 does not find counts as running.

    Raises AwsRefused if AWS refuses a request.
    """
    left = sorted(ids)
    for look in range(_LOOKS):
        if not left:
            break
        if look:
            api.sleep(_LOOK_EVERY_S)
        unknown = api.terminate(region, left)
        alive = api.instances(region, STILL_ALIVE | {"instance-id": left}).keys()
        left = sorted(alive | unknown & {*young})
    return left


def until(lease: Ec2Lease) -> str:
    """Return a sentence that says when the machines end themselves, and how to end them now."""
    return (
        f"the machines end themselves by {lease.deadline_at:%Y-%m-%d %H:%M} UTC; "
        "run `srift reap` to end them"
    )


def tags_of(described: Answer) -> dict[str, str]:
    """Return {name: value} of a resource's tags.

    described: the resource's description from a Describe action.
    """
    return {tag["Key"]: tag["Value"] for tag in described.get("Tags", ())}


def tidy(
    api: Ec2Api, region: str, filters: Filters, over: Callable[[dict[str, str]], bool]
) -> None:
    """Delete security groups, placement groups and launch templates that are no longer needed.

    filters: only resources that match these EC2 filters are deleted.
    over: a function of a resource's tags. It returns True if the resource is no longer needed.
    """
    with suppress(AwsRefused):
        for key, describe, delete, name in _LEFTOVERS:
            for leftover in api.described(key, describe, region, filters):
                if over(tags_of(leftover)):
                    api.ask_unless(("gone", "busy"), delete, region, **{name: leftover[name]})


def _unheard(lease: Ec2Lease, shown: Mapping[str, Answer], now: datetime) -> list[Ec2Machine]:
    """Return machines that are missing from the lease because EC2's response was lost.

    shown: {instance id: description} of the machines that EC2 lists with the lease's tags.

    EC2 lists a terminated machine for about an hour. If no machine of an unanswered request is
    known after 45 minutes (FORGOTTEN), the requested machines are assumed to have run since the
    request. Their assumed end is now, or 5 minutes (LATEST) after the deadline if that is earlier.
    The cost is therefore not underestimated.
    """
    known = {machine.instance_id for machine in lease.machines}
    found = []
    for request in lease.requests:
        machine = partial(Ec2Machine, group=request.group, usd_per_hour=request.usd_per_hour)
        here = {
            name: described["LaunchTime"]
            for name, described in shown.items()
            if tags_of(described).get("srift:node-group") == request.group
        }
        found += [
            machine(instance_id=name, launched_at=launched_at)
            for name, launched_at in here.items()
            if name not in known
        ]
        heard = here or any(each.group == request.group for each in lease.machines)
        if not (heard or request.answered) and now > request.asked_at + FORGOTTEN:
            ended_at = min(now, lease.deadline_at + LATEST)
            found += [
                machine(
                    instance_id=f"unheard-{request.group}-{number}",
                    launched_at=request.asked_at,
                    ended_at=ended_at,
                )
                for number in range(request.size)
            ]
    return found


def _latest(lease: Ec2Lease, machine: Ec2Machine) -> datetime:
    """Return the latest time at which the machine ends itself.

    The machine's shutdown timer starts when the machine starts, which may be some time after the
    request. This delay and LATEST (for boot and rounding) are added to the deadline.
    """
    requested_at = [
        request.asked_at for request in lease.requests if request.group == machine.group
    ]
    late = max(timedelta(0), machine.launched_at - requested_at[0])
    return lease.deadline_at + late + LATEST
