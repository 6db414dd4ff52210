"""Fit a model, score it on held-out runs, and promote it unless it is worse than the champion."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

import pandas as pd

from models.domain.setup_table import rows_of
from models.monitoring.cross_validation import Each, fit_and_score, summarise
from models.monitoring.promotion import Promotion, verdict
from models.step_time.dataset import TrainingData, at_nominal_speed
from models.step_time.model import StepTimeModel
from warehouse import append, reads

from ..workspace.blas_threads import single_thread
from ..workspace.locking import refresh_lock
from ..workspace.workspace import Workspace, code_commit, new_refresh_id
from . import registry
from .registry import Champion, Provenance

SEED = 11


@dataclass(frozen=True, kw_only=True)
class Challenger:
    """A new model, and the decision whether it replaces the model in use.

    held_out: predictions of the runs' step times in cross-validation. Each prediction is
        made by a model that was fitted without the run.
    scoreboard: the errors of the predictions in `held_out`.
    over: version of the model in use when the models were compared; None if there was none.
    """

    model: StepTimeModel
    held_out: pd.DataFrame
    scoreboard: pd.DataFrame
    decision: Promotion
    over: int | None = None


def challenge(
    frames: Mapping[str, pd.DataFrame], champion: Champion | None, each: Each = map
) -> Challenger | None:
    """Fit a new model, score it on held-out runs, and compare it with the model in use.

    frames: the data to which models are fitted, as {name: frame}.
    champion: the model in use, or None.
    each: a function like `map` that runs the fits of the cross-validation, perhaps in parallel.

    Returns None if there are no measured runs.
    """
    data = at_nominal_speed(TrainingData(**frames))
    if not len(data.runs):
        return None
    with single_thread():
        model, held_out = fit_and_score(data, seed=SEED, each=each)
        decision = verdict(data, held_out, model, None if champion is None else champion.model)
    return Challenger(
        model=model,
        held_out=held_out,
        scoreboard=summarise(held_out),
        decision=decision,
        over=None if champion is None else champion.version,
    )


def first_champion(workspace: Workspace, now: datetime) -> Champion | None:
    """Fit a first model to the runs in the warehouse, promote the model, and return it.

    The cross-validation is skipped, because it takes a minute. Returns None if the warehouse has no
    runs. Raises Busy if a refresh is running.
    """
    refresh_id = new_refresh_id(now)
    with refresh_lock(workspace.home, refresh_id):
        frames = reads.training_frames(workspace.warehouse, workspace.provider.name)
        # The next `srift refresh` cross-validates a new model.
        challenger = challenge(frames, None, each=lambda *_: ())
        if challenger is None:
            return None
        register(workspace, challenger, frames, refresh_id, now)
    return registry.load_champion(workspace.home, workspace.provider.name)


def register(
    workspace: Workspace,
    challenger: Challenger,
    frames: Mapping[str, pd.DataFrame],
    refresh_id: str,
    now: datetime,
) -> tuple[int, Promotion]:
    """Register the new model, promote or refuse it, and return its version and the decision.

    If another version has come into use since the comparison, the models are compared again.

    frames: the data to which the new model was fitted.
    """
    home, provider = workspace.home, workspace.provider.name
    provenance = Provenance(
        training_digest=reads.training_digest(dict(frames)),
        training_rows=len(frames["runs"]),
        code_commit=code_commit(),
        seed=SEED,
        refresh_id=refresh_id,
    )
    version = registry.log_challenger(
        home,
        provider,
        challenger.model,
        scoreboard=challenger.scoreboard,
        card=card(provider, challenger, provenance, now),
        provenance=provenance,
    )
    decision, over = challenger.decision, challenger.over
    current = registry.load_champion(home, provider)
    if current is not None and current.version != over:  # promoted by another machine of the team
        data, over = at_nominal_speed(TrainingData(**frames)), current.version
        decision = verdict(data, challenger.held_out, challenger.model, current.model)
    if decision.promote:
        registry.promote(home, provider, version, decision.reason, over=over)
    else:
        registry.refuse(home, provider, version, decision.reason)
    model = {
        "training_digest": provenance.training_digest,
        "code_commit": provenance.code_commit,
        "trained_at": now,
        "promoted": decision.promote,
        "reason": decision.reason,
    }
    key = {"provider": provider, "version": str(version), "refresh_id": refresh_id}
    with workspace.warehouse.transact() as connection:
        append.append(connection, "raw_models", [model], **key)
        append.append(connection, "raw_scores", rows_of(challenger.scoreboard), **key)
    return version, decision


def card(provider: str, challenger: Challenger, provenance: Provenance, now: datetime) -> str:
    """Return a new version's model card in Markdown: its data, errors and an example call."""
    name, totals = registry.name_of(provider), challenger.scoreboard.query("group == 'all'")
    scores = "\n".join(
        f"- held out by {row['split'].replace('_', ' ')}: {row['rows']} rows, mean error"
        f" {row['mean_error']:.1%}, median {row['median_error']:.1%}, 90 % intervals cover"
        f" {row['coverage_90']:.0%}"
        for row in rows_of(totals)
    )
    return f"""# {name}
Step time of PyTorch DDP training on `{provider}` machines, fitted {now:%Y-%m-%d %H:%M} UTC on
{provenance.training_rows} measured runs (digest {provenance.training_digest}),
code {provenance.code_commit}, seed {provenance.seed}.
Workloads: {", ".join(challenger.model.workloads)}.
Instance types: {", ".join(challenger.model.instance_types)}. Any other name is refused.
Errors on groups of setups that the fit did not see:
{scores}
{challenger.decision.reason}
Use: `mlflow.pyfunc.load_model("models:/{name}@champion").predict(frame)` with text columns
`workload`, `cluster` (`2xa+1xb`), `batch_per_device` (`32+32+12`) and optionally `layout`,
`accumulation_steps`, `strategy`, `precision`, `switches`. Intervals are 90 %.
"""
