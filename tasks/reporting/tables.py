"""Print tables and sentences with rich."""

from __future__ import annotations

import math
import re
import string
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from models.domain.workload import Mode

from .progress import Row, goal_text

# Most programs that import this module print nothing. So only functions that print import rich.
if TYPE_CHECKING:
    from models.campaign.shopping_list import PlannedLaunch

_ILLUSTRATIVE = "local"  # the provider whose prices are not real
_WIDE = 10_000  # characters per line if the output is not a terminal, so that nothing is folded
_CAUTION = re.compile(r"; caution: ([^;]+)")


def as_caution(sentence: str) -> str:
    """Return the warning `sentence` as text to append to the reason of a published row.

    `sentence` must not contain a semicolon, because `cautions_in` reads up to the next semicolon.
    """
    return f"; caution: {sentence}"


def cautions_in(reasons: Iterable[str]) -> list[str]:
    """Return the distinct warnings that `as_caution` appended to `reasons`."""
    return list(dict.fromkeys(text for reason in reasons for text in _CAUTION.findall(reason)))


def without_cautions(reason: str) -> str:
    return _CAUTION.sub("", reason)


class _Cell(string.Formatter):
    """Formats a table cell like `str.format`, with these differences:

    - A missing value becomes "unknown", or "" if the format begins with "?": `{usd:?.2f}`.
    - If the format ends with "!", a value above 1 becomes "over 100%": `{regret:.1%!}`.
    - A list becomes its formatted values, joined by commas.
    - A small number is written without an exponent, such as 0.000031.
    """

    def format_field(self, value: Any, format_spec: str) -> str:
        plain = format_spec.removeprefix("?").removesuffix("!")
        if isinstance(value, list | tuple):
            return ", ".join(self.format_field(each, format_spec) for each in value)
        if value is None or value != value:
            return "" if format_spec.startswith("?") else "unknown"
        if isinstance(value, str):
            return value
        if format_spec.endswith("!") and value > 1:
            return "over 100%"
        text = format(value, plain)
        return f"{value:.{1 - math.floor(math.log10(abs(value)))}f}" if "e-" in text else text


class TextTable(NamedTuple):
    """A table as text.

    numbers: headings of the right-aligned columns.
    """

    headings: list[str]
    numbers: set[str]
    lines: list[tuple[str, ...]]


def text_table(rows: Sequence[Row], columns: str) -> TextTable:
    """Return the rows as a table of text, without columns that are empty in every row.

    columns: a line `heading: format` for each column, such as `risk: {risk:.0%}`. `_Cell` fills the
        format with the values of a row. A column is right-aligned if its format contains a colon.
    """
    forms = dict(line.strip().split(": ", 1) for line in columns.splitlines() if line.strip())
    full_rows = [defaultdict(lambda: None, row) for row in rows]
    cells = {
        heading: [_Cell().vformat(form, (), row) for row in full_rows]
        for heading, form in forms.items()
    }
    headings = [heading for heading, column in cells.items() if any(column)]
    return TextTable(
        headings=headings,
        numbers={heading for heading in headings if ":" in forms[heading]},
        lines=list(zip(*(cells[heading] for heading in headings), strict=True)),
    )


def _print(content: Any, style: str = "") -> None:
    """Print a text or a rich table in the rich style `style`, such as "bold"."""
    from rich.console import Console

    width = None if sys.stdout.isatty() else _WIDE
    # A reason may contain square brackets, which rich would take for markup. A name may contain
    # colons, which rich would take for emoji.
    Console(width=width, markup=False, emoji=False, highlight=False).print(content, style=style)


def _print_table(rows: Sequence[Row], columns: str, title: str = "") -> None:
    """Print the rows as a table under `title`. Without rows, print nothing.

    columns: a line `heading: format` for each column.
    """
    if not rows:
        return
    from rich.table import Table

    if title:
        _print(f"\n{title}", style="bold")
    text, table = text_table(rows, columns), Table(box=None, pad_edge=False)
    for heading in text.headings:
        table.add_column(
            heading, justify="right" if heading in text.numbers else "left", overflow="fold"
        )
    for line in text.lines:
        table.add_row(*line)
    _print(table)


def _print_notes(notes: Iterable[str]) -> None:
    for note in dict.fromkeys(notes):
        _print(f"note: {note}")


