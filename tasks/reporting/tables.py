"""Tables and sentences for a person: rich on a terminal, plain text elsewhere, the same words in both."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console
from rich.table import Table

from models.domain.cluster import ANY_ZONE
from models.domain.workload import Mode

from .progress import LiveReporter, Reporter

if TYPE_CHECKING:
    import pandas as pd

    from models.campaign.campaign import PlannedLaunch

Row = Mapping[str, Any]
OLD_PRICES = timedelta(days=7)
_WIDTH = 160  # of plain text: a pipe has no width of its own

_CAUTION = re.compile(r"; caution: ([^;]+)")


def as_caution(sentence: str) -> str:
    """`sentence`, which holds for many rows alike, as the end of a published reason. It must hold no semicolon."""
    return f"; caution: {sentence}"


def cautions_in(reasons: Iterable[str]) -> list[str]:
    """What `as_caution` has added to any of these published reasons, each once."""
    return list(dict.fromkeys(said for reason in reasons for said in _CAUTION.findall(reason)))


def without_cautions(reason: str) -> str:
    """A published reason as it was before."""
    return _CAUTION.sub("", reason)


def live_reporter() -> Reporter:
    """A bar where standard error is a terminal, plain lines where it is not."""
    console = Console(stderr=True)
    return LiveReporter(console) if console.is_terminal else Reporter()


def print_recommendations(
    rows: Sequence[Row], now: datetime | None = None, illustrative: Collection[str] = ("local",)
) -> None:
    """Workload by workload, a line for each goal's first choice and its rivals; below, why each stands there.

    What is to be known of all of them is said once, above, and so is the age of prices that are old `now`. Prices of
    the providers `illustrative` are nobody's.
    """
    console = _console()
    for provider in dict.fromkeys(
        row["provider"] for row in rows if row["provider"] in illustrative
    ):
        console.print(f"provider {provider}: prices are illustrative", style="italic")
    dated = [
        row["price_as_of"]
        for row in rows
        if row["provider"] not in illustrative and row["price_as_of"]
    ]
    if dated:
        age = (now or datetime.now(UTC)) - min(dated)
        said = f"prices as of {min(dated):%Y-%m-%d %H:%M} UTC" + (
            f", {age.days} days old" if age > OLD_PRICES else ""
        )
        if any(row.get("usd_storage") for row in rows):
            said += "; usd has volumes, public addresses and requests in it (--json: apart)"
        console.print(said, style="italic")
    for caution in cautions_in(str(row["reason"]) for row in rows):
        console.print(f"note: {caution}")
    for provider, workload in dict.fromkeys((row["provider"], row["workload"]) for row in rows):
        mine = [row for row in rows if (row["provider"], row["workload"]) == (provider, workload)]
        # of a table without a spot machine, or of an older version, every risk would be 0 or unknown
        hidden = set() if any(row.get("interruption_risk") for row in mine) else {"risk"}
        hidden |= set() if any(_mode(row) for row in mine) else {"mode"}
        table = Table(box=None, pad_edge=False)
        for name, justify in _COLUMNS.items():
            if name not in hidden:
                table.add_column(
                    name, justify=justify, no_wrap=name not in ("cluster", "batch"), overflow="fold"
                )
        for row, before in zip(mine, [None, *mine[:-1]], strict=True):
            again = row["rank"] > 1 and before is not None and goal_text(before) == goal_text(row)
            cells = dict(zip(_COLUMNS, _cells(row, "" if again else goal_text(row)), strict=False))
            table.add_row(*(cell for name, cell in cells.items() if name not in hidden))
        console.print(f"\n{workload} ({provider})", style="bold")
        if (
            len(mine) == 1
            or any(row["cluster"] for row in mine)
            or len({row["reason"] for row in mine}) > 1
        ):
            console.print(table)  # where nothing can be said of any goal, a line says why
        reasons = [
            f"  {row['cluster'] or row['status']}: {without_cautions(str(row['reason']))}"
            for row in mine
        ]
        for said in dict.fromkeys(reasons):
            console.print(said, style="dim")  # what keeps every goal from an answer is said once
        sources = dict.fromkeys(
            row["interruption_source"] for row in mine if row.get("interruption_source")
        )
        if sources and provider not in illustrative:
            console.print(
                f"  risk: of an interruption before the job is done, by {'; '.join(sources)}",
                style="dim",
            )
        for row in mine:
            if row.get("frontier"):
                _print_frontier(console, row)
            if row.get("pilots"):
                _print_pilots(console, row)
    if any(row["cluster"] or row.get("frontier") for row in rows):
        console.print(f"\n{COLUMN_LEGEND}", style="italic")


def _print_frontier(console: Console, row: Row) -> None:
    """What no other setup beats in both hours and dollars, the fastest first."""
    chances = [one.get("p_meets_constraint") for one in row["frontier"]]
    any_chance = any(chance is not None for chance in chances)
    lines = [
        [
            _in_mode(one),
            _market(one),
            f"{one['hours']:.3g}",
            _number(one["usd"], "{:.4g}"),
            _number(chance, "{:.0%}"),
        ]
        for one, chance in zip(row["frontier"], chances, strict=True)
    ]
    title = f"expected hours and dollars that are beaten by none in both, of {row['candidates']} candidates"
    if row["status"] == "infeasible" and any_chance and row["p_required"] is not None:
        title += f"; p ok is less than the {row['p_required']:.0%} required"
    console.print(f"\n{title}", style="bold")
    numbers = ("hours", "usd", "p ok") if any_chance else ("hours", "usd")
    _print_lines(console, ("cluster", "market", *numbers), lines, right=numbers)


def _print_pilots(console: Console, row: Row) -> None:
    """The runs that would tell most, in order, or that the choice is settled, or why there are none."""
    pilots = row["pilots"]
    runs, regret = pilots["runs"], pilots["regret"]
    if pilots["reason"]:
        console.print(f"\n{pilots['reason']}")
        return
    assured = bool(runs) and runs[0].get("assured_after") is not None
    now = (
        ""
        if regret is None
        else f"choosing now is expected to cost {_lost(regret)} more than the best there is"
    )
    if pilots["settled"] is None:
        console.print(f"\nopen: {now}; no few runs would settle it{_missing(row)}")
        return
    if pilots["settled"]:
        console.print(f"\nsettled: {now}{_missing(row)}")
        return
    cost = (
        f"these {len(runs)} runs tell most and cost ${_plain(sum(one['usd'] for one in runs), 2)}"
    )
    if regret is None:
        said = f"never measured as it is now; {cost}"
    elif assured:
        said = f"open: no cluster is sure enough to meet it yet; {cost}"
    else:
        said = f"open: {now}; {cost}{_missing(row)}"
    console.print(f"\n{said}", style="bold")
    lines = []
    for one in runs:
        left = "" if one["regret_after"] is None else _lost(one["regret_after"])
        left = f"{one['assured_after']:.0%}" if assured else left
        kind = "step time" if one["kind"] == "train" else one["kind"]
        named = [kind, _in_mode(one), one["layout"], one["market"], _batch(one)]
        lines.append([*named, f"{one['seconds']:.0f}", _plain(one["usd"], 2), left])
    numbers = ("seconds", "usd", "chance one is sure then" if assured else "expected regret after")
    names = ("measure", "cluster", "devices each", "market", "batch", *numbers)
    _print_lines(console, names, lines, right=numbers)


def _missing(row: Row) -> str:
    """What is in an expected cost besides dollars or hours, where that matters."""
    kinds = {"deadline": row["constraint_hours"], "budget": row["constraint_usd"]}
    kind = next((name for name, limit in kinds.items() if limit is not None), None)
    if kind is None or row["pilots"]["regret"] < _SLIGHT:
        return ""
    return f" (exceeding the {kind} counts too: overshoot_price in srift.toml)"


def _lost(regret: float) -> str:
    """Log regret as a part of what the best costs."""
    return f"{math.expm1(regret):.1%}"


def _plain(value: float, digits: int) -> str:
    """So many digits that count, and no exponent."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    decimals = max(digits - 1 - math.floor(math.log10(abs(value))), 0)
    text = f"{value:.{decimals}f}"
    return text.rstrip("0").rstrip(".") if decimals else text


