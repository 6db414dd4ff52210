"""How good choices are, at equal global batch, against the best measured setup.

    regret = dollars (deadline) or hours (cap) / the least of a measured setup that meets it - 1
    lost   = loss of the choice - least loss of the measured setups, by the rule of choice

A choice that misses its constraint has no regret. Each workload is held out in turn; its one-device
rows are known, and `--pilots` that `srift recommend` names. Prices are list prices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
import typer

from models.domain.numeric import BoolArray, FloatArray
from models.domain.setup_table import Row
from models.domain.workload import Goal, Setup
from models.job.cost import job_costs
from models.job.duration import expected_hours
from models.job.job_conditions import STATED, pools_of
from models.planner.choice_rule import known_meeting, losses
from models.planner.ranking import recommend
from models.step_time.dataset import TrainingData
from models.step_time.model import fit
from tasks.workspace.blas_threads import single_thread
from tests.benchmarks.claims import Claim, Write, report, show
from tests.benchmarks.held_out import MACHINES, training_data
from tests.benchmarks.held_out_groups import RTX, T4, V100
from tests.benchmarks.setups import STEPS, frame_of, job, measured_setups, recommended_pilots

DEADLINE, CAP = "cheapest_within_deadline", "fastest_within_budget"
SLACKS = (1.05, 1.2, 1.5, 2.0, 3.0, 5.0)  # of a limit, as multiples of the least
# EC2's T4 and Azure's V100 machine. Nobody rents out the 2080 Ti: its price lies between them.
PRICES = {T4: 3.912, RTX: 12.0, V100: 22.03}
DEVICES = {name: machine[0] for name, machine in MACHINES.items()}
_FEWEST, _DRAWS, _SHOWN = 8, 400, 5  # setups of a contest; draws of each; rows judged
_TENTH, _SAMPLES = 0.1, 20


@dataclass(frozen=True, kw_only=True)
class Contest:
    """Measured setups of one workload at one global batch, and a model's predictions of them.

    `draws` is (setups, draws): joint seconds of a step.
    """

    setups: tuple[Setup, ...]
    measured_s: FloatArray
    predictions: pd.DataFrame
    draws: FloatArray

    def certain(self, step_s: FloatArray) -> Contest:
        """The same with these seconds predicted for certain."""
        sure = self.predictions.assign(step_s=step_s, step_low_s=step_s, step_high_s=step_s)
        return replace(self, predictions=sure, draws=np.repeat(step_s[:, None], 2, axis=1))

    def costs(self, step_s: FloatArray) -> tuple[FloatArray, FloatArray]:
        """(setups,) hours and dollars of the whole job at these step times."""
        clusters = [setup.cluster for setup in self.setups]
        hours = expected_hours(STEPS * step_s / 3600, STATED.gangs(*pools_of(clusters), 0.0))
        return hours, hours * [cluster.total_usd_per_hour or np.nan for cluster in clusters]

    def goals(self, step_s: FloatArray) -> list[Goal]:
        """Deadlines and caps at SLACKS times the least; the last digit does not decide."""
        hours, usd = (float(cost.min()) * (1 + 1e-12) for cost in self.costs(step_s))
        deadlines = [Goal(goal=DEADLINE, hours=slack * hours) for slack in SLACKS]
        return deadlines + [Goal(goal=CAP, usd=slack * usd) for slack in SLACKS]

    def table(self, goals: Sequence[Goal], top: int) -> list[Row]:
        """Rows of the recommendation table."""
        question = job(self.setups[0].workload, self.setups[0].global_batch, *goals)
        costs = job_costs(question, self.setups, self.predictions, self.draws)
        return recommend(question, costs, top=top)

    def place(self, row: Row) -> int | None:
        """Position of the row's setup; None for a row without a cluster."""
        names = [name for name in self.setups[0].row() if name not in ("workload", "provider")]
        wanted = [row[name] for name in names]
        found = (
            at
            for at, setup in enumerate(self.setups)
            if [setup.row()[name] for name in names] == wanted
        )
        return next(found, None)


Chooser = Callable[[Contest, list[Goal]], list[int | None]]


def recommended(contest: Contest, goals: list[Goal]) -> list[int | None]:
    """The setup of the table's first row for each goal."""
    rows = [row for row in contest.table(goals, 1) if row["rank"] == 1]
    return [contest.place(row) for row in rows[: len(goals)]]


