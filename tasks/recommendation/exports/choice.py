"""The published rows that an export is made of: one goal's, from the rank asked for down; and what is said of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from models.domain.cluster import ANY_ZONE, parse_cluster, parse_numbers
from models.domain.suggestions import nearest_names
from models.domain.workload import Mode
from models.planner.choice_rule import row_misses
from warehouse.export import STALE_AFTER_H

from ...reporting.tables import cautions_in, goal_text
from ...workspace.settings import SettingsError
from ...workspace.workspace import capabilities, refresh_command

Row = Mapping[str, Any]
_INFEASIBLE = "infeasible"


class ExportRefused(Exception):
    """The recommendation cannot be exported so; the text says why, and what can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """So many machines of one type and market; `zone` None where the price holds in the whole region."""

    instance_type: str
    count: int
    market: str
    zone: str | None
    usd_per_hour: float | None

    @property
    def spot(self) -> bool:
        """Whether they may be interrupted."""
        return self.market == "spot"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranked:
    """A published row that names a cluster. `layout` (devices) and `batches` (samples a device) have one a machine."""

    row: Row
    groups: tuple[Group, ...]
    layout: tuple[int, ...]
    batches: tuple[int, ...]
    mode: Mode

    @classmethod
    def of(cls, row: Row) -> Ranked:
        """What the columns say; those that an older version did not publish are as they were then."""
        machines = len(parse_cluster(str(row["cluster"])))
        return cls(
            row=row,
            groups=tuple(
                Group(
                    instance_type=str(one["instance_type"]),
                    count=int(one["count"]),
                    market=str(one["market"]),
                    zone=None if one["zone"] == ANY_ZONE else str(one["zone"]),
                    usd_per_hour=one["usd_per_hour"],
                )
                for one in row["cluster_offers"]
            ),
            layout=parse_numbers(str(row["layout"]), machines, "layout"),
            batches=parse_numbers(str(row["batch_per_device"]), machines, "batch_per_device"),
            mode=Mode(*(str(row.get(name) or usual) for name, usual in Mode()._asdict().items())),
        )

    @property
    def rank(self) -> int:
        """1 is the best."""
        return int(self.row["rank"])

    @property
    def misses(self) -> bool:
        """Whether it is likelier to miss its constraint than it may be."""
        return row_misses(self.row)

    @property
    def name(self) -> str:
        """Cluster and market: `2xg5.xlarge (spot)`."""
        return (
            f"{self.row['cluster']} ({'+'.join(dict.fromkeys(one.market for one in self.groups))})"
        )

    @property
    def machines(self) -> int:
        """How many there are."""
        return len(self.layout)

    @property
    def types(self) -> tuple[str, ...]:
        """Instance types, each once."""
        return tuple(dict.fromkeys(one.instance_type for one in self.groups))

    @property
    def region(self) -> str:
        """Where its machines are."""
        return str(self.row["region"])

    @property
    def accumulation_steps(self) -> int:
        """Micro-steps of one optimizer step."""
        return int(self.row["accumulation_steps"])

    @property
    def command(self) -> tuple[object, ...]:
        """What is the same where one command trains on both: machines, devices, batches, micro-steps, mode."""
        return self.layout, self.batches, self.accumulation_steps, self.mode

    @property
    def environment(self) -> dict[str, str]:
        """The row's split as variables for a training script."""
        return {
            "SRIFT_BATCH_PER_DEVICE": str(self.row["batch_per_device"]),
            "SRIFT_ACCUMULATION_STEPS": str(self.accumulation_steps),
            "SRIFT_PRECISION": self.mode.precision,
            "SRIFT_STRATEGY": self.mode.strategy,
            "SRIFT_SWITCHES": self.mode.switches,
        }

    @property
    def not_uniform(self) -> str:
        """Why its machines are not all alike; empty where they are of one type and one market."""
        if len(self.types) > 1:
            return f"{self.name} is of the types {' and '.join(self.types)}"
        if len(self.groups) > 1:
            return f"{self.name} is of several markets or zones"
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The rank asked for, all ranks of its goal, and what a reader is to be warned of at `now`."""

    first: Ranked
    ranks: tuple[Ranked, ...]
    now: datetime

    @property
    def below(self) -> list[Ranked]:
        """The ranks after it that are not likelier to miss the constraint than they may be."""
        return [one for one in self.ranks if one.rank > self.first.rank and not one.misses]

    def alternatives(self, able: Callable[[Ranked], str]) -> tuple[list[Ranked], list[str]]:
        """The rank asked for, then those below that the same command trains and of which `able` says nothing; and why
        the others are left out.
        """
        taken, left_out = [self.first], list[str]()
        for one in self.below:
            why = able(one) or ("" if one.command == self.first.command else "is split otherwise")
            if why:
                left_out.append(
                    f"rank {one.rank}, {one.name}, is left out: it {why} (--rank {one.rank} exports it)"
                )
            else:
                taken.append(one)
        return taken, left_out

    def refuse(self, target: str, able: Callable[[Ranked], str], others: str) -> None:
        """Raises ExportRefused where `able` says why the rank asked for cannot be exported, with the best that can."""
        why = able(self.first)
        if not why:
            return
        can = min(
            (one for one in self.ranks if not able(one)),
            key=lambda one: (one.misses, one.rank),
            default=None,
        )
        instead = f"none of the {len(self.ranks)} published ranks can"
        if can is not None:
            but = ", though it misses its constraint" if can.misses else ""
            instead = f"rank {can.rank} can, {can.name}, {_money(can.row)}{but}: --rank {can.rank}"
        raise ExportRefused(f"{target}: rank {self.first.rank} {why}; {instead}. {others}")

    @property
    def about(self) -> list[str]:
        """What the recommendation says, and how old that is, a sentence a line."""
        row, mode = self.first.row, self.first.mode
        steps = self.first.accumulation_steps
        lines = [
            f"{row['workload']}, {goal_text(row)}: rank {self.first.rank}, {self.first.name} in {self.first.region}",
            f"publication {row['publication_id']} of {_moment(row['published_at'])} (provider {row['provider']},"
            f" model version {row['model_version']})",
            f"predicted: {row['hours']:.3g} hours (90th percentile {row['hours_p90']:.3g}), {_money(row)}; a step"
            f" {row['step_s']:.3g} s (90 % interval {row['step_low_s']:.3g} to {row['step_high_s']:.3g})",
            f"{_chances(row)}; prices as of {_moment(row['price_as_of'])}, {self._days(row['price_as_of']):.1f} days"
            " before this export",
            f"training: {mode.strategy} in {mode.precision}, switches {mode.switches}; global batch"
            f" {row['global_batch']} = devices {row['layout']} x batch {row['batch_per_device']} a device, by machine,"
            f" x {steps} micro-step{'' if steps == 1 else 's'}",
        ]
        return lines + [f"caution: {one}" for one in cautions_in([str(row["reason"])])]

    @property
    def warnings(self) -> list[str]:
        """What makes the row doubtful now: its age, that of its prices, and that it would rather miss its goal."""
        row, found = self.first.row, list[str]()
        again = refresh_command(str(row["provider"]), "0")
        if self._days(row["published_at"]) * 24 > STALE_AFTER_H:
            found.append(
                f"the publication is {self._days(row['published_at']):.1f} days old: `{again}` renews it"
            )
        if self._days(row["price_as_of"]) * 24 > STALE_AFTER_H:
            found.append(f"its prices are {self._days(row['price_as_of']):.1f} days old")
        if self.first.misses:
            chance = f"{row['p_meets_constraint']:.0%} probability only"
            found.append(
                f"rank {self.first.rank} meets its constraint with {chance}: {row['reason']}"
            )
        return found

    def _days(self, moment: datetime) -> float:
        return max(0.0, (self.now - moment).total_seconds() / 86400)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Which published row: `goal` and `provider` where the workload has several."""

    workload: str
    goal: str | None = None
    provider: str | None = None
    rank: int = 1


