"""Dollars at list price until the choices of a campaign are good, on setups that were measured.

Each workload is held out in turn, but for its one-device rows. Ours buys by the shipped shopping
list, launch by launch, out of the measured setups. Printed are dollars until mean regret is, and
stays, at most 5 %, beside a full sweep and random order.

    dollars = sum over launches of price x max(minimum, start + runs)
    regret  = exp(loss of the choice - least loss) - 1, by the rule of choice; a miss counts 1
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pandas as pd
import typer

from models.campaign import shopping_list as shopping
from models.campaign.candidates import EC2_COSTS, Costs, Model, PlannedRun
from models.campaign.run_value import Past
from models.campaign.shopping_list import CampaignLimits, launch_of, shopping_list
from models.campaign.value_of_information import (
    Belief,
    ChoiceSet,
    OpenChoice,
    aim_and_meeting,
    choice,
)
from models.domain.cluster import Cluster
from models.domain.numeric import BoolArray, FloatArray, IntArray
from models.domain.setup_table import row_key, rows_of, setup_key
from models.domain.workload import Goal, Mode, Setup
from models.planner.choice_rule import misses, with_penalty
from models.step_time.dataset import TrainingData
from models.step_time.model import fit
from tests.benchmarks.claims import Claim, Write, report, show
from tests.benchmarks.held_out import DATA, training_data
from tests.benchmarks.held_out_groups import T4
from tests.benchmarks.setups import frame_of, job, measured_setups

USD, DEVICES = {T4: 3.912}, {T4: 4}
LEVELS = (1.05, 1.25, 1.6, 2.2, 3.2, 5.0)  # limits, as multiples of the least
BATCHES, FEWEST = 6, 6  # global batches of a workload, and setups of each
_EXACT, _MISS, _SURPRISE = 1 + 1e-9, 1.0, 3.0
_OTHER_ROWS = 300  # of each other workload that the model learns from
_LAUNCH_RUNS = 4  # of random order


@dataclass(frozen=True, kw_only=True)
class Ground:
    """One workload's measured setups, and the questions about them."""

    workload: str
    setups: tuple[Setup, ...]
    step_s: FloatArray
    questions: tuple[OpenChoice, ...]

    @property
    def usd_per_hour(self) -> FloatArray:
        """(setups,) dollars an hour of the cluster."""
        return np.array([setup.cluster.total_usd_per_hour for setup in self.setups], dtype=float)


def ground_of(runs: pd.DataFrame, workload: str) -> Ground:
    """The setups at the global batches that have most of them, with questions at each."""
    measured = measured_setups(runs[runs["workload"] == workload], DEVICES, USD)
    sizes, counts = np.unique(measured.global_batch, return_counts=True)
    order = [at for at in np.argsort(-counts, kind="stable") if counts[at] >= FEWEST]
    picked = sizes[order[:BATCHES]]
    measured = measured.take(np.flatnonzero(np.isin(measured.global_batch, picked)))
    ground = Ground(workload=workload, setups=measured.setups, step_s=measured.step_s, questions=())
    choices: list[OpenChoice] = []
    for size in picked:
        places = np.flatnonzero(measured.global_batch == size)
        choices += questions_at(places, measured.step_s, ground.usd_per_hour)
    return replace(ground, questions=tuple(choices))


def questions_at(places: IntArray, step_s: FloatArray, price: FloatArray) -> list[OpenChoice]:
    """Every goal among the setups at `places`, of one global batch, for a job of 3,600 steps."""
    fastest, cheapest = float(step_s[places].min()), float((step_s * price)[places].min())
    goals = [Goal(goal="cheapest"), Goal(goal="fastest")]
    for level in LEVELS:
        goals.append(Goal(goal="cheapest_within_deadline", hours=level * fastest * _EXACT))
        goals.append(Goal(goal="fastest_within_budget", usd=level * cheapest * _EXACT))
    zero = np.zeros(len(places))
    return [
        OpenChoice(
            goal=goal,
            places=places,
            fixed_hours=zero,
            hours_per_step_s=zero + 1,
            usd_per_hour=price[places],
            download_usd=zero,
            irreducible_sd=zero,
            irreducible_mean=zero,
        )
        for goal in goals
    ]


