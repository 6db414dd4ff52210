"""Launch an EC2 cluster, report its state and cost, and replace lost machines.

A launch first tries the cluster's market. If spot has no capacity and [ec2] `markets` includes
"on-demand", a second attempt requests on-demand machines. The machines of a failed attempt are
ended before the next attempt. An attempt sends one CreateFleet request for each group of machines
of the same type. Each request is stored in the lease (the file that records the launch) before it
is sent.
"""

import base64
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime

from models.domain.cluster import Cluster

from ..base import NoCapacity, NodeState, ProviderError, RunningCluster, read_object
from .api import ALIVE, STILL_ALIVE, Answer, Ec2Api, Filters
from .attempts import Attempt, Group
from .errors import AwsRefused
from .leases import Ec2Lease, Ec2Leases, Ec2Machine, FleetRequest
from .mailbox_s3 import Mirror
from .prices import apply_terms, most_usd_per_hour_beside, newest_spot_prices
from .requests import (
    LaunchSpec,
    create_fleet,
    launch_template,
    placement_group,
    rules,
    security_group,
)
from .termination import SETTLED, end_machines, end_these, until

RUNNING_WITHIN_S = 300.0  # maximum wait until requested machines run
POLL_S = 2.0
LOOK_EVERY_S = 5.0
NOTICE_S = 120.0  # from a spot interruption notice to the end of the machine, according to AWS
_COMING = ("pending", "running")
_SEARCH_EVERY_S = 15.0
# Kinds of error after which EC2 may nevertheless have launched the machines.
_UNCLEAR = ("unsure", "throttled", "gone")
_INTERRUPTED = ("Server.SpotInstanceTermination", "Server.SpotInstanceShutdown")


