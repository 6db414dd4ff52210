"""What `data` may name: refused with the nearest right name, and part of the digest where it is stated."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tasks.doctor.report import refuse_unless_well
from tasks.workspace import workload_data
from tasks.workspace.settings import Settings, SettingsError, load_settings
from tasks.workspace.sources import digest_of
from tasks.workspace.workload_data import Address, BadData, files_below, source_of

TOML = """
[workloads.mine]
entrypoint = "mine.py:build"
samples = 1000
global_batch = 16
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SRIFT_HOME", str(tmp_path / ".srift"))
    (tmp_path / "mine.py").write_text("def build(data): ...\n")
    images = tmp_path / "images" / "cats"
    images.mkdir(parents=True)
    (images / "1.jpg").write_bytes(b"x" * 10)
    (tmp_path / "images" / "labels.csv").write_text("1,cat\n")
    return tmp_path


def settings(project: Path, *lines: str) -> Settings:
    (project / "srift.toml").write_text("\n".join([TOML, *lines]))
    return load_settings(project / "srift.toml")


def test_a_workload_without_data_keeps_the_digest_that_its_rows_were_measured_under() -> None:
    assert digest_of(b"def build(): ...\n", "build", {"a": 1}) == "3f05ce25d22a"


def test_a_folder_is_beside_srift_toml_and_its_names_and_sizes_decide_the_digest(
    project: Path,
) -> None:
    plain = settings(project).workload("mine").digest
    stated = settings(project, 'data = "images"')
    data = stated.data("mine")
    assert data is not None and data.folder == project / "images" and data.address is None
    first = stated.workload("mine").digest
    assert settings(project, 'data = "images/"').workload("mine").digest == first != plain
    (project / "images" / "cats" / "1.jpg").write_bytes(b"y" * 10)
    assert settings(project, 'data = "images"').workload("mine").digest == first, (
        "contents are not read"
    )
    changed = []
    for file, content in (("cats/1.jpg", b"x" * 11), ("cats/2.jpg", b"")):
        (project / "images" / file).write_bytes(content)
        changed.append(settings(project, 'data = "images"').workload("mine").digest)
    assert len({first, *changed}) == 3
    assert (
        settings(project, f'data = "{project / "images"}"').data("mine").folder
        == project / "images"
    )  # type: ignore[union-attr]
    assert stated.workload("mine").digest == first, "of one command, as it was at the first look"


def test_an_address_counts_by_its_text(project: Path) -> None:
    one = settings(project, 'data = "s3://mine-1/photos/cats"')
    data = one.data("mine")
    assert data is not None and data.address == Address(bucket="mine-1", prefix="photos/cats/")
    assert str(data.address) == "s3://mine-1/photos/cats/" and data.folder is None
    assert settings(project, 'data = "s3://mine-1/photos/cats/"').data("mine").digest == data.digest  # type: ignore[union-attr]
    assert settings(project, 'data = "s3://mine-1/photos/dogs"').data("mine").digest != data.digest  # type: ignore[union-attr]
    assert settings(project, 'data = "s3://mine-1"').data("mine").address == Address(
        bucket="mine-1", prefix=""
    )  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("stated", "said"),
    [
        ("rows", "no folder {project}/rows; create it, or take `data` out"),
        ("imagess", "no folder {project}/imagess; did you mean 'images'?"),
        (
            "mine.py",
            "{project}/mine.py is a file: name the folder that it lies in; did you mean '{project}'?",
        ),
        ("hollow", "{project}/hollow is empty"),
        (".", "{project} holds SRIFT_HOME"),
        ("", "'' names nothing"),
        ("ima\\nges", "has a character that cannot be printed"),
        ("s3:/mine-1/cats", "did you mean 's3://mine-1/cats'?"),
        ("S3://mine-1/cats", "did you mean 's3://mine-1/cats'?"),
        (
            "https://mine-1.s3.amazonaws.com/cats",
            "neither a folder nor of the form s3://bucket/prefix",
        ),
        ("s3://Mine/cats", "is not of the form s3://bucket/prefix"),
        ("s3://m", "is not of the form s3://bucket/prefix"),
        ("s3://mine-1//cats", "did you mean 's3://mine-1/cats'?"),
        ("s3://mine-1/../cats", "did you mean 's3://mine-1/cats'?"),
        ("s3://mine-1/cats*", "'*' in it, which cannot stand in an IAM policy"),
        ("s3://mine-1/${{aws:userid}}", "'$' in it, which cannot stand in an IAM policy"),
    ],
)
def test_a_wrong_name_is_refused_before_anything_starts(
    project: Path, stated: str, said: str
) -> None:
    (project / "hollow").mkdir()
    with pytest.raises(SettingsError) as refused:
        settings(project, f'data = "{stated}"').data("mine")
    assert said.format(project=project) in str(refused.value)
    assert "workloads.mine.data: " in str(refused.value)


