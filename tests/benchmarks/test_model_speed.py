"""How long retraining and asking take is measured through the registry, and nothing stays behind."""

from __future__ import annotations

import tempfile
from pathlib import Path

from tests.benchmarks.models import speeds
from tests.models.synthetic import World


def test_each_line_is_measured_and_no_folder_stays() -> None:
    told = speeds(World(4).data(20), repeats=1, seed=0).set_index("what")
    assert list(told.index) == ["fit", "one prediction", "predictions"]
    assert list(told["rows"]) == [20, 1, 10_000]
    assert (told["median_s"] > 0).all() and told.loc["one prediction", "median_s"] < told.loc["predictions", "median_s"]
    assert not list(Path(tempfile.gettempdir()).glob("srift-speed-*"))
