"""What EC2 says of an instance type, as the model's InstanceType. Pure; sustained network rates, never bursts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from models.cloud import InstanceType

Answer = Mapping[str, Any]

_STATED = re.compile(r"(?:Up to )?(?:(\d+)x )?([\d.]+) Gigabit")
_ROUNDED = 1.01  # 133.333 is stated as 133.33

_GPU_FAMILIES = "gp"
_ARM = re.compile(r"[a-z]+\d+[a-z]*(g|-gb\d+)\.")  # Graviton (g5g) and Grace (p6e-gb200) beside NVIDIA's GPUs

GPU = "gpu"  # in [ec2] instance_types: every type with NVIDIA GPUs on whose processor the machines' image runs

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


_BY_NAME = {name.lower(): tflops for name, tflops in DEVICE_TFLOPS.items()}


def device_tflops(device: str) -> float | None:
    """Peak fp32 TFLOP/s of a whole device, however its name is capitalised; None where it is unknown."""
    return _BY_NAME.get(device.lower())


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
    """Sustained gigabit/s of all network cards together, at most what EC2 states of the whole machine.

    The peak that a card may reach for minutes ("Up to 25 Gigabit") would flatter every long training job. Some machines
    of several cards list the rate of all for each (g6e.48xlarge: "400 Gigabit", and 400 on each of four).
    Raises ValueError where a card does not tell.
    """
    cards = answer.get("NetworkInfo", {}).get("NetworkCards", [])
    told = [card.get("BaselineBandwidthInGbps") for card in cards]
    if not told or any(one is None or one <= 0 for one in told):
        raise ValueError(f"{answer['InstanceType']}: its sustained network rate is unknown")
    total = float(sum(told))
    stated = _STATED.fullmatch(str(answer["NetworkInfo"].get("NetworkPerformance", "")))
    most = float(stated[2]) * int(stated[1] or 1) if stated else total
    return most if total > _ROUNDED * most else total


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
        return name, count, float(gpu["MemoryInfo"]["SizeInMiB"]) / 1024, None if whole is None else whole * part
    for info, key in (("NeuronInfo", "NeuronDevices"), ("InferenceAcceleratorInfo", "Accelerators")):
        found = answer.get(info, {}).get(key, [])
        if found:
            gib = float(found[0].get("MemoryInfo", {}).get("SizeInMiB", 0)) / 1024
            return str(found[0]["Name"]), int(found[0].get("Count") or 1), gib, None
    return None


def described(answers: Iterable[Answer]) -> tuple[list[InstanceType], list[str]]:
    """Every type that can be described, by name, and a sentence for each that cannot."""
    types: dict[str, InstanceType] = {}
    sentences: list[str] = []
    for answer in answers:
        try:
            one = instance_type_of(answer)
        except (KeyError, ValueError) as error:
            sentences.append(str(error) if isinstance(error, ValueError) else f"{answer.get('InstanceType')}: {error}")
            continue
        types.setdefault(one.name, one)
    return [types[name] for name in sorted(types)], sentences


def wanted(types: Iterable[InstanceType], patterns: Sequence[str]) -> list[InstanceType]:
    """Types that one of `patterns` names: `g5.*`, `p4d.24xlarge`, or `gpu` for all that `is_gpu`."""
    return [
        one
        for one in types
        if any(is_gpu(one) if pattern == GPU else fnmatchcase(one.name, pattern) for pattern in patterns)
    ]


def may_be_wanted(names: Iterable[str], patterns: Sequence[str]) -> set[str]:
    """Names that `wanted` might keep: what to ask a description of."""
    return {
        name
        for name in names
        if any(name[0] in _GPU_FAMILIES if pattern == GPU else fnmatchcase(name, pattern) for pattern in patterns)
    }


def is_gpu(one: InstanceType) -> bool:
    """NVIDIA's alone, on x86: PyTorch's stock builds know them, and the image runs there.

    EC2 names NVIDIA's families g and p, but for AMD's g4ad. ARM types can be named one by one, for advice from imports.
    """
    if one.device == "cpu" or one.name[0] not in _GPU_FAMILIES or one.name.startswith("g4ad."):
        return False
    return _ARM.match(one.name) is None
