"""How good are the choices of `models.planner.ranking`: at equal global batch, against the best that was measured.

    cost regret = dollars of the choice / dollars of the cheapest measured setup that meets the deadline - 1
    time regret = hours of the choice / hours of the fastest measured setup that meets the cap - 1

    lost = loss of the choice - least loss of the measured setups, by the rule of choice where all times are known
    caution = the same of who knows the measured times, but takes them to be as unsure as the model says;  error = rest

A choice that misses its constraint is a failure, reported apart, and no regret; so is a question left unanswered. What
it loses counts by how much it exceeds the constraint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from models.domain.numeric import BoolArray, FloatArray
from models.domain.workload import Goal, Setup
from models.job.cost import cost_at, job_costs
from models.job.job_conditions import Stated, pools_of
from models.monitoring.backtest import described
from models.planner.choice_rule import known_meeting, weighed
from models.planner.ranking import Row, recommend
from models.step_time.dataset import TrainingData
from models.step_time.model import fit
from models.step_time.setup_arrays import read_setups

from .setups import STEPS, job, measured_setups, recommended_pilots

DEADLINE, CAP = "cheapest_within_deadline", "fastest_within_budget"
SLACKS = (
    1.05,
    1.2,
    1.5,
    2.0,
    3.0,
    5.0,
)  # of a constraint, as a multiple of the least that any measured setup takes
_TENTH, _SAMPLES = 0.1, 20
_FEWEST, _DRAWS = (
    8,
    400,
)  # setups at one global batch among which a choice is judged; joint draws of each


@dataclass(frozen=True, slots=True, kw_only=True)
class Contest:
    """Measured setups of one workload at one global batch, and what a model that knows little of it predicts of them.

    `draws` is (setups, draws) joint seconds a step; `predictions` has the columns of `StepTimeModel.predict`.
    """

    setups: tuple[Setup, ...]
    measured_s: FloatArray
    predictions: pd.DataFrame
    draws: FloatArray

    def take(self, mask: BoolArray) -> Contest:
        """Only the setups of `mask`."""
        return Contest(
            setups=tuple(one for one, kept in zip(self.setups, mask, strict=True) if kept),
            measured_s=self.measured_s[mask],
            predictions=self.predictions[mask].reset_index(drop=True),
            draws=self.draws[mask],
        )

    def believing(self, step_s: FloatArray) -> Contest:
        """The same with these seconds predicted, without a doubt."""
        believed = self.predictions.assign(step_s=step_s, step_low_s=step_s, step_high_s=step_s)
        return replace(self, predictions=believed, draws=np.repeat(step_s[:, None], 2, axis=1))

    def knowing(self) -> Contest:
        """The same with the measured seconds predicted, as unsure as before."""
        off = self.measured_s / self.predictions["step_s"].to_numpy(float)
        seconds = ["step_s", "step_low_s", "step_high_s"]
        corrected = self.predictions.assign(
            **{name: self.predictions[name] * off for name in seconds}
        )
        return replace(self, predictions=corrected, draws=self.draws * off[:, None])

    def costs(self) -> tuple[FloatArray, FloatArray]:
        """True hours and dollars of the whole job on each setup, start-up at its expectation."""
        pairs = [
            cost_at(
                float(step_s),
                steps=STEPS,
                conditions=Stated().gangs(*pools_of([setup.cluster]), 0.0),
                usd_per_hour=setup.cluster.total_usd_per_hour or np.nan,
            )
            for setup, step_s in zip(self.setups, self.measured_s, strict=True)
        ]
        hours, usd = np.array(pairs, dtype=float).T
        return hours, usd


def recommended(contest: Contest, goals: list[Goal]) -> list[int | None]:
    """For each goal the setup in the table's first row; None where the table says that nothing meets it."""
    rows = [row for row in _table(contest, goals, top=1) if row["rank"] == 1]
    return [_place(contest, row) for row in rows[: len(goals)]]


def _table(contest: Contest, goals: list[Goal], *, top: int) -> list[Row]:
    workload = job(contest.setups[0].workload, contest.setups[0].global_batch, *goals)
    return recommend(
        workload, job_costs(workload, contest.setups, contest.predictions, contest.draws), top=top
    )


def _place(contest: Contest, row: Row) -> int | None:
    """Position of the row's setup; None where it names none."""
    columns = [name for name in contest.setups[0].row() if name not in ("workload", "provider")]
    places = {
        tuple(one.row()[name] for name in columns): at for at, one in enumerate(contest.setups)
    }
    return places.get(tuple(row[name] for name in columns))


Chooser = Callable[[Contest, list[Goal]], list[int | None]]


def _with_probability(p_required: float) -> Chooser:
    return lambda contest, goals: recommended(
        contest, [replace(goal, p_required=p_required) for goal in goals]
    )


