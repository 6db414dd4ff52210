"""`examples/own-repository` as its srift.toml says: photos are made, its requirements installed,
two steps made.
"""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tasks.doctor.workload_check import check_workload, problems
from tasks.workspace.settings import load_settings

EXAMPLE = Path(__file__).parents[1] / "examples/own-repository"


@pytest.mark.local
@pytest.mark.slow
def test_the_repository_with_its_requirements_and_a_folder_of_photos_is_checked(tmp_path):
    folder = tmp_path / "own-repository"
    shutil.copytree(EXAMPLE, folder)
    make = [sys.executable, "make_photos.py", "photos", "--count", "30", "--pixels", "80"]
    subprocess.run(make, cwd=folder, check=True)
    found = check_workload(load_settings(folder / "srift.toml"), "photos", timeout_s=300.0)
    assert problems(found) is None
    [checked] = found["precisions"]
    assert checked["figures"]["parameters"] == 23_528_522
    assert checked["figures"]["input_s"] > 0
