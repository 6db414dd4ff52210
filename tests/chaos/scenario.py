"""Draw random scenarios: what is measured, under which caps, and what goes wrong."""

import random
from functools import partial

from tests.chaos.node import STAGES, Trouble
from tests.chaos.world import ChaosAws, Death, Order, is_sweep
from tests.fake_ec2 import SILENT, Fault

ZONES = ("us-east-1a", "us-east-1b", "us-east-1c")
MARKETS = ("spot", "on-demand")
# Steps of a controller, at which it may be killed: calls of AWS, writes to its disk, transactions.
FREQUENT = (
    "s3:list_objects_v2",
    "s3:get_object",
    "s3:put_object",
    "ec2:describe_instances",
    "disk:appear",
    "disk:lease",
    "",
)
SELDOM = """
ec2:create_fleet ec2:create_fleet ec2:terminate_instances ec2:create_security_group
ec2:create_launch_template ec2:create_placement_group ec2:describe_subnets
disk:forget disk:mailbox warehouse:begin warehouse:commit
"""
STEPS = (*SELDOM.split(), *FREQUENT)


def choose(world, rng, **values):
    """Set each named field of the world, or else of its S3, to a random element of its values."""
    for name, some in values.items():
        setattr(world if hasattr(world, name) else world.s3, name, rng.choice(some))


def befall(world, rng, *, kinds, most=1, stages=STAGES, machines=(0, 0, 1, 1, 2, 3)):
    """Plan one to `most` troubles with random values.

    Each argument lists the values to choose from: kinds of trouble, stages of a machine after which
    the trouble starts, and machines, numbered from 0 in the order of launch.
    """
    for _ in range(rng.randint(1, most)):
        stage = rng.choice(stages)
        after_s = rng.uniform(0.0, 2.0 if stage in ("finished", "done") else 12.0)
        machine, kind = rng.choice(machines), rng.choice(kinds)
        world.troubles.append(Trouble(machine=machine, kind=kind, stage=stage, after_s=after_s))


def every(world, rng, *, kinds, share=1.0):
    """Plan each kind of trouble for each of the first four machines, with probability `share`."""
    for machine in range(4):
        for kind in kinds:
            if rng.random() < share:
                world.troubles.append(Trouble(machine=machine, kind=kind))


def refuse(world, rng, *, actions, codes, most=1, times=(1,), skips=(0,), **options):
    """Plan one to `most` faults, with which AWS refuses an action.

    Each argument lists the values to choose from: actions, error codes, numbers of refusals
    (`times`), and numbers of calls that succeed before the refusals (`skips`). The option `afters`
    has True if AWS may perform the action before it refuses it. All other options are fields of
    Fault.
    """
    afters = options.pop("afters", (False,))
    for _ in range(rng.randint(1, most)):
        fault = Fault(
            action=rng.choice(actions),
            code=rng.choice(codes),
            times=rng.choice(times),
            skip=rng.choice(skips),
            after=rng.choice(afters),
            **options,
        )
        world.faults.append(fault)


def kill(world, rng, *, names=STEPS, away_s=(2.0, 60.0, 400.0), by_hand=False):
    """Plan one to three deaths of the controller.

    `names` lists the steps at which it may die, and `away_s` the possible seconds until a new
    controller starts. `by_hand` is True if Ctrl-C ends the controller.
    """
    for _ in range(rng.choice([1, 1, 2, 3])):
        name = rng.choice(names)
        death = Death(
            name=name,
            nth=int(2 ** rng.uniform(0, 10)) if name in FREQUENT else rng.randrange(3),
            after=rng.random() < 0.5,
            away_s=rng.choice(away_s),
            by_hand=by_hand,
        )
        world.deaths.append(death)


def limit(world, rng, *, counts):
    """Limit the machines of each zone and market to a random element of `counts`."""
    world.capacity |= {(zone, market): rng.choice(counts) for zone in ZONES for market in MARKETS}