def _full_machines(contest: Contest, goals: list[Goal]) -> list[int | None]:
    full = [
        all(
            used >= member.instance_type.devices
            for used, member in zip(one.layout, one.cluster.members, strict=True)
        )
        for one in contest.setups
    ]
    return recommended_of(np.array(full, dtype=bool), contest, goals)


def recommended_of(allowed: BoolArray, contest: Contest, goals: list[Goal]) -> list[int | None]:
    """As `recommended`, among the setups that are `allowed` (setups,)."""
    if not allowed.any():
        return [None] * len(goals)
    places = np.flatnonzero(allowed)
    return [
        None if at is None else int(places[at]) for at in recommended(contest.take(allowed), goals)
    ]


def _without_communication(contest: Contest, goals: list[Goal]) -> list[int | None]:
    return recommended(contest.believing(contest.predictions["compute_s"].to_numpy(float)), goals)


def _cheapest_per_hour(contest: Contest, goals: list[Goal]) -> list[int | None]:
    usd = np.array([one.cluster.total_usd_per_hour or np.nan for one in contest.setups])
    return [int(np.lexsort((-_devices(contest), usd))[0])] * len(goals)


def _most_machines(contest: Contest, goals: list[Goal]) -> list[int | None]:
    machines = np.array([len(one.layout) for one in contest.setups])
    return [int(np.lexsort((-_devices(contest), -machines))[0])] * len(goals)


def _dearest_device(contest: Contest, goals: list[Goal]) -> list[int | None]:
    """As many devices as there are on one machine of the type whose device costs most, or that where none was measured
    alone."""
    types = [one.cluster.members[0].instance_type for one in contest.setups]
    usd = [one.cluster.members[0].usd_per_hour or 0.0 for one in contest.setups]
    machines = np.array([len(one.layout) for one in contest.setups])
    each = np.array(
        [dollars / max(kind.devices, 1) for dollars, kind in zip(usd, types, strict=True)]
    )
    return [int(np.lexsort((-_devices(contest), machines, -each))[0])] * len(goals)


def _devices(contest: Contest) -> FloatArray:
    return np.array([sum(one.layout) for one in contest.setups], dtype=float)


RECOMMENDED = "recommended"
STRICT, EVEN = "recommended at 90 %", "recommended at even odds"
RULES: dict[str, Chooser] = {
    RECOMMENDED: recommended,
    STRICT: _with_probability(0.9),
    EVEN: _with_probability(0.5),
}
CHOOSERS: dict[str, Chooser] = {
    **RULES,
    "recommended, full machines only": _full_machines,
    "recommended, communication ignored": _without_communication,
    "cheapest per hour": _cheapest_per_hour,
    "most machines": _most_machines,
    "one machine of the dearest device": _dearest_device,
}
A_TENTH = "a random tenth measured"


def judge(
    contest: Contest, *, seed: int, choosers: Mapping[str, Chooser] = CHOOSERS
) -> pd.DataFrame:
    """A row a question, chooser and sample: kind, slack, chooser, answered, met, regret (NaN where it is not met), over
    (log by which it exceeds the constraint), lost, and of a rule its caution; NaN where it is not answered.
    """
    asked, goals = questions(contest)
    answers = {name: chooser(contest, goals) for name, chooser in choosers.items()}
    knowing = {name: chooser(contest.knowing(), goals) for name, chooser in RULES.items()}
    rows = []
    for number, ((kind, slack), goal) in enumerate(zip(asked, goals, strict=True)):
        aim, used, limit = _aim_and_used(contest, goal)
        meeting = known_meeting(used, limit)
        lost = weighed(goal, np.log(aim), meeting)
        lost, meets = lost - lost.min(), meeting.chance > 0
        picks = [(name, answer[number], knowing[name][number] if name in RULES else None)
                 for name, answer in answers.items()]  # fmt: skip
        picks += [(A_TENTH, pick, None) for pick in _of_a_tenth(aim, used, meets, seed)]
        for name, pick, sure in picks:
            met = pick is not None and bool(meets[pick])
            regret = aim[pick] / aim[meets].min() - 1 if met else np.nan
            figures = (np.nan, np.nan) if pick is None else (meeting.overshoot[pick], lost[pick])
            rows.append(
                (
                    kind,
                    slack,
                    name,
                    pick is not None,
                    met,
                    regret,
                    *figures,
                    np.nan if sure is None else lost[sure],
                )
            )
    names = ["kind", "slack", "chooser", "answered", "met", "regret", "over", "lost", "caution"]
    return pd.DataFrame(rows, columns=names)


