"""Climbs the ladder: asks for each rung's machines, waits until they run, and ends what came of one that was refused.

What is asked is written into the lease first. Asked again, by this controller or by one after it, every request is word
for word the same and carries the same token, so that nothing is bought twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from typing import Any

from models.domain.cluster import Cluster, Offer
from tasks.providers.base import NoCapacity, ProviderError
from tasks.providers.ec2 import requests as ec2_request
from tasks.providers.ec2.api import ALIVE, Answer, Ec2Api
from tasks.providers.ec2.capacity_ladder import Group, Rung, priced_anew
from tasks.providers.ec2.errors import ANOTHER_TRY, AwsRefused, fleet_refused, refused
from tasks.providers.ec2.leases import Asked, Ec2Lease, Ec2Leases, Machine, Refusal, utc
from tasks.providers.ec2.prices import newest_spot_prices
from tasks.providers.ec2.requests import LaunchSpec
from tasks.providers.ec2.survey import same_quotas
from tasks.providers.ec2.termination import (
    BACKOFF_S,
    SETTLED,
    end_machines,
    end_these,
    lease_tags,
    tags_of,
    until,
    with_retries,
)

RUNNING_WITHIN_S = 300.0
POLL_S = 2.0
FLEETS = 3  # asked for one group, one after the other, while each comes to something that another try may mend
_CLIMBED = ("capacity", "quota", "price")  # refusals after which the next rung is asked for


class Launcher:
    """One lease's. `script(deadline_s)` is the user-data of a machine that is to end itself after so many seconds.

    `billed` turns offers at public prices into what this account pays.
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
        self._api, self._leases, self._spec = api, leases, spec
        self._script, self._billed = script, billed
        self.lease = lease
        self.tags = lease_tags(lease.lease_id, spec.deployment, spec.controller)

    def keep(self, lease: Ec2Lease) -> None:
        """On disk before anything else happens. Raises OSError."""
        self._leases.write(lease)
        self.lease = lease

    def climb(self, rungs: Sequence[Rung], said: Sequence[str] = ()) -> Rung:
        """The first rung whose machines all run; `lease` has them. Raises NoCapacity, AwsRefused or ProviderError."""
        group = with_retries(self._api, self._security_group, new=True)
        self.keep(replace(self.lease, security_group=group))
        for rung in rungs:
            if self._was_refused(rung, rungs):
                continue
            self._clear(rung)
            if self._api.clock.now() >= self.lease.deadline_at:
                raise self._used_up(["its time was up before machines were had"])
            try:
                self._take(rung)
                return self._priced(rung)
            except AwsRefused as error:
                if error.kind not in _CLIMBED:
                    raise
                self._refuse(rung, error)
        raise self._used_up(said)

    def end(self) -> str:
        """End every machine of the lease; "" or why some may live on. What is known afterwards is in the lease."""
        self.lease, sentence = end_machines(self._api, self.lease, self.tags)
        with suppress(OSError):  # what is not written is found out again by the reaper
            self.keep(self.lease)
        return sentence

    def another(self, rung: Rung, rank: int) -> bool:
        """One more machine like that of `rank`, in its place. False where it is refused. The lost one is let go.

        That one is ended before another is asked for: no cap knows of one machine more.
        """
        [group] = [one for one in rung.groups if one.first <= rank < one.first + one.size]
        lost = next(one for one in self.lease.current if one.rank == rank)
        times = sum(one.group.startswith(f"r{rank}.") for one in self.lease.asked)
        alone, name = replace(group, first=rank, size=1), f"r{rank}.{times}"
        try:
            if end_these(self._api, self.lease.region, [lost.instance_id]):
                return False
            self._ask(rung, alone, name)
            self._await_running(
                [
                    one
                    for one in self.lease.machines
                    if one.current and one.rank == rank and one != lost
                ]
            )
        except AwsRefused as error:
            self._note(rung, error)
            came = [
                one.instance_id for one in self.lease.current if one.rank == rank and one != lost
            ]
            with suppress(AwsRefused):
                self._api.terminate(self.lease.region, came)
            given_up = [
                replace(one, current=False)
                for one in self.lease.machines
                if one.instance_id in came
            ]
            self.keep(self.lease.with_machines(*given_up))
            return False
        ended = lost.ended_at or self._api.clock.now()
        other = next(
            one
            for one in self.lease.current
            if one.rank == rank and one.instance_id != lost.instance_id
        )
        other = replace(other, usd_per_hour=lost.usd_per_hour)  # of the same type, market and zone
        self.keep(self.lease.with_machines(other, replace(lost, current=False, ended_at=ended)))
        return True

    def _used_up(self, said: Sequence[str]) -> NoCapacity:
        return NoCapacity("; ".join([*(one.reason for one in self.lease.refusals), *said]))

    def _security_group(self) -> str:
        spec = self._spec
        return self._api.security_group(
            spec.region, ec2_request.security_group(spec), ec2_request.rules()
        )

    def _was_refused(self, rung: Rung, rungs: Sequence[Rung]) -> bool:
        """It itself, or for a quota that counts here too."""
        quotas = [
            one.rung
            for one in self.lease.refusals
            if refused(one.code, action="", region="").kind == "quota"
        ]
        return any(one.rung == rung.number for one in self.lease.refusals) or any(
            same_quotas(other, rung) for other in rungs if other.number in quotas
        )

    def _clear(self, rung: Rung) -> None:
        """End what an earlier controller had of other rungs: a gang lies in one zone, or is none."""
        mine = {one.group for one in self.lease.asked if one.rung == rung.number}
        if all(one.rung == rung.number for one in self.lease.asked):
            return
        found = with_retries(
            self._api, partial(self._api.instances, self.lease.region, tags=self.tags, states=ALIVE)
        )
        if any(tags_of(one).get("srift:node-group") not in mine for one in found):
            self._end_or_stop()
        others = [one for one in self.lease.machines if one.group not in mine]
        self.keep(self.lease.with_machines(*(replace(one, current=False) for one in others)))

    def _take(self, rung: Rung) -> None:
        placement = ec2_request.placement_group(self._spec, rung)
        if placement is not None:
            self._make("ec2:CreatePlacementGroup", placement)
        for group in rung.groups:
            self._ask(rung, group, ec2_request.group_name(rung, group))
        self._await_running(self.lease.current)

    def _ask(self, rung: Rung, group: Group, name: str) -> None:
        # At most: what it really is on the spot market is known only once it was had (`_priced`, `another`).
        usd = (
            max(place.most_usd[group.first] for place in rung.places) + self._spec.usd_per_hour_more
        )
        fresh = Asked(
            group=name,
            rung=rung.number,
            asked_at=self._api.clock.now(),
            usd_per_hour=usd,
            size=group.size,
        )
        asked = self.lease.request_of(name) or fresh
        late = not asked.answered and self._api.clock.now() >= asked.newest_at + SETTLED
        if late and not self._by_tag(
            name
        ):  # served now, its machines would end themselves so much after the deadline
            raise refused(
                "UnfulfillableCapacity",
                action="what was asked for before",
                region=self.lease.region,
            )
        self.keep(self.lease.with_request(asked))
        try:
            ids, fleet = self._bought(rung, group, name, asked)
        except AwsRefused as error:
            if error.kind != "unsure":
                stored = self.lease.request_of(name) or asked
                self.keep(self.lease.with_request(replace(stored, answered=True, code=error.code)))
            raise
        machines = [
            Machine(
                rank=group.first + index,
                instance_id=one,
                instance_type=group.offer.instance_type.name,
                market=group.offer.market,
                zone=rung.zone,
                usd_per_hour=usd,
                launched_at=asked.newest_at,  # at the earliest; `_as_running` has AWS's own moment once they run
                group=name,
            )
            for index, one in enumerate(sorted(ids))
        ]
        known = {one.instance_id for one in self.lease.machines}
        lease = self.lease.with_machines(*(one for one in machines if one.instance_id not in known))
        self.keep(
            lease.with_request(
                replace(self.lease.request_of(name) or asked, answered=True, fleet_id=fleet)
            )
        )
        if len(ids) != group.size:
            raise refused(
                "UnfulfillableCapacity",
                action=f"{group.size} machines at once",
                region=self.lease.region,
            )

    def _bought(self, rung: Rung, group: Group, name: str, asked: Asked) -> tuple[list[str], str]:
        """Ids of the machines, and of their fleet where they came by one."""
        region, spec = self.lease.region, self._spec
        # Counted from the moment that is in the lease, so that the same is asked again whenever it is.
        left_s = max(60.0, (self.lease.deadline_at - asked.asked_at).total_seconds())
        words: dict[str, Any] = {
            "name": name,
            "security": self.lease.security_group,
            "user_data": self._script(left_s),
        }
        if group.offer.market != "spot":
            request = ec2_request.run_instances(spec, rung, group, **words)
            answer = self._buy(name, "ec2:RunInstances", request)
            return [str(one["InstanceId"]) for one in answer["Instances"]], ""
        template = ec2_request.launch_template(spec, rung, group, **words)
        self._make("ec2:CreateLaunchTemplate", template)
        while True:
            fleet = ec2_request.create_fleet(spec, rung, group, name=name, attempt=asked.attempt)
            answer = self._buy(name, "ec2:CreateFleet", fleet)
            ids = [str(one) for some in answer.get("Instances", ()) for one in some["InstanceIds"]]
            ids = ids or self._by_tag(name)
            if ids:
                return ids, str(answer.get("FleetId", ""))
            error = fleet_refused(
                (str(one.get("ErrorCode")) for one in answer.get("Errors", ())), region=region
            )
            if error.kind not in ANOTHER_TRY:
                raise error
            if asked.attempt + 1 >= FLEETS:  # the next rung may be had all the same
                raise AwsRefused(str(error), code=error.code, kind="capacity")
            self._api.clock.sleep(BACKOFF_S[asked.attempt])
            asked = replace(self.lease.request_of(name) or asked, attempt=asked.attempt + 1)
            self.keep(self.lease.with_request(asked))

    def _make(self, action: str, request: Answer) -> None:
        """What costs nothing; that it is there already is no error."""
        with_retries(
            self._api,
            partial(self._api.ask_unless, ("there",), action, self.lease.region, **request),
        )

    def _buy(self, name: str, action: str, request: Answer) -> Answer:
        """The answer. The moment of each request is in the lease before it is sent.

        A request that was not answered may have been served: that the next one came too soon is no answer to it.
        """
        silent = False

        def ask() -> Answer:
            nonlocal silent
            note()
            try:
                return self._api.ask(action, self.lease.region, **request)
            except AwsRefused as error:
                if error.kind == "unsure":
                    silent = True
                    note()  # boto3 sends one that is not answered again, for two minutes
                elif error.kind == "throttled" and silent:
                    raise AwsRefused(str(error), code=error.code, kind="unsure") from error
                raise

        def note() -> None:
            asked = self.lease.request_of(name)
            assert asked is not None  # `_ask` wrote it
            self.keep(self.lease.with_request(replace(asked, tried_at=self._api.clock.now())))

        return with_retries(self._api, ask, new=True)

    def _by_tag(self, name: str) -> list[str]:
        """A fleet that was asked for again may tell its number and not its machines; nor does a dead controller."""
        tags = self.tags | {"srift:node-group": name}
        found = with_retries(
            self._api, partial(self._api.instances, self.lease.region, tags=tags, states=ALIVE)
        )
        return [str(one["InstanceId"]) for one in found]

    def _await_running(self, machines: Sequence[Machine]) -> None:
        """Until all of them run and have addresses. Raises AwsRefused of kind capacity where one ends or none comes."""
        region, ids = self.lease.region, [one.instance_id for one in machines]
        give_up = self._api.clock.now() + timedelta(seconds=RUNNING_WITHIN_S)
        while True:
            found = with_retries(self._api, partial(self._api.instances, region, ids=ids), new=True)
            for one in found:
                if one["State"]["Name"] not in ("pending", "running"):
                    raise _of_machine(str(one.get("StateReason", {}).get("Code", "")), region)
            if sum(_up(one) for one in found) == len(ids):
                break
            if self._api.clock.now() >= give_up:
                raise _of_machine(f"not running after {RUNNING_WITHIN_S:.0f} s", region)
            self._api.clock.sleep(POLL_S)
        described = {str(one["InstanceId"]): one for one in found}
        self.keep(
            self.lease.with_machines(
                *(_as_running(one, described[one.instance_id]) for one in machines)
            )
        )

    def _priced(self, rung: Rung) -> Rung:
        """The rung at the prices of this moment: what its machines cost is counted by them."""
        rung = rung.located(self.lease.current[0].zone)
        names = sorted({one.instance_type for one in self.lease.current if one.market == "spot"})
        now, rows = self._api.clock.now(), list[Answer]()
        with suppress(AwsRefused):  # then it is counted by the price that was known
            rows = list(self._api.spot_prices(self.lease.region, now, names)) if names else rows
        anew = priced_anew(rung, newest_spot_prices(rows), now)
        rung = replace(rung, cluster=Cluster(members=tuple(self._billed(anew.members))))
        more = self._spec.usd_per_hour_more
        prices = [offer.usd_per_hour for offer in rung.cluster.members]
        self.keep(
            self.lease.with_machines(
                *(
                    replace(one, usd_per_hour=(prices[one.rank] or 0.0) + more)
                    for one in self.lease.current
                )
            )
        )
        return rung

    def _refuse(self, rung: Rung, error: AwsRefused) -> None:
        """Note it, and end what came of the rung before the next one is asked for. Raises ProviderError."""
        self._note(rung, error)
        self._end_or_stop()

    def _end_or_stop(self) -> None:
        sentence = self.end()
        if sentence:
            raise ProviderError(
                f"{sentence}, so that nothing more is asked for; {until(self.lease)}"
            )
        self.keep(
            self.lease.with_machines(*(replace(one, current=False) for one in self.lease.machines))
        )

    def _note(self, rung: Rung, error: AwsRefused) -> None:
        refusal = Refusal(
            rung=rung.number,
            market=rung.markets,
            zone=rung.zones,
            code=error.code,
            reason=f"{rung}: {error}",
        )
        self.keep(replace(self.lease, refusals=(*self.lease.refusals, refusal)))


def _up(one: Answer) -> bool:
    return one["State"]["Name"] == "running" and bool(one.get("PrivateIpAddress"))


def _as_running(machine: Machine, one: Answer) -> Machine:
    moment: datetime = one.get("LaunchTime", machine.launched_at)
    zone = str(
        one.get("Placement", {}).get("AvailabilityZone") or machine.zone
    )  # a fleet chooses among some
    return replace(
        machine, address=str(one["PrivateIpAddress"]), zone=zone, launched_at=utc(moment)
    )


def _of_machine(code: str, region: str) -> AwsRefused:
    """A machine that ended before it ran: AWS's doing is lack of capacity, ours (`Client.…`) a fault."""
    kind = refused(code, action="", region="").kind
    kind = "quota" if kind == "quota" else "final" if code.startswith("Client.") else "capacity"
    return AwsRefused(f"a machine in {region} did not come up ({code})", code=code, kind=kind)
