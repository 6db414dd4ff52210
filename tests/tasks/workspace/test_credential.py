"""The credential of a home: new at each start, and its owner's alone."""

import stat

from tasks.workspace.credential import FILE, new_credential, store_credential


def test_it_is_new_each_time_and_replaces_what_others_could_read(tmp_path):
    file = tmp_path / FILE
    file.symlink_to(tmp_path / "other")
    for made in (new_credential(), new_credential()):
        assert not file.exists() or made != file.read_text().strip()
        store_credential(tmp_path, made)
        assert len(made) > 40 and file.read_text() == f"{made}\n"
        assert stat.S_ISREG(file.lstat().st_mode) and stat.S_IMODE(file.stat().st_mode) == 0o600
        file.chmod(0o644)
    assert not (tmp_path / "other").exists()
