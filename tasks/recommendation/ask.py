"""Answer a reader: one question put to the champion over the newest prices."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

import pandas as pd

from models.domain.cluster import Cluster, Offer
from models.domain.setup_table import rows_of
from models.domain.suggestions import nearest_names
from models.domain.workload import Goal, Workload
from models.planner.choice_rule import row_misses
from warehouse.database import WarehouseMissing
from warehouse.reads import mart, measured_setups

from ..data_files.imports import asked_of_public
from ..data_files.public import only_public
from ..market.offers import OffersWanted, current_offers, note_definitions, snapshot_offers
from ..reporting.progress import reporter
from ..training.registry import Champion, load_champion
from ..training.train import first_champion
from ..workspace.blas_threads import one_thread
from ..workspace.settings import IMPORTED, SettingsError
from ..workspace.workspace import Workspace, new_refresh_id, open_workspace, refresh_command
from .known_workloads import known_elsewhere
from .pilots import pilots_for
from .recommend import Case, plan_one


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A workload and one constraint, in hours or dollars; `p_required` where it must be met with that probability.

    `samples` and `batch` come before those of srift.toml. Only `machines` are compared.
    """

    workload: str
    hours: float | None
    usd: float | None
    p_required: float | None = None
    samples: int | None = None
    batch: int | None = None
    machines: OffersWanted = field(default_factory=OffersWanted)


def answer(
    provider: str, question: Question, *, top: int, pilots: int = 0, by_device: bool = False
) -> list[dict[str, Any]]:
    """Rows for one workload and one constraint, best first.

    The first one also holds, as `frontier`, every setup that no other beats in both expected hours and dollars,
    whatever the constraint; how many `candidates` there were; the `pilots` that would tell most, or why none can be
    named (None where none was asked for); what was `not_compared`, since its device was never measured on; and
    where asked for `by_device`, the first row of each device alone, by expected dollars or hours.
    A workload of the public step times is answered for from these, which are loaded, and a first model fitted on them,
    where that was never done. Raises SettingsError on an unknown workload, or one of which too little is known,
    WarehouseMissing where no model is in force yet, and ProviderError where none of the machines is on offer.
    """
    workspace = asked_of_public(open_workspace(provider), question.workload, datetime.now(UTC))
    champion = load_champion(workspace.home, provider)
    if champion is None and only_public(workspace.warehouse, provider, question.workload):
        champion = _fitted_on_public(workspace)
    asked = _asked(workspace, question)
    if champion is None:
        raise WarehouseMissing(
            f"no model of {provider} machines is in force yet: run `{refresh_command(provider, '0')}` first"
        )
    if question.workload not in workspace.settings.workloads:
        measured = champion.model.modes_of(question.workload)
        asked = replace(
            asked, modes=measured or asked.modes
        )  # no one says that it does not tolerate them
    everything = current_offers(workspace)
    offers = question.machines.among(everything)
    runs = measured_setups(workspace.warehouse, provider, question.workload)
    with one_thread():
        case = Case.of(workspace, champion, asked, offers)
        found = plan_one(case, runs, top=top)
        each = {"by_device": _by_device(case, runs)} if by_device else {}
    first, *others = (row for row in found.rows if row["goal"] == asked.goals[0].goal)
    buyable = replace(
        question.machines,
        filters=tuple(one for one in question.machines.filters if one[0] != "market"),
    )
    pilot_runs = (
        pilots_for(case, found, buyable=buyable.among(everything), count=pilots) if pilots else None
    )
    more = {"frontier": found.frontier, "candidates": found.candidates, "pilots": pilot_runs} | each
    return [first | more | {"not_compared": _not_compared(case)}, *others]


