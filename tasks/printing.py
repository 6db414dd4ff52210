"""Tables and sentences for a person: rich on a terminal, plain text elsewhere, the same words in both."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import pandas as pd
from rich.console import Console
from rich.table import Table

from .report import LiveReporter, Reporter

if TYPE_CHECKING:
    from models.campaign import Launch

Row = Mapping[str, Any]
_WIDTH = 160  # of plain text: a pipe has no width of its own


def live_reporter() -> Reporter:
    """A bar where standard error is a terminal, plain lines where it is not."""
    console = Console(stderr=True)
    return LiveReporter(console) if console.is_terminal else Reporter()


def print_recommendations(rows: Sequence[Row]) -> None:
    """Workload by workload, a line for each goal's first choice and its rivals; below, why each stands there."""
    console = _console()
    if any(row["provider"] == "local" for row in rows):
        console.print("provider local: prices are illustrative", style="italic")
    dated = [row["price_as_of"] for row in rows if row["provider"] != "local" and row["price_as_of"] is not None]
    if dated:
        console.print(f"prices as of {min(dated):%Y-%m-%d %H:%M} UTC", style="italic")
    for provider, workload in dict.fromkeys((row["provider"], row["workload"]) for row in rows):
        mine = [row for row in rows if (row["provider"], row["workload"]) == (provider, workload)]
        table = Table(box=None, pad_edge=False)
        for name, justify in _COLUMNS.items():
            table.add_column(name, justify=justify, no_wrap=name not in ("cluster", "batch"), overflow="fold")
        for row in mine:
            table.add_row(*_cells(row))
        console.print(f"\n{workload} ({provider})", style="bold")
        console.print(table)
        for said in dict.fromkeys(f"  {row['cluster'] or row['status']}: {row['reason']}" for row in mine):
            console.print(said, style="dim")  # what keeps every goal from an answer is told once
        for row in mine:
            if row.get("frontier"):
                _print_frontier(console, row)
            if row.get("pilots"):
                _print_pilots(console, row["pilots"])


def _print_frontier(console: Console, row: Row) -> None:
    """What no other setup beats in both hours and dollars, the fastest first."""
    table = Table(box=None, pad_edge=False)
    for name in ("cluster", "market", "hours", "usd"):
        table.add_column(name, justify="right" if name in ("hours", "usd") else "left")
    for one in row["frontier"]:
        market = "+".join(sorted({offer["market"] for offer in one["cluster_offers"]}))
        table.add_row(one["cluster"], market, f"{one['hours']:.3g}", f"{one['usd']:.4g}")
    console.print(f"\nbeaten by none in both, of {row['candidates']} candidates", style="bold")
    console.print(table)


def _print_pilots(console: Console, pilots: dict[str, Any]) -> None:
    """The runs that would tell most, in order, or that the choice is settled, or why there are none."""
    runs, regret = pilots["runs"], pilots["regret"]
    if pilots["reason"]:
        console.print(f"\n{pilots['reason']}")
        return
    if pilots["settled"] is None:
        console.print(f"\nopen: choosing now is expected to lose {_lost(regret)}; no few runs would settle it")
        return
    if pilots["settled"]:
        console.print(f"\nsettled: choosing now is expected to lose {_lost(regret)} against the best there is")
        return
    usd = sum(one["usd"] for one in runs)
    said = (
        "never measured as it is now" if regret is None else f"open: choosing now is expected to lose {_lost(regret)}"
    )
    console.print(f"\n{said}; these {len(runs)} runs tell most and cost ${usd:.2g}", style="bold")
    table = Table(box=None, pad_edge=False)
    for name in ("run", "cluster", "devices", "market", "batch", "seconds", "usd", "then lost"):
        table.add_column(name, justify="right" if name in ("seconds", "usd", "then lost") else "left")
    for one in runs:
        steps = f" x{one['accumulation_steps']}" if one["accumulation_steps"] > 1 else ""
        left = "" if one["regret_after"] is None else _lost(one["regret_after"])
        named = (one["kind"], one["cluster"], one["layout"], one["market"], one["batch_per_device"] + steps)
        table.add_row(*named, f"{one['seconds']:.0f}", f"{one['usd']:.2g}", left)
    console.print(table)


def _lost(regret: float) -> str:
    """Log regret as a part of what the best costs; missing the constraint counts as e times that."""
    return f"{math.expm1(regret):.1%}"


_COLUMNS: dict[str, Literal["left", "right"]] = {
    **dict.fromkeys(("goal", "#", "cluster", "market", "batch"), "left"),
    **dict.fromkeys(("step s (90 %)", "hours", "usd", "p ok", "p best"), "right"),
    "limited by": "left",
}


