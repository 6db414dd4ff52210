"""The report page: recommendations, their reasons and their record, as one HTML file.

Charts are SVG. Jinja escapes all text of the page, and matplotlib all text of the charts.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from models.domain.setup_table import rows_of
from models.monitoring.drift import drift_sentence
from models.monitoring.regret_ledger import ledger_summary
from models.monitoring.slow_runs import sentence as alarm_sentence

from .progress import goal_text
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

Row = Mapping[str, Any]
# The published relations on the page; the others are of `warehouse.reads.reported`.
PUBLISHED = (
    "recommendations",
    "recommendation_changes",
    "pareto",
    "regret_ledger",
    "drift",
    "alarms",
)
OLD_AFTER_H = 48.0
_MOST = 60  # newest rows of a table or chart about the past
_LONG = 12  # rows of a table that is not folded
_INK, _ACCENT, _SECOND, _GREY = "#000000", "#1b6ca8", "#c2620f", "#8a939c"
_MARKERS = {"on-demand": "o", "spot": "D"}
_WHEN = "%Y-%m-%d %H:%M UTC"


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Whether a provider's prices are illustrative, and the command of its refresh."""

    illustrative: bool
    refresh: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PageTable:
    caption: str
    text: TextTable

    @property
    def folded(self) -> bool:
        return len(self.text.lines) > _LONG


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A picture, and its figures as a table."""

    title: str
    svg: Markup
    table: PageTable


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    name: str
    title: str
    sentences: Sequence[str] = ()
    charts: Sequence[Chart] = ()
    tables: Sequence[PageTable] = ()


def draw(frames: Mapping[str, pd.DataFrame], sources: Mapping[str, Source]) -> str:
    """Return the page's HTML, of the relations PUBLISHED and of `warehouse.reads.reported`.

    `sources` has every provider that published.
    """
    rows = {name: _rows(frame) for name, frame in frames.items()}
    recommended = rows["recommendations"]
    table = recommendation_table(recommended)
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
        cautions=cautions_in(str(row["reason"]) for row in recommended),
        table=table,
        groups=_groups(recommended, table),
        rivals=sum(row["rank"] > 1 for row in recommended),
        filters={
            name: sorted({str(row[name]) for row in recommended})
            for name in ("workload", "goal", "provider")
        },
        sections=[
            _frontiers(recommended, rows["pareto"]),
            _changes(rows, sources),
            _model(rows, sources),
            _ledger(frames["regret_ledger"], sources),
            _measured(rows, sources),
            _ages(rows, sources),
        ],
    )


def _groups(recommended: Sequence[Row], table: TextTable) -> list[list[dict[str, Any]]]:
    """The rows of each goal, the first choice first, with their lines of `table` and reasons."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row, line in zip(recommended, table.lines, strict=True):
        key = (row["provider"], row["workload"], goal_text(row))
        reason = without_cautions(str(row["reason"]))
        groups.setdefault(key, []).append({"row": row, "line": line, "reason": reason})
    return list(groups.values())


def _frontiers(recommended: Sequence[Row], pareto: Sequence[Row]) -> Section:
    """A chart a workload: hours and dollars of each recommended setup."""
    best = {_place(row) for row in pareto}
    placed: dict[tuple[str, str], dict[tuple[Any, ...], dict[str, Any]]] = {}
    for row in recommended:
        if row["cluster"] is None or row["hours"] is None or row["usd"] is None:
            continue
        setups = placed.setdefault((str(row["workload"]), str(row["provider"])), {})
        judged = "not beaten" if _place(row) in best else "beaten"
        setup = setups.setdefault(_place(row), dict(row) | {"judged": judged, "first_for": ""})
        if row["rank"] == 1:
            setup["first_for"] += f"{goal_text(row)} "
    columns = """
        cluster: {cluster}
        market: {market}
        batch: {batch_per_device}
        hours: {hours:.3g}
        hours p90: {hours_p90:.3g}
        usd: {usd:.4g}
        usd p90: {usd_p90:.4g}
        in both: {judged}
        first choice for: {first_for}
    """
    charts = []
    for (workload, provider), setups in placed.items():
        rows = sorted(setups.values(), key=lambda row: float(row["hours"]))
        title = f"{workload} ({provider})"
        charts.append(_chart(title, rows, columns, _costs))
    return Section(
        name="frontier",
        title="Cost against time",
        sentences=[
            "Expected hours and dollars of each recommended setup with a known price, up to the"
            " 90th percentile. Circles are on demand, diamonds spot, squares both; first choices are named."
            if charts
            else "No setup of this publication has a price and a time."
        ],
        charts=charts,
    )


