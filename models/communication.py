"""Seconds of an all-reduce on a cluster, and the CPU that it takes from the training beside it.

Ring all-reduce of S bytes over n ranks [P, physics.md]: 2 (n-1) alpha + 2 (n-1)/n S / B, B the slowest link. Where the
host's CPU is a quota the copying, reducing and system calls are paid from it [D]:

    wire = 2 (n-1)/n S / (efficiency B)
    cpu  = (base + 2 (n-1) message + 2 (n-1)/n S byte) / cores          of the smallest host
    T    = 2 (n-1) alpha + (wire^p + cpu^p)^(1/p)                       p = 1: one after the other; large p: hidden
"""

from __future__ import annotations

from dataclasses import asdict, astuple, dataclass

import numpy as np
import pandas as pd
from scipy.optimize import least_squares

from .arrays import FloatArray
from .cloud import parse_cluster
from .machines import Machine

_BYTES_PER_GBIT = 1.25e8
# Links inside one machine, where no probe has seen them: PCIe 3 x8 sustains about this.
INSIDE_GBPS = 50.0
# Spread of the log of each parameter that we believe before any probe; probes outweigh it soon.
_PRIOR_SD = np.array([1.5, 1.5, 1.5, 1.0, 0.04, 0.5])


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveModel:
    """The parameters of the equation above; the defaults are the prior, from gloo over shaped links (traps.md)."""

    alpha_s: float = 1e-4
    base_cpu_s: float = 3e-4
    message_cpu_s: float = 5e-5
    byte_cpu_s: float = 6e-10
    efficiency: float = 0.93
    sharpness: float = 2.0

    def cpu_core_s(self, size_bytes: FloatArray, ranks: FloatArray) -> FloatArray:
        """CPU seconds, on a whole core, that one rank spends in one all-reduce. Arrays broadcast."""
        turns = np.maximum(ranks - 1, 0)
        moved = 2 * turns / np.maximum(ranks, 1) * size_bytes
        spent = (turns > 0) * self.base_cpu_s + 2 * turns * self.message_cpu_s + moved * self.byte_cpu_s
        return np.asarray(spent, dtype=float)

    def seconds(
        self, size_bytes: FloatArray, ranks: FloatArray, bandwidth_gbps: FloatArray, cores: FloatArray
    ) -> FloatArray:
        """Seconds of one all-reduce; `bandwidth_gbps` of the slowest link, `cores` of the smallest host.

        Never falls with bytes or ranks, never rises with bandwidth or cores; 0 for one rank.
        """
        turns = np.maximum(ranks - 1, 0)
        moved = 2 * turns / np.maximum(ranks, 1) * size_bytes
        wire = moved / (self.efficiency * bandwidth_gbps * _BYTES_PER_GBIT)
        cpu = self.cpu_core_s(size_bytes, ranks) / cores
        top = np.maximum(np.maximum(wire, cpu), np.finfo(float).tiny)
        both = top * ((wire / top) ** self.sharpness + (cpu / top) ** self.sharpness) ** (1 / self.sharpness)
        return np.asarray(2 * turns * self.alpha_s + (turns > 0) * both, dtype=float)

    def to_dict(self) -> dict[str, float]:
        """Plain numbers by parameter name."""
        return asdict(self)


def fit_collectives(probes: pd.DataFrame, machines: dict[str, Machine]) -> CollectiveModel:
    """Fit the parameters to all probes of a provider at once: log residuals, robust loss, priors on the log scale.

    Rows that are not positive, or of clusters that cannot be read, are left out; without rows the prior is returned.
    """
    prior = CollectiveModel()
    rows: list[tuple[float, float, float, float, float]] = []
    if {"cluster", "bytes", "seconds"} <= set(probes.columns):
        for cluster, size, seconds in zip(probes["cluster"], probes["bytes"], probes["seconds"], strict=True):
            names = parse_cluster(str(cluster))
            if len(names) > 1 and size > 0 and np.isfinite(seconds) and seconds > 0:
                own = [machines[name] for name in names]
                gbps, cores = min(one.bandwidth_gbps for one in own), min(one.cores for one in own)
                rows.append((float(size), float(len(names)), gbps, cores, float(seconds)))
    if not rows:
        return prior
    size, ranks, gbps, cores, seconds = np.array(rows).T
    start = np.log(np.array(astuple(prior)))
    upper = np.append(np.full(4, 10.0), [np.log(0.99) - start[4], np.log(8.0) - start[5]])
    lower = np.append(np.full(4, -10.0), [np.log(0.5) - start[4], np.log(1.0) - start[5]])

    def residuals(shift: FloatArray) -> FloatArray:
        model = _unpack(start + shift)
        error = np.log(model.seconds(size, ranks, gbps, cores) / seconds) / 0.1
        # soft_l1 by hand on the data alone: outliers are among the probes, not in the prior
        robust = np.sign(error) * np.sqrt(2 * (np.sqrt(1 + error**2) - 1))
        return np.concatenate([robust, shift / _PRIOR_SD])

    found = least_squares(residuals, np.zeros(6), bounds=(lower, upper), x_scale=_PRIOR_SD, max_nfev=60)
    return _unpack(start + found.x)


def _unpack(logs: FloatArray) -> CollectiveModel:
    alpha, base, message, byte, efficiency, sharpness = (float(value) for value in np.exp(logs))
    return CollectiveModel(
        alpha_s=alpha,
        base_cpu_s=base,
        message_cpu_s=message,
        byte_cpu_s=byte,
        efficiency=efficiency,
        sharpness=max(sharpness, 1.0),
    )