COLUMN_LEGEND = (
    "p ok: probability of meeting the deadline or budget; p best: probability that none of the"
    " nearest alternatives is better; a doubling: a factor of two in batch, devices or machines"
)
_RECOMMENDED = """
    goal: {goal}
    #: {rank}
    status: {status_shown}
    cluster: {cluster}
    market: {market}
    batch: {batch}
    mode: {mode}
    step s (90 %): {step:}
    tok/s/GPU: {tokens_per_s_per_gpu:?,.0f}
    MFU: {mfu:?.0%}
    GiB: {memory_gib:?.3g}
    hours: {hours:.3g}
    usd: {usd:.3g}
    risk: {interruption_risk:?.0%}
    p ok: {p_meets_constraint:?.0%}
    p best: {p_best:.0%}
    limited by: {bottleneck}
"""
_MORE = """    device: {device:?}
    precision: {precision}
    step s is: {basis}
    prices of: {price_as_of:?%Y-%m-%d}
"""
_FRONTIER = """
    cluster: {cluster_and_mode}
    market: {market}
    hours: {hours:.3g}
    usd: {usd:.4g}
    p ok: {p_meets_constraint:?.0%}
"""
_PILOTS = """
    measure: {kind}
    cluster: {cluster_and_mode}
    devices each: {layout}
    market: {market}
    batch: {batch}
    seconds: {seconds:.0f}
    usd: {usd:.2g}
    expected regret after: {regret_after:}
"""


def print_recommendations(rows: Sequence[Row], now: datetime | None = None) -> None:
    """Print each workload's goals with their first choices, alternatives and reasons.

    rows: rows of the published table, or the answer of `srift recommend`.
    now: the time that determines the age of prices; None means the current time.
    """
    if any(row["provider"] == _ILLUSTRATIVE for row in rows):
        _print(f"provider {_ILLUSTRATIVE}: prices are illustrative", style="italic")
    priced_rows = [row for row in rows if row["provider"] != _ILLUSTRATIVE and row["price_as_of"]]
    if priced_rows:
        oldest = min(row["price_as_of"] for row in priced_rows)
        age = (now or datetime.now(UTC)) - oldest
        text = f"prices as of {oldest:%Y-%m-%d %H:%M} UTC, {age.days} days old"
        if any(row["usd_storage"] for row in priced_rows):
            text += "; usd includes volumes, public IP addresses, requests and planned downloads"
        _print(text, style="italic")
    _print_notes(cautions_in(str(row["reason"]) for row in rows))
    for (provider, _), group in groupby(rows, key=itemgetter("provider", "workload")):
        workload_rows = list(group)
        _print_workload(workload_rows)
        sources = {row["interruption_source"] for row in workload_rows} - {None, ""}
        if sources and provider != _ILLUSTRATIVE:
            _print(f"  risk of an interruption: {'; '.join(sorted(sources))}", style="dim")
    if rows:
        _print(f"\n{COLUMN_LEGEND}", style="italic")


def _print_workload(rows: Sequence[Row]) -> None:
    """Print the recommendations for a workload on one provider.

    The output has the recommendations, their reasons, the Pareto frontier and suggested runs.
    """
    _print(f"\n{rows[0]['workload']} ({rows[0]['provider']})", style="bold")
    choices = [_recommendation_row(row) for row in rows]
    for choice in choices:
        if choice["rank"] > 1:
            choice["goal"] = ""  # the first choice names the goal
    _print_table(choices, _RECOMMENDED)
    reasons = [
        f"  {row['cluster'] or row['status']}: {without_cautions(row['reason'])}" for row in rows
    ]
    for reason in dict.fromkeys(reasons):
        _print(reason, style="dim")
    for row in rows:
        frontier = [_describe(point) for point in row.get("frontier") or ()]
        title = f"Pareto frontier of hours and dollars, of {row.get('candidates')} candidates"
        _print_table(frontier, _FRONTIER, title)
        if row.get("pilots"):
            _print_pilots(row["pilots"])


def _print_pilots(pilots: Row) -> None:
    """Print the reason, then the suggested runs, if there are any.

    pilots: the result of `pilots_for`.
    """
    _print(f"\n{pilots['reason']}")
    if not pilots["settled"]:
        runs = [
            _describe(run) | {"regret_after": share(run["regret_after"])} for run in pilots["runs"]
        ]
        _print_table(runs, _PILOTS)


