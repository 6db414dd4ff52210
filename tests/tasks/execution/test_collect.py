"""Every run that a node reported is in the warehouse once; an unsound record is set aside."""

import fcntl
import json
import shutil
from dataclasses import replace
from unittest.mock import Mock

import pytest

from tasks.execution.collect import collect, end_and_collect
from tasks.node.record import write_json
from tasks.providers.base import NotSwept
from tasks.workspace.settings import Settings
from tasks.workspace.workspace import Workspace
from tests.fakes import FakeProvider, armed, finished, ready, reported
from tests.tasks.execution.test_session import KILLED, job, serve_fast
from tests.warehouse.builders import NOON, PROFILE, fresh, known, record, setup
from warehouse.database import WarehouseDamaged


def installed(home, provider):
    settings = Settings(root=home, home=home)
    return Workspace(settings=settings, warehouse=fresh(home), provider=provider)


def after(home, *script):
    """Return the installation after a launch of runs a, b and c by `script`; by default all went
    well.
    """
    script = script or (ready, armed(1), reported("a", "b", "c"), finished(1))
    provider = FakeProvider(home, script)
    serve_fast(provider, job())
    return installed(home, provider)


def load(here):
    return collect(here, NOON)


def test_a_killed_controller_loses_no_record_and_no_row(tmp_path):
    orphan = tmp_path / "leases/orphan/mailbox"
    died = finished(1, run_id="a", **KILLED)
    script = (ready, armed(1), died, armed(2), reported("b"))
    here = after(tmp_path, *script, lambda cluster: shutil.copytree(cluster.mailbox, orphan))
    here.provider.over.clear()
    here.provider.end("orphan", orphan, "reaped")
    assert load(here).new == 3
    assert known(here.home) == {"a": "failed", "b": "measured", "c": "interrupted"}
    assert "reaped" in here.warehouse.select("failed_runs").set_index("run_id").reason["c"]
    assert here.provider.over == [] and load(here).new == 0


def test_the_reaper_loads_once_what_a_killed_controller_released(tmp_path):
    here = after(tmp_path)
    [lease] = here.provider.over
    shutil.copytree(lease.mailbox.parent, tmp_path / "kept")
    [loaded] = end_and_collect(here, NOON)
    assert loaded.startswith("3 rows ") and end_and_collect(here, NOON) == []
    shutil.copytree(tmp_path / "kept", lease.mailbox.parent)  # killed before it forgot the lease
    here.provider.over.append(lease)
    assert load(here).new == 0
    spent = here.warehouse.select("spend")[["refresh_id", "measured_runs", "usd"]].values.tolist()
    assert spent == [["r", 3, 0.5]]


def test_results_are_loaded_though_the_reaper_could_not_look_everywhere(tmp_path, monkeypatch):
    def blind(_):
        raise NotSwept("ec2", {"us-east-1": "the AWS session has expired"}, ["machine i-1"])

    here = after(tmp_path)
    monkeypatch.setattr(here.provider, "reap", blind)
    with pytest.raises(NotSwept, match="has expired") as raised:
        end_and_collect(here, NOON)
    ended, loaded = raised.value.done
    assert ended == "machine i-1" and loaded.startswith("3 rows ")
    assert set(known(here.home)) == {"a", "b", "c"} and here.provider.over == []


def test_what_could_not_be_checked_is_said_though_the_warehouse_fails(tmp_path, monkeypatch):
    here, messages = after(tmp_path), []
    blind = NotSwept("ec2", {"us-east-1": "the AWS session has expired"}, ["machine i-1"])
    monkeypatch.setattr(here.provider, "reap", Mock(side_effect=blind))
    monkeypatch.setattr(here.warehouse, "create", Mock(side_effect=WarehouseDamaged("damaged")))
    monkeypatch.setattr("tasks.execution.collect.say_all", messages.extend)
    with pytest.raises(WarehouseDamaged):
        end_and_collect(here, NOON)
    assert messages == ["machine i-1", "the AWS session has expired"]


def test_leases_of_a_running_refresh_are_left_to_it(tmp_path):
    here = after(tmp_path)
    [lease] = here.provider.over
    earlier = tmp_path / "leases/earlier-00/mailbox"
    shutil.copytree(lease.mailbox, earlier)
    here.provider.end("earlier-00", earlier, "released")
    (earlier / "node-0/records/c.json").unlink()
    with (tmp_path / "refresh.json").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        json.dump({"refresh_id": "r", "pid": 1, "started_at": "then"}, file)
        file.flush()
        end_and_collect(here, NOON)
        assert here.provider.over == [lease] and set(known(here.home)) == {"a", "b"}
        file.truncate(0)  # the refresh has not written its name yet
        end_and_collect(here, NOON)
        assert here.provider.over == [lease]
    assert load(here).new == 1 and here.provider.over == []