_SLIGHT = 0.05  # log regret that a chance to miss the constraint has little part in
COLUMN_LEGEND = (
    "p ok: chance to keep to the deadline or budget; p best: chance to be the best of the 50 nearest to being chosen;"
    " a doubling: a factor of two in batch, devices or machines"
)
_COLUMNS: dict[str, Literal["left", "right"]] = {
    **dict.fromkeys(("goal", "#", "cluster", "market", "batch", "mode"), "left"),
    **dict.fromkeys(("step s (90 %)", "hours", "usd", "risk", "p ok", "p best"), "right"),
    "limited by": "left",
}


def print_launches(launches: Sequence[PlannedLaunch]) -> None:
    """What a dry run would buy, and the most it would cost."""
    console = _console()
    lines = [
        [
            row["cluster"],
            str(row["runs"]),
            f"{row['est_s']:.0f}",
            f"{row['est_usd']:.4f}",
            row["reason"],
        ]
        for row in launches_as_rows(launches)
    ]
    _print_lines(console, ("cluster", "runs", "about s", "about usd", "why"), lines)
    total_s, total_usd = sum(one.est_s for one in launches), sum(one.est_usd for one in launches)
    console.print(
        f"{len(launches)} launches, about {total_s:.0f} s and ${total_usd:.4f}; nothing was started"
    )


