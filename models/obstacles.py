"""Why no cluster on offer can take a global batch: devices too small for a sample, or devices that cannot share it.

The devices of a machine get equally many samples, so that a machine alone takes the multiples of their number; in
accumulation steps it needs room for one sample a device. What no machine alone can take is told by these two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .cloud import Cluster, InstanceType, Offer
from .clusters import Refusal

_BYTES_PER_GIB = 2.0**30


def obstacle(
    totals: Sequence[int], offers: Sequence[Offer], *, fits: Refusal, peak_bytes: Callable[[str, int], float]
) -> str:
    """What keeps every machine among `offers` from training at any of the global batches `totals`, and what would help.

    Empty where it is neither memory nor division. `fits` says why a cluster can never be had; `peak_bytes` of
    (instance type, samples a device) is compared with the device's memory, NaN meaning unknown and allowed.
    """
    sold = {one.instance_type.name: one.instance_type for one in offers if not fits(Cluster(members=(one,)))}
    types = list(sold.values())
    least_bytes = {one.name: peak_bytes(one.name, 1) for one in types}
    roomy = [one for one in types if not least_bytes[one.name] > one.device_memory_gib * _BYTES_PER_GIB]
    if types and not roomy:
        return _too_small(types, min(least_bytes.values()))
    counts = sorted({one.devices for one in roomy})
    if not counts or any(total % many == 0 for total in totals for many in counts):
        return ""
    return (
        f"no machine on offer can share a global batch of {_either(totals)} equally among its devices"
        f" ({_either(counts)} on each); a global batch of {_either(_nearest(totals, counts))} would do"
    )


def _too_small(types: Sequence[InstanceType], least_bytes: float) -> str:
    most_gib = max(one.device_memory_gib for one in types)
    return (
        "no device on offer has the memory for even one sample of this workload: about"
        f" {least_bytes / _BYTES_PER_GIB:.3g} GiB are needed, and the largest has {most_gib:.3g} GiB; larger devices"
        " would do"
    )


def _nearest(totals: Sequence[int], counts: Sequence[int]) -> list[int]:
    """The multiples of some count that lie between the totals, or else the next below and above them."""
    least, most = min(totals), max(totals)
    near = {one for total in totals for many in counts for one in (total // many * many, -(-total // many) * many)}
    between = sorted(one for one in near if least <= one <= most)
    below, above = [one for one in near if 0 < one < least], [one for one in near if one > most]
    return between or [*([max(below)] if below else []), min(above)]


def _either(numbers: Sequence[int]) -> str:
    *others, last = map(str, numbers)
    return f"{', '.join(others)} or {last}" if others else last
