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
UNKNOWN_KEY, TOO_MANY_FILES = "an unknown key", "too many open files"
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
class Visit:
    """Another process reaps this home and cannot read any lease: `why`."""

    after_s: float
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One launch: instance types with counts, a market, and the nodes of each run."""

    types: tuple[tuple[int, str], ...]
    market: str
    runs: tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(slots=True, kw_only=True)
class Scenario:
    """`skew_s`: the store's clock against the controller's. `lag_s`: until machines are shown.

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
    visits: list[Visit] = field(default_factory=list)
    capacity: dict[tuple[str, str], int] = field(default_factory=dict)
    spot: dict[str, float] = field(default_factory=dict)
    fleet_errors: list[list[str]] = field(default_factory=list)

    def every_machine(self, *kinds: str) -> None:
        for machine in range(4):
            self.troubles += [Trouble(machine=machine, kind=kind) for kind in kinds]


Mix = Callable[[Scenario, random.Random], None]


def _at_any_stage(one: Scenario, rng: random.Random, kinds: Sequence[str]) -> None:
    """Of a machine of the first launch, or of the next one."""
    machines = sum(count for count, _ in one.orders[0].types)
    stage = rng.choice(STAGES)
    soon_s = 2.0 if stage in ("finished", "done") else 12.0
    one.troubles.append(
        Trouble(
            machine=rng.randrange(machines + (rng.random() < 0.3)),
            kind=rng.choice(kinds),
            stage=stage,
            after_s=rng.uniform(0.0, soon_s),
        )
    )


def capacity(one: Scenario, rng: random.Random) -> None:
    for zone in ZONES:
        for market in ("spot", "on-demand"):
            if rng.random() < 0.6:
                one.capacity[zone, market] = rng.choice([0, 0, 1, 2, 3])


def second_group(one: Scenario, rng: random.Random) -> None:
    mixed = ((2, "g4dn.12xlarge"), (1, "g4dn.xlarge"))
    runs = (("profile", (2,)), ("train", (0, 1)), ("train", (0, 1, 2)))
    one.orders = (Order(types=mixed, market="spot", runs=runs), *one.orders[1:])
    for zone in rng.sample(ZONES, rng.randint(1, 3)):
        one.capacity[zone, "spot"] = 2
    if rng.random() < 0.4:
        one.capacity |= {(zone, "on-demand"): 2 for zone in ZONES}


def throttling(one: Scenario, rng: random.Random) -> None:
    for _ in range(rng.randint(1, 4)):
        action, skip = rng.choice(LAUNCHING), rng.randint(0, 40)
        one.faults.append(
            Fault(
                action=action,
                code=rng.choice(THROTTLED),
                times=rng.choice([1, 2, 3, 4, 7]),
                after=rng.random() < 0.4,
                skip=skip if action == "ec2:DescribeInstances" else skip % 3,
            )
        )


def many_tries(one: Scenario, rng: random.Random) -> None:
    """Fleets fail, requests are throttled all along, and the last one is not answered."""
    code = rng.choice(["RequestLimitExceeded", "Throttling"])
    one.lag_s = rng.choice([0.0, 20.0, 60.0])
    one.fleet_errors = [["InternalError"], ["InternalError"]]
    for action, skip in (
        ("ec2:CreateLaunchTemplate", 0),
        *(("ec2:CreateFleet", n) for n in range(3)),
    ):
        one.faults.append(Fault(action=action, code=code, times=5, skip=skip))
    one.faults.append(Fault(action="ec2:CreateFleet", code=SILENT, after=True, skip=2))


def quota(one: Scenario, rng: random.Random) -> None:
    codes = [rng.choice(["MaxSpotInstanceCountExceeded", "SpotMaxPriceTooLow"])]
    codes += ["VcpuLimitExceeded"] * (rng.random() < 0.5)
    for code in codes:
        one.faults.append(Fault(action="ec2:CreateFleet", code=code, times=rng.randint(1, 3)))


def dearer(one: Scenario, rng: random.Random) -> None:
    one.spot = {zone: round(rng.uniform(0.8, 3.9), 2) for zone in ZONES}


def notice(one: Scenario, rng: random.Random) -> None:
    for _ in range(rng.randint(1, 3)):
        _at_any_stage(one, rng, ["notice", "notice", "notice", "rebalance"])


def taken(one: Scenario, rng: random.Random) -> None:
    for _ in range(rng.randint(1, 3)):
        _at_any_stage(one, rng, ["taken", "taken", "retired"])


def never_boots(one: Scenario, rng: random.Random) -> None:
    one.troubles.append(Trouble(machine=0, kind=rng.choice(["never boots", "mute"])))


def hangs(one: Scenario, rng: random.Random) -> None:
    for _ in range(rng.randint(1, 2)):
        _at_any_stage(one, rng, ["hangs"])


def killed(one: Scenario, rng: random.Random) -> None:
    for _ in range(rng.choice([1, 1, 2, 3])):
        name = rng.choice(STEPS)
        one.deaths.append(
            Death(
                name=name,
                nth=int(2 ** rng.uniform(0, 10)) if name in FREQUENT else rng.randrange(3),
                after=rng.random() < 0.5,
                away_s=rng.choice([2.0, 60.0, 400.0]),
            )
        )


def by_hand(one: Scenario, rng: random.Random) -> None:
    killed(one, rng)
    for death in one.deaths:
        death.by_hand = True


def away(one: Scenario, rng: random.Random) -> None:
    killed(one, rng)
    if rng.random() < 0.4:  # machines are bought, and never heard of
        nth = rng.randrange(2)
        one.deaths[0] = Death(name="ec2:create_fleet", nth=nth, after=True, away_s=0.0)
    for death in one.deaths:
        death.away_s = rng.choice([1800.0, 3600.0, 9000.0])