def launches_as_rows(launches: Sequence[PlannedLaunch]) -> list[dict[str, Any]]:
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


def print_measured(found: Row, provider: str) -> None:
    """Each run that was asked for: its step as it was predicted and as it was measured, or why it was not."""
    console = _console()
    lines = []
    for row in found["runs"]:
        predicted, step_s = row["predicted_step_s"], row["step_s"]
        known = predicted is not None
        told = (
            _seconds(predicted, row["predicted_step_low_s"], row["predicted_step_high_s"])
            if known
            else ""
        )
        kind = "step time" if row["kind"] == "train" else str(row["kind"])
        took = (
            _number(step_s, "{:.3f}")
            if step_s is not None
            else "done"
            if row["measured"]
            else "not measured"
        )
        apart = f"{step_s / predicted - 1:+.0%}" if known and step_s is not None else ""
        lines.append(
            [kind, _in_mode(row), row["layout"], row["market"], _batch(row), told, took, apart]
        )
    numbers = ("predicted s (90 %)", "measured s", "difference")
    names = ("measured", "cluster", "devices each", "market", "batch", *numbers)
    _print_lines(console, names, lines, right=numbers)
    for reason in dict.fromkeys(row["reason"] for row in found["runs"] if row["reason"]):
        console.print(f"  {reason}")
    spent = found["spent"]
    for note in spent["notes"]:
        console.print(f"  {note}")
    again = f"srift refresh --provider {provider} --max-usd 0"
    console.print(
        f"{spent['launches']} launches, ${spent['usd']:.4f}; stored, and neither learned from nor published:"
    )
    console.print(f"`{again}` does both and measures nothing")


def print_status(found: Mapping[str, Any]) -> None:
    """A few sentences."""
    console = _console()
    work = found["at_work"]
    if work:
        console.print(
            f"refresh {work['refresh_id']} is at work (process {work['pid']}, since {work['started_at']})"
        )
    else:
        console.print("no refresh is at work")
    for lease in found["leases"]:
        if lease["problem"]:  # nothing else is known of it, and `stale` tells it below
            continue
        usd = (
            "at an unknown price"
            if lease["usd_so_far"] is None
            else f"${lease['usd_so_far']:.4f} so far"
        )
        console.print(
            f"lease {lease['lease_id']}: {lease['cluster']}, {usd}, until {lease['deadline_at']:%H:%M:%S} UTC"
        )
    if not found["leases"]:
        console.print("no machine is held")
    if found["published"]:
        table = found["published"]
        version = table["model_version"]
        model = "without a model" if version is None else f"model version {version}"
        console.print(
            f"published: {table['rows']} rows, {table['published_at_h_ago']:.1f} h ago, {model}"
        )
    if found["report_page"]:
        console.print(f"page: {found['report_page']}", soft_wrap=True)
    for sentence in filter(None, [found["ledger_sentence"], *found["drift"], *found["alarms"]]):
        console.print(sentence)
    for sentence in [*found["stale"], *found["limits"]]:
        console.print(f"note: {sentence}")