def _by_device(case: Case, runs: pd.DataFrame) -> list[dict[str, Any]]:
    """The first row of clusters of each device alone, with `device` and what it is `known_by`, by expected dollars or
    hours. What sooner misses the constraint than it may comes last, and what nothing is found on.
    """
    goal = case.workload.goals[0]
    measure = "hours" if goal.usd is not None else "usd"  # what is wanted little of
    rows = []
    for device in sorted({one.instance_type.device for one in case.known}):
        guessed = device in case.by_data_sheet
        own = replace(
            case,
            known=[one for one in case.known if one.instance_type.device == device],
            by_data_sheet=[device] if guessed else [],
            left_out=[],
        )
        first = next(row for row in plan_one(own, runs, top=1).rows if row["goal"] == goal.goal)
        known_by = (
            "a first guess" if case.guessed else "data sheet alone" if guessed else "runs on it"
        )
        rows.append({"device": device, "known_by": known_by} | first)
    return sorted(
        rows, key=lambda row: (not row["cluster"], row_misses(row), row[measure] or math.inf)
    )


def _fitted_on_public(workspace: Workspace) -> Champion | None:
    """The first model of this home, of what was loaded, with the prices of now."""
    now = datetime.now(UTC)
    reporter().say(
        f"no model of {workspace.provider.name} machines is in force yet: fitting one on public step times, once"
    )
    note_definitions(workspace, now)
    reporter().say(snapshot_offers(workspace, new_refresh_id(now), now, buying=False))
    return first_champion(workspace, now)


def _not_compared(case: Case) -> list[dict[str, Any]]:
    """Of each device of which nothing is known, the cheapest machine: a run on it would include the device."""
    cheapest: dict[str, Offer] = {}
    for offer in sorted(
        case.offers, key=lambda one: (one.usd_per_hour is None, one.total_usd_per_hour or 0.0)
    ):
        cheapest.setdefault(offer.instance_type.device, offer)
    return [
        {
            "device": device,
            "cluster": Cluster(members=(cheapest[device],)).name,
            "market": cheapest[device].market,
            "usd_per_hour": cheapest[device].usd_per_hour,
        }
        for device in case.left_out
    ]


def _asked(workspace: Workspace, question: Question) -> Workload:
    """The question's workload, of srift.toml or of an import, with the question's goal alone."""
    goal = "cheapest_within_deadline" if question.hours is not None else "fastest_within_budget"
    if question.workload in workspace.settings.workloads:
        known = workspace.settings.workload(question.workload)
    else:
        known = _imported(workspace, question)
    if question.batch:
        known = replace(known, global_batch_least=question.batch, global_batch_most=question.batch)
    asked = Goal(
        goal=goal,
        hours=question.hours,
        usd=question.usd,
        p_required=question.p_required,
        overshoot_price=workspace.settings.choice.overshoot_price,
    )
    return replace(known, samples=question.samples or known.samples, goals=(asked,))


def _imported(workspace: Workspace, question: Question) -> Workload:
    """A workload that srift.toml does not name, from what was imported. Raises SettingsError naming what is missing."""
    name = question.workload
    try:
        facts = rows_of(
            mart(
                workspace.warehouse, "workloads", provider=workspace.provider.name, digest=IMPORTED
            )
        )
    except WarehouseMissing:
        facts = []
    mine = next((row for row in facts if row["workload"] == name), None)
    if mine is None:
        elsewhere = known_elsewhere(workspace.warehouse, name, workspace.provider.name)
        if elsewhere:
            raise SettingsError(elsewhere)
        known = {*workspace.settings.workloads, *(str(row["workload"]) for row in facts)}
        raise SettingsError(f"unknown workload {name!r}; {nearest_names(name, known)}")
    samples = question.samples or (None if pd.isna(mine["samples"]) else int(mine["samples"]))
    if samples is None or question.batch is None:
        raise SettingsError(
            f"{name!r} is known by imported measurements only: say how many samples it must see, in what global batch"
            f" (--samples N --batch B), or state `samples` and `global_batch` under [workloads.{name}] in srift.toml"
        )
    return Workload(
        name=name,
        digest=IMPORTED,
        samples=samples,
        global_batch_least=question.batch,
        global_batch_most=question.batch,
        goals=(),
    )