def choose(rows: Sequence[Row], wanted: Wanted, now: datetime) -> Choice:
    """The row `wanted` among the published `rows`, with those of its goal.

    Raises SettingsError where the words name nothing or several things, ExportRefused where nothing meets the goal.
    """
    rows = _named(rows, "workload", wanted.workload)
    rows = _named(
        rows,
        "provider",
        _one(rows, "provider", wanted.provider, f"{wanted.workload} is published by"),
    )
    rows = _of_goal(rows, wanted.goal)
    row = next((one for one in rows if one["rank"] == wanted.rank), None)
    first = rows[0]
    if first["status"] == _INFEASIBLE:
        raise ExportRefused(
            f"nothing meets {wanted.workload}, {goal_text(first)}: {first['reason']}"
        )
    ranks = tuple(Ranked.of(one) for one in rows if one["cluster"] is not None)
    if row is None or row["cluster"] is None:
        raise SettingsError(
            f"there is no rank {wanted.rank} of {goal_text(first)}: ranks 1 to {len(ranks)} are published"
        )
    return Choice(first=Ranked.of(row), ranks=ranks, now=now)


def refuse_local(choice: Choice, target: str) -> None:
    """Raises ExportRefused where the machines are parts of this computer, which no other tool can start."""
    provider = str(choice.first.row["provider"])
    if capabilities(provider).simulated:
        raise ExportRefused(
            f"{target}: {choice.first.name} is of provider {provider}, whose machines are parts of this computer, and"
            " no tool starts them elsewhere; `--to torchrun` has its split, and --provider ec2 what is published of EC2"
        )