def share(regret: float) -> str:
    """Convert a regret from a difference of natural logs to a percentage such as `3.2%`."""
    worse = math.expm1(regret)
    return "over 100%" if worse > 1 else f"{worse:.1%}"


def recommendation_table(rows: Sequence[Row]) -> TextTable:
    """Return published rows as a table with more columns than the terminal shows."""
    return text_table([_recommendation_row(row) for row in rows], _RECOMMENDED + _MORE)


def _recommendation_row(row: Row) -> dict[str, Any]:
    """Return a copy of the row, with the values that the columns _RECOMMENDED and _MORE need.

    If the row has no cluster, all values are empty, except goal, status, rank and `cluster`. The
    value of `cluster` is then the row's device.
    """
    status = "" if row["status"] in ("recommended", "alternative") else row["status"]
    texts = {"goal": goal_text(row), "status_shown": status}
    if row["cluster"] is None:
        blank: dict[str, Any] = dict.fromkeys([*row, "batch", "mode", "step", "basis"], "")
        return blank | texts | {"rank": row["rank"], "cluster": row.get("device") or ""}
    middle, low, high = (row[name] for name in ("step_s", "step_low_s", "step_high_s"))
    step = f"{middle:#.3g} ({low:#.3g}-{high:#.3g})"
    risk = row["interruption_risk"] or None
    texts |= {"step": step, "interruption_risk": risk}
    return _describe(row) | texts | {"basis": "measured" if row["measured_runs"] else "guessed"}


def _describe(row: Row) -> dict[str, Any]:
    """Return a copy of the row with the added texts `batch`, `mode` and `cluster_and_mode`."""
    steps, mode = row.get("accumulation_steps") or 1, _mode(row)
    batch = f"{row.get('batch_per_device')}" + (f" x{steps:g}" if steps > 1 else "")
    name = f"{row['cluster']} in {mode}" if mode else row["cluster"]
    return {**row, "batch": batch, "mode": mode, "cluster_and_mode": name}


def _mode(row: Row) -> str:
    """Return the row's precision, strategy and switches as text; "" if all are the defaults."""
    usual = Mode()
    mode = Mode(**{name: row.get(name) or value for name, value in usual._asdict().items()})
    return "" if mode == usual else str(mode)


_SCREEN = 20  # maximum number of launches to print


def print_launches(rows: Sequence[Row]) -> None:
    """Print at most _SCREEN launches of a dry run, their notes, and the total cost.

    The total covers all launches that are not refused.
    """
    columns = """
        cluster: {cluster}
        market: {market}
        runs: {runs:}
        about s: {est_s:.0f}
        about usd: {est_usd:.4f}
        worst usd: {worst_usd:?.2f}
        why: {reason}
    """
    first_rows, launches = rows[:_SCREEN], [row for row in rows if not row["refused"]]
    _print_table(first_rows, columns)
    if len(rows) > _SCREEN:
        _print(f"... {len(rows) - _SCREEN} more: --json lists all, with their requests")
    _print_notes(note for row in first_rows for note in row["notes"])
    seconds, usd = sum(row["est_s"] for row in launches), sum(row["est_usd"] for row in launches)
    worst = sum(row["worst_usd"] or 0.0 for row in launches)
    at_worst = f", at worst ${worst:.2f} and never more than the cap" if worst else ""
    _print(
        f"{len(launches)} launches, about {seconds:.0f} s and ${usd:.4f}{at_worst};"
        f" {len(rows) - len(launches)} refused; nothing was started"
    )


def launches_as_rows(launches: Sequence[PlannedLaunch]) -> list[dict[str, Any]]:
    """Return a row for each launch: its cluster, its runs, and estimated seconds and dollars."""
    return [
        {
            "cluster": launch.cluster.name,
            "market": launch.cluster.market,
            "runs": len(launch.items),
            "est_s": launch.est_s,
            "est_usd": launch.est_usd,
            "reason": launch.reason,
            "items": [asdict(item) for item in launch.items],
        }
        for launch in launches
    ]


