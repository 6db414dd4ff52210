"""AWS in memory: machines with states and a clock, client tokens, scripted refusals.

`FakeAws().clients` is what `Ec2Provider` takes. Time moves by `clock.sleep` and `pass_s` alone.
A `Fault` refuses calls, `answers` replace answers, and a dry run does nothing.
"""

import base64
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from botocore.exceptions import ClientError, ReadTimeoutError

from tasks.providers.ec2.api import ATTEMPTS, AwsClock
from tasks.providers.ec2.errors import AwsRefused, code_of
from tests import aws_model
from tests.fake_ec2_account import ANSWERS, Account, client_error, matches
from tests.fake_s3 import FakeS3
from tests.warehouse.builders import NOON

KILLED, SILENT = "(the controller is killed)", "(no answer comes)"


class Killed(BaseException):
    """Kills a controller: nothing catches it, and nothing answers afterwards."""


@dataclass
class Fault:
    """Refuse `times` calls of `action` ("" any) where `when(words)`, after `skip` others."""

    action: str
    code: str
    times: int = 1
    after: bool = False
    skip: int = 0
    when: Callable = lambda words: True

    def strikes(self, action, words):
        if self.times < 1 or self.action not in ("", action) or not self.when(words):
            return False
        if self.skip:
            self.skip -= 1
            return False
        self.times -= 1
        return True


@dataclass
class Instance:
    """A machine. It runs `boot_s` after its launch and ends itself as its user-data says."""

    instance_id: str
    instance_type: str
    market: str
    region: str
    zone: str
    address: str
    request: dict
    tags: dict
    launched_at: datetime
    boot_s: float = 5.0
    deaf: bool = False  # its own shutdown fails
    ended_at: datetime | None = None
    reason: str = ""

    @property
    def user_data(self):
        return base64.b64decode(self.request["UserData"]).decode()

    def ends_itself_at(self):
        minutes = re.search(r"shutdown -h \+(\d+)", self.user_data)
        if self.deaf or self.boot_s == float("inf"):
            return None
        return self.launched_at + timedelta(seconds=self.boot_s, minutes=int(minutes[1]))

    def end(self, at, reason):
        if self.ended_at is None:
            self.ended_at, self.reason = at, reason

    def state(self, now):
        if self.ended_at is not None:
            return "shutting-down" if now < self.ended_at + timedelta(seconds=30) else "terminated"
        runs = (now - self.launched_at).total_seconds() >= self.boot_s
        return "running" if runs else "pending"

    def described(self, now):
        ended = f"User initiated ({self.ended_at:%Y-%m-%d %H:%M:%S} GMT)" if self.ended_at else ""
        return {
            "InstanceId": self.instance_id,
            "InstanceType": self.instance_type,
            "State": {"Name": self.state(now)},
            "LaunchTime": self.launched_at,
            "Placement": {"AvailabilityZone": self.zone},
            "PrivateIpAddress": self.address,
            "Tags": [{"Key": key, "Value": value} for key, value in self.tags.items()],
            "StateTransitionReason": ended,
            "StateReason": {"Code": self.reason, "Message": "a secret"},
        }


