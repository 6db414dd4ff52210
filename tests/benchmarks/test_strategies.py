"""The bandwidth at which compression stops to pay, read off a table."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from tests.benchmarks.strategies import BATCHES, MBITS, crossing, settings


@pytest.mark.parametrize("at", [0.06, 0.2, 0.5, 2.9])
def test_the_crossing_lies_where_the_gain_is_nothing_and_is_unknown_where_it_never_is(at: float) -> None:
    gbps = np.array(MBITS) / 1000
    table = pd.DataFrame({"gbps": gbps, "gain": np.log(at / gbps)}).sample(frac=1.0, random_state=1)
    assert crossing(table, "gain") == pytest.approx(at)
    assert np.isnan(crossing(table.assign(gain=1.0), "gain")) and np.isnan(crossing(table.assign(gain=-1.0), "gain"))


def test_every_type_and_workload_has_its_settings() -> None:
    text = settings()
    assert text.count("[local.instance_types.") == len(MBITS) and text.count("[workloads.") == len(BATCHES)
