"""The published rows that an export uses: the requested rank and those below it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from models.domain.cluster import ANY_ZONE, parse_cluster, parse_numbers
from models.domain.suggestions import nearest_names
from models.planner.choice_rule import row_misses
from warehouse.export import STALE_AFTER_H

from ...reporting.progress import goal_text
from ...reporting.tables import cautions_in
from ...workspace.settings import SettingsError
from ...workspace.workspace import capabilities, refresh_command

Row = Mapping[str, Any]
PORT = 29500  # torchrun's default


class ExportRefused(Exception):
    """The target cannot represent the recommendation."""

    exit_code = 1


@dataclass(frozen=True, slots=True)
class RankedCluster:
    """A published row with its cluster. `layout` and `batches` have one entry for each machine."""

    row: Row
    layout: tuple[int, ...]
    batches: tuple[int, ...]

    @classmethod
    def of(cls, row: Row) -> RankedCluster:
        machines = len(parse_cluster(str(row["cluster"])))
        return cls(
            row,
            parse_numbers(str(row["layout"]), machines, "layout"),
            parse_numbers(str(row["batch_per_device"]), machines, "batch_per_device"),
        )

    @property
    def machines(self) -> int:
        return len(self.layout)

    @property
    def rank(self) -> int:
        return int(self.row["rank"])

    @property
    def types(self) -> list[str]:
        return list(dict.fromkeys(str(offer["instance_type"]) for offer in self.offers))

    @property
    def offers(self) -> Sequence[Row]:
        """Groups of machines: `instance_type`, `count`, `market`, `zone`, `usd_per_hour`."""
        offers: Sequence[Row] = self.row["cluster_offers"]
        return offers

    @property
    def market(self) -> str:
        return str(self.offers[0]["market"])

    @property
    def zone(self) -> str | None:
        """The zone of the price; None if it holds in the whole region."""
        zone = str(self.offers[0]["zone"])
        return None if zone == ANY_ZONE else zone

    @property
    def name(self) -> str:
        return f"{self.row['cluster']} ({self.market})"

    @property
    def misses(self) -> bool:
        return row_misses(self.row)

    @property
    def training(self) -> tuple[object, ...]:
        """Equal for two clusters that the same command trains."""
        columns = ("accumulation_steps", "precision", "strategy", "switches")
        return self.layout, self.batches, *(self.row[name] for name in columns)

    @property
    def environment(self) -> dict[str, str]:
        """Variables for a training script."""
        columns = ("batch_per_device", "accumulation_steps", "precision", "strategy", "switches")
        return {f"SRIFT_{name.upper()}": str(self.row[name]) for name in columns}


@dataclass(frozen=True, slots=True)
class Selection:
    """The requested rank, and all ranks of its goal in order."""

    first: RankedCluster
    ranks: Sequence[RankedCluster]
    now: datetime

    @property
    def candidates(self) -> list[RankedCluster]:
        """The requested rank, then lower ranks that do not miss the constraint."""
        below = [one for one in self.ranks if one.rank > self.first.rank and not one.misses]
        return [self.first, *below]

    @property
    def interchangeable(self) -> list[RankedCluster]:
        """The candidates of one instance type that the same command trains."""
        training = self.first.training
        return [one for one in self.candidates if len(one.types) == 1 and one.training == training]

    def require_one_type(self, target: str) -> None:
        """Raise ExportRefused if the requested rank has several instance types."""
        if len(self.first.types) == 1:
            return
        possible = [one for one in self.ranks if len(one.types) == 1]
        best = min(possible, key=lambda one: (one.misses, one.rank), default=None)
        instead = "" if best is None else f"--rank {best.rank} exports {best.name}. "
        raise ExportRefused(
            f"{target} needs machines of one type, but {self.first.name} has several. {instead}"
            "`--to sagemaker` and `--to torchrun` support several types"
        )

    def require_cloud(self, target: str) -> None:
        """Raise ExportRefused for local hosts."""
        if capabilities(str(self.first.row["provider"])).simulated:
            raise ExportRefused(
                f"{target} cannot start {self.first.name}, which runs on this computer."
                " Use `--to torchrun` or `--provider ec2`"
            )

    @property
    def about(self) -> list[str]:
        """Lines that describe the recommendation, its prediction and its age."""
        row = self.first.row
        usd = "unknown" if row["usd"] is None else f"${row['usd']:.4g}"
        usd_p90 = "" if row["usd"] is None else f" (90th percentile ${row['usd_p90']:.4g})"
        chances = {"meet the constraint": "p_meets_constraint", "be the best": "p_best"}
        return [
            f"{row['workload']}, {goal_text(row)}: rank {self.first.rank}, {self.first.name}"
            f" in {row['region']}",
            f"publication {row['publication_id']} of {row['published_at']:%Y-%m-%d %H:%M} UTC"
            f" (provider {row['provider']}, model version {row['model_version']})",
            f"predicted: {row['hours']:.3g} hours (90th percentile {row['hours_p90']:.3g}),"
            f" {usd}{usd_p90}; a step {row['step_s']:.3g} s"
            f" (90 % interval {row['step_low_s']:.3g} to {row['step_high_s']:.3g})",
            *(
                f"probability to {what}: {row[column]:.0%}"
                for what, column in chances.items()
                if row[column] is not None
            ),
            f"prices as of {row['price_as_of']:%Y-%m-%d %H:%M} UTC,"
            f" {self._age_days('price_as_of'):.1f} days before this export",
            f"training: {row['strategy']} in {row['precision']}, switches {row['switches']};"
            f" global batch {row['global_batch']} = devices {row['layout']} x batch"
            f" {row['batch_per_device']} x {row['accumulation_steps']} micro-steps",
            *(f"caution: {caution}" for caution in cautions_in([str(row["reason"])])),
        ]

    @property
    def warnings(self) -> list[str]:
        row, warnings = self.first.row, []
        if self._age_days("published_at") * 24 > STALE_AFTER_H:
            renew = refresh_command(str(row["provider"]), "0")
            age = self._age_days("published_at")
            warnings.append(f"the publication is {age:.1f} days old: `{renew}` renews it")
        if self._age_days("price_as_of") * 24 > STALE_AFTER_H:
            warnings.append(f"its prices are {self._age_days('price_as_of'):.1f} days old")
        if self.first.misses:
            chance = f"{row['p_meets_constraint']:.0%}"
            warnings.append(f"rank {self.first.rank} meets its constraint with {chance} only")
        return warnings

    def _age_days(self, column: str) -> float:
        moment: datetime = self.first.row[column]
        return max(0.0, (self.now - moment).total_seconds() / 86400)


def select(
    rows: Sequence[Row],
    workload: str,
    now: datetime,
    *,
    goal: str | None = None,
    provider: str | None = None,
    rank: int = 1,
) -> Selection:
    """Return the requested published row and the other ranks of its goal.

    Raises:
        SettingsError: the names match no row, or rows of several goals or providers.
        ExportRefused: no cluster meets the goal.
    """
    rows = _matching(rows, "workload", {str(row["workload"]) for row in rows}, workload)
    rows = _matching(rows, "provider", {str(row["provider"]) for row in rows}, provider)
    goals = list(dict.fromkeys(goal_text(row) for row in rows))
    matches = [one for one in goals if goal in (None, one)]
    matches = matches or [one for one in goals if one.split(" ")[0] == goal]
    if len(matches) != 1:
        known = ", ".join(f"--goal {one!r}" for one in matches or goals)
        raise SettingsError(f"{workload} has several goals. Choose one: {known}")
    rows = [row for row in rows if goal_text(row) == matches[0]]
    if rows[0]["status"] == "infeasible":
        raise ExportRefused(f"no cluster meets {workload}, {matches[0]}: {rows[0]['reason']}")
    ranks = [RankedCluster.of(row) for row in rows if row["cluster"] is not None]
    ranks.sort(key=lambda one: one.rank)
    first = next((one for one in ranks if one.rank == rank), None)
    if first is None:
        raise SettingsError(f"{matches[0]} has no rank {rank}: ranks 1 to {len(ranks)} exist")
    return Selection(first, ranks, now)


def _matching(
    rows: Sequence[Row], column: str, known: set[str], wanted: str | None
) -> Sequence[Row]:
    if wanted is None and len(known) > 1:
        raise SettingsError(f"rows exist for {' and '.join(sorted(known))}: add --{column}")
    if wanted is not None and wanted not in known:
        raise SettingsError(f"no published {column} {wanted!r}; {nearest_names(wanted, known)}")
    return [row for row in rows if wanted in (None, row[column])]


def as_comment(lines: Sequence[str]) -> str:
    return "".join(f"# {' '.join(line.split())}\n" for line in lines)
