"""Answer a reader: one question put to the champion over the newest prices."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from models.identity import rows_of
from models.workload import Goal, Workload
from warehouse.database import WarehouseMissing
from warehouse.reads import mart

from .installation import Installation, offers_of_market, open_installation
from .nearest import nearest
from .pilots import pilots_for
from .prices import current_offers
from .providers.base import ProviderError
from .recommend import plan_one
from .registry import load_champion, older_champion, older_sentence
from .settings import IMPORTED, SettingsError


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A workload and one constraint, in hours or dollars. `samples` and `batch` come before those of srift.toml."""

    workload: str
    hours: float | None
    usd: float | None
    samples: int | None = None
    batch: int | None = None


def answer(provider: str, question: Question, *, market: str, top: int, pilots: int = 0) -> list[dict[str, Any]]:
    """Rows for one workload and one constraint, best first.

    The first one also holds, as `frontier`, every setup that no other beats in both expected hours and dollars,
    whatever the constraint; how many `candidates` there were; and the `pilots` that would tell most, or why none
    can be named (None where none was asked for).
    Raises SettingsError on an unknown workload, or one of which too little is known, WarehouseMissing where no
    model is in force yet, and ProviderError where nothing is on offer on `market`.
    """
    here = open_installation(provider)
    asked = _asked(here, question)
    champion = load_champion(here.home, provider)
    if champion is None:
        older = older_champion(here.home, provider)
        if older is not None:
            raise WarehouseMissing(older_sentence(provider, older))
        cap = "" if provider == "local" else f" --provider {provider} --max-usd 0"
        raise WarehouseMissing(f"no model of {provider} machines is in force yet: run `srift refresh{cap}` first")
    everything = current_offers(here)
    offers = offers_of_market(everything, market)
    if everything and not offers:
        raise ProviderError(f"no price on the {market} market of {provider} is known: ask with --market any")
    runs = mart(here.warehouse, "runs", provider=provider)
    found = plan_one(here, champion, asked, offers, runs, top=top)
    first, *others = (row for row in found.rows if row["goal"] == asked.goals[0].goal)
    told = None
    if pilots:
        told = pilots_for(here, champion, asked, offers, buyable=everything, count=pilots, found=found)
    return [first | {"frontier": found.frontier, "candidates": found.candidates, "pilots": told}, *others]


def _asked(here: Installation, question: Question) -> Workload:
    """The question's workload, of srift.toml or of an import, with the question's goal alone."""
    goal = "cheapest_within_deadline" if question.hours is not None else "fastest_within_budget"
    if question.workload in here.settings.workloads:
        known = here.settings.workload(question.workload)
    else:
        known = _imported(here, question)
    if question.batch:
        known = replace(known, global_batch_least=question.batch, global_batch_most=question.batch)
    goals = (Goal(goal=goal, hours=question.hours, usd=question.usd),)
    return replace(known, samples=question.samples or known.samples, goals=goals)


def _imported(here: Installation, question: Question) -> Workload:
    """A workload that srift.toml does not name, from what imports told. Raises SettingsError naming what is missing."""
    name = question.workload
    try:
        facts = rows_of(mart(here.warehouse, "workloads", provider=here.provider.name, digest=IMPORTED))
    except WarehouseMissing:
        facts = []
    mine = next((row for row in facts if row["workload"] == name), None)
    if mine is None:
        known = {*here.settings.workloads, *(str(row["workload"]) for row in facts)}
        raise SettingsError(f"unknown workload {name!r}; {nearest(name, known)}")
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
