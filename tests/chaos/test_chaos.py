"""Chaos in a small form: a scenario of each kind; and every check fails where the guard that it stands for is gone.

`python -m tests.chaos --scenarios 200 --seed 2026` is the whole.
"""

from __future__ import annotations

import pytest

from tests.chaos.mutations import MUTATIONS, Mutation
from tests.chaos.runner import run
from tests.chaos.scenario import KINDS, scenario


@pytest.mark.parametrize("number", range(len(KINDS)))
def test_whatever_goes_wrong_nothing_is_left_running_lost_doubled_or_overspent(number: int) -> None:
    result = run(scenario(2026, number))
    assert result.wrong == (), "\n".join([", ".join(result.scenario.kinds), *result.log])


def test_a_seed_is_the_same_story_every_time() -> None:
    first, second = run(scenario(2026, 9)), run(scenario(2026, 9))
    assert [line.partition("(process")[0] for line in first.log] == [
        line.partition("(process")[0] for line in second.log
    ]
    assert first.struck == second.struck


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda one: one.name)
def test_a_guard_that_is_taken_out_is_missed(mutation: Mutation) -> None:
    assert run(mutation.scenario()).wrong == ()
    with mutation.without():
        broken = run(mutation.scenario(), prepare=mutation.prepare)
    assert any(mutation.says in sentence for sentence in broken.wrong), [*broken.wrong, *broken.log]