def _place(row: Row) -> tuple[Any, ...]:
    names = ("provider", "workload", "cluster", "market", "layout", "batch_per_device")
    return tuple(row[name] for name in (*names, "accumulation_steps", "hours", "usd"))


def _costs(axes: Axes, rows: Sequence[Row]) -> None:
    best = [row for row in rows if row["judged"] == "not beaten"]
    hours, usd = ([row[name] for row in best] for name in ("hours", "usd"))
    axes.step(hours, usd, where="post", color=_ACCENT, label="not beaten in both")
    for row in rows:
        x, y = row["hours"], row["usd"]
        up, right = (
            [[0], [max((row[f"{name}_p90"] or row[name]) - row[name], 0)]]
            for name in ("usd", "hours")
        )
        color = _ACCENT if row["judged"] == "not beaten" else _GREY
        marker = _MARKERS.get(str(row["market"]), "s")
        axes.errorbar(x, y, up, right, color=color, marker=marker, capsize=3, linewidth=1)
        if row["first_for"]:
            axes.annotate(str(row["cluster"]), (x, y), (4, 6), textcoords="offset points")
    for name, scale in (("hours", axes.set_xscale), ("usd", axes.set_yscale)):
        values = [float(row[name]) for row in rows]
        if max(values) > 20 * min(values) > 0:
            scale("log")
    axes.set_xlabel("hours")
    axes.set_ylabel("US dollars")


_CHANGES = """
    workload: {workload}
    provider: {provider}
    goal: {goal_text}
    change: {change}
    before: {previous_cluster:?} {previous_market:?} {previous_hours:?.3g} h ${previous_usd:?.4g}
    now: {cluster:?} {market:?} {hours:?.3g} h ${usd:?.4g}
    because of: {cause}
"""


def _changes(rows: Mapping[str, Sequence[Row]], sources: Mapping[str, Source]) -> Section:
    """First choices that differ from the previous publication."""
    sentences = []
    for one in rows["publications"]:
        provider, before = str(one["provider"]), one["previous_published_at"]
        number = sum(row["provider"] == provider for row in rows["recommendation_changes"])
        sentences.append(
            f"{provider}: this is the first publication; `{sources[provider].refresh}` makes more."
            if before is None
            else f"{provider}: {number} first choices differ from those of {before:{_WHEN}}."
        )
    tables = []
    for caption, kinds in (
        ("Other choices", {"choice", "split", "goal"}),
        ("The same choice at other hours or dollars", {"time", "price"}),
    ):
        changed = [row for row in rows["recommendation_changes"] if row["change"] in kinds]
        tables += _tables(
            caption, [{**row, "goal_text": goal_text(row)} for row in changed], _CHANGES
        )
    return Section(
        name="changes", title="What changed, and why", sentences=sentences, tables=tables
    )


_VERSIONS = """
    version: {version}
    trained: {trained_at:%Y-%m-%d %H:%M UTC}
    rows: {rows:?g}
    promoted: {promoted}
    mean error: {mean_error:.1%}
    median error: {median_error:.1%}
    in 90 % interval: {coverage_90:.1%}
"""
_SCORES = """
    held out by: {split}
    rows: {rows:g}
    mean error: {mean_error:.1%}
    median error: {median_error:.1%}
    p90 error: {p90_error:.1%}
    in 90 % interval: {coverage_90:.1%}
    width: {median_width:.1%}
"""


def _model(rows: Mapping[str, Sequence[Row]], sources: Mapping[str, Source]) -> Section:
    """Errors and coverage of each version on workloads that it had not seen."""
    sentences, charts, tables = [], [], []
    for provider in sorted(sources):
        versions = _of(rows["model_versions"], provider)
        if not versions:
            sentences.append(f"{provider}: no model yet; `{sources[provider].refresh}` trains one.")
            continue
        newest = versions[-1]
        verdict = "promoted" if newest["promoted"] else "not promoted"
        sentences.append(
            f"{provider}: version {newest['version']} was {verdict}: {newest['reason']}"
        )
        scored = [row for row in versions if row["mean_error"] is not None][-_MOST:]
        if scored:
            title = f"Versions of the model of {provider}"
            charts.append(_chart(title, scored, _VERSIONS, _errors))
        caption = f"{provider}: version {newest['version']} on rows that it had not seen"
        tables += _tables(caption, _of(rows["scoreboards"], provider), _SCORES)
    return Section(
        name="model",
        title="Model error and interval coverage",
        sentences=sentences,
        charts=charts,
        tables=tables,
    )