def print_launches(launches: Sequence[Launch]) -> None:
    """What a dry run would buy, and the most it would cost."""
    console = _console()
    table = Table(box=None, pad_edge=False)
    for name in ("cluster", "runs", "about s", "about usd", "why"):
        table.add_column(name, overflow="fold")
    for row in launches_as_rows(launches):
        table.add_row(row["cluster"], str(row["runs"]), f"{row['est_s']:.0f}", f"{row['est_usd']:.4f}", row["reason"])
    console.print(table)
    total_s, total_usd = sum(one.est_s for one in launches), sum(one.est_usd for one in launches)
    console.print(f"{len(launches)} launches, about {total_s:.0f} s and ${total_usd:.4f}; nothing was started")


def launches_as_rows(launches: Sequence[Launch]) -> list[dict[str, Any]]:
    """A launch a row, as `--json` prints it."""
    return [
        {
            "cluster": launch.cluster.name,
            "market": launch.cluster.members[0].market,
            "runs": len(launch.items),
            "est_s": launch.est_s,
            "est_usd": launch.est_usd,
            "reason": launch.reason,
            "items": [
                {"kind": item.kind, "workload": item.workload, "nodes": item.nodes, "batches": item.batches,
                 "reason": item.reason}
                for item in launch.items
            ],
        }
        for launch in launches
    ]  # fmt: skip


def print_status(found: Mapping[str, Any]) -> None:
    """A few sentences."""
    console = _console()
    work = found["at_work"]
    if work:
        console.print(f"refresh {work['refresh_id']} is at work (process {work['pid']}, since {work['started_at']})")
    else:
        console.print("no refresh is at work")
    for lease in found["leases"]:
        usd = "at an unknown price" if lease["usd_so_far"] is None else f"${lease['usd_so_far']:.4f} so far"
        console.print(
            f"lease {lease['lease_id']}: {lease['cluster']}, {usd}, until {lease['deadline_at']:%H:%M:%S} UTC"
        )
    if not found["leases"]:
        console.print("no machine is held")
    if found["published"]:
        table = found["published"]
        version = table["model_version"]
        model = "without a model" if version is None else f"model version {version}"
        console.print(f"published: {table['rows']} rows, {table['published_at_h_ago']:.1f} h ago, {model}")
    for sentence in filter(None, [found["ledger_sentence"], *found["drift"], *found["alarms"]]):
        console.print(sentence)
    for sentence in [*found["stale"], *found["limits"]]:
        console.print(f"note: {sentence}")


def _cells(row: Row) -> list[str]:
    goal = row["goal"]
    if row["constraint_hours"] is not None:
        goal += f" {row['constraint_hours']:g} h"
    if row["constraint_usd"] is not None:
        goal += f" ${row['constraint_usd']:g}"
    named = goal if row["rank"] == 1 else ""
    if row["cluster"] is None:
        return [named, str(row["rank"]), str(row["status"])]
    markets = "+".join(dict.fromkeys(str(offer["market"]) for offer in row["cluster_offers"]))
    batch = str(row["batch_per_device"]) + (f" x{row['accumulation_steps']}" if row["accumulation_steps"] > 1 else "")
    return [
        named,
        str(row["rank"]),
        str(row["cluster"]),
        markets,
        batch,
        f"{row['step_s']:.3f} ({row['step_low_s']:.3f}-{row['step_high_s']:.3f})",
        _number(row["hours"]),
        _number(row["usd"]),
        "" if row["p_meets_constraint"] is None else f"{row['p_meets_constraint']:.0%}",
        _number(row["p_best"], "{:.0%}"),
        str(row["bottleneck"]),
    ]


def _number(value: float | None, form: str = "{:.3g}") -> str:
    return "unknown" if value is None else form.format(value)


def _console() -> Console:
    if sys.stdout.isatty():
        return Console(markup=False)  # a reason may hold square brackets
    return Console(width=_WIDTH, no_color=True, highlight=False, markup=False)


def print_frame(frame: pd.DataFrame, title: str) -> None:
    """A small frame as it is, fractions to four digits."""
    _console().print(f"{title}\n{frame.round(4).to_string(index=False)}", highlight=False)


def print_scores(frame: pd.DataFrame, title: str, sentences: Sequence[str]) -> None:
    """A scoreboard, if it has a row, and what is to be said of it."""
    if len(frame):
        print_frame(frame, title)
    else:
        _console().print(title)
    for sentence in sentences:
        _console().print(f"note: {sentence}")
