"""Measured setups that can be read and are hardly true. `srift import --force` loads them all the same."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from models.domain.cluster import parse_cluster, parse_numbers
from models.domain.setup_table import Key, row_key

from ..providers.ec2.catalogue import most_tflops

_MOST_RATIO = 100.0  # runs of one setup differ by tens of per cent; milliseconds by 1,000
# Winograd's convolutions need 0.44 of the multiplications that are counted, and no kernel reaches the peak.
_HEADROOM = 1.5
_SIMILAR = 0.8  # of difflib: one wrong letter in a name of five

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """Number and kind of devices by provider and type; FLOPs of a sample by provider and workload."""

    types: Mapping[str, Mapping[str, tuple[int, str]]]
    flops: Mapping[tuple[str, str], float]


def implausible(setups: Iterable[Row], before: Iterable[Row], known: Known) -> Iterator[str]:
    """Yield a sentence for each setup that is hardly true.

    `setups` have the fastest and the slowest row of the file (`least_s`, `least_place`, `most_s`,
    `most_place`), `before` those of the warehouse.
    """
    seen: dict[tuple[str, Key], tuple[float, float]] = {
        _key(row, known): (row["least_s"], row["most_s"]) for row in before
    }
    for row in setups:
        types = known.types.get(row["provider"], {})
        for name in set(parse_cluster(row["cluster"])) - set(types):
            if near := _misspelt(name, types):
                yield f"{row['place']}, column cluster: {name!r} is unknown: did you mean {near!r}?"
        key = _key(row, known)
        least, most = seen.get(key, (row["least_s"], row["most_s"]))
        seen[key] = min(least, row["least_s"]), max(most, row["most_s"])
        ratio = seen[key][1] / seen[key][0]
        if ratio >= _MOST_RATIO:
            place = (
                row["most_place"] if row["most_s"] > most or most > least else row["least_place"]
            )
            yield (
                f"{place}, column step_s: runs of this setup differ {ratio:,.0f} times"
                f" ({seen[key][0]:g} to {seen[key][1]:g}): give seconds, not milliseconds"
            )
        yield from _beyond_peak(row, types, known.flops.get((row["provider"], row["workload"])))


def _key(row: Row, known: Known) -> tuple[str, Key]:
    """The setup, however it is written."""
    devices = {name: count for name, (count, _) in known.types.get(row["provider"], {}).items()}
    return row["provider"], row_key(row, devices)


def _misspelt(name: str, types: Iterable[str]) -> str | None:
    """The known type that has the same digits and nearly the same letters. Digits tell types apart."""
    close = difflib.get_close_matches(name.lower(), types, n=3, cutoff=_SIMILAR)
    return next((one for one in close if _digits(one) == _digits(name)), None)


def _digits(name: str) -> str:
    return "".join(filter(str.isdigit, name))


def _beyond_peak(
    row: Row, types: Mapping[str, tuple[int, str]], flops: float | None
) -> Iterator[str]:
    flops = flops or row["flops_per_sample"]
    if not flops or flops != flops:
        return
    cluster = parse_cluster(row["cluster"])
    batches = parse_numbers(row["batch_per_device"], len(cluster), "batch_per_device")
    for name, batch in dict.fromkeys(zip(cluster, batches, strict=True)):
        kind = types[name][1] if name in types else ""
        peak = most_tflops(kind, row["precision"])
        tflops = batch * row["accumulation_steps"] * flops / row["least_s"] / 1e12
        if peak is not None and tflops > _HEADROOM * peak:
            yield (
                f"{row['least_place']}, column step_s: {row['least_s']:g} s are {tflops:.3g} TFLOP/s,"
                f" and a {kind} has at most {peak:.3g}: check step_s, batch_per_device and"
                " flops_per_sample"
            )
            return
