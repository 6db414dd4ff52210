"""Seconds to restart an elastic job, by outcome and type."""

import pandas as pd
import pytest

from models.job.restarts import NO_RESTARTS, PRIOR_S, fit_restarts


def test_a_few_restarts_outweigh_the_prior_of_their_outcome():
    row = {"outcome": "fewer", "instance_type": "a", "seconds": 30.0}
    known = fit_restarts(pd.DataFrame([row] * 4))
    assert known.expected_s("fewer", ["a"])[0] == pytest.approx(30, rel=0.04)
    assert PRIOR_S["fewer"] < known.expected_s("fewer", ["other"])[0]
    prior = NO_RESTARTS.expected_s("replaced", ["a"])
    assert known.expected_s("replaced", ["a"]) == pytest.approx(prior, rel=0.01)
