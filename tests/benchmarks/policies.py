"""Ways of buying runs that a replay compares: ours, by expected regret; random order; all, the cheapest first."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import numpy as np
import pandas as pd
from scipy.stats import norm
from sklearn.exceptions import ConvergenceWarning
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import ConstantKernel, Matern, WhiteKernel

from models.campaign.campaign import Campaign as Buying
from models.campaign.campaign import Launch, shopping_list
from models.campaign.candidates import Costs, Measurement
from models.campaign.run_value import Model, Past
from models.campaign.value_of_information import Belief, ChoiceSet, Floats, OpenChoice, choice
from models.domain.cluster import Cluster
from models.domain.numeric import FloatArray
from models.domain.setup_table import row_key, rows_of, setup_key
from models.domain.workload import Mode, Setup
from models.step_time.setup_arrays import read_setups
from tests.benchmarks.replay import NOTHING, Ground, Purchase, known_losses, measurement_of
from tests.benchmarks.setups import job

MAX_USD, MAX_SECONDS = 1e3, 1e9  # of one list: dollars decide, and there are enough
_SURPRISE = 3.0  # standard deviations beyond which a run tells others no more than it would at that


class Believing:
    """Chooses by a belief that every run updates; the exact conditional normal, a surprise held to 3 deviations."""

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


class Campaign(Believing):
    """Ours: the first launch of the shopping list that ships, drawn up anew after each; stops by itself.

    Only measured setups may be bought. The model in force is that of the start; what was bought since is fresh to it.
    """

    def __init__(
        self,
        ground: Ground,
        mean: Floats,
        covariance: Floats,
        noise: Floats,
        costs: Costs,
        *,
        learned: Sequence[int] = (),
    ) -> None:
        """`costs` as the campaign's; the model has learned from the setups at the places `learned`."""
        super().__init__(ground, mean, covariance, noise)
        self._costs, self._joint, self._learned = (
            costs,
            (mean, covariance, noise),
            frozenset(learned),
        )
        self._places = {setup_key(setup): at for at, setup in enumerate(ground.setups)}
        self._layouts = {
            one.instance_type.name: one.instance_type.devices
            for setup in ground.setups
            for one in setup.cluster.members
        }
        self._fresh: list[dict[str, object]] = []

    def tell(self, place: int, step_s: float) -> None:
        """What the model has not learned from is fresh to it."""
        super().tell(place, step_s)
        if place not in self._learned:
            self._fresh.append(self.ground.setups[place].row() | {"step_s": step_s})

    def next(self) -> Purchase:
        """The first launch of the list; none where no run is expected to change a choice."""
        ground = self.ground
        offers = {
            one.instance_type.name: one for setup in ground.setups for one in setup.cluster.members
        }
        step_s = np.exp(self._joint[0])
        candidates = {
            key: measurement_of(ground.setups[at], float(step_s[at]), self._costs)
            for key, at in self._places.items()
            if at not in self.known
        }
        choice_set = ChoiceSet(
            workload=ground.workload, setups=ground.setups, questions=ground.questions
        )
        fresh = pd.DataFrame(self._fresh)
        profiled = pd.DataFrame({"workload": ground.workload, "instance_type": sorted(offers)})
        launches = shopping_list(
            Buying(
                max_usd=MAX_USD,
                max_seconds=MAX_SECONDS,
                max_hosts=max(len(setup.layout) for setup in ground.setups),
                fits=lambda cluster: "",
                seed=0,
                market="on-demand",
                costs=self._costs,
                most_launches=1,
            ),
            [job(ground.workload, ground.setups[0].global_batch)],
            list(offers.values()),
            Past(runs=fresh, profiles=profiled, probes=pd.DataFrame()),
            model=Model(
                choice_set={ground.workload: choice_set},
                joint=self._moments_of,
                workloads=frozenset([(ground.workload, Mode())]),
                types=frozenset(offers),
                fresh=fresh,
            ),
            buyable=candidates,
        )
        if not launches:
            return NOTHING
        launch = launches[0]
        return Purchase(
            cluster=launch.cluster,
            places=tuple(self._place(launch, one) for one in launch.items),
            anew=True,
        )

    def _place(self, launch: Launch, item: Measurement) -> int:
        setup = Setup(
            workload=item.workload,
            cluster=Cluster(members=tuple(launch.cluster.members[node] for node in item.nodes)),
            layout=item.layout,
            batch_per_device=item.batches,
            accumulation_steps=item.accumulation_steps,
        )
        return self._places[setup_key(setup)]

    def _moments_of(self, rows: pd.DataFrame) -> tuple[Floats, Floats, Floats]:
        """The model's moments, worked out once for all measured setups."""
        at = np.array(
            [self._places[row_key(row, self._layouts)] for row in rows_of(rows)], dtype=np.intp
        )
        mean, covariance, noise = self._joint
        return mean[at], covariance[np.ix_(at, at)], noise[at]


