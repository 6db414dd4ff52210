"""Why a setup won or lost, and why nothing is feasible, in numbers and plain words."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from ..domain.cluster import Cluster, InstanceType
from ..domain.numeric import IntArray
from ..domain.workload import Goal, Mode, Setup, Workload
from ..job.cost import JobCosts
from ..step_time.setup_arrays import read_setups
from .batch_split import StepModel, fits, global_batches
from .candidates import Supply
from .choice_rule import EVEN_ODDS, drawn_meeting

Row = dict[str, Any]

_SAME = 1e-6  # relative: what differs by rounding is equal
_ITSELF = 0.05  # doublings that no print shows
_LEAST_CHANCE = 0.005  # that is not printed as 0 %
_LEAST_PART = 0.005  # of a step, that is worth a word
_SHORT_S = 0.1  # a step below it is told in milliseconds
_UNITS = {"usd": "dollars", "hours": "hours"}
_LIMITS = {"usd": "budget", "hours": "deadline"}


def amount(value: float, what: str) -> str:
    """`1.93 h`, `2.5 min`, `$12.50`, `$0.0123` or `$0.000041`: small ones with two digits that count."""
    if what == "usd":
        return f"${value:,.{_decimals(value, what)}f}"
    scale, unit = _hours_unit(value)
    return f"{value * scale:.{_decimals(value, what)}f} {unit}"


def enough(value: float, what: str) -> str:
    """As `amount`, rounded up: a constraint as it is printed here is met by `value`."""
    scale = 1.0 if what == "usd" else _hours_unit(value)[0]
    step = 10.0 ** -_decimals(value, what) / scale
    return amount(math.ceil(value / step + 1e-6) * step, what)


def _hours_unit(hours: float) -> tuple[float, str]:
    """Units an hour, and the unit in which so many hours are printed."""
    return (1.0, "h") if hours >= 0.1 else (60.0, "min") if hours >= 1 / 60 else (3600.0, "s")


def _decimals(value: float, what: str) -> int:
    """Digits after the point."""
    if what == "hours" and value >= 1 / 60:
        return 2 if value >= 0.1 else 1
    shown = value if what == "usd" else value * 3600
    least, most = (4, 12) if what == "usd" else (1, 9)
    if shown >= 1 or shown <= 0:
        return 2 if what == "usd" else 1
    return min(max(1 - math.floor(math.log10(shown)), least), most)


def winner(
    row: Row,
    rival: Row | None,
    goal: Goal,
    *,
    clusters: int,
    nearest: float | None = None,
    input_by: str = "",
) -> str:
    """Why the first in rank among so many `clusters` is the first, and what limits it: `input_by` is more of what would
    help where that is input.

    `nearest` is how many doublings away the nearest measurement is, where that is known.
    """
    aim, what = goal.objective, goal.constraint
    among = f"{'cheapest' if aim == 'usd' else 'fastest'}"
    if what is None:
        among = f"{among} of {clusters} clusters"
    elif goal.p_required is None:
        among = (
            f"of {clusters} clusters the {among} for {amount(goal.limit or 0.0, what)}, overshooting weighed (meets it"
            f" with {row['p_meets_constraint']:.0%} probability)"
        )
    else:
        among = (
            f"of {clusters} clusters the {among} that meets {amount(goal.limit or 0.0, what)}"
            f" with at least {goal.p_required:.0%} probability (this one with {row['p_meets_constraint']:.0%})"
        )
    parts = [f"{among}: {amount(row[aim], aim)}"]
    if rival is None:
        parts.append("no other came into question")
    else:
        but = ""
        if what is not None and rival[aim] < row[aim] * (1 - _SAME):
            limit, chance = amount(goal.limit or 0.0, what), rival["p_meets_constraint"]
            but = f" but meets {limit} with only {chance:.0%} probability"
            if (
                chance >= row["p_meets_constraint"]
            ):  # it loses by how far it misses, not by how often
                but = f" but where it misses {limit} it does by more"
        parts.append(f"the next, {_named(rival)}, has {_difference(rival, row, aim)}{but}")
    parts.append(f"the best with {row['p_best']:.0%} probability")
    helped = f" (more {input_by} would help)" if input_by and row["bottleneck"] == "input" else ""
    parts.append(f"limited by {row['bottleneck']}{helped}")
    if made_up_of := _parts_of_step(row):
        parts.append(made_up_of)
    if nearest is not None:
        parts.append(
            "measured itself"
            if nearest < _ITSELF
            else f"nearest measurement {nearest:.1f} doublings away"
        )
    return "; ".join(parts)


def _parts_of_step(row: Row) -> str:
    """`a step is 0.2 s of computing and 0.06 s of communication (another 0.02 s is hidden behind computing)`; empty
    where nothing but computing is to be said, or the model does not say.
    """
    if row.get("compute_s") is None:
        return ""
    exposed, waiting = row["exposed_communication_s"], row["input_s"]
    least = _LEAST_PART * (row["compute_s"] + exposed + waiting)
    hidden = row["communication_s"] - exposed
    computing = {"stragglers": "computing on the slowest device"}.get(
        row["bottleneck"], "computing"
    )
    if row["bottleneck"] == "input" and waiting <= least:
        computing = "making batches, for the most part, and computing"

    def told(part: float) -> str:
        scale, unit = (1.0, "s") if least > _LEAST_PART * _SHORT_S else (1e3, "ms")
        return f"{scale * part:.{3 if scale * part < 100 else 6}g} {unit}"

    said = [f"{told(row['compute_s'])} of {computing}"]
    if exposed > least:
        said.append(f"{told(exposed)} of communication")
    if hidden > least:
        what = f"another {told(hidden)}" if exposed > least else f"{told(hidden)} of communication"
        said[-1] += f" ({what} is hidden behind computing)"
    if waiting > least:
        said.append(f"{told(waiting)} of waiting for input")
    if said == [f"{told(row['compute_s'])} of computing"]:
        return ""
    *others, last = said
    return f"a step is {' and '.join(filter(None, (', '.join(others), last)))}"


def loser(row: Row, first: Row, goal: Goal) -> str:
    """Why a cluster is not the first: its distance in what was aimed at, or how often it misses the constraint."""
    what, other = goal.constraint, "hours" if goal.objective == "usd" else "usd"
    aimed = _difference(row, first, goal.objective)
    if row["status"] == "misses_constraint" and what is not None:
        allowed = "" if goal.p_required is None else f", where {1 - goal.p_required:.0%} is allowed"
        return (
            f"misses the {_LIMITS[what]} of {amount(goal.limit or 0.0, what)} with {1 - row['p_meets_constraint']:.0%}"
            f" probability{allowed}; it would have {aimed}"
        )
    if row[other] is None or first[other] is None:
        beside = "price unknown" if row["usd"] is None else "no price to compare with"
    else:
        beside = _difference(row, first, other)
    return f"{aimed} and {beside} against {_named(first)}; the best with {row['p_best']:.0%} probability"


def infeasible(goal: Goal, costs: JobCosts, nearest: IntArray) -> str:
    """What would make a constraint feasible that nothing meets, and what has the best chance to meet it as it is.

    `nearest` are the positions to look at in `costs`, those first that are expected to exceed the limit least.
    """
    what, limit = goal.constraint or "hours", float(goal.limit or 0.0)
    required = EVEN_ODDS if goal.p_required is None else goal.p_required
    drawn = costs.drawn(what)[nearest]
    needed, chance = np.quantile(drawn, required, axis=1), drawn_meeting(drawn, limit).chance
    asked, least = amount(limit, what), enough(float(needed.min()), what)
    if asked == least:  # they differ by less than is printed
        asked = f"{limit:.6g} h" if what == "hours" else f"${limit:.6g}"
    said = (
        f"no cluster on offer meets {asked} with {required:.0%} probability; the nearest,"
        f" {_cluster(costs.setups[nearest[int(needed.argmin())]].cluster)}, would meet a {_LIMITS[what]} of {least}"
    )
    if chance.max() < _LEAST_CHANCE:
        return said
    bet = int(nearest[chance.argmax()])  # of equals the nearest
    return (
        f"{said}; the best bet, {_cluster(costs.setups[bet].cluster)}, meets {asked} with {chance.max():.0%}"
        f" probability, at an expected {amount(costs.hours[bet], 'hours')} and"
        f" {amount(costs.expected('usd')[bet], 'usd')}"
    )


def nothing_to_choose(setups: int, predicted: bool) -> str:
    """Why there is nothing to rank at all."""
    if setups == 0:
        return "there is no cluster on offer that can be had here; more instance types would make it feasible"
    if not predicted:
        return "no step time could be predicted for any cluster on offer; measuring one would make it feasible"
    return "no cluster on offer has a known price; a price would make it feasible"


def _cluster(cluster: Cluster) -> str:
    return _with_markets(cluster.name, (offer.market for offer in cluster.members))


def _named(row: Row) -> str:
    named = _with_markets(row["cluster"], (offer["market"] for offer in row["cluster_offers"]))
    mode = Mode(row["precision"], row["strategy"], row["switches"])
    return named if mode == Mode() else f"{named} in {mode}"


def _with_markets(name: str, markets: Iterable[str]) -> str:
    """`2xlc.small (spot)`."""
    return f"{name} ({', '.join(sorted(set(markets)))})"


def _difference(row: Row, against: Row, what: str) -> str:
    """`+12 % dollars ($0.0123 against $0.0110)`."""
    mine, theirs = float(row[what]), float(against[what])
    change = 100 * (mine / theirs - 1) if theirs > 0 else 0.0
    if abs(change) < 0.05:
        return f"equal {_UNITS[what]} ({amount(mine, what)})"
    shown = f"{change:+.0f}" if abs(change) >= 10 else f"{change:+.1f}"
    return f"{shown} % {_UNITS[what]} ({amount(mine, what)} against {amount(theirs, what)})"


_BYTES_PER_GIB = 2.0**30


def made_to_fit(setup: Setup, workload: Workload, model: StepModel) -> str:
    """What makes the workload fit on the setup's devices, and the seconds that it costs; empty where nothing need.

    Beside the same batch on the same machines in one micro-step and the plainest mode of the same precision that the
    workload tolerates, as its step would take if it fitted.
    """
    mode = setup.mode
    plainest = min(
        (one for one in workload.modes if one.precision == mode.precision),
        key=lambda one: (
            one.of_several,
            one.switches.count("+") + (one.switches != Mode().switches),
        ),
        default=mode,
    )
    whole = tuple(batch * setup.accumulation_steps for batch in setup.batch_per_device)
    plain = replace(setup, **plainest._asdict(), accumulation_steps=1, batch_per_device=whole)
    if plain == setup:
        return ""
    ranks = sum(setup.layout)
    machines = [one.instance_type for one in setup.cluster.members]
    short = [
        (one, model.peak_bytes(workload.name, one.name, batch, ranks, mode=plainest))
        for one, batch in zip(machines, whole, strict=True)
        if not fits(model, workload.name, one, batch, mode=plainest, ranks=ranks, accumulates=False)
    ]
    if not short:
        return ""
    one, needed = max(short, key=lambda each: each[1] / each[0].device_memory_gib)
    asked = read_setups(pd.DataFrame([each.row() for each in (setup, plain)]), {})
    ours, theirs = model.predict_arrays(asked)["step_s"].astype(float).tolist()
    means = [str(mode)] * (plainest != mode)
    means += [f"{setup.accumulation_steps} micro-steps"] * (setup.accumulation_steps > 1)
    beside = f"{ours:.3g} s a step against {theirs:.3g} s if that fitted ({100 * (ours / theirs - 1):+.0f} %)"
    return (
        f"made to fit by {' in '.join(means)}: {plainest} in one micro-step needs {needed / _BYTES_PER_GIB:.3g} GiB of"
        f" the {one.device_memory_gib:.3g} GiB of a device of {one.name}; {beside}"
    )


def obstacle(workload: Workload, supply: Supply, model: StepModel) -> str:
    """What keeps every machine on offer from training at any of the workload's global batches, and what would help.

    Empty where it is neither memory nor division. Memory that nobody knows is allowed.
    """
    totals = global_batches(workload.global_batch_least, workload.global_batch_most)
    able = (one for one in supply.offers if not supply.fits(Cluster(members=(one,))))
    types = list({one.instance_type.name: one.instance_type for one in able}.values())
    least_bytes = {
        one.name: min(
            model.peak_bytes(workload.name, one.name, 1, supply.max_hosts * one.devices, mode=mode)
            for mode in workload.modes
        )
        for one in types
    }
    roomy = [
        one for one in types if not least_bytes[one.name] > one.device_memory_gib * _BYTES_PER_GIB
    ]
    if types and not roomy:
        return _too_small(types, min(least_bytes.values()))
    counts = sorted({one.devices for one in roomy})
    if not counts or any(total % many == 0 for total in totals for many in counts):
        return ""
    return (
        f"no machine on offer can share a global batch of {_either(totals)} equally among its devices"
        f" ({_either(counts)} on each); a global batch of {_either(_nearest(totals, counts))} would do"
    )


def _too_small(types: Sequence[InstanceType], least_bytes: float) -> str:
    most_gib = max(one.device_memory_gib for one in types)
    return (
        "no device on offer has the memory for even one sample of this workload: about"
        f" {least_bytes / _BYTES_PER_GIB:.3g} GiB are needed, and the largest has {most_gib:.3g} GiB; larger devices"
        " would do"
    )


def _nearest(totals: Sequence[int], counts: Sequence[int]) -> list[int]:
    """The multiples of some count that lie between the totals, or else the next below and above them."""
    least, most = min(totals), max(totals)
    near = {
        one
        for total in totals
        for many in counts
        for one in (total // many * many, -(-total // many) * many)
    }
    between = sorted(one for one in near if least <= one <= most)
    below, above = [one for one in near if 0 < one < least], [one for one in near if one > most]
    return between or [*([max(below)] if below else []), min(above)]


def _either(numbers: Sequence[int]) -> str:
    *others, last = map(str, numbers)
    return f"{', '.join(others)} or {last}" if others else last