class Ec2Cluster(RunningCluster):
    """The machines of one launch.

    lease: the current content of lease.json.
    script: `script(seconds)` returns the user-data of a machine that ends itself after `seconds`.
    mirror: exchanges files with the machines.
    """

    ready_within_s = 600.0
    checkpoints = None

    def __init__(
        self,
        api: Ec2Api,
        leases: Ec2Leases,
        lease: Ec2Lease,
        spec: LaunchSpec,
        script: Callable[[float], str],
        mirror: Mirror,
    ) -> None:
        self._api, self._leases, self.spec, self._script = api, leases, spec, script
        self.lease, self.lease_id = lease, lease.lease_id
        self.image_id = spec.image["ImageId"]
        self.mirror, self.mailbox = mirror, mirror.mailbox
        self._seen: dict[str, Answer] = {}
        self._looked_at = datetime.min.replace(tzinfo=UTC)

    def start(self, attempts: Sequence[Attempt]) -> None:
        """Try `attempts` in order until all machines of an attempt are running.

        Ends the machines of a failed attempt before the next attempt. After a successful attempt,
        uploads the files that the machines need.

        Raises:
            NoCapacity: if no attempt finds capacity, or if the machines' deadline passes.
            OSError: if the lease cannot be written.
            ProviderError: if the launch fails for another reason.
        """
        self._security_group = self._api.when_visible(self._secure)
        for attempt in attempts:
            try:
                self._carry_out(attempt)
                break
            except AwsRefused as error:
                if error.kind != "capacity":
                    raise
                self._note(attempt, error)
            if problem := self.end():
                raise ProviderError(
                    f"{problem}; no more machines were requested; {until(self.lease)}"
                )
        else:
            raise NoCapacity(
                "; ".join(self.lease.refusals)
                or "no zone has both a subnet and prices for all types: check [ec2] subnet_ids"
            )
        self.mirror.serve(self.lease)
        self.mirror.sync()

    def keep(self, lease: Ec2Lease) -> None:
        """Write a changed lease to disk, and use it from now on.

        Raises OSError if the lease cannot be written. The previous lease then stays in use.
        """
        self._leases.write(lease)
        self.lease = lease

    def end(self) -> str:
        """End all machines of the launch. Return why machines may still run; "" if all ended."""
        self.lease, problem = end_machines(self._api, self.lease)
        with suppress(OSError):  # the reaper queries EC2 again
            self.keep(self.lease)
        return problem

    @property
    def addresses(self) -> list[str]:  # type: ignore[override]
        """Return the machines' private IP addresses, in rank order."""
        return [machine.address for machine in self.lease.current]

    def nodes(self) -> Sequence[NodeState]:
        """Return the state of each machine, in rank order.

        While AWS responds, the states are at most LOOK_EVERY_S seconds old.
        """
        if (self._api.now() - self._looked_at).total_seconds() >= LOOK_EVERY_S:
            self._look()
        return [self._state(machine) for machine in self.lease.current]

    def now_unix(self) -> float:
        """Return the time at which the last complete download began: Unix time on S3's clock.

        The ages of heartbeats are computed with this time. While S3 does not respond, this time
        does not advance. Heartbeats therefore do not age, and no machine is considered lost.
        """
        return self.mirror.now_unix

    def usd_so_far(self) -> float | None:
        """Return the cost so far in dollars, including the machines of failed launch attempts."""
        return self.lease.usd_until(self._api.now())

    def note_download(self, usd: float) -> None:
        machines = (replace(machine, download_usd=usd) for machine in self.lease.current)
        self.keep(self.lease.with_machines(*machines))

    def replace(self, node: int) -> bool:
        """Replace the machine with rank `node` by a machine of the same type, market and zone.

        The lost machine is ended first, so that the cost per hour does not exceed the cluster's
        price. Returns False if the lost machine does not end or the new machine does not start.
        Raises ProviderError if AWS refuses to end the lost machine, or if the machines' deadline
        has passed.
        """
        self.mirror.sync()
        region, lost, attempt = self.lease.region, self.lease.current[node], self._attempt
        group = [each for each in attempt.groups if each.first <= node][-1]
        name = f"r{node}.{len(self.lease.requests)}"
        bids = {lost.zone: group.bids[lost.zone]}
        alone = replace(group, name=name, first=node, size=1, bids=bids)
        if end_these(self._api, region, [lost.instance_id]):
            return False
        try:
            [machine] = self._start_group(attempt, alone)
        except AwsRefused as error:
            self._note(attempt, error)
            came = [each.instance_id for each in self.lease.machines if each.group == alone.name]
            with suppress(AwsRefused):
                self._api.terminate(region, came)
            return False
        gone = replace(lost, current=False, ended_at=lost.ended_at or self._api.now())
        new = replace(
            machine,
            current=True,
            usd_per_hour=lost.usd_per_hour,
            download_usd=lost.download_usd,
        )
        self.keep(self.lease.with_machines(gone, new))
        self.mirror.serve(self.lease)
        self.forget(node)
        self.mirror.sync()
        return True

    def _secure(self) -> str:
        """Create the launch's security group and its rules. Return the id of the group.

        If the group or a rule already exists, it is not created again.
        """
        region, create = self.spec.region, security_group(self.spec)
        self._create("ec2:CreateSecurityGroup", create)
        action, name = "ec2:DescribeSecurityGroups", {"group-name": create["GroupName"]}
        found = self._api.described("SecurityGroups", action, region, name)
        if not found:
            raise AwsRefused("InvalidGroup.NotFound", action, region)
        group_id: str = found[0]["GroupId"]
        for action, rule in rules(group_id):
            self._api.ask_unless(("there", "InvalidPermission.NotFound"), action, region, **rule)
        return group_id

    def _carry_out(self, attempt: Attempt) -> None:
        """Launch all machines of the attempt, and store them in the lease with current prices.

        Raises AwsRefused if AWS refuses a request or a machine does not start, and NoCapacity if
        the machines' deadline has passed.
        """
        if placement := placement_group(self.spec, attempt):
            self._create("ec2:CreatePlacementGroup", placement)
        machines: list[Ec2Machine] = []
        for group in attempt.groups:
            if machines:
                zone = machines[0].zone  # AWS chose the zone of the first group
                group = replace(group, bids={zone: group.bids[zone]})
            machines += self._start_group(attempt, group)
        self._attempt = attempt
        self.cluster = cluster = self._with_prices(attempt.clusters[machines[0].zone])
        current = [
            replace(machine, current=True, usd_per_hour=offer.total_usd_per_hour or 0.0)
            for machine, offer in zip(machines, cluster.members, strict=True)
        ]
        lease = replace(self.lease, market=attempt.market, usd_per_hour=cluster.usd_per_hour)
        self.keep(lease.with_machines(*current))

    def _start_group(self, attempt: Attempt, group: Group) -> list[Ec2Machine]:
        """Request all machines of the group, wait until they all run, and return them.

        Raises AwsRefused if EC2 refuses the request or a machine does not start, and NoCapacity if
        the machines' deadline has passed.
        """
        left_s = (self.lease.deadline_at - self._api.now()).total_seconds()
        if left_s <= 0:
            raise NoCapacity("the machines' deadline passed before all of them were requested")
        script = base64.b64encode(self._script(max(60.0, left_s)).encode()).decode()
        words = {"security": self._security_group, "user_data": script}
        template = launch_template(self.spec, attempt, group, **words)
        self._create("ec2:CreateLaunchTemplate", template)
        request = FleetRequest(
            group=group.name,
            size=group.size,
            usd_per_hour=max(group.bids.values())
            + most_usd_per_hour_beside(
                self.spec.choices, self.lease.region, self.mirror.store.region
            ),
            asked_at=self._api.now(),
        )
        self.keep(self.lease.with_request(request))
        ids, refusal = self._fleet(attempt, group)
        machines = [
            Ec2Machine(
                rank=group.first + index,
                instance_id=instance_id,
                usd_per_hour=request.usd_per_hour,
                launched_at=request.asked_at,
                group=group.name,
            )
            for index, instance_id in enumerate(sorted(ids))
        ]
        self.keep(self.lease.with_machines(*machines).with_request(replace(request, answered=True)))
        if len(machines) != group.size:
            raise refusal
        return self._await_running(machines)

    def _fleet(self, attempt: Attempt, group: Group) -> tuple[list[str], AwsRefused]:
        """Send the group's CreateFleet request. Return (ids of the launched machines, error).

        If fewer than `group.size` machines are launched, the error says why. Otherwise, the caller
        must ignore the error. If EC2's response is unclear, machines are found by their tags.
        Raises AwsRefused if this search fails.
        """
        api, region, action = self._api, self.lease.region, "ec2:CreateFleet"
        request = create_fleet(self.spec, group, attempt.market)
        try:
            answer = api.when_visible(lambda: api.ask(action, region, **request))
            codes = [error["ErrorCode"] for error in answer.get("Errors", ())]
            codes = codes or ["UnfulfillableCapacity"]  # a fleet without an error may be too small
            refusals = [AwsRefused(code, action, region) for code in codes]
            ids = [name for group in answer.get("Instances", ()) for name in group["InstanceIds"]]
            if ids:
                return ids, refusals[0]
        except AwsRefused as error:
            refusals = [error]
        unclear = [refusal for refusal in refusals if refusal.kind in _UNCLEAR]
        final = [refusal for refusal in refusals if refusal.kind not in ("capacity", *_UNCLEAR)]
        if final or not unclear:
            return [], (final or refusals)[0]
        unclear[0].kind = "capacity"
        ours: Filters = STILL_ALIVE | self.lease.filters | {"tag:srift:node-group": group.name}
        for _ in api.looks(_SEARCH_EVERY_S, SETTLED.total_seconds()):
            # EC2 shows tags late, and perhaps not of all machines at once.
            if len(found := api.instances(region, ours)) >= group.size:
                break
        return list(found), unclear[0]

    def _create(self, action: str, request: Answer) -> None:
        """Create an AWS resource that is free of charge, unless it already exists."""
        self._api.ask_unless(("there",), action, self.lease.region, **request)

    def _await_running(self, machines: Sequence[Ec2Machine]) -> list[Ec2Machine]:
        """Wait until all machines run. Return them with their zones, addresses and launch times.

        Raises AwsRefused if a machine ends or does not run within RUNNING_WITHIN_S seconds. The
        error's kind is "capacity", unless EC2's reason code for a machine's end begins with
        "Client.". Such a code means that the request is at fault.
        """
        region, by_id = self.lease.region, {machine.instance_id: machine for machine in machines}
        problem = f"not running after {RUNNING_WITHIN_S:.0f} s"
        for _ in self._api.looks(POLL_S, RUNNING_WITHIN_S):
            found = self._api.instances(region, {"instance-id": list(by_id)})
            ended = [
                machine for machine in found.values() if machine["State"]["Name"] not in _COMING
            ]
            if ended:
                problem = ended[0]["StateReason"]["Code"]
                break
            states = [
                machine["State"]["Name"]
                for machine in found.values()
                if machine.get("PrivateIpAddress")
            ]
            if states == ["running"] * len(machines):
                running = [
                    replace(
                        machine,
                        address=found[name]["PrivateIpAddress"],
                        zone=found[name]["Placement"]["AvailabilityZone"],
                        launched_at=found[name]["LaunchTime"],
                    )
                    for name, machine in by_id.items()
                ]
                self.keep(self.lease.with_machines(*running))
                return running
        refusal = AwsRefused(problem, "the start of a machine", region)
        if not problem.startswith("Client."):
            refusal.kind = "capacity"
        raise refusal

    def _with_prices(self, cluster: Cluster) -> Cluster:
        """Return a copy of the cluster with the prices that this account pays.

        Spot prices are updated first, unless AWS refuses the query.
        """
        now, members = self._api.now(), list(cluster.members)
        names = sorted({*cluster.type_names})
        if cluster.market == "spot":
            with suppress(AwsRefused):
                rows = self._api.spot_prices(self.lease.region, now, names)
                spot = newest_spot_prices(rows)
                members = [
                    replace(offer, usd_per_hour=usd, price_note="", price_as_of=now)
                    if (usd := spot.get((offer.instance_type.name, offer.zone)))
                    else offer
                    for offer in members
                ]
        return Cluster(members=tuple(apply_terms(members, self.spec.choices)))

    def _note(self, attempt: Attempt, error: AwsRefused) -> None:
        """Append a sentence about a failed launch attempt to the lease's `refusals`."""
        self.keep(
            replace(self.lease, refusals=(*self.lease.refusals, f"{attempt.market}: {error}"))
        )

    def _look(self) -> None:
        """Read the machines' states from EC2, and store in the lease which machines have ended.

        Does nothing if AWS does not respond.
        """
        lease, now = self.lease, self._api.now()
        self._looked_at = now
        try:
            ids = [machine.instance_id for machine in lease.current]
            found = self._api.instances(lease.region, {"instance-id": ids})
        except ProviderError:
            return
        # {} marks a machine that EC2 listed earlier but no longer lists. It has ended.
        self._seen = {name: {} for name in self._seen} | found
        gone = [
            replace(machine, ended_at=now)  # the cost counts until now: the exact end is unknown
            for machine in lease.current
            if not machine.ended_at and not self._alive(machine)
        ]
        if gone:
            with suppress(OSError):  # on a full disk, the next look sets a later end
                self.keep(lease.with_machines(*gone))

    def _alive(self, machine: Ec2Machine) -> bool:
        """Return False if the machine has ended, according to EC2's latest response.

        A machine that EC2 no longer lists has ended. A machine that EC2 has never listed may be
        new, and counts as alive.
        """
        described = self._seen.get(machine.instance_id)
        return described is None or described.get("State", {}).get("Name") in ALIVE

    def _state(self, machine: Ec2Machine) -> NodeState:
        """Return the machine's state from EC2's latest response and the interruption notice."""
        leaving_s = self._leaving_s(machine)
        if self._alive(machine):
            return NodeState(alive=True, leaving_s=leaving_s)
        code = self._seen[machine.instance_id].get("StateReason", {}).get("Code", "gone")
        interrupted = code in _INTERRUPTED or leaving_s is not None
        why = "taken back by the spot market, " if interrupted else ""
        reason = f"{machine.instance_id} in {machine.zone}: {why}{code}"
        return NodeState(alive=False, interrupted=interrupted, reason=reason)

    def _leaving_s(self, machine: Ec2Machine) -> float | None:
        """Return the seconds until a spot interruption; None if there is no notice."""
        file = self.mailbox / f"node-{machine.rank}" / "notice.json"
        body = read_object(file) or {}
        if body.get("kind") != "interruption":
            return None
        ends = file.stat().st_mtime + NOTICE_S
        with suppress(ValueError):
            ends = min(ends, datetime.fromisoformat(str(body.get("at"))).timestamp())
        return max(0.0, ends - self.now_unix())