def known_losses(question: OpenChoice, step_s: FloatArray) -> tuple[FloatArray, BoolArray]:
    """(candidates,) losses at these step times, infinite for unknown ones, and who misses."""
    log_step = np.log(step_s[question.places])
    known = np.isfinite(log_step)
    aim, meeting = aim_and_meeting(question, np.where(known, log_step, 0.0), np.zeros(1))
    loss = np.where(known, with_penalty(question.goal, aim, meeting), np.inf)
    return loss, misses(question.goal, meeting.chance)


def regret(question: OpenChoice, step_s: FloatArray, chosen: int | None) -> float:
    """Regret of the candidate at position `chosen`; a miss counts 1 at most, and so does none."""
    if chosen is None:
        return _MISS
    loss, missed = known_losses(question, step_s)
    lost = float(np.exp(loss[chosen] - loss.min()) - 1)
    return min(lost, _MISS) if missed[chosen] else lost


@dataclass(kw_only=True)
class Bill:
    """Dollars for launches; runs on the machines of the last launch need no start."""

    costs: Costs
    usd: float = 0.0
    cluster: Cluster | None = None
    seconds: float = 0.0
    launch_usd: float = 0.0

    def add(self, cluster: Cluster, run_s: float, *, anew: bool) -> None:
        """Add runs of `run_s` seconds, on machines acquired `anew` or on those at hand."""
        if anew or cluster != self.cluster:
            self.cluster, self.seconds, self.launch_usd = cluster, 0.0, 0.0
        self.seconds += run_s
        usd = self.costs.billed_s(self.seconds) / 3600 * (cluster.total_usd_per_hour or 0.0)
        self.usd += usd - self.launch_usd
        self.launch_usd = usd


@dataclass(kw_only=True)
class Sweep:
    """Measures in `order`, up to `at_once` runs of a cluster a launch; chooses the best seen."""

    ground: Ground
    order: Sequence[int]
    at_once: int = 1
    seen: dict[int, float] = field(default_factory=dict)
    anew = False

    def next(self) -> tuple[int, ...]:
        """Places to measure now; none to stop."""
        left = [at for at in self.order if at not in self.seen]
        setups = self.ground.setups
        same = [at for at in left if setups[at].cluster == setups[left[0]].cluster]
        return tuple(same[: self.at_once])

    def tell(self, place: int) -> None:
        """Learn what the setup at `place` measured."""
        self.seen[place] = float(self.ground.step_s[place])

    def choices(self) -> list[int | None]:
        """Position of the choice for each question."""
        seen = np.full(len(self.ground.step_s), np.inf)
        seen[list(self.seen)] = list(self.seen.values())
        losses = [known_losses(question, seen)[0] for question in self.ground.questions]
        return [int(loss.argmin()) if np.isfinite(loss).any() else None for loss in losses]