def print_measured(report: Row, provider: str) -> None:
    """Print predicted and measured step seconds of each run of `srift measure`, and the cost."""
    lines = []
    for run in report["runs"]:
        predicted_s, step_s = run["predicted_step_s"], run["step_s"]
        difference = step_s / predicted_s - 1 if step_s and predicted_s else None
        step_s = step_s or ("done" if run["measured"] else "not measured")
        lines.append(_describe(run) | {"step_s": step_s, "difference": difference})
    columns = """
        kind: {kind}
        cluster: {cluster_and_mode}
        devices each: {layout}
        market: {market}
        batch: {batch}
        predicted s: {predicted_step_s:?.3f}
        low: {predicted_step_low_s:?.3f}
        high: {predicted_step_high_s:?.3f}
        measured s: {step_s:.3f}
        difference: {difference:?+.0%}
    """
    _print_table(lines, columns)
    totals = report["spent"]
    reasons = [run["reason"] for run in report["runs"] if run["reason"]]
    _print_notes([*reasons, *totals["notes"]])
    _print(
        f"{totals['launches']} launches, ${totals['usd']:.4f}; the measurements are stored.\n"
        f"`srift refresh --provider {provider} --max-usd 0` learns from them and publishes"
    )


def print_status(status: Row) -> None:
    """Print the running refresh, its machines, the age of the data, and problems."""
    work, table = status["at_work"], status["published"]
    refresh = "no refresh is running"
    if work:
        refresh = (
            f"refresh {work['refresh_id']} is running"
            f" (process {work['pid']}, since {work['started_at']})"
        )
    _print(refresh)
    leases = [lease for lease in status["leases"] if not lease["problem"]]
    _print_table(leases, _LEASES)
    if not status["leases"]:
        _print("no machine is held")
    if table:
        model = f"model version {table['model_version']}" if table["model_version"] else "no model"
        age = table["published_at_h_ago"]
        _print(f"published: {table['rows']} rows, {age:.1f} h ago, {model}")
    if status["report_page"]:
        print(f"page: {status['report_page']}")  # not wrapped, so that a terminal can open the link
    for sentence in filter(None, [status["ledger_sentence"], *status["drift"], *status["alarms"]]):
        _print(sentence)
    _print_notes([*status["stale"], *status["limits"]])


_LEASES = """
    lease: {lease_id}
    cluster: {cluster}
    usd so far: {usd_so_far:.4f}
    until (UTC): {deadline_at:%Y-%m-%d %H:%M:%S}
"""


def print_workloads(rows: Sequence[Row]) -> None:
    """Print one line per workload and provider, and one line per workload without data."""
    columns = """
        workload: {workload}
        provider: {provider}
        devices: {devices}
        measured: {measured_rows:?d}
        imported: {imported_rows:?d}
        public: {public_rows:?d}
        parameters: {parameters:?.3g}
        gradient bytes: {gradient_bytes:?.3g}
        FLOPs a sample: {flops_per_sample:?.3g}
        newest row: {newest_measured_at:?%Y-%m-%d}
    """
    _print_table(rows, columns)
    _print_notes(["`srift refresh` measures, and `srift import` loads measurements"])


def print_offers(rows: Sequence[Row]) -> None:
    """Print one line per offer: instance type, market, zone, price and spot risk."""
    columns = """
        type: {instance_type}
        devices: {devices:}
        device: {device}
        GiB each: {device_memory_gib:g}
        cores: {cores:g}
        GiB: {memory_gib:g}
        Gbit/s: {bandwidth_gbps:g}
        market: {market}
        region: {region}
        zone: {zone}
        usd/h: {usd_per_hour:.4f}
        interrupted a day: {interrupted_a_day:?.1%}
        price of: {price_as_of:%Y-%m-%d}
    """
    _print_table(rows, columns)
    _print_notes(filter(None, (row.get("price_source") for row in rows)))


def print_spend(spending: Row) -> None:
    """Print the cost of ended launches by group, and the cost of each running launch."""
    by = f"""
        {spending["by"]}: {{of}}
        leases: {{leases:}}
        runs: {{runs:}}
        usd: {{usd:.4f}}
    """
    rows = [{**row, "of": row["of"] or "no workload"} for row in spending["rows"]]
    if rows:
        _print_table([*rows, {**spending["total"], "of": "in all"}], by)
    else:
        _print(f"nothing was spent on {spending['provider']} machines")
    _print_table(spending["held"], _LEASES + "usd at most: {usd_at_deadline:.4f}", "held")
    if not spending["held"] and not spending["unreadable"]:
        _print("no machine is held")
    _print_notes([f"{lease}: its cost is unknown" for lease in spending["unreadable"]])


