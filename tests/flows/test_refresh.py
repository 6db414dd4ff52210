"""What a refresh checks first: the account, the cap, the reaper, and the home's lock."""

import importlib
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from flows.cli import app
from tasks.campaign.spending import spent_this_month
from tasks.execution.collect import refuse_unless_swept
from tasks.providers.base import NotSwept, ProviderError
from tasks.providers.ec2.leases import Ec2Leases
from tasks.workspace.locking import refresh_lock
from tasks.workspace.settings import SettingsError
from tasks.workspace.workspace import open_workspace
from tests.ec2_home import Home
from tests.installed import write_project
from warehouse.database import DiskFull, Warehouse

flow, measuring = map(importlib.import_module, ("flows.refresh", "flows.measure"))
refresh = flow.refresh.fn
STEPS = ("reap", "market", "measure", "retrain", "publish", "publish_table", "publish_summary")


def replace_steps(monkeypatch, act):
    """Each step of a refresh calls `act` with its name."""
    found = {"seconds": {}, "launches": 0, "usd": 0.0}
    for step in STEPS:
        module = measuring if step in ("reap", "market") else flow
        monkeypatch.setattr(module, step, lambda *_, step=step, **__: act(step) or found)


def test_nothing_starts_before_account_cap_and_bucket_are_checked(ec2_project, monkeypatch):
    replace_steps(monkeypatch, pytest.fail)
    with pytest.raises(ProviderError):
        refresh("ec2", 5.0)
    with pytest.raises(SettingsError, match="--max-usd"):
        refresh("ec2", None)
    file = ec2_project / "srift.toml"
    file.write_text(file.read_text().replace('bucket = "mailbox"', ""))
    with pytest.raises(SettingsError, match="bucket"):
        refresh("ec2", 5.0)
    assert not (ec2_project / "state").exists()


def test_where_the_reaper_could_not_look_a_paid_refresh_ends_and_one_that_buys_nothing_continues(
    ec2_project, monkeypatch, capsys
):
    """A full disk costs its backup only."""
    (ec2_project / "state").mkdir()
    steps = []

    def act(step):
        steps.append(step)
        if step == "reap":
            raise NotSwept("ec2", {"us-east-1": "the AWS session has expired"})

    def full(_):
        raise DiskFull("the backup failed")

    replace_steps(monkeypatch, act)
    monkeypatch.setattr(flow, "refuse_unless_well", lambda *_: None)
    monkeypatch.setattr(Warehouse, "back_up", full)
    with pytest.raises(NotSwept):
        refresh("ec2", 5.0)
    assert steps == ["reap"]
    assert "refresh_id" in refresh("ec2", 0.0)
    assert tuple(steps[1:]) == STEPS
    err = capsys.readouterr().err
    assert "us-east-1" in err and "backup" in err


@pytest.mark.parametrize("minutes, refused", [(59, False), (61, True), (None, True)])
def test_nothing_is_bought_unless_every_region_was_swept_within_the_hour(
    tmp_path, minutes, refused
):
    home = Home(tmp_path)
    now = home.world.now
    if minutes is not None:
        home.leases.note_swept(home.choices.regions, now - timedelta(minutes=minutes))
        home.leases.note_swept(["us-east-1"], now)
    here = SimpleNamespace(provider=home.provider)
    with pytest.raises(ProviderError, match="eu-west-1") if refused else nullcontext():
        refuse_unless_swept(here, now)


@pytest.mark.parametrize("swept", [False, True])
def test_a_campaign_by_itself_is_refused_if_the_reaper_or_the_months_record_is_blind(
    ec2_project, swept
):
    """Without credentials, nobody knows if this month's machines reported to the bucket."""
    if swept:
        Ec2Leases(ec2_project / "state").note_swept(["us-east-1"], datetime.now(UTC))
    with pytest.raises(ProviderError, match="credentials" if swept else "srift reap"):
        measuring.measure.fn("r-1", "ec2", 5.0)


def test_the_command_takes_the_months_dollars(ec2_project, monkeypatch):
    monkeypatch.setattr(flow, "refresh", lambda *_: {})
    monkeypatch.setattr("tasks.workspace.prefect_server.local_server", nullcontext)
    words = ["refresh", "--provider", "ec2", "--max-usd", "0", "--month-spent", "5", "--json"]
    assert CliRunner().invoke(app, words).exit_code == 0
    assert spent_this_month(open_workspace("ec2"), datetime.now(UTC)) == (5.0, "")
    for wrong in (["--dry-run"], ["--provider", "local"], ["--month-spent", "nan"]):
        assert CliRunner().invoke(app, [*words, *wrong]).exit_code == 2


def test_a_second_refresh_of_a_home_is_cancelled_with_the_reason_and_does_nothing(
    ec2_project, monkeypatch
):
    write_project(ec2_project)
    replace_steps(monkeypatch, pytest.fail)
    monkeypatch.setattr(flow, "refuse_unless_well", lambda *_: None)
    with refresh_lock(ec2_project / "state", "first"):
        ended = refresh()
    assert ended.is_cancelled()
    assert "refresh first (process" in ended.message
