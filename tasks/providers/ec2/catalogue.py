"""What EC2 says of an instance type: the model's InstanceType, sustained network rates, quotas, images. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from models.domain.cluster import InstanceType, Offer

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
    """Deep Learning AMIs of one kind: `parameter` matches their SSM parameters, `families` are what they run on.

    `source`: AWS's release note, its field supported_ec2_instances, as it stood on the day in its name.
    """

    parameter: re.Pattern[str]
    families: frozenset[str]
    source: str


# Read on 2026-11-23. The notes of PyTorch 2.10 (x86), 2.12 and 2.13 were not to be found; newer lines are taken to run
# on what 2.11's does. The open kernel modules of NVIDIA's driver begin with Turing: no V100 (p3, p3dn).
_OSS_GPU = r"/aws/service/deeplearning/ami/x86_64/oss-nvidia-driver-gpu-pytorch-"
_NOTES = "https://docs.amazonaws.cn/dlami/latest/devguide/aws-deep-learning-ami-"
_OF_2_9 = {"g4dn", "g5", "g6", "gr6", "g6e", "p4d", "p4de", "p5", "p5e", "p5en", "p6-b200"}
IMAGE_LINES = (
    ImageLine(
        parameter=re.compile(_OSS_GPU + r"2\.[0-9]-.*"),
        families=frozenset(_OF_2_9),
        source=f"{_NOTES}gpupt29oss-ul2404-2026-03-20.md",
    ),
    ImageLine(
        parameter=re.compile(_OSS_GPU + r"\d+\.\d+-.*"),
        families=frozenset(_OF_2_9 | {"g6f", "gr6f"}),
        source=f"{_NOTES}gpupt211oss-al2023-2026-09-07.md",
    ),
)


def image_line(parameter: str) -> ImageLine | None:
    """The line of images that an SSM parameter names; None for one that is not known: nobody says what it runs on."""
    return next((one for one in IMAGE_LINES if one.parameter.fullmatch(parameter)), None)


def off_image(one: InstanceType, line: ImageLine | None) -> str:
    """Why the image does not run on the type; empty where it does, or where nobody knows."""
    if _ARM.match(one.name):
        return f"{one.name} has an ARM processor, for which there is no image here"
    if line is None or one.device == "cpu" or family(one.name) in line.families:
        return ""
    return f"the image of [ec2] ami_parameter does not run on {family(one.name)} ({one.device}; {line.source})"


def family(instance_type: str) -> str:
    """`p4d` of `p4d.24xlarge`."""
    return instance_type.partition(".")[0]


# Peak dense fp32 rate of one whole device in TFLOP/s, tensor cores not counted, as NVIDIA's data sheets of each product
# stated it in November 2026 (A10G: the A10's). What is not here is unknown.
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

# The same of 16-bit floats on tensor cores, without sparsity (A10G: the A10's). From Ampere on, TF32 has half of it and
# FP8, where there is any, twice: V100 and T4 have neither.
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
    """Peak fp32 TFLOP/s of a whole device, however its name is capitalised; None where it is unknown."""
    return DEVICE_TFLOPS.get(_BY_NAME.get(device.lower(), ""))


def most_tflops(device: str, precision: str) -> float | None:
    """TFLOP/s that one device cannot exceed in that precision; None where it is unknown.

    In fp32 that of TF32 where there is any, since PyTorch's convolutions use it unless set otherwise. A part of a GPU
    ("L4 1/2") has that part.
    """
    name, _, part = device.partition(" 1/")
    known = _BY_NAME.get(name.lower())
    if known is None:
        return None
    half = HALF_TFLOPS.get(known, DEVICE_TFLOPS[known])
    times = {"fp16": 1.0, "bf16": 1.0, "fp8": 2.0}.get(precision)
    tf32 = DEVICE_TFLOPS[known] if known in _BEFORE_AMPERE else max(DEVICE_TFLOPS[known], half / 2)
    whole = tf32 if times is None else half * times
    return whole / float(part) if part else whole


def instance_type_of(answer: Answer) -> InstanceType:
    """One entry of DescribeInstanceTypes. GPU memory is as EC2 reports it (an A10G shows 22.35 GiB).

    Raises ValueError where the description lacks what the model needs, above all the sustained network rate.
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
    """Sustained gigabit/s of all network cards that a launch attaches, at most what EC2 states of the whole machine.

    Those are the cards that take an EFA; a type without EFA has its first card alone (see `efa_cards`).
    The peak that a card may reach for minutes ("Up to 25 Gigabit") would flatter every long training job. Some machines
    of several cards list the rate of all for each (g6e.48xlarge: "400 Gigabit", and 400 on each of four).
    Raises ValueError where a card does not tell.
    """
    cards = answer.get("NetworkInfo", {}).get("NetworkCards", [])
    attached = efa_cards(answer) or (0,)
    rates = [
        card.get("BaselineBandwidthInGbps")
        for at, card in enumerate(cards)
        if _index(at, card) in attached
    ]
    if not rates or any(one is None or one <= 0 for one in rates):
        raise ValueError(f"{answer['InstanceType']}: its sustained network rate is unknown")
    total = float(sum(rates))
    stated = _STATED.fullmatch(str(answer["NetworkInfo"].get("NetworkPerformance", "")))
    most = float(stated[2]) * int(stated[1] or 1) if stated else total
    return most if total > _ROUNDED * most else total


