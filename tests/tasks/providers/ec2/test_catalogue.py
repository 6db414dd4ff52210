"""Descriptions of EC2 become instance types: sustained rates, fractions of devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tasks.providers.ec2.catalogue import (
    described,
    efa_cards,
    family,
    image_families,
    instance_type_of,
    is_gpu,
    may_be_wanted,
    most_tflops,
    off_image,
    wanted,
)
from tasks.providers.ec2.settings import AMI_PARAMETER
from tasks.providers.ec2.snapshot import packaged


def answer(**changed: Any) -> dict[str, Any]:
    """An entry of DescribeInstanceTypes."""
    card = {"BaselineBandwidthInGbps": 10.0, "PeakBandwidthInGbps": 25.0, "InterfaceTypes": ()}
    return {
        "InstanceType": "g9.2xlarge",
        "VCpuInfo": {"DefaultVCpus": 8},
        "MemoryInfo": {"SizeInMiB": 32768},
        "NetworkInfo": {"NetworkPerformance": "Up to 25 Gigabit", "NetworkCards": [card]},
        "GpuInfo": {"Gpus": [gpu()]},
    } | changed


def gpu(**changed: Any) -> dict[str, Any]:
    whole = {"Name": "T4", "Count": 1, "LogicalGpuCount": 1, "GpuPartitionSize": 1.0}
    return whole | {"MemoryInfo": {"SizeInMiB": 16384}} | changed


def cards(
    *gbps: float | None, stated: str = "High", able: Sequence[bool] = (), most: int = 99
) -> dict[str, Any]:
    """Network cards; `able`: which of them take an EFA (all, unless given)."""
    takes = able or [True] * len(gbps)
    kinds = [["interface", "efa", "efa-only"] if one else ["interface"] for one in takes]
    rates = [{"BaselineBandwidthInGbps": one} for one in gbps]
    named = [
        rate | {"NetworkCardIndex": at, "InterfaceTypes": kinds[at]}
        for at, rate in enumerate(rates)
    ]
    efa = {"EfaSupported": any(takes), "EfaInfo": {"MaximumEfaInterfaces": min(most, sum(takes))}}
    return efa | {"NetworkPerformance": stated, "NetworkCards": named}


NEURON = {"NeuronDevices": [{"Name": "Trainium", "Count": 16, "MemoryInfo": {"SizeInMiB": 32768}}]}


@pytest.mark.parametrize(
    ("changed", "device", "tflops"),
    [
        ({}, (1, "T4", 16.0), 8.1),
        ({"GpuInfo": {}}, (1, "cpu", 32.0), None),
        ({"GpuInfo": {}, "NeuronInfo": NEURON}, (16, "Trainium", 32.0), None),
        ({"GpuInfo": {"Gpus": [gpu(Name="Z1")]}}, (1, "Z1", 16.0), None),
        (
            {
                "GpuInfo": {
                    "Gpus": [
                        gpu(
                            Count=0,
                            GpuPartitionSize=0.125,
                            Name="L4",
                            MemoryInfo={"SizeInMiB": 2048},
                        )
                    ]
                }
            },
            (1, "L4 1/8", 2.0),
            30.3 / 8,
        ),
    ],
    ids=[
        "a GPU",
        "processors alone",
        "other accelerators",
        "a GPU of unknown speed",
        "a part of a GPU",
    ],
)
def test_a_machine_is_what_its_devices_are(
    changed: dict[str, Any], device: tuple[int, str, float], tflops: float | None
) -> None:
    one = instance_type_of(answer(**changed))
    assert (
        one.devices,
        one.device,
        one.device_memory_gib,
    ) == device and one.device_tflops == tflops
    assert (one.name, one.provider, one.cores, one.memory_gib) == ("g9.2xlarge", "ec2", 8.0, 32.0)
    assert one.bandwidth_gbps == 10.0


@pytest.mark.parametrize(
    ("device", "precision", "most"),
    [
        ("T4", "fp32", 8.1),
        ("T4", "tf32", 8.1),  # it has none
        ("t4", "fp16", 65.0),
        ("A100", "fp32", 156.0),  # TF32, which PyTorch's convolutions use unless set otherwise
        ("A100", "bf16", 312.0),
        ("H100", "fp8", 1978.0),
        ("L4 1/2", "bf16", 60.5),
        ("M60", "fp16", 4.8),  # without tensor cores
        ("Z1", "fp32", None),
    ],
)
def test_what_a_device_cannot_exceed_depends_on_the_precision(
    device: str, precision: str, most: float | None
) -> None:
    assert most_tflops(device, precision) == most


@pytest.mark.parametrize(
    ("network", "attached", "gbps"),
    [
        (cards(100.0, 100.0, 100.0, 100.0, stated="4x 100 Gigabit"), (0, 1, 2, 3), 400.0),
        (cards(400.0, 400.0, stated="400 Gigabit"), (0, 1), 400.0),
        (cards(100.0, 100.0, stated="Up to 300 Gigabit"), (0, 1), 200.0),
        (cards(133.333, stated="133.33 Gigabit"), (0,), 133.333),
        (cards(0.75), (0,), 0.75),
        (cards(100.0, 100.0, 100.0, able=(False, True, True)), (1, 2), 200.0),
        (cards(100.0, 100.0, most=1), (0,), 100.0),
        (cards(100.0, 100.0, able=(False, False)), (), 100.0),
    ],
)
def test_the_cards_that_a_launch_attaches_count_but_never_more_than_the_machine_is_said_to_have(
    network: dict[str, Any], attached: tuple[int, ...], gbps: float
) -> None:
    described = answer(NetworkInfo=network)
    assert efa_cards(described) == attached and instance_type_of(described).bandwidth_gbps == gbps


@pytest.mark.parametrize(
    "network", [cards(None, stated="10 Gigabit"), cards(stated="10 Gigabit"), {}]
)
def test_a_type_whose_sustained_rate_nobody_tells_is_left_out(network: dict[str, Any]) -> None:
    types = described([answer(NetworkInfo=network), answer(InstanceType="m9.large", GpuInfo={})])
    assert [kind.name for kind in types] == ["m9.large"]


def test_types_are_wanted_by_name_pattern_or_gpu() -> None:
    names = ("g9.2xlarge", "g4ad.xlarge", "p9.huge")
    types = [instance_type_of(answer(InstanceType=name)) for name in names]
    types.append(instance_type_of(answer(InstanceType="m9.large", GpuInfo={})))
    for patterns, kept in [
        (("gpu",), {"g9.2xlarge", "p9.huge"}),
        (("p*",), {"p9.huge"}),
        (("m9.large", "g9.*"), {"m9.large", "g9.2xlarge"}),
        (("*",), {*names, "m9.large"}),
        (("x1.*",), set()),
    ]:
        assert {kind.name for kind in wanted(types, patterns)} == kept
        assert kept <= may_be_wanted((kind.name for kind in types), patterns)


def test_gpu_stands_for_the_families_of_the_image_line() -> None:
    line = image_families(AMI_PARAMETER)
    assert line is not None
    gpus = [kind for kind in packaged().instance_types if is_gpu(kind)]
    offered = {family(kind.name) for kind in wanted(gpus, ["gpu"], line)}
    assert offered == line
    left = {family(kind.name) for kind in gpus} - offered
    assert {"p3dn", "g7", "g7e", "p6-b300"} <= left
    volta = next(kind for kind in gpus if kind.name == "p3dn.24xlarge")
    assert off_image(volta, line) and wanted(gpus, ["p3dn.24xlarge"], line) == [volta]
    assert wanted(gpus, ["gpu"], None) == gpus


def test_processors_run_any_image_and_arm_none() -> None:
    line = image_families(AMI_PARAMETER)
    types = [answer(InstanceType="m9.large", GpuInfo={}), answer(InstanceType="g5g.xlarge")]
    arm, cpu = described(types)
    assert off_image(cpu, line) == "" and off_image(arm, line) and off_image(arm, None)