class AnyOrder(Believing):
    """Random order, `at_once` runs of a random run's cluster at a time; chooses by the same model as ours."""

    def __init__(
        self,
        ground: Ground,
        mean: Floats,
        covariance: Floats,
        noise: Floats,
        *,
        seed: int,
        at_once: int = 1,
    ) -> None:
        """Another seed, another order."""
        super().__init__(ground, mean, covariance, noise)
        self._order = np.random.default_rng(seed).permutation(len(ground.step_s)).tolist()
        self._at_once = at_once

    def next(self) -> Purchase:
        """The next of the order, and the next of its cluster."""
        left = [place for place in self._order if place not in self.known]
        return self.ground.purchase(left, self._at_once) if left else NOTHING


class BestSeen:
    """No model: measures in the order given, `at_once` of a cluster at a time, and chooses the best it has seen."""

    def __init__(self, ground: Ground, order: Sequence[int], at_once: int = 1) -> None:
        """`order` holds every setup once."""
        self.ground, self._order, self._at_once = ground, list(order), at_once
        self.seen: dict[int, float] = {}

    def next(self) -> Purchase:
        """The next of the order, and the next of its cluster."""
        left = [place for place in self._order if place not in self.seen]
        return self.ground.purchase(left, self._at_once) if left else NOTHING

    def tell(self, place: int, step_s: float) -> None:
        """Remember it."""
        self.seen[place] = step_s

    def choices(self) -> list[int | None]:
        """Of those seen the one that loses least by the rule of choice; None before anything is."""
        seen = np.full(len(self.ground.step_s), np.inf)
        for place, step_s in self.seen.items():
            seen[place] = step_s
        losses = [known_losses(question, seen) for question in self.ground.questions]
        return [int(np.argmin(loss)) if np.isfinite(loss).any() else None for loss in losses]


def cheapest_first(ground: Ground) -> list[int]:
    """A full sweep: cluster by cluster, the cheapest an hour first."""
    names = np.array([setup.cluster.name for setup in ground.setups])
    return [int(at) for at in np.lexsort((np.arange(len(names)), names, ground.usd_per_hour))]


_FIRST = 3  # runs by chance before there is anything to model
_REFIT = 5  # runs after which lengths are fitted anew


def numbers(
    setups: pd.DataFrame, instance_types: pd.DataFrame, devices: dict[str, int]
) -> FloatArray:
    """(setups, features) of mean 0 and deviation 1; what does not vary is left out."""
    read = read_setups(setups, devices)
    kinds = {
        str(row["name"]): (float(row["cores"]), float(row["bandwidth_gbps"]))
        for row in rows_of(instance_types)
    }
    cores = [[kinds[name][0] for name in names] for names in read.types]
    links = [min(kinds[name][1] for name in names) for names in read.types]
    batch = np.where(read.present, read.batch, np.nan)
    layout = np.where(read.present, read.layout, np.nan)
    columns = [
        *(
            np.log(read.samples),
            np.log(read.ranks),
            np.log(read.instances),
            np.log(read.accumulation),
        ),
        *(np.log(np.nanmax(batch, axis=1)), np.log(np.nanmin(batch, axis=1))),
        *(np.nanmax(layout, axis=1), np.nanmin(layout, axis=1)),
        *(np.log([sum(one) for one in cores]), np.log([min(one) for one in cores]), np.log(links)),
    ]
    whole = np.column_stack(columns)
    whole = whole[:, whole.std(axis=0) > 1e-9]
    return np.asarray((whole - whole.mean(axis=0)) / whole.std(axis=0))


