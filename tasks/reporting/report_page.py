"""The report page: what is recommended, why, and how good it has been, as one HTML file that needs nothing beside it.

Charts are plotly's, whose script stands in the page once. Text from data is escaped: by Jinja in the page, by
`_shown` in charts, whose labels know a few tags of their own.
"""

from __future__ import annotations

import html
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import plotly.graph_objects as go
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from plotly.offline import get_plotlyjs

from models.domain.setup_table import rows_of
from models.domain.workload import Mode
from models.monitoring.drift import drift_sentence
from models.monitoring.regret_ledger import ledger_summary
from models.monitoring.slow_runs import sentence as alarm_sentence

from .tables import COLUMN_LEGEND, cautions_in, goal_text, recommendation_cells, without_cautions

Row = Mapping[str, Any]
# The published relations that a page is drawn from; the rest is of `warehouse.reads.reported`.
PUBLISHED = (
    "recommendations",
    "recommendation_changes",
    "pareto",
    "regret_ledger",
    "drift",
    "alarms",
)
OLD_AFTER_H = 48.0  # a page opened later than this after its publication says so
_MOST_LINES = 100  # of a table about the past: the newest
_MOST_POINTS = 60  # of a chart about the past: the newest
_MOST_AT_ONCE = 6  # workloads whose charts are all shown at first

_COLUMNS = {
    "workload": "Workload",
    "goal": "Goal",
    "cluster": "Cluster",
    "batch": "Batch a device",
    "step_s": "Step s (90 %)",
    "hours": "Hours",
    "usd": "US dollars",
    "risk": "Risk",
    "p_ok": "P ok",
    "p_best": "P best",
    "limited": "Limited by",
}
_NUMBERS = frozenset({"step_s", "hours", "usd", "risk", "p_ok", "p_best"})
_FROM_ROW = {"risk": "interruption_risk", "p_ok": "p_meets_constraint", "limited": "bottleneck"}