def _required(contest: Contest, goals: list[Goal]) -> list[int | None]:
    return recommended(contest, [replace(goal, p_required=0.9) for goal in goals])


def _compute_only(contest: Contest, goals: list[Goal]) -> list[int | None]:
    return recommended(contest.certain(contest.predictions["compute_s"].to_numpy(float)), goals)


def _by(*keys: Callable[[Setup], float]) -> Chooser:
    """Choose the least by `keys`, then the most devices."""

    def chosen(contest: Contest, goals: list[Goal]) -> list[int | None]:
        values = [(*(key(setup) for key in keys), -sum(setup.layout)) for setup in contest.setups]
        return [min(range(len(values)), key=values.__getitem__)] * len(goals)

    return chosen


def _device_usd(setup: Setup) -> float:
    offer = setup.cluster.members[0]
    return (offer.usd_per_hour or 0.0) / max(offer.instance_type.devices, 1)


RECOMMENDED, TENTH = "recommended", "a random tenth measured"
CHOOSERS: dict[str, Chooser] = {
    RECOMMENDED: recommended,
    "recommended at 90 %": _required,
    "communication ignored": _compute_only,
    "cheapest per hour": _by(lambda setup: setup.cluster.total_usd_per_hour or np.nan),
    "most machines": _by(lambda setup: -len(setup.layout)),
    "dearest device": _by(lambda setup: -_device_usd(setup), lambda setup: len(setup.layout)),
}


def judge(contest: Contest, *, seed: int) -> pd.DataFrame:
    """A row a question and chooser: kind, chooser, answered, met, regret, lost."""
    goals = contest.goals(contest.measured_s)
    answers = {name: chooser(contest, goals) for name, chooser in CHOOSERS.items()}
    hours, usd = contest.costs(contest.measured_s)
    rows = []
    for number, goal in enumerate(goals):
        aim, used = (usd, hours) if goal.goal == DEADLINE else (hours, usd)
        meeting = known_meeting(used, goal.limit)
        loss, meets = losses(goal, np.log(aim), meeting), meeting.chance > 0
        picks = [(name, answer[number]) for name, answer in answers.items()]
        picks += [(TENTH, at) for at in _of_a_tenth(aim, used, meets, seed)]
        for name, at in picks:
            met = at is not None and bool(meets[at])
            regret = aim[at] / aim[meets].min() - 1 if met else np.nan
            lost = loss[at] - loss.min() if met else np.nan
            rows.append((goal.goal, name, at is not None, met, regret, lost))
    return pd.DataFrame(rows, columns=["kind", "chooser", "answered", "met", "regret", "lost"])


def _of_a_tenth(aim: FloatArray, used: FloatArray, meets: BoolArray, seed: int) -> Iterator[int]:
    random, count = np.random.default_rng(seed), max(1, round(_TENTH * len(aim)))
    for _ in range(_SAMPLES):
        known = random.choice(len(aim), count, replace=False)
        able = meets[known]
        value = np.where(able, aim[known], np.inf) if able.any() else used[known]
        yield int(known[np.argmin(value)])


def chances(contest: Contest) -> pd.DataFrame:
    """Each chance in the table's first rows: rank, chance ("p ok" or "p best"), said, held.

    Limits are multiples of the least predicted. The best setup loses least at measured times, among
    all clusters of the table; if none meets its limit, none is best.
    """
    hours, usd = contest.costs(contest.measured_s)
    found = []
    for goal in contest.goals(contest.predictions["step_s"].to_numpy(float)):
        aim, used = (usd, hours) if goal.goal == DEADLINE else (hours, usd)
        meeting = known_meeting(used, goal.limit)
        loss = losses(goal, np.log(aim), meeting)
        rows = [row for row in contest.table([goal], len(aim)) if row["goal"] == goal.goal]
        pairs = [(row, contest.place(row)) for row in rows]
        placed = [(row, at) for row, at in pairs if at is not None]
        best = min((loss[at] for _, at in placed), default=0.0)
        for row, at in placed[:_SHOWN]:
            meets = meeting.chance[at] > 0
            is_best = np.isfinite(loss[at]) and loss[at] <= best + 1e-12
            found.append((row["rank"], "p ok", row["p_meets_constraint"], meets))
            found.append((row["rank"], "p best", row["p_best"], is_best))
    return pd.DataFrame(found, columns=["rank", "chance", "said", "held"])


