"""Checkpoints that an elastic run resumes from: whole or none, whenever their writer ends."""

import pytest
import torch

from tasks.node.checkpoint import Checkpoints

CPU = torch.device("cpu")


def state(value):
    return {"model": {"weight": torch.full((300,), value)}}


def value_of(found):
    return float(found[1]["model"]["weight"][0])


@pytest.fixture
def written(tmp_path):
    """Of steps 10 and 20."""
    checkpoints = Checkpoints(tmp_path / "run")
    assert checkpoints.newest(CPU) is None
    for step in (10, 20):
        checkpoints.write(step, state(step), loss=0.5)
        manifest = checkpoints.read("step")[-1]
        assert manifest["step"] == step and manifest["bytes"] > 1200 and manifest["seconds"] > 0
    return checkpoints


def test_the_newest_whole_one_is_taken_and_states_of_old_ones_go(written):
    found = written.newest(CPU)
    assert value_of(found) == 20 and found[0]["loss"] == 0.5
    written.write(30, state(30))
    newest, before = sorted(written.folder.glob("*.pt"), reverse=True)
    assert [row["step"] for row in written.read("step")] == [10, 20, 30]
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 1
    newest.write_bytes(bytes(content))
    assert value_of(written.newest(CPU)) == 20
    before.unlink()
    assert written.newest(CPU) is None
