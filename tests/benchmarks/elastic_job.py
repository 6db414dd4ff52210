"""Hours of an elastic job that loses machines at given moments: what the elastic benchmark compares with."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

_DRAWS = 400
NOTICED_S = 5.0  # until a silent machine counts as lost: _ALIVE_EVERY_S _ALIVE_MISSED of tasks/node/agent.py


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