@dataclass(kw_only=True)
class Ours(Sweep):
    """Buys the first launch of the shipped list, drawn up anew after each; chooses by belief.

    A setup's one run is its truth, so the run's noise belongs to the setup.
    """

    mean: FloatArray
    covariance: FloatArray
    noise: FloatArray
    learned: frozenset[int]
    belief: Belief = field(init=False)
    anew = True

    def __post_init__(self) -> None:
        covariance = self.covariance + np.diag(self.noise)
        tiny = np.full(len(self.mean), 1e-9)
        self.belief = Belief(mean=self.mean, covariance=covariance, noise=tiny)

    def tell(self, place: int) -> None:
        """Update the belief; a surprise tells others no more than three standard deviations."""
        Sweep.tell(self, place)
        before, log_step = self.belief, float(np.log(self.ground.step_s[place]))
        most = _SURPRISE * float(np.sqrt(before.variance[place] + before.noise[place]))
        expected = float(before.mean[place])
        after = before.given(place, expected + float(np.clip(log_step - expected, -most, most)))
        mean = after.mean.copy()
        mean[place] = log_step
        self.belief = Belief(mean=mean, covariance=after.covariance, noise=after.noise)

    def choices(self) -> list[int | None]:
        """By mean and by the chance to meet the constraint."""
        return [choice(question, self.belief) for question in self.ground.questions]

    def next(self) -> tuple[int, ...]:
        """Places of the first launch of the list."""
        ground = self.ground
        places = {setup_key(setup): at for at, setup in enumerate(ground.setups)}
        offers = {
            offer.instance_type.name: offer for s in ground.setups for offer in s.cluster.members
        }
        expected = np.exp(self.mean)
        fresh = pd.DataFrame(
            [
                ground.setups[at].row() | {"step_s": step_s}
                for at, step_s in self.seen.items()
                if at not in self.learned
            ]
        )

        def joint(rows: pd.DataFrame) -> tuple[FloatArray, FloatArray, FloatArray]:
            at = np.array([places[row_key(row, DEVICES)] for row in rows_of(rows)], dtype=np.intp)
            return self.mean[at], self.covariance[np.ix_(at, at)], self.noise[at]

        choice_set = ChoiceSet(setups=ground.setups, questions=ground.questions)
        runs = [
            measurement_of(ground.setups[at], float(expected[at]))
            for at in places.values()
            if at not in self.seen
        ]
        launches = shopping_list(
            CampaignLimits(
                max_usd=1e3,
                max_seconds=1e9,
                max_hosts=max(len(setup.layout) for setup in ground.setups),
                fits=lambda cluster: "",
                market="on-demand",
                costs=EC2_COSTS,
            ),
            [job(ground.workload, ground.setups[0].global_batch)],
            list(offers.values()),
            Past(
                runs=fresh,
                profiles=pd.DataFrame(
                    {"workload": ground.workload, "instance_type": sorted(offers)}
                ),
                probes=pd.DataFrame(),
            ),
            model=Model(
                choice_set={ground.workload: choice_set},
                joint=joint,
                workloads=frozenset([(ground.workload, Mode())]),
                types=frozenset(offers),
                fresh=fresh,
                predict=pd.DataFrame,  # not used, since all runs are given
            ),
        )
        # only measured setups can be bought
        with patch.object(shopping, "training_runs", lambda *_, **__: runs):
            return tuple(
                places[setup_key(_setup_of(launch.cluster, item))]
                for launch in islice(launches, 1)
                for item in launch.items
            )


def _setup_of(cluster: Cluster, item: PlannedRun) -> Setup:
    return Setup(
        workload=item.workload,
        cluster=Cluster(members=tuple(cluster.members[node] for node in item.nodes)),
        layout=item.devices,
        batch_per_device=item.batches,
        accumulation_steps=item.accumulation_steps,
    )


def measurement_of(setup: Setup, step_s: float) -> PlannedRun:
    """The campaign's measurement of this setup at these seconds of a step."""
    return PlannedRun(
        kind="train",
        workload=setup.workload,
        members=tuple(offer.instance_type.name for offer in setup.cluster.members),
        batches=setup.batch_per_device,
        accumulation_steps=setup.accumulation_steps,
        est_s=min(EC2_COSTS.run_s(step_s), EC2_COSTS.train_most_s),
        devices=setup.layout,
    )


def _together(clusters: Sequence[Cluster]) -> Cluster:
    """Return the smallest cluster that each of `clusters` is a part of."""
    offers = {offer.instance_type.name: offer for cluster in clusters for offer in cluster.members}
    most: Counter[str] = Counter()
    for cluster in clusters:
        most |= Counter(offer.instance_type.name for offer in cluster.members)
    return Cluster(members=tuple(offers[name] for name in sorted(most.elements())))


