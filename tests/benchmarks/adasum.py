"""Steps to a loss with Adasum against averaging, at growing batch: does it take fewer?

`python -m tests.benchmarks.strategies --parts adasum` trains small forms of the four workloads from the same weights
with several ranks of a few samples each: averaging (one batch of all samples), Adasum of gradients, and Adasum of what
each rank's own step changed. Ranks are computed in turn in one process and combined by what nodes combine two vectors
with. The loss to reach is a part of that of the first step, in the mean of WINDOW steps.

The rate of each is tuned: of FACTORS times the workload's own the one that takes fewest steps, and of that and its
neighbours a square root of 2 away again; by the seeds TUNING, which are not scored. A score is the ratio of steps,
Adasum's over averaging's, seed by seed.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from tasks.node.entrypoint import LoadedWorkload, build
from tasks.node.precision import arithmetic
from tasks.node.record import WorkloadFile
from tasks.node.strategies.adasum import ADASUM, DELTAS, pair
from tests.benchmarks.ranks import WORKLOADS

AVERAGED = "ddp"
FACTORS = (
    4.0,
    2.0,
    8.0,
    1.0,
    16.0,
    0.5,
    32.0,
    64.0,
)  # the likely first: the others need not be trained for long
TUNING = (101, 102, 103)
WINDOW = 5
_DIVERGED = 4.0  # times the first loss
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Job:
    """A small form of a workload, samples of a rank, the loss to reach as a part of the first, and numbers of ranks."""

    arguments: dict[str, Any]
    batch: int
    target: float
    ranks: tuple[int, ...]
    most: int = 250  # steps


JOBS = {
    "wide_mlp": Job({"features": 32, "width": 64, "frames": 1}, 4, 0.5, (4, 8, 16)),
    "residual_cnn": Job({"width": 4}, 4, 0.85, (8,)),
    "transformer_lm": Job({"vocabulary": 64, "length": 12, "width": 32, "layers": 2}, 4, 0.6, (8,)),
    "recommender": Job(
        {"fields": 4, "rows": 300, "width": 8, "recent": 10, "hidden": 32}, 8, 0.6, (4, 8, 16)
    ),
}


def loaded(name: str, seed: int, factor: float) -> LoadedWorkload:
    """A workload in its small form, with its optimizer's rates `factor` times their own."""
    file = WorkloadFile(
        name=name,
        digest=name,
        file=f"{name}.py",
        function="build",
        arguments=dict(JOBS[name].arguments),
    )
    built = build(WORKLOADS, file, seed=seed, rank=0, computing=arithmetic("fp32", _CPU))
    for group in built.optimizer.param_groups:
        group["lr"] *= factor
    return built