def store(one: Scenario, rng: random.Random) -> None:
    for _ in range(rng.randint(1, 4)):
        one.faults.append(
            Fault(
                action=rng.choice(["s3:ListBucket", "s3:GetObject", "s3:PutObject"]),
                code=rng.choice(STORE),
                times=rng.choice([1, 5, 30]),
                skip=rng.randint(0, 60),
            )
        )
    one.cut = rng.choice([0, 1, 5])
    one.page = rng.choice([2, 7, 1000])


def uploads(one: Scenario, rng: random.Random) -> None:
    for machine in range(4):
        kinds = [kind for kind in ("uploads fail", "garbage", "crash") if rng.random() < 0.45]
        one.troubles += [Trouble(machine=machine, kind=kind) for kind in kinds]


def last_words(one: Scenario, rng: random.Random) -> None:
    """Records go up late, and their reader dies and is back at once."""
    one.every_machine("uploads fail")
    for _ in range(rng.randint(1, 3)):
        name, nth = rng.choice(["disk:appear", "s3:get_object"]), rng.randint(5, 60)
        one.deaths.append(Death(name=name, nth=nth, after=True, away_s=2.0))


def skew(one: Scenario, rng: random.Random) -> None:
    one.skew_s = rng.choice([0.0, 45.0, -45.0, 840.0, -840.0])
    one.every_machine("skew")


def terminate(one: Scenario, rng: random.Random) -> None:
    code = rng.choice(["InternalError", "RequestLimitExceeded", SILENT, "UnauthorizedOperation"])
    times, after = rng.choice([1, 3, 6, 7, 14]), rng.random() < 0.3
    one.faults.append(Fault(action="ec2:TerminateInstances", code=code, times=times, after=after))


def twice(one: Scenario, rng: random.Random) -> None:
    one.every_machine("twice")


def tight(one: Scenario, rng: random.Random) -> None:
    one.cap_usd, one.month_usd = rng.uniform(1.0, 9.0), rng.uniform(4.0, 14.0)


def devices(one: Scenario, rng: random.Random) -> None:
    """A driver that never comes up, noticed by the node or not."""
    for machine in rng.sample(range(4), rng.randint(1, 2)):
        kind = rng.choice(["no devices", "no devices", "wrong device"])
        one.troubles.append(Trouble(machine=machine, kind=kind))


def unseen(one: Scenario, rng: random.Random) -> None:
    one.lag_s = rng.choice([4.0, 20.0, 60.0])


def visited(one: Scenario, rng: random.Random) -> None:
    for _ in range(rng.randint(1, 2)):
        why = rng.choice([UNKNOWN_KEY, TOO_MANY_FILES])
        one.visits.append(Visit(after_s=rng.uniform(1.0, 70.0), why=why))


def unreadable(one: Scenario, rng: random.Random) -> None:
    killed(one, rng)
    one.unreadable = True


def is_sweep(words: dict[str, Any]) -> bool:
    """Whether DescribeInstances is the reaper's look through a region."""
    names = {each["Name"] for each in words.get("Filters", ())}
    return names == {"tag:srift:deployment", "instance-state-name"}


def blind(one: Scenario, rng: random.Random) -> None:
    """The session expires while the controller is away."""
    killed(one, rng)
    code, times, skip = rng.choice(SESSION), rng.randint(1, 4), rng.randint(0, 2)
    action = "ec2:DescribeInstances"
    one.faults.append(Fault(action=action, code=code, times=times, skip=skip, when=is_sweep))


def not_found_yet(one: Scenario, rng: random.Random) -> None:
    for action, code in rng.sample(NOT_FOUND_YET, rng.randint(1, 3)):
        one.faults.append(Fault(action=action, code=code, skip=rng.randint(0, 1)))


def floods(one: Scenario, rng: random.Random) -> None:
    stage, after_s = rng.choice(["ready", "armed", "running"]), rng.uniform(0.0, 8.0)
    machine = rng.randrange(3)
    one.troubles.append(Trouble(machine=machine, kind="floods", stage=stage, after_s=after_s))


def nests(one: Scenario, rng: random.Random) -> None:
    for machine in rng.sample(range(3), 2):
        one.troubles.append(Trouble(machine=machine, kind="nests", stage=rng.choice(STAGES)))


KINDS: dict[str, Mix] = {
    "capacity refused": capacity,
    "second group of a mixed cluster refused": second_group,
    "throttling": throttling,
    "quota or price": quota,
    "spot prices moved": dearer,
    "spot notice before, during, after": notice,
    "taken without notice": taken,
    "a machine that never boots or speaks": never_boots,
    "a machine that hangs": hangs,
    "controller killed and restarted": killed,
    "deadline passed while away": away,
    "controller stopped by Ctrl-C": by_hand,
    "S3 errors, short answers": store,
    "partial uploads, garbage, crashes": uploads,
    "uploads while machines are ended": last_words,
    "clock skew": skew,
    "terminate fails": terminate,
    "records delivered twice": twice,
    "caps that are tight": tight,
    "machines shown late": unseen,
    "a lease that another reaper cannot read": visited,
    "a lease that its successor cannot read": unreadable,
    "a reaper without a session": blind,
    "not found right after creation": not_found_yet,
    "a node that floods names": floods,
    "a node that nests deeply": nests,
    "devices that are not there": devices,
    "a launch of many tries": many_tries,
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
        KINDS[name](one, rng)
    return one