def _named(rows: Sequence[Row], column: str, wanted: str) -> list[Row]:
    known = sorted({str(row[column]) for row in rows})
    if wanted not in known:
        raise SettingsError(
            f"no published row is of {column} {wanted!r}; {nearest_names(wanted, known)}"
        )
    return [row for row in rows if row[column] == wanted]


def _one(rows: Sequence[Row], column: str, wanted: str | None, says: str) -> str:
    known = sorted({str(row[column]) for row in rows})
    if wanted is None and len(known) > 1:
        raise SettingsError(f"{says} {' and '.join(known)}: say which with --{column}")
    return known[0] if wanted is None else wanted


def _of_goal(rows: Sequence[Row], wanted: str | None) -> list[Row]:
    """The rows of one goal with one constraint, best first. `wanted` is its name, with its constraint where there are
    several: `cheapest_within_deadline 24 h`.
    """
    labels = list(dict.fromkeys(goal_text(row) for row in rows))
    found = [one for one in labels if wanted in (None, one)] or [
        one for one in labels if one.split(" ")[0] == wanted
    ]
    if not found:
        raise SettingsError(
            f"no published goal of it is {wanted!r}; {nearest_names(str(wanted), labels)}"
        )
    if len(found) > 1:
        several = ", ".join(f"--goal {one!r}" if " " in one else f"--goal {one}" for one in found)
        raise SettingsError(f"{rows[0]['workload']} has several goals, say which: {several}")
    return sorted(
        (row for row in rows if goal_text(row) == found[0]), key=lambda row: int(row["rank"])
    )


def _moment(moment: datetime) -> str:
    return f"{moment:%Y-%m-%d %H:%M} UTC"


def _money(row: Row) -> str:
    if row["usd"] is None:
        return "dollars unknown, since a price is"
    return f"${row['usd']:.4g} (90th percentile ${row['usd_p90']:.4g})"


def _chances(row: Row) -> str:
    best = "" if row["p_best"] is None else f"the best with {row['p_best']:.0%} probability"
    if row["p_meets_constraint"] is None:
        return best or "how likely it is the best is not known"
    return ", ".join(
        filter(
            None, [f"meets its constraint with {row['p_meets_constraint']:.0%} probability", best]
        )
    )
