"""A chaos scenario of each kind; `python -m tests.chaos --scenarios 200` is the whole."""

import pytest

from tests.chaos.runner import run
from tests.chaos.scenario import KINDS

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("number", range(len(KINDS)))
def test_nothing_is_left_running_lost_doubled_or_overspent(number):
    result = run(2026, number)
    assert result.wrong == [], "\n".join([", ".join(result.kinds), *result.log])


def test_a_seed_is_the_same_story_every_time():
    first, second = run(2026, 9), run(2026, 9)
    assert first.log and len(first.log) == len(second.log)