def print_workloads(known: Sequence[Row]) -> None:
    """A line a workload and provider, of `KnownWorkload.as_json`; below, those of which nothing is known."""
    console = _console()
    rows, facts = ("measured", "imported", "public"), ("parameters", "gradient", "FLOPs a sample")
    lines = []
    for one in known:
        if not one["provider"]:
            continue
        gradient = None if one["gradient_bytes"] is None else one["gradient_bytes"] / 1e6
        newest = (
            "" if one["newest_measured_at"] is None else f"{one['newest_measured_at']:%Y-%m-%d}"
        )
        named = [one["workload"], one["provider"], ", ".join(one["devices"]) or "none"]
        counts = [str(one[f"{what}_rows"]) for what in rows]
        sizes = [
            _number(one["parameters"]),
            _number(gradient, "{:.4g} MB"),
            _number(one["flops_per_sample"]),
        ]
        lines.append([*named, *counts, *sizes, newest])
    if lines:
        names = ("workload", "provider", "devices", *rows, *facts, "newest row")
        _print_lines(console, names, lines, right=rows)
    nothing = [one["workload"] for one in known if not one["provider"]]
    if nothing:
        console.print(
            f"nothing is known yet of {', '.join(nothing)}: `srift refresh` measures here, `srift import` loads what "
            "was measured elsewhere"
        )
    elif not known:
        console.print(
            "no workload is known: state one in srift.toml, or `srift import` its measurements"
        )


def print_offers(rows: Sequence[Row]) -> None:
    """A line an offer, of `tasks.market.offers.listed`."""
    names = (
        "type",
        "devices",
        "device",
        "GiB each",
        "cores",
        "GiB",
        "Gbit/s",
        "market",
        "zone",
        "usd/h",
        "cut a day",
    )
    lines = []
    for one in rows:
        each = [
            _number(one[name], "{:g}")
            for name in ("device_memory_gib", "cores", "memory_gib", "bandwidth_gbps")
        ]
        place = one["region"] if one["zone"] == ANY_ZONE else one["zone"]
        risk = "" if one["interrupted_a_day"] is None else f"{one['interrupted_a_day']:.1%}"
        named = [one["instance_type"], str(one["devices"]), one["device"].replace(" ", "-")]
        lines.append(
            [*named, *each, one["market"], place, _number(one["usd_per_hour"], "{:.4f}"), risk]
        )
    texts = ("type", "device", "market", "zone")
    _print_lines(_console(), names, lines, right=[one for one in names if one not in texts])


def print_spend(found: Row) -> None:
    """A line a day, campaign, workload or type, the sum, and what is held; of `tasks.monitoring.spend.spend_of`."""
    console = _console()
    rows = [(one["of"] or "no workload", one) for one in found["rows"]]
    if rows:
        lines = [
            [name, str(one["leases"]), str(one["runs"]), _number(one["usd"], "{:.4f}")]
            for name, one in [*rows, ("in all", found["total"])]
        ]
        _print_lines(
            console, (found["by"], "leases", "runs", "usd"), lines, right=("leases", "runs", "usd")
        )
    else:
        console.print(f"nothing was spent on {found['provider']} machines")
    for one in found["held"]:
        so_far, at_most = (
            _number(one[name], "${:.4f}") for name in ("usd_so_far", "usd_at_deadline")
        )
        console.print(
            f"held: {one['cluster']} ({one['lease_id']}), {so_far} so far, {at_most} at most, until"
            f" {one['deadline_at']:%Y-%m-%d %H:%M} UTC"
        )
    if not found["held"] and not found["unreadable"]:
        console.print("no machine is held")
    for sentence in found["unreadable"]:
        console.print(f"note: {sentence}: what it costs is not known")


