"""`srift refresh` as a shell runs it, cut short: what was reported is in the warehouse, and nothing
is left running.
"""

import os
import signal

import pytest

from tests.local.command import Project
from tests.local.hosts import left_over, wait_for
from tests.local.test_failures import PROJECT, TINY
from tests.warehouse.builders import known

pytestmark = [pytest.mark.local, pytest.mark.slow]

SLOW = TINY.replace("import torch", "import os, time, torch").replace(
    "    return model,",
    """    def wait(*_):
        time.sleep(0.1)
        while os.path.exists({hold!r}):
            time.sleep(0.1)
    model.register_forward_hook(wait)
    return model,""",
)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cut")
    tiny = SLOW.replace("{hold!r}", repr(f"{folder}/hold"))
    toml = PROJECT.replace("max_minutes = 2.0", "max_minutes = 20.0")
    yield from Project.made(folder, {"tiny.py": tiny, "srift.toml": toml})


@pytest.fixture
def refresh(home):
    """A refresh, held after its first record, and its records."""
    process = home.start("refresh")

    def recorded():
        assert process.poll() is None, process.communicate()[1]
        return {file.stem for file in home.home.glob("leases/*/mailbox/node-*/records/*.json")}

    found = wait_for(recorded, 300.0)
    (home.folder / "hold").touch()
    yield process, found
    (home.folder / "hold").unlink()


def test_ctrl_c_loads_what_was_reported_and_leaves_nothing(home, refresh):
    process, reported = refresh
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to everything in the foreground
    _, err = process.communicate(timeout=200.0)
    assert process.returncode == 1 and "interrupted: " in err and "Traceback" not in err, err
    assert left_over(home.home) == [*home.home.glob("leases/*/mailbox")] == []
    runs = known(home.home)
    assert {runs[run_id] for run_id in reported} == {"measured"}
    assert "interrupted" in runs.values()


def test_the_reaper_loads_a_killed_refresh_and_leaves_a_live_one_alone(home, refresh):
    process, reported = refresh
    code, _, err = home.run("refresh")
    assert code == 1 and "nothing was started" in err and "Traceback" not in err
    assert home.json("reap") == {"ended": [], "not_swept": {}}
    assert process.poll() is None
    process.kill()
    process.communicate()
    assert left_over(home.home) != [] and "`srift reap`" in home.run("status")[1]
    code, out, err = home.run("reap")
    assert code == 0 and out == "" and "is gone" in err, err
    assert {known(home.home)[run_id] for run_id in reported} == {"measured"}
    assert home.run("reap")[1].strip() == "nothing was left running"
    assert left_over(home.home) == []
