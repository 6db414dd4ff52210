"""Whoever brings a launch home, and however often: every reported run is in the warehouse, once."""

from __future__ import annotations

import fcntl
import json
import shutil
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from models.campaign.campaign import PlannedLaunch
from models.domain.cluster import Cluster
from tasks.campaign.campaign import serve
from tasks.execution.collect import Collected, collect, end_and_collect
from tasks.providers.base import NotSwept
from tasks.workspace.settings import Settings
from tasks.workspace.workspace import Workspace
from tests.fakes import (
    FakeCluster,
    FakeProvider,
    Step,
    armed,
    fast,
    finished,
    offer,
    ready,
    reported,
)
from tests.tasks.execution.test_job import wanted
from tests.tasks.execution.test_session import KILLED, job
from tests.warehouse.builders import NOON, fresh
from warehouse.reads import mart

TRAINS = (wanted("train", "tiny", (0, 1), (8, 8)),) * 3
LAUNCH = PlannedLaunch(
    cluster=Cluster.of((2, offer())), items=TRAINS, est_s=30.0, est_usd=0.1, reason="pilots"
)


def installation(home: Path, *scripts: tuple[Step, ...], refusal: str = "") -> Workspace:
    (home / "tiny.py").write_text("def build(): ...\n")
    tiny: Any = {"entrypoint": "tiny.py:build", "samples": 1000, "global_batch": 16}
    settings = Settings(workloads={"tiny": tiny}).model_copy(update={"root": home, "home": home})
    provider = FakeProvider(home, *scripts, refusal=refusal)
    return Workspace(settings=settings, warehouse=fresh(home), provider=provider)


def fake(here: Workspace) -> FakeProvider:
    assert isinstance(here.provider, FakeProvider)
    return here.provider


def ran(home: Path, *script: Step) -> Workspace:
    """After a launch of the runs a, b and c that goes by the script, or else well."""
    here = installation(home, script or (ready, armed(1), reported("a", "b", "c"), finished(1)), ())
    serve(here.provider, job(), stop_at=100.0, watch=lambda *_: None, clock=fast())
    return here


def brought(here: Workspace) -> Collected:
    return collect(here, "r", NOON)


def known(here: Workspace) -> dict[str, str]:
    """Status by run, of all that the warehouse holds."""
    records = here.warehouse.select("raw_runs")
    return dict(zip(records["run_id"], records["status"], strict=True))


def killed_after(*script: Step) -> tuple[Step, ...]:
    """As SIGKILL leaves it: the mailbox of that moment, machines without a controller,
    then reaped.
    """

    def kill(cluster: FakeCluster) -> None:
        shutil.copytree(cluster.mailbox, cluster.mailbox.parent.parent / "orphan" / "mailbox")

    return (*script, kill)


def test_a_controller_that_was_killed_loses_no_record_and_no_row(tmp_path: Path) -> None:
    died = finished(1, run_id="a", **KILLED)
    here = ran(tmp_path, *killed_after(ready, armed(1), died, armed(2), reported("b")))
    fake(here).over.clear()
    fake(here).end("orphan", tmp_path / "leases" / "orphan" / "mailbox", "reaped")
    assert brought(here).new == 3
    assert known(here) == {"a": "failed", "b": "measured", "c": "interrupted"}
    assert "reaped" in mart(here.warehouse, "failed_runs").set_index("run_id").reason["c"]
    assert fake(here).over == [] and brought(here).new == 0


def test_a_controller_that_was_killed_between_release_and_load_is_made_up_for_by_the_reaper(
    tmp_path: Path,
) -> None:
    here = ran(tmp_path)
    [lease] = fake(here).over
    kept = tmp_path / "kept"
    shutil.copytree(lease.mailbox.parent, kept)
    (loaded,) = end_and_collect(here, NOON)
    assert loaded.startswith("3 rows ")
    assert end_and_collect(here, NOON) == []
    shutil.copytree(kept, lease.mailbox.parent)  # it died after loading, before forgetting
    fake(here).over.append(lease)
    assert brought(here).new == 0 and set(known(here)) == {"a", "b", "c"}
    spent = mart(here.warehouse, "spend")[["refresh_id", "measured_runs", "usd"]].values.tolist()
    assert spent == [["r", 3, 0.5]]
    assert here.warehouse.select("raw_runs")["refresh_id"].unique().tolist() == ["r"]


def blind(now: datetime) -> list[str]:
    raise NotSwept("ec2", {"us-east-1": "the AWS session has expired"}, ["machine i-1"])


def test_what_was_measured_is_loaded_though_the_reaper_could_not_look_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = ran(tmp_path)
    monkeypatch.setattr(here.provider, "reap", blind)
    with pytest.raises(NotSwept, match="has expired") as raised:
        end_and_collect(here, NOON)
    ended, loaded = raised.value.done
    assert ended == "machine i-1" and loaded.startswith("3 rows ")
    assert set(known(here)) == {"a", "b", "c"} and fake(here).over == []


def test_the_leases_of_a_refresh_at_work_are_left_to_it(tmp_path: Path) -> None:
    here = ran(tmp_path)
    [lease] = fake(here).over
    fake(here).end("earlier-00", tmp_path / "leases" / "earlier-00" / "mailbox", "released")
    shutil.copytree(lease.mailbox, tmp_path / "leases" / "earlier-00" / "mailbox")
    (tmp_path / "leases" / "earlier-00" / "mailbox" / "node-0" / "records" / "c.json").unlink()
    with (tmp_path / "refresh.json").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        json.dump({"refresh_id": "r", "pid": 1, "started_at": "then"}, file)
        file.flush()
        end_and_collect(here, NOON)
        assert [one.lease_id for one in fake(here).over] == ["r-00"] and set(known(here)) == {
            "a",
            "b",
        }
        file.seek(0), file.truncate()  # about to say who it is
        end_and_collect(here, NOON)
        assert [one.lease_id for one in fake(here).over] == ["r-00"]
    assert brought(here).new == 1 and fake(here).over == []
