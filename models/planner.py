"""Which setups there are to choose from: clusters on offer, the global batch divided exactly over them. Never ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from .cloud import Cluster, InstanceType, Offer
from .clusters import Refusal, clusters_of
from .identity import Key, setup_key
from .ranking import recommend
from .split import Line, finish_together, global_batches
from .workload import Setup, Workload

__all__ = ["candidates", "distinct", "recommend"]

ACCUMULATION_STEPS = (1, 2, 4)


def candidates(
    workload: Workload,
    offers: Sequence[Offer],
    *,
    max_hosts: int,
    fits: Refusal,
    line: Callable[[str], Line],
    peak_bytes: Callable[[str, int], float] | None = None,
    batches: Sequence[int] | None = None,
    accumulation: Sequence[int] = ACCUMULATION_STEPS,
) -> list[Setup]:
    """Every setup worth predicting for `workload`: each cluster, global batch and number of accumulation steps.

    `fits` says why a cluster can never be had ("" where it can); `line` gives (a, k) of one device of an instance type;
    `peak_bytes` of (instance type, batch) is compared with the device's memory, NaN meaning unknown and allowed.
    `batches` are the global batches to compare, by default those of the workload's range. A cluster of one market and
    zone only; one with a machine that would get no sample is left out, since the cluster without it is no slower.
    Raises ValueError where a batch in `batches` lies outside the workload's range.
    """
    totals = tuple(batches or global_batches(workload.global_batch_least, workload.global_batch_most))
    outside = [b for b in totals if not workload.global_batch_least <= b <= workload.global_batch_most]
    if outside:
        least, most = workload.global_batch_least, workload.global_batch_most
        raise ValueError(f"{workload.name}: global batch {outside[0]} is outside [{least}, {most}]")
    names = {offer.instance_type.name for offer in offers}
    lines = {name: line(name) for name in sorted(names)}
    found: list[Setup] = []
    for cluster in clusters_of(offers, max_hosts=max_hosts, fits=fits):
        found += _setups(workload.name, cluster, lines, totals, accumulation, peak_bytes)
    return found


def distinct(setups: Sequence[Setup]) -> tuple[list[Setup], NDArray[np.intp]]:
    """Setups that differ in step time, and for each of `setups` the index of its twin among them.

    The same cluster in another market runs at the same speed: predict the first, then index the result by the second.
    """
    index: dict[Key, int] = {}
    firsts: list[Setup] = []
    twins = np.empty(len(setups), dtype=np.intp)
    for position, setup in enumerate(setups):
        key = setup_key(setup)
        if key not in index:
            index[key] = len(firsts)
            firsts.append(setup)
        twins[position] = index[key]
    return firsts, twins


def _setups(
    workload: str,
    cluster: Cluster,
    lines: dict[str, Line],
    totals: Sequence[int],
    accumulation: Sequence[int],
    peak_bytes: Callable[[str, int], float] | None,
) -> Iterator[Setup]:
    types = [offer.instance_type for offer in cluster.members]
    layout = tuple(one.devices for one in types)
    for total in totals:
        for steps in accumulation:
            if total % steps:
                continue
            shares = finish_together([lines[one.name] for one in types], total // steps, layout)
            if shares is None or not _fits_memory(types, shares, peak_bytes):
                continue
            yield Setup(
                workload=workload,
                cluster=cluster,
                layout=layout,
                batch_per_device=shares,
                accumulation_steps=steps,
            )


def _fits_memory(
    types: Sequence[InstanceType], shares: Sequence[int], peak_bytes: Callable[[str, int], float] | None
) -> bool:
    if peak_bytes is None:
        return True
    for one, batch in set(zip(types, shares, strict=True)):
        peak = peak_bytes(one.name, batch)
        if not math.isnan(peak) and peak > one.device_memory_gib * 2**30:
            return False
    return True
