"""A home has one credential, which nobody but its owner ever could read."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from tasks.workspace import credential
from tasks.workspace.credential import (
    FILE,
    authorization,
    make_credential,
    new_credential,
    read_credential,
)


def made(home: Path) -> tuple[str, list[str]]:
    said: list[str] = []
    return make_credential(home, said.append), said


def test_it_is_made_once_for_its_owner_alone(tmp_path: Path) -> None:
    home = tmp_path / "state"
    assert read_credential(tmp_path) is None
    before = os.umask(0)
    try:
        first, said = made(home)
    finally:
        os.umask(before)
    assert first.startswith("srift:") and len(first) > 40 and said == []
    assert stat.S_IMODE((home / FILE).stat().st_mode) == 0o600
    assert made(home) == (first, []) and read_credential(home) == first
    assert [path.name for path in home.iterdir()] == [FILE], "a draft was left"
    assert first != new_credential()
    assert authorization("srift:abc") == "Basic c3JpZnQ6YWJj"


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o644])
def test_one_that_others_could_read_or_write_is_replaced_and_that_is_said(
    tmp_path: Path, mode: int
) -> None:
    first, _ = made(tmp_path)
    (tmp_path / FILE).chmod(mode)
    second, (said,) = made(tmp_path)
    assert second != first and f"{mode:o}" in said and "new credential" in said
    assert stat.S_IMODE((tmp_path / FILE).stat().st_mode) == 0o600


def test_neither_a_link_nor_a_file_of_another_user_nor_a_torn_one_is_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    first, _ = made(elsewhere)
    (tmp_path / FILE).symlink_to(elsewhere / FILE)
    second, (said,) = made(tmp_path)
    assert second != first and "not a plain file" in said and read_credential(elsewhere) == first
    (tmp_path / FILE).write_text("srift:")
    third, (said,) = made(tmp_path)
    assert third not in (first, second) and "holds no credential" in said
    (tmp_path / FILE).write_bytes(b"\xff\xfe" * 30)
    assert read_credential(tmp_path) is not None
    assert "holds no credential" in made(tmp_path)[1][0], "one that is no text"
    monkeypatch.setattr(credential.os, "geteuid", lambda: os.getuid() + 1)
    assert "another user" in credential._fault(tmp_path / FILE)


def test_of_two_that_make_it_at_once_both_have_the_one_that_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link, winner = os.link, new_credential()

    def late(draft: Path, path: Path) -> None:
        path.write_text(f"{winner}\n")
        link(draft, path)

    monkeypatch.setattr(credential.os, "link", late)
    assert made(tmp_path) == (winner, [])
    assert [path.name for path in tmp_path.iterdir()] == [FILE]
