"""Answer a user's question about one workload, with the model in use and the newest prices."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import product
from typing import Any

import pandas as pd

from models.domain.transformer import USUAL_TOKENS
from models.domain.workload import SWITCHES, Goal, Mode, Workload
from models.planner.choice_rule import row_misses
from warehouse.database import WarehouseMissing
from warehouse.reads import measured_setups

from ..data_files.imports import load_public_if_needed
from ..data_files.public import PROVIDER, only_public, with_public_workloads
from ..market.offers import (
    Filters,
    current_offers,
    filter_offers,
    note_definitions,
    snapshot_offers,
    with_facts,
)
from ..reporting.progress import reporter
from ..training.registry import Champion, load_champion
from ..training.train import first_champion
from ..workspace.blas_threads import single_thread
from ..workspace.settings import IMPORTED, SettingsError
from ..workspace.workspace import Workspace, new_refresh_id, open_workspace, refresh_command
from .case import Case, Row, devices_of
from .known_workloads import unknown
from .pilots import measure_first, pilots_for

# The strategies to compare for a transformer that is given by its shape alone.
_STRATEGIES = ("ddp", "zero1", "zero2", "fsdp")
# A workload that is not in srift.toml. 0 means unknown.
_UNKNOWN = Workload(
    name="", digest=IMPORTED, samples=0, global_batch_least=0, global_batch_most=0, goals=()
)


@dataclass(frozen=True, kw_only=True)
class Question:
    """A user's question: a workload, one goal, and filters of the offers to compare.

    samples: samples of the whole job. None means the value in srift.toml. For an imported workload,
        None means the imported value.
    tokens: tokens of the whole job, for a transformer. They replace `samples`.
    batch: global batch. None means the value in srift.toml.
    transformer: facts (layers, FLOPs, ...) of a transformer that is not in srift.toml.
    by_gpu: if True, the answer has the best cluster of each kind of device.
    filters: (column, text) pairs, such as ("region", "us-east-1"). `filter_offers` applies them to
        the offers.
    """

    workload: str
    goal: Goal
    samples: int | None = None
    tokens: float | None = None
    batch: int | None = None
    transformer: Mapping[str, float] | None = None
    by_gpu: bool = False
    filters: Filters = ()


def answer(provider: str, question: Question, *, top: int, pilots: int = 0) -> list[dict[str, Any]]:
    """Return the rows that answer the question, best first.

    With `question.by_gpu`, there is one row for each kind of device. Otherwise there are at most
    `top` rows, and the first row has three additional keys:

        frontier: the Pareto frontier of expected hours and dollars.
        candidates: the number of candidates.
        pilots: a dictionary with at most `pilots` suggested measurements, and the reason to make
            them; None if the argument `pilots` is 0.

    Without a model, a first model is fitted to the public step times that ship with Srift. This
    happens only if the workload is a transformer on EC2, or if all its step times are public.

    Raises:
        SettingsError: if the workload is unknown, or its samples or global batch are unknown.
        WarehouseMissing: if there is no model and none was fitted.
        ProviderError: if no offer passes the question's filters.
    """
    name, shape, workspace = question.workload, question.transformer, open_workspace(provider)
    section = workspace.settings.workloads.get(name)
    has_shape = provider == PROVIDER and bool(shape or (section and section.transformer))
    load_public_if_needed(workspace, name, shape=has_shape)
    with single_thread():
        champion = load_champion(workspace.home, provider)
        if champion is None and (has_shape or only_public(workspace, name)):
            champion = _fitted_on_public(with_public_workloads(workspace))
        with workspace.warehouse.read():
            workspace = with_public_workloads(workspace)
            facts = workspace.mart("workloads", workload=name)
        # This reads all files of the workload's code and data.
        workload = _workload(workspace, question, facts)
        if champion is None:
            raise WarehouseMissing(
                f"there is no model of {provider} machines yet: run"
                f" `{refresh_command(provider, '0')}`"
            )
        # Imports do not state allowed modes, so all measured modes are allowed.
        if name not in workspace.settings.workloads and not shape:
            workload = replace(workload, modes=champion.model.modes_of(name) or workload.modes)
        # Opening the warehouse again for each read would be slow. Planning is slow, too, so the
        # warehouse is closed before, and other processes can write.
        with workspace.warehouse.read():
            offers = current_offers(workspace)
            runs = measured_setups(workspace.warehouse, provider, [name])
            case = Case.of(
                workspace, champion, workload, filter_offers(offers, question.filters), runs
            )
        if question.by_gpu:
            return _by_gpu(case)
        plan, suggestions = case.plan(top=top), None
        first, *others = plan.rows[:top]
        if pilots:
            buyable = filter_offers(
                offers, [pair for pair in question.filters if pair[0] != "market"]
            )
            suggestions = pilots_for(case, plan, buyable=buyable, count=pilots)
            for run in suggestions["runs"]:
                del run["planned"]
            first = measure_first(first, suggestions)
    first |= {"frontier": plan.frontier, "candidates": plan.candidates, "pilots": suggestions}
    return [first, *others]


def _by_gpu(case: Case) -> list[Row]:
    """Return a row for each kind of device: the best cluster of machines with this device.

    Rows that probably meet the deadline or budget come first. Rows without a cluster come last, and
    their column `reason` says why no cluster was found.
    """
    rows = []
    for device in sorted(devices_of(case.offers)):
        offers, known = (
            [offer for offer in group if offer.instance_type.device == device]
            for group in (case.offers, case.known)
        )
        (row,) = replace(case, offers=offers, known=known).plan(top=1).rows
        rows.append(row | {"device": device, "reason": f"{device}: {row['reason']}"})
    aim = case.workload.goals[0].objective
    rows.sort(key=lambda row: (not row["cluster"], row_misses(row), row[aim]))
    return [row | {"rank": place} for place, row in enumerate(rows, 1)]


def _fitted_on_public(workspace: Workspace) -> Champion | None:
    """Store the current prices, fit a first model to the public step times, and promote the model.

    Returns the promoted model, or None if the warehouse has no step times.
    """
    now, name = datetime.now(UTC), workspace.provider.name
    reporter().say(
        f"there is no model of {name} machines yet: fitting a model to public step times"
    )
    note_definitions(workspace, now)
    reporter().say(snapshot_offers(workspace, new_refresh_id(now), now))
    return first_champion(workspace, now)


def _workload(workspace: Workspace, question: Question, facts: pd.DataFrame) -> Workload:
    """Return the workload of the question, with the question's goal as its only goal.

    facts: the workload's rows of the mart `workloads`.

    Raises:
        SettingsError: if the workload, its samples or its global batch are unknown, or if tokens
            are given for a workload without a known sequence length.
    """
    name, settings = question.workload, workspace.settings
    if question.transformer:
        workload = _transformer(name, question.transformer)
    elif name in settings.workloads:
        workload = settings.workload(name)
    else:
        imported_samples = facts.loc[facts["digest"] == IMPORTED, "samples"].fillna(0)
        if imported_samples.empty:
            raise unknown(workspace, name)
        workload = replace(_UNKNOWN, name=name, samples=int(imported_samples.iloc[0]))
    workload = with_facts(workload, facts)
    samples, batch = (
        question.samples or workload.samples,
        question.batch or workload.global_batch_least,
    )
    if question.tokens:
        if workload.sequence is None:
            raise SettingsError(
                f"{name!r} has no known sequence length: give --samples, not --tokens"
            )
        samples = math.ceil(question.tokens / workload.sequence)
    if not (batch and samples):
        raise SettingsError(
            f"the samples or the global batch of {name!r} are unknown: add --samples N (or --tokens"
            f" N) and --batch B, or set `samples` and `global_batch` under [workloads.{name}]"
        )
    return replace(
        workload,
        samples=samples,
        global_batch_least=batch,
        global_batch_most=question.batch or workload.global_batch_most,
        goals=(replace(question.goal, overshoot_price=settings.choice.overshoot_price),),
    )


def _transformer(name: str, facts: Mapping[str, Any]) -> Workload:
    """Return a workload for the transformer with the given facts (layers, FLOPs, ...).

    The workload allows bf16 with each of _STRATEGIES, with and without activation checkpointing.
    The global batch has about USUAL_TOKENS tokens. It is a power of two, because many clusters can
    split a power of two evenly. The number of samples is 0 (unknown).
    """
    batch = 2 ** max(0, round(math.log2(USUAL_TOKENS / facts["sequence"])))
    modes = tuple(Mode("bf16", *parts) for parts in product(_STRATEGIES, SWITCHES[:2]))
    batches = {"global_batch_least": batch, "global_batch_most": batch}
    return replace(_UNKNOWN, name=name, modes=modes, **batches, **facts)
