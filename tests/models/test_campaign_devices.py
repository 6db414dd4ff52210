"""Machines with several devices: full ones are measured, and one device of one machine, at the same batch a device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pandas as pd

from models.campaign import Launch, shopping_list
from models.cloud import Cluster, Offer
from models.identity import row_key
from models.wants import Costs, train_wants
from tests.models.planning import NOTHING, cores_fit, machine, offer, workload

FOUR = offer("large", "spot", instance_type=replace(machine("large", devices=4), cores=0.8))
ONE = offer("small", "spot")
JOB = workload("mlp", 64, 256)


def shop(runs: pd.DataFrame = NOTHING, profiles: pd.DataFrame = NOTHING, *offers: Offer) -> list[Launch]:
    return shopping_list(
        [JOB], offers or (FOUR, ONE), runs, profiles, NOTHING, max_usd=10.0, max_seconds=3000.0, max_hosts=2,
        fits=cores_fit, seed=7,
    )  # fmt: skip


def test_full_machines_and_single_devices_are_both_to_be_had() -> None:
    clusters = [Cluster(members=(FOUR,)), Cluster(members=(FOUR, FOUR)), Cluster(members=(FOUR, ONE))]
    wants = train_wants([JOB], clusters, NOTHING, batches={}, expected_step=None, costs=Costs()).values()
    layouts = {(want.cluster, want.devices) for want in wants}
    assert ("1xlarge", (4,)) in layouts and ("1xlarge", (1,)) in layouts
    assert ("2xlarge", (4, 4)) in layouts and ("1xlarge+1xsmall", (4, 1)) in layouts
    assert len(layouts) == 4
    whole = {want.batches for want in wants if want.devices == (4,)}
    assert {want.batches for want in wants if want.devices == (1,)} <= whole, "at the same batch a device"


def test_one_device_machines_are_wanted_as_before() -> None:
    wants = train_wants(
        [JOB], [Cluster(members=(ONE, ONE))], NOTHING, batches={}, expected_step=None, costs=Costs()
    ).values()
    assert {want.devices for want in wants} == {()}
    assert "devices" not in repr(next(iter(wants))), "equals are told apart by this text: it must stay as it was"


def test_the_list_says_how_many_devices_and_what_was_measured_is_not_bought_again() -> None:
    launches = shop()
    items = [(launch.cluster, item) for launch in launches for item in launch.items]
    trains = [(cluster, item) for cluster, item in items if item.kind == "train"]
    assert {item.devices for _, item in items if item.kind == "profile"} == {()}
    assert any(item.devices == (1,) for _, item in trains) and any(4 in item.devices for _, item in trains)
    for cluster, item in trains:
        own = [cluster.members[node].instance_type.devices for node in item.nodes]
        assert len(item.layout) == len(item.nodes) and all(
            used in (1, most) for used, most in zip(item.layout, own, strict=True)
        )
    rows: list[dict[str, Any]] = []
    for cluster, item in trains:
        names = [cluster.members[node].instance_type.name for node in item.nodes]
        rows.append(
            {
                "workload": item.workload,
                "cluster": "+".join(f"1x{name}" for name in names),
                "layout": "+".join(map(str, item.layout)),
                "batch_per_device": "+".join(map(str, item.batches)),
                "accumulation_steps": item.accumulation_steps,
                "step_spread": 0.01,
            }
        )
    devices = {"large": 4, "small": 1}
    measured = {row_key(row, devices) for row in rows}
    again = [
        row_key(
            {
                "workload": item.workload,
                "cluster": "+".join(f"1x{launch.cluster.members[node].instance_type.name}" for node in item.nodes),
                "layout": "+".join(map(str, item.layout)),
                "batch_per_device": "+".join(map(str, item.batches)),
                "accumulation_steps": item.accumulation_steps,
            },
            devices,
        )
        for launch in shop(pd.DataFrame(rows))
        for item in launch.items
        if item.kind == "train"
    ]
    assert measured.isdisjoint(again)