def replay(policy: Sweep) -> pd.DataFrame:
    """Buy until the policy stops. Columns usd, runs, regret; the first row is before any run."""
    ground, bill, curve = policy.ground, Bill(costs=EC2_COSTS), []
    bought, places = 0, policy.next()
    while True:
        pairs = zip(ground.questions, policy.choices(), strict=True)
        lost = float(np.mean([regret(question, ground.step_s, at) for question, at in pairs]))
        curve.append((bill.usd, bought, lost))
        if not places:
            return pd.DataFrame(curve, columns=["usd", "runs", "regret"])
        cluster = _together([ground.setups[at].cluster for at in places])
        runs = [measurement_of(ground.setups[at], float(ground.step_s[at])) for at in places]
        bill.add(
            cluster,
            launch_of(cluster, runs, EC2_COSTS).est_s - EC2_COSTS.launch_s,
            anew=policy.anew,
        )
        bought += len(places)
        for place in places:
            policy.tell(place)
        places = policy.next()


def usd_until(curve: pd.DataFrame, most: float) -> float:
    """Dollars after which regret is and stays at most `most`; infinite if it never does."""
    above = np.flatnonzero(curve["regret"].to_numpy() > most)
    first = int(above[-1]) + 1 if len(above) else 0
    return float(curve["usd"].iloc[first]) if first < len(curve) else float("inf")


def policies(
    data: TrainingData, ground: Ground, *, seeds: int, seed: int
) -> list[tuple[str, Sweep]]:
    """Ours, a sweep with the cheapest clusters first, and random orders."""
    runs, random = data.runs, np.random.default_rng(seed)
    mine = (runs["workload"] == ground.workload).to_numpy(bool)
    kept = [np.flatnonzero(mine & (runs["ranks"] == 1).to_numpy(bool))]
    for name in sorted(set(runs["workload"]) - {ground.workload}):
        places = np.flatnonzero((runs["workload"] == name).to_numpy())
        kept.append(random.choice(places, min(len(places), _OTHER_ROWS), replace=False))
    model = fit(replace(data, runs=runs.iloc[np.sort(np.concatenate(kept))]), seed=seed)
    mean, covariance, noise = model.joint(frame_of(ground.setups))
    known = [at for at, setup in enumerate(ground.setups) if sum(setup.layout) == 1]
    ours = Ours(
        ground=ground,
        order=(),
        mean=mean,
        covariance=covariance,
        noise=noise,
        learned=frozenset(known),
    )
    found: list[tuple[str, Sweep]] = [("ours", ours)]
    names = [setup.cluster.name for setup in ground.setups]
    cheapest = np.lexsort((np.array(names), ground.usd_per_hour)).tolist()
    found.append(("full sweep", Sweep(ground=ground, order=cheapest)))
    for number in range(seeds):
        order = np.random.default_rng(number).permutation(len(names)).tolist()
        random_order = Sweep(ground=ground, order=order, at_once=_LAUNCH_RUNS)
        found.append(("random order", random_order))
    for _, policy in found:
        for place in known:
            policy.tell(place)
    return found


def main(seeds: int = 3, seed: int = 2026, folder: Path = DATA, write: Write = False) -> None:
    """Print dollars until regret stays at most 5 %, by policy and workload."""
    data = training_data(folder)
    data = replace(data, runs=data.runs[data.runs["kind"] == T4].reset_index(drop=True))
    rows = []
    for workload in sorted(set(data.runs["workload"])):
        ground = ground_of(data.runs, workload)
        for name, policy in policies(data, ground, seeds=seeds, seed=seed):
            curve = replay(policy)
            rows.append((workload, name, usd_until(curve, 0.05), int(curve["runs"].iloc[-1])))
    frame = pd.DataFrame(rows, columns=["workload", "policy", "usd", "runs"])
    show("dollars until mean regret stays at most 5 %", frame)
    usd = frame.groupby(["policy", "workload"])["usd"].median().groupby("policy").sum()
    ratio = float(usd["ours"] / usd.drop("ours").min())
    claims = [
        Claim(f"dollars to regret 5 %, {name}", "", f"${value:.2f}") for name, value in usd.items()
    ]
    claims.append(Claim("ours / best other", "0.5", f"{ratio:.2f}", ratio <= 0.5))
    report("campaign", claims, write=write)


if __name__ == "__main__":
    typer.run(main)
