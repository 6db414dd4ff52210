"""Derive instance types, network rates, quotas and image support from EC2's type descriptions.

The argument `answer` is the description of one type, as DescribeInstanceTypes returns it. This
module does not call AWS.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from typing import Any

from models.domain.cluster import InstanceType
from models.domain.data_sheets import sheets_of

Answer = Mapping[str, Any]

# In [ec2] instance_types, this pattern matches all types with NVIDIA GPUs that the image supports.
GPU = "gpu"
# Types with an ARM CPU: Graviton (g5g, m7g, c7gn) and Grace (p6e-gb200).
_ARM = re.compile(r"[a-z]+\d+([a-z]*g[a-z]*|[a-z]*-gb\d+)\.")
_STATED = re.compile(r"(?:Up to )?(?:(\d+)x )?([\d.]+) Gigabit")
_ROUNDED = 1.01  # EC2 rounds the rate of a machine: 133.333 becomes 133.33

# GPU families that Deep Learning AMIs support, from supported_ec2_instances in AWS's release notes:
# https://docs.amazonaws.cn/dlami/latest/devguide/, file
# aws-deep-learning-ami-gpupt211oss-al2023-2026-09-07.md, read on 2026-11-23. The notes are for
# PyTorch 2.11, because AWS has none for 2.12 and 2.13. V100 (p3, p3dn) is not supported, because
# the open kernel modules of NVIDIA's driver need Turing or newer.
_IMAGE = "/aws/service/deeplearning/ami/x86_64/oss-nvidia-driver-gpu-pytorch-"
IMAGE_FAMILIES = frozenset(
    {"g4dn", "g5", "g6", "gr6", "g6f", "gr6f", "g6e", "p4d", "p4de", "p5", "p5e", "p5en", "p6-b200"}
)


def off_image(kind: InstanceType, image: str) -> str:
    """Return why the machine image does not run on the type `kind`; "" if no reason is known.

    Every image needs an x86 CPU. If the image is an AWS Deep Learning AMI with PyTorch and the type
    has GPUs, the function also checks that the image supports the type's family, such as `p4d`.

    image: the SSM parameter that names the image.
    """
    if _ARM.match(kind.name):
        return f"{kind.name} has an ARM CPU, and the image is for x86"
    known = image.startswith(_IMAGE) and kind.device != "cpu"
    before_2_10 = re.match(r"2\.\d-", image.removeprefix(_IMAGE))
    families = IMAGE_FAMILIES - ({"g6f", "gr6f"} if before_2_10 else set())
    if not known or family(kind.name) in families:
        return ""
    return f"the image of [ec2] ami_parameter does not run on {family(kind.name)} ({kind.device})"


def family(instance_type: str) -> str:
    """Return the family of an instance type: `p4d` for `p4d.24xlarge`."""
    return instance_type.partition(".")[0]


def device_tflops(device: str) -> float | None:
    """Return a device's peak fp32 TFLOP/s without tensor cores; None if the device is unknown."""
    sheets = sheets_of(device)
    return float(sheets["fp32_tflops"].iloc[0]) if len(sheets) else None


def most_tflops(device: str, precision: str) -> float | None:
    """Return an upper bound on one device's TFLOP/s in `precision`; None if the device is unknown.

    For fp32, the bound includes the TF32 rate, because PyTorch's convolutions use TF32 by default.
    For fp8, the bound is twice the 16-bit rate. `device` may be a fraction of a GPU, such as
    "L4 1/2".
    """
    name, _, divisor = device.partition(" 1/")
    sheets = sheets_of(name)
    if not len(sheets):
        return None
    half = sheets["fp16_tflops"].max()
    tf32 = sheets[["fp32_tflops", "tf32_tflops"]].max(axis=None)
    whole = {"fp16": half, "bf16": half, "fp8": 2 * half}.get(precision, tf32)
    return float(whole) / float(divisor or 1)


def instance_type_of(answer: Answer) -> InstanceType:
    """Convert a description from DescribeInstanceTypes to an InstanceType.

    A device that is a fraction of a GPU has a name such as "L4 1/2". Raises ValueError if the
    sustained network rate is unknown, and LookupError if a field is missing.
    """
    memory_gib, others = _gib(answer), answer.get("InferenceAcceleratorInfo", {})
    device, devices, device_memory_gib, tflops = "cpu", 1, memory_gib, None
    if gpus := answer.get("GpuInfo", {}).get("Gpus"):
        [gpu, *_] = gpus
        fraction = gpu["GpuPartitionSize"]
        device, whole = gpu["Name"], device_tflops(gpu["Name"])
        tflops = None if whole is None else whole * fraction
        device += "" if fraction == 1.0 else f" 1/{1 / fraction:g}"
        devices = gpu.get("LogicalGpuCount") or gpu.get("Count") or 1
        device_memory_gib = _gib(gpu)
    elif chips := answer.get("NeuronInfo", {}).get("NeuronDevices") or others.get("Accelerators"):
        [chip, *_] = chips
        device, devices, device_memory_gib = chip["Name"], chip["Count"], _gib(chip)
    return InstanceType(
        name=answer["InstanceType"],
        provider="ec2",
        devices=devices,
        device=device,
        cores=float(answer["VCpuInfo"]["DefaultVCpus"]),
        memory_gib=memory_gib,
        device_memory_gib=device_memory_gib,
        bandwidth_gbps=baseline_gbps(answer),
        device_tflops=tflops,
    )


