"""Predict step seconds with 90 % intervals and joint draws.

A model covers one provider. Equal data and an equal seed give equal models.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from operator import itemgetter
from typing import Any

import numpy as np
import pandas as pd
import scipy

from ..domain.cluster import InstanceType, parse_cluster
from ..domain.numeric import Z_90, FloatArray, IntArray
from ..domain.setup_table import column, require_known
from ..domain.workload import MODE_COLUMNS, MODES, Mode, Workload
from .dataset import (
    Exchange,
    TrainingData,
    at_nominal_speed,
    by_variant,
    definition_digests,
    exchanges,
    flops_per_sample,
    training_rows,
)
from .formula import Times
from .input import Loaders, separated
from .levels import LENGTHS, Block, Regression, Rows, distinct, kernel
from .machine_specs import Machine, data_sheets, device_kind, read_machines, sheets_of
from .memory import MemoryModel, memory_of
from .nearest import Nearness
from .one_device import OneDevice, Points
from .rows import PROBE, Point, SetupFacts, one_device_points, run_noise, run_weights
from .setup_arrays import SetupArrays, read_setups, variant, workload_and_mode

__all__ = ["StepTimeModel", "TrainingData", "fit"]

LIMITS = (
    "compute",
    "communication inside a node",
    "communication between nodes",
    "stragglers",
    "input",
)

# Communication, stragglers or loading are the bottleneck above the first fraction of the step.
# Making batches is the bottleneck above the second fraction of the compute.
_LIMITED, _MOSTLY = 0.2, 0.5
# Setups per chunk of predictions; setups per chunk of formula_seconds; most setups of one
# covariance matrix.
_CHUNK, _MANY, MOST_JOINT = 2500, 200_000, 4000
# Standard deviation of log step seconds for each doubling of devices beyond the largest measured
# number: the library may switch to another algorithm.
_BEYOND_SD = 0.1
# Directions of one device's log seconds become parameters only if their standard deviation is
# larger. Their number is limited, because a workload may have thousands of batches.
_UNKNOWN_SD, _MOST_UNKNOWN = 0.02, 100
_PSEUDO = 4.0  # number of groups that a level's initial spread counts for
_APART = np.full((1, LENGTHS.shape[1]), 1e-3)  # tiny lengths: run noise differs between setups
_WAVES = 128  # random Fourier features of each kernel


def bottlenecks(
    exposed: FloatArray, uneven: FloatArray, *, input_part: FloatArray, machines: FloatArray
) -> list[str]:
    """Return the bottleneck of each setup, one of LIMITS.

    Args:
        exposed: (rows,) fraction of the step spent on communication that compute does not hide.
        uneven: (rows,) fraction of the step that an average rank waits for the slowest rank.
        input_part: (rows,) fraction of the compute spent on making batches.
        machines: (rows,) number of machines.
    """
    across = np.where(machines > 1, "communication between nodes", "communication inside a node")
    labels = np.where(
        uneven > _LIMITED, "stragglers", np.where(input_part > _MOSTLY, "input", "compute")
    )
    return [
        str(one) for one in np.where((exposed > _LIMITED) & (exposed >= uneven), across, labels)
    ]


def waits(input_share: FloatArray, exposed: FloatArray) -> list[bool]:
    """Return, for each step, True if data loading is its bottleneck.

    `input_share` (rows,) is the fraction of the step spent waiting for loading. `exposed` (rows,)
    is the fraction spent on communication that compute does not hide.
    """
    return [bool(one) for one in (input_share > _LIMITED) & (input_share >= exposed)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The measurements that a model was fitted to.

    Attributes:
        setups: the distinct setups, one per row.
        log_step: (rows,) log of the median step seconds of a setup's runs.
        weight: (rows,) effective number of runs of a setup.
        run_sd: standard deviation of the log seconds of one setup's runs at different hours.
        probes: all-reduces that were measured without training, with columns cluster, bytes and
            seconds.
        profiled: the instance types with profiles.
    """

    setups: SetupArrays
    log_step: FloatArray
    weight: FloatArray
    run_sd: float
    probes: pd.DataFrame
    profiled: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class StepTimeModel:
    """Predicts step seconds, intervals, joint draws and peak memory for one provider.

    Internally, a workload in one mode is called a group and has a name (see setup_arrays.py).
    """

    provider: str
    facts: SetupFacts
    regression: Regression
    measured: Measured
    memory: MemoryModel = field(default_factory=MemoryModel)
    loaders: Loaders = field(default_factory=Loaders)
    guessed: frozenset[str] = frozenset()  # workloads predicted from facts, without measurements
    trained_on: tuple[str, ...] = ()  # ids of the training runs
    # digests of the definitions at the time of the fit
    workload_digests: dict[str, str] = field(default_factory=dict)
    type_digests: dict[str, str] = field(default_factory=dict)

    @property
    def machines(self) -> dict[str, Machine]:
        return self.facts.machines

    @property
    def workloads(self) -> tuple[str, ...]:
        """Return the names of all groups that can be predicted."""
        return tuple(sorted({*self.facts.alone.workloads, *self.guessed}))

    @property
    def instance_types(self) -> tuple[str, ...]:
        return tuple(sorted(self.machines))

    @property
    def measured_types(self) -> frozenset[str]:
        """Return the instance types that have runs or profiles."""
        return frozenset({*self.measured.setups.met_types, *self.measured.profiled})

    def can_guess(self, instance_type: str) -> bool:
        """Return True if the model can predict unmeasured workloads on this instance type.

        The type must have an accelerator whose rate is known.
        """
        machine = self.machines[instance_type]
        believed = self.facts.alone.sheets.get(
            device_kind(instance_type, machine), (0.0, 0.0, 0.0)
        )[2]
        return machine.accelerated and believed > 0

    def modes_of(self, workload: str) -> tuple[Mode, ...]:
        """Return the modes in which a workload can be predicted."""
        return tuple(one for one in MODES if variant(workload, one) in self.workloads)

    def met_workload(self, workload: Workload) -> bool:
        """Return True if the model can predict the workload in at least one of its modes.

        The workload's definition must also have the digest that it had when it was measured.
        """
        met = set(workload.modes) & set(self.modes_of(workload.name))
        return bool(met) and self.workload_digests.get(workload.name) == workload.digest

    def as_measured(self, workload: Workload) -> Workload:
        """Return the workload with only the modes in which it can be predicted."""
        known = set(self.modes_of(workload.name))
        return replace(workload, modes=tuple(one for one in workload.modes if one in known))

    def met_type(self, instance_type: InstanceType) -> bool:
        """Return True if the model knows the instance type and its definition has not changed."""
        name = instance_type.name
        return name in self.machines and self.type_digests.get(name) == instance_type.digest

    # predictions

    def predict(self, setups: pd.DataFrame) -> pd.DataFrame:
        """Predict the step seconds of setups.

        Args:
            setups: frame with measurement columns, at least workload, cluster, batch_per_device.

        Returns:
            A frame with the index of `setups` and these columns:

            - step_s, and step_low_s to step_high_s, the 90 % interval of a new measurement
            - samples_per_s
            - compute_s: compute seconds of the slowest rank
            - communication_s: seconds of all collectives
            - exposed_communication_s: seconds of communication that compute does not hide
            - bottleneck: one of LIMITS
            - input_s: seconds that loading adds to the step
            - input_by: what would shorten them, "loader workers", "processors" or ""
            - nearest_doublings: distance to the nearest measured setup (nearest.py); NaN if the
              workload has no runs

        Raises:
            ValueError: if a workload, instance type or mode is unknown, if a setup belongs to
                another provider, or if a text cannot be parsed.
        """
        return self.predict_arrays(self._read(setups)).set_index(setups.index)

    def predict_arrays(self, arrays: SetupArrays) -> pd.DataFrame:
        """Return the frame of `predict` for setups given as arrays. Its index starts at 0."""
        return pd.concat(
            [self._predict(arrays.take(part)) for part in _chunks(arrays, _CHUNK)],
            ignore_index=True,
        )

    def _predict(self, arrays: SetupArrays) -> pd.DataFrame:
        """Return the columns of `predict` for one chunk of setups."""
        many = len(arrays.workloads)
        mean, variance, formula, compute, slowest, communication, uneven, input_part = np.zeros(
            (8, many)
        )
        covariance = self._covariance
        for part in self._parts(arrays):
            own, at, times = covariance[np.ix_(part.columns, part.columns)], part.at, part.times
            level = ((part.slopes @ own) * part.slopes).sum(axis=1)
            level += sum((one**2).sum(axis=1) for _, one in part.unknown) + part.alone.variance
            mean[at], variance[at] = part.mean, part.widened**2 * level + part.near + part.noise
            formula[at], compute[at], communication[at] = (
                times.step_s,
                times.compute_s,
                times.communication_s,
            )
            uneven[at] = (times.compute_s - times.mean_compute_s) / times.step_s
            input_part[at] = self.facts.input_part.get(part.cell, 0.0)
        rest, spread = np.exp(mean), np.sqrt(variance)
        slowest = np.minimum(compute / formula, 1.0)
        exposed = 1 - slowest
        step, low, high, by = (
            rest,
            np.exp(mean - Z_90 * spread),
            np.exp(mean + Z_90 * spread),
            [""] * many,
        )
        wait = self.loaders.wait(arrays, self.machines)
        if wait is not None:
            step, by = wait.step_s(rest, slowest), wait.helped_by(rest, slowest)
            low, high = wait.interval(mean, spread, slowest)
        share = rest / step
        labels = bottlenecks(
            exposed * share, uneven * share, input_part=input_part, machines=arrays.instances
        )
        labels = [
            "input" if one else label
            for one, label in zip(waits(1 - share, exposed * share), labels, strict=True)
        ]
        return pd.DataFrame(
            {
                "step_s": step,
                "step_low_s": low,
                "step_high_s": high,
                "samples_per_s": arrays.samples / step,
                "compute_s": slowest * rest,
                "communication_s": communication / formula * rest,
                "exposed_communication_s": exposed * rest,
                "bottleneck": labels,
                "input_s": step - rest,
                "input_by": by,
                "nearest_doublings": self._nearness.doublings(arrays),
            }
        )

    def formula_seconds(self, arrays: SetupArrays) -> FloatArray:
        """Return a (rows,) array: step seconds from the learned formula alone.

        This is faster than `predict_arrays`, but does not use the residuals of similar setups.
        """
        found, computed = np.empty((2, len(arrays.workloads)))
        alike = np.lexsort(
            (arrays.kind[:, 0], arrays.workloads.codes)
        )  # so that a chunk has few cells
        for chunk in (alike[one] for one in _chunks(arrays, _MANY)):
            rows, points, _ = self.facts.lay_out(arrays.take(chunk))
            for (workload, kind), at in _cells(rows):
                own = rows.take(at)
                *_, moves = self._one_device(workload, own, points)
                times = self.regression.times(own, workload, kind, moves)
                found[chunk[at]] = times.step_s
                computed[chunk[at]] = np.minimum(times.compute_s / times.step_s, 1.0)
        wait = self.loaders.wait(arrays, self.machines)
        return found if wait is None else wait.step_s(found, computed)

    def joint(self, setups: pd.DataFrame) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Return the joint normal distribution of log step seconds as three arrays.

        They are the mean (setups,), the covariance (setups, setups) without the noise of a run, and
        the variance of that noise (setups,).

        Raises:
            ValueError: if there are more than 4,000 setups, or as in `predict`.
        """
        if len(setups) > MOST_JOINT:
            raise ValueError(
                f"{len(setups)} setups are too many: joint takes at most {MOST_JOINT} setups"
            )
        many, arrays = len(setups), self._read(setups)
        mean, noise, wider, computed = np.zeros((4, many))
        slopes = np.zeros((many, self.regression.columns.count))
        unknown: dict[object, FloatArray] = {}
        near = np.zeros((many, many))
        parts = list(self._parts(arrays))
        for part in parts:
            computed[part.at] = np.minimum(part.times.compute_s / part.times.step_s, 1.0)
            mean[part.at], noise[part.at], wider[part.at] = part.mean, part.noise, part.widened
            slopes[np.ix_(part.at, part.columns)] = part.slopes
            for key, own in part.unknown:
                unknown.setdefault(key, np.zeros((many, own.shape[1])))[part.at] = own
            white = part.white[:, part.near_at]
            left = kernel(part.features, part.features, part.spread) - white.T @ white
            near[np.ix_(part.at, part.at)] = (
                part.wider**2 * left * np.multiply.outer(part.several, part.several)
            )
        level = slopes @ self._covariance @ slopes.T
        for own in unknown.values():
            level += own @ own.T
        for one, other in product(parts, parts):
            if one.cell[0] == other.cell[0]:
                left = self.facts.alone.covariance(one.alone.asked, other.alone.asked)
                left -= one.alone.tied @ other.alone.tied.T
                by_row = left[np.ix_(one.alone.point, other.alone.point)]
                level[np.ix_(one.at, other.at)] += by_row * np.multiply.outer(
                    one.alone.slope, other.alone.slope
                )
        covariance = level * np.multiply.outer(wider, wider) + near
        wait = self.loaders.wait(arrays, self.machines)
        return (
            (mean, covariance, noise)
            if wait is None
            else wait.joint(mean, covariance, noise, computed)
        )

    def draws(self, setups: pd.DataFrame, *, count: int, seed: int) -> FloatArray:
        """Return a (setups, count) array: joint draws of step seconds.

        The draws of a setup do not depend on which other setups are drawn. They come in pairs whose
        logs lie symmetrically about the log of the prediction.

        Raises:
            ValueError: as in `predict`.
        """
        return self.draw_arrays(self._read(setups), count=count, seed=seed)

    def draw_arrays(self, arrays: SetupArrays, *, count: int, seed: int) -> FloatArray:
        """Return the result of `draws` for setups given as arrays."""
        drawn = np.empty((len(arrays.workloads), count))
        for chunk in _chunks(arrays, _CHUNK):
            drawn[chunk] = self._draw(arrays.take(chunk), count=count, seed=seed)
        return drawn

    def _draw(self, arrays: SetupArrays, *, count: int, seed: int) -> FloatArray:
        """Return (rows, count) joint draws for one chunk of setups."""
        many, half = len(arrays.workloads), (count + 1) // 2
        root = np.linalg.cholesky(self._covariance)
        shared = root @ np.random.default_rng([seed, 0]).standard_normal((len(root), half))
        mean, off, computed = np.zeros(many), np.zeros((many, half)), np.zeros(many)
        for part in self._parts(arrays):
            computed[part.at] = np.minimum(part.times.compute_s / part.times.step_s, 1.0)
            own = part.slopes @ shared[part.columns]
            for key, slopes in part.unknown:
                own += slopes @ _random(seed, key).standard_normal((slopes.shape[1], half))
            field_, whitened = self._drawn_near(part, count=half, seed=seed)
            own += (
                part.alone.slope[:, None]
                * self._drawn_alone(part, count=half, seed=seed)[part.alone.point]
            )
            near = (
                field_.at(part.features) - (part.white.T @ whitened)[part.near_at]
            ) * part.several[:, None]
            random = _random(seed, ("run", part.cell))
            run = _Field.draw(_APART, np.full(1, np.sqrt(part.noise)), random=random, count=half)
            mean[part.at], off[part.at] = (
                part.mean,
                part.widened * own + part.wider * near + run.at(part.features),
            )
        paired = np.stack([off, -off], axis=2).reshape(many, -1)[:, :count]
        rest = np.asarray(np.exp(mean[:, None] + paired), dtype=float)
        wait = self.loaders.wait(arrays, self.machines)
        if wait is None:
            return rest
        longer = np.stack(
            [
                _random(seed, ("loading", one)).standard_normal(half)
                for one in arrays.workloads.names
            ]
        )
        paired = np.stack([longer, -longer], axis=2).reshape(len(longer), -1)[:, :count]
        factor = np.exp(wait.log_sd[:, None] * paired[arrays.workloads.codes])
        return wait.step_s(rest, computed, factor=factor, about=np.exp(mean))

    def _drawn_near(self, part: _Part, *, count: int, seed: int) -> tuple[_Field, FloatArray]:
        """Return a pair that together gives draws of a cell's residual, given its measurements.

        The first are draws from the prior. The second are the whitened errors (places, count) of
        these draws at the cell's measured setups. `_draw` uses the errors to correct the draws.
        """
        kept = self._drawn(count, seed)
        if part.cell not in kept:
            field_ = _Field.of(part, seed=seed, count=count)
            whitened: FloatArray = np.zeros((0, count))
            if part.block is not None:
                measured = self.regression.rows.features[part.block.at]
                noise = _random(seed, ("noise", part.cell)).standard_normal((len(measured), count))
                sd = part.spread[2] * np.sqrt(
                    part.block.outlying / self.regression.weight[part.block.at]
                )
                off = field_.at(measured) + sd[:, None] * noise
                whitened = self.regression.neighbours(part.block).whitened(off)
            kept[part.cell] = field_, whitened
        found: tuple[_Field, FloatArray] = kept[part.cell]
        return found

    def _drawn(self, count: int, seed: int) -> dict[object, Any]:
        """Return the cache of draws, which all chunks of a call share. Keys are cells or workloads.

        Only the cache of the last pair of `count` and `seed` is kept.
        """
        if (count, seed) not in self._draws:
            self._draws.clear()
            self._draws[count, seed] = {}
        return self._draws[count, seed]

    @cached_property
    def _draws(self) -> dict[tuple[int, int], dict[object, Any]]:
        return {}

    def _drawn_alone(self, part: _Part, *, count: int, seed: int) -> FloatArray:
        """Return a (points, count) array: draws of the errors of one device's log seconds.

        The part of the errors that the regression's parameters z explain is left out.
        """
        alone, (workload, _) = self.facts.alone, part.cell
        off = alone.draws(part.alone.asked, count=count, seed=seed)
        if workload not in self.regression.points:
            return off
        kept = self._drawn(count, seed)
        if workload not in kept:
            trained, whitener = self.regression.points[workload]
            kept[workload] = whitener @ alone.draws(trained, count=count, seed=seed)
        return np.asarray(off - part.alone.tied @ kept[workload], dtype=float)

    @property
    def trained(self) -> frozenset[tuple[str, Mode]]:
        """Return the (workload, mode) pairs that can be predicted."""
        return frozenset(workload_and_mode(name) for name in self.workloads)

    def compute_line(
        self, workload: str, instance_type: str, mode: Mode = MODES[0]
    ) -> tuple[float, float]:
        """Return a and k such that one device computes for about a + k * batch seconds.

        The seconds are those of a forward and a backward pass.

        Raises:
            ValueError: if the workload, mode or instance type is unknown.
        """
        workload = variant(workload, mode)
        self._require([workload], [instance_type])
        least, most = self.facts.alone.reaches(workload)
        batches = np.unique(np.geomspace(least, max(most, 2 * least), 8))
        kind = device_kind(instance_type, self.machines[instance_type])
        seconds = np.exp(
            self.facts.alone.predict(
                self.facts.at([(workload, kind, one) for one in batches.tolist()])
            )
        )
        slope, intercept = (float(one) for one in np.polyfit(batches, seconds, 1, w=1 / seconds))
        return max(intercept, 0.0), max(slope, 0.05 * float(np.min(seconds / batches)))

    def peak_bytes(
        self,
        workload: str,
        instance_type: str,
        batch: int,
        ranks: int = 1,
        *,
        mode: Mode = MODES[0],
        accumulates: bool = False,
    ) -> float:
        """Return the peak bytes of one rank; NaN if the workload is unknown.

        `batch` is the samples of a device in a micro-step, `ranks` the number of ranks.
        `accumulates` is True if an optimizer step has several micro-steps.
        """
        return self.memory.peak_bytes(
            variant(workload, mode), instance_type, batch, ranks, accumulates=accumulates
        )

    # internals of the predictions

    def _require(self, workloads: Iterable[str], types: Iterable[str]) -> None:
        require_known(list(workloads), self.workloads, "workload")
        require_known(list(types), self.instance_types, "instance type")

    def _require_rates(self, arrays: SetupArrays) -> None:
        """Raise ValueError for an unmeasured workload on a device with an unknown rate."""
        for workload, name, _ in arrays.pairs():
            if workload in self.guessed and not self.can_guess(name):
                raise ValueError(
                    f"workload {workload!r} was never measured: profile it or run it on one machine"
                )

    def _read(self, setups: pd.DataFrame) -> SetupArrays:
        """Parse setups and check that the model can predict them; raises as `predict`."""
        other = {str(one) for one in column(setups, "provider", self.provider)} - {
            self.provider,
            "",
        }
        if other:
            raise ValueError(
                f"this model predicts {self.provider!r}, not provider {sorted(other)[0]!r}"
            )
        for name, known in MODE_COLUMNS.items():
            strange = {str(one) for one in column(setups, name, known[0])} - {*known, ""}
            if strange:
                raise ValueError(
                    f"unknown {name} {sorted(strange)[0]!r}; known: {', '.join(known)}"
                )
        arrays = read_setups(setups, {name: one.devices for name, one in self.machines.items()})
        for name in arrays.workloads.distinct:
            workload, mode = workload_and_mode(name)
            if name not in self.workloads and self.modes_of(workload):
                met = ", ".join(map(str, self.modes_of(workload)))
                raise ValueError(
                    f"workload {workload!r} was never measured in {mode}; known in: {met}"
                )
        self._require(arrays.workloads.distinct, arrays.names)
        self._require_rates(arrays)
        return arrays

    @cached_property
    def _covariance(self) -> FloatArray:
        """Return a (columns, columns) array: the posterior covariance of z."""
        return np.asarray(np.linalg.inv(self.regression.precision), dtype=float)

    @cached_property
    def _nearness(self) -> Nearness:
        return Nearness(self.measured.setups)

    @cached_property
    def _blocks(self) -> dict[tuple[str, str], Block]:
        return {block.name: block for block in self.regression.blocks}

    @cached_property
    def _bounds(self) -> dict[tuple[str, str], tuple[float, float]]:
        return {}

    def _held(self, block: Block) -> tuple[float, float]:
        """Return the least and the largest correction of a measured setup of this cell.

        A correction is what the residuals of similar setups add to log seconds. Corrections of
        predictions are clipped to this range.
        """
        if block.name not in self._bounds:
            fit, spread = self.regression, self.regression.residual_of(*block.name)[0]
            known = fit.neighbours(block)
            alike = kernel(known.features, known.features, spread)
            white = scipy.linalg.solve_triangular(known.factor, alike, lower=True)
            moved = white.T @ known.solved[:, -1]
            self._bounds[block.name] = min(float(moved.min()), 0.0), max(float(moved.max()), 0.0)
        return self._bounds[block.name]

    def _one_device(
        self, workload: str, own: Rows, points: Sequence[Point]
    ) -> tuple[IntArray, Points, FloatArray, FloatArray]:
        """Return the one-device points of a cell's rows.

        Returns:
            Four values: for each member (rows, members), the position of its point in the second
            value; the points; the derivatives (points, columns) of the points' log seconds with
            respect to z; and the shift (rows, members) of log seconds that the learned z causes.
        """
        used, place = np.unique(own.point[own.point >= 0], return_inverse=True)
        where = np.zeros(own.point.shape, dtype=np.intp)
        where[own.point >= 0] = place
        asked = self.facts.at([points[one] for one in used])
        if workload not in self.regression.points:
            return where, asked, np.zeros((len(used), 0)), np.zeros(own.point.shape)
        trained, whitener = self.regression.points[workload]
        tied = (whitener @ self.facts.alone.covariance(trained, asked)).T
        moved = tied @ self.regression.z[self.regression.columns.groups["alone", workload]]
        return where, asked, tied, np.where(own.point >= 0, moved[where], 0.0)

    def _parts(self, arrays: SetupArrays) -> Iterator[_Part]:
        """Yield the terms of the predictions, one `_Part` for each cell of the setups."""
        fit = self.regression
        rows, points, _ = self.facts.lay_out(arrays)
        for (workload, kind), at in _cells(rows):
            own = rows.take(at)
            where, asked, tied, moves = self._one_device(workload, own, points)
            values = np.tile(fit.values(workload, kind, fit.z), (len(at), 1))
            base, by, by_alone, times = fit.slopes(own, values, moves)
            point = np.take_along_axis(where, times.slowest[:, None], axis=1)[:, 0]
            keys = fit.columns.keys(workload, kind)
            met = [key for key in keys if key in fit.columns.groups]
            slopes = np.concatenate([fit.design(by, met), by_alone[:, None] * tied[point]], axis=1)
            unknown: list[tuple[tuple[str, object], FloatArray]] = [
                (key, fit.design(by, [key]) * _heavier(fit, key[0]))
                for key in keys
                if key not in fit.columns.groups
            ]
            left = np.diag(self.facts.alone.covariance(asked, asked)) - (tied**2).sum(axis=1)
            beyond = np.log2(np.maximum(own.line.ranks / self._reach.get(kind, np.inf), 1.0))
            unknown.append((("beyond", kind), _BEYOND_SD * beyond[:, None]))
            several = (own.line.ranks > 1).astype(float)
            spread, wider = fit.residual_of(workload, kind)
            near, mean, block = (
                several * (spread[:2] ** 2).sum(),
                base,
                self._blocks.get((workload, kind)),
            )
            features, near_at = distinct(own.features)
            white = np.zeros((0, len(features)))
            if block is not None:
                known = fit.neighbours(block)
                cross = kernel(known.features, features, spread)
                white = scipy.linalg.solve_triangular(
                    known.factor, cross, lower=True, overwrite_b=True
                )
                moved = (white.T @ known.solved)[near_at] * several[:, None]
                mean = base + np.clip(moved[:, -1], *self._held(block))
                slopes = slopes - moved[:, :-1]
                near = np.maximum(
                    near - several * np.einsum("ij,ij->j", white, white)[near_at], 0.0
                )
            yield _Part(
                cell=(workload, kind),
                at=at,
                mean=mean,
                times=times,
                columns=fit.columns.of(workload, kind),
                slopes=slopes,
                unknown=unknown,
                alone=_Alone(
                    asked=asked,
                    tied=tied,
                    point=point,
                    slope=by_alone,
                    variance=by_alone**2 * left[point],
                ),
                near=near * wider**2,
                noise=max(float(spread[2] * wider), self.measured.run_sd) ** 2,
                spread=spread,
                wider=wider,
                widened=fit.wider_levels(workload, kind),
                features=own.features,
                several=several,
                white=white,
                near_at=near_at,
                block=block,
            )

    @cached_property
    def _reach(self) -> dict[str, float]:
        """Return, by kind of device, the devices of the largest measured cluster, at least 2."""
        found: dict[str, float] = {}
        rows = self.regression.rows
        for name, ranks in zip(rows.kind, rows.line.ranks.tolist(), strict=True):
            found[name] = max(found.get(name, 2.0), ranks)
        return found


def fit(data: TrainingData, *, seed: int, calibrated: StepTimeModel | None = None) -> StepTimeModel:
    """Fit a model to the measurements of one provider.

    Runs without a positive finite step time are left out. Equal data and an equal seed give equal
    models.

    Args:
        data: the measurements.
        seed: the seed of thinning, the search and calibration.
        calibrated: a model of nearly the same data, whose calibration of intervals is reused.
            Without such a model, calibration takes most of the time of a fit.

    Raises:
        ValueError: if the data has neither a profile nor a valid run, or if it has measurements of
            several providers.
    """
    data, loaders = separated(by_variant(at_nominal_speed(data)))
    rows = training_rows(data, seed=seed)
    machines = read_machines(data.instance_types, rows.types)
    points, optimizer_part, input_part = one_device_points(rows, data.profiles, machines)
    flops = flops_per_sample(data)
    sheets = sheets_of(machines, data_sheets(), sorted(set(points["workload"].astype(str))))
    alone = OneDevice.fit(points, sheets=sheets, flops=flops)
    facts = SetupFacts(
        machines=machines,
        alone=alone,
        exchanges=exchanges(data),
        optimizer_part=optimizer_part,
        input_part=input_part,
    )
    measured = Measured(
        setups=rows.setups,
        log_step=np.log(rows.step_s),
        weight=run_weights(rows),
        run_sd=math.hypot(run_noise(rows), rows.speed_sd),
        probes=_probes(data.probes),
        profiled=tuple(sorted({str(one) for one in data.profiles.get("instance_type", ())})),
    )
    regression = lay_out(facts, measured)
    regression.fit(seed=seed)
    refined = replace(facts, slowness=regression.slowness())
    before, now = (list(one.kinds(measured.setups)) for one in (facts, refined))
    if before != now:  # learned link speeds change which link of a mixed cluster is the slowest
        regression = lay_out(refined, measured)
        regression.fit(seed=seed)
    if calibrated is None:
        regression.calibrate(seed=seed)
    else:
        regression.calibrate_as(calibrated.regression)
    facts = refined
    return StepTimeModel(
        provider=rows.provider,
        facts=facts,
        regression=regression,
        measured=measured,
        memory=memory_of(data, rows.setups, machines),
        loaders=loaders,
        trained_on=rows.run_ids,
        workload_digests=definition_digests(data.workloads, "workload"),
        type_digests=definition_digests(data.instance_types, "name"),
    )


def lay_out(facts: SetupFacts, measured: Measured) -> Regression:
    """Return the regression on the measurements. The caller calls `fit` or `restore` next."""
    several = np.flatnonzero(measured.setups.ranks > 1)
    laid, points, log_s = facts.lay_out(measured.setups.take(several))
    tied: dict[str, tuple[Points, FloatArray]] = {}
    alone, offsets = {}, {}
    for workload in sorted({one[0] for one in points}):
        own = [at for at, one in enumerate(points) if one[0] == workload]  # consecutive
        at = facts.at([points[one] for one in own])
        square, directions = np.linalg.eigh(facts.alone.covariance(at, at))
        largest = np.arange(len(square)) >= len(square) - _MOST_UNKNOWN
        kept = (square > _UNKNOWN_SD**2) & largest
        factor, whitener = (
            directions[:, kept] * np.sqrt(square[kept]),
            (directions[:, kept] / np.sqrt(square[kept])).T,
        )
        alone[workload], offsets[workload], tied[workload] = (
            (log_s[own], factor),
            own[0],
            (at, whitener),
        )
    log_step, weight = measured.log_step[several], measured.weight[several]
    if len(measured.probes):
        laid = laid.joined(facts.lay_out_probes(measured.probes))
        alone[PROBE], offsets[PROBE] = (np.zeros(0), np.zeros((0, 0))), 0
        log_step = np.append(log_step, np.log(measured.probes["seconds"].to_numpy(float)))
        weight = np.append(weight, np.ones(len(measured.probes)))
    return Regression(laid, log_step, weight, alone=alone, offsets=offsets, points=tied)


def _probes(probes: pd.DataFrame) -> pd.DataFrame:
    """Return median seconds of valid all-reduces on several machines, by cluster and bytes."""
    columns = ["cluster", "bytes", "seconds"]
    if not set(columns) <= set(probes.columns):
        return pd.DataFrame(columns=columns)
    numbers = probes[columns].assign(
        **{name: pd.to_numeric(probes[name], errors="coerce") for name in columns[1:]}
    )
    size, seconds = numbers["bytes"].to_numpy(float), numbers["seconds"].to_numpy(float)
    several = np.array([len(parse_cluster(str(one))) > 1 for one in numbers["cluster"]], dtype=bool)
    good = numbers[(size > 0) & (seconds > 0) & np.isfinite(size) & np.isfinite(seconds) & several]
    found: pd.DataFrame = good.groupby(["cluster", "bytes"], as_index=False).agg(
        seconds=("seconds", "median")
    )
    return found


def introduced(model: StepTimeModel, workload: Workload) -> StepTimeModel | None:
    """Return a model that also predicts the unmeasured `workload` on types with a known rate.

    None if the FLOPs of the workload are unknown, or if a workload with this name was measured.
    """
    name, flops = workload.name, workload.flops_per_sample
    if flops is None:
        return None
    found = all_introduced(model, {name: flops}, {name: float(workload.gradient_bytes or 0)})
    return found if name in found.guessed else None


def all_introduced(
    model: StepTimeModel, flops_per_sample: Mapping[str, float], gradient_bytes: Mapping[str, float]
) -> StepTimeModel:
    """Return a model that also predicts the unmeasured workloads among `flops_per_sample`.

    The keys of both mappings are workloads. Unknown `gradient_bytes` are absent or 0.
    """
    facts, memory = model.facts, model.memory
    new = {
        name: flops for name, flops in flops_per_sample.items() if name not in facts.alone.workloads
    }
    if not new:
        return model
    sizes = {name: Exchange(gradient_bytes.get(name, 0.0)) for name in new}
    for name, flops in new.items():
        memory = memory.with_facts(
            name, gradient_bytes=sizes[name].gradient_bytes, flops_per_sample=flops
        )
    alone = replace(facts.alone, flops=facts.alone.flops | new)
    return replace(
        model,
        facts=replace(facts, alone=alone, exchanges=facts.exchanges | sizes),
        memory=memory,
        guessed=model.guessed | set(new),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Alone:
    """The uncertainty of the one-device log seconds of each row's slowest machine.

    The part that the regression's parameters z explain is left out of `variance`.
    """

    asked: Points
    tied: FloatArray  # (asked, columns) derivatives of log seconds with respect to z
    point: IntArray  # (rows,) positions in `asked`
    slope: FloatArray  # (rows,) derivative of log step with respect to the member's log seconds
    variance: FloatArray  # (rows,) of log step, because of these seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """The terms from which the setups of one cell are predicted, with a row per setup."""

    cell: tuple[str, str]
    at: IntArray
    mean: FloatArray
    times: Times  # by the formula only
    columns: IntArray  # positions in z
    slopes: FloatArray  # (rows, columns) derivatives of log step with respect to z
    # derivatives with respect to deviations that have no measurements, by (level, name)
    unknown: list[tuple[tuple[str, object], FloatArray]]
    alone: _Alone
    near: FloatArray  # variance of the residual
    noise: float  # variance of one run
    spread: FloatArray
    wider: float  # factor that widens the spreads of the residual and of the noise
    widened: float  # factor that widens the spreads of the levels
    features: FloatArray
    several: FloatArray  # 1 for more than one device
    white: FloatArray  # (measured places, distinct features) whitened covariance
    near_at: IntArray  # (rows,) positions among the distinct features
    block: Block | None


@dataclass(frozen=True, slots=True)
class _Field:
    """Draws from a Gaussian-process prior, represented by random Fourier features.

    A draw at a setup does not depend on which other setups are drawn.
    """

    waves: FloatArray
    phases: FloatArray
    weights: FloatArray

    @classmethod
    def of(cls, part: _Part, *, seed: int, count: int) -> _Field:
        """Return `count` draws from the prior of a cell's residual."""
        return cls.draw(
            LENGTHS, part.spread[:2], random=_random(seed, ("field", part.cell)), count=count
        )

    @classmethod
    def draw(
        cls, lengths: FloatArray, spread: FloatArray, *, random: np.random.Generator, count: int
    ) -> _Field:
        """Return `count` draws of a sum of independent Gaussian processes.

        Process i has the length scales `lengths[i]` (features,) and the standard deviation
        `spread[i]`.
        """
        parts, features = lengths.shape
        waves = random.standard_normal((parts, _WAVES, features)) / lengths[:, None, :]
        phases = random.uniform(0, 2 * np.pi, (parts, _WAVES))
        scale = spread[:, None, None] * np.sqrt(2 / _WAVES)
        weights = scale * random.standard_normal((parts, _WAVES, count))
        return cls(waves.reshape(-1, features), phases.ravel(), weights.reshape(-1, count))

    def at(self, features: FloatArray) -> FloatArray:
        """Return a (rows, count) array: the values of the draws at `features` (rows, features)."""
        return np.asarray(np.cos(features @ self.waves.T + self.phases) @ self.weights, dtype=float)


