"""Bayesian optimisation as a rival: it finds the best before it has bought all, and its runs serve all questions."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from models.campaign.candidates import Costs
from tests.benchmarks.policies import Bayesian, numbers
from tests.benchmarks.replay import Ground, ground_of, replay

KINDS = pd.DataFrame({"name": ["m"], "cores": [4.0], "bandwidth_gbps": [1.0]})
COSTS = Costs()


def ground() -> Ground:
    """A smooth world: step by machines and devices of each, best in the middle."""
    rows = [
        {
            "workload": "w",
            "cluster": f"{machines}xm",
            "layout": str(devices),
            "batch_per_device": str(240 // machines // devices),
            "step_s": 1.0 + 0.3 * (machines - 4) ** 2 + 0.2 * (devices - 2) ** 2,
        }
        for machines in (1, 2, 3, 4, 5, 6)
        for devices in (1, 2, 4)
        if 240 % (machines * devices) == 0
    ]
    return ground_of(pd.DataFrame(rows), "w", usd={"m": 1.0}, devices={"m": 4}, batches=1, least=2)


@pytest.mark.parametrize("trusting", [False, True])
def test_it_finds_what_it_is_asked_for_before_it_has_bought_everything(trusting: bool) -> None:
    place = ground()
    fastest = next(
        at for at, one in enumerate(place.questions) if one.name.startswith("fastest at")
    )
    found = []
    for seed in range(3):
        policy = Bayesian(
            place, numbers(place.rows, KINDS, {"m": 4}), seed=seed, costs=COSTS, trusting=trusting
        )
        while (chosen := policy.choices()[fastest]) is None or place.step_s[
            chosen
        ] > place.step_s.min():
            for at in policy.next().places:
                policy.tell(at, float(place.step_s[at]))
        found.append(len(policy.seen))
    assert np.median(found) <= len(place.step_s) * 2 / 3


def test_it_buys_everything_once_and_groups_what_it_may() -> None:
    place = ground()
    features = numbers(place.rows, KINDS, {"m": 4})
    assert features.mean(axis=0) == pytest.approx(0.0, abs=1e-9) and features.std(
        axis=0
    ) == pytest.approx(1.0)
    curves = [
        replay(
            place,
            Bayesian(place, features, seed=1, costs=COSTS, at_once=at_once, per_dollar=True),
            COSTS,
        )
        for at_once in (1, 4)
    ]
    assert [curve["runs"].iloc[-1] for curve in curves] == [len(place.step_s)] * 2
    assert [curve["regret"].iloc[-1] for curve in curves] == [0.0, 0.0]
    assert (
        curves[1]["usd"].iloc[-1] < curves[0]["usd"].iloc[-1] and curves[1]["runs"].diff().max() > 1
    )
