"""Launch a cluster attempt by attempt, and wait until its machines run.

Every request is written to the lease before it is sent. The machines of a refused attempt are ended
before the next attempt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from models.domain.cluster import Cluster

from ..base import NoCapacity, ProviderError
from .api import ALIVE, Answer, Ec2Api
from .attempts import Attempt, Group
from .errors import AwsRefused
from .leases import Ec2Lease, Ec2Leases, Ec2Machine, FleetRequest, utc
from .prices import billed, newest_spot_prices
from .requests import (
    LaunchSpec,
    create_fleet,
    launch_template,
    placement_group,
    rules,
    security_group,
)
from .termination import SHOWN, end_machines, end_these, until

RUNNING_WITHIN_S = 300.0  # longest wait until requested machines run
POLL_S = 2.0
_COMING = ("pending", "running")
_LOOK_EVERY_S = 15.0
# Kinds of refusal after which EC2 may still have launched the fleet.
_UNCLEAR = ("unsure", "throttled", "gone")


class Launcher:
    """Launches and ends the machines of one lease.

    The attribute `lease` is always the content of lease.json. `script(seconds)` returns the
    user-data of a machine that ends itself after `seconds`.
    """

    def __init__(
        self,
        api: Ec2Api,
        leases: Ec2Leases,
        lease: Ec2Lease,
        spec: LaunchSpec,
        script: Callable[[float], str],
    ) -> None:
        self._api, self._leases, self.spec, self._script = api, leases, spec, script
        self.lease, self._security_group = lease, ""

    def keep(self, lease: Ec2Lease) -> None:
        """Write a changed lease to disk and use it from now on.

        Raises OSError if it cannot be written; the old lease then stays in use.
        """
        self._leases.write(lease)
        self.lease = lease

    def launch(self, attempts: Sequence[Attempt]) -> tuple[Attempt, Cluster]:
        """Make `attempts` in order, until all machines of one of them run.

        Return a pair: this attempt, and its cluster at current prices. Raises NoCapacity if every
        attempt lacks capacity or the deadline has passed. Raises AwsRefused if AWS refuses for
        another reason, ProviderError if the machines of a refused attempt do not end.
        """
        self._security_group = self._api.when_visible(self._secure)
        for attempt in attempts:
            try:
                return attempt, self._launched(attempt)
            except AwsRefused as error:
                if error.kind != "capacity":
                    raise
                self._note(attempt, error)
            if problem := self.end():
                raise ProviderError(
                    f"{problem}, so nothing more was requested; {until(self.lease)}"
                )
        raise NoCapacity(
            "; ".join(self.lease.refusals)
            or "no zone has a price and a subnet: check [ec2] subnet_ids"
        )

    def end(self) -> str:
        """End every machine of the lease. Return "", or why some may still run."""
        self.lease, problem = end_machines(self._api, self.lease)
        with suppress(OSError):  # the reaper asks EC2 again
            self.keep(self.lease)
        return problem

    def another(self, attempt: Attempt, rank: int) -> bool:
        """Replace the machine of `rank`; return False if EC2 refuses or the old machine still runs.

        The old machine is ended first, so that the cost never exceeds that of the whole cluster.
        Raises AwsRefused if AWS refuses to end it, NoCapacity if the deadline has passed.
        """
        region, lost = self.lease.region, self.lease.current[rank]
        group = [each for each in attempt.groups if each.first <= rank][-1]
        times = sum(request.group.startswith(f"r{rank}.") for request in self.lease.requests)
        bids = {lost.zone: group.bids[lost.zone]}
        alone = replace(group, name=f"r{rank}.{times}", first=rank, size=1, bids=bids)
        if end_these(self._api, region, [lost.instance_id]):
            return False
        try:
            [machine] = self._running(attempt, alone)
        except AwsRefused as error:
            self._note(attempt, error)
            came = [each.instance_id for each in self.lease.machines if each.group == alone.name]
            with suppress(AwsRefused):
                self._api.terminate(region, came)
            return False
        gone = replace(lost, current=False, ended_at=lost.ended_at or self._api.now())
        new = replace(machine, current=True, usd_per_hour=lost.usd_per_hour)
        self.keep(self.lease.with_machines(gone, new))
        return True

    def _secure(self) -> str:
        """Create the lease's security group and rules, unless they exist; return the group's id."""
        region, create = self.spec.region, security_group(self.spec)
        self._api.ask_unless(("there",), "ec2:CreateSecurityGroup", region, **create)
        action, name = "ec2:DescribeSecurityGroups", {"group-name": create["GroupName"]}
        found = self._api.described("SecurityGroups", action, region, name)
        if not found:
            raise AwsRefused("InvalidGroup.NotFound", action, region)
        group_id = str(found[0]["GroupId"])
        for action, each in rules(group_id):
            for rule in each:
                words = {"GroupId": group_id, "IpPermissions": [rule]}
                known = ("there", "InvalidPermission.NotFound")
                self._api.ask_unless(known, action, region, **words)
        return group_id

    def _launched(self, attempt: Attempt) -> Cluster:
        """Launch all groups of the attempt, and return the cluster at current prices.

        The fleet of the first group chooses the zone, and the other groups must use the same zone.
        Raises AwsRefused if AWS refuses a request or a machine does not run.
        """
        if placement := placement_group(self.spec, attempt):
            self._create("ec2:CreatePlacementGroup", placement)
        machines: list[Ec2Machine] = []
        for group in attempt.groups:
            if machines:
                zone = machines[0].zone
                group = replace(group, bids={zone: group.bids[zone]})
            machines += self._running(attempt, group)
        cluster = self._priced(attempt.clusters[machines[0].zone])
        more = self.spec.usd_per_hour_more
        current = [
            replace(machine, current=True, usd_per_hour=(offer.usd_per_hour or 0.0) + more)
            for machine, offer in zip(machines, cluster.members, strict=True)
        ]
        self.keep(self.lease.with_machines(*current))
        return cluster

    def _running(self, attempt: Attempt, group: Group) -> list[Ec2Machine]:
        """Request all machines of the group, wait until they all run, and return them.

        Raises AwsRefused if EC2 refuses or a machine does not run, NoCapacity if the deadline
        has passed.
        """
        left_s = (self.lease.deadline_at - self._api.now()).total_seconds()
        if left_s <= 0:
            raise NoCapacity("the deadline passed before all machines were requested")
        words = {"security": self._security_group, "user_data": self._script(max(60.0, left_s))}
        template = launch_template(self.spec, attempt, group, **words)
        self._create("ec2:CreateLaunchTemplate", template)
        request = FleetRequest(
            group=group.name,
            size=group.size,
            usd_per_hour=max(group.bids.values()) + self.spec.usd_per_hour_more,
            asked_at=self._api.now(),
        )
        self.keep(self.lease.with_request(request))
        ids, refusal = self._fleet(attempt, group)
        machines = [
            Ec2Machine(
                rank=group.first + index,
                instance_id=instance_id,
                instance_type=group.type_name,
                market=attempt.market,
                usd_per_hour=request.usd_per_hour,
                launched_at=request.asked_at,
                group=group.name,
            )
            for index, instance_id in enumerate(sorted(ids))
        ]
        self.keep(self.lease.with_machines(*machines).with_request(replace(request, answered=True)))
        if len(machines) != group.size:
            raise refusal or self._refused("UnfulfillableCapacity")
        return self._await_running(machines)

    def _fleet(self, attempt: Attempt, group: Group) -> tuple[list[str], AwsRefused | None]:
        """Request the group's fleet. Return a pair: its machines' ids, and the refusal or None.

        If EC2 gives no clear answer, it may still have launched machines, which are then searched
        by tag. Raises AwsRefused if that search fails.
        """
        api, region = self._api, self.lease.region
        request = create_fleet(self.spec, group, attempt.market)
        try:
            answer = api.when_visible(lambda: api.ask("ec2:CreateFleet", region, **request))
        except AwsRefused as error:
            refusals = [error]
        else:
            ids = [name for part in answer.get("Instances", ()) for name in part["InstanceIds"]]
            if ids:
                return ids, None
            codes = [str(error["ErrorCode"]) for error in answer.get("Errors", ())]
            refusals = [self._refused(code) for code in codes or ["UnfulfillableCapacity"]]
        unclear = [refusal for refusal in refusals if refusal.kind in _UNCLEAR]
        final = [refusal for refusal in refusals if refusal.kind not in ("capacity", *_UNCLEAR)]
        if final or not unclear:
            return [], (final or refusals)[0]
        unclear[0].kind = "capacity"
        return self._found_by_tag(group.name), unclear[0]

    def _refused(self, code: str) -> AwsRefused:
        return AwsRefused(code, "ec2:CreateFleet", self.lease.region)

    def _found_by_tag(self, name: str) -> list[str]:
        """Return the ids of the machines of the fleet for group `name`, found by their tags.

        Waits up to SHOWN, because EC2 shows tags late.
        """
        tags, found = self.lease.tags | {"srift:node-group": name}, dict[str, Answer]()
        for _ in self._api.looks(_LOOK_EVERY_S, SHOWN.total_seconds()):
            found = self._api.instances(self.lease.region, tags=tags, states=ALIVE)
            if found:
                break
        return list(found)

    def _create(self, action: str, request: Answer) -> None:
        """Create a resource that costs nothing, unless it exists already."""
        self._api.ask_unless(("there",), action, self.lease.region, **request)

    def _await_running(self, machines: Sequence[Ec2Machine]) -> list[Ec2Machine]:
        """Wait until all machines run. Return them with their zones, addresses and launch times.

        Raises AwsRefused if a machine does not run within RUNNING_WITHIN_S seconds. Its kind is
        "capacity", unless the request was at fault (a code that begins with "Client.").
        """
        region, by_id = self.lease.region, {machine.instance_id: machine for machine in machines}
        problem = f"not running after {RUNNING_WITHIN_S:.0f} s"
        for _ in self._api.looks(POLL_S, RUNNING_WITHIN_S):
            found = self._api.instances(region, ids=list(by_id))
            ended = [one for one in found.values() if one["State"]["Name"] not in _COMING]
            if ended:
                problem = str(ended[0]["StateReason"]["Code"])
                break
            if len(found) == len(by_id) and all(map(_is_up, found.values())):
                running = [
                    replace(
                        machine,
                        address=str(found[name]["PrivateIpAddress"]),
                        zone=str(found[name]["Placement"]["AvailabilityZone"]),
                        launched_at=utc(found[name]["LaunchTime"]),
                    )
                    for name, machine in by_id.items()
                ]
                self.keep(self.lease.with_machines(*running))
                return running
        refusal = AwsRefused(problem, "the start of a machine", region)
        if not problem.startswith("Client."):
            refusal.kind = "capacity"
        raise refusal

    def _priced(self, cluster: Cluster) -> Cluster:
        """Return the cluster at current prices, from which the cost of its machines is computed.

        If AWS does not answer, the known prices stay.
        """
        now, names = self._api.now(), {offer.instance_type.name for offer in cluster.members}
        spot: dict[tuple[str, str], float | None] = {}
        if cluster.market == "spot":
            with suppress(AwsRefused):  # without an answer, the known price counts
                rows = self._api.spot_prices(self.lease.region, now, sorted(names))
                spot = newest_spot_prices(rows)
        members = []
        for offer in cluster.members:
            if usd := spot.get((offer.instance_type.name, offer.zone)):
                offer = replace(offer, usd_per_hour=usd, own_price="", price_as_of=now)
            members.append(offer)
        return Cluster(members=tuple(billed(members, self.spec.choices)))

    def _note(self, attempt: Attempt, error: AwsRefused) -> None:
        """Append a sentence about a refused attempt to the lease's `refusals`."""
        self.keep(replace(self.lease, refusals=(*self.lease.refusals, f"{attempt}: {error}")))


def _is_up(described: Answer) -> bool:
    """Return True if the machine runs and has a private IP address."""
    return described["State"]["Name"] == "running" and bool(described.get("PrivateIpAddress"))
