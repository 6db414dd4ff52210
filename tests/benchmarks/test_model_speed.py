"""How long retraining and asking take is measured through the registry, and nothing stays behind."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from tests.benchmarks.models import speeds
from tests.models.synthetic import World


def test_each_line_is_measured_and_no_folder_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        tempfile, "tempdir", str(tmp_path)
    )  # other processes have folders in the machine's own
    table = speeds(World(4).data(20), repeats=1, seed=0, large=50)
    assert table["what"].str.split(",").str[0].tolist() == [
        "fit",
        "fit",
        "one prediction",
        "predictions",
        "predictions",
    ]
    assert list(table["rows"]) == [20, 50, 1, 10_000, 10_000]
    assert (table["median_s"] > 0).all() and table["median_s"][2] < table["median_s"][3]
    assert not list(tmp_path.iterdir())
