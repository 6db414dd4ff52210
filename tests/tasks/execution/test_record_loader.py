"""What comes back from a launch is loaded once, whole, and whatever is unsound is set aside with a sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tasks.execution.record_loader import Collected, EndedLaunch, load_mailbox
from tasks.node.record import write_json
from tests.warehouse.builders import DEFINED, NOON, PROFILE, TYPES, fresh, record, setup
from warehouse.append import note_instance_types, note_workloads
from warehouse.database import Warehouse, WarehouseBusy
from warehouse.reads import learning, mart, training_frames


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
        **{"mailbox": mailbox, "run_setups": {run_id: setup() for run_id in "abcd"}} | changes
    )
    return load_mailbox(warehouse, launch, refresh_id="r", now=NOON)


def test_a_folder_in_the_place_of_a_record_is_set_aside(
    warehouse: Warehouse, mailbox: Path
) -> None:
    (mailbox / "node-0" / "records" / "c.json").mkdir()
    assert load(warehouse, mailbox).by_status == {"measured": 2, "failed": 1}
    assert (mailbox / "rejected" / "node-0-c.json").is_dir()


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
        assert connection.execute("select distinct lease_id from raw_records").fetchall() == [
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


def test_a_learning_run_is_kept_apart_from_what_times_steps_and_loaded_once(
    warehouse: Warehouse, mailbox: Path
) -> None:
    values = {"losses": [3.0, 2.0], "steps_a_window": 20, "diverged": False}
    learned = record("c", kind="learn", values=values, item={"seed": 2})
    write_json(mailbox / "node-0" / "records" / "c.json", learned)
    (mailbox / "node-0" / "records" / "d.json").write_text("{")
    whole = {name: setup() | ({"kind": "learn"} if name in "cd" else {}) for name in "abcd"}
    assert [load(warehouse, mailbox, run_setups=whole).new for _ in range(2)] == [4, 0]
    assert measured(warehouse) == ["a", "b"]
    rows = learning(warehouse, "local").set_index("run_id")
    assert rows["status"].to_dict() == {"c": "measured", "d": "failed"}
    assert list(rows.loc["c", "losses"]) == [3.0, 2.0] and rows.loc[
        "c", ["seed", "strategy"]
    ].tolist() == [2, "ddp"]
    assert learning(warehouse, "ec2").empty


def unsound(**changes: Any) -> str:
    return json.dumps(record("c") | changes)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (unsound()[:-20], "it is truncated or not JSON"),
        ("", "it is truncated or not JSON"),
        (unsound(values={"step_s": -1.0}), "step_s: Input should be greater than 0"),
        (unsound(values={"step_s": float("nan")}), "step_s: Input should be a valid number"),
        (unsound(values={}), "step_s: Field required"),
        (
            unsound(
                kind="profile",
                values={"parameters": 1, "gradient_bytes": 4, "rows": [], "buckets": []},
            ),
            "rows: ",
        ),
        (unsound(kind="probe", values={"rows": [{"bytes": 0, "seconds": 1.0}]}), "rows.0.bytes: "),
        (
            unsound(
                kind="learn", values={"losses": [None], "steps_a_window": 1, "diverged": False}
            ),
            "losses.0: ",
        ),
        (unsound(attempt="1"), "attempt: Input should be a valid integer"),
        (unsound(surprise=1), "surprise: Extra inputs are not permitted"),
        (unsound(wrong_device=""), "wrong_device: Extra inputs are not permitted"),
        (unsound(schema=2), "schema: "),
        (unsound(ended_unix=1e300), "ended_unix: Input should be less than 4000000000"),
        (
            unsound(values={"step_s": 1.0, "parameters": 2**63}),
            "parameters: Input should be less than",
        ),
        (
            unsound(values={"step_s": 1.0, "taken_share": 1.1}),
            "taken_share: Input should be less than or equal to 1",
        ),
        (
            unsound(values={"step_s": 1.0, "taken_share": -0.1}),
            "taken_share: Input should be greater than or equal",
        ),
        (
            unsound(values={"step_s": 1.0, "reference_s": [0.0]}),
            "reference_s.0: Input should be greater than 0",
        ),
        (
            unsound(values={"step_s": 1.0, "reference_s": 0.1}),
            "reference_s: Input should be a valid list",
        ),
        (
            unsound(values={"step_s": 1.0, "reference_spread": -0.1}),
            "reference_spread: Input should be greater than",
        ),
        (
            unsound(values={"step_s": 1.0, "input_s": -0.1}),
            "input_s: Input should be greater than or equal",
        ),
        (
            unsound(values={"step_s": 1.0, "loader_workers": 1.5}),
            "loader_workers: Input should be a valid integer",
        ),
        (
            unsound(kind="profile", values=PROFILE | {"load_s": -1.0}),
            "load_s: Input should be greater than or equal",
        ),
        (unsound(values={"step_s": 1.0, "note": "\ud800"}), "it cannot be stored"),
        (
            unsound(values={"step_s": 1.0, "last_loss": 7}).replace("7}", "1e999}"),
            "it cannot be stored",
        ),
        *(
            (unsound(values={"x": 1}).replace("1}", "[" * n + "]" * n + "}"), "deep")
            for n in (40, 985, 988, 100_000)
        ),
        (unsound(status="great"), "status: "),
        (unsound(run_id="d"), "it calls itself d"),
        ("[]", "the whole: "),
    ],
)
def test_an_unsound_record_is_set_aside_and_stops_no_other(
    warehouse: Warehouse, mailbox: Path, text: str, reason: str
) -> None:
    (mailbox / "node-1" / "records" / "c.json").write_text(text)
    loaded = load(warehouse, mailbox)
    [note] = loaded.notes
    assert note.startswith("record c of node-1 was not loaded: ") and reason in note
    assert measured(warehouse) == ["a", "b"] and loaded.by_status == {"measured": 2, "failed": 1}
    assert (mailbox / "rejected" / "node-1-c.json").read_text() == text
    failed = mart(warehouse, "failed_runs")
    assert failed.run_id.tolist() == ["c"] and reason in failed.reason[0]
    again = load(warehouse, mailbox)
    assert again.notes == [] and again.new == 0


def test_a_record_of_no_planned_run_is_set_aside(warehouse: Warehouse, mailbox: Path) -> None:
    write_json(mailbox / "node-0" / "records" / "stranger.json", record("stranger"))
    assert "no run of that id was planned" in load(warehouse, mailbox).notes[0]
    assert mart(warehouse, "failed_runs").empty


def test_a_loss_that_is_no_number_is_unknown_and_a_record_being_written_is_left_alone(
    warehouse: Warehouse, mailbox: Path
) -> None:
    diverged = record("c", values={"step_s": 0.5, "last_loss": float("nan")})
    (mailbox / "node-0" / "records" / "c.json").write_text(json.dumps(diverged))
    half = mailbox / "node-0" / "records" / ".d.json.123"
    half.write_text("{")
    assert load(warehouse, mailbox).notes == [] and half.exists()
    assert measured(warehouse) == ["a", "b", "c"]


def test_what_cannot_be_loaded_now_stays_where_it_was(warehouse: Warehouse, mailbox: Path) -> None:
    (mailbox / "node-0" / "records" / "c.json").write_text("{")
    hasty = Warehouse(warehouse.path, wait_s=0.01)
    with warehouse.transact(), pytest.raises(WarehouseBusy):
        load(hasty, mailbox)
    assert load(warehouse, mailbox).new == 3


def test_all_or_nothing(warehouse: Warehouse, mailbox: Path) -> None:
    with pytest.raises(ValueError, match="no column colour"):
        load(warehouse, mailbox, lease={"lease_id": "lease", "colour": "red"})
    assert measured(warehouse) == []


def test_the_leases_cost_is_loaded_with_its_records(warehouse: Warehouse, mailbox: Path) -> None:
    lease = {"lease_id": "lease", "provider": "local", "cluster": "2xsmall", "market": "spot"}
    lease |= {"started_at": NOON, "ended_at": NOON, "usd": 0.5, "outcome": "finished"}
    load(warehouse, mailbox, lease=lease)
    load(warehouse, mailbox, lease=lease)
    assert mart(warehouse, "spend")[["measured_runs", "usd"]].values.tolist() == [[2, 0.5]]


def on(*names: str) -> list[dict[str, Any]]:
    return [{"name": name, "count": 1, "threads": 1} for name in names]


def test_what_ran_on_another_device_than_was_bought_is_kept_and_trains_nothing(
    warehouse: Warehouse, mailbox: Path
) -> None:
    bought = setup(expected_devices=on("A10G", "A10G"), image_id="ami-1")
    used = {"a": on("NVIDIA A10G", "NVIDIA A10G"), "b": on("NVIDIA A10G", "cpu"), "c": None}
    for run_id, devices in used.items():
        body = record(run_id) | ({} if devices is None else {"devices": devices})
        write_json(mailbox / "node-0" / "records" / f"{run_id}.json", body)
    (mailbox / "node-1" / "records" / "b.json").unlink()
    assert load(warehouse, mailbox, run_setups=dict.fromkeys("abc", bought)).by_status == {
        "measured": 3
    }
    assert measured(warehouse) == ["a", "c"], (
        "a record of old says nothing of its devices, and counts"
    )
    outdated = mart(warehouse, "outdated_runs").iloc[0]
    assert (outdated.run_id, outdated.reason) == ("b", "it ran on cpu where A10G was expected")
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
    assert (
        first.startswith("node-0 left files behind: dump.bin [31m(9 bytes)x") and len(first) < 600
    )
    assert second == "node-1 left files behind: it does not say which"
