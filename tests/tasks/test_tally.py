"""A campaign ends within its cap, the machines' way out included."""

from __future__ import annotations

import math

import pytest

from models.campaign import Launch
from models.cloud import Cluster
from tasks import tally
from tasks.tally import RELEASE_S, Tally
from tests.fakes import offer


@pytest.mark.parametrize(("spent", "ends_at"), [(0.0, 10.0 - RELEASE_S), (1.0 - 1e-9, 0.0)])
def test_a_launch_must_end_while_there_is_money_left_to_let_its_machines_go(
    monkeypatch: pytest.MonkeyPatch, spent: float, ends_at: float
) -> None:
    monkeypatch.setattr(tally.time, "monotonic", lambda: 0.0)
    launch = Launch(cluster=Cluster.of((2, offer(180.0))), items=(), est_s=5.0, est_usd=0.5, reason="")
    stop_s = Tally(cap_usd=1.0, stop_at=math.inf, usd=spent).stop_of(launch)
    assert stop_s == pytest.approx(ends_at)
