"""Requirements are installed from a copy, and removed after a month without use."""

import os
import time

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


@pytest.fixture
def settings(tmp_path):
    """Two workloads of one folder, bad and good, with requirements of their own."""
    repo = tmp_path / "repo"
    repo.mkdir()
    for name in ("train.py", "good.txt", "bad.txt"):
        (repo / name).write_text(name)
    file = tmp_path / "srift.toml"
    file.write_text(TOML.format(name="bad") + TOML.format(name="good") + "allow_builds = true")
    return load_settings(file).model_copy(update={"home": tmp_path / "state"})


def ready(environment, days=0):
    """Write an environment that was last used so many days ago."""
    environment.mkdir(parents=True)
    marker = environment / "complete.json"
    marker.touch()
    os.utime(marker, (time.time() - days * 86400,) * 2)
    return "python"


def test_each_workloads_requirements_are_tried_and_old_environments_go(settings, monkeypatch):
    repo, home = settings.root / "repo", settings.home / "environments"
    before = {*os.listdir(repo)}

    def install(requirements, root, environment, workload, builds, _):
        assert (root / requirements).read_text() == requirements and builds == (workload == "good")
        (root / "build").mkdir()  # as pip does where it builds
        if workload == "bad":
            raise NotInstalled("they clash")
        return ready(environment)

    monkeypatch.setattr(environments, "install", install)
    ready(home / "old", days=31)
    ready(home / "recent", days=29)
    assert not_installable(settings) == {"bad": "they clash"}
    good = environment_at(settings.home, settings.code_to_send("good")[0]).name
    assert {*os.listdir(home)} == {"recent", good}
    assert {*os.listdir(repo)} == before