@dataclass
class FakeAws:
    """The world. `capacity`: (zone, market) -> machines that may be had, where that is limited."""

    now: datetime = NOON
    account: Account = field(default_factory=Account)
    answers: dict = field(default_factory=lambda: dict(ANSWERS))  # by client's method
    faults: list = field(default_factory=list)
    capacity: dict = field(default_factory=dict)
    boot_s: float = 5.0
    lag_s: float = 0.0  # before a machine shows in descriptions
    immortal: bool = False  # terminating is accepted, and nothing comes of it
    short: int = 0  # a fleet gives so many fewer than were asked for
    fleet_errors: list = field(default_factory=list)  # of the next fleets
    unheard: bool = False  # those are served all the same
    dead: bool = False
    instances: dict = field(default_factory=dict)
    tokens: dict = field(default_factory=dict)  # request and answer
    calls: list = field(default_factory=list)  # (IAM's action, words)
    s3: FakeS3 = field(default_factory=FakeS3)

    @property
    def clock(self):
        return AwsClock(now=lambda: self.now, sleep=self.pass_s)

    def pass_s(self, seconds):
        """Time goes by; machines whose time is up end themselves."""
        self.now += timedelta(seconds=seconds)
        for machine in self.instances.values():
            ends = machine.ends_itself_at()
            if ends is not None and ends <= self.now:
                machine.end(ends, "Client.InstanceInitiatedShutdown")

    def alive(self):
        return [machine for machine in self.instances.values() if machine.ended_at is None]

    def bought(self):
        """Machines ever launched."""
        return len(self.instances)

    def count(self, action):
        return sum(name == action for name, _ in self.calls)

    def fails(self, action, code, **more):
        """This fault alone strikes from now on."""
        self.faults = [Fault(action=action, code=code, **more)]

    def interrupt(self, instance_id):
        """The spot market takes it back."""
        self.instances[instance_id].end(self.now, "Server.SpotInstanceTermination")

    def clients(self, service, region):
        return _Client(self, service, region)

    def serve(self, service, region, method, words):
        action = aws_model.iam_action(service, method)
        if self.dead:
            raise Killed(action)
        aws_model.valid(service, method, words)
        full = words | {"region": region}
        self.calls.append((action, full))
        fault = next((fault for fault in self.faults if fault.strikes(action, full)), None)
        if fault is not None and not fault.after:
            self._strike(fault, action)
        if words.get("DryRun"):
            raise client_error("DryRunOperation", action)
        if method in self.answers:
            answer = self.answers[method] | self.s3.headers(self.now)
        else:
            name = next(
                getattr(api, name)
                for api, name in ((self, f"_{method}"), (self.s3, method), (self.account, method))
                if hasattr(api, name)
            )
            answer = name(region=region, now=self.now, **words)
        if fault is not None:
            self._strike(fault, action)
        return answer

    def _strike(self, fault, name):
        if fault.code == KILLED:
            self.dead = True
            raise Killed(name)
        if fault.code == SILENT:
            raise ReadTimeoutError(endpoint_url="https://aws.example")
        raise client_error(fault.code, name)

    def _create_fleet(self, *, region, now, **words):
        """The same token buys nothing twice, and a failure is final for its token."""
        token, request = words["ClientToken"], repr(sorted(words.items()))
        if token not in self.tokens:
            ids, codes = self._fleet(region, words)
            errors = [{"ErrorCode": code, "ErrorMessage": "a secret"} for code in codes]
            answer = {"Instances": [{"InstanceIds": ids}] if ids else [], "Errors": errors}
            self.tokens[token] = request, answer
        if self.tokens[token][0] != request:
            raise client_error("IdempotentParameterMismatch", "CreateFleet")
        return self.tokens[token][1]

    def _fleet(self, region, words):
        """Machines in the cheapest place that has all of them, or an error for each place."""
        failures = self.fleet_errors.pop(0) if self.fleet_errors else []
        if failures and not self.unheard:
            return [], failures
        [config] = words["LaunchTemplateConfigs"]
        name = config["LaunchTemplateSpecification"]["LaunchTemplateName"]
        request = self.account.templates[region, name]["LaunchTemplateData"]
        market = words["TargetCapacitySpecification"]["DefaultTargetCapacityType"]
        options = words["SpotOptions" if market == "spot" else "OnDemandOptions"]
        assert options["SingleAvailabilityZone"] and options["SingleInstanceType"]
        places = {
            self.account.zone_of(override["SubnetId"]): override for override in config["Overrides"]
        }
        codes = []
        for zone in sorted(places, key=lambda zone: self.account.spot[zone]):
            override, count = places[zone], options["MinTargetCapacity"]
            left = self.capacity.get((zone, market), 10**6)
            if market == "spot" and self.account.spot[zone] > float(override["MaxPrice"]):
                codes.append("SpotMaxPriceTooLow")
            elif left < count:
                codes.append("InsufficientInstanceCapacity")
            else:
                self.capacity[zone, market] = left - count
                kind, number = override["InstanceType"], count - self.short
                ids = self._launch(region, zone, market, kind, number, request)
                return ([], failures) if failures else (ids, [])
        return [], codes

    def _launch(self, region, zone, market, name, count, request):
        tagged = {
            specification["ResourceType"]: specification["Tags"]
            for specification in request["TagSpecifications"]
        }
        ids = []
        for place in range(count):
            number = len(self.instances) + 1
            ids.append(f"i-{number:017x}")
            self.instances[ids[-1]] = Instance(
                instance_id=ids[-1],
                instance_type=name,
                market=market,
                region=region,
                zone=zone,
                address=f"10.0.0.{number}",
                request=request,
                tags={tag["Key"]: tag["Value"] for tag in tagged["instance"]},
                launched_at=self.now + timedelta(seconds=place),  # shown one by one
                boot_s=self.boot_s,
            )
        return ids

    def _describe_instances(self, *, region, now, Filters, **_):
        shown = now - timedelta(seconds=self.lag_s)
        described = [
            machine.described(now)
            for machine in self.instances.values()
            if machine.region == region and machine.launched_at <= shown
        ]
        found = [instance for instance in described if matches(instance, Filters)]
        return {"Reservations": [{"Instances": found}]}

    def _terminate_instances(self, *, region, now, InstanceIds, **_):
        shown = now - timedelta(seconds=self.lag_s)
        for machine in map(self.instances.get, InstanceIds):
            if machine is None or machine.region != region or machine.launched_at > shown:
                raise client_error("InvalidInstanceID.NotFound", "TerminateInstances")
        for name in () if self.immortal else InstanceIds:
            self.instances[name].end(now, "Client.UserInitiatedShutdown")
        return {"TerminatingInstances": []}


class _Client:
    """A client of boto3 that retries as its standard mode does."""

    def __init__(self, world, service, region):
        self._world, self._place = world, (service, region)

    def __getattr__(self, method):
        def call(**words):
            for attempt in range(ATTEMPTS - 1):
                try:
                    return self._world.serve(*self._place, method, words)
                except (ClientError, ReadTimeoutError) as error:
                    if AwsRefused(code_of(error), "", "").kind not in ("throttled", "unsure"):
                        raise
                self._world.clock.sleep(2.0**attempt)
            return self._world.serve(*self._place, method, words)

        return call
