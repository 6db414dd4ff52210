"""Instance types from EC2's descriptions: devices, network rates, quotas, images. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from models.domain.cluster import InstanceType

Answer = Mapping[str, Any]

_STATED = re.compile(r"(?:Up to )?(?:(\d+)x )?([\d.]+) Gigabit")
_ROUNDED = 1.01  # 133.333 is stated as 133.33

_GPU_FAMILIES = "gp"
_ARM = re.compile(
    r"[a-z]+\d+[a-z]*(g|-gb\d+)\."
)  # Graviton (g5g) and Grace (p6e-gb200) beside NVIDIA's GPUs

GPU = "gpu"  # in [ec2] instance_types: every type with NVIDIA GPUs that the machines' image runs on


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageLine:
    """Deep Learning AMIs whose SSM parameter matches `parameter`; they run on `families`."""

    parameter: re.Pattern[str]
    families: frozenset[str]


# From AWS's release notes (supported_ec2_instances), read on 2026-11-23. Below
# https://docs.amazonaws.cn/dlami/latest/devguide/ they are
# aws-deep-learning-ami-gpupt29oss-ul2404-2026-03-20.md and
# aws-deep-learning-ami-gpupt211oss-al2023-2026-09-07.md. There are no notes on PyTorch 2.12 and
# 2.13; they count as 2.11. The open kernel modules of NVIDIA's driver begin with Turing: no V100
# (p3, p3dn).
_OSS_GPU = r"/aws/service/deeplearning/ami/x86_64/oss-nvidia-driver-gpu-pytorch-"
_PT_2_9 = {"g4dn", "g5", "g6", "gr6", "g6e", "p4d", "p4de", "p5", "p5e", "p5en", "p6-b200"}
IMAGE_LINES = (
    ImageLine(parameter=re.compile(_OSS_GPU + r"2\.[0-9]-.*"), families=frozenset(_PT_2_9)),
    ImageLine(
        parameter=re.compile(_OSS_GPU + r"\d+\.\d+-.*"),
        families=frozenset(_PT_2_9 | {"g6f", "gr6f"}),
    ),
)


def image_line(parameter: str) -> ImageLine | None:
    """The image line that an SSM parameter names; None if it is unknown."""
    return next((line for line in IMAGE_LINES if line.parameter.fullmatch(parameter)), None)


def off_image(kind: InstanceType, line: ImageLine | None) -> str:
    """Why the image does not run on the type; empty if it does or nobody knows."""
    if _ARM.match(kind.name):
        return f"{kind.name} has an ARM processor, and the image is for x86"
    if line is None or kind.device == "cpu" or family(kind.name) in line.families:
        return ""
    return f"the image of [ec2] ami_parameter does not run on {family(kind.name)} ({kind.device})"


def family(instance_type: str) -> str:
    """`p4d` of `p4d.24xlarge`."""
    return instance_type.partition(".")[0]


# Peak dense fp32 TFLOP/s of one device without tensor cores, from NVIDIA's data sheets in
# November 2026 (A10G: the A10's).
DEVICE_TFLOPS = {
    "K80": 4.4,  # one of its two GPUs, at boost
    "M60": 4.8,  # one of its two GPUs
    "V100": 15.7,
    "T4": 8.1,
    "T4g": 8.1,
    "A10G": 31.2,
    "A100": 19.5,
    "L4": 30.3,
    "L40S": 91.6,
    "H100": 67.0,
    "H200": 67.0,
}

# Of 16-bit floats on tensor cores, without sparsity. From Ampere on, TF32 has half of it and FP8
# twice; V100 and T4 have neither.
HALF_TFLOPS = {
    "V100": 125.0,
    "T4": 65.0,
    "T4g": 65.0,
    "A10G": 125.0,
    "A100": 312.0,
    "L4": 121.0,
    "L40S": 362.0,
    "H100": 989.0,
    "H200": 989.0,
}
_BEFORE_AMPERE = {"V100", "T4", "T4g"}

_BY_NAME = {name.lower(): name for name in DEVICE_TFLOPS}


def device_tflops(device: str) -> float | None:
    """Peak fp32 TFLOP/s of a device in any capitalisation; None if unknown."""
    return DEVICE_TFLOPS.get(_BY_NAME.get(device.lower(), ""))


def most_tflops(device: str, precision: str) -> float | None:
    """Upper bound of one device's TFLOP/s in a precision; None if unknown.

    For fp32 it is TF32's where there is any: PyTorch's convolutions use it by default. A
    fraction of a GPU ("L4 1/2") has that fraction.
    """
    name, _, divisor = device.partition(" 1/")
    known = _BY_NAME.get(name.lower())
    if known is None:
        return None
    fp32, half = DEVICE_TFLOPS[known], HALF_TFLOPS.get(known, DEVICE_TFLOPS[known])
    tf32 = fp32 if known in _BEFORE_AMPERE else max(fp32, half / 2)
    whole = {"fp16": half, "bf16": half, "fp8": 2 * half}.get(precision, tf32)
    return whole / float(divisor or 1)


def instance_type_of(answer: Answer) -> InstanceType:
    """An entry of DescribeInstanceTypes. GPU memory is as EC2 reports it (A10G: 22.35 GiB).

    Raises ValueError if the sustained network rate is unknown.
    """
    name = str(answer["InstanceType"])
    memory_gib = float(answer["MemoryInfo"]["SizeInMiB"]) / 1024
    device, devices, device_memory_gib, tflops = _devices(answer) or ("cpu", 1, memory_gib, None)
    return InstanceType(
        name=name,
        provider="ec2",
        devices=devices,
        device=device,
        cores=float(answer["VCpuInfo"]["DefaultVCpus"]),
        memory_gib=memory_gib,
        device_memory_gib=device_memory_gib,
        bandwidth_gbps=baseline_gbps(answer),
        device_tflops=tflops,
    )


def baseline_gbps(answer: Answer) -> float:
    """Sustained gigabit/s of the attached network cards, at most what EC2 states of the machine.

    Attached are the cards that take an EFA, else the first (see `efa_cards`). A card's peak ("Up to
    25 Gigabit") lasts for minutes only. Some machines list the rate of all cards for each card
    (g6e.48xlarge: "400 Gigabit", and 400 on each of four). Raises ValueError if a rate is unknown.
    """
    cards = answer.get("NetworkInfo", {}).get("NetworkCards", [])
    attached = efa_cards(answer) or (0,)
    rates = [
        card.get("BaselineBandwidthInGbps")
        for at, card in enumerate(cards)
        if _index(at, card) in attached
    ]
    if not rates or any(rate is None or rate <= 0 for rate in rates):
        raise ValueError(f"{answer['InstanceType']}: its sustained network rate is unknown")
    total = float(sum(rates))
    stated = _STATED.fullmatch(str(answer["NetworkInfo"].get("NetworkPerformance", "")))
    most = float(stated[2]) * int(stated[1] or 1) if stated else total
    return most if total > _ROUNDED * most else total


def efa_cards(answer: Answer) -> tuple[int, ...]:
    """Indices of the network cards that take an EFA, as many as allowed; () without EFA.

    The first card of some types takes none (p6-b300). A type that lists no cards has one.
    """
    network = answer.get("NetworkInfo", {})
    if not network.get("EfaSupported"):
        return ()
    cards = network.get("NetworkCards") or [{}]
    able = [
        _index(at, card)
        for at, card in enumerate(cards)
        if "efa" in card.get("InterfaceTypes", ("efa",))
    ]
    return tuple(able[: int(network.get("EfaInfo", {}).get("MaximumEfaInterfaces", len(able)))])


def _index(at: int, card: Answer) -> int:
    return int(card.get("NetworkCardIndex", at))


def _devices(answer: Answer) -> tuple[str, int, float, float | None] | None:
    """Name, count, GiB and TFLOP/s of one device; None for a machine with processors only.

    A fraction of a GPU (`GpuPartitionSize` below 1) is a device of its own name.
    """
    if gpus := answer.get("GpuInfo", {}).get("Gpus", []):
        gpu = gpus[0]
        fraction = float(gpu.get("GpuPartitionSize") or 1.0)
        name, whole = str(gpu["Name"]), device_tflops(str(gpu["Name"]))
        return (
            name if fraction == 1.0 else f"{name} 1/{1 / fraction:g}",
            int(gpu.get("LogicalGpuCount") or gpu.get("Count") or 1),
            float(gpu["MemoryInfo"]["SizeInMiB"]) / 1024,
            None if whole is None else whole * fraction,
        )
    if neuron := answer.get("NeuronInfo", {}).get("NeuronDevices", []):
        gib = float(neuron[0]["MemoryInfo"]["SizeInMiB"]) / 1024
        return str(neuron[0]["Name"]), int(neuron[0]["Count"]), gib, None
    return None


def described(answers: Iterable[Answer]) -> list[InstanceType]:
    """Every type that can be described, by name."""
    types: dict[str, InstanceType] = {}
    for answer in answers:
        with suppress(KeyError, ValueError):
            kind = instance_type_of(answer)
            types.setdefault(kind.name, kind)
    return [types[name] for name in sorted(types)]


def wanted(
    types: Iterable[InstanceType], patterns: Sequence[str], line: ImageLine | None = None
) -> list[InstanceType]:
    """Types that match a pattern: `g5.*`, `p4d.24xlarge`, or `gpu` for GPUs on which `line` runs.

    A named type is kept even if no image runs on it: measurements of it may be imported.
    """

    def named(kind: InstanceType, pattern: str) -> bool:
        return (
            is_gpu(kind) and not off_image(kind, line)
            if pattern == GPU
            else fnmatchcase(kind.name, pattern)
        )

    return [kind for kind in types if any(named(kind, pattern) for pattern in patterns)]


def may_be_wanted(names: Iterable[str], patterns: Sequence[str]) -> set[str]:
    """Names that `wanted` might keep, before they are described."""
    return {
        name
        for name in names
        if any(
            name[0] in _GPU_FAMILIES if pattern == GPU else fnmatchcase(name, pattern)
            for pattern in patterns
        )
    }


def is_gpu(kind: InstanceType) -> bool:
    """NVIDIA GPUs on x86. EC2 names their families g and p, except AMD's g4ad."""
    if kind.device == "cpu" or kind.name[0] not in _GPU_FAMILIES or kind.name.startswith("g4ad."):
        return False
    return _ARM.match(kind.name) is None


