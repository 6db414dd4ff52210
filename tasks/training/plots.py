"""Figures of a version's held-out predictions, for its page in the registry.

matplotlib is imported when something is drawn, and keeps its font cache under SRIFT_HOME.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from models.monitoring.cross_validation import LEVELS, SPLITS, calibration, summarise

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS = dict(zip(SPLITS, ("#1b6ca8", "#d1495b", "#5c8a3a"), strict=True))
_DPI = 110
_MOST_GROUPS = 40  # bars that can still be read


def draw(scored: pd.DataFrame, home: Path, folder: Path) -> list[Path]:
    """Three PNGs of the `scored` predictions in `folder`; none where nothing could be held out."""
    if not len(scored):
        return []
    os.environ.setdefault(
        "MPLCONFIGDIR", str(home / "matplotlib")
    )  # read when matplotlib is first imported
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    made = []
    for name, figure in (
        ("predicted_against_measured", predicted_against_measured(scored)),
        ("errors_by_group", errors_by_group(scored)),
        ("calibration", calibration_curve(scored)),
    ):
        path = folder / f"{name}.png"
        FigureCanvasAgg(figure).print_png(str(path))  # type: ignore[no-untyped-call]
        made.append(path)
    return made


def predicted_against_measured(scored: pd.DataFrame) -> Figure:
    """Each held-out run once a split, log-log, coloured by what was held out; the line is a right prediction."""
    from matplotlib.ticker import LogLocator, NullFormatter

    figure, axes = _figure(6.4, 6.0)
    low = 0.9 * float(scored[["measured_s", "step_s"]].min().min())
    high = 1.1 * float(scored[["measured_s", "step_s"]].max().max())
    axes.plot([low, high], [low, high], color="black", linewidth=1, label="predicted = measured")
    axes.fill_between([low, high], [0.9 * low, 0.9 * high], [1.1 * low, 1.1 * high], color="black", alpha=0.08,
                      linewidth=0, label="within 10 %")  # fmt: skip
    for split, own in scored.groupby("split", sort=False):
        error = float((own["step_s"] / own["measured_s"] - 1).abs().mean())
        label = f"held out by {_said(split)}: {len(own)} rows, mean error {error:.1%}"
        axes.scatter(
            own["measured_s"],
            own["step_s"],
            s=14,
            alpha=0.6,
            color=_colour(split),
            label=label,
            linewidths=0,
        )
    axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high), aspect="equal")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter(NullFormatter())
    axes.set(xlabel="measured step time, seconds", ylabel="predicted step time, seconds")
    axes.set_title("Predicted without having seen the row's group")
    axes.legend(loc="upper left", fontsize=8, frameon=False)
    return figure


def errors_by_group(scored: pd.DataFrame) -> Figure:
    """A bar a held-out group: its mean error, the 90th percentile as a whisker, and beside it what its intervals cover.

    Where there are more than 40 groups, those with the largest errors.
    """
    board = summarise(scored)
    board = board[board["group"] != "all"].reset_index(drop=True)
    board = board.loc[
        board["mean_error"].sort_values(ascending=False).index[:_MOST_GROUPS]
    ].sort_index()[::-1]
    figure, axes = _figure(9.0, 1.6 + 0.3 * len(board))
    place = np.arange(len(board))
    mean, p90 = 100 * board["mean_error"].to_numpy(float), 100 * board["p90_error"].to_numpy(float)
    axes.barh(place, mean, color=[_colour(split) for split in board["split"]], alpha=0.85)
    axes.hlines(place, mean, np.maximum(p90, mean), color="black", linewidth=1)
    names = [f"{_said(row.split)} {row.group}  ({row.rows} rows)" for row in board.itertuples()]
    axes.set_yticks(place, names, fontsize=8)
    widest = float(max(p90.max(), mean.max()))
    for at, coverage in zip(range(len(board)), board["coverage_90"].to_numpy(float), strict=True):
        short = coverage < 0.8  # what the promotion rule asks of a split
        axes.text(
            1.04 * widest,
            at,
            f"{coverage:.0%}",
            va="center",
            fontsize=8,
            color="#b00020" if short else "black",
        )
    axes.text(1.04 * widest, len(board) - 0.3, "inside 90 % interval", fontsize=8, va="bottom")
    axes.set(xlim=(0, 1.25 * widest), ylim=(-0.7, len(board) + 0.5))
    axes.set_xlabel(
        "mean |predicted / measured - 1|, per cent; the line ends at the 90th percentile"
    )
    axes.set_title("Errors by held-out group")
    return figure


def calibration_curve(scored: pd.DataFrame) -> Figure:
    """Part of the held-out rows inside intervals of 50, 80 and 90 %, by what was held out; the line is honest."""
    figure, axes = _figure(6.0, 5.4)
    axes.plot([40, 100], [40, 100], color="black", linewidth=1, label="as stated")
    found = calibration(scored)
    for split, own in found.groupby("split", sort=False):
        covered = 100 * own["observed"].to_numpy(float)
        label = f"held out by {_said(split)} ({int(own['rows'].iloc[0])} rows)"
        axes.plot(
            100 * own["stated"].to_numpy(float),
            covered,
            marker="o",
            color=_colour(split),
            label=label,
        )
    axes.set_xticks([100 * level for level in LEVELS])
    axes.set(xlim=(45, 95), ylim=(min(40.0, 95 * float(found["observed"].min())), 102))
    axes.set(xlabel="stated, per cent", ylabel="observed, per cent of the held-out rows")
    axes.set_title("How often the measured step lies inside its interval")
    axes.grid(alpha=0.25)
    axes.legend(loc="lower right", fontsize=8, frameon=False)
    return figure


def _figure(width: float, height: float) -> tuple[Figure, Axes]:
    """A figure of its own: pyplot would keep every one, and ask for a display."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=_DPI, layout="constrained")
    return figure, figure.add_subplot()


def _colour(split: object) -> str:
    return _COLOURS.get(str(split), "#666666")


def _said(split: object) -> str:
    return str(split).replace("_", " ")