class Bayesian(BestSeen):
    """Questions by turns; chooses the best seen, or with `trusting` by the process's mean where nothing was seen."""

    def __init__(
        self,
        ground: Ground,
        features: FloatArray,
        *,
        seed: int,
        costs: Costs,
        at_once: int = 1,
        per_dollar: bool = False,
        trusting: bool = False,
    ) -> None:
        """`at_once` runs a launch; `per_dollar` divides the improvement by what the run costs by the process's mean."""
        order = np.random.default_rng(seed).permutation(len(ground.step_s)).tolist()
        super().__init__(ground, order, at_once)
        self._features, self._seed, self._costs = features, seed, costs
        self._per_dollar, self._trusting = per_dollar, trusting
        self._turn, self._kernel, self._fitted = 0, None, 0
        self._moments: tuple[int, FloatArray, FloatArray] | None = None

    def next(self) -> Purchase:
        """The run that the next question in turn would have, and what those after it would have on the same cluster."""
        left = [place for place in self._order if place not in self.seen]
        if not left:
            return NOTHING
        if len(self.seen) < _FIRST:
            return self.ground.purchase(left, 1)
        found: list[int] = []
        for _ in self.ground.questions:
            question = self.ground.questions[self._turn % len(self.ground.questions)]
            self._turn += 1
            score = self._improvement(question)
            cluster = self.ground.cluster(found[0]) if found else None
            free = [
                at
                for at, place in enumerate(question.places.tolist())
                if place not in self.seen
                and place not in found
                and cluster in (None, self.ground.cluster(place))
            ]
            if free:
                found.append(int(question.places[max(free, key=lambda at: score[at])]))
            if len(found) == self._at_once:
                break
        return (
            Purchase(cluster=self.ground.cluster(found[0]), places=tuple(found))
            if found
            else self.ground.purchase(left, 1)
        )

    def choices(self) -> list[int | None]:
        """The best seen; by the process where asked to."""
        found = super().choices()
        if not self._trusting or len(self.seen) < _FIRST:
            return found
        mean, _ = self._process()
        return [
            int(np.argmin(known_losses(question, np.exp(mean))))
            for question in self.ground.questions
        ]

    def _objectives(self, question: OpenChoice, log_step: FloatArray) -> dict[str, FloatArray]:
        work = question.hours_per_step_s * np.exp(log_step[question.places])
        hours = np.log(question.fixed_hours + work)
        return {"hours": hours, "usd": hours + np.log(question.usd_per_hour)}

    def _improvement(self, question: OpenChoice) -> FloatArray:
        mean, spread = self._process()
        by, sd = self._objectives(question, mean), np.maximum(spread[question.places], 1e-6)
        able = np.ones(len(sd))
        if question.limited is not None:
            able = norm.cdf((np.log(question.limit) - by[question.limited]) / sd)
        seen = np.array([int(place) in self.seen for place in question.places], dtype=bool)
        good = seen & (able > 0.5)
        score = able
        if good.any():
            z = (by[question.aim][good].min() - by[question.aim]) / sd
            score = sd * (z * norm.cdf(z) + norm.pdf(z)) * able
        if self._per_dollar:
            run_s = np.array(
                [self._costs.run_s(float(one)) for one in np.exp(mean[question.places])]
            )
            score = score / (question.usd_per_hour * (self._costs.launch_s + run_s))
        return np.asarray(score)

    def _process(self) -> tuple[FloatArray, FloatArray]:
        """Mean and deviation of log step of every setup; what was measured is known."""
        if self._moments is not None and self._moments[0] == len(self.seen):
            return self._moments[1:]
        places = sorted(self.seen)
        target = np.log([self.seen[place] for place in places])
        again = self._kernel is None or len(places) - self._fitted >= _REFIT
        kernel = self._kernel
        if kernel is None:
            lengths = np.ones(self._features.shape[1])
            kernel = ConstantKernel(1.0, (1e-2, 1e2)) * Matern(
                lengths, (1e-1, 1e2), nu=2.5
            ) + WhiteKernel(1e-2, (1e-4, 1))
        process = GaussianProcessRegressor(
            kernel,
            normalize_y=True,
            optimizer="fmin_l_bfgs_b" if again else None,
            random_state=self._seed,
        )
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", ConvergenceWarning
            )  # lengths at their bounds: a feature that tells nothing
            process.fit(self._features[places], target)
        if again:
            self._kernel, self._fitted = process.kernel_, len(places)
        mean, spread = process.predict(self._features, return_std=True)
        mean[places], spread[places] = target, 0.0
        self._moments = (len(self.seen), mean, spread)
        return mean, spread