def questions(contest: Contest) -> tuple[list[tuple[str, float]], list[Goal]]:
    """(kind, slack) of each deadline and cap that is asked about, and the goals."""
    hours, usd = contest.costs()
    asked = [(kind, slack) for kind in (DEADLINE, CAP) for slack in SLACKS]
    return asked, [
        Goal(goal=kind, hours=_limit(slack, hours))
        if kind == DEADLINE
        else Goal(goal=kind, usd=_limit(slack, usd))
        for kind, slack in asked
    ]


def _aim_and_used(contest: Contest, goal: Goal) -> tuple[FloatArray, FloatArray, float]:
    """What is to be least, what is limited, and the limit, of the measured setups."""
    hours, usd = contest.costs()
    return (
        (usd, hours, goal.limit or 0.0)
        if goal.objective == "usd"
        else (hours, usd, goal.limit or 0.0)
    )


def said_and_held(contest: Contest, *, top: int = 5) -> pd.DataFrame:
    """Each chance in the table's `top` rows of each question: kind, rank, what ("p ok" or "p best"), said, if it held.

    Limits are multiples of the least predicted, which a chance may depend on as it may not on what was measured. The
    best is who loses least by the measured times, of all clusters that the table compares, each by its best split.
    """
    _, goals = questions(replace(contest, measured_s=contest.predictions["step_s"].to_numpy(float)))
    found = []
    for goal in goals:
        aim, used, limit = _aim_and_used(contest, goal)
        meeting = known_meeting(used, limit)
        lost = weighed(goal, np.log(aim), meeting)
        rows = [
            row
            for row in _table(contest, [goal], top=len(contest.setups))
            if row["goal"] == goal.goal
        ]
        places = [at for at in (_place(contest, row) for row in rows) if at is not None]
        for row, at in list(zip(rows, places, strict=False))[:top]:
            own = (goal.goal, row["rank"])
            found.append((*own, "p ok", row["p_meets_constraint"], meeting.chance[at] > 0))
            found.append((*own, "p best", row["p_best"], lost[at] <= lost[places].min() + 1e-12))
    return pd.DataFrame(found, columns=["kind", "rank", "what", "said", "held"])


def promised(rows: pd.DataFrame) -> pd.DataFrame:
    """Of `said_and_held`, what comes first: by kind of constraint and chance, cases, per cent said, per cent held."""
    by = rows[rows["rank"] == 1].groupby(["kind", "what"], sort=False)
    return by.agg(
        cases=("held", "size"), said=("said", _per_cent), held=("held", _per_cent)
    ).reset_index()


def _per_cent(parts: pd.Series) -> float:
    return 100 * float(parts.mean())


def reliability(rows: pd.DataFrame) -> pd.DataFrame:
    """Of `said_and_held`, by tenths of what was said: cases, per cent said in the mean, per cent that held."""
    tenth = np.minimum((10 * rows["said"] + 1e-9).astype(int), 9)
    by = rows.assign(tenth=[f"{10 * at} to {10 * at + 10}" for at in tenth]).groupby(
        ["what", "tenth"], sort=False
    )
    found = by.agg(cases=("held", "size"), said=("said", _per_cent), held=("held", _per_cent))
    return found.reset_index().sort_values(
        ["what", "said"], ascending=[False, True], ignore_index=True
    )


def causes(judged: pd.DataFrame) -> pd.DataFrame:
    """What each rule loses against who knows everything, by kind of constraint, in per cent (logs): by caution, by
    error. Of the questions that every rule answers, by the model's times and by the measured ones.
    """
    own = judged[judged["chooser"].isin(list(RULES))]
    number = own.groupby(["chooser", "kind"]).cumcount()
    complete = own[["lost", "caution"]].notna().all(axis=1)
    own = own[complete.groupby([own["kind"], number]).transform("all")]
    by = own.groupby(["chooser", "kind"], sort=False)
    found = 100 * by[["lost", "caution"]].mean()
    return found.assign(error=found["lost"] - found["caution"], questions=by.size()).reset_index()


def _limit(slack: float, used: FloatArray) -> float:
    """The last digit does not decide."""
    return slack * float(used.min()) * (1 + 1e-12)


def _of_a_tenth(aim: FloatArray, used: FloatArray, meets: BoolArray, seed: int) -> Iterator[int]:
    count = max(1, round(_TENTH * len(aim)))
    random = np.random.default_rng(seed)
    for _ in range(_SAMPLES):
        known = random.choice(len(aim), count, replace=False)
        able = meets[known]
        value = np.where(able, aim[known], np.inf) if able.any() else used[known]
        yield int(known[np.argmin(value)])


