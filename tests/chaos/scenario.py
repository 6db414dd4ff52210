"""A seeded scenario: what is to be measured, under which caps, and everything that goes wrong."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.fake_ec2 import SILENT, Fault

STAGES = ("booted", "ready", "armed", "running", "finished", "done")
THROTTLED = ("RequestLimitExceeded", "Throttling", "ThrottlingException", "InternalError", SILENT)
STORE = ("SlowDown", "InternalError", "503", SILENT)
SESSION = ("ExpiredToken", "UnauthorizedOperation", "NoCredentialsError")
NOT_FOUND_YET = (
    ("ec2:AuthorizeSecurityGroupIngress", "InvalidGroup.NotFound"),
    ("ec2:RevokeSecurityGroupEgress", "InvalidGroup.NotFound"),
    ("ec2:CreateFleet", "InvalidPlacementGroup.Unknown"),
    ("ec2:CreateFleet", "InvalidLaunchTemplateName.NotFoundException"),
)
ZONES = ("us-east-1a", "us-east-1b", "us-east-1c")
FREQUENT = (
    "s3:list_objects_v2",
    "s3:get_object",
    "s3:put_object",
    "ec2:describe_instances",
    "disk:appear",
    "disk:lease",
    "",
)
STEPS = (
    "ec2:create_fleet",
    "ec2:create_fleet",
    "ec2:terminate_instances",
    "ec2:create_security_group",
    "ec2:create_launch_template",
    "ec2:create_placement_group",
    "ec2:describe_subnets",
    "disk:forget",
    "disk:mailbox",
    "warehouse:begin",
    "warehouse:commit",
    *FREQUENT,
)
LAUNCHING = (
    "ec2:CreateFleet",
    "ec2:CreateFleet",
    "ec2:DescribeInstances",
    "ec2:CreateSecurityGroup",
    "ec2:CreateLaunchTemplate",
    "ec2:DescribeSubnets",
    "iam:GetInstanceProfile",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """What befalls the n-th machine ever launched, seconds after it has reached a stage."""

    machine: int
    kind: str
    stage: str = "booted"
    after_s: float = 0.0


@dataclass(slots=True, kw_only=True)
class Death:
    """The controller is killed at the n-th step of a name ("" any), and is back `away_s` later.

    `after`: the step is done. `by_hand`: by Ctrl-C, so that it may clean up.
    """

    name: str
    nth: int
    after: bool
    away_s: float
    by_hand: bool = False

    def strikes(self, name: str, after: bool) -> bool:
        if after != self.after or self.name not in ("", name):
            return False
        self.nth -= 1
        return self.nth < 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One launch: instance types with counts, a market, and the nodes of each run."""

    types: tuple[tuple[int, str], ...]
    market: str
    runs: tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(slots=True, kw_only=True)
class Scenario:
    """`skew_s`: the store's clock against the controller's. `lag_s`: until machines are shown.

    `visits`: seconds after which another process reaps this home and cannot read any lease.
    `unreadable`: after a death no lease can be read until a person fixes that, half an hour later.
    """

    seed: int
    kinds: tuple[str, ...] = ()
    orders: tuple[Order, ...] = ()
    cap_usd: float = 20.0
    month_usd: float = 60.0
    minutes: float = 90.0
    skew_s: float = 0.0
    lag_s: float = 0.0
    cut: int = 0  # objects that come short
    page: int = 1000
    unreadable: bool = False
    troubles: list[Trouble] = field(default_factory=list)
    deaths: list[Death] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    visits: Sequence[float] = ()
    capacity: dict[tuple[str, str], int] = field(default_factory=dict)
    spot: dict[str, float] = field(default_factory=dict)
    fleet_errors: list[list[str]] = field(default_factory=list)


Effect = Callable[[Scenario, random.Random], None]


def choose(**values: Sequence[Any]) -> Effect:
    """Each field is one of some values."""

    def effect(one: Scenario, rng: random.Random) -> None:
        for name, some in values.items():
            setattr(one, name, rng.choice(some))

    return effect


def befall(
    *kinds: str,
    most: int = 1,
    stages: Sequence[str] = STAGES,
    machines: Sequence[int] = (0, 0, 1, 1, 2, 3),
) -> Effect:
    """Up to `most` machines suffer one of `kinds`; a machine of the next launch may be the one."""

    def effect(one: Scenario, rng: random.Random) -> None:
        for _ in range(rng.randint(1, most)):
            stage = rng.choice(stages)
            trouble = Trouble(
                machine=rng.choice(machines),
                kind=rng.choice(kinds),
                stage=stage,
                after_s=rng.uniform(0.0, 2.0 if stage in ("finished", "done") else 12.0),
            )
            one.troubles.append(trouble)

    return effect