def print_sizing(found: Row) -> None:
    """Print `tasks.recommendation.sizing.size`."""
    console = _console()
    console.print(f"{found['workload']} ({found['provider']})", style="bold")
    if found["scaling"]:
        console.print("\nlargest efficient cluster, and what hides the exchange of gradients")
        numbers = ("largest_90", "largest_80", "needed_gbps", "stated_gbps", "servers")
        lines = [
            [*_scale(row), *(_number(row.get(name), "{:.4g}") for name in numbers)]
            for row in found["scaling"]
        ]
        heads = [*_SCALE, "at 90 %", "at 80 %", "Gbit/s needed", "stated", "servers"]
        _print_lines(console, heads, lines, right=heads[2:])
        console.print("\nmeasured sizes, and efficiency by the rule from smaller sizes")
        lines = []
        for row in found["checks"]:
            step = f"{row['step_s']:.4g}{'' if row['micro_batch'] is None else '*'}"
            efficiency = [_number(row[name], "{:.1%}") for name in ("efficiency", "by_rule")]
            lines.append([*_scale(row), str(row["size"]), step, *efficiency])
        heads = [*_SCALE, "size", "step s", "measured", "by rule"]
        _print_lines(console, heads, lines, right=heads[2:])
        console.print("* composed of measured micro-steps", style="italic")
    if found["best_batch"]:
        console.print("\nbest measured batch of one device")
        lines = []
        for row in found["best_batch"]:
            memory = [row[name] and row[name] / 2**30 for name in ("peak_bytes", "memory_bytes")]
            figures = [row["batch"], row["samples_per_s"], row["largest_measured"], *memory]
            lines.append([_scale(row)[0], *(_number(value, "{:.4g}") for value in figures)])
        heads = ["type", "batch", "samples/s", "largest measured", "GiB used", "GiB there"]
        _print_lines(console, heads, lines, right=heads[1:])
    for note in found["notes"]:
        console.print(f"note: {note}")


_SCALE = ("type", "units", "batch")


def _scale(row: Row) -> list[str]:
    """Return instance type with mode, the unit, and the global batch."""
    mode = Mode(*(row[name] for name in Mode._fields))
    name = row["instance_type"] + ("" if mode == Mode() else f" in {mode}")
    each = row["devices_each"]
    units = "devices" if not each else "machines" if each == 1 else f"machines of {each}"
    return [name, units, f"{row.get('global_batch') or 0:g}"]


def print_check(found: Row) -> None:
    """A line a precision in which the workload trained, and what is to be known of it."""
    console = _console()
    trained = [(one["precision"], one["figures"]) for one in found["precisions"] if one["figures"]]
    if trained:
        _, first = trained[0]
        console.print(
            f"{found['workload']} ({found['entrypoint']}): {first['parameters']:,} parameters, gradients of"
            f" {first['gradient_bytes'] / 1e6:.4g} MB; two steps on this processor"
        )
        lines = [
            [
                *(precision, str(found["batch"]), _number(one["step_s"]), _number(one["input_s"])),
                *(
                    ", ".join(f"{loss:.4g}" for loss in one["losses"]),
                    _number(one["peak_bytes"] / 1e6),
                ),
            ]
            for precision, one in trained
        ]
        names = ("precision", "batch", "step s", "input s", "losses", "peak MB")
        _print_lines(console, names, lines, right=names[1:])
    for note in dict.fromkeys(
        [*found["notes"], *(note for one in found["precisions"] for note in one["notes"])]
    ):
        console.print(f"note: {note}")


def print_imports(imports: Sequence[Row]) -> None:
    """A line an import, forgotten ones too."""
    console = _console()
    if not imports:
        console.print("nothing was ever imported")
        return
    lines = []
    for one in imports:
        files = ", ".join(filter(None, (one["file"], one["facts_file"]))) or "unknown"
        named = [str(one["import_id"]), files, f"{one['imported_at']:%Y-%m-%d %H:%M}"]
        contents = [
            ", ".join(one["providers"]),
            ", ".join(one["workloads"]),
            "forgotten" if one["forgotten"] else "",
        ]
        lines.append([*named, str(one["rows"]), str(one["facts"]), *contents])
    names = ("import", "files", "imported (UTC)", "rows", "facts", "provider", "workloads", "")
    _print_lines(console, names, lines, right=("rows", "facts"))


