"""Asks for a cluster attempt by attempt, and waits until its machines run.

Every request stands in the lease before it is sent. A refused attempt's machines are ended before
the next attempt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta

from models.domain.cluster import Cluster, Offer
from tasks.providers.base import NoCapacity, ProviderError
from tasks.providers.ec2 import requests as ec2_request
from tasks.providers.ec2.api import ALIVE, Answer, Ec2Api
from tasks.providers.ec2.attempts import Attempt, Group, repriced
from tasks.providers.ec2.errors import AwsRefused, kind_of, refused
from tasks.providers.ec2.leases import Ec2Lease, Ec2Leases, Ec2Machine, FleetRequest, utc
from tasks.providers.ec2.prices import newest_spot_prices
from tasks.providers.ec2.requests import LaunchSpec
from tasks.providers.ec2.termination import SHOWN, end_machines, end_these, lease_tags, until

RUNNING_WITHIN_S = 300.0
POLL_S = 2.0
_LOOK_EVERY_S = 15.0
_UNCLEAR = ("unsure", "throttled", "gone")  # of a fleet that may have been served all the same


class Launcher:
    """Launches one lease's machines.

    `script(seconds)`: user-data of a machine that ends itself after so many seconds. `billed`
    turns public prices into this account's.
    """

    def __init__(
        self,
        api: Ec2Api,
        leases: Ec2Leases,
        lease: Ec2Lease,
        spec: LaunchSpec,
        script: Callable[[float], str],
        billed: Callable[[Sequence[Offer]], list[Offer]],
    ) -> None:
        self._api, self._leases, self.spec = api, leases, spec
        self._script, self._billed = script, billed
        self.lease, self._security_group = lease, ""
        self.tags = lease_tags(lease.lease_id, spec.deployment, spec.controller)

    def keep(self, lease: Ec2Lease) -> None:
        """Write the lease before anything else happens. Raises OSError."""
        self._leases.write(lease)
        self.lease = lease

    def launch(self, attempts: Sequence[Attempt]) -> tuple[Attempt, Cluster]:
        """The first attempt whose machines all run, and its cluster at the prices of now.

        Raises NoCapacity if all are refused, else AwsRefused or ProviderError.
        """
        create, rules = ec2_request.security_group(self.spec), ec2_request.rules()
        self._security_group = self._api.when_visible(
            lambda: self._api.security_group(self.spec.region, create, rules)
        )
        for attempt in attempts:
            try:
                return attempt, self._launched(attempt)
            except AwsRefused as error:
                if error.kind != "capacity":
                    raise
                self._note(f"{attempt}: {error}")
            sentence = self.end()
            if sentence:
                raise ProviderError(
                    f"{sentence}, so nothing more was requested; {until(self.lease)}"
                )
            self._drop(self.lease.machines)
        raise NoCapacity("; ".join(self.lease.refusals) or "no zone has prices and a subnet")

    def end(self) -> str:
        """End every machine of the lease; "" or why some may live on."""
        self.lease, sentence = end_machines(self._api, self.lease, self.tags)
        with suppress(OSError):  # the reaper finds out again
            self.keep(self.lease)
        return sentence

    def another(self, attempt: Attempt, rank: int) -> bool:
        """Replace the machine of `rank`; False if that is refused.

        The lost machine is ended first: no cap counts one machine more.
        """
        [group] = [
            group for group in attempt.groups if group.first <= rank < group.first + group.size
        ]
        lost = next(machine for machine in self.lease.current if machine.rank == rank)
        times = sum(request.group.startswith(f"r{rank}.") for request in self.lease.requests)
        alone = replace(group, first=rank, size=1)
        bids = {lost.zone: attempt.places[lost.zone].bids[rank]}
        if end_these(self._api, self.lease.region, [lost.instance_id]):
            return False
        try:
            machines = self._ask(attempt, alone, bids, f"r{rank}.{times}")
            machines = self._await_running(machines)
        except AwsRefused as error:
            self._note(f"{attempt}: {error}")
            came = [
                machine
                for machine in self.lease.current
                if machine.rank == rank and machine != lost
            ]
            with suppress(AwsRefused):
                self._api.terminate(self.lease.region, [machine.instance_id for machine in came])
            self._drop(came)
            return False
        lost = replace(lost, current=False, ended_at=lost.ended_at or self._api.clock.now())
        same_price = [replace(machine, usd_per_hour=lost.usd_per_hour) for machine in machines]
        self.keep(self.lease.with_machines(lost, *same_price))
        return True

    def _launched(self, attempt: Attempt) -> Cluster:
        """All groups of the attempt in one zone: the first group's fleet chooses it."""
        placement = ec2_request.placement_group(self.spec, attempt)
        if placement is not None:
            self._create("ec2:CreatePlacementGroup", placement)
        places = attempt.places
        for group in attempt.groups:
            bids = {zone: place.bids[group.first] for zone, place in places.items()}
            machines = self._ask(attempt, group, bids, f"{attempt.market}.{group.number}")
            zone = self._await_running(machines)[0].zone
            places = {zone: attempt.places[zone]}
        return self._priced(places[zone].cluster)

    def _ask(
        self, attempt: Attempt, group: Group, bids: Mapping[str, float], name: str
    ) -> list[Ec2Machine]:
        """The group's machines, all of them. Raises AwsRefused."""
        now, region = self._api.clock.now(), self.lease.region
        left_s = (self.lease.deadline_at - now).total_seconds()
        if left_s <= 0:
            raise NoCapacity("the deadline passed before the machines came")
        words = {
            "security": self._security_group,
            "user_data": self._script(max(60.0, left_s)),
        }
        template = ec2_request.launch_template(self.spec, attempt, group, name=name, **words)
        self._create("ec2:CreateLaunchTemplate", template)
        usd = max(bids.values()) + self.spec.usd_per_hour_more
        asked_at = self._api.clock.now()
        request = FleetRequest(group=name, size=group.size, usd_per_hour=usd, asked_at=asked_at)
        self.keep(self.lease.with_request(request))
        fleet = ec2_request.create_fleet(self.spec, group, bids, name=name, market=attempt.market)
        ids, refusal = self._fleet(name, fleet)
        machines = [
            Ec2Machine(
                rank=group.first + index,
                instance_id=instance_id,
                instance_type=group.type_name,
                market=attempt.market,
                zone=next(iter(bids)),
                usd_per_hour=usd,
                launched_at=asked_at,
                group=name,
            )
            for index, instance_id in enumerate(sorted(ids))
        ]
        self.keep(self.lease.with_machines(*machines).with_request(replace(request, answered=True)))
        if len(machines) != group.size:
            raise refusal or refused(
                "UnfulfillableCapacity", action="ec2:CreateFleet", region=region
            )
        return machines

    def _fleet(self, name: str, request: Answer) -> tuple[list[str], AwsRefused | None]:
        """Ids of the fleet's machines, or why there are none. Raises AwsRefused if nobody knows.

        A fleet without a clear answer may have been served: its machines are looked for by tag.
        """
        region, action = self.lease.region, "ec2:CreateFleet"
        try:
            answer = self._api.when_visible(lambda: self._api.ask(action, region, **request))
        except AwsRefused as error:
            refusals = [error]
        else:
            ids = [
                str(instance)
                for part in answer.get("Instances", ())
                for instance in part["InstanceIds"]
            ]
            if ids:
                return ids, None
            codes = [str(error.get("ErrorCode")) for error in answer.get("Errors", ())]
            refusals = [
                refused(code, action=action, region=region)
                for code in codes or ["UnfulfillableCapacity"]
            ]
        for refusal in refusals:
            if refusal.kind not in ("capacity", *_UNCLEAR):
                return [], refusal
        unclear = [refusal for refusal in refusals if refusal.kind in _UNCLEAR]
        if not unclear:
            return [], refusals[0]
        found = self._found_by_tag(name)
        return found, AwsRefused(str(unclear[0]), code=unclear[0].code, kind="capacity")

    def _found_by_tag(self, name: str) -> list[str]:
        """Machines of a fleet; EC2 may show them only after SHOWN."""
        tags = self.tags | {"srift:node-group": name}
        give_up = self._api.clock.now() + SHOWN
        while True:
            found = self._api.instances(self.lease.region, tags=tags, states=ALIVE)
            if found or self._api.clock.now() >= give_up:
                return [str(described["InstanceId"]) for described in found]
            self._api.clock.sleep(_LOOK_EVERY_S)

    def _create(self, action: str, request: Answer) -> None:
        """Create what costs nothing, unless it is there already."""
        self._api.ask_unless(("there",), action, self.lease.region, **request)

    def _await_running(self, machines: Sequence[Ec2Machine]) -> list[Ec2Machine]:
        """The machines with zone, address and start. Raises AwsRefused of kind capacity."""
        region, ids = self.lease.region, [machine.instance_id for machine in machines]
        give_up = self._api.clock.now() + timedelta(seconds=RUNNING_WITHIN_S)
        while True:
            described = {
                str(instance["InstanceId"]): instance
                for instance in self._api.instances(region, ids=ids)
            }
            for instance in described.values():
                if instance["State"]["Name"] not in ("pending", "running"):
                    raise _not_up(str(instance.get("StateReason", {}).get("Code", "")), region)
            if sum(_is_up(instance) for instance in described.values()) == len(ids):
                break
            if self._api.clock.now() >= give_up:
                raise _not_up(f"not running after {RUNNING_WITHIN_S:.0f} s", region)
            self._api.clock.sleep(POLL_S)
        running = [
            replace(
                machine,
                address=str(described[machine.instance_id]["PrivateIpAddress"]),
                zone=str(described[machine.instance_id]["Placement"]["AvailabilityZone"]),
                launched_at=utc(described[machine.instance_id]["LaunchTime"]),
            )
            for machine in machines
        ]
        self.keep(self.lease.with_machines(*running))
        return running

    def _priced(self, cluster: Cluster) -> Cluster:
        """The cluster at the spot prices of now, by which its machines are counted."""
        now, names = self._api.clock.now(), {offer.instance_type.name for offer in cluster.members}
        if cluster.members[0].market == "spot":
            with suppress(AwsRefused):  # then the known price counts
                rows = list(self._api.spot_prices(self.lease.region, now, sorted(names)))
                anew = repriced(cluster, newest_spot_prices(rows), now)
                cluster = Cluster(members=tuple(self._billed(anew.members)))
        more = self.spec.usd_per_hour_more
        prices = [offer.usd_per_hour or 0.0 for offer in cluster.members]
        machines = (
            replace(machine, usd_per_hour=prices[machine.rank] + more)
            for machine in self.lease.current
        )
        self.keep(self.lease.with_machines(*machines))
        return cluster

    def _note(self, sentence: str) -> None:
        self.keep(replace(self.lease, refusals=(*self.lease.refusals, sentence)))

    def _drop(self, machines: Iterable[Ec2Machine]) -> None:
        """Take machines out of the cluster."""
        ids = {machine.instance_id for machine in machines}
        dropped = (machine for machine in self.lease.machines if machine.instance_id in ids)
        self.keep(
            self.lease.with_machines(*(replace(machine, current=False) for machine in dropped))
        )


def _is_up(described: Answer) -> bool:
    return described["State"]["Name"] == "running" and bool(described.get("PrivateIpAddress"))


def _not_up(code: str, region: str) -> AwsRefused:
    """A machine that ended before it ran: lack of capacity, unless the launch was at fault."""
    fault = code.startswith("Client.") and kind_of(code) != "capacity"
    kind = "final" if fault else "capacity"
    return AwsRefused(f"a machine in {region} did not come up ({code})", code=code, kind=kind)
