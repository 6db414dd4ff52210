"""What comes back from a launch is loaded once, whole, and whatever is unsound is set aside with a
sentence.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tasks.execution.record_loader import Collected, EndedLaunch, load_mailbox
from tasks.node.record import write_json
from tests.warehouse.builders import DEFINED, NOON, PROFILE, TYPES, fresh, record, setup
from warehouse.append import note_instance_types, note_workloads
from warehouse.database import Warehouse
from warehouse.reads import mart, training_frames


@pytest.fixture
def warehouse(tmp_path: Path) -> Warehouse:
    migrated = fresh(tmp_path)
    with migrated.transact() as connection:
        note_workloads(connection, DEFINED, provider="local", noted_at=NOON)
        note_instance_types(connection, TYPES, noted_at=NOON)
    return migrated


@pytest.fixture
def mailbox(tmp_path: Path) -> Path:
    """A launch of four runs: two sound records on different nodes, two still missing."""
    folder = tmp_path / "lease"
    write_json(folder / "node-0" / "records" / "a.json", record("a"))
    write_json(folder / "node-1" / "records" / "b.json", record("b"))
    return folder


def load(warehouse: Warehouse, mailbox: Path, **changes: Any) -> Collected:
    launch = EndedLaunch(
        **{"mailbox": mailbox, "run_setups": {one: setup(kind="train") for one in "abcd"}} | changes
    )
    return load_mailbox(warehouse, launch, refresh_id="r", now=NOON)


def revoked(run_id: str) -> dict[str, Any]:
    reason = "node 0: revoked"
    row = {
        "run_id": run_id,
        "lease_id": "lease",
        "kind": "train",
        "status": "interrupted",
        "reason": reason,
    }
    return row | {"setup": setup()}


def test_a_record_belongs_to_the_lease_of_its_machine_whatever_it_says(
    warehouse: Warehouse, mailbox: Path
) -> None:
    write_json(mailbox / "node-0" / "records" / "a.json", record("a") | {"lease_id": "another"})
    row = {
        "lease_id": "lease",
        "provider": "local",
        "cluster": "2xsmall",
        "market": "on-demand",
        "started_at": NOON,
    }
    load(warehouse, mailbox, lease=row | {"ended_at": NOON, "usd": 0.1, "outcome": "released"})
    with warehouse.read() as connection:
        assert connection.execute("select distinct lease_id from raw_runs").fetchall() == [
            ("lease",)
        ]


def measured(warehouse: Warehouse) -> list[str]:
    return training_frames(warehouse, "local")["runs"].run_id.tolist()


def test_records_and_the_controllers_rows_are_loaded_and_twice_changes_nothing(
    warehouse: Warehouse, mailbox: Path
) -> None:
    loaded = load(warehouse, mailbox, rows=[revoked("c")])
    assert (loaded.new, loaded.notes) == (3, [])
    assert loaded.by_status == {"measured": 2, "interrupted": 1}
    assert measured(warehouse) == ["a", "b"]
    assert mart(warehouse, "failed_runs")[["run_id", "cluster", "reason"]].values.tolist() == [
        ["c", "2xsmall", "node 0: revoked"]
    ]
    assert load(warehouse, mailbox, rows=[revoked("c")]).new == 0


def test_a_run_that_was_recorded_before_its_node_went_is_a_measurement(
    warehouse: Warehouse, mailbox: Path
) -> None:
    assert load(warehouse, mailbox, rows=[revoked("a")]).by_status == {"measured": 2}
    assert measured(warehouse) == ["a", "b"]


def train(**values: Any) -> str:
    return json.dumps(record("c", values={"step_s": 1.0} | values))


UNSOUND = {
    "truncated": train()[:-20],
    "empty": "",
    "step_s: negative": train(step_s=-1.0),
    "step_s: not a number": train(step_s=float("nan")),
    "parameters: beyond a bigint": train(parameters=2**63),
    "taken_share: above 1": train(taken_share=1.1),
    "reference_s.0: zero": train(reference_s=[0.0]),
    "loader_workers: a fraction": train(loader_workers=1.5),
    "rows: none": json.dumps(record("c", kind="profile", values=PROFILE | {"rows": []})),
    "losses.0: unknown": json.dumps(
        record("c", kind="learn", values={"losses": [None], "steps_a_window": 1, "diverged": False})
    ),
    "attempt: text": json.dumps(record("c", attempt="1")),
    "surprise: not of the wire": json.dumps(record("c", surprise=1)),
    "wrong_device: the controller's": json.dumps(record("c", wrong_device="")),
    "ended_unix: no moment": json.dumps(record("c", ended_unix=1e300)),
    "a lone surrogate": train(note="\ud800"),
    "an infinite number": train(last_loss=7).replace("7}", "1e999}"),
    "nested too deep": train(x=1).replace("1}", "[" * 100_000 + "]" * 100_000 + "}"),
    "status: unknown": json.dumps(record("c", status="great")),
    "another run": json.dumps(record("d")),
    "a list": "[]",
}


@pytest.mark.parametrize(("named", "text"), UNSOUND.items(), ids=list(UNSOUND))
def test_an_unsound_record_is_set_aside_and_stops_no_other(
    warehouse: Warehouse, mailbox: Path, named: str, text: str
) -> None:
    (mailbox / "node-1" / "records" / "c.json").write_text(text)
    loaded = load(warehouse, mailbox)
    [note] = loaded.notes
    column, _, rest = named.partition(": ")
    assert not rest or f"{column}: " in note
    assert measured(warehouse) == ["a", "b"] and loaded.by_status == {"measured": 2, "failed": 1}
    assert (mailbox / "rejected" / "node-1-c.json").read_text() == text
    assert mart(warehouse, "failed_runs").run_id.tolist() == ["c"]
    again = load(warehouse, mailbox)
    assert again.notes == [] and again.new == 0


def on(*names: str) -> list[dict[str, Any]]:
    return [{"name": name, "count": 1, "threads": 1} for name in names]


def test_what_ran_on_another_device_than_was_bought_is_kept_and_trains_nothing(
    warehouse: Warehouse, mailbox: Path
) -> None:
    bought = setup(kind="train", expected_devices=on("A10G", "A10G"), image_id="ami-1")
    used = {"a": on("NVIDIA A10G", "NVIDIA A10G"), "b": on("NVIDIA A10G", "cpu"), "c": []}
    for run_id, devices in used.items():
        body = record(run_id, devices=devices)
        write_json(mailbox / "node-0" / "records" / f"{run_id}.json", body)
    (mailbox / "node-1" / "records" / "b.json").unlink()
    assert load(warehouse, mailbox, run_setups=dict.fromkeys("abc", bought)).by_status == {
        "measured": 3
    }
    assert measured(warehouse) == ["a", "c"]
    outdated = mart(warehouse, "outdated_runs").iloc[0]
    assert outdated.run_id == "b" and "cpu" in outdated.reason
    details = mart(warehouse, "run_details").set_index("run_id")
    assert list(details.device_names["a"]) == ["NVIDIA A10G"] * 2
    assert details.image_id.to_dict() == {"a": "ami-1", "c": "ami-1"}


def test_files_that_a_machine_left_behind_are_reported_and_its_word_is_not_trusted(
    warehouse: Warehouse, mailbox: Path
) -> None:
    write_json(
        mailbox / "node-0" / "refused.json", {"reason": "dump.bin \x1b[31m(9 bytes)" + "x" * 10_000}
    )
    (mailbox / "node-1" / "refused.json").write_text("[")
    first, second = load(warehouse, mailbox).notes
    assert first.startswith("node-0 ") and len(first) < 600
    assert second.startswith("node-1 ")