_SYMBOLS = {"on-demand": "circle", "spot": "diamond", "mixed": "square"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A provider as a reader has to know it: whether its prices are nobody's, and what to type for a refresh."""

    illustrative: bool
    refresh: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table; a cell is text or a moment in UTC. Those in `right` hold numbers, and a long one is `folded`."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str | pd.Timestamp]]
    right: Collection[str] = ()
    folded: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A figure of plotly, what it shows in words, and the same as a table; `workload` where it is of one."""

    name: str
    title: str
    said: str
    figure: dict[str, Any]
    table: Table
    provider: str = ""
    workload: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """What stands under a heading, in this order. `said` alone where there is nothing: why, and what fills it."""

    name: str
    title: str
    said: Sequence[str] = ()
    charts: Sequence[Chart] = ()
    tables: Sequence[Table] = ()


def draw(frames: Mapping[str, pd.DataFrame], sources: Mapping[str, Source]) -> str:
    """The page's HTML, of the relations PUBLISHED and those of `warehouse.reads.reported`, by name.

    `sources` has every provider that published anything.
    """
    rows = {name: _rows(frame) for name, frame in frames.items()}
    publications = rows["publications"]
    recommended = rows["recommendations"]
    groups = _groups(recommended)
    sections = [
        _frontiers(recommended, rows["pareto"]),
        _changes(rows["recommendation_changes"], publications, sources),
        _quality(rows["model_versions"], rows["scoreboards"], sources),
        _ledger(frames["regret_ledger"], sources),
        _last_refresh(rows, sources),
        _ages(rows, sources),
    ]
    figures = {chart.name: chart.figure for section in sections for chart in section.charts}
    hidden = {"risk"} if not any(row.get("interruption_risk") for row in recommended) else set()
    page = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    ).get_template("report_page.html.jinja")
    return page.render(
        publications=publications,
        sources=sources,
        old_after_h=OLD_AFTER_H,
        columns={name: title for name, title in _COLUMNS.items() if name not in hidden},
        numbers=_NUMBERS,
        legend=COLUMN_LEGEND,
        cautions=cautions_in(str(row["reason"]) for row in recommended),
        groups=groups,
        rows=len(recommended),
        filters={
            name: sorted({str(row[name]) for row in recommended})
            for name in ("workload", "goal", "provider")
        },
        sections=sections,
        most_at_once=_MOST_AT_ONCE,
        data={"figures": figures, "templates": {"light": _theme(_LIGHT), "dark": _theme(_DARK)}},
        plotly=get_plotlyjs(),
    )


def _groups(recommended: Sequence[Row]) -> list[dict[str, Any]]:
    """The rows of each question, first choice first: their cells by column, the reason, and what to sort by."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in recommended:
        texts = recommendation_cells(row)
        has = row["cluster"] is not None
        cells = {
            "workload": (str(row["workload"]), str(row["provider"])),
            "goal": (str(row["goal"]).replace("_", " "), _constraint(row)),
            "cluster": (texts["cluster"], texts.get("market", "")),
            "batch": (
                texts.get("batch", ""),
                texts["mode"] if has and texts["mode"] != str(Mode()) else "",
            ),
            "step_s": _with_interval(texts.get("step s (90 %)", "")),
            "hours": (texts.get("hours", ""), _p90(row["hours_p90"], "{:.3g}")),
            "usd": (texts.get("usd", ""), _p90(row["usd_p90"], "{:.3g}")),
            "risk": (texts.get("risk", ""), ""),
            "p_ok": (texts.get("p ok", ""), ""),
            "p_best": (texts.get("p best", ""), ""),
            "limited": (texts.get("limited by", ""), ""),
        }
        key = tuple(
            row[name]
            for name in ("provider", "workload", "goal", "constraint_hours", "constraint_usd")
        )
        groups.setdefault(key, []).append(
            {"cells": cells, "reason": without_cautions(str(row["reason"])), "row": row, "has": has}
        )
    return [
        {"rows": own, "sort": {name: _sort_value(own[0]["row"], name) for name in _COLUMNS}}
        for own in groups.values()
    ]


def _sort_value(row: Row, name: str) -> str | float | None:
    if name == "goal":
        return _goal(row)
    value = row.get(_FROM_ROW.get(name, "batch_per_device" if name == "batch" else name))
    return None if value is None else float(value) if name in _NUMBERS else str(value)


def _constraint(row: Row) -> str:
    if row["constraint_hours"] is not None:
        return f"{row['constraint_hours']:g} h"
    return "" if row["constraint_usd"] is None else f"${row['constraint_usd']:g}"


def _with_interval(text: str) -> tuple[str, str]:
    middle, _, interval = text.partition(" ")
    return middle, interval.strip("()")


def _p90(value: float | None, form: str) -> str:
    return "" if value is None else f"p90 {form.format(value)}"


# Cost against time


def _frontiers(recommended: Sequence[Row], pareto: Sequence[Row]) -> Section:
    """A chart a workload and provider: what no setup of the publication beats, the others, and the first choices."""
    best = {_setup(row) for row in pareto}
    placed: dict[tuple[str, str], dict[tuple[Any, ...], dict[str, Any]]] = {}
    unpriced: dict[str, None] = {}
    for row in recommended:
        if row["cluster"] is None or row["hours"] is None:
            continue
        if row["usd"] is None:
            unpriced[f"{row['workload']} ({row['provider']})"] = None
            continue
        own = placed.setdefault((str(row["workload"]), str(row["provider"])), {})
        one = own.setdefault(
            _setup(row), {"row": row, "best": _setup(row) in best, "first_for": []}
        )
        if row["rank"] == 1:
            one["first_for"].append(_goal(row))
    charts = [
        _frontier(
            number,
            workload,
            provider,
            sorted(setups.values(), key=lambda one: float(one["row"]["hours"])),
        )
        for number, ((workload, provider), setups) in enumerate(placed.items(), 1)
    ]
    said = [
        "Expected hours and dollars of the whole training, of every setup that the table above names; bars reach the"
        " 90th percentile. Circles are bought on demand, diamonds on the spot market, squares on both; rings are first"
        " choices."
    ]
    if not charts:
        said = ["No setup of this publication has a price and a time, so that none can be placed."]
        said += [
            "`srift refresh` measures and takes prices; the table above says goal by goal what is missing."
        ]
    if unpriced:
        said.append(f"Setups without a known price are left out: {', '.join(unpriced)}.")
    return Section(name="frontier", title="Cost against time", said=said, charts=charts)


def _setup(row: Row) -> tuple[Any, ...]:
    names = (
        "provider",
        "workload",
        "cluster",
        "market",
        "layout",
        "batch_per_device",
        "accumulation_steps",
    )
    return tuple(
        row[name] for name in (*names, "strategy", "precision", "switches", "hours", "usd")
    )


def _frontier(number: int, workload: str, provider: str, setups: Sequence[Row]) -> Chart:
    frontier = [one for one in setups if one["best"]]
    rest = [one for one in setups if not one["best"]]
    firsts = [one for one in setups if one["first_for"]]
    figure = go.Figure()
    figure.add_trace(
        _points(frontier, name="not beaten in both", mode="lines+markers").update(line_shape="hv")
    )
    figure.add_trace(_points(rest, name="beaten", mode="markers"))
    middle = (setups[0]["row"]["hours"] + setups[-1]["row"]["hours"]) / 2
    figure.add_trace(
        go.Scatter(
            x=[one["row"]["hours"] for one in firsts],
            y=[one["row"]["usd"] for one in firsts],
            name="first choice",
            mode="markers+text",
            text=[_shown(str(one["row"]["cluster"])) for one in firsts],
            textposition=[
                "top right" if one["row"]["hours"] <= middle else "top left" for one in firsts
            ],
            marker={"symbol": "circle-open", "size": 19, "line": {"width": 2}},
            hoverinfo="skip",
            cliponaxis=False,
        )
    )
    for axis, name in ((figure.layout.xaxis, "hours"), (figure.layout.yaxis, "usd")):
        values = [float(one["row"][name]) for one in setups]
        if min(values) > 0 and max(values) > 20 * min(values):
            axis.type = "log"
        else:
            axis.rangemode = "tozero"
    figure.update_layout(xaxis_title="hours", yaxis_title="US dollars", yaxis_tickprefix="$")
    lines = [
        [
            *(str(one["row"]["cluster"]), str(one["row"]["market"]), _batch(one["row"])),
            *(_hours(one["row"]["hours"]), _hours(one["row"]["hours_p90"])),
            *(_usd(one["row"]["usd"]), _usd(one["row"]["usd_p90"])),
            "not beaten" if one["best"] else "beaten",
            ", ".join(one["first_for"]),
        ]
        for one in setups
    ]
    fastest, cheapest = (_end(setups, name) for name in ("hours", "usd"))
    names = (
        "cluster",
        "market",
        "batch",
        "hours",
        "hours p90",
        "usd",
        "usd p90",
        "in both",
        "first choice for",
    )
    title = f"{workload} ({provider})"
    return Chart(
        name=f"frontier-{number}",
        title=title,
        said=(
            f"Of {len(setups)} setups {len(frontier)} are not beaten in both hours and dollars: from {fastest} to"
            f" {cheapest}."
        ),
        figure=_plain_figure(figure),
        table=Table(
            caption=f"Setups of {title}, the fastest first",
            columns=names,
            rows=lines,
            right=names[3:7],
        ),
        provider=provider,
        workload=workload,
    )


def _end(setups: Sequence[Row], name: str) -> str:
    """The setup with least hours or dollars, in words."""
    row = min((one["row"] for one in setups), key=lambda row: float(row[name]))
    return f"{row['cluster']} {row['market']} ({_hours(row['hours'])} h, {_usd(row['usd'])})"


def _points(setups: Sequence[Row], *, name: str, mode: str) -> go.Scatter:
    rows = [one["row"] for one in setups]
    told = [
        [
            _shown(f"{row['cluster']} {row['market']}"),
            f"{_hours(row['hours'])} h (p90 {_hours(row['hours_p90'])})",
            f"{_usd(row['usd'])} (p90 {_usd(row['usd_p90'])})",
            _shown(
                f"first for: {', '.join(one['first_for'])}"
                if one["first_for"]
                else f"batch {_batch(row)}"
            ),
        ]
        for row, one in zip(rows, setups, strict=True)
    ]
    bars = {
        end: {
            "type": "data",
            "array": [max((row[f"{end}_p90"] or row[end]) - row[end], 0.0) for row in rows],
            "arrayminus": [0.0] * len(rows),
            "symmetric": False,
            "thickness": 1,
            "width": 3,
        }
        for end in ("hours", "usd")
    }
    return go.Scatter(
        x=[row["hours"] for row in rows],
        y=[row["usd"] for row in rows],
        error_x=bars["hours"],
        error_y=bars["usd"],
        name=name,
        mode=mode,
        marker={"symbol": [_SYMBOLS.get(str(row["market"]), "circle") for row in rows], "size": 9},
        customdata=told,
        hovertemplate="<b>%{customdata[0]}</b><br>%{customdata[1]}<br>%{customdata[2]}<br>%{customdata[3]}<extra></extra>",
    )


# What changed


def _changes(
    changes: Sequence[Row], publications: Sequence[Row], sources: Mapping[str, Source]
) -> Section:
    """First choices that are others now, then those of which only hours or dollars moved."""
    said = []
    for one in publications:
        provider, before = str(one["provider"]), one["previous_published_at"]
        mine = [row for row in changes if row["provider"] == provider]
        if before is None:
            said.append(
                f"{provider}: this is the first publication, there is none before to compare with;"
                f" the next one is (`{sources[provider].refresh}`)."
            )
        elif not mine:
            said.append(
                f"{provider}: no first choice differs from the publication of {_moment(before)}."
            )
        else:
            chosen = sum(row["change"] in _OTHER_CHOICE for row in mine)
            said.append(
                f"{provider}: since {_moment(before)} {_counted(chosen, 'first choice')} changed;"
                f" of {len(mine) - chosen} more only hours or dollars did."
            )
    tables = []
    for caption, folded, wanted in (
        ("Other choices", False, True),
        ("The same choice at other hours or dollars", True, False),
    ):
        rows = [row for row in changes if (row["change"] in _OTHER_CHOICE) == wanted]
        if rows:
            lines = [
                [
                    *(str(row["workload"]), str(row["provider"]), _goal(row), str(row["change"])),
                    *(_choice(row, "previous_"), _choice(row, ""), str(row["cause"])),
                ]
                for row in rows
            ]
            names = ("workload", "provider", "goal", "what", "before", "now", "because of")
            tables.append(Table(caption=caption, columns=names, rows=lines, folded=folded))
    return Section(name="changes", title="What changed, and why", said=said, tables=tables)


_OTHER_CHOICE = ("choice", "split", "goal")


def _choice(change: Row, prefix: str) -> str:
    cluster = change[f"{prefix}cluster"]
    if cluster is None:
        return str(change[f"{prefix}status"] or "not in the table")
    return f"{cluster} {change[f'{prefix}market']}, {_hours(change[f'{prefix}hours'])} h, {_usd(change[f'{prefix}usd'])}"


# The model


def _quality(
    versions: Sequence[Row], scoreboards: Sequence[Row], sources: Mapping[str, Source]
) -> Section:
    """Errors and coverage of each version on workloads' multi-machine rows that it had not seen."""
    said, charts, tables = [], [], []
    for provider in sorted(sources):
        mine = [row for row in versions if row["provider"] == provider]
        scored = [row for row in mine if row["mean_error"] is not None][-_MOST_POINTS:]
        if not mine:
            said.append(
                f"{provider}: no model was trained yet; `{sources[provider].refresh}` trains one."
            )
            continue
        newest = mine[-1]
        verdict = "promoted" if newest["promoted"] else "not promoted"
        said.append(
            f"{provider}: version {newest['version']}, trained {_moment(newest['trained_at'])}, was {verdict}:"
            f" {newest['reason']}"
        )
        if not scored:
            said.append(
                f"{provider}: nothing could be held out of its rows yet, so that no version has a score; runs of a"
                f" second workload or cluster size change that (`{sources[provider].refresh}`)."
            )
        else:
            charts.append(_errors(provider, scored))
        board = [row for row in scoreboards if row["provider"] == provider]
        if board:
            lines = [
                [
                    *(str(row["split"]).replace("_", " "), str(int(row["rows"]))),
                    *(
                        _percent(row[name])
                        for name in ("mean_error", "median_error", "p90_error", "coverage_90")
                    ),
                    _percent(row["median_width"]),
                ]
                for row in board
            ]
            names = (
                "held out by",
                "rows",
                "mean error",
                "median error",
                "p90 error",
                "in 90 % interval",
                "width",
            )
            caption = f"{provider}: scores of version {newest['version']} on what it had not seen"
            tables.append(Table(caption=caption, columns=names, rows=lines, right=names[1:]))
    if charts:
        said.append(
            "Errors are |predicted / measured - 1| of runs on several machines whose workload was held out; 90 % of the"
            " measured steps should lie in their interval. Filled: promoted; open: refused."
        )
    return Section(
        name="model",
        title="Model error and interval coverage",
        said=said,
        charts=charts,
        tables=tables,
    )


def _errors(provider: str, scored: Sequence[Row]) -> Chart:
    when = [row["trained_at"].isoformat() for row in scored]
    marks = ["circle" if row["promoted"] else "circle-open" for row in scored]
    told = [
        f"version {_shown(str(row['version']))}, {'promoted' if row['promoted'] else 'refused'}"
        for row in scored
    ]
    figure = go.Figure()
    for name, column, axis in (
        ("mean error", "mean_error", "y"),
        ("median error", "median_error", "y"),
        ("in 90 % interval", "coverage_90", "y2"),
    ):
        figure.add_trace(
            go.Scatter(
                x=when,
                y=[None if row[column] is None else 100 * float(row[column]) for row in scored],
                name=name,
                mode="lines+markers",
                yaxis=axis,
                line={"dash": "dot" if column == "median_error" else "solid"},
                marker={"symbol": marks, "size": 8},
                customdata=told,
                hovertemplate="%{customdata}<br>" + name + " %{y:.1f} %<extra></extra>",
            )
        )
    figure.add_hline(y=90, yref="y2", line={"dash": "dash", "width": 1, "color": _RULE})
    figure.update_layout(
        yaxis={"title": "error", "domain": [0.46, 1], "rangemode": "tozero", "ticksuffix": " %"},
        yaxis2={"title": "covered", "domain": [0, 0.36], "range": [0, 105], "ticksuffix": " %"},
        xaxis={"anchor": "y2", "type": "date"},
    )
    newest = scored[-1]
    lines = [
        [
            *(str(row["version"]), row["trained_at"], "promoted" if row["promoted"] else "refused"),
            *("" if row["rows"] is None else str(int(row["rows"])), _percent(row["mean_error"])),
            *(_percent(row["median_error"]), _percent(row["coverage_90"])),
        ]
        for row in reversed(scored)
    ]
    names = (
        "version",
        "trained",
        "",
        "held-out rows",
        "mean error",
        "median error",
        "in 90 % interval",
    )
    return Chart(
        name=f"model-{provider}",
        title=f"Versions of the model of {provider}",
        said=(
            f"{_counted(len(scored), 'version')}; the newest has a mean error of {_percent(newest['mean_error'])}, and"
            f" {_percent(newest['coverage_90'])} of the measured steps lie in their 90 % interval."
        ),
        figure=_plain_figure(figure),
        table=Table(
            caption=f"Versions of {provider}, the newest first",
            columns=names,
            rows=lines,
            right=names[3:],
        ),
        provider=provider,
    )


# The regret ledger


def _ledger(ledger: pd.DataFrame, sources: Mapping[str, Source]) -> Section:
    """Published first choices that were measured afterwards: promise, outcome, regret."""
    said, charts, tables = [], [], []
    for provider in sorted(sources):
        own = ledger[ledger["provider"] == provider]
        if not len(own):
            said.append(
                f"{provider}: no published first choice was measured afterwards yet; a later campaign does"
                f" (`{sources[provider].refresh}`)."
            )
            continue
        summary = ledger_summary(own)
        regret = "none was compared with a measured rival"
        if summary["compared"]:
            regret = (
                f"mean regret {_percent(summary['mean_regret'])}, worst {_percent(summary['worst_regret'])}, of"
                f" {summary['compared']} compared with rivals that were measured too"
            )
        said.append(
            f"{provider}: {_counted(int(summary['measured'] or 0), 'first choice')} measured since,"
            f" {_percent(summary['within_interval'])} within the promised interval;"
            f" {summary['failures']} missed their constraint; {regret}."
        )
        rows = _rows(own.sort_values("newest_measured_at", kind="stable"))
        charts.append(_promises(provider, rows[-_MOST_POINTS:]))
        lines = [
            [
                *(
                    row["published_at"],
                    str(row["workload"]),
                    _goal(row),
                    f"{row['cluster']} {row['market']}",
                ),
                *(_hours(row["promised_hours"]), _hours(row["measured_hours"])),
                *(_usd(row["promised_usd"]), _usd(row["measured_usd"])),
                *(
                    str(row["verdict"]).replace("_", " "),
                    "" if row["regret"] is None else _percent(row["regret"]),
                ),
            ]
            for row in reversed(rows[-_MOST_LINES:])
        ]
        numbers = ("hours promised", "hours measured", "usd promised", "usd measured")
        older = (
            f"; {len(rows) - _MOST_LINES} older ones in regret_ledger.csv"
            if len(rows) > _MOST_LINES
            else ""
        )
        tables.append(
            Table(
                caption=f"{provider}: promises and outcomes, the newest first{older}",
                columns=("published", "workload", "goal", "choice", *numbers, "verdict", "regret"),
                rows=lines,
                right=(*numbers, "regret"),
                folded=len(lines) > 12,
            )
        )
    return Section(name="ledger", title="Regret ledger", said=said, charts=charts, tables=tables)


def _promises(provider: str, rows: Sequence[Row]) -> Chart:
    """Measured over promised step time of each choice, beside the promised interval."""
    ratio = [float(row["measured_step_s"]) / float(row["promised_step_s"]) for row in rows]
    low, high = (
        [float(row[f"promised_step_{end}_s"]) / float(row["promised_step_s"]) for row in rows]
        for end in ("low", "high")
    )
    told = [
        [
            _shown(f"{row['workload']}: {row['cluster']} {row['market']}"),
            _shown(_goal(row)),
            _moment(row["published_at"]),
        ]
        for row in rows
    ]
    within = [bool(row["within_interval"]) for row in rows]
    interval = go.Scatter(
        x=list(range(1, len(rows) + 1)),
        y=[1.0] * len(rows),
        error_y={
            "type": "data",
            "array": [one - 1 for one in high],
            "arrayminus": [1 - one for one in low],
            "symmetric": False,
            "thickness": 1.5,
            "width": 5,
        },
        name="promised interval",
        mode="markers",
        marker={"symbol": "line-ew-open", "size": 9},
        hoverinfo="skip",
    )
    measured = [
        go.Scatter(
            x=[place + 1 for place in places],
            y=[ratio[place] for place in places],
            name=name,
            mode="markers",
            marker={"symbol": symbol, "size": 9},
            customdata=[told[place] for place in places],
            hovertemplate="<b>%{customdata[0]}</b><br>%{customdata[1]}<br>published %{customdata[2]}<br>"
            "measured %{y:.2f} of the promised step<extra></extra>",
        )
        for name, wanted, symbol in (
            ("measured within", True, "circle"),
            ("measured outside", False, "x"),
        )
        for places in [[place for place, one in enumerate(within) if one == wanted]]
    ]
    figure = go.Figure([measured[0], interval, measured[1]])
    figure.update_layout(
        yaxis={"title": "measured / promised step"},
        xaxis={"title": "choice, the newest last", "tickformat": "d"},
    )
    lines = [
        [
            *(str(number), str(row["workload"]), f"{row['cluster']} {row['market']}", f"{one:.2f}"),
            *(f"{least:.2f} to {most:.2f}", "yes" if inside else "no"),
        ]
        for number, (row, one, least, most, inside) in enumerate(
            zip(rows, ratio, low, high, within, strict=True), 1
        )
    ]
    names = ("number", "workload", "choice", "measured / promised", "promised interval", "within")
    return Chart(
        name=f"ledger-{provider}",
        title=f"Measured against promised step times of {provider}",
        said=f"Of the {len(rows)} newest choices {sum(within)} were measured within their promised interval.",
        figure=_plain_figure(figure),
        table=Table(
            caption=f"Measured over promised step times of {provider}",
            columns=names,
            rows=lines,
            right=names[3:5],
        ),
        provider=provider,
    )


# The last refresh that measured


def _last_refresh(rows: Mapping[str, Sequence[Row]], sources: Mapping[str, Source]) -> Section:
    """What a provider's newest refresh with machines measured, what it cost, and what came to nothing."""
    said, charts, tables = [], [], []
    behind = {str(row["provider"]): str(row["refresh_id"]) for row in rows["publications"]}
    for provider in sorted(sources):
        nights = [row for row in rows["spend"] if row["provider"] == provider]
        if not nights:
            said.append(
                f"{provider}: no refresh has held a machine yet, so that nothing was measured and nothing spent;"
                f" `{sources[provider].refresh}` does."
            )
            continue
        last = nights[-1]
        said.append(
            f"{provider}: refresh {last['refresh_id']}, {_moment(last['started_at'])} to {_moment(last['ended_at'])}:"
            f" {_counted(int(last['leases']), 'launch', 'launches')},"
            f" {_counted(int(last['measured_runs']), 'run')} measured, {int(last['failed_runs'])} not,"
            f" {_usd(last['usd'])}."
        )
        if behind.get(provider) not in (None, last["refresh_id"]):
            said.append(
                f"{provider}: the refresh behind the table, {behind[provider]}, measured nothing."
            )
        charts.append(_spending(provider, nights[-_MOST_POINTS:]))
        tables += _of_refresh(provider, rows)
    return Section(
        name="measured",
        title="Measured last, and what it cost",
        said=said,
        charts=charts,
        tables=tables,
    )


def _of_refresh(provider: str, rows: Mapping[str, Sequence[Row]]) -> list[Table]:
    """Dollars by workload, setups that were measured, runs that were not."""
    spent, measured, failed = (
        [row for row in rows[name] if row["provider"] == provider]
        for name in ("last_spend", "last_measured", "last_failed")
    )
    tables = [
        Table(
            caption=f"{provider}: dollars by workload",
            columns=("workload", "runs", "launches", "usd"),
            rows=[
                [
                    str(row["workload"] or "no workload"),
                    str(int(row["runs"])),
                    str(int(row["leases"])),
                    _usd(row["usd"]),
                ]
                for row in spent
            ],
            right=("runs", "launches", "usd"),
        )
    ]
    if measured:
        lines = [
            [
                *(
                    str(row["workload"] or "no workload"),
                    str(row["kind"]),
                    f"{row['cluster']} {row['market'] or ''}",
                ),
                *(
                    _batch(row),
                    str(int(row["runs"])),
                    "" if row["step_s"] is None else f"{row['step_s']:.3g}",
                ),
                str(row["reason_wanted"] or ""),
            ]
            for row in measured[:_MOST_LINES]
        ]
        more = f", {_MOST_LINES} of {len(measured)}" if len(measured) > _MOST_LINES else ""
        names = ("workload", "kind", "cluster", "batch", "runs", "median step s", "wanted because")
        caption = f"{provider}: setups measured{more}"
        tables.append(
            Table(caption=caption, columns=names, rows=lines, right=names[4:6], folded=True)
        )
    if failed:
        lines = [
            [
                *(
                    str(row["workload"] or "no workload"),
                    f"{row['cluster']} {row['market'] or ''}",
                    str(row["status"]),
                ),
                *(str(int(row["runs"])), str(row["reason"])),
            ]
            for row in failed[:_MOST_LINES]
        ]
        tables.append(
            Table(
                caption=f"{provider}: runs without a measurement",
                columns=("workload", "cluster", "status", "runs", "reason"),
                rows=lines,
                right=("runs",),
                folded=True,
            )
        )
    return tables


def _spending(provider: str, nights: Sequence[Row]) -> Chart:
    """Dollars of each refresh that held machines."""
    every = -(-len(nights) // 6)  # labels that fit beside each other on a phone
    figure = go.Figure(
        go.Bar(
            x=list(range(len(nights))),
            y=[row["usd"] for row in nights],
            customdata=[
                [_shown(str(row["refresh_id"])), int(row["measured_runs"]), _usd(row["usd"])]
                for row in nights
            ],
            hovertemplate="%{customdata[0]}<br>%{customdata[2]}, %{customdata[1]} runs measured<extra></extra>",
        )
    )
    figure.update_layout(
        xaxis={
            "title": "began (UTC)",
            "tickvals": list(range(0, len(nights), every)),
            "ticktext": [
                f"{row['started_at']:%b %d}<br>{row['started_at']:%H:%M}" for row in nights[::every]
            ],
        },
        yaxis={"title": "US dollars", "tickprefix": "$", "rangemode": "tozero"},
        showlegend=False,
        bargap=0.3,
    )
    known = [float(row["usd"]) for row in nights if row["usd"] is not None]
    lines = [
        [
            *(
                str(row["refresh_id"]),
                row["started_at"],
                str(int(row["leases"])),
                str(int(row["measured_runs"])),
            ),
            *(str(int(row["failed_runs"])), _usd(row["usd"])),
        ]
        for row in reversed(nights)
    ]
    names = ("refresh", "began", "launches", "measured", "without", "usd")
    return Chart(
        name=f"spend-{provider}",
        title=f"Dollars of each refresh of {provider}",
        said=f"{_counted(len(nights), 'refresh', 'refreshes')} with machines cost {_usd(sum(known))} together.",
        figure=_plain_figure(figure),
        table=Table(
            caption=f"Refreshes of {provider} that held machines",
            columns=names,
            rows=lines,
            right=names[2:],
        ),
        provider=provider,
    )


# Ages and alarms


def _ages(rows: Mapping[str, Sequence[Row]], sources: Mapping[str, Source]) -> Section:
    """How old prices and measurements are, what drifts, and which runs were slow."""
    oldest: dict[tuple[str, str], dict[str, pd.Timestamp | None]] = {}
    for row in rows["recommendations"]:
        own = oldest.setdefault(
            (str(row["workload"]), str(row["provider"])), {"price": None, "measured": None}
        )
        own["price"] = min(filter(None, (own["price"], row["price_as_of"])), default=None)
        own["measured"] = max(
            filter(None, (own["measured"], row["newest_measurement_at"])), default=None
        )
    tables = [
        Table(
            caption="Oldest price and newest measurement behind each workload's recommendations",
            columns=("workload", "provider", "oldest price", "newest measurement"),
            rows=[
                [*named, own["price"] or "no price known", own["measured"] or "never measured"]
                for named, own in oldest.items()
            ],
            folded=len(oldest) > 12,
        )
    ]
    said = [drift_sentence(row) for row in rows["drift"] if row["drifting"]]
    said += [alarm_sentence(row) for row in rows["alarms"][:_MOST_LINES]]
    more = len(rows["alarms"]) - _MOST_LINES
    said += [f"and {more} older slow runs, in `alarms` of the published file"] if more > 0 else []
    judged = {str(row["provider"]) for row in rows["drift"]}
    if not any(row["drifting"] for row in rows["drift"]):
        said += [f"{one}: no drift." for one in sorted(sources) if one in judged]
    said += [
        f"{one}: nothing was judged for drift yet; a refresh that measures what the model has not seen does"
        f" (`{sources[one].refresh}`)."
        for one in sorted(sources)
        if one not in judged
    ]
    if not rows["alarms"]:
        said.append("No slow run waits to be measured again.")
    return Section(
        name="ages",
        title="Ages of prices and measurements, drift, slow runs",
        said=said,
        tables=tables if oldest else (),
    )


# Words and figures


def _rows(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Rows with None where a value is missing, whole numbers whole."""
    frame = frame.astype({name: "Int64" for name in _WHOLE if name in frame})
    return rows_of(frame.astype(object).where(frame.notna(), None))


_WHOLE = (
    "rank",
    "samples",
    "global_batch",
    "accumulation_steps",
    "measured_runs",
    "placement_score",
)


def _goal(row: Row) -> str:
    return goal_text(row).replace("_", " ")


def _moment(moment: pd.Timestamp) -> str:
    return f"{moment:%Y-%m-%d %H:%M} UTC"


def _counted(number: int, name: str, several: str = "") -> str:
    return f"{number} {name if number == 1 else several or f'{name}s'}"


def _hours(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def _usd(value: float | None) -> str:
    return "unknown price" if value is None else f"${value:.4f}" if value < 1 else f"${value:,.2f}"


def _percent(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.1%}"


def _batch(row: Row) -> str:
    steps = row["accumulation_steps"]
    return f"{row['batch_per_device'] or ''}" + (f" x{int(steps)}" if steps and steps > 1 else "")


def _shown(text: str) -> str:
    """As a label of a chart, which takes `<b>` and `&lt;` for markup, shows it as it is."""
    return html.escape(text, quote=False)


# Charts in both colour schemes: what differs stands in a template, which the page's script swaps.
_RULE = "#8a939c"
_LIGHT = {
    "ink": "#1c2126",
    "grid": "#e3e7eb",
    "sheet": "#ffffff",
    "colours": ["#1b6ca8", "#70757a", "#b4530a"],
}
_DARK = {
    "ink": "#e4e8ec",
    "grid": "#333b44",
    "sheet": "#1b2128",
    "colours": ["#6cb6ff", "#98a2ac", "#f0a35e"],
}


def _theme(scheme: Mapping[str, Any]) -> dict[str, Any]:
    axis = {
        "gridcolor": scheme["grid"],
        "linecolor": scheme["grid"],
        "zerolinecolor": scheme["grid"],
    }
    layout = go.Layout(
        font={"color": scheme["ink"], "size": 13, "family": "system-ui, sans-serif"},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        colorway=scheme["colours"],
        hoverlabel={
            "bgcolor": scheme["sheet"],
            "bordercolor": scheme["ink"],
            "font": {"color": scheme["ink"]},
        },
        xaxis=axis,
        yaxis=axis,
    ).to_plotly_json()
    return {"layout": layout}


def _plain_figure(figure: go.Figure) -> dict[str, Any]:
    """Data and layout without plotly's own template, laid out for a column that may be narrow; no zooming by touch."""
    figure.update_layout(
        height=380,
        margin={"l": 12, "r": 16, "t": 36, "b": 12},
        legend={"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"},
        dragmode=False,
        hovermode="closest",
    )
    figure.update_xaxes(automargin=True, fixedrange=True)
    figure.update_yaxes(automargin=True, fixedrange=True)
    made: dict[str, Any] = figure.to_plotly_json()
    made["layout"].pop("template", None)
    return made
