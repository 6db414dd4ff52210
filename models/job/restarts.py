"""Seconds that an elastic job loses with a machine, and how long it takes with such losses.

    log seconds = mu_outcome + u_type + noise     from the loss to the first step after it, less reading the checkpoint
    'fewer': those left go on      'replaced': another machine took the place of the lost one before

mu is normal about the log of the stated prior and u about 0, by the conjugate normal. A job of pieces of K steps, each
followed by a checkpoint, that loses a machine at a moment, goes on from the last whole checkpoint after these seconds
and those of reading it, with steps as fast as its machines then make them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from ..domain.numeric import FloatArray
from .duration import REPLACEMENT_S

# Before any: what torchrun's elastic mode took in first trials on local hosts, 10 s after a kill; with another machine
# as `duration.REPLACEMENT_S`. Elsewhere it may be half or twice that.
PRIOR_S: Mapping[str, float] = {"fewer": 10.0, "replaced": REPLACEMENT_S}
NOTICED_S = 5.0  # until a silent machine counts as lost: _ALIVE_EVERY_S _ALIVE_MISSED of tasks/node/agent.py
_OUTCOME_SD, _TYPE_SD, _NOISE_SD = 0.7, 0.3, 0.2  # in logs; the last of one restart
_SPREAD_WEIGHT = 6.0  # restarts that the prior of the spread counts as
_DRAWS = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartModel:
    """Of each outcome the log median with its doubt, of all types and of those that were seen; `spread` of restarts.

    `seen` are the outcomes that were measured, on whatever type.
    """

    outcomes: Mapping[str, tuple[float, float]] = field(
        default_factory=lambda: {
            name: (math.log(seconds), _OUTCOME_SD) for name, seconds in PRIOR_S.items()
        }
    )
    types: Mapping[tuple[str, str], tuple[float, float]] = field(default_factory=dict)
    spread: float = _NOISE_SD

    @property
    def seen(self) -> frozenset[str]:
        """Outcomes that were measured, on whatever type."""
        return frozenset(outcome for outcome, _ in self.types)

    def seconds(self, outcome: str, types: Sequence[str]) -> FloatArray:
        """(types,) expected seconds. Raises ValueError for an unknown outcome."""
        if outcome not in self.outcomes:
            raise ValueError(f"outcome {outcome!r} is none of {', '.join(self.outcomes)}")
        middle, doubt = self.outcomes[outcome]
        unseen = (middle, float(np.hypot(doubt, _TYPE_SD)))
        known = np.array([self.types.get((outcome, name), unseen) for name in types]).reshape(-1, 2)
        return np.asarray(
            np.exp(known[:, 0] + (known[:, 1] ** 2 + self.spread**2) / 2), dtype=float
        )


def fit_restarts(restarts: pd.DataFrame) -> RestartModel:
    """Learned from `restarts`: outcome, instance_type, seconds, one row a restart; other outcomes count for nothing.

    Raises ValueError where seconds are not above 0.
    """
    if not len(restarts):
        return RestartModel()
    if not (restarts["seconds"].to_numpy(dtype=float) > 0).all():
        raise ValueError("seconds of restarts must be above 0")
    known = restarts[restarts["outcome"].isin(list(PRIOR_S))]
    groups = {
        (str(outcome), str(name)): np.log(rows["seconds"].to_numpy(dtype=float))
        for (outcome, name), rows in known.groupby(["outcome", "instance_type"])
    }
    apart = sum(float(np.sum((logs - logs.mean()) ** 2)) for logs in groups.values())
    free = sum(len(logs) - 1 for logs in groups.values())
    spread = math.sqrt((apart + _SPREAD_WEIGHT * _NOISE_SD**2) / (free + _SPREAD_WEIGHT))
    outcomes = {name: _outcome(name, groups, spread) for name in PRIOR_S}
    types = {}
    for (outcome, name), logs in groups.items():
        middle, doubt = _outcome(
            outcome, groups, spread, without=name
        )  # its own restarts count once
        prior, noise = doubt**2 + _TYPE_SD**2, spread**2 / len(logs)
        part = prior / (prior + noise)
        types[outcome, name] = (
            middle + part * (float(logs.mean()) - middle),
            math.sqrt(part * noise),
        )
    return RestartModel(outcomes=outcomes, types=types, spread=spread)


def _outcome(
    name: str,
    groups: Mapping[tuple[str, str], FloatArray],
    spread: float,
    without: str | None = None,
) -> tuple[float, float]:
    """(log median, doubt) of an outcome over types, `without` one: their means, each by what is known of it, and the
    prior.
    """
    own = [logs for (outcome, kind), logs in groups.items() if outcome == name and kind != without]
    weights = np.array([1 / (_TYPE_SD**2 + spread**2 / len(logs)) for logs in own])
    means = np.array([float(logs.mean()) for logs in own])
    precision = 1 / _OUTCOME_SD**2 + float(weights.sum())
    middle = (math.log(PRIOR_S[name]) / _OUTCOME_SD**2 + float(weights @ means)) / precision
    return middle, precision**-0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticJob:
    """A job of `steps` on machines, of which the first is not lost, with a checkpoint every `checkpoint_every` steps.

    `step_s`: by the number of machines at work, from 1 to all. `lost_s`: from a loss to the first step after it,
    without `restore_s`. `replaced`: another machine takes the lost one's place meanwhile.
    """

    steps: int
    checkpoint_every: int
    step_s: Mapping[int, float]
    startup_s: float
    checkpoint_s: float
    restore_s: float
    lost_s: float
    replaced: bool

    @property
    def machines(self) -> int:
        """At its start."""
        return max(self.step_s)

    def seconds(self, losses_s: Sequence[float], *, happened: bool = False) -> float:
        """From asking for machines to the last checkpoint; machines are lost so many seconds after the first step.

        Losses after the end are none, and neither are those when only the first machine is left. If they `happened` to
        this job, it was not at its end at any of them. One that is lost before the loss of another is noticed costs no
        more. After that those left wait for it, while they meet, as long as they take to start, which is most of
        `lost_s`: it costs that twice.
        """
        at, noticed, done, machines = 0.0, 0.0, 0, self.machines
        for loss in sorted(losses_s):
            step_s = self.step_s[machines]
            if machines == 1 or (not happened and at + self._rest_s(done, step_s) <= loss):
                break
            meeting = noticed < loss <= at
            if loss > at:
                whole = int((loss - at) // (self.checkpoint_every * step_s + self.checkpoint_s))
                done = min(done + whole * self.checkpoint_every, self._last_but_one)
            at = (
                loss
                + self.lost_s * (1 + (meeting and not self.replaced))
                + (self.restore_s if done else 0.0)
            )
            noticed = loss + NOTICED_S
            machines -= not self.replaced
        return self.startup_s + at + self._rest_s(done, self.step_s[machines])

    def expected_seconds(self, losses_per_hour: float, *, seed: int) -> float:
        """Mean over losses drawn at so many an hour of each machine but the first."""
        rng = np.random.default_rng(seed)
        return float(
            np.mean([self.seconds(self._drawn(losses_per_hour, rng)) for _ in range(_DRAWS)])
        )

    @property
    def _last_but_one(self) -> int:
        """Steps at the checkpoint before the last."""
        return (self.steps - 1) // self.checkpoint_every * self.checkpoint_every

    def _rest_s(self, done: int, step_s: float) -> float:
        left = self.steps - done
        return left * step_s + math.ceil(left / self.checkpoint_every) * self.checkpoint_s

    def _drawn(self, per_hour: float, rng: np.random.Generator) -> list[float]:
        """Each machine's life is exponential; one in the place of another begins when that is lost."""
        if per_hour <= 0:
            return []
        most_s = 2 * self._rest_s(0, max(self.step_s.values()))
        found: list[float] = []
        for _ in range(self.machines - 1):
            at = rng.exponential(3600 / per_hour)
            while at < most_s:
                found.append(at)
                at = at + rng.exponential(3600 / per_hour) if self.replaced else math.inf
        return found