def _errors(axes: Axes, rows: Sequence[Row]) -> None:
    names = [str(row["version"]) for row in rows]
    for column, label, color in (
        ("mean_error", "mean error", _ACCENT),
        ("median_error", "median error", _GREY),
        ("coverage_90", "in 90 % interval", _SECOND),
    ):
        values = [math.nan if row[column] is None else 100 * row[column] for row in rows]
        axes.plot(names, values, marker="o", label=label, color=color)
    axes.axhline(90, color=_GREY, linestyle="--", linewidth=1)
    axes.set_xlabel("version")
    axes.set_ylabel("%")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)


_PROMISES = """
    published: {published_at:%Y-%m-%d %H:%M UTC}
    workload: {workload}
    goal: {goal_text}
    choice: {cluster} {market}
    hours promised: {promised_hours:.3g}
    hours measured: {measured_hours:.3g}
    usd promised: {promised_usd:.4g}
    usd measured: {measured_usd:.4g}
    measured / promised step: {ratio:.2f}
    in its interval: {within_interval}
    verdict: {verdict}
    regret: {regret:?.1%}
"""


def _ledger(ledger: pd.DataFrame, sources: Mapping[str, Source]) -> Section:
    """First choices that were measured after their publication: promise, outcome, regret."""
    sentences, charts = [], []
    for provider in sorted(sources):
        mine = ledger[ledger["provider"] == provider].sort_values("newest_measured_at")
        if not len(mine):
            sentences.append(f"{provider}: no published first choice was measured afterwards yet.")
            continue
        summary = ledger_summary(mine)
        regret = text_table(
            [summary],
            """
            : mean {mean_regret:.1%}, worst {worst_regret:.1%}
        """,
        )
        sentences.append(
            f"{provider}: {summary['measured']} first choices measured,"
            f" {summary['within_interval']:.0%} in their interval, {summary['failures']} missed"
            f" their constraint; regret of {summary['compared']}: {regret.lines[0][0]}."
        )
        rows = [
            row
            | {
                "goal_text": goal_text(row),
                "ratio": row["measured_step_s"] / row["promised_step_s"],
                "low": row["promised_step_low_s"] / row["promised_step_s"],
                "high": row["promised_step_high_s"] / row["promised_step_s"],
            }
            for row in _rows(mine)[-_MOST:]
        ]
        title = f"Measured against promised step times of {provider}"
        charts.append(_chart(title, rows, _PROMISES, _ratios))
    return Section(name="ledger", title="Regret ledger", sentences=sentences, charts=charts)


def _ratios(axes: Axes, rows: Sequence[Row]) -> None:
    places = range(1, len(rows) + 1)
    errors = [[1 - row["low"] for row in rows], [row["high"] - 1 for row in rows]]
    axes.errorbar(
        places, [1.0] * len(rows), errors, fmt="_", color=_GREY, label="promised interval"
    )
    for within, marker, color in ((True, "o", _ACCENT), (False, "x", _SECOND)):
        chosen = [
            (place, row["ratio"])
            for place, row in zip(places, rows, strict=True)
            if bool(row["within_interval"]) is within
        ]
        label = "measured inside" if within else "measured outside"
        axes.scatter(
            *zip(*chosen, strict=True) if chosen else ([], []),
            marker=marker,
            color=color,
            label=label,
        )
    axes.set_xlabel("choice, the newest last")
    axes.set_ylabel("measured / promised step")
    axes.legend(frameon=False)


