"""`data` of a workload: folders and S3 prefixes, and what cannot travel."""

import pytest

from tasks.doctor.checks import refuse_unless_well
from tasks.workspace import workload_data
from tasks.workspace.settings import SettingsError, load_settings
from tasks.workspace.workload_data import BadData, source_of

TOML = """
[workloads.net]
entrypoint = "net.py:build"
data = "{data}"
samples = 1000
global_batch = 64
"""


@pytest.fixture
def project(tmp_path):
    (tmp_path / "net.py").write_text("def build(data): ...\n")
    (tmp_path / "photos/a").mkdir(parents=True)
    (tmp_path / "photos/a/one.bin").write_bytes(b"123")
    return tmp_path


def settings(project, data="photos"):
    (project / "srift.toml").write_text(TOML.format(data=data))
    return load_settings(project / "srift.toml")


def assert_refused(project, data="photos"):
    with pytest.raises(SettingsError):
        settings(project, data).data("net")


def test_names_and_sizes_of_a_folder_decide_the_digest(project):
    before = settings(project).workload_digest("net")
    file = project / "photos/a/one.bin"
    file.write_bytes(b"456")
    assert settings(project).workload_digest("net") == before
    file.write_bytes(b"4567")
    assert settings(project).workload_digest("net") != before


def test_an_address_is_parsed(project):
    data = settings(project, "s3://bucket/a/b").data("net")
    assert str(data.source) == "s3://bucket/a/b/"
    assert str(source_of("s3://bucket", project)) == "s3://bucket/"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a\x07b",
        "gs://bucket",
        "s3://B/x",
        "s3://bucket/a//b",
        "s3://bucket/../b",
        "s3://bucket/a*",
        "s3://bucket/${x}",
        "s3://bucket/" + "a" * 901,
    ],
)
def test_malformed_text_is_refused(project, text):
    with pytest.raises(BadData):
        source_of(text, project)


def test_a_missing_folder_stops_a_refresh_and_not_the_settings(project):
    found = settings(project, "fotos")
    found.home.mkdir(exist_ok=True)
    with pytest.raises(SettingsError):
        refuse_unless_well(found, "local", None)


def test_links_to_folders_links_out_and_odd_names_are_refused(project):
    photos = project / "photos"
    for name, target in (("link", photos), ("broken", "nowhere"), ("a\\b", "a/one.bin")):
        (photos / name).symlink_to(target)
        assert_refused(project)
        (photos / name).unlink()
    (photos / "inside").symlink_to("a/one.bin")
    assert settings(project).data("net")
    (photos / "labels").symlink_to("../net.py")
    assert_refused(project)
    assert settings(project, 'photos"\nfollow_links = true # "').data("net")


def test_too_many_files_and_none_are_refused(project, monkeypatch):
    monkeypatch.setattr(workload_data, "MOST_FILES", 0)
    assert_refused(project)
    (project / "photos/a/one.bin").unlink()
    assert_refused(project)


def test_a_file_and_the_folder_of_the_home_are_refused(project, monkeypatch):
    monkeypatch.delenv("SRIFT_HOME")
    for data in (".", "net.py"):
        assert_refused(project, data)
