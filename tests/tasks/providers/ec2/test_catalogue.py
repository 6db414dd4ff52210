"""Descriptions of EC2 become instance types: sustained rates, fractions of devices."""

import pytest

from tasks.providers.ec2.catalogue import (
    IMAGE_FAMILIES,
    efa_cards,
    family,
    filter_types,
    instance_type_of,
    instance_types_of,
    is_gpu,
    most_tflops,
    off_image,
    quota_of,
)
from tasks.providers.ec2.settings import AMI_PARAMETER
from tasks.providers.ec2.snapshot import read_snapshot


def answer(name="g9.2xlarge", **changed):
    """An entry of DescribeInstanceTypes."""
    return {
        "InstanceType": name,
        "VCpuInfo": {"DefaultVCpus": 8},
        "MemoryInfo": {"SizeInMiB": 32768},
        "NetworkInfo": cards(10.0, able=(False,), stated="Up to 25 Gigabit"),
        "GpuInfo": gpus(),
    } | changed


def gpus(**changed):
    whole = {"Name": "T4", "Count": 1, "LogicalGpuCount": 1, "GpuPartitionSize": 1.0}
    return {"Gpus": [whole | {"MemoryInfo": {"SizeInMiB": 16384}} | changed]}


def cards(*gbps, stated="High", able=()):
    """Network cards; `able`: which of them take an EFA (all, unless given)."""
    takes = able or [True] * len(gbps)
    return {
        "EfaSupported": any(takes),
        "EfaInfo": {"MaximumEfaInterfaces": sum(takes)},
        "NetworkPerformance": stated,
        "NetworkCards": [
            {"BaselineBandwidthInGbps": rate, "InterfaceTypes": ["efa"] if efa else []}
            for rate, efa in zip(gbps, takes, strict=True)
        ],
    }


NEURON = {"NeuronDevices": [{"Name": "Trainium", "Count": 16, "MemoryInfo": {"SizeInMiB": 32768}}]}
EIGHTH = gpus(Count=0, GpuPartitionSize=0.125, Name="L4", MemoryInfo={"SizeInMiB": 2048})


@pytest.mark.parametrize(
    "changed, device",
    [
        ({}, (1, "T4", 16.0, 8.1)),
        ({"GpuInfo": {}}, (1, "cpu", 32.0, None)),
        ({"GpuInfo": {}, "NeuronInfo": NEURON}, (16, "Trainium", 32.0, None)),
        ({"GpuInfo": gpus(Name="Z1")}, (1, "Z1", 16.0, None)),
        ({"GpuInfo": EIGHTH}, (1, "L4 1/8", 2.0, 30.3 / 8)),
    ],
    ids=["GPU", "processors alone", "Neuron", "of unknown speed", "part of a GPU"],
)
def test_a_machine_is_what_its_devices_are(changed, device):
    kind = instance_type_of(answer(**changed))
    assert (kind.devices, kind.device, kind.device_memory_gib, kind.device_tflops) == device
    assert (kind.name, kind.cores, kind.memory_gib) == ("g9.2xlarge", 8.0, 32.0)
    assert kind.bandwidth_gbps == 10.0


@pytest.mark.parametrize(
    "device, precision, most",
    [
        ("t4", "fp32", 8.1),  # it has no TF32
        ("A100", "fp32", 156.0),  # TF32, which PyTorch's convolutions use unless set otherwise
        ("H100", "fp8", 1978.8),
        ("L4 1/2", "bf16", 60.5),
        ("Z1", "fp32", None),
    ],
)
def test_what_a_device_cannot_exceed_depends_on_the_precision(device, precision, most):
    assert most_tflops(device, precision) == most


@pytest.mark.parametrize(
    "network, attached, gbps",
    [
        (cards(100.0, 100.0, stated="2x 100 Gigabit"), (0, 1), 200.0),
        (cards(400.0, 400.0, stated="400 Gigabit"), (0, 1), 400.0),
        (cards(133.333, stated="133.33 Gigabit"), (0,), 133.333),
        (cards(100.0, 100.0, 100.0, able=(False, True, True)), (1, 2), 200.0),
    ],
)
def test_attached_cards_count_but_never_more_than_the_machine_is_said_to_have(
    network, attached, gbps
):
    described = answer(NetworkInfo=network)
    assert efa_cards(described) == attached and instance_type_of(described).bandwidth_gbps == gbps


@pytest.mark.parametrize("network", [cards(None, stated="10 Gigabit"), {}])
def test_a_type_whose_sustained_rate_nobody_tells_is_left_out(network):
    types = instance_types_of([answer(NetworkInfo=network), answer("m9.large", GpuInfo={})])
    assert [kind.name for kind in types] == ["m9.large"]


@pytest.mark.parametrize(
    "patterns, kept",
    [
        (("gpu",), {"g9.2xlarge", "p9.huge"}),
        (("[fg]9.*",), {"g9.2xlarge"}),
        (("m9.large", "g9.*"), {"m9.large", "g9.2xlarge"}),
    ],
)
def test_types_are_wanted_by_name_pattern_or_gpu(patterns, kept):
    types = instance_types_of(answer(name) for name in ("g9.2xlarge", "g4ad.xlarge", "p9.huge"))
    types += instance_types_of([answer("m9.large", GpuInfo={})])
    assert {kind.name for kind in filter_types(types, patterns)} == kept


def test_gpu_stands_for_the_families_of_the_image():
    gpu_types = [kind for kind in read_snapshot().instance_types if is_gpu(kind)]
    offered = {family(kind.name) for kind in filter_types(gpu_types, ["gpu"], AMI_PARAMETER)}
    assert offered == IMAGE_FAMILIES
    volta = next(kind for kind in gpu_types if kind.name == "p3dn.24xlarge")
    assert off_image(volta, AMI_PARAMETER)
    assert filter_types(gpu_types, [volta.name], AMI_PARAMETER) == [volta]
    assert filter_types(gpu_types, ["gpu"], "/ours/ami") == gpu_types
    older = filter_types(gpu_types, ["gpu"], AMI_PARAMETER.replace("2.13", "2.9"))
    assert IMAGE_FAMILIES - {family(kind.name) for kind in older} == {"g6f", "gr6f"}


def test_processors_run_any_image_and_arm_none():
    arm, cpu = instance_types_of([answer("m9.large", GpuInfo={}), answer("g5gn.xlarge")])
    assert off_image(cpu, AMI_PARAMETER) == "" and off_image(arm, AMI_PARAMETER)
    assert off_image(arm, "/ours/ami")


@pytest.mark.parametrize(
    "name, market, code",
    [
        ("gr6f.4xlarge", "spot", "L-3819A6DF"),
        ("p5.48xlarge", "spot", "L-C4BD4855"),
        ("p5.48xlarge", "on-demand", "L-417A185B"),
        ("trn1.32xlarge", "spot", None),
    ],
)
def test_each_family_and_market_has_its_quota(name, market, code):
    assert quota_of(name, market) == code
