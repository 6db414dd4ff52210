"""Runs one scenario and returns what did not hold."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.chaos.checks import complaints
from tests.chaos.controller import Campaigns, known_offers
from tests.chaos.mortal import mortal
from tests.chaos.scenario import Scenario
from tests.chaos.world import ChaosAws

_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """`wrong`: broken invariants. `log`: the story."""

    scenario: Scenario
    wrong: tuple[str, ...]
    log: Sequence[str]


def run(one: Scenario) -> Result:
    world = ChaosAws(
        rng=random.Random(f"world/{one.seed}"),
        troubles=tuple(one.troubles),
        deaths=one.deaths,
        faults=one.faults,
        capacity=one.capacity,
        lag_s=one.lag_s,
        fleet_errors=[*one.fleet_errors],
    )
    world.account.spot |= one.spot
    world.s3.skew_s, world.s3.cut, world.s3.page = one.skew_s, one.cut, one.page
    folder = TemporaryDirectory(prefix="srift-chaos-", dir=_MEMORY if _MEMORY.is_dir() else None)
    with folder as path, mortal(world, known_offers()), redirect_stderr(StringIO()):
        try:
            campaigns = Campaigns.of(one, world, Path(path))
            campaigns.run()
            campaigns.mend()
            wrong = complaints(campaigns)
        except Exception as error:
            wrong = [f"{type(error).__name__}: {error}"]
    return Result(scenario=one, wrong=tuple(wrong), log=world.log)
