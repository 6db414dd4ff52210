"""A workload's code: what travels, what decides its digest, what is refused."""

import io
import tarfile

import pytest

from tasks.workspace import sources
from tasks.workspace.settings import SettingsError, load_settings

TOML = """
[workloads.net]
path = "repo"
entrypoint = "train.model:build"
requirements = "requirements.txt"
samples = 1000
global_batch = 64
"""


@pytest.fixture
def project(tmp_path):
    package = tmp_path / "repo/train"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "model.py").write_text("def build(): ...\n")
    (tmp_path / "repo/requirements.txt").write_text("numpy>=2\n")
    (tmp_path / "repo/config.json").write_text("{}")
    (tmp_path / "srift.toml").write_text(TOML)
    return tmp_path


def settings(project, *changes):
    text = TOML
    for old, new in changes:
        text = text.replace(old, new)
    (project / "srift.toml").write_text(text)
    return load_settings(project / "srift.toml")


def digest(project, *changes):
    return settings(project, *changes).workload_digest("net")


@pytest.mark.parametrize(
    "change",
    [
        ("train.model:build", "train:build"),
        ("global_batch", "arguments = { depth = 3 }\nglobal_batch"),
        ("global_batch", 'env = { DEPTH = "50" }\nglobal_batch'),
    ],
)
def test_another_setting_is_another_workload(project, change):
    assert digest(project, change) != digest(project)


@pytest.mark.parametrize(
    "name, changes",
    [
        ("config.json", True),
        ("train/new.py", True),
        ("requirements.txt", True),
        (".git/HEAD", False),
        ("train/__pycache__/model.pyc", False),
        ("venv/pyvenv.cfg", False),
    ],
)
def test_files_that_travel_decide_the_digest(project, name, changes):
    before = digest(project)
    file = project / f"repo/{name}"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("# other\n")
    assert (digest(project) != before) == changes


def test_no_link_leads_out_of_the_folder(project):
    (project / "secret").mkdir()
    (project / "secret/key").write_text("k")
    (project / "repo/link").symlink_to(project / "secret/key")
    (project / "repo/folder").symlink_to(project / "secret")
    (project / "repo/conf.txt").symlink_to(".env")
    (project / "repo/.env").write_text("k")
    _, source = settings(project).code_to_send("net")
    assert set(source.left_out) == {"link", "folder", "conf.txt"}
    assert not {"link", "folder/key"} & set(source.files)


def test_the_archive_is_reproducible_and_shows_nothing_of_this_disk(project):
    _, source = settings(project).code_to_send("net")
    packed = source.travels_as(source.read())
    (project / "repo/config.json").touch()
    assert source.travels_as(source.read()) == packed
    with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
        members = tar.getmembers()
    assert {member.name for member in members} == set(source.files)
    assert {(offer.uid, offer.uname, offer.mode) for offer in members} == {(0, "", 0o644)}


def test_requirements_are_installed_anew_if_what_pip_reads_changes(project):
    def needed():
        return settings(project).code_to_send("net")[0].requirements_digest

    before = needed()
    (project / "repo/config.json").write_text("other")
    assert needed() == before
    (project / "repo/requirements.txt").write_text("-r other.txt\n")
    local = needed()
    (project / "repo/other.txt").write_text("scipy\n")
    assert before != local != needed()
    (project / "repo/again.txt").write_text("-r other.txt\n")
    renamed = settings(project, ("requirements.txt", "again.txt"))
    assert renamed.code_to_send("net")[0].requirements_digest != needed()


def assert_refused(project):
    with pytest.raises(SettingsError):
        settings(project)


@pytest.mark.parametrize("limit, most", [("MAX_BYTES", 10), ("MAX_FILES", 2)])
def test_too_much_code_is_refused(project, monkeypatch, limit, most):
    monkeypatch.setattr(sources, limit, most)
    assert_refused(project)


@pytest.mark.parametrize("missing", ["requirements.txt", "train/model.py"])
def test_missing_files_are_refused(project, missing):
    (project / f"repo/{missing}").unlink()
    assert_refused(project)


def test_a_module_that_would_hide_the_agent_is_refused(project):
    (project / "repo/node.py").touch()
    assert_refused(project)


ALONE = (
    ('path = "repo"\n', ""),
    ("train.model:build", "repo/train/model.py:build"),
    ('"requirements.txt"', '"repo/requirements.txt"'),
)


@pytest.mark.parametrize("name", ["requirements.txt", "train/model.py"])
@pytest.mark.parametrize("target", ["../secret", ".env", "state/key"])
def test_no_file_is_a_link_out_of_the_folder(project, monkeypatch, name, target):
    monkeypatch.setenv("SRIFT_HOME", f"{project}/state")
    (project / "state").mkdir()
    file, secret = project / "repo" / name, project / target
    secret.write_text("numpy>=2\n")
    file.unlink()
    file.symlink_to(secret)
    with pytest.raises(SettingsError, match=f"{name}.* link"):
        settings(project, *ALONE)
    file.unlink()
    file.symlink_to(project / "repo/config.json")
    settings(project, *ALONE)


def test_a_file_travels_with_its_requirements(project):
    spec, source = settings(project, *ALONE).code_to_send("net")
    assert set(source.files) == {"model.py", "repo/requirements.txt"}
    assert source.packed and spec.requirements_digest


def test_state_and_goals_are_no_code(project):
    here = ('path = "repo"', 'path = "."')
    module = ("train.model:build", "repo.train.model:build")
    requirements = ('"requirements.txt"', '"repo/requirements.txt"')
    before = digest(project, here, module, requirements)
    (project / ".srift").mkdir()
    (project / ".srift/state").write_text("x")
    goal = ("global_batch = 64", 'global_batch = 64\ngoals = [{ goal = "cheapest" }]')
    assert digest(project, here, module, requirements, goal) == before
