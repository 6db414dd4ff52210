"""Runs one scenario, or many, and says what did not hold."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass, field
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
    """`wrong` is empty where the scenario passed; `log` tells its story, `struck` what came to pass, how often."""

    scenario: Scenario
    wrong: tuple[str, ...]
    log: Sequence[str] = field(default_factory=list)
    struck: Counter[str] = field(default_factory=Counter)


def run(
    one: Scenario, folder: Path | None = None, prepare: Callable[[Campaigns], object] | None = None
) -> Result:
    """In a folder of its own, which is gone afterwards unless it is given."""
    if folder is None:
        with TemporaryDirectory(
            prefix="srift-chaos-", dir=_MEMORY if _MEMORY.is_dir() else None
        ) as made:
            return run(one, Path(made), prepare)
    world = ChaosAws(
        rng=random.Random(f"world/{one.seed}"), troubles=tuple(one.troubles), deaths=one.deaths, faults=one.faults,
        capacity=one.capacity, lag_s=one.lag_s, fleet_errors=[*one.fleet_errors],
    )  # fmt: skip
    world.account.spot |= one.spot
    world.s3.skew_s, world.s3.cut, world.s3.page = one.skew_s, one.cut, one.page
    campaigns = Campaigns.of(one, world, folder)
    if prepare is not None:
        prepare(campaigns)
    with mortal(world, known_offers()), redirect_stderr(StringIO()):
        try:
            campaigns.run()
            campaigns.mend()
            wrong = complaints(campaigns)
        except Exception as error:
            world.note(f"{type(error).__name__}: {error}")
            wrong = [f"{type(error).__name__}: {error}"]
    return Result(scenario=one, wrong=tuple(wrong), log=world.log, struck=world.struck)
