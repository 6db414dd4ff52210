"""Ways of buying runs that a replay compares: ours, by expected regret; random order; all, the cheapest first."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..wants import Costs
from ..worth import Belief, Floats, choice, left_of, worths
from .replay import Ground

_SURPRISE = 3.0  # standard deviations beyond which a run tells others no more than it would at that


class Believing:
    """Chooses by a belief that every run is told to; the exact conditional normal, a surprise held to 3 deviations."""

    def __init__(self, ground: Ground, mean: Floats, covariance: Floats, noise: Floats) -> None:
        """The belief is about log step of the ground's setups.

        A setup's truth here is what its one run measured, so that the noise belongs to the setup, not to the run.
        """
        self.ground = ground
        nothing = np.full(len(mean), 1e-9)
        self.belief = Belief(mean=mean, covariance=covariance + np.diag(noise), noise=nothing)
        self.known: set[int] = set()

    def tell(self, place: int, step_s: float) -> None:
        """Every setup that errs with this one moves."""
        measured, before = float(np.log(step_s)), self.belief
        most = _SURPRISE * float(np.sqrt(before.variance[place] + before.noise[place]))
        expected = float(before.mean[place])
        after = before.given(place, expected + float(np.clip(measured - expected, -most, most)))
        mean = after.mean.copy()
        mean[place] = measured  # it is itself as it was measured, however surprising
        self.belief = Belief(mean=mean, covariance=after.covariance, noise=after.noise)
        self.known.add(place)

    def choices(self) -> list[int | None]:
        """By mean and by the chance to meet the constraint."""
        return [choice(question, self.belief) for question in self.ground.questions]

    def unknown(self) -> list[int]:
        """Places never measured."""
        return [place for place in range(len(self.ground.step_s)) if place not in self.known]


class ByWorth(Believing):
    """Ours: the launch whose runs are expected to lower the regret of the choices most per dollar; stops by itself."""

    def __init__(self, ground: Ground, mean: Floats, covariance: Floats, noise: Floats, costs: Costs) -> None:
        """`costs` as the campaign's."""
        super().__init__(ground, mean, covariance, noise)
        self.costs = costs

    def next(self) -> list[int]:
        """The best launch; empty where no run is expected to change a choice."""
        runs = np.array(self.unknown(), dtype=np.intp)
        if not len(runs):
            return []
        worth = worths(self.ground.questions, self.belief, runs.tolist()).regret
        run_s = np.array([self.costs.run_s(float(one)) for one in np.exp(self.belief.mean[runs])])
        alike = self.belief.alike()[np.ix_(runs, runs)]
        best, found = 0.0, list[int]()
        for name in sorted({self.ground.clusters[run] for run in runs}):
            own = np.array([self.ground.clusters[run] == name for run in runs], dtype=bool)
            price = float(self.ground.usd_per_hour[runs[own][0]])
            taken, rate = filled(np.where(own, worth, 0.0), run_s, alike, self.costs)
            if taken and rate / price > best:
                best, found = rate / price, [int(runs[at]) for at in taken]
        return found


def filled(worth: Floats, run_s: Floats, alike: Floats, costs: Costs) -> tuple[list[int], float]:
    """Runs of one launch in order, the best per second first, and what they are worth per billed second.

    It ends where one more run is worth less per second that it adds to the bill than the launch so far; within a
    minimum that is paid anyway everything of worth is taken.
    """
    taken: list[int] = []
    left, total, seconds = worth.copy(), 0.0, 0.0
    while left.max(initial=0.0) > 0:
        at = int(np.argmax(left / run_s))
        more_s = costs.billed_s(seconds + run_s[at]) - costs.billed_s(seconds)
        if taken and left[at] * costs.billed_s(seconds) < total * more_s:
            break
        taken.append(at)
        total, seconds = total + float(left[at]), seconds + float(run_s[at])
        left = left_of(left, alike, [at])
        left[at] = 0.0
    return taken, total / costs.billed_s(seconds)


class AnyOrder(Believing):
    """Random order, `at_once` runs of a random run's cluster at a time; chooses by the same model as ours."""

    def __init__(
        self, ground: Ground, mean: Floats, covariance: Floats, noise: Floats, *, seed: int, at_once: int = 1
    ) -> None:
        """Another seed, another order."""
        super().__init__(ground, mean, covariance, noise)
        self._order = np.random.default_rng(seed).permutation(len(ground.step_s)).tolist()
        self._at_once = at_once

    def next(self) -> list[int]:
        """The next of the order, and the next of its cluster."""
        left = [place for place in self._order if place not in self.known]
        return [one for one in left if self.ground.clusters[one] == self.ground.clusters[left[0]]][: self._at_once]


class BestSeen:
    """No model: measures in the order given, `at_once` of a cluster at a time, and chooses the best it has seen."""

    def __init__(self, ground: Ground, order: Sequence[int], at_once: int = 1) -> None:
        """`order` holds every setup once."""
        self.ground, self._order, self._at_once = ground, list(order), at_once
        self.seen: dict[int, float] = {}

    def next(self) -> list[int]:
        """The next of the order, and the next of its cluster."""
        left = [place for place in self._order if place not in self.seen]
        return [one for one in left if self.ground.clusters[one] == self.ground.clusters[left[0]]][: self._at_once]

    def tell(self, place: int, step_s: float) -> None:
        """Remember it."""
        self.seen[place] = step_s

    def choices(self) -> list[int | None]:
        """The best seen that meets the constraint; None where nothing seen does."""
        found: list[int | None] = []
        for question in self.ground.questions:
            seen = np.array([self.seen.get(int(place), np.inf) for place in question.places])
            hours = question.fixed_hours + question.hours_per_step_s * seen
            by = {"hours": hours, "usd": hours * question.usd_per_hour}
            able = np.isfinite(seen) & (True if question.limited is None else by[question.limited] <= question.limit)
            found.append(int(np.argmin(np.where(able, by[question.aim], np.inf))) if able.any() else None)
        return found


def cheapest_first(ground: Ground) -> list[int]:
    """A full sweep: cluster by cluster, the cheapest an hour first."""
    return [
        int(at) for at in np.lexsort((np.arange(len(ground.step_s)), np.array(ground.clusters), ground.usd_per_hour))
    ]
