"""Everything that can be had, and what is known of it so far: a bound of each, the expectation and draws of a few.

A row is a shape (shapes.py) in a market and zone. Bounds come from the model's `least_seconds`, which no prediction of
it undercuts; hours and dollars of a job rise with its step time (spot.py), so that theirs bound them too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import pandas as pd

from .arrays import BoolArray, FloatArray, IntArray
from .circumstances import spot
from .clusters import Refusal
from .offered import Offered
from .outlook import drawn_hours_at, hours_at
from .setups import SetupArrays
from .workload import Workload


class StepModel(Protocol):
    """What planning asks of a step-time model. Draws of a setup must not depend on what else is asked about."""

    def compute_line(self, workload: str, instance_type: str) -> tuple[float, float]:
        """(a, k): forward and backward of one device take about a + k * batch seconds."""

    def peak_bytes(self, workload: str, instance_type: str, batch: int) -> float:
        """Peak memory of one device, NaN where unknown."""

    def least_seconds(self, arrays: SetupArrays) -> FloatArray:
        """(rows,) seconds that no prediction of these setups undercuts."""

    def predict_arrays(self, arrays: SetupArrays) -> pd.DataFrame:
        """step_s, step_low_s, step_high_s and bottleneck by row."""

    def draw_arrays(self, arrays: SetupArrays, *, count: int, seed: int) -> FloatArray:
        """(rows, count) joint draws of step seconds, in pairs about the prediction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """How many draws to take of step seconds and of luck, and from which seed. Raises ValueError for an odd number."""

    draws: int
    seed: int

    def __post_init__(self) -> None:
        if self.draws % 2:
            raise ValueError(f"{self.draws} draws: they come in pairs")


class Prospects:
    """Bounds of all rows at once; expectations and draws of those that are looked at, kept once known."""

    def __init__(self, workload: Workload, sold: Offered, *, fits: Refusal, model: StepModel, job: Job) -> None:
        self.sold, self.job = sold, job
        self._fits, self._model = fits, model
        self._steps = -(-workload.samples // np.maximum(sold.shapes.total, 1))[sold.shape] / 3600.0
        self._arrays = sold.shapes.arrays()
        least = model.least_seconds(self._arrays)[sold.shape] if len(sold) else np.zeros(0)
        self._least_work, self._work = least * self._steps, np.full(len(sold), np.nan)
        self.least_hours = hours_at(self._least_work, sold.met(slice(None)))
        self.hours = np.full(len(sold), np.nan)  # expected, where they were looked at; infinite where refused
        self._predicted: dict[int, int] = {}  # shape -> row of `_predictions`
        self._predictions: list[pd.DataFrame] = []
        self._drawn: dict[int, FloatArray] = {}
        self._refused: dict[int, bool] = {}

    def bound(self, what: str) -> FloatArray:
        """Expected "hours" or "usd" that no row undercuts; NaN where the price is unknown."""
        return self.least_hours if what == "hours" else self.sold.price * self.least_hours

    def expected(self, what: str) -> FloatArray:
        """The same as predicted, NaN where nobody has looked."""
        return self.hours if what == "hours" else self.sold.price * self.hours

    def look(self, rows: IntArray) -> None:
        """Ask the provider whether these can be had and the model how long they take."""
        fresh = rows[np.isnan(self.hours[rows])]
        shapes = np.unique(self.sold.shape[fresh])
        wanted = shapes[[one not in self._predicted for one in shapes.tolist()]]
        if len(wanted):
            first = len(self._predicted)
            self._predicted.update({one: first + at for at, one in enumerate(wanted.tolist())})
            self._predictions.append(self._model.predict_arrays(self._arrays.take(wanted)))
        step_s = self.predictions(fresh)["step_s"].to_numpy(float) if len(fresh) else np.zeros(0)
        self._work[fresh] = step_s * self._steps[fresh]
        self.hours[fresh] = hours_at(self._work[fresh], self.sold.met(fresh))
        self.hours[fresh[self._is_refused(fresh)]] = np.inf

    @property
    def drawn_for(self) -> int:
        """How many shapes were drawn for."""
        return len(self._drawn)

    def predictions(self, rows: IntArray) -> pd.DataFrame:
        """What the model said of rows that were looked at, aligned with them."""
        if len(self._predictions) > 1:
            self._predictions = [pd.concat(self._predictions, ignore_index=True)]
        places = [self._predicted[one] for one in self.sold.shape[rows].tolist()]
        return self._predictions[0].iloc[places].reset_index(drop=True)

    def draws(self, rows: IntArray) -> FloatArray:
        """(rows, draws) step seconds."""
        shapes = self.sold.shape[rows].tolist()
        wanted = np.array([one for one in dict.fromkeys(shapes) if one not in self._drawn], dtype=np.intp)
        if len(wanted):
            drawn = self._model.draw_arrays(self._arrays.take(wanted), count=self.job.draws, seed=self.job.seed)
            self._drawn.update(zip(wanted.tolist(), drawn, strict=True))
        return np.array([self._drawn[one] for one in shapes]).reshape(len(shapes), self.job.draws)

    def chance(self, rows: IntArray, what: str, limit: float) -> FloatArray:
        """Share of joint draws of step times, start-up and interruptions that keep to the limit."""
        work = self.draws(rows) * self._steps[rows, None]
        hours = drawn_hours_at(work, self._work[rows], self.sold.met(rows), seed=self.job.seed)
        value = hours if what == "hours" else self.sold.price[rows, None] * hours
        return np.asarray(np.mean(value <= limit, axis=1), dtype=float)

    def hopeless(self, rows: IntArray, what: str, limit: float, p_required: float) -> BoolArray:
        """Which rows cannot keep to the limit with that probability, by what is known of their step time.

        Draws come in pairs about the prediction, and one of each pair takes no less work than predicted, whatever luck
        does: of those, too few start soon enough where a limit is exceeded by work and by the start-up that the part
        beyond a half keeps to.
        """
        work = np.where(np.isnan(self._work[rows]), self._least_work[rows], self._work[rows])
        met = self.sold.met(rows)
        beyond = max(p_required - 0.5, 0.0)
        startup_s = spot.drawn_startup(met.startup_s, met.startup_log_sd, draws=self.job.draws, part=beyond)
        least = startup_s / 3600 + work
        value = least if what == "hours" else self.sold.price[rows] * least
        return np.asarray((p_required > 0.5) & (value > limit * (1 + 1e-9)), dtype=bool)

    def _is_refused(self, rows: IntArray) -> BoolArray:
        if self.sold.all_fit:
            return np.zeros(len(rows), dtype=bool)
        for row, cluster in zip(rows.tolist(), self.sold.cluster[rows].tolist(), strict=True):
            if cluster not in self._refused:
                self._refused[cluster] = bool(self._fits(self.sold.setup(row).cluster))
        return np.array([self._refused[one] for one in self.sold.cluster[rows].tolist()], dtype=bool)
