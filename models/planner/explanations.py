"""Explain in words why a setup was chosen or not chosen, or why no setup keeps a limit."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import numpy as np
import pandas as pd

from ..domain.numeric import IntArray
from ..domain.setup_table import Row
from ..domain.workload import Goal, Mode, Workload
from ..job.cost import JobCosts
from ..step_time.model import StepTimeModel
from .candidates import Supply
from .choice_rule import EVEN_ODDS

# A setup counts as measured if it is less than this many doublings away from a measurement. A
# doubling is a factor of two in batch, devices or machines.
_MEASURED = 0.05
_SMALL = 0.005  # probabilities below this are not mentioned
_UNITS = {"usd": "dollars", "hours": "hours"}
_LIMITS = {"usd": "budget", "hours": "deadline"}


def amount(value: float, what: str, *, up: bool = False) -> str:
    """Format hours or dollars: `1.93 h`, `2.50 min`, `$12.50`, `$0.0123`.

    The text has at least two decimals and three significant digits.

    what: the unit of `value`, "hours" or "usd".
    up: if True, round up. A suggested limit is rounded up, so that `value` does not exceed it.
    """
    scale, shown = 1.0, "${}"
    if what == "hours":
        sizes = ((1.0, "{} h", 0.1), (60.0, "{} min", 1 / 60), (3600.0, "{} s", 0.0))
        scale, shown = next((each, text) for each, text, least in sizes if value >= least)
    number = value * scale
    decimals = max(2, 2 - math.floor(math.log10(number))) if number > 0 else 2
    if up:
        number = math.ceil(number * 10.0**decimals + 1e-6) / 10.0**decimals
    return shown.format(f"{number:,.{decimals}f}")


def winner(
    row: Row, rival: Row | None, goal: Goal, predicted: pd.Series[Any], *, clusters: str
) -> str:
    """Return a text that says why `row` was chosen and what limits its speed.

    If data loading is the bottleneck, the text says what would help.

    rival: the second-best row; None if there is none.
    predicted: the model's prediction for `row`, with the distance to the nearest measurement.
    clusters: a phrase that says how many clusters were compared and left out.
    """
    aim, what = goal.objective, goal.constraint
    best = "cheapest" if aim == "usd" else "fastest"
    sentences = [f"{best} of {clusters}: {amount(row[aim], aim)}"]
    if what is not None:
        required = "" if goal.p_required is None else f" ({goal.p_required:.0%} required)"
        limit, chance = amount(goal.limit, what), row["p_meets_constraint"]
        sentences.append(f"meets {limit} with {chance:.0%} probability{required}")
    if rival is not None:
        sentences.append(f"the next, {describe_setup(rival)}, has {_difference(rival, row, aim)}")
        if what is not None:
            sentences[-1] += (
                f" and meets {limit} with {rival['p_meets_constraint']:.0%} probability"
            )
    sentences.append(f"the best with {row['p_best']:.0%} probability")
    sentences.append(f"limited by {row['bottleneck']}")
    if predicted["bottleneck"] == "input" and predicted.get("input_by"):
        sentences.append(f"more {predicted['input_by']} would help")
    doublings = float(predicted.get("nearest_doublings", np.nan))
    if doublings < _MEASURED:
        sentences.append("this setup was measured")
    elif np.isfinite(doublings):
        sentences.append(f"nearest measurement {doublings:.1f} doublings away")
    return "; ".join(sentences)


def loser(row: Row, first: Row, goal: Goal) -> str:
    """Return a text that says why `row` was not chosen, compared with the chosen row `first`.

    If `row` is too likely to exceed the goal's limit, the text gives the probability.
    """
    what, other = goal.constraint, "hours" if goal.objective == "usd" else "usd"
    behind = _difference(row, first, goal.objective)
    if row["status"] == "misses_constraint" and what is not None:
        limit, chance = amount(goal.limit, what), 1 - row["p_meets_constraint"]
        return f"misses the {_LIMITS[what]} of {limit} with {chance:.0%} probability; {behind}"
    priced = row[other] is not None and first[other] is not None
    extra = _difference(row, first, other) if priced else "unknown price"
    best = f"the best with {row['p_best']:.0%} probability"
    return f"{behind} and {extra} against {describe_setup(first)}; {best}"


def infeasible(goal: Goal, costs: JobCosts, usable: IntArray) -> str:
    """Explain that no cluster keeps the goal's limit, and suggest a limit that can be kept.

    The text names the lowest limit that a cluster keeps with the required probability. It also
    names the cluster that is most likely to keep the stated limit. This cluster is left out if its
    probability is below 0.5 %. `usable` has the positions in `costs` to consider.
    """
    what, drawn = goal.used, costs.drawn[goal.used][usable]
    required = goal.p_required or EVEN_ODDS
    needed, chance = np.quantile(drawn, required, axis=1), (drawn <= goal.limit).mean(axis=1)
    limit, least = amount(goal.limit, what), amount(needed.min(), what, up=True)
    near, bet = (costs.setups[usable[int(at)]].cluster for at in (needed.argmin(), chance.argmax()))
    sentence = (
        f"no cluster on offer meets {limit} with {required:.0%} probability; the nearest,"
        f" {near.name} ({near.market}), would meet a {_LIMITS[what]} of {least}"
    )
    if chance.max() < _SMALL:
        return sentence
    bets = f"{bet.name} ({bet.market}), meets {limit} with {chance.max():.0%} probability"
    return f"{sentence}; the best bet, {bets}"


def too_small(workload: Workload, supply: Supply, model: StepTimeModel) -> str:
    """Return a phrase about lack of memory if no device has memory for one sample, else ""."""
    types = {offer.instance_type for offer in supply.offers}
    needed = [
        model.memory.needs(
            workload.name, mode, instance_type.name, supply.max_hosts * instance_type.devices
        )
        for instance_type, mode in product(types, workload.modes)
    ]
    least = min((each.peak_bytes(1) / 2**30 for each in needed), default=0.0)
    most = max(instance_type.device_memory_gib for instance_type in types)
    if least <= most:
        return ""
    return (
        f"; a sample needs {least:.3g} GiB on a device, and the largest device has {most:.3g} GiB"
    )


def describe_setup(row: Row) -> str:
    """Return a text such as `2xg5.xlarge (spot) in bf16 fsdp`. The default mode is not named."""
    mode = Mode(row["precision"], row["strategy"], row["switches"])
    named = f"{row['cluster']} ({row['market']})"
    return named if mode == Mode() else f"{named} in {mode}"


def _difference(row: Row, against: Row, what: str) -> str:
    """Return a text such as `+12 % dollars ($0.0123 against $0.0110)` that compares two rows.

    `what` is the quantity to compare: "usd" or "hours".
    """
    mine, theirs = row[what], against[what]
    change = 100 * (mine / theirs - 1) if theirs > 0 else 0.0
    if abs(change) < 0.05:
        return f"equal {_UNITS[what]} ({amount(mine, what)})"
    shown = f"{change:+.0f}" if abs(change) >= 10 else f"{change:+.1f}"
    return f"{shown} % {_UNITS[what]} ({amount(mine, what)} against {amount(theirs, what)})"
