"""Run a chaos scenario of each kind. `python -m tests.chaos --scenarios 200` runs more."""

import pytest

from tests.chaos.runner import run
from tests.chaos.scenario import KINDS

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("number", range(len(KINDS)))
def test_nothing_is_left_running_lost_doubled_or_overspent(number):
    result = run(2026, number)
    assert result.wrong == [], "\n".join([", ".join(result.kinds), *result.log])
