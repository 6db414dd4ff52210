"""The local families as arrays against the general form of every family."""

from __future__ import annotations

import numpy as np
import pytest

from models.effects import LOCAL, covariance
from models.local import Local
from models.variances import starting_variances
from tests.models.test_regression import features, strangers


def test_the_local_covariance_is_that_of_its_families_in_any_table() -> None:
    seen, variances = features(42, 0), starting_variances()
    measured, tables = Local.of(seen, variances), Local.tables(seen)
    for asked in (seen, features(25, 7, workloads=5, arrangements=6), strangers(seen)):
        found = measured.covariance(Local.of(asked, variances, tables))
        assert found == pytest.approx(covariance(list(LOCAL), variances, seen, asked), abs=1e-15)
        own = Local.of(asked, variances)
        assert own.variance == pytest.approx(np.diag(covariance(list(LOCAL), variances, asked, asked)))
        some = np.array([3, 1])
        assert own.take(some).covariance(own) == pytest.approx(own.covariance(own)[some])
    assert measured.covariance(measured).max() > 0
    assert (measured.covariance(Local.of(strangers(seen), variances, tables)) == 0).all()
