"""A version's figures: three pictures that can be opened, of what was held out, and none of nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from matplotlib.image import imread

from models.monitoring.cross_validation import SPLITS
from tasks.training import plots

LAZY = "import sys, flows.cli, tasks.training.train, tasks.training.registry; print('matplotlib' in sys.modules)"


def scored(rows: int = 60) -> pd.DataFrame:
    """Predictions off by 5 % or so, with intervals that cover."""
    random = np.random.default_rng(0)
    measured = np.exp(random.uniform(-3, 1, rows))
    step = measured * np.exp(0.05 * random.standard_normal(rows))
    split = [SPLITS[at % len(SPLITS)] for at in range(rows)]
    group = [f"group {at % 7}" for at in range(rows)]
    frame = pd.DataFrame({"split": split, "group": group, "measured_s": measured, "step_s": step})
    return frame.assign(step_low_s=step * 0.9, step_high_s=step * 1.1)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPLCONFIGDIR", str(tmp_path / "matplotlib"))


def test_three_pictures_are_drawn_and_each_shows_something(tmp_path: Path) -> None:
    made = plots.draw(scored(), tmp_path, tmp_path)
    assert [path.name for path in made] == [
        "predicted_against_measured.png",
        "errors_by_group.png",
        "calibration.png",
    ]
    for path in made:
        picture = imread(path)
        assert (
            min(picture.shape[:2]) > 300
            and len(np.unique(picture.reshape(-1, picture.shape[2]), axis=0)) > 20
        )


def test_nothing_held_out_draws_nothing(tmp_path: Path) -> None:
    assert plots.draw(scored(0), tmp_path, tmp_path) == [] == list(tmp_path.iterdir())


def test_each_split_has_its_colour_and_says_how_many_rows_and_how_far_off() -> None:
    axes = plots.predicted_against_measured(scored()).axes[0]
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert [
        label
        for label in labels
        if label.startswith("held out by cluster size: 20 rows, mean error ")
    ]
    assert len({tuple(points.get_facecolor()[0]) for points in axes.collections[1:]}) == len(SPLITS)
    assert axes.get_xscale() == axes.get_yscale() == "log"


def test_groups_whose_intervals_cover_too_little_stand_out() -> None:
    few = scored().assign(
        step_low_s=lambda one: one["step_s"] * 0.9999,
        step_high_s=lambda one: one["step_s"] * 1.0001,
    )
    shown = {
        text.get_color()
        for text in plots.errors_by_group(few).axes[0].texts
        if text.get_text() == "0%"
    }
    assert shown == {"#b00020"}
    many = pd.concat([scored().assign(group=f"g{at}") for at in range(30)])
    assert len(plots.errors_by_group(many).axes[0].get_yticklabels()) == 40


def test_the_calibration_is_drawn_as_it_was_scored() -> None:
    lines = plots.calibration_curve(scored()).axes[0].get_lines()
    assert [list(line.get_xdata()) for line in lines[1:]] == [[50.0, 80.0, 90.0]] * len(SPLITS)
    assert all(0 <= y <= 100 for line in lines for y in line.get_ydata())


def test_commands_that_draw_nothing_do_not_import_matplotlib_and_its_cache_lies_in_the_home(
    tmp_path: Path,
) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "MPLCONFIGDIR"}
    root = str(Path(plots.__file__).parents[1])

    def ran(code: str) -> str:
        command = [sys.executable, "-c", code]
        return subprocess.run(
            command, cwd=root, env=environment, capture_output=True, text=True, check=True
        ).stdout

    assert ran(LAZY).strip() == "False"
    scored().to_pickle(tmp_path / "scored.pkl")
    folder = repr(str(tmp_path))
    ran(
        "import pandas as pd; from pathlib import Path; from tasks.training import plots; "
        f"folder = Path({folder}); plots.draw(pd.read_pickle(folder / 'scored.pkl'), folder / 'home', folder)"
    )
    assert list((tmp_path / "home" / "matplotlib").iterdir())