# vCPU quotas by family and market, as Service Quotas has them (November 2026).
_QUOTAS = {
    r"(gr?|vt)\d": {"on-demand": "L-DB2E81BA", "spot": "L-3819A6DF"},
    r"p[2-4]": {"on-demand": "L-417A185B", "spot": "L-7212CCBC"},
    r"p[56]": {"on-demand": "L-417A185B", "spot": "L-C4BD4855"},
    r"(a|c|d|h|i|im|is|m|r|t|z)\d": {"on-demand": "L-1216C47A", "spot": "L-34B43A08"},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TypeFacts:
    """Launch facts of one type. `grouped`: it can be in a cluster placement group.

    `efa_cards`: indices of the network cards that take an EFA, if `efa`.
    """

    efa: bool
    grouped: bool
    efa_cards: tuple[int, ...] = (0,)

    @property
    def several_interfaces(self) -> bool:
        """Whether its whole network takes several interfaces: then it gets no public address."""
        return self.efa and self.efa_cards != (0,)


def facts_of(answer: Mapping[str, Any]) -> TypeFacts:
    """One entry of DescribeInstanceTypes."""
    return TypeFacts(
        efa=bool(efa_cards(answer)),
        efa_cards=efa_cards(answer) or (0,),
        grouped="cluster" in answer.get("PlacementGroupInfo", {}).get("SupportedStrategies", ()),
    )


def quota_of(instance_type: str, market: str) -> str | None:
    """Code of the vCPU quota that counts the type; None for unknown families."""
    return next(
        (codes[market] for form, codes in _QUOTAS.items() if re.match(form, instance_type)), None
    )