def goal_text(row: Row) -> str:
    """A goal with its constraint: `cheapest_within_deadline 12 h`."""
    goal = str(row["goal"])
    if row["constraint_hours"] is not None:
        goal += f" {row['constraint_hours']:g} h"
    if row["constraint_usd"] is not None:
        goal += f" ${row['constraint_usd']:g}"
    return goal


def recommendation_cells(row: Row) -> dict[str, str]:
    """What `print_recommendations` prints of a row, by the name of the column; fewer where nothing meets the goal."""
    return dict(zip(_COLUMNS, _cells(row, goal_text(row)), strict=False))


def _cells(row: Row, named: str) -> list[str]:
    """Of what cannot be had, the first of them alone."""
    if row["cluster"] is None:
        return [named, str(row["rank"]), str(row["status"])]
    return [
        named,
        str(row["rank"]),
        str(row["cluster"]),
        _market(row),
        _batch(row),
        _mode(row) or str(Mode()),
        _seconds(row["step_s"], row["step_low_s"], row["step_high_s"]),
        _number(row["hours"]),
        _number(row["usd"]),
        "" if not row.get("interruption_risk") else f"{row['interruption_risk']:.0%}",
        "" if row["p_meets_constraint"] is None else f"{row['p_meets_constraint']:.0%}",
        _number(row["p_best"], "{:.0%}"),
        str(row["bottleneck"]),
    ]


def _in_mode(row: Row) -> str:
    mode = _mode(row)
    return f"{row['cluster']} in {mode}" if mode else str(row["cluster"])


def _batch(row: Row) -> str:
    steps = row["accumulation_steps"]
    return f"{row['batch_per_device']} x{steps}" if steps > 1 else str(row["batch_per_device"])


def _mode(row: Row) -> str:
    """Empty for plain data parallelism in fp32, as is a row of an older version, which knew nothing else."""
    mode = Mode(*(str(row.get(name) or usual) for name, usual in Mode()._asdict().items()))
    return "" if mode == Mode() else str(mode)


def _print_lines(
    console: Console,
    names: Sequence[str],
    lines: Sequence[Sequence[str]],
    right: Collection[str] = (),
) -> None:
    """A table with columns called `names`, of which those in `right` hold numbers; cells beyond them are left out."""
    table = Table(box=None, pad_edge=False)
    for name in names:
        table.add_column(name, justify="right" if name in right else "left", overflow="fold")
    for cells in lines:
        table.add_row(*cells[: len(names)])
    console.print(table)


def _market(row: Row) -> str:
    """Also of a row that was published before it had this column."""
    known = row.get("market")
    return (
        str(known)
        if known
        else "+".join(sorted({str(offer["market"]) for offer in row["cluster_offers"]}))
    )


def _number(value: float | None, form: str = "{:.3g}") -> str:
    if value is None:
        return "unknown"
    shown = form.format(value)
    return _plain(value, 2) if "e-" in shown else shown


def _seconds(middle: float, low: float, high: float) -> str:
    """A step time with its interval, all to as many places as leave two digits of the least that count."""
    places = min(max(3, 1 - math.floor(math.log10(low))), 9) if low > 0 else 3
    return f"{middle:.{places}f} ({low:.{places}f}-{high:.{places}f})"


def _console() -> Console:
    if sys.stdout.isatty():
        return Console(markup=False)  # a reason may hold square brackets
    return Console(width=_WIDTH, no_color=True, highlight=False, markup=False)


def print_frame(frame: pd.DataFrame, title: str) -> None:
    """A small frame as it is, fractions to four digits."""
    _console().print(f"{title}\n{frame.round(4).to_string(index=False)}", highlight=False)


def print_scores(frame: pd.DataFrame, title: str, sentences: Sequence[str]) -> None:
    """A scoreboard, if it has a row, and what is to be said of it."""
    console = _console()
    print_frame(frame, title) if len(frame) else console.print(title)
    for sentence in sentences:
        console.print(f"note: {sentence}")
