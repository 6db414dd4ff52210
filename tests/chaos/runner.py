"""Run one scenario and return what did not hold."""

from contextlib import redirect_stderr
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.chaos.checks import Checks
from tests.chaos.controller import Campaigns, known_offers
from tests.chaos.mortal import mortal
from tests.chaos.scenario import scenario

_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, kw_only=True)
class Result:
    """`wrong`: broken invariants. `log`: the story."""

    number: int
    kinds: list[str]
    wrong: list[str]
    log: list[str]


def run(seed, number):
    world = scenario(seed, number)
    folder = TemporaryDirectory(prefix="srift-chaos-", dir=_MEMORY if _MEMORY.is_dir() else None)
    with folder as path, mortal(world, known_offers()), redirect_stderr(StringIO()):
        try:
            campaigns = Campaigns(world, Path(path))
            campaigns.run()
            campaigns.mend()
            wrong = Checks(campaigns).complaints()
        except Exception as error:
            wrong = [f"{type(error).__name__}: {error}"]
    return Result(number=number, kinds=world.kinds, wrong=wrong, log=world.log)