def every(*kinds: str, share: float = 1.0) -> Effect:
    """Each of the first machines suffers each of `kinds`, or a `share` of them."""

    def effect(one: Scenario, rng: random.Random) -> None:
        pairs = [(machine, kind) for machine in range(4) for kind in kinds]
        found = [pair for pair in pairs if rng.random() < share]
        one.troubles += [Trouble(machine=machine, kind=kind) for machine, kind in found]

    return effect


def refuse(
    actions: Sequence[str],
    codes: Sequence[str],
    *,
    most: int = 1,
    times: Sequence[int] = (1,),
    skips: Sequence[int] = (0,),
    afters: Sequence[bool] = (False,),
) -> Effect:
    """AWS refuses up to `most` actions, some of them after it has served them."""

    def effect(one: Scenario, rng: random.Random) -> None:
        for _ in range(rng.randint(1, most)):
            fault = Fault(
                action=rng.choice(actions),
                code=rng.choice(codes),
                times=rng.choice(times),
                skip=rng.choice(skips),
                after=rng.choice(afters),
            )
            one.faults.append(fault)

    return effect


def kill(
    names: Sequence[str] = STEPS,
    away_s: Sequence[float] = (2.0, 60.0, 400.0),
    *,
    by_hand: bool = False,
) -> Effect:
    def effect(one: Scenario, rng: random.Random) -> None:
        for _ in range(rng.choice([1, 1, 2, 3])):
            name = rng.choice(names)
            death = Death(
                name=name,
                nth=int(2 ** rng.uniform(0, 10)) if name in FREQUENT else rng.randrange(3),
                after=rng.random() < 0.5,
                away_s=rng.choice(away_s),
                by_hand=by_hand,
            )
            one.deaths.append(death)

    return effect


def capacity(one: Scenario, rng: random.Random) -> None:
    for zone in ZONES:
        for market in ("spot", "on-demand"):
            one.capacity[zone, market] = rng.choice([0, 0, 1, 2, 3, 99, 99, 99])


def second_group(one: Scenario, rng: random.Random) -> None:
    mixed = ((2, "g4dn.12xlarge"), (1, "g4dn.xlarge"))
    runs = (("profile", (2,)), ("train", (0, 1)), ("train", (0, 1, 2)))
    one.orders = (Order(types=mixed, market="spot", runs=runs), *one.orders[1:])
    for zone in ZONES:
        one.capacity |= {(zone, market): rng.choice([2, 2, 99]) for market in ("spot", "on-demand")}


def many_tries(one: Scenario, rng: random.Random) -> None:
    """Fleets fail, requests are throttled all along, and the last one is not answered."""
    one.fleet_errors = [["InternalError"], ["InternalError"]]
    fleet, code = "ec2:CreateFleet", rng.choice(["RequestLimitExceeded", "Throttling"])
    one.faults.append(Fault(action="ec2:CreateLaunchTemplate", code=code, times=5))
    one.faults += [Fault(action=fleet, code=code, times=5, skip=skip) for skip in range(3)]
    one.faults.append(Fault(action=fleet, code=SILENT, after=True, skip=2))


def dearer(one: Scenario, rng: random.Random) -> None:
    one.spot = {zone: round(rng.uniform(0.8, 3.9), 2) for zone in ZONES}


def is_sweep(words: dict[str, Any]) -> bool:
    """Whether DescribeInstances is the reaper's look through a region."""
    names = {each["Name"] for each in words.get("Filters", ())}
    return names == {"tag:srift:deployment", "instance-state-name"}


def blind(one: Scenario, rng: random.Random) -> None:
    """The session expires while the controller is away."""
    code, times, skip = rng.choice(SESSION), rng.randint(1, 4), rng.randint(0, 2)
    action = "ec2:DescribeInstances"
    one.faults.append(Fault(action=action, code=code, times=times, skip=skip, when=is_sweep))


def not_found_yet(one: Scenario, rng: random.Random) -> None:
    for action, code in rng.sample(NOT_FOUND_YET, rng.randint(1, 3)):
        one.faults.append(Fault(action=action, code=code, skip=rng.randint(0, 1)))