def summary(judged: pd.DataFrame) -> pd.DataFrame:
    """A row a chooser and kind of constraint: questions, per cent left unanswered, per cent of the answers that missed
    it, and by how much these did in the mean; mean, 90th percentile and worst of the others' regret; what all answers
    lost in the mean, in per cent of logs.
    """
    by = ["chooser", "kind"]
    asked = judged.groupby(by, sort=False)["answered"].agg(
        questions="size", unanswered=lambda answered: 100 * (1 - answered.mean())
    )
    grouped = judged[judged["answered"]].groupby(by, sort=False)
    answered = grouped.agg(
        missed=("met", lambda met: 100 * (1 - met.mean())),
        over=("over", lambda over: 100 * over[over > 0].mean()),
        mean=("regret", lambda regret: 100 * regret.mean()),
        p90=("regret", lambda regret: 100 * regret.quantile(0.9)),
        worst=("regret", lambda regret: 100 * regret.max()),
        lost=("lost", lambda lost: 100 * lost.mean()),
    )
    whole: pd.DataFrame = asked.join(answered).reset_index()
    return whole


def headline(judged: pd.DataFrame) -> pd.DataFrame:
    """Each other chooser's figure over that of what is recommended, where both keep to the constraint: a row a chooser
    and kind of constraint with `ratio` (geometric mean; of dollars at the same deadline, of hours at the same budget,
    which is that of throughput turned over), per cent of questions that `both` meet, and that it alone missed.
    """
    asked = judged[judged["chooser"] != A_TENTH].reset_index(drop=True)
    asked["number"] = asked.groupby(["chooser", "kind"]).cumcount()
    asked = asked.set_index(["kind", "number"])
    ours = asked[asked["chooser"] == RECOMMENDED][["regret", "met"]]
    rows = []
    for chooser, own in asked.groupby("chooser", sort=False):
        beside = own[["regret", "met"]].join(ours.add_suffix("_ours"))
        for kind, part in beside.groupby(level="kind"):
            logs = np.log1p(part["regret"]) - np.log1p(part["regret_ours"])
            alone = part["met_ours"] & ~part["met"].astype(bool)
            both = 100 * float(logs.notna().mean())
            rows.append(
                (chooser, kind, float(np.exp(logs.mean())), both, 100 * float(alone.mean()))
            )
    return pd.DataFrame(rows, columns=["chooser", "kind", "ratio", "both", "it_alone_missed"])


def contests(
    data: TrainingData,
    devices: dict[str, int],
    usd_per_hour: Mapping[str, float],
    *,
    pilots: int,
    seed: int,
    runs: int = 1,
) -> Iterator[tuple[str, int, Contest]]:
    """(workload, global batch, contest): each workload in turn known by its profiles and one-device runs only.

    The `pilots` that `srift recommend` names are known too. The others' runs are known in full. Setups with an instance
    type that has no price are left out, and those measured less than `runs` times: what one run says is the best is
    partly luck.
    """
    data = replace(
        data, instance_types=described(data, data.runs), runs=data.runs.reset_index(drop=True)
    )
    layout = read_setups(data.runs, devices)
    names, alone = np.array(layout.workloads), layout.ranks == 1
    for workload in sorted(set(layout.workloads)):
        own = names == workload
        known = ~own | alone
        try:
            model = fit(replace(data, runs=data.runs[known]), seed=seed)
        except ValueError:  # nothing else tells about the workload
            continue
        if workload not in model.workloads:
            continue
        measured = measured_setups(data.runs[own], devices, usd_per_hour)
        if pilots and len(measured.setups):
            chosen = recommended_pilots(model, measured.setups, count=pilots, seed=seed)
            known[np.flatnonzero(own)[measured.places[chosen]]] = True
            model = fit(replace(data, runs=data.runs[known]), seed=seed)
        for batch in sorted(set(measured.global_batch.tolist())):
            rivals = measured.take(
                np.flatnonzero((measured.global_batch == batch) & (measured.runs >= runs))
            )
            if len(rivals.setups) < _FEWEST:
                continue
            frame = rivals.frame()
            yield (
                workload,
                int(batch),
                Contest(
                    setups=rivals.setups,
                    measured_s=rivals.step_s,
                    predictions=model.predict(frame).reset_index(drop=True),
                    draws=model.draws(frame, count=_DRAWS, seed=seed),
                ),
            )


def scores(played: Sequence[Contest], *, seed: int) -> list[tuple[str, pd.DataFrame]]:
    """Titles and tables of all that is printed of these contests."""
    judged, promises = (
        pd.concat([judge(one, seed=seed) for one in played]),
        pd.concat(map(said_and_held, played)),
    )
    return [
        ("regret of the answers that meet, and what all lose, per cent", summary(judged)),
        ("dollars (deadline) or hours (cap) over those of what is recommended", headline(judged)),
        ("lost against who knows all times: by caution, by error, per cent", causes(judged)),
        ("chances of the first row, per cent", promised(promises)),
        ("reliability of the chances printed, per cent", reliability(promises)),
    ]
