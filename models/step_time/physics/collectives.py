"""Seconds of an exchange of gradients in closed form, and how they answer to its parameters.

    C(S) = sigma_C beta(layout) 2 (n - 1)/n S^nu / R + alpha m (1 + S / 25 MB)    n devices on m machines, S bytes
           its own scale and no m on one machine; 0 on one device
    R    = (W^-4 + (F k)^-4)^(-1/4)    W = 50 (B / 50)^gamma of the slowest link, k devices a machine on average
    last = C(min(S, 25 MB tau))        the last bucket of S bytes, which nothing is left to hide [DDP's buckets]

R is a smooth minimum: few devices do not drive a fast link, since a machine of several has a network card for one or
two of them. On average, since layouts never measured are then predicted best: by the fewest 6.8 instead of 6.0 % off.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from scipy.special import expit

from ...domain.numeric import BoolArray, FloatArray

# Reference of the scales: bytes, gigabit/s between machines, and what PCIe 3 x16 sustains inside one.
_BYTES, _GBPS, _INSIDE_GBPS, _BUCKET = 1e8, 50.0, 96.0, 25 << 20
_BYTES_PER_GBIT = 1.25e8
_SHARP = 4  # of the smooth minimum


class Sent(Protocol):
    """What an exchange depends on but for the parameters: (rows, members) or (rows,)."""

    @property
    def devices(self) -> FloatArray:
        """(rows, members) of a machine; 0 where padded."""

    @property
    def count(self) -> FloatArray:
        """(rows, members) of equal machines."""

    @property
    def gradient_bytes(self) -> FloatArray:
        """(rows,) of all gradients."""

    @property
    def untold(self) -> FloatArray:
        """(rows,) 1 where the bytes are a guess."""

    @property
    def gbps(self) -> FloatArray:
        """(rows,) nominal, of the slowest link."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """(rows,) seconds of one exchange: carried by the byte, and started bucket by bucket."""

    log_size: FloatArray  # of its bytes over 1e8
    carried_s: FloatArray
    started_s: FloatArray
    growth_s: FloatArray  # derivative of its seconds by `log_size`

    @property
    def seconds(self) -> FloatArray:
        """Of both."""
        return self.carried_s + self.started_s


class Wires:
    """The exchanges of some setups: of all gradients (`whole`), and of the last bucket alone.

    `value` holds each parameter, (rows,) or a scalar.
    """

    def __init__(self, sent: Sent, value: Mapping[str, FloatArray]) -> None:
        ranks, machines = (sent.count * sent.devices).sum(axis=1), sent.count.sum(axis=1)
        each = ranks / machines
        self._sent, self._across = sent, machines > 1
        self._answers = _answers(sent, machines=machines, each=each)
        told = sum((value[name] * answer for name, answer in self._answers.items()), np.zeros(len(ranks)))
        faster = np.exp(value["log_gamma"]) * np.log(np.where(self._across, sent.gbps, _GBPS) / _GBPS)
        link, driven = np.log(_GBPS) + faster, value["log_driven"] + np.log(each)
        told = told - np.where(self._across, log_rate(link, driven), np.log(_INSIDE_GBPS))
        exchanged = ranks > 1
        # of 1e8 bytes, and of one bucket
        ring_s = 2 * (ranks - 1) / np.maximum(ranks, 1) * _BYTES / _BYTES_PER_GBIT
        self._carry_s = exchanged * np.exp(told) * ring_s
        start_s = np.where(self._across, np.exp(value["log_alpha"]) * machines, np.exp(value["log_inside_alpha"]))
        self._start_s = exchanged * start_s
        held = self._across * expit(_SHARP * (link - driven))  # how far the devices are what holds the rate back
        self._answers |= {"log_gamma": -faster * (1 - held), "log_driven": -held}
        self._power = 1 + value["bytes"]
        whole = np.log(sent.gradient_bytes / _BYTES) + sent.untold * value["size"]
        most = np.log(_BUCKET / _BYTES) + value["log_last"]
        self._one_bucket: BoolArray = whole < most
        self.whole, self.last = self._of(whole), self._of(np.minimum(whole, most))

    def _of(self, log_size: FloatArray) -> Exchange:
        carried = self._carry_s * np.exp(self._power * log_size)
        more = self._start_s * np.exp(log_size) * (_BYTES / _BUCKET)
        return Exchange(
            log_size=log_size,
            carried_s=carried,
            started_s=self._start_s + more,
            growth_s=self._power * carried + more,
        )

    def slopes(self) -> dict[str, tuple[FloatArray, FloatArray]]:
        """By each parameter, (rows,) derivatives of the seconds of `whole` and of `last`."""
        both = (self.whole, self.last)
        inside, untold = ~self._across, self._sent.untold
        found = {name: _each(answer * one.carried_s for one in both) for name, answer in self._answers.items()}
        found["bytes"] = _each(one.log_size * one.carried_s for one in both)
        found["log_alpha"] = _each(self._across * one.started_s for one in both)
        found["log_inside_alpha"] = _each(inside * one.started_s for one in both)
        found["size"] = (untold * self.whole.growth_s, untold * self._one_bucket * self.last.growth_s)
        found["log_last"] = (np.zeros(len(untold)), ~self._one_bucket * self.last.growth_s)
        return found


def log_rate(link: FloatArray, driven: FloatArray) -> FloatArray:
    """log R of the module's docstring, by the logs of what the link carries and of what the devices drive."""
    return np.asarray(-np.logaddexp(-_SHARP * link, -_SHARP * driven) / _SHARP, dtype=float)


def log_link(gbps: float, power: float) -> float:
    """Of what a link carries where devices drive all of it, by its nominal rate."""
    return float(np.log(_GBPS) + power * np.log(gbps / _GBPS))


def _each(both: Iterable[FloatArray]) -> tuple[FloatArray, FloatArray]:
    whole, last = both
    return whole, last


def _answers(sent: Sent, *, machines: FloatArray, each: FloatArray) -> dict[str, FloatArray]:
    """By each parameter of the layout, (rows,) what it is multiplied by in the log of the seconds carried."""
    across, two = machines > 1, machines == 2
    several, inside = across & ~two, ~across
    uneven = 1 - each / sent.devices.max(axis=1)
    spread, dense = np.log(np.maximum(machines, 2) / 2), np.log(each)
    return {
        "log_scale": across.astype(float),
        "machines": across * spread,
        "machines_devices": across * spread * dense,
        "two": two.astype(float),
        "two_devices": two * dense,
        "two_imbalance": two * uneven,
        "devices": several * dense,
        "imbalance": several * uneven,
        "log_inside": inside.astype(float),
        "inside_devices": inside * dense,
    }
