"""How long retraining and asking take: a model is fitted, registered in a folder of its own and asked as pullers do."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd

from models.learning import TrainingData
from models.step_time import fit

from .registry import Provenance, load_served, log_challenger, promote
from .threads import one_thread

_MANY = 10_000


def speeds(data: TrainingData, *, repeats: int, seed: int) -> pd.DataFrame:
    """Columns what, rows, median_s, most_s over `repeats`: a fit, and through MLflow one prediction and 10,000.

    Each of the 10,000 is a row of the data, again and again where there are fewer. Nothing is left behind.
    """
    setups = data.runs.drop(columns=["step_s", "sync_s", "step_spread"], errors="ignore").reset_index(drop=True)
    many = setups.iloc[np.resize(np.arange(len(setups)), _MANY)].reset_index(drop=True)
    with one_thread():  # as retraining does; a puller's program sets its own
        model = fit(data, seed=seed)
        found = [("fit", len(data.runs), _timed(lambda: fit(data, seed=seed), repeats))]
    with tempfile.TemporaryDirectory(prefix="srift-speed-") as folder:
        provenance = Provenance(
            training_digest="speed", training_rows=len(data.runs), code_commit="", seed=seed, refresh_id="speed"
        )
        version = log_challenger(
            Path(folder), model.provider, model, scoreboard=pd.DataFrame(), card="speed", provenance=provenance
        )
        promote(Path(folder), model.provider, version, "to be asked")
        served = load_served(Path(folder), model.provider)
        for what, asked in (("one prediction", setups.iloc[:1]), ("predictions", many)):
            served.predict(asked)
            found.append((what, len(asked), _timed(partial(served.predict, asked), repeats)))
    rows = [(what, count, float(np.median(seconds)), max(seconds)) for what, count, seconds in found]
    return pd.DataFrame(rows, columns=["what", "rows", "median_s", "most_s"])


def _timed(work: Callable[[], object], repeats: int) -> list[float]:
    seconds = []
    for _ in range(repeats):
        before = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - before)
    return seconds