_FLEET, _END = ["ec2:CreateFleet"], ["ec2:TerminateInstances"]
_QUOTA = ["MaxSpotInstanceCountExceeded", "SpotMaxPriceTooLow", "VcpuLimitExceeded"]
_S3 = ["s3:ListBucket", "s3:GetObject", "s3:PutObject"]
_SOON, _HOURS = (2.0,), (1800.0, 3600.0, 9000.0)
_FIRST = ("booted",)
_USD = tuple(range(1, 15))

KINDS: dict[str, tuple[Effect, ...]] = {
    "capacity refused": (capacity,),
    "second group of a mixed cluster refused": (second_group,),
    "throttling": (
        refuse(
            LAUNCHING,
            THROTTLED,
            most=4,
            times=(1, 2, 3, 4, 7),
            skips=(0, 1, 2, 20),
            afters=(False, False, True),
        ),
    ),
    "quota or price": (refuse(_FLEET, _QUOTA, most=2, times=(1, 2, 3)),),
    "spot prices moved": (dearer,),
    "spot notice before, during, after": (
        befall("notice", "notice", "notice", "rebalance", most=3),
    ),
    "taken without notice": (befall("taken", "taken", "retired", most=3),),
    "a machine that never boots or speaks": (
        befall("never boots", "mute", stages=_FIRST, machines=(0,)),
    ),
    "a machine that hangs": (befall("hangs", most=2),),
    "controller killed and restarted": (kill(),),
    "deadline passed while away": (kill((*STEPS, *["ec2:create_fleet"] * 10), _HOURS),),
    "controller stopped by Ctrl-C": (kill(by_hand=True),),
    "S3 errors, short answers": (
        refuse(_S3, STORE, most=4, times=(1, 5, 30), skips=range(60)),
        choose(cut=(0, 1, 5), page=(2, 7, 1000)),
    ),
    "partial uploads, garbage, crashes": (every("uploads fail", "garbage", "crash", share=0.45),),
    "uploads while machines are ended": (
        every("uploads fail"),
        kill(("disk:appear", "s3:get_object"), _SOON),
    ),
    "clock skew": (every("skew"), choose(skew_s=(0.0, 45.0, -45.0, 840.0, -840.0))),
    "terminate fails": (
        refuse(
            _END,
            ["InternalError", "RequestLimitExceeded", SILENT, "UnauthorizedOperation"],
            times=(1, 3, 6, 7, 14),
            afters=(False, False, True),
        ),
    ),
    "records delivered twice": (every("twice"),),
    "caps that are tight": (choose(cap_usd=_USD[:9], month_usd=_USD[3:]),),
    "machines shown late": (choose(lag_s=(4.0, 20.0, 60.0)),),
    "a lease that another reaper cannot read": (choose(visits=((5.0,), (20.0, 60.0))),),
    "a lease that its successor cannot read": (kill(), choose(unreadable=(True,))),
    "a reaper without a session": (kill(), blind),
    "not found right after creation": (not_found_yet,),
    "a node that floods names": (befall("floods", stages=("ready", "armed", "running")),),
    "a node that nests deeply": (befall("nests", most=2),),
    "devices that are not there": (
        befall("no devices", "no devices", "wrong device", most=2, stages=_FIRST),
    ),
    "a launch of many tries": (many_tries, choose(lag_s=(0.0, 20.0, 60.0))),
}


def order(rng: random.Random) -> Order:
    """One to three machines, and what to measure on them."""
    types = rng.choice(
        [
            ((1, "g4dn.xlarge"),),
            ((2, "g4dn.12xlarge"),),
            ((3, "g4dn.xlarge"),),
            ((1, "g4dn.12xlarge"), (2, "g4dn.xlarge")),
        ]
    )
    whole = tuple(range(sum(count for count, _ in types)))
    runs: list[tuple[str, tuple[int, ...]]] = [("profile", (rng.choice(whole),)), ("train", whole)]
    if len(whole) > 1:
        runs += [("probe", whole), ("train", whole[:-1])]
    rng.shuffle(runs)
    return Order(types=types, market=rng.choice(["spot", "spot", "on-demand"]), runs=tuple(runs))


def scenario(seed: int, number: int) -> Scenario:
    """The n-th of a seed: its first kind in turn, and up to two others."""
    rng = random.Random(f"{seed}/{number}")
    names = list(KINDS)
    first = names[number % len(names)]
    others = rng.sample([name for name in names if name != first], rng.randint(0, 2))
    orders = tuple(order(rng) for _ in range(rng.randint(1, 3)))
    one = Scenario(seed=number, kinds=(first, *others), orders=orders)
    for name in one.kinds:
        for effect in KINDS[name]:
            effect(one, rng)
    return one