def _gib(described: Answer) -> float:
    """Return the memory in GiB of a machine, GPU or accelerator, from its `MemoryInfo`."""
    return float(described["MemoryInfo"]["SizeInMiB"]) / 1024


def baseline_gbps(answer: Answer) -> float:
    """Return the sustained network rate of a machine in Gbit/s.

    For a type with EFA, this is the total rate of all network cards that can have an EFA interface.
    For other types, this is the rate of the first card. EC2 may also state a rate for the whole
    machine. The stated rate is returned if the rate of the cards is more than 1 % higher.

    Raises ValueError if a card's rate is unknown.
    """
    network = answer["NetworkInfo"]
    attached = efa_cards(answer) or (0,)
    # a peak rate ("Up to 25 Gigabit") is not used, because it lasts only for minutes
    rates = [network["NetworkCards"][card].get("BaselineBandwidthInGbps") for card in attached]
    if not all(rates):
        raise ValueError(f"{answer['InstanceType']}: its sustained network rate is unknown")
    total = float(sum(rates))
    stated = _STATED.fullmatch(network.get("NetworkPerformance", ""))
    most = float(stated[2]) * int(stated[1] or 1) if stated else total
    # For some types, EC2 lists the rate of the whole machine as the rate of each card. For example,
    # g6e.48xlarge has 400 Gbit/s, and each of its four cards is listed with 400.
    return most if total > _ROUNDED * most else total


def efa_cards(answer: Answer) -> tuple[int, ...]:
    """Return the indices of the network cards that can have an EFA interface.

    On some types, such as p6-b300, the first card does not support EFA.
    """
    network = answer["NetworkInfo"]
    if not network.get("EfaSupported"):
        return ()
    able = [
        at for at, card in enumerate(network["NetworkCards"]) if "efa" in card["InterfaceTypes"]
    ]
    return tuple(able[: network["EfaInfo"]["MaximumEfaInterfaces"]])


def instance_types_of(answers: Iterable[Answer]) -> list[InstanceType]:
    """Convert descriptions from DescribeInstanceTypes to instance types, sorted by name.

    Descriptions with a missing field or an unknown network rate are left out.
    """
    types: list[InstanceType] = []
    for answer in answers:
        with suppress(LookupError, ValueError):
            types.append(instance_type_of(answer))
    return sorted(types, key=lambda kind: kind.name)


def filter_types(
    types: Iterable[InstanceType], patterns: Sequence[str], image: str = ""
) -> list[InstanceType]:
    """Return the types that match at least one pattern, such as `g5.*`, `p4d.24xlarge` or `gpu`.

    The pattern `gpu` matches x86 types with NVIDIA GPUs, if the machine image supports the type.

    image: the SSM parameter that names the image. If "", image support is not checked.
    """
    # Other patterns also match types that the image does not support, because users may import
    # measurements of such types.
    return [
        kind
        for kind in types
        if any(fnmatchcase(kind.name, pattern) for pattern in patterns)
        or (GPU in patterns and is_gpu(kind) and not off_image(kind, image))
    ]


def is_gpu(kind: InstanceType) -> bool:
    """Return True if the type has NVIDIA GPUs and an x86 CPU."""
    # names of EC2's types with NVIDIA GPUs begin with g or p; g4ad has AMD GPUs
    named = kind.name[0] in "gp" and not kind.name.startswith("g4ad.")
    return named and kind.device != "cpu" and _ARM.match(kind.name) is None


# Codes of vCPU quotas in AWS's Service Quotas, by family and market (November 2026).
_QUOTAS = {
    r"(gr?|vt)\d": {"on-demand": "L-DB2E81BA", "spot": "L-3819A6DF"},
    r"p[2-4]": {"on-demand": "L-417A185B", "spot": "L-7212CCBC"},
    r"p[56]": {"on-demand": "L-417A185B", "spot": "L-C4BD4855"},
    r"(a|c|d|h|i|im|is|m|r|t|z)\d": {"on-demand": "L-1216C47A", "spot": "L-34B43A08"},
}


def several_interfaces(answer: Answer) -> bool:
    """Return True if a machine needs several network interfaces to reach its full network rate.

    EC2 gives no public IP address to a machine with several interfaces.
    """
    return efa_cards(answer) not in ((), (0,))


def may_be_grouped(answer: Answer) -> bool:
    """Return True if machines of the type may be in a cluster placement group."""
    return "cluster" in answer.get("PlacementGroupInfo", {}).get("SupportedStrategies", ())


def quota_of(instance_type: str, market: str) -> str | None:
    """Return the code of the vCPU quota for a type in a market; None if unknown.

    The code is an identifier of AWS's Service Quotas, such as "L-DB2E81BA".
    """
    found = (codes[market] for form, codes in _QUOTAS.items() if re.match(form, instance_type))
    return next(found, None)
