"""From machines that were held to what is learned from: every hour and every interruption is
counted once.
"""

from __future__ import annotations

from typing import Any

import pandas as pd

from models.job import launch_history

NIGHT = pd.Timestamp("2026-11-20 22:30")
NO_REFUSALS = pd.DataFrame({"cluster": [], "market": [], "zone": []})


def machine(lease: str = "l", **changes: Any) -> dict[str, Any]:
    row = {
        "lease_id": lease,
        "node": 0,
        "number": 0,
        "instance_type": "a",
        "market": "spot",
        "zone": "z1",
    }
    return (
        row | {"asked_at": NIGHT, "startup_s": 100.0, "hours": 2.0, "interrupted": False} | changes
    )


def test_a_launch_takes_as_long_as_its_last_machine_whatever_replaced_one_later() -> None:
    rows = [
        machine(),
        machine(node=1, startup_s=130.0),
        machine(node=2, market="on-demand", startup_s=60.0),
    ]
    rows += [
        machine(node=3, startup_s=None),
        machine(number=1, startup_s=500.0),
        machine("m", startup_s=90.0),
    ]
    assert launch_history.launches(pd.DataFrame(rows)).to_dict("records") == [
        {"instance_type": "a", "market": "spot", "machines": 3, "seconds": 130.0},
        {"instance_type": "a", "market": "on-demand", "machines": 3, "seconds": 60.0},
        {"instance_type": "a", "market": "spot", "machines": 1, "seconds": 90.0},
    ]


def test_exposure_is_that_of_spot_machines_by_zone_and_day() -> None:
    later = NIGHT + pd.Timedelta(days=1)
    rows = [
        machine(),
        machine(interrupted=True, hours=0.5),
        machine(asked_at=later),
        machine(market="on-demand"),
    ]
    found = launch_history.windows(pd.DataFrame([*rows, machine(zone="z2"), machine(hours=0.0)]))
    assert found.to_dict("records") == [
        {"instance_type": "a", "zone": "z1", "hours": 2.5, "interruptions": 1},
        {"instance_type": "a", "zone": "z1", "hours": 2.0, "interruptions": 0},
        {"instance_type": "a", "zone": "z2", "hours": 2.0, "interruptions": 0},
    ]


def test_a_refusal_is_one_request_a_type_and_a_launch_another() -> None:
    refused = pd.DataFrame([{"cluster": "4xa+1xb", "market": "spot", "zone": "z1"}])
    found = launch_history.requests(pd.DataFrame([machine(), machine(), machine("m")]), refused)
    assert sorted(found.itertuples(index=False, name=None)) == [
        *([("a", "spot", "z1", False)] + [("a", "spot", "z1", True)] * 2),
        ("b", "spot", "z1", False),
    ]


def test_without_machines_there_is_nothing_to_learn_from() -> None:
    for nothing in (pd.DataFrame(), pd.DataFrame(columns=list(machine()))):
        assert launch_history.launches(nothing).empty and launch_history.windows(nothing).empty
        assert (
            launch_history.together(nothing).empty
            and launch_history.requests(nothing, NO_REFUSALS).empty
        )