@pytest.fixture
def here(tmp_path):
    """An installation with an ended lease: sound records of a and b, none of c and d."""
    provider, mailbox = FakeProvider(tmp_path), tmp_path / "leases/r-00/mailbox"
    provider.end("r-00", mailbox, "released")
    here = installed(tmp_path, provider)
    write(here, "controller/envelopes.json", {run: setup(kind="train") for run in "abcd"})
    write(here, "node-0/records/a.json", record("a"))
    write(here, "node-1/records/b.json", record("b"))
    return here


def write(here, name, body):
    file = here.provider.over[0].mailbox / name
    write_json(file, body) if isinstance(body, dict) else file.write_text(body)


def test_a_record_counts_before_a_row_and_belongs_to_its_machines_lease(here):
    write(here, "node-0/records/a.json", record("a") | {"lease_id": "another"})
    for run_id in "ac":
        row = {"run_id": run_id, "kind": "train", "status": "interrupted", "reason": "revoked"}
        row |= {"lease_id": "r-00", "setup": setup()}
        write(here, f"controller/rows/{run_id}.json", row)
    loaded = load(here)
    assert (loaded.new, loaded.notes, loaded.usd) == (3, [], 0.5)
    assert loaded.by_status == {"measured": 2, "interrupted": 1}
    assert known(here.home) == {"a": "measured", "b": "measured", "c": "interrupted"}
    assert set(here.warehouse.select("raw_runs")["lease_id"]) == {"r-00"}


def test_refused_requests_are_rows_without_a_lease(here):
    refused = replace(here.provider.over[0], refusals=("no capacity", "denied"))
    here.provider.over = [replace(refused, outcome="refused")]
    assert load(here).by_status == {"measured": 2, "refused": 2}
    assert len(here.warehouse.select("raw_leases")) == 0


def train(**values):
    return json.dumps(record("c", values={"step_s": 1.0} | values))


UNSOUND = {
    "truncated": train()[:-20],
    "step_s: negative": train(step_s=-1.0),
    "step_s: not a number": train(step_s=float("nan")),
    "rows: none": json.dumps(record("c", kind="profile", values=PROFILE | {"rows": []})),
    "wrong_device: the controller's": json.dumps(record("c", wrong_device="")),
    "ended_unix: no moment": json.dumps(record("c", ended_unix=1e300)),
    "a lone surrogate": train(note="\ud800"),
    "an infinite number": train(last_loss=7).replace("7}", "1e999}"),
    "nested too deep": train(x=1).replace("1}", "[" * 100_000 + "]" * 100_000 + "}"),
    "another run": json.dumps(record("d")),
}


@pytest.mark.parametrize("named, text", UNSOUND.items(), ids=list(UNSOUND))
def test_an_unsound_record_is_set_aside_and_stops_no_other(here, named, text):
    write(here, "node-1/records/c.json", text)
    loaded = load(here)
    column, _, rest = named.partition(": ")
    [note] = loaded.notes
    assert not rest or f"{column}: " in note
    assert known(here.home) == {"a": "measured", "b": "measured", "c": "failed"}
    assert (here.home / "rejected/r-00/node-1-c.json").read_text() == text


def test_a_run_on_another_device_than_was_bought_is_marked(here):
    bought = setup(expected_devices=[{"name": "A10G", "count": 1, "threads": 1}] * 2)
    write(here, "controller/envelopes.json", dict.fromkeys("abc", bought))
    used = {"a": ["NVIDIA A10G"] * 2, "b": ["NVIDIA A10G", "cpu"], "c": []}
    for run_id, names in used.items():
        devices = [{"name": name, "count": 1, "threads": 1} for name in names]
        write(here, f"node-1/records/{run_id}.json", record(run_id, devices=devices))
    load(here)
    runs = here.warehouse.select("raw_runs").set_index("run_id")
    assert runs["wrong_device"].notna().to_dict() == {"a": False, "b": True, "c": False}
    assert list(runs["device_names"]["b"]) == used["b"]


def test_untrusted_words_of_files_left_behind_are_cleaned(here):
    words = {"reason": "dump.bin \x1b[31m(9 bytes)\x9b" + "x" * 99_999}
    write(here, "node-0/refused.json", words)
    write(here, "node-1/refused.json", "[")
    write(here, "node-1/records/c.json", record("c", status="failed", **words))
    first, second = load(here).notes
    reason = here.warehouse.select("raw_runs", {"run_id": "c"})["reason"][0]
    assert reason.startswith("dump.bin [31m(9 bytes)xx") and len(reason) < 20_000
    assert first.startswith("node-0 ") and len(first) < 600 and first.isprintable()
    assert second.startswith("node-1 ")