def summary(judged: pd.DataFrame) -> pd.DataFrame:
    """By chooser and kind, in per cent: unanswered, missed, regret, its 90th percentile, lost."""
    by = judged.groupby(["chooser", "kind"], sort=False)
    answered = judged[judged["answered"]].groupby(["chooser", "kind"], sort=False)
    table = pd.DataFrame(
        {
            "unanswered": 1 - by["answered"].mean(),
            "missed": 1 - answered["met"].mean(),
            "regret": answered["regret"].mean(),
            "p90": answered["regret"].quantile(0.9),
            "lost": answered["lost"].mean(),
        }
    )
    return (100 * table).reset_index()


def reliability(rows: pd.DataFrame) -> pd.DataFrame:
    """By chance and tenth: cases, and per cent said and held."""
    tenth = np.minimum((10 * rows["said"] + 1e-9).astype(int), 9)
    by = rows.assign(tenth=tenth, held=rows["held"].astype(float)).groupby(["chance", "tenth"])
    table = by.agg(cases=("held", "size"), said=("said", "mean"), held=("held", "mean"))
    return table.assign(said=100 * table["said"], held=100 * table["held"]).reset_index()


def contests(
    data: TrainingData,
    devices: Mapping[str, int],
    usd: Mapping[str, float],
    *,
    pilots: int,
    seed: int,
) -> Iterator[Contest]:
    """Yield the contests of each workload, held out but for its one-device rows and pilots."""
    runs = data.runs.reset_index(drop=True)
    data = replace(data, runs=runs)
    names, alone = runs["workload"].to_numpy(str), (runs["layout"] == "1").to_numpy(bool)
    for workload in sorted(set(names)):
        of_workload = names == workload
        known = ~of_workload | alone
        model = fit(replace(data, runs=runs[known]), seed=seed)
        measured = measured_setups(runs[of_workload], devices, usd)
        if pilots and measured.setups:
            chosen = recommended_pilots(model, measured.setups, count=pilots, seed=seed)
            known[np.flatnonzero(of_workload)[measured.places[chosen]]] = True
            model = fit(replace(data, runs=runs[known]), seed=seed)
        sizes = measured.global_batch
        for batch in sorted(set(sizes.tolist())):
            rivals = measured.take(np.flatnonzero(sizes == batch))
            if len(rivals.setups) < _FEWEST:
                continue
            frame = frame_of(rivals.setups)
            yield Contest(
                setups=rivals.setups,
                measured_s=rivals.step_s,
                predictions=model.predict(frame).reset_index(drop=True),
                draws=model.draw_arrays(model.read(frame), count=_DRAWS, seed=seed),
            )


def main(pilots: int = 3, seed: int = 0, write: Write = False) -> None:
    """Print regret and misses by chooser, and how often the chances in the table hold."""
    with single_thread():
        played = list(contests(training_data(), DEVICES, PRICES, pilots=pilots, seed=seed))
        judged = pd.concat([judge(contest, seed=seed) for contest in played])
        chance_rows = pd.concat(map(chances, played))
    table, tenths = summary(judged), reliability(chance_rows)
    show(f"choices at {len(played)} global batches, {pilots} pilots, per cent", table)
    show("chances of the first five rows, per cent", tenths)
    claims = []
    for row in table[table["chooser"] == RECOMMENDED].to_dict("records"):
        kind = "deadlines" if row["kind"] == DEADLINE else "caps"
        for name, limit in (("regret", 5), ("unanswered", 10)):
            value = float(row[name])
            claim = f"{name}, {kind}, {pilots} pilots"
            claims.append(Claim(claim, f"{limit} %", f"{value:.1f} %", value <= limit))
    off = (tenths["said"] - tenths["held"]).abs() <= 4
    claim = "tenths of chances within 4 points"
    claims.append(Claim(claim, "all", f"{int(off.sum())} of {len(off)}", bool(off.all())))
    first = chance_rows[(chance_rows["rank"] == 1) & (chance_rows["chance"] == "p ok")]
    gap = 100 * float(first["said"].mean() - first["held"].mean())
    claims.append(Claim("first rows, said less held", "3 points", f"{gap:.1f}", abs(gap) <= 3))
    report("choices", claims, write=write)


if __name__ == "__main__":
    typer.run(main)
