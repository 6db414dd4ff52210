"""What launches show: every hour and interruption of a machine counts once."""

from datetime import timedelta

from tests.warehouse.builders import NOON, load, refused, setup, write
from warehouse.append import append
from warehouse.reads import launch_events

NIGHT = NOON.replace(hour=22)


def seen(warehouse, name, *changes):
    """The rows of launches/`name`.sql after launches of these machines."""
    row = {"lease_id": "l", "node": 0, "number": 0, "instance_type": "a", "market": "spot"}
    row |= {"provider": "local", "zone": "z1", "asked_at": NIGHT, "startup_s": 100.0, "hours": 2.0}
    row |= {"interrupted": False, "refresh_id": "r"}
    rows = [row | {"node": node} | change for node, change in enumerate(changes)]
    write(warehouse, append, "raw_machines", rows)
    return list(launch_events(warehouse, "local")[name].itertuples(index=False, name=None))


def test_a_launch_takes_as_long_as_its_last_machine_whatever_replaced_it_later(warehouse):
    first = [{}, {"startup_s": 130.0}, {"instance_type": "b"}]
    later = [{"startup_s": None}, {"number": 1, "startup_s": 500.0}]
    assert seen(warehouse, "starts", *first, *later, {"lease_id": "m"}) == [
        ("a", "spot", 3, 130.0),
        ("b", "spot", 3, 100.0),
        ("a", "spot", 1, 100.0),
    ]


def test_exposure_is_that_of_spot_machines_by_zone_and_day(warehouse):
    lost = {"interrupted": True, "hours": 0.5}
    left_out = [{"market": "on-demand"}, {"hours": 0.0}, {"provider": "ec2"}]
    held = [{}, lost, {"asked_at": NIGHT + timedelta(days=1)}, {"zone": "z2"}, *left_out]
    assert seen(warehouse, "spot_days", *held) == [
        ("a", "z1", 2.5, 1),
        ("a", "z1", 2.0, 0),
        ("a", "z2", 2.0, 0),
    ]
    assert seen(warehouse, "lost_together") == [(3, 1)]


def test_a_refusal_is_one_request_a_type_and_a_launch_another(warehouse):
    load(warehouse, refused(of=setup(cluster="4xa+1xb", market="spot", zone="z1")))
    assert seen(warehouse, "requests", {}, {}, {"lease_id": "m"}) == [
        ("a", "spot", "z1", False),
        *[("a", "spot", "z1", True)] * 2,
        ("b", "spot", "z1", False),
    ]
