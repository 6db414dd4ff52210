"""Pilots settle open choices."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from scipy.stats import norm

from models.campaign.pilots import choose_pilots, simulate_regret
from models.campaign.value_of_information import choice_set_of
from models.domain.workload import Goal
from models.planner.candidates import Supply
from models.planner.planner import candidates
from tests.models.campaign.test_value_of_information import belief, question
from tests.models.planning import LineModel, cores_fit, frame, offers, workload

DEADLINE = Goal(goal="cheapest_within_deadline", hours=2.0)
JOB = replace(workload("mlp", 64, 128), goals=(DEADLINE,))


@cache
def pilots(line, goal=DEADLINE.goal):
    setups = candidates(JOB, Supply(offers=offers(), max_hosts=3, fits=cores_fit), line)
    rows = frame(setups)
    choice_set = choice_set_of(JOB, setups, line.predict(rows))
    return choose_pilots(choice_set, rows, line.joint, goal=goal, count=3, seed=1)


UNSURE, SURE = LineModel(setup_sd=0.15), LineModel(setup_sd=1e-4, shared=0.0)


def test_pilots_better_an_open_choice_and_a_settled_one_has_nothing_to_lose():
    found = pilots(UNSURE)
    assert len(set(found.chosen)) == 3 and len(found.after) == 3
    assert found.regret > 0.01 and found.after[-1] < 0.9 * found.regret
    assert pilots.__wrapped__(UNSURE) == found
    assert pilots(UNSURE, goal="unknown").chosen == ()
    assert pilots(SURE).regret < 1e-3


def regret_after(noise):
    """Regret of a choice of two, the second 0.2 better in logs, the first measured with `noise`."""
    believed = belief([1.0, np.exp(-0.2)], [0.3, 0.3], noise=noise)
    found = [list(simulate_regret(question(2), believed, [0], seed=n))[1] for n in range(40)]
    return float(np.mean(found))


@pytest.mark.parametrize("noise", [1e-6, 0.02, 0.09, 0.5, 1e4])
def test_regret_after_a_noisy_run_has_its_closed_form(noise):
    """E min(A, b) of a normal A."""

    def least(spread):
        return float(
            -0.2 - spread * (norm.pdf(0.2 / spread) - 0.2 / spread * norm.sf(0.2 / spread))
        )

    shift_sd = 0.3**2 / np.sqrt(0.3**2 + noise)
    assert regret_after(noise) == pytest.approx(
        least(shift_sd) - least(0.3 * np.sqrt(2)), abs=0.008
    )
