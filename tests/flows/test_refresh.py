"""A refresh on EC2 stops before its first step where the account is not as it must be."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from tasks.providers import ec2_api
from tasks.providers.base import ProviderError
from tasks.settings import SettingsError
from tests.account import project

refresh = importlib.import_module("flows.refresh")


@pytest.fixture
def nothing_runs(own_environment: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("SRIFT_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ec2_api, "has_credentials", lambda: False)
    for step in ("taking_turn", "reap", "market", "measure", "retrain", "publish"):
        monkeypatch.setattr(refresh, step, lambda *_, step=step, **__: pytest.fail(f"{step} was reached"))
    return tmp_path


def test_an_account_that_is_not_well_is_said_before_anything_is_done(nothing_runs: Path) -> None:
    project(nothing_runs)
    with pytest.raises(ProviderError, match=r"no machine was asked for, since\n  credentials: no AWS credentials"):
        refresh.refresh.fn("ec2", 5.0)
    assert not (nothing_runs / "state").exists()


def test_a_cap_is_asked_for_first_and_a_bucket_next(nothing_runs: Path) -> None:
    file = project(nothing_runs)
    with pytest.raises(SettingsError, match="--max-usd"):
        refresh.refresh.fn("ec2", None)
    file.write_text(file.read_text().replace('bucket = "mine-1"', ""))
    with pytest.raises(SettingsError, match="set bucket under"):
        refresh.refresh.fn("ec2", 5.0)
