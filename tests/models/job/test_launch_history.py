"""From machines that were held to training rows: every hour and interruption counts once."""

import pandas as pd

from models.job import launch_history

NIGHT = pd.Timestamp("2026-11-20 22:30")


def machines(*changes):
    row = {"lease_id": "l", "node": 0, "number": 0, "instance_type": "a", "market": "spot"}
    row |= {"zone": "z1", "asked_at": NIGHT, "startup_s": 100.0, "hours": 2.0}
    return pd.DataFrame([row | {"interrupted": False} | change for change in changes])


def test_a_launch_takes_as_long_as_its_last_machine_whatever_replaced_it_later():
    first = [{}, {"node": 1, "startup_s": 130.0}, {"node": 2, "instance_type": "b"}]
    later = [{"node": 3, "startup_s": None}, {"number": 1, "startup_s": 500.0}]
    found = launch_history.launches(machines(*first, *later, {"lease_id": "m"}))
    assert sorted(found.itertuples(index=False, name=None)) == [
        ("a", "spot", 1, 100.0),
        ("a", "spot", 3, 130.0),
        ("b", "spot", 3, 100.0),
    ]


def test_exposure_is_that_of_spot_machines_by_zone_and_day():
    lost = {"interrupted": True, "hours": 0.5}
    left_out = [{"market": "on-demand"}, {"hours": 0.0}]
    held = machines({}, lost, {"asked_at": NIGHT + pd.Timedelta("1D")}, {"zone": "z2"}, *left_out)
    assert launch_history.windows(held).to_dict("records") == [
        {"instance_type": "a", "zone": "z1", "hours": 2.5, "interruptions": 1},
        {"instance_type": "a", "zone": "z1", "hours": 2.0, "interruptions": 0},
        {"instance_type": "a", "zone": "z2", "hours": 2.0, "interruptions": 0},
    ]
    together = launch_history.together(held)
    assert together[["machines", "lost"]].to_numpy().tolist() == [[3, 1]]


def test_a_refusal_is_one_request_a_type_and_a_launch_another():
    refused = pd.DataFrame([{"cluster": "4xa+1xb", "market": "spot", "zone": "z1"}])
    found = launch_history.requests(machines({}, {}, {"lease_id": "m"}), refused)
    assert sorted(found.itertuples(index=False, name=None)) == [
        *([("a", "spot", "z1", False)] + [("a", "spot", "z1", True)] * 2),
        ("b", "spot", "z1", False),
    ]
