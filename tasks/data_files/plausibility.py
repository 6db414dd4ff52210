"""Measurement rows that can be read and cannot be true: other units, impossible speeds, misspelt instance types.

Pure: what is known is handed in. `--force` loads such rows all the same, but for names and dates that cannot be.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from models.domain.cluster import parse_cluster, parse_numbers
from models.domain.setup_table import row_key
from models.domain.suggestions import NAME_RULE, plain_name

from ..providers.ec2.catalogue import most_tflops
from .measurements import Measurement, one_edit_apart

# Of one setup: runs of one setup differ by a few per cent, stalls by tens; milliseconds and seconds by 1,000.
_MOST_TIMES = 100.0
# Winograd's convolutions do a 3x3 one with down to 0.44 of the multiplications that are counted, so that a device may
# seem to exceed its peak; together with what no kernel reaches, hardly by as much as this.
_HEADROOM = 1.5
_AHEAD = timedelta(days=1)  # a time without a zone may be of one that is ahead of UTC
_LEAST_LETTERS = 4  # of a name that can be misspelt


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """What an instance type has: how many devices of which kind."""

    count: int
    kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """Instance types by provider and name, FLOPs of a sample by provider and workload, seconds by setup."""

    types: Mapping[str, Mapping[str, Device]]
    flops: Mapping[tuple[str, str], float] = field(default_factory=dict)
    setups: Mapping[tuple[Any, ...], tuple[float, float]] = field(default_factory=dict)

    def devices(self, provider: str) -> Mapping[str, Device]:
        """Instance types of a provider."""
        return self.types.get(provider, {})

    def counts(self) -> dict[str, dict[str, int]]:
        """Devices of each instance type, by provider."""
        return {
            provider: {name: one.count for name, one in types.items()}
            for provider, types in self.types.items()
        }


def setup_of(row: Mapping[str, Any], devices: Mapping[str, int]) -> tuple[Any, ...]:
    """What decides the step time of a row with measurement columns, however it is written; `devices` by type."""
    return row["provider"], row_key(row, devices)


def impossible(rows: Iterable[tuple[str, Measurement]], now: datetime) -> list[str]:
    """Problems of rows (each with its place) that no flag lets in: names that srift.toml refuses, dates to come."""
    latest = now.replace(tzinfo=None) + _AHEAD
    problems = []
    for place, row in rows:
        if not plain_name(row.workload):
            problems.append(f"{place}, column workload: {NAME_RULE.format(name=row.workload)}")
        if row.measured_at is not None and row.measured_at > latest:
            problems.append(
                f"{place}, column measured_at: {row.measured_at:%Y-%m-%d %H:%M} UTC is yet to come"
            )
    return problems


def implausible(rows: Sequence[tuple[str, Measurement]], known: Known) -> list[str]:
    """Problems of rows (each with its place) that are hardly true, and may be."""
    return [*_misspelt_types(rows, known), *_other_units(rows, known), *_beyond_peak(rows, known)]


def _misspelt_types(rows: Sequence[tuple[str, Measurement]], known: Known) -> list[str]:
    """Types that nobody knows and that are one letter from one that is known.

    A digit is no slip: it tells families and sizes apart, and new ones come every year.
    """
    problems, judged = [], dict[tuple[str, str], str]()
    for place, row in rows:
        types = known.devices(row.provider)
        for name in dict.fromkeys(parse_cluster(row.cluster)):
            if name in types or len(name) < _LEAST_LETTERS:
                continue
            if (row.provider, name) not in judged:
                judged[row.provider, name] = next(
                    (one for one in sorted(types) if _slip(name, one)), ""
                )
            near = judged[row.provider, name]
            if near:
                problems.append(
                    f"{place}, column cluster: {row.provider} has no instance type {name!r}: did you mean {near!r}?"
                )
    return problems


def _slip(name: str, known: str) -> bool:
    digits = ["".join(c for c in one if c.isdigit()) for one in (name, known)]
    plain, other = name.lower(), known.lower()
    return digits[0] == digits[1] and (plain == other or one_edit_apart(plain, other))


def _other_units(rows: Sequence[tuple[str, Measurement]], known: Known) -> list[str]:
    problems, before = [], "a row imported or measured before"
    # The least and most seconds of each setup so far, each with where.
    seen = {key: ((least, before), (most, before)) for key, (least, most) in known.setups.items()}
    counts = known.counts()
    for place, row in rows:
        key, here = setup_of(row.model_dump(), counts.get(row.provider, {})), (row.step_s, place)
        least, most = seen.get(key, (here, here))
        seen[key] = min(least, here), max(most, here)
        for other, where in (least, most):
            times = max(row.step_s / other, other / row.step_s)
            if times >= _MOST_TIMES:
                more = "times" if row.step_s > other else "times less than"
                problems.append(
                    f"{place}, column step_s: {row.step_s:g} is {times:,.0f} {more} the {other:g} of the same setup in "
                    f"{where}: seconds are wanted, not milliseconds"
                )
                break
    return problems


def _beyond_peak(rows: Sequence[tuple[str, Measurement]], known: Known) -> list[str]:
    problems = []
    for place, row in rows:
        flops = known.flops.get((row.provider, row.workload), row.flops_per_sample)
        cluster, types = parse_cluster(row.cluster), known.devices(row.provider)
        if flops is None:
            continue
        batches = parse_numbers(row.batch_per_device, len(cluster), "batch_per_device")
        for name, batch in dict.fromkeys(zip(cluster, batches, strict=True)):
            peak = most_tflops(types[name].kind, row.precision) if name in types else None
            tflops = batch * row.accumulation_steps * flops / row.step_s / 1e12
            if peak is not None and tflops > _HEADROOM * peak:
                problems.append(
                    f"{place}, column step_s: {batch * row.accumulation_steps} samples of {flops:.3g} FLOPs on each "
                    f"device in {row.step_s:g} s are {tflops:.3g} TFLOP/s; a {types[name].kind} has at most {peak:.3g} "
                    f"in {row.precision}: look at step_s (seconds), batch_per_device (of one device) and "
                    "flops_per_sample"
                )
                break
    return problems