def second_group(world, rng):
    mixed = ((2, "g4dn.12xlarge"), (1, "g4dn.xlarge"))
    runs = (("profile", (2,)), ("train", (0, 1)), ("train", (0, 1, 2)))
    world.orders[0] = Order(types=mixed, market="spot", runs=runs)


def repeated_tries(world, rng):
    """Plan two failed fleets, throttled requests, and a last request without an answer."""
    world.fleet_errors = [["InternalError"], ["InternalError"]]
    code = rng.choice(["RequestLimitExceeded", "Throttling"])
    world.faults.append(Fault(action="ec2:CreateLaunchTemplate", code=code, times=5))
    world.faults += [Fault(action=_FLEET[0], code=code, times=5, skip=skip) for skip in range(3)]
    world.faults.append(Fault(action=_FLEET[0], code=SILENT, after=True, skip=2))


def unheard(world, rng):
    """Plan fleets that AWS launches although it answers InternalError, and shows later."""
    world.unheard, world.lag_s = True, rng.choice((4.0, 20.0, 60.0, 100.0))
    world.fleet_errors = [["InternalError"]] * rng.randint(1, 3)


def dearer(world, rng):
    world.account.spot |= {zone: round(rng.uniform(0.8, 3.9), 2) for zone in ZONES}


def not_found_yet(world, rng):
    for action, code in rng.sample(_NOT_FOUND_YET, rng.randint(1, 3)):
        world.faults.append(Fault(action=action, code=code, skip=rng.randint(0, 1)))


_THROTTLED = ("RequestLimitExceeded", "Throttling", "ThrottlingException", "InternalError", SILENT)
_STORE = ("SlowDown", "InternalError", "503", SILENT)
_SESSION = ("ExpiredToken", "UnauthorizedOperation", "NoCredentialsError")
_NOT_FOUND_YET = (
    ("ec2:AuthorizeSecurityGroupIngress", "InvalidGroup.NotFound"),
    ("ec2:RevokeSecurityGroupEgress", "InvalidGroup.NotFound"),
    ("ec2:CreateFleet", "InvalidPlacementGroup.Unknown"),
    ("ec2:CreateFleet", "InvalidLaunchTemplateName.NotFoundException"),
)
_LAUNCHING = """
ec2:CreateFleet ec2:CreateFleet ec2:DescribeInstances ec2:CreateSecurityGroup
ec2:CreateLaunchTemplate ec2:DescribeSubnets iam:GetInstanceProfile
"""
_FLEET, _END, _LOOK = ["ec2:CreateFleet"], ["ec2:TerminateInstances"], ["ec2:DescribeInstances"]
_ENDING = ["InternalError", "RequestLimitExceeded", SILENT, "UnauthorizedOperation"]
_QUOTA = ["MaxSpotInstanceCountExceeded", "SpotMaxPriceTooLow", "VcpuLimitExceeded"]
_S3 = ["s3:ListBucket", "s3:GetObject", "s3:PutObject"]
_SOMETIMES_AFTER = (False, False, True)
_HOURS = (1800.0, 3600.0, 9000.0)
_NOTICES = ("notice", "notice", "notice", "rebalance")
_BROKEN = ("uploads fail", "garbage", "crash")

