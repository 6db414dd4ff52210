"""Requirements are installed from a copy, and removed after a month without use."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

import pytest

from tasks.node.requirements import NotInstalled
from tasks.workspace import environments
from tasks.workspace.environments import environment_at, not_installable
from tasks.workspace.settings import load_settings

TOML = """
[workloads.{name}]
path = "repo"
entrypoint = "train:build"
requirements = "{name}.txt"
samples = 1000
global_batch = 64
"""


def test_each_workloads_requirements_are_tried_and_old_environments_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repo, home = tmp_path / "repo", tmp_path / "state"
    repo.mkdir()
    for name in ("train.py", "good.txt", "bad.txt"):
        (repo / name).write_text(name)
    (tmp_path / "srift.toml").write_text(TOML.format(name="good") + TOML.format(name="bad"))
    settings = load_settings(tmp_path / "srift.toml").model_copy(update={"home": home})
    before = set(repo.iterdir())

    def install(requirements: str, root: Path, environment: Path, workload: str) -> str:
        assert (root / requirements).read_text() == requirements and not root.is_relative_to(
            tmp_path / "repo"
        )
        (root / "build").mkdir()  # as pip does where it builds
        if workload == "bad":
            raise NotInstalled("requirements of workload bad clash")
        return ready(environment, days=0)

    def ready(environment: Path, days: float) -> str:
        environment.mkdir(parents=True)
        marker = environment / "complete.json"
        marker.write_text("{}")
        os.utime(marker, (time.time() - days * 86400,) * 2)
        return str(environment / "bin" / "python")

    monkeypatch.setattr(environments, "install", install)
    for name, days in (("old", 31.0), ("recent", 29.0)):
        ready(home / "environments" / name, days)
    assert not_installable(settings) == {"bad": "requirements of workload bad clash"}
    kept = {one.name for one in (home / "environments").iterdir()}
    assert kept == {"recent", environment_at(home, settings.travelling("good")[0]).name}
    assert set(repo.iterdir()) == before


@pytest.mark.parametrize("full", ["unpack", "install"])
def test_a_full_disk_is_the_workloads_reason_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: str
) -> None:
    (tmp_path / "repo").mkdir()
    for name in ("train.py", "good.txt", "bad.txt"):
        (tmp_path / "repo" / name).write_text(name)
    (tmp_path / "srift.toml").write_text(TOML.format(name="bad") + TOML.format(name="good"))
    settings = load_settings(tmp_path / "srift.toml").model_copy(
        update={"home": tmp_path / "state"}
    )
    tried = []

    def fills(*asked: object) -> str:
        tried.append(asked)
        if len(tried) == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return "python"

    monkeypatch.setattr(environments, "install", lambda *_: "python")
    monkeypatch.setattr(environments, full, fills)
    [(name, why)] = not_installable(settings).items()
    assert name == "bad" and "No space left" in why
    assert len(tried) == 2
