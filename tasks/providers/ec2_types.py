"""What a launcher must know of an instance type beyond the model: network, placement, processor, quota. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from models.cloud import Offer

# Quotas of vCPUs that run at once, by family and market: names as Service Quotas has them (November 2026).
_FAMILIES = {
    "G and VT": (re.compile(r"(g|vt)\d"), {"on-demand": "L-DB2E81BA", "spot": "L-3819A6DF"}),
    "P2 to P4": (re.compile(r"p[2-4]"), {"on-demand": "L-417A185B", "spot": "L-7212CCBC"}),
    "P5 and P6": (re.compile(r"p[56]"), {"on-demand": "L-417A185B", "spot": "L-C4BD4855"}),
    "standard": (re.compile(r"(a|c|d|h|i|im|is|m|r|t|z)\d"), {"on-demand": "L-1216C47A", "spot": "L-34B43A08"}),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TypeFacts:
    """Of one type. `arm`: its processor is not x86; `grouped`: it can lie in a cluster placement group."""

    name: str
    vcpus: int
    arm: bool
    efa: bool
    grouped: bool


def facts_of(answer: Mapping[str, Any]) -> TypeFacts:
    """One entry of DescribeInstanceTypes."""
    return TypeFacts(
        name=str(answer["InstanceType"]),
        vcpus=int(answer["VCpuInfo"]["DefaultVCpus"]),
        arm="x86_64" not in answer.get("ProcessorInfo", {}).get("SupportedArchitectures", ["x86_64"]),
        efa=bool(answer.get("NetworkInfo", {}).get("EfaSupported", False)),
        grouped="cluster" in answer.get("PlacementGroupInfo", {}).get("SupportedStrategies", ()),
    )


def quota_of(instance_type: str, market: str) -> str | None:
    """Code of the quota that counts the vCPUs of such a machine; None for families that this version does not know."""
    return next((codes[market] for form, codes in _FAMILIES.values() if form.match(instance_type)), None)


def vcpus_by_quota(members: Sequence[Offer], facts: Mapping[str, TypeFacts]) -> dict[str, int]:
    """How many vCPUs a cluster takes of each quota."""
    taken: dict[str, int] = {}
    for offer in members:
        code = quota_of(offer.instance_type.name, offer.market)
        if code is not None:
            taken[code] = taken.get(code, 0) + facts[offer.instance_type.name].vcpus
    return taken


def vcpus_held(instances: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """How many vCPUs machines that are pending or running hold of each quota, whoever launched them."""
    held: dict[str, int] = {}
    for one in instances:
        market = "spot" if one.get("InstanceLifecycle") == "spot" else "on-demand"
        code, cpu = quota_of(str(one["InstanceType"]), market), one.get("CpuOptions", {})
        if code is not None:
            held[code] = held.get(code, 0) + int(cpu.get("CoreCount", 0)) * int(cpu.get("ThreadsPerCore", 1))
    return held


def quota_sentence(code: str, name: str, value: float, *, wanted: int, held: int, region: str) -> str:
    """Why a cluster does not fit under a quota; empty where it does."""
    if wanted + held <= value:
        return ""
    used = f", of which {held} are held now" if held else ""
    return (
        f"{wanted} vCPUs are wanted and the quota {name!r} ({code}) in {region} is {value:g}{used}: ask for more in "
        "Service Quotas, or take a smaller cluster"
    )