KINDS = {
    "capacity refused": [partial(limit, counts=(0, 0, 1, 2, 3, 99, 99, 99))],
    "second group of a mixed cluster refused": (second_group, partial(limit, counts=(2, 2, 99))),
    "throttling": (
        partial(
            refuse,
            actions=_LAUNCHING.split(),
            codes=_THROTTLED,
            most=4,
            times=(1, 2, 3, 4, 7),
            skips=(0, 1, 2, 20),
            afters=_SOMETIMES_AFTER,
        ),
    ),
    "quota or price": [partial(refuse, actions=_FLEET, codes=_QUOTA, most=2, times=(1, 2, 3))],
    "spot prices moved": [dearer],
    "spot notice before, during, after": [partial(befall, kinds=_NOTICES, most=3)],
    "taken without notice": [partial(befall, kinds=("taken", "taken", "retired"), most=3)],
    "a machine that never boots or speaks": (
        partial(befall, kinds=("never boots", "mute"), stages=STAGES[:1], machines=(0,)),
    ),
    "a machine that hangs": [partial(befall, kinds=("hangs",), most=2)],
    "controller killed and restarted": [kill],
    "deadline passed while away": (
        partial(kill, names=(*STEPS, *["ec2:create_fleet"] * 10), away_s=_HOURS),
    ),
    "controller stopped by Ctrl-C": [partial(kill, by_hand=True)],
    "S3 errors, short answers": (
        partial(refuse, actions=_S3, codes=_STORE, most=4, times=(1, 5, 30), skips=range(60)),
        partial(choose, cut=(0, 1, 5), page=(2, 7, 1000)),
    ),
    "partial uploads, garbage, crashes": [partial(every, kinds=_BROKEN, share=0.45)],
    "uploads while machines are ended": (
        partial(every, kinds=("uploads fail",)),
        partial(kill, names=("disk:appear", "s3:get_object"), away_s=(2.0,)),
    ),
    "clock skew": (
        partial(every, kinds=("skew",)),
        partial(choose, skew_s=(0.0, 45.0, -45.0, 840.0, -840.0)),
    ),
    "terminate fails": (
        partial(
            refuse,
            actions=_END,
            codes=_ENDING,
            times=(1, 3, 6, 7, 14),
            afters=_SOMETIMES_AFTER,
        ),
    ),
    "records delivered twice": [partial(every, kinds=("twice",))],
    "caps that are tight": [partial(choose, cap_usd=range(1, 10), month_usd=range(4, 15))],
    "machines shown late": [partial(choose, lag_s=(4.0, 20.0, 60.0))],
    "a lease that its successor cannot read": (kill, partial(choose, unreadable=(True,))),
    "a reaper without a session": (
        kill,
        partial(
            refuse,
            actions=_LOOK,
            codes=_SESSION,
            times=range(1, 5),
            skips=range(3),
            when=is_sweep,
        ),
    ),
    "not found right after creation": [not_found_yet],
    "served, InternalError, shown late": [unheard],
    "a launch of many tries": (repeated_tries, partial(choose, lag_s=(0.0, 20.0, 60.0))),
}
_TYPES = (
    ((1, "g4dn.xlarge"),),
    ((2, "g4dn.12xlarge"),),
    ((3, "g4dn.xlarge"),),
    ((1, "g4dn.12xlarge"), (2, "g4dn.xlarge")),
)


def order(rng):
    """Return a random order: one to three machines, and the runs to make on them."""
    types = rng.choice(_TYPES)
    whole = tuple(range(sum(count for count, _ in types)))
    runs = [("profile", (rng.choice(whole),)), ("train", whole)]
    if len(whole) > 1:
        runs += [("probe", whole), ("train", whole[:-1])]
    rng.shuffle(runs)
    return Order(types=types, market=rng.choice(["spot", *MARKETS]), runs=tuple(runs))


def scenario(seed, number):
    """Return scenario `number` of a seed.

    Consecutive numbers take the kinds in turn. Up to two other kinds are added at random.
    """
    rng = random.Random(f"{seed}/{number}")
    names = list(KINDS)
    first = names.pop(number % len(names))
    kinds = [first, *rng.sample(names, rng.randint(0, 2))]
    orders = [order(rng) for _ in range(rng.randint(1, 3))]
    world = ChaosAws(rng=random.Random(f"world/{number}"), kinds=kinds, orders=orders)
    for name in kinds:
        for effect in KINDS[name]:
            effect(world, rng)
    return world
