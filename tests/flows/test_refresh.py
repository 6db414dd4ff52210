"""What a refresh checks first: the account, the cap, the reaper, and the home's lock."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from prefect.states import State

from tasks.execution.collect import refuse_unless_swept
from tasks.providers.base import NotSwept, ProviderError
from tasks.providers.ec2 import api as ec2_api
from tasks.workspace.locking import refresh_lock
from tasks.workspace.settings import SettingsError
from tasks.workspace.workspace import Workspace
from tests.ec2_home import Home, project
from tests.installed import DescribedMachines, write_project
from warehouse.database import DiskFull, Warehouse

refresh = importlib.import_module("flows.refresh")
STEPS = ("reap", "market", "measure", "retrain", "publish", "store_timings")


def replace_steps(monkeypatch: pytest.MonkeyPatch, act: Callable[[str], Any]) -> None:
    """Each step of a refresh does what `act` does with its name."""
    for step in STEPS:
        monkeypatch.setattr(refresh, step, lambda *_, step=step, **__: act(step) or {"seconds": {}})


@pytest.fixture
def nothing_runs(own_environment: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("SRIFT_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ec2_api, "has_credentials", lambda: False)
    replace_steps(monkeypatch, pytest.fail)
    return tmp_path


def test_an_account_that_is_not_well_is_said_before_anything_is_done(nothing_runs: Path) -> None:
    project(nothing_runs)
    with pytest.raises(ProviderError):
        refresh.refresh.fn("ec2", 5.0)
    assert not (nothing_runs / "state").exists()


def test_a_cap_is_asked_for_first_and_a_bucket_next(nothing_runs: Path) -> None:
    file = project(nothing_runs)
    with pytest.raises(SettingsError, match="--max-usd"):
        refresh.refresh.fn("ec2", None)
    file.write_text(file.read_text().replace('bucket = "mailbox"', ""))
    with pytest.raises(SettingsError, match="bucket"):
        refresh.refresh.fn("ec2", 5.0)


@pytest.fixture
def steps(no_credentials: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """The steps that a refresh on EC2 reaches, in order; the reaper fails."""
    monkeypatch.setenv("SRIFT_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    project(tmp_path)
    (tmp_path / "state").mkdir()
    reached: list[str] = []

    def blind(provider: str) -> None:
        reached.append("reap")
        raise NotSwept(provider, {"us-east-1": "the AWS session has expired"})

    monkeypatch.setattr(refresh, "refuse_unless_well", lambda *_: None)
    replace_steps(monkeypatch, reached.append)
    monkeypatch.setattr(refresh, "reap", blind)
    return reached


def test_a_paid_refresh_ends_before_anything_is_bought_where_the_reaper_could_not_look(
    steps: list[str],
) -> None:
    with pytest.raises(NotSwept):
        refresh.refresh.fn("ec2", 5.0)
    assert steps == ["reap"]


def test_a_refresh_that_buys_nothing_says_so_and_goes_on(
    steps: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    refresh.refresh.fn("ec2", 0.0)
    assert "measure" in steps and "publish" in steps
    assert "us-east-1" in capsys.readouterr().err


def test_a_full_disk_costs_the_backup_and_not_the_refresh(
    steps: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(_: Warehouse) -> None:
        raise DiskFull("the backup failed")

    monkeypatch.setattr(Warehouse, "back_up", full)
    assert "refresh_id" in refresh.refresh.fn("ec2", 0.0)
    assert "backup" in capsys.readouterr().err


@pytest.mark.parametrize(("minutes", "refused"), [(59, False), (61, True), (None, True)])
def test_nothing_is_bought_unless_every_region_was_swept_within_the_hour(
    tmp_path: Path, minutes: int | None, refused: bool
) -> None:
    home = Home(tmp_path)
    now = home.world.now
    if minutes is not None:
        home.leases.note_swept(home.choices.regions, now - timedelta(minutes=minutes))
        home.leases.note_swept(["us-east-1"], now)
    here = cast(Workspace, SimpleNamespace(provider=home.provider))
    if refused:
        with pytest.raises(ProviderError, match="eu-west-1"):
            refuse_unless_swept(here, now)
    else:
        refuse_unless_swept(here, now)


def test_a_campaign_by_itself_is_refused_too_where_the_reaper_has_not_looked(
    own_environment: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SRIFT_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    project(tmp_path)
    with pytest.raises(ProviderError):
        importlib.import_module("flows.measure").measure.fn("r-1", "ec2", 5.0)


@pytest.fixture
def home(own_environment: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The home of a project whose machines are described."""
    monkeypatch.setattr(
        "tasks.providers.local.provider.LocalProvider", lambda *_, **__: DescribedMachines()
    )
    monkeypatch.setenv("SRIFT_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    write_project(tmp_path)
    return tmp_path / "state"


def test_one_that_is_refused_the_home_ends_cancelled_with_the_reason_and_does_nothing(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_steps(monkeypatch, pytest.fail)
    with refresh_lock(home, "first"):
        ended = refresh.refresh.fn()
    assert isinstance(ended, State) and ended.is_cancelled()
    assert "refresh first (process" in str(ended.message) and "nothing was started" in str(
        ended.message
    )