def _random(seed: int, key: object) -> np.random.Generator:
    return np.random.default_rng([seed, zlib.crc32(repr(key).encode())])


def _heavier(fit: Regression, level: str) -> float:
    """Return the 95 % quantile of Student's t, divided by that of the normal distribution.

    The degrees of freedom are the number of groups at the level, plus the number of groups that the
    prior counts as.
    """
    groups = sum(name == level for name, _ in fit.columns.groups)
    return float(scipy.special.stdtrit(groups + _PSEUDO, 0.95) / Z_90)


def _cells(rows: Rows) -> list[tuple[tuple[str, str], IntArray]]:
    """Return, for each cell, its (workload, kind of device) and the positions of its rows."""
    many = len(rows.kind.names)
    pair = rows.workload.codes * many + rows.kind.codes
    order = np.argsort(pair, kind="stable")
    met, first = np.unique(pair[order], return_index=True)
    cells = (
        (rows.workload.names[one // many], rows.kind.names[one % many]) for one in met.tolist()
    )
    parts = np.split(order, first[1:])[: len(met)]
    return sorted(zip(cells, parts, strict=True), key=itemgetter(0))


def _chunks(arrays: SetupArrays, size: int) -> list[IntArray]:
    """Split the row positions into chunks of at most `size`.

    If there are no rows, return one empty chunk.
    """
    many = len(arrays.workloads)
    return [np.arange(first, min(first + size, many)) for first in range(0, max(many, 1), size)]
