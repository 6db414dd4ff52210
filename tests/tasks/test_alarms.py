"""Slow runs reach the warehouse once, `srift status`, and the reason of what is recommended; a later run ends that."""

from __future__ import annotations

from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tasks import status
from tasks.alarms import note_alarms, noted
from tasks.installation import Installation
from tasks.publish import export_copies
from tests.installed import NOON, champion, install, measured
from tests.warehouse.builders import record, setup
from warehouse import reads
from warehouse.append import append_records, note_instance_types, note_workloads
from warehouse.reads import mart


@pytest.fixture
def here(tmp_path: Path) -> Installation:
    made = install(tmp_path)
    with made.warehouse.transact() as connection:
        note_workloads(connection, [{"workload": "conv", "digest": "w1"}], provider="local", noted_at=NOON)
        types = [asdict(one) | {"digest": one.digest} for one in made.provider.instance_types()]
        note_instance_types(connection, types, noted_at=NOON)
    return made


def ran(here: Installation, run_id: str, step_s: float, *, hours: float = 0.0, **values: Any) -> None:
    """Two small machines, as the warehouse has it when a launch came home."""
    digests = {one.name: one.digest for one in here.provider.instance_types()}
    whole = {"instance_types": ["s.small"] * 2, "instance_digests": [digests["s.small"]] * 2}
    body = record(run_id, ended_unix=(NOON + timedelta(hours=hours)).timestamp())
    body["setup"] = setup(workload="conv", cluster="2xs.small", batch_per_device="8", zone="a", **whole)
    body["values"] = body["values"] | {"step_s": step_s, "sync_s": 0.01, "rank_compute_s": [0.1, 0.1]} | values
    with here.warehouse.transact() as connection:
        append_records(connection, [body], refresh_id="r1", loaded_at=NOON)


def note(here: Installation, refresh_id: str = "r1") -> list[str]:
    frames = {name: getattr(measured(), name) for name in reads.TRAINING_FRAMES}
    return note_alarms.fn(here, frames, champion(), refresh_id, NOON)


def test_a_slow_run_is_said_once_stored_and_over_when_a_later_one_is_not_slow(
    here: Installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran(here, "usual", 0.0001)
    assert note(here) == [] and mart(here.warehouse, "alarms").empty
    ran(here, "slow", 60.0, hours=1, rank_compute_s=[30.0, 60.0])
    (said,) = note(here)
    assert "conv on 2xs.small in a took 60 s a step" in said and "node 1 (s.small) computes 100% slower" in said
    assert note(here, "r2") == [said]
    assert mart(here.warehouse, "alarms")["refresh_id"].tolist() == ["r1"]
    monkeypatch.setattr(status, "open_installation", lambda provider: here)
    export_copies.fn(here)
    assert status.status_of("local")["alarms"] == [said]
    ran(here, "usual-again", 0.0001, hours=2)
    assert mart(here.warehouse, "alarms").empty


def test_without_a_champion_or_of_machines_that_it_has_not_met_nothing_is_judged(here: Installation) -> None:
    assert note(here) == []
    ran(here, "slow", 60.0)
    assert note_alarms.fn(here, {}, None, "r1", NOON) == []


def test_only_the_first_of_a_goal_and_only_of_machines_like_its_own_has_a_note(here: Installation) -> None:
    ran(here, "slow", 60.0, rank_compute_s=[30.0, 60.0])
    note(here)

    def row(name: str, rank: int) -> dict[str, Any]:
        return {"rank": rank, "workload": "conv", "cluster_offers": [{"instance_type": name}], "reason": "cheapest"}

    empty = {"rank": 1, "workload": "conv", "cluster_offers": None, "reason": "nothing fits"}
    first, second, other, nothing = noted(here, [row("s.small", 1), row("s.small", 2), row("s.large", 1), empty])
    assert first["reason"].startswith("cheapest; note: slow run: conv on 2xs.small")
    assert [one["reason"] for one in (second, other, nothing)] == ["cheapest", "cheapest", "nothing fits"]


def test_what_a_host_took_is_said_and_is_no_note_on_a_type(here: Installation) -> None:
    ran(here, "slow", 60.0, rank_compute_s=[30.0, 60.0], taken_share=0.43)
    (said,) = note(here)
    assert "took 43% of the processor time wanted away" in said and "slower than its equals" not in said
    assert mart(here.warehouse, "alarms")["cause"].tolist() == ["host"]
    row = {"rank": 1, "workload": "conv", "cluster_offers": [{"instance_type": "s.small"}], "reason": "cheapest"}
    assert noted(here, [row]) == [row], "it was the moment's"
