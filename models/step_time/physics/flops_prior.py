"""Seconds of one device for a network that nobody measured, from its FLOPs alone, and how little that says.

    log(T peak / W) = a + d log peak + s log W + q (log W)^2 + x log W log peak + u_network + noise   W = FLOPs x batch

The left side is what efficiency leaves of the device's peak. u is Student-t: most networks of equal FLOPs take about
equal time, a few take twice as long, and those must not bend the line. Four forms (with and without q and x) are
averaged and none is chosen: choosing among them on ten networks is itself a fit, and does worse on the next network.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray
from scipy.special import stdtrit

from ...domain.numeric import Z_90
from .compute import FORWARD_PART, ComputeModel, Curve

Floats = NDArray[np.float64]

# Before anything is measured: forward and backward, as profiles count them, run at about 0.4 of the peak, give or take
# a factor of e; larger steps use a device better; devices alike.
_PRIOR = np.array([np.log(1 / 0.4), 0.0, -0.2, 0.0, 0.0])
_PRIOR_SD = np.array([1.0, 0.3, 0.2, 0.1, 0.1])
_FORMS = ((0, 1, 2), (0, 1, 2, 3), (0, 1, 2, 4), (0, 1, 2, 3, 4))
_TYPICAL_WORK, _TYPICAL_PEAK = 1e12, 1e13  # FLOPs of a step, FLOP/s: where the prior of `a` holds
# Student's degrees of freedom, and the scale of u in logs before it is learned, worth so many networks. CM-DARE [P]
# finds 10 to 14 % within one GPU type. Networks on one device are off by a twentieth from their own effect.
FREEDOM, _NETWORK_SD, _NETWORK_WEIGHT, _CELL_SD = 2.0, 0.2, 4.0, 0.05
# Beyond the work and the peaks seen, the line goes on with an exponent of time by work within these, at the efficiency
# of the nearest device, and doubt grows by so much a factor of e.
_EXPONENTS, _DOUBT_OF_WORK, _DOUBT_OF_PEAK = (0.3, 1.0), 0.15, 0.3
_ROUNDS = 200
_TELLING = ("profile", "runs", "inferred")  # origins of curves that the map is learned from


@dataclass(frozen=True, slots=True, kw_only=True)
class _Form:
    columns: tuple[int, ...]
    line: Floats
    covariance: Floats
    scale: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstGuess:
    """The learned map. Centres and ranges are in logs of FLOPs of a step and of FLOP/s."""

    forms: tuple[_Form, ...]
    centre: tuple[float, float]
    work_range: tuple[float, float]
    peak_range: tuple[float, float]
    networks: int

    def seconds(self, flops_per_sample: ArrayLike, batch: ArrayLike, device_tflops: ArrayLike) -> tuple[Floats, Floats]:
        """(expected seconds of one step on one device, scale of their log), in the broadcast shape.

        Raises ValueError where an argument is not above 0.
        """
        given = [np.asarray(one, dtype=float) for one in (flops_per_sample, batch, device_tflops)]
        if any(np.any(~(one > 0)) for one in given):
            raise ValueError("FLOPs, batch and TFLOP/s must be above 0")
        work, peak = np.broadcast_arrays(np.log(given[0] * given[1]), np.log(given[2] * 1e12))
        near_work, near_peak = np.clip(work, *self.work_range), np.clip(peak, *self.peak_range)
        x, v = near_work - self.centre[0], near_peak - self.centre[1]
        design = _design(x, v)
        slope = np.stack([np.zeros_like(x), np.zeros_like(x), np.ones_like(x), 2 * x, v], axis=-1)
        logs, variances = [], []
        for form in self.forms:
            mine = design[..., list(form.columns)]
            exponent = np.clip(1 + slope[..., list(form.columns)] @ form.line, *_EXPONENTS)
            logs.append(mine @ form.line + near_work + exponent * (work - near_work) - peak)
            of_line = np.einsum("...i,ij,...j->...", mine, form.covariance, mine)
            variances.append(of_line + form.scale**2 + _CELL_SD**2)
        middle = np.mean(logs, axis=0)
        beyond = (_DOUBT_OF_WORK * (work - near_work)) ** 2 + (_DOUBT_OF_PEAK * (peak - near_peak)) ** 2
        return np.exp(middle), np.sqrt(np.mean(variances, axis=0) + np.var(logs, axis=0) + beyond)

    def curve(self, flops_per_sample: float, device_tflops: float, batches: tuple[float, ...]) -> tuple[Curve, float]:
        """The guess as the step-time model reads it, and its doubt: the standard deviation of a normal whose 90 %
        interval is as wide. `batches` ascending.
        """
        middle, scale = self.seconds(flops_per_sample, np.array(batches), device_tflops)
        curve = Curve(
            batches=tuple(float(one) for one in batches),
            forward_s=tuple(float(one) for one in FORWARD_PART * middle),
            backward_s=tuple(float(one) for one in (1 - FORWARD_PART) * middle),
            optimizer_s=0.0,
            origin="flops",
        )
        return curve, float(stdtrit(FREEDOM, 0.95) / Z_90 * np.max(scale))

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, exactly."""
        forms = [
            {
                "columns": one.columns,
                "line": one.line.tolist(),
                "covariance": one.covariance.tolist(),
                "scale": one.scale,
            }
            for one in self.forms
        ]
        rest = {name: getattr(self, name) for name in ("centre", "work_range", "peak_range", "networks")}
        return {"forms": forms, **rest}


def _design(work: Floats, peak: Floats) -> Floats:
    """(..., 5): the columns of the equation above, of centred logs."""
    return np.stack([np.ones_like(work), peak, work, work**2, work * peak], axis=-1)