_SCALE = """
    type: {type_and_mode}
    units: {units}
    batch: {global_batch:g}
"""


def print_sizing(sizing: Row) -> None:
    """Print the largest efficient clusters and the best batches that `srift size` found."""
    _print(f"{sizing['workload']} ({sizing['provider']})", style="bold")
    columns = """
        at 90 %: {largest_90:g}
        at 80 %: {largest_80:g}
        Gbit/s needed: {needed_gbps:.4g}
        stated: {stated_gbps:.4g}
        servers: {servers:g}
    """
    title = "largest efficient cluster, and the bandwidth or servers that hide communication"
    _print_table(_scale_rows(sizing["scaling"]), _SCALE + columns, title)
    columns = """
        size: {size:}
        step s: {step_s:.4g}{mark}
        measured: {efficiency:.1%}
        by rule: {by_rule:.1%}
    """
    title = (
        "measured sizes, and the efficiency that a rule predicts from smaller sizes"
        " (*: step composed of micro-steps)"
    )
    _print_table(_scale_rows(sizing["checks"]), _SCALE + columns, title)
    columns = """
        type: {type_and_mode}
        batch: {batch:.4g}
        samples/s: {samples_per_s:.4g}
        largest measured: {largest_measured:.4g}
        bytes used: {peak_bytes:.4g}
        bytes of memory: {memory_bytes:.4g}
    """
    title = "best measured batch of one device"
    _print_table(_scale_rows(sizing["best_batch"]), columns, title)
    _print_notes(sizing["notes"])


def _scale_rows(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the rows with three added texts.

    type_and_mode: the instance type and, if it is not the default, the mode.
    units: the unit of the cluster size: "devices", "machines" (which use one device each) or, for
        example, "machines of 4" (which use four devices each).
    mark: `*` if some step times were computed as the sum of measured micro-steps.
    """
    result = []
    for row in rows:
        mode, each = _mode(row), row.get("devices_each")
        name = row["instance_type"] + (f" in {mode}" if mode else "")
        units = "devices" if not each else "machines" if each == 1 else f"machines of {each}"
        mark = "" if row.get("micro_batch") is None else "*"
        result.append({**row, "type_and_mode": name, "units": units, "mark": mark})
    return result


def print_check(report: Row) -> None:
    """Print a line for each precision in which the workload was trained, followed by notes."""
    rows = [
        {**answer["figures"], "precision": answer["precision"], "batch": report["batch"]}
        for answer in report["precisions"]
        if answer["figures"]
    ]
    columns = """
        precision: {precision}
        batch: {batch:}
        step s: {step_s:.3g}
        input s: {input_s:.3g}
        losses: {losses:.4g}
        peak bytes: {peak_bytes:.4g}
        parameters: {parameters:,}
        gradient bytes: {gradient_bytes:,}
    """
    title = f"{report['workload']} ({report['entrypoint']}): two steps on this CPU"
    _print_table(rows, columns, title)
    notes = [note for answer in report["precisions"] for note in answer["notes"]]
    _print_notes([*report["notes"], *notes])


def print_imports(imports: Sequence[Row]) -> None:
    """Print a line for each import, including the imports that `srift forget` undid."""
    if not imports:
        _print("nothing was ever imported")
    columns = """
        import: {import_id}
        file: {file:?}
        facts file: {facts_file:?}
        imported (UTC): {imported_at:%Y-%m-%d %H:%M}
        rows: {rows:}
        facts: {facts:}
        providers: {providers}
        workloads: {workloads}
        forgotten: {forgotten}
    """
    _print_table(imports, columns)


def print_backtest(stats: Row) -> None:
    """Print the prediction errors that `srift backtest` found, by group of rows."""
    columns = """
        by: {by}
        group: {group}
        rows: {rows:}
        mean error: {mean_error:.1%}
        median error: {median_error:.1%}
        p90 error: {p90_error:.1%}
        in 90 % interval: {coverage_90:.1%}
        median width: {median_width:.1%}
    """
    _print(
        f"{stats['predicted']} of {stats['rows']} rows predicted ({stats['provider']}); errors are"
        " |predicted - measured| / measured"
    )
    _print_table(stats["summary"], columns)
    _print_notes(stats["sentences"])