_REFRESHES = """
    refresh: {refresh_id}
    began: {started_at:%Y-%m-%d %H:%M UTC}
    launches: {leases:g}
    measured: {measured_runs:g}
    not measured: {failed_runs:g}
    usd: {usd:.4g}
"""
_LAST = {
    "dollars by workload": (
        "last_spend",
        """
            workload: {workload}
            runs: {runs:g}
            launches: {leases:g}
            usd: {usd:.4g}
        """,
    ),
    "setups measured": (
        "last_measured",
        """
            workload: {workload}
            kind: {kind}
            cluster: {cluster}
            market: {market:?}
            batch: {batch_per_device:?}
            runs: {runs:g}
            median step s: {step_s:?.3g}
            wanted because: {reason_wanted:?}
        """,
    ),
    "runs without a measurement": (
        "last_failed",
        """
            workload: {workload}
            cluster: {cluster}
            status: {status}
            runs: {runs:g}
            reason: {reason}
        """,
    ),
}


def _measured(rows: Mapping[str, Sequence[Row]], sources: Mapping[str, Source]) -> Section:
    """What a provider's newest refresh with machines measured, and what it cost."""
    sentences, charts, tables = [], [], []
    for provider in sorted(sources):
        refreshes = _of(rows["spend"], provider)[-_MOST:]
        if not refreshes:
            sentences.append(
                f"{provider}: no refresh has measured anything; `{sources[provider].refresh}` does."
            )
            continue
        title = f"Dollars of each refresh of {provider}"
        charts.append(_chart(title, refreshes, _REFRESHES, _spent))
        for caption, (name, columns) in _LAST.items():
            tables += _tables(f"{provider}: {caption}", _of(rows[name], provider), columns)
    return Section(
        name="measured",
        title="Measured last, and what it cost",
        sentences=sentences,
        charts=charts,
        tables=tables,
    )


def _spent(axes: Axes, rows: Sequence[Row]) -> None:
    names = [f"{row['started_at']:%m-%d %H:%M}" for row in rows]
    axes.bar(range(len(rows)), [row["usd"] or 0.0 for row in rows], color=_ACCENT)
    axes.set_xticks(range(len(rows)), names, rotation=45, ha="right")
    axes.set_ylabel("US dollars")


def _ages(rows: Mapping[str, Sequence[Row]], sources: Mapping[str, Source]) -> Section:
    """Ages of prices and measurements, drift, and slow runs."""
    frame = pd.DataFrame(rows["recommendations"])
    aged: list[dict[str, Any]] = []
    if len(frame):
        grouped = frame.groupby(["workload", "provider"], as_index=False)
        aged = _rows(grouped.agg({"price_as_of": "min", "newest_measurement_at": "max"}))
    columns = """
        workload: {workload}
        provider: {provider}
        oldest price: {price_as_of:%Y-%m-%d %H:%M UTC}
        newest measurement: {newest_measurement_at:%Y-%m-%d %H:%M UTC}
    """
    drifting = [drift_sentence(row) for row in rows["drift"] if row["drifting"]]
    slow = [alarm_sentence(row) for row in rows["alarms"][:_MOST]]
    return Section(
        name="ages",
        title="Ages of prices and measurements, drift, slow runs",
        sentences=(drifting or ["No drift is known."]) + (slow or ["No slow run is known."]),
        tables=_tables("Prices and measurements behind the recommendations", aged, columns),
    )


def _of(rows: Sequence[Row], provider: str) -> list[Row]:
    return [row for row in rows if row["provider"] == provider]


def _rows(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """The frame's rows, with None for a missing value."""
    return rows_of(frame.astype(object).where(frame.notna(), None))


def _tables(caption: str, rows: Collection[Row], columns: str) -> list[PageTable]:
    """The table of the newest rows, if there are any."""
    newest = list(rows)[:_MOST]
    more = f", {_MOST} of {len(rows)}" if len(rows) > _MOST else ""
    text = text_table(newest, columns)
    return [PageTable(caption=caption + more, text=text)] if newest else []


def _chart(
    title: str, rows: Sequence[Row], columns: str, plot: Callable[[Axes, Sequence[Row]], None]
) -> Chart:
    """Draw `rows` by `plot`, as SVG whose black is the page's text colour."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "srift", "text.parse_math": False}):
        figure, text = Figure(figsize=(7, 3.8), layout="constrained"), io.StringIO()
        axes = figure.subplots()
        plot(axes, rows)
        axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :].replace(_INK, "currentColor")
    return Chart(
        title=title,
        svg=Markup(svg),
        table=PageTable(caption=f"{title}: the figures", text=text_table(rows, columns)),
    )