def adasum_of(vectors: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """(n,) what 2^m ranks with one vector (n,) each have of them."""
    found = list(vectors)
    while len(found) > 1:
        found = [pair(a, b, sizes) for a, b in zip(found[::2], found[1::2], strict=True)]
    return found[0]


def trainer(name: str, how: str, *, ranks: int, seed: int, factor: float) -> Callable[[], float]:
    """A step of all ranks; it returns their mean loss before it."""
    batch = JOBS[name].batch
    copies = [loaded(name, seed, factor) for _ in range(ranks if how == DELTAS else 1)]
    models = [one.model for one in copies]
    weights = [list(one.parameters()) for one in models]
    sizes = [one.numel() for one in weights[0]]
    torch.manual_seed(1000 + seed)  # of the batches, alike in every way of training

    def flat(tensors: Iterable[Tensor]) -> Tensor:
        return torch.cat([one.detach().reshape(-1) for one in tensors])

    def gradient(one: LoadedWorkload, samples: int) -> float:
        one.optimizer.zero_grad()
        loss = one.loss_of(one.model, samples)
        loss.backward()  # type: ignore[no-untyped-call]
        return float(loss.detach())

    def averaged() -> float:
        loss = gradient(copies[0], ranks * batch)
        copies[0].optimizer.step()
        return loss

    def of_gradients() -> float:
        losses, found = [], []
        for _ in range(ranks):
            losses.append(gradient(copies[0], batch))
            found.append(flat(one.grad for one in weights[0] if one.grad is not None))
        for one, value in zip(weights[0], torch.split(adasum_of(found, sizes), sizes), strict=True):
            one.grad = value.view(one.shape)
        copies[0].optimizer.step()
        return fmean(losses)

    @torch.no_grad()
    def put(now: Tensor) -> None:
        for own in weights:
            for one, value in zip(own, torch.split(now, sizes), strict=True):
                one.copy_(value.view(one.shape))

    def of_deltas() -> float:
        before, losses, found = flat(weights[0]), [], []
        for one, own in zip(copies, weights, strict=True):
            losses.append(gradient(one, batch))
            one.optimizer.step()
            found.append(flat(own) - before)
        put(before + adasum_of(found, sizes))
        return fmean(losses)

    return {AVERAGED: averaged, DELTAS: of_deltas}.get(how, of_gradients)


def steps_to_target(
    name: str, how: str, *, ranks: int, seed: int, factor: float, most: float = math.inf
) -> float:
    """Steps until the loss is reached; infinite where it is not within `most` and the job's own limit."""
    job, recent = JOBS[name], deque[float](maxlen=WINDOW)
    step = trainer(name, how, ranks=ranks, seed=seed, factor=factor)
    first = 0.0
    for done in range(int(min(most, job.most))):
        loss = step()
        first = first or loss
        if not loss < _DIVERGED * first:
            return math.inf
        recent.append(loss)
        if len(recent) == WINDOW and fmean(recent) <= job.target * first:
            return done + 1.0
    return math.inf


def tuned(name: str, how: str, ranks: int) -> float:
    """The factor with fewest steps over TUNING."""

    def best(factors: Iterable[float], seeds: Sequence[int]) -> float:
        found, least = FACTORS[0], math.inf
        for factor in factors:
            total = 0.0
            for seed in seeds:
                if not total < least:
                    break
                total += steps_to_target(
                    name, how, ranks=ranks, seed=seed, factor=factor, most=least - total
                )
            if total < least:
                found, least = factor, total
        return found

    coarse = best(FACTORS, TUNING[:1])
    return best((coarse, coarse * math.sqrt(2), coarse / math.sqrt(2)), TUNING)


def adasum_steps(names: Iterable[str], *, seeds: int = 5) -> pd.DataFrame:
    """A row a workload, number of ranks and form of Adasum: rates, mean steps, and the ratio of steps over seeds.

    `ratio` is the mean over seeds, `sd` its standard deviation; infinite and NaN where Adasum did not reach the loss.
    """
    rows = []
    for name in names:
        for many in JOBS[name].ranks:
            steps: dict[str, list[float]] = {}
            factors: dict[str, float] = {}
            for how in (AVERAGED, *ADASUM):
                factors[how] = tuned(name, how, many)
                steps[how] = [
                    steps_to_target(name, how, ranks=many, seed=seed, factor=factors[how])
                    for seed in range(seeds)
                ]
                if how == AVERAGED:
                    continue
                most = float(
                    JOBS[name].most
                )  # where averaging takes more it counts as that: too few, if anything
                ratios = [
                    own / min(plain, most)
                    for own, plain in zip(steps[how], steps[AVERAGED], strict=True)
                ]
                row: dict[str, Any] = {
                    "workload": name,
                    "ranks": many,
                    "batch": many * JOBS[name].batch,
                    "form": how,
                }
                row |= {"ddp_rate": factors[AVERAGED], "rate": factors[how]}
                row |= {"ddp_steps": fmean(steps[AVERAGED]), "steps": fmean(steps[how])}
                finite = all(math.isfinite(one) for one in ratios)
                row |= {
                    "ratio": fmean(ratios),
                    "sd": stdev(ratios) if finite and len(ratios) > 1 else math.nan,
                }
                rows.append(row)
                print(pd.DataFrame([row]).to_string(header=len(rows) == 1, index=False), flush=True)
    return pd.DataFrame(rows)