def test_a_disk_that_is_away_keeps_nobody_from_reaping(project: Path) -> None:
    stated = settings(project, 'data = "imagess"')
    assert stated.workloads["mine"].data == "imagess"
    with pytest.raises(SettingsError, match="no folder"):
        refuse_unless_well(stated, "local", None)
    with pytest.raises(SettingsError, match="no folder"):
        stated.workload("mine")


def test_data_that_nobody_would_read_and_two_of_one_name_are_refused(project: Path) -> None:
    with pytest.raises(SettingsError, match="rename the second"):
        settings(project, 'data = "images"', "arguments = { data = 1 }")
    (project / "srift.toml").write_text(
        TOML.replace('entrypoint = "mine.py:build"', 'data = "images"')
    )
    with pytest.raises(SettingsError, match="data without an entrypoint"):
        load_settings(project / "srift.toml")


def test_files_have_names_with_slashes_and_a_link_counts_as_its_file(project: Path) -> None:
    (project / "images" / "linked.csv").symlink_to(project / "images" / "labels.csv")
    assert files_below(project / "images") == {"cats/1.jpg": 10, "labels.csv": 6, "linked.csv": 6}
    assert list(files_below(project / "images")) == ["cats/1.jpg", "labels.csv", "linked.csv"]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda folder: (folder / "a\nb").touch(), "which no object of S3 can be called"),
        (lambda folder: (folder / "a\\b").touch(), "which no object of S3 can be called"),
        (
            lambda folder: Path(os.fsdecode(os.fsencode(folder) + b"/\xff")).touch(),
            "no object of S3 can be called",
        ),
        (lambda folder: os.mkfifo(folder / "pipe"), "is no plain file"),
        (lambda folder: (folder / "link").symlink_to(folder), "is a link to a folder"),
        (
            lambda folder: (folder / "link").symlink_to(folder / "none"),
            "is a link that leads nowhere",
        ),
        (lambda folder: (folder / "empty").mkdir(), ""),
    ],
)
def test_what_could_not_travel_is_refused_by_name(project: Path, make: object, said: str) -> None:
    make(project / "images")  # type: ignore[operator]
    if not said:
        assert "empty" not in files_below(project / "images")
        return
    with pytest.raises(BadData, match=said):
        files_below(project / "images")
    with pytest.raises(SettingsError, match=r"workloads\.mine\.data: "):
        settings(project, 'data = "images"').workload("mine")


def test_too_many_files_and_folders_of_nothing_are_refused(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project / "shells" / "inner").mkdir(parents=True)
    with pytest.raises(BadData, match="has no file in it"):
        files_below(project / "shells")
    monkeypatch.setattr(workload_data, "MOST_FILES", 1)
    with pytest.raises(BadData, match="more than 1 files: pack them"):
        files_below(project / "images")


def test_a_home_folder_is_meant_by_a_tilde(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert source_of("~/images", Path("/elsewhere")) == tmp_path / "images"
