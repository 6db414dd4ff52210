"""Draw the report page: one HTML file with recommendations, their reasons and past results.

Jinja escapes all text of the page, and matplotlib escapes all text of the SVG charts.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from models.domain.setup_table import rows_of
from models.domain.workload import GOAL_COLUMNS

from .progress import Row
from .tables import (
    COLUMN_LEGEND,
    TextTable,
    cautions_in,
    recommendation_table,
    text_table,
    without_cautions,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

OLD_AFTER_H = 48.0
_LONG = 12  # a table with more rows is folded
_INK, _ACCENT, _SECOND, _GREY = "#000000", "#1b6ca8", "#c2620f", "#8a939c"


def draw(rows: Mapping[str, Sequence[Row]], sources: Mapping[str, Row]) -> str:
    """Return the report page as HTML.

    rows: {name of a query in warehouse/report: rows of its result}.
    sources: {provider: row} for every provider with published recommendations. The keys of a row
        are `illustrative` (True if the prices are not real) and `refresh` (the command that renews
        the recommendations).
    """
    recommendations = rows["recommendations"]
    table = recommendation_table(recommendations)
    template = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    ).get_template("report_page.html.jinja")
    return template.render(
        publications=rows["publications"],
        sources=sources,
        old_after_h=OLD_AFTER_H,
        legend=COLUMN_LEGEND,
        cautions=cautions_in(row["reason"] for row in recommendations),
        table=table,
        groups=_groups(recommendations, table),
        rivals=sum(row["rank"] > 1 for row in recommendations),
        filters={
            name: sorted({str(row[name]) for row in recommendations})
            for name in ("workload", "goal", "provider")
        },
        sections={
            title: [panel for name in names for panel in _panels(name, rows[name])]
            for title, names in _SECTIONS.items()
            if rows["gpus"] or "gpus" not in names  # local hosts have no GPUs to compare
        },
    )


def _groups(recommendations: Sequence[Row], table: TextTable) -> list[list[dict[str, Any]]]:
    """Return the recommendations in groups. All recommendations of a group have the same goal.

    A group is a list with a dictionary for each recommendation:

        row: the recommendation.
        line: the recommendation's line in `table`.
        reason: the recommendation's reason without warnings.

    recommendations: the recommendations, sorted by GOAL_COLUMNS.
    table: a table with a line for each recommendation, in the same order.
    """
    entries: list[dict[str, Any]] = [
        {"row": row, "line": line, "reason": without_cautions(row["reason"])}
        for row, line in zip(recommendations, table.lines, strict=True)
    ]
    groups = groupby(entries, key=lambda item: [item["row"][name] for name in GOAL_COLUMNS])
    return [list(group) for _, group in groups]


Plot = Callable[["Axes", pd.DataFrame], None]


def _panels(name: str, rows: Sequence[Row]) -> Sequence[Row]:
    """Return the panels of the page that show the rows of a query.

    Consecutive rows with the same `title` form a panel. A panel has a table and, for some queries,
    a chart.
    name: the query of warehouse/report that returned the rows.
    """
    panels, plot = [], _PLOTS.get(name)
    for title, group in groupby(rows, key=itemgetter("title")):
        panel_rows = list(group)
        svg = _svg(plot, pd.DataFrame(panel_rows)) if plot else None
        text = text_table(panel_rows, _COLUMNS[name])
        is_folded = svg is not None or len(text.lines) > _LONG
        panels.append({"title": title, "text": text, "svg": svg, "folded": is_folded})
    return panels


def _svg(plot: Plot, frame: pd.DataFrame) -> Markup:
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "srift", "text.parse_math": False}):
        figure, text = Figure(figsize=(7, 3.8), layout="constrained"), io.StringIO()
        axes = figure.subplots()
        plot(axes, frame)
        axes.spines[["top", "right"]].set_visible(False)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False)
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    svg = text.getvalue()
    # The page's text colour instead of black keeps the chart readable in dark mode.
    return Markup(svg[svg.index("<svg") :].replace(_INK, "currentColor"))


def _costs(axes: Axes, frame: pd.DataFrame) -> None:
    """Plot the dollars of each setup against its hours, and the Pareto frontier as a staircase.

    A line connects the expected hours and dollars of a setup to their 90th percentiles.
    """
    best = frame[frame["judged"] == "not beaten"]
    axes.scatter(frame["hours"], frame["usd"], color=_GREY)
    axes.plot(frame[["hours", "hours_p90"]].T, frame[["usd", "usd_p90"]].T, color=_GREY, lw=1)
    axes.step(
        best["hours"], best["usd"], "o-", where="post", color=_ACCENT, label="Pareto frontier"
    )
    for row in rows_of(frame[frame["first_for"].notna()]):
        place = (row["hours"], row["usd"])
        axes.annotate(str(row["cluster"]), place, (4, 6), textcoords="offset points")
    for name, axis in (("hours", axes.xaxis), ("usd", axes.yaxis)):
        if frame[name].max() > 20 * frame[name].min():
            axis.axes.set(**{f"{axis.axis_name}scale": "log"})
            axis.set_major_formatter("{x:g}")
    axes.set(xlabel="hours", ylabel="US dollars")


def _errors(axes: Axes, frame: pd.DataFrame) -> None:
    """Plot the errors of each model version and the coverage of its intervals, in percent."""
    names = {"mean_error": "mean error", "median_error": "median error"}
    names |= {"coverage_90": "in 90 % interval"}
    percent = 100 * frame.set_index("version")[[*names]].astype(float).rename(columns=names)
    percent.plot(ax=axes, marker="o", color=[_ACCENT, _GREY, _SECOND], ylabel="%")
    axes.axhline(90, color=_GREY, linestyle="--", linewidth=1)


_SECTIONS = {
    "Kinds of GPU": ["gpus"],
    "Cost against time": ["setups"],
    "Changes and their causes": ["changes"],
    "Model error and interval coverage": ["versions", "scoreboard"],
    "Regret ledger: recommendations judged by later runs": ["ledger_summary", "ledger"],
    "Latest measurements and their cost": ["refreshes", "spent", "measured", "failed"],
    "Ages of prices and measurements, drift, slow runs": ["ages", "drifting", "slow"],
}
_PLOTS: dict[str, Plot] = {"setups": _costs, "versions": _errors}
_COLUMNS = {
    "gpus": """
        device: {device}
        cluster: {cluster} {market}
        mode: {mode}
        step s: {step_s:.3g}
        tok/s/GPU: {tokens_per_s_per_gpu:?,.0f}
        MFU: {mfu:?.0%}
        hours: {hours:.3g}
        usd: {usd:.4g}
        p ok: {p_meets_constraint:?.0%}
        runs measured: {measured_runs:d}
    """,
    "setups": """
        device: {device}
        cluster: {cluster}
        market: {market}
        batch: {batch_per_device}
        hours: {hours:.3g}
        hours p90: {hours_p90:.3g}
        usd: {usd:.4g}
        usd p90: {usd_p90:.4g}
        in hours and usd: {judged}
        first choice for: {first_for:?}
    """,
    "changes": """
        workload: {workload}
        provider: {provider}
        goal: {goal}
        hours allowed: {constraint_hours:?g}
        usd allowed: {constraint_usd:?g}
        change: {change}
        before: {previous_cluster:?} {previous_market:?}
        hours and usd before: {previous_hours:?.3g} h ${previous_usd:?.4g}
        now: {cluster:?} {market:?} {hours:?.3g} h ${usd:?.4g}
        because of: {cause}
    """,
    "versions": """
        version: {version}
        trained: {trained_at:%Y-%m-%d %H:%M UTC}
        promoted: {promoted}
        rows: {rows:?g}
        mean error: {mean_error:?.1%}
        median error: {median_error:?.1%}
        in 90 % interval: {coverage_90:?.1%}
        reason: {reason}
    """,
    "scoreboard": """
        held out by: {split}
        rows: {rows:g}
        mean error: {mean_error:.1%}
        median error: {median_error:.1%}
        p90 error: {p90_error:.1%}
        in 90 % interval: {coverage_90:.1%}
        width: {median_width:.1%}
    """,
    "ledger_summary": """
        provider: {provider}
        measured: {measured:g}
        in their interval: {within:.0%}
        missed their constraint: {failures:g}
        with a measured rival: {compared:g}
        mean regret: {mean_regret:?.1%!}
        worst regret: {worst_regret:?.1%!}
    """,
    "ledger": """
        published: {published_at:%Y-%m-%d %H:%M UTC}
        workload: {workload}
        goal: {goal}
        choice: {cluster} {market}
        hours promised: {promised_hours:.3g}
        hours measured: {measured_hours:.3g}
        usd promised: {promised_usd:.4g}
        usd measured: {measured_usd:.4g}
        measured / promised step: {ratio:.2f}
        in its interval: {within_interval}
        verdict: {verdict}
        regret: {regret:?.1%!}
    """,
    "refreshes": """
        refresh: {refresh_id}
        began: {started_at:%Y-%m-%d %H:%M UTC}
        launches: {leases:g}
        measured: {measured_runs:g}
        not measured: {failed_runs:g}
        usd: {usd:.4g}
    """,
    "spent": """
        workload: {workload}
        runs: {runs:g}
        launches: {leases:g}
        usd: {usd:.4g}
    """,
    "measured": """
        workload: {workload}
        kind: {kind}
        cluster: {cluster}
        market: {market:?}
        batch: {batch_per_device:?}
        runs: {runs:g}
        median step s: {step_s:?.3g}
        wanted because: {reason_wanted:?}
    """,
    "failed": """
        workload: {workload}
        cluster: {cluster}
        status: {status}
        runs: {runs:g}
        reason: {reason}
    """,
    "ages": """
        workload: {workload}
        provider: {provider}
        oldest price: {price_as_of:%Y-%m-%d %H:%M UTC}
        newest measurement: {newest_measurement_at:%Y-%m-%d %H:%M UTC}
    """,
    "drifting": """
        provider: {provider}
        instance type: {instance_type}
        zone: {zone}
        direction: {direction}
        runs: {runs:g}
        outside their interval: {outside:g}
        measured / predicted: {median_ratio:.2f}
        since: {since:%Y-%m-%d %H:%M UTC}
    """,
    "slow": """
        workload: {workload}
        cluster: {cluster}
        zone: {zone}
        cause: {cause}
        measured s: {measured_s:.3g}
        predicted s: {predicted_s:.3g}
        at most s: {high_s:.3g}
        measured: {measured_at:%Y-%m-%d %H:%M UTC}
        detail: {detail}
    """,
}