def efa_cards(answer: Answer) -> tuple[int, ...]:
    """Indices of the network cards that take an EFA interface, as many as the machine may have; () without EFA.

    The first card of some types takes none (p6-b300). What says nothing of its cards has one.
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
    """Name, count, GiB and TFLOP/s of one device; None for a machine of processors only.

    A part of a GPU (`GpuPartitionSize` below 1) is a device of its own name, with that part of the rate.
    """
    gpus = answer.get("GpuInfo", {}).get("Gpus", [])
    if gpus:
        gpu = gpus[0]
        part = float(gpu.get("GpuPartitionSize") or 1.0)
        count = int(gpu.get("LogicalGpuCount") or gpu.get("Count") or 1)
        name = str(gpu["Name"]) if part == 1.0 else f"{gpu['Name']} 1/{1 / part:g}"
        whole = device_tflops(str(gpu["Name"]))
        return (
            name,
            count,
            float(gpu["MemoryInfo"]["SizeInMiB"]) / 1024,
            None if whole is None else whole * part,
        )
    for info, key in (
        ("NeuronInfo", "NeuronDevices"),
        ("InferenceAcceleratorInfo", "Accelerators"),
    ):
        found = answer.get(info, {}).get(key, [])
        if found:
            gib = float(found[0].get("MemoryInfo", {}).get("SizeInMiB", 0)) / 1024
            return str(found[0]["Name"]), int(found[0].get("Count") or 1), gib, None
    return None


def described(answers: Iterable[Answer]) -> list[InstanceType]:
    """Every type that can be described, by name."""
    types: dict[str, InstanceType] = {}
    for answer in answers:
        with suppress(KeyError, ValueError):
            one = instance_type_of(answer)
            types.setdefault(one.name, one)
    return [types[name] for name in sorted(types)]


def wanted(
    types: Iterable[InstanceType], patterns: Sequence[str], line: ImageLine | None = None
) -> list[InstanceType]:
    """Types that one of `patterns` names: `g5.*`, `p4d.24xlarge`, or `gpu` for all that `is_gpu` on which `line` runs.

    Whoever names a type gets answers about it, from imported measurements, also where no image here runs on it.
    """

    def named(one: InstanceType, pattern: str) -> bool:
        return (
            is_gpu(one) and not off_image(one, line)
            if pattern == GPU
            else fnmatchcase(one.name, pattern)
        )

    return [one for one in types if any(named(one, pattern) for pattern in patterns)]


def may_be_wanted(names: Iterable[str], patterns: Sequence[str]) -> set[str]:
    """Names that `wanted` might keep: what to ask a description of."""
    return {
        name
        for name in names
        if any(
            name[0] in _GPU_FAMILIES if pattern == GPU else fnmatchcase(name, pattern)
            for pattern in patterns
        )
    }


def is_gpu(one: InstanceType) -> bool:
    """NVIDIA's alone, on x86: PyTorch's stock builds know them, and the image runs there.

    EC2 names NVIDIA's families g and p, but for AMD's g4ad. ARM types can be named one by one, for advice from imports.
    """
    if one.device == "cpu" or one.name[0] not in _GPU_FAMILIES or one.name.startswith("g4ad."):
        return False
    return _ARM.match(one.name) is None


# Quotas of vCPUs that run at once, by family and market: names as Service Quotas has them (November 2026).
_FAMILIES = {
    "G and VT": (re.compile(r"(gr?|vt)\d"), {"on-demand": "L-DB2E81BA", "spot": "L-3819A6DF"}),
    "P2 to P4": (re.compile(r"p[2-4]"), {"on-demand": "L-417A185B", "spot": "L-7212CCBC"}),
    "P5 and P6": (re.compile(r"p[56]"), {"on-demand": "L-417A185B", "spot": "L-C4BD4855"}),
    "standard": (
        re.compile(r"(a|c|d|h|i|im|is|m|r|t|z)\d"),
        {"on-demand": "L-1216C47A", "spot": "L-34B43A08"},
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TypeFacts:
    """Of one type. `arm`: its processor is not x86; `grouped`: it can lie in a cluster placement group.

    `efa_cards`: indices of the network cards that take an EFA, where `efa`.
    """

    name: str
    vcpus: int
    arm: bool
    efa: bool
    grouped: bool
    efa_cards: tuple[int, ...] = (0,)

    @property
    def several_interfaces(self) -> bool:
        """Whether all of its network takes more than one interface, so that EC2 gives it no public address."""
        return self.efa and self.efa_cards != (0,)


def facts_of(answer: Mapping[str, Any]) -> TypeFacts:
    """One entry of DescribeInstanceTypes."""
    return TypeFacts(
        name=str(answer["InstanceType"]),
        vcpus=int(answer["VCpuInfo"]["DefaultVCpus"]),
        arm="x86_64"
        not in answer.get("ProcessorInfo", {}).get("SupportedArchitectures", ["x86_64"]),
        efa=bool(efa_cards(answer)),
        efa_cards=efa_cards(answer) or (0,),
        grouped="cluster" in answer.get("PlacementGroupInfo", {}).get("SupportedStrategies", ()),
    )


def quota_of(instance_type: str, market: str) -> str | None:
    """Code of the quota that counts the vCPUs of such a machine; None for families that this version does not know."""
    return next(
        (codes[market] for form, codes in _FAMILIES.values() if form.match(instance_type)), None
    )


def vcpus_by_quota(members: Sequence[Offer], facts: Mapping[str, TypeFacts]) -> Counter[str]:
    """How many vCPUs a cluster takes of each quota."""
    taken = Counter[str]()
    for offer in members:
        if code := quota_of(offer.instance_type.name, offer.market):
            taken[code] += facts[offer.instance_type.name].vcpus
    return taken


def vcpus_held(instances: Iterable[Mapping[str, Any]]) -> Counter[str]:
    """How many vCPUs machines that are pending or running hold of each quota, whoever launched them."""
    held = Counter[str]()
    for one in instances:
        market, cpu = (
            "spot" if one.get("InstanceLifecycle") == "spot" else "on-demand",
            one.get("CpuOptions", {}),
        )
        if code := quota_of(str(one["InstanceType"]), market):
            held[code] += int(cpu.get("CoreCount", 0)) * int(cpu.get("ThreadsPerCore", 1))
    return held
