"""The credential of a home: made once, replaced if others could know it."""

import os
import stat

import pytest

from tasks.workspace.credential import FILE, make_credential


def test_it_is_made_once_for_its_owner(tmp_path):
    home = tmp_path / "home"
    made = make_credential(home)
    assert made == make_credential(home) and len(made) > 40
    assert stat.S_IMODE((home / FILE).stat().st_mode) == 0o600
    assert stat.S_IMODE(home.stat().st_mode) == 0o700


def readable(path):
    path.chmod(0o640)


def linked(path):
    path.rename(path.with_name("other"))
    path.symlink_to(path.with_name("other"))


def emptied(path):
    path.write_text("")


def foreign(path):
    if os.geteuid():
        pytest.skip("only root can give a file away")
    os.chown(path, 65534, 65534)


@pytest.mark.parametrize("expose", [readable, linked, emptied, foreign])
def test_an_exposed_one_is_replaced(tmp_path, expose):
    before = make_credential(tmp_path)
    expose(tmp_path / FILE)
    assert make_credential(tmp_path) != before
    found = (tmp_path / FILE).lstat()
    assert stat.S_ISREG(found.st_mode) and stat.S_IMODE(found.st_mode) == 0o600
