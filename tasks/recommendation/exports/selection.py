"""Select the published row to export, and the other rows of its goal."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import yaml

from models.domain.cluster import ANY_ZONE, parse_cluster, parse_numbers
from models.planner.choice_rule import row_misses
from warehouse.export import STALE_AFTER_H

from ...reporting.progress import Row, goal_text
from ...reporting.tables import cautions_in
from ...workspace.settings import GoalSettings, SettingsError
from ...workspace.workspace import refresh_command, spends_money
from ..row_filter import rows_with

PORT = 29500  # torchrun's default
_MOST_DEARER = 3.0  # a replacement costs at most this multiple of the requested row's dollars
MODE = ("accumulation_steps", "precision", "strategy", "switches")


class ExportRefused(Exception):
    """The export target cannot represent the recommendation, or there is no recommendation."""

    exit_code = 1


class RankedCluster:
    """A row of the published table with its parsed cluster.

    layout: number of devices used on each machine.
    batches: batch per device on each machine.
    offers: the row's offers, in the order of torchrun's node ranks. Each offer is a dictionary,
        whose key `count` is the number of machines.
    zone: the machines' zone; None if the offer holds in every zone of the region.
    training: layout, batches, accumulation steps and mode. They determine the training command.
    """

    def __init__(self, row: Row) -> None:
        self.row, self.rank = row, row["rank"]
        self.machines = len(parse_cluster(row["cluster"]))
        self.layout, self.batches = (
            parse_numbers(row[name], self.machines, name) for name in ("layout", "batch_per_device")
        )
        self.offers: Sequence[Row] = row["cluster_offers"]
        self.types = list(dict.fromkeys(offer["instance_type"] for offer in self.offers))
        self.market, zone = self.offers[0]["market"], self.offers[0]["zone"]
        self.zone = None if zone == ANY_ZONE else zone
        self.name = f"{row['cluster']} ({self.market})"
        self.training = (self.layout, self.batches, *(row[name] for name in MODE))

    @property
    def environment(self) -> dict[str, str]:
        """Return environment variables that give a training script its batch and mode."""
        names = ("batch_per_device", *MODE)
        return {f"SRIFT_{name.upper()}": str(self.row[name]) for name in names}


@dataclass(frozen=True)
class Selection:
    """The row to export, and all rows of its goal.

    first: the row to export.
    ranks: all rows of the goal, including `first`.
    now: the time of the export.
    """

    first: RankedCluster
    ranks: Sequence[RankedCluster]
    now: datetime

    @property
    def candidates(self) -> list[RankedCluster]:
        """Return the requested row, followed by the rows that can replace it.

        A replacement is ranked below the requested row, and probably meets the deadline or budget.
        If prices are known, it costs at most _MOST_DEARER times as much as the requested row.
        """
        most_usd = _MOST_DEARER * (self.first.row["usd"] or math.inf)
        replacements = (
            choice
            for choice in self.ranks
            if choice.rank > self.first.rank
            and not row_misses(choice.row)
            and (choice.row["usd"] or 0.0) <= most_usd
        )
        return [self.first, *replacements]

    @property
    def interchangeable(self) -> list[RankedCluster]:
        """Return the candidates that have a single instance type and train like `first`.

        A candidate trains like `first` if both need the same training command.
        """
        training = self.first.training
        return [
            choice
            for choice in self.candidates
            if len(choice.types) == 1 and choice.training == training
        ]

    def require_cloud(self, target: str, *, single_type: bool = True) -> None:
        """Raise ExportRefused if the requested cluster has local hosts.

        target: the export target, such as "skypilot", for the error message.
        single_type: if True, also raise if the requested cluster has several instance types.
        """
        if not spends_money(self.first.row["provider"]):
            raise ExportRefused(
                f"{target} cannot start {self.first.name}, which runs on this computer."
                " Use `--to torchrun` or `--provider ec2`"
            )
        if single_type and len(self.first.types) > 1:
            raise ExportRefused(
                f"{target} needs machines of one type, but {self.first.name} has several."
                " Export another --rank, or use `--to sagemaker` or `--to torchrun`"
            )

    @property
    def about(self) -> list[str]:
        """Return lines that describe the recommendation: prediction, prices and warnings."""
        row = self.first.row
        usd = "unknown dollars"
        if row["usd"] is not None:
            usd = f"${row['usd']:.4g} (90th percentile ${row['usd_p90']:.4g})"
        chance = row["p_meets_constraint"]
        return [
            f"{row['workload']}, {goal_text(row)}: rank {self.first.rank}, {self.first.name}"
            f" in {row['region']}",
            f"publication {row['publication_id']} of {row['published_at']:%Y-%m-%d %H:%M} UTC"
            f" (provider {row['provider']}, model version {row['model_version']})",
            f"predicted: {row['hours']:.3g} hours (90th percentile {row['hours_p90']:.3g}),"
            f" {usd}; a step {row['step_s']:.3g} s"
            f" (90 % interval {row['step_low_s']:.3g} to {row['step_high_s']:.3g})",
            *([] if chance is None else [f"probability to meet the constraint: {chance:.0%}"]),
            f"prices as of {row['price_as_of']:%Y-%m-%d %H:%M} UTC,"
            f" {self._age_days('price_as_of'):.1f} days before this export",
            f"training: {row['strategy']} in {row['precision']}, switches {row['switches']};"
            f" global batch {row['global_batch']} = devices {row['layout']} x batch"
            f" {row['batch_per_device']} x {row['accumulation_steps']} micro-steps",
            *(f"caution: {caution}" for caution in cautions_in([row["reason"]])),
        ]

    @property
    def warnings(self) -> list[str]:
        """Return warnings about the requested row.

        Reasons for a warning: the table or a price is old, the row probably misses its deadline or
        budget, or its status is "measure_first".
        """
        row, warnings = self.first.row, []
        renew = f"`{refresh_command(row['provider'], '0')}` renews it"
        for column, what in (("published_at", "publication"), ("price_as_of", "price")):
            age_days = self._age_days(column)
            if 24 * age_days > STALE_AFTER_H:
                warnings.append(f"the {what} is {age_days:.1f} days old: {renew}")
        if row_misses(row):
            chance = f"{row['p_meets_constraint']:.0%}"
            warnings.append(
                f"rank {self.first.rank} meets its constraint with a probability of only {chance}"
            )
        if row["status"] == "measure_first":
            warnings.append(row["reason"].partition(";")[0])
        return warnings

    def _age_days(self, column: str) -> float:
        """Return the number of days from the row's time in `column` to the export.

        column: "price_as_of" or "published_at".
        """
        age: timedelta = self.now - self.first.row[column]
        return age / timedelta(days=1)


def select(
    rows: Sequence[Row],
    workload: str,
    now: datetime,
    *,
    goal: str | None = None,
    provider: str | None = None,
    rank: int = 1,
) -> Selection:
    """Return the published row with the requested rank, and all rows of its goal.

    goal: the name of a goal, or a goal with its limit such as `cheapest_within_deadline 12 h`. May
        be None if the workload has only one goal.
    provider: may be None if all published rows of the workload have the same provider.
    rank: the rank of the row to export.

    Raises:
        SettingsError: if no row matches, rows of several goals or providers match, or the rank does
            not exist.
        ExportRefused: if no cluster meets the goal.
    """
    rows = rows_with(rows, workload=workload, provider=provider)
    if len({row["provider"] for row in rows}) > 1:
        raise SettingsError(f"both providers have rows of {workload}: choose with --provider")
    goals = list(dict.fromkeys(map(goal_text, rows)))
    matches = [name for name in goals if goal in (None, name, name.split(" ")[0])]
    if len(matches) != 1:
        choices = ", ".join(f"--goal {name!r}" for name in matches or goals)
        raise SettingsError(f"choose one published goal of {workload}: {choices}")
    rows = [row for row in rows if goal_text(row) == matches[0]]
    if rows[0]["cluster"] is None:
        raise ExportRefused(
            f"no cluster meets the goal {matches[0]!r} of {workload}: {rows[0]['reason']}"
        )
    ranks = {row["rank"]: RankedCluster(row) for row in rows}
    if rank not in ranks:
        raise SettingsError(f"goal {matches[0]} has no rank {rank}: it has ranks 1 to {len(ranks)}")
    return Selection(ranks[rank], list(ranks.values()), now)


def only_goal(goals: Sequence[GoalSettings]) -> str | None:
    """Return the only goal in `goals` as text; None if there are no goals or several."""
    if len(goals) != 1:
        return None
    [only] = goals
    return goal_text(
        {"goal": only.goal, "constraint_hours": only.hours, "constraint_usd": only.usd}
    )


def as_comment(lines: Sequence[str]) -> str:
    return "".join(f"# {' '.join(line.split())}\n" for line in lines)


def as_yaml(value: Any) -> str:
    return str(yaml.safe_dump(value, sort_keys=False, width=1000))


def label(text: str) -> str:
    """Convert a text such as "ViT_L" to a Kubernetes or SkyPilot name such as "vit-l"."""
    return re.sub(r"[^a-z0-9-]+", "-", text.lower()).strip("-")