def fit_first_guess(rows: pd.DataFrame) -> FirstGuess:
    """The map learned from `rows`: workload, flops_per_sample, batch, device_tflops, seconds of one step on one device.

    FLOPs are those of forward and backward, a multiplication and an addition being two. Repeats are taken at their
    median. Without rows it is the prior. Raises ValueError where a figure is not above 0.
    """
    keys = ["workload", "flops_per_sample", "batch", "device_tflops"]
    if len(rows) and not (rows[[*keys[1:], "seconds"]].to_numpy(dtype=float) > 0).all():
        raise ValueError("FLOPs, batch, TFLOP/s and seconds must be above 0")
    cells = rows.groupby(keys)["seconds"].median().reset_index()
    work = np.log((cells["flops_per_sample"] * cells["batch"]).to_numpy(dtype=float))
    peak = np.log(cells["device_tflops"].to_numpy(dtype=float) * 1e12)
    codes, networks = pd.factorize(cells["workload"])
    known = len(cells) > 0
    centre = (float(work.mean()), float(peak.mean())) if known else (np.log(_TYPICAL_WORK), np.log(_TYPICAL_PEAK))
    prior = _PRIOR.copy()
    prior[0] += _PRIOR[2] * (centre[0] - np.log(_TYPICAL_WORK))
    design = _design(work - centre[0], peak - centre[1])
    target = np.log(cells["seconds"].to_numpy(dtype=float)) + peak - work
    return FirstGuess(
        forms=tuple(_fit(columns, design, target, codes, len(networks), prior) for columns in _FORMS),
        centre=centre,
        work_range=(float(work.min()), float(work.max())) if known else (centre[0], centre[0]),
        peak_range=(float(peak.min()), float(peak.max())) if known else (centre[1], centre[1]),
        networks=len(networks),
    )


def _fit(
    columns: tuple[int, ...], design: Floats, target: Floats, codes: NDArray[np.intp], networks: int, prior: Floats
) -> _Form:
    """Expectation-maximisation of a linear model whose network effects are Student-t: each has a weight that falls with
    the square of its effect, shared by all of its rows.

    Given the weights, rows about their network's mean have only the cells' noise, and the means that and the effect:
    the two are told apart (by Sherman and Morrison's identity), and no matrix grows with the rows.
    """
    picked = list(columns)
    mean, precision, mine = prior[picked], np.diag(_PRIOR_SD[picked] ** -2.0), design[:, picked]
    weight: Floats = np.ones(networks)
    scale, line = _NETWORK_SD, mean
    covariance: Floats = np.diag(_PRIOR_SD[picked] ** 2.0)
    noise = _CELL_SD**2 / np.bincount(codes, minlength=networks)  # of a network's mean
    middles, answers = _means(mine, codes, networks), _means(target[:, None], codes, networks)[:, 0]
    about, around = mine - middles[codes], target - answers[codes]
    known = precision + about.T @ about / _CELL_SD**2
    right = precision @ mean + about.T @ around / _CELL_SD**2
    for _ in range(_ROUNDS if networks else 0):
        before = line
        spread = scale**2 / weight
        told = middles.T / (spread + noise)
        covariance = np.asarray(np.linalg.inv(known + told @ middles), dtype=float)
        line = covariance @ (right + told @ answers)
        effect = spread / (spread + noise) * (answers - middles @ line)
        weight = np.asarray((FREEDOM + 1) / (FREEDOM + (effect / scale) ** 2), dtype=float)
        scale = float(
            np.sqrt((_NETWORK_WEIGHT * _NETWORK_SD**2 + np.sum(weight * effect**2)) / (_NETWORK_WEIGHT + networks))
        )
        if np.max(np.abs(line - before)) < 1e-8:
            break
    return _Form(columns=columns, line=line, covariance=covariance, scale=scale)


def _means(values: Floats, codes: NDArray[np.intp], networks: int) -> Floats:
    """(networks, columns) each network's mean of (rows, columns)."""
    total = np.zeros((networks, values.shape[1]))
    np.add.at(total, codes, values)
    return total / np.bincount(codes, minlength=networks)[:, None]


def with_guess(compute: ComputeModel, flops_per_sample: Mapping[str, float]) -> ComputeModel:
    """`compute` with the map learned from its own measured curves, where a workload's FLOPs and a device's peak are
    known; without any it is the prior.
    """
    rows = [
        (workload, flops_per_sample[workload], batch, tflops, sum(seconds) + curve.optimizer_s)
        for (workload, name), curve in sorted(compute.curves.items())
        if curve.origin in _TELLING and flops_per_sample.get(workload, 0.0) > 0
        if (tflops := compute.machines[name].device_tflops) is not None
        for batch, *seconds in zip(curve.batches, curve.forward_s, curve.backward_s, strict=True)
    ]
    columns = ["workload", "flops_per_sample", "batch", "device_tflops", "seconds"]
    return replace(compute, guess=fit_first_guess(pd.DataFrame(rows, columns=columns)))


def from_dict(body: Mapping[str, Any]) -> FirstGuess:
    """What `FirstGuess.to_dict` wrote."""
    forms = tuple(
        _Form(
            columns=tuple(one["columns"]),
            line=np.array(one["line"], dtype=float),
            covariance=np.array(one["covariance"], dtype=float),
            scale=one["scale"],
        )
        for one in body["forms"]
    )
    ranges = {name: (body[name][0], body[name][1]) for name in ("centre", "work_range", "peak_range")}
    return FirstGuess(forms=forms, **ranges, networks=body["networks"])
