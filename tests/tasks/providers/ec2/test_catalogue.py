"""What EC2 says of a type becomes what the model needs: sustained rates, parts of devices, nothing guessed."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

from tasks.providers.ec2.catalogue import (
    DEVICE_TFLOPS,
    HALF_TFLOPS,
    IMAGE_LINES,
    described,
    efa_cards,
    family,
    image_line,
    instance_type_of,
    is_gpu,
    may_be_wanted,
    most_tflops,
    off_image,
    wanted,
)
from tasks.providers.ec2.settings import AMI_PARAMETER
from tasks.providers.ec2.snapshot import packaged

CATALOGUE = Path(__file__).parents[5] / "shared" / "data" / "ec2_catalogue.csv"


def answer(**changed: Any) -> dict[str, Any]:
    """An entry of DescribeInstanceTypes."""
    card = {"BaselineBandwidthInGbps": 10.0, "PeakBandwidthInGbps": 25.0}
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


def cards(*gbps: float | None, stated: str) -> dict[str, Any]:
    able = {"EfaSupported": True, "EfaInfo": {"MaximumEfaInterfaces": len(gbps)}}
    return able | {"NetworkPerformance": stated, "NetworkCards": [{"BaselineBandwidthInGbps": one} for one in gbps]}


def test_a_gpu_machine() -> None:
    one = instance_type_of(answer())
    assert (one.name, one.provider, one.devices, one.device) == ("g9.2xlarge", "ec2", 1, "T4")
    assert (one.cores, one.memory_gib, one.device_memory_gib) == (8.0, 32.0, 16.0)
    assert one.device_tflops == DEVICE_TFLOPS["T4"]
    assert one.bandwidth_gbps == 10.0, "the baseline, not the burst"


def test_a_part_of_a_gpu_is_a_device_of_its_own() -> None:
    part = gpu(Count=0, GpuPartitionSize=0.125, Name="L4", MemoryInfo={"SizeInMiB": 2861})
    one = instance_type_of(answer(GpuInfo={"Gpus": [part]}))
    assert (one.devices, one.device) == (1, "L4 1/8")
    assert one.device_tflops == pytest.approx(DEVICE_TFLOPS["L4"] / 8)


@pytest.mark.parametrize(
    ("device", "precision", "most"),
    [
        ("T4", "fp32", 8.1),
        ("T4", "tf32", 8.1),  # it has none
        ("t4", "fp16", 65.0),
        ("A100", "fp32", 156.0),  # TF32, which PyTorch's convolutions use unless told otherwise
        ("A100", "bf16", 312.0),
        ("H100", "fp8", 1978.0),
        ("L4 1/2", "bf16", 60.5),
        ("M60", "fp16", 4.8),  # without tensor cores
        ("Z1", "fp32", None),
    ],
)
def test_what_a_device_cannot_exceed_depends_on_the_precision(device: str, precision: str, most: float | None) -> None:
    assert most_tflops(device, precision) == most


def test_no_tensor_core_is_slower_than_the_rest_of_its_device() -> None:
    assert set(HALF_TFLOPS) <= set(DEVICE_TFLOPS)
    assert all(HALF_TFLOPS[name] > DEVICE_TFLOPS[name] for name in HALF_TFLOPS)


def test_processors_alone_are_one_device_with_the_machines_memory() -> None:
    one = instance_type_of(answer(GpuInfo={}))
    assert (one.device, one.devices, one.device_memory_gib, one.device_tflops) == ("cpu", 1, 32.0, None)


def test_other_accelerators_and_gpus_of_unknown_speed() -> None:
    neuron = {"NeuronDevices": [{"Name": "Trainium", "Count": 16, "MemoryInfo": {"SizeInMiB": 32768}}]}
    one = instance_type_of(answer(GpuInfo={}, NeuronInfo=neuron))
    assert (one.device, one.devices, one.device_memory_gib) == ("Trainium", 16, 32.0)
    assert instance_type_of(answer(GpuInfo={"Gpus": [gpu(Name="Z1")]})).device_tflops is None


@pytest.mark.parametrize(
    ("network", "gbps"),
    [
        (cards(100.0, 100.0, 100.0, 100.0, stated="4x 100 Gigabit"), 400.0),
        (cards(400.0, 400.0, stated="400 Gigabit"), 400.0),
        (cards(100.0, 100.0, stated="Up to 300 Gigabit"), 200.0),
        (cards(133.333, stated="133.33 Gigabit"), 133.333),
        (cards(0.75, stated="High"), 0.75),
    ],
)
def test_all_cards_count_but_never_more_than_the_machine_is_said_to_have(network: dict[str, Any], gbps: float) -> None:
    assert instance_type_of(answer(NetworkInfo=network)).bandwidth_gbps == gbps


@pytest.mark.parametrize("network", [cards(None, stated="10 Gigabit"), cards(stated="10 Gigabit"), {}])
def test_a_type_whose_sustained_rate_nobody_tells_is_left_out_and_named(network: dict[str, Any]) -> None:
    types, sentences = described([answer(NetworkInfo=network), answer(InstanceType="m9.large", GpuInfo={})])
    assert [one.name for one in types] == ["m9.large"]
    assert sentences == ["g9.2xlarge: its sustained network rate is unknown"]


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
        assert {one.name for one in wanted(types, patterns)} == kept
        assert kept <= may_be_wanted((one.name for one in types), patterns), "what is wanted was asked for"


@pytest.mark.parametrize(("name", "kept"), [
    ("g5g.xlarge", False), ("p6e-gb200.36xlarge", False),
    ("g5.xlarge", True), ("gr6.4xlarge", True), ("g6e.xlarge", True),
    ("p5en.48xlarge", True), ("p6-b200.48xlarge", True),
])  # fmt: skip
def test_arm_machines_are_not_among_all_gpus_since_the_image_is_not_for_them(name: str, kept: bool) -> None:
    types, _ = described([answer(InstanceType=name)])
    assert bool(wanted(types, ["gpu"])) is kept
    assert wanted(types, [name]) == types, "by its name anything may be advised about"


@pytest.mark.skipif(not CATALOGUE.exists(), reason="the catalogue of measured data is not here")
def test_the_packaged_types_agree_with_another_source() -> None:
    known = {one.name: one for one in packaged().instance_types}
    rows = [row for row in csv.DictReader(CATALOGUE.read_text().splitlines()) if row["instance_type"] in known]
    assert len(rows) > 1300
    others: dict[str, int] = {}
    for row in rows:
        one = known[row["instance_type"]]
        assert one.cores == float(row["vcpu"])
        assert one.memory_gib == pytest.approx(float(row["memory_gib"]), rel=0.01)
        if row["gpu_name"]:
            assert one.device_memory_gib == pytest.approx(float(row["gpu_memory_gib_each"]), rel=0.01)
        if row["network_gbps"] and one.bandwidth_gbps != pytest.approx(float(row["network_gbps"]), rel=0.01):
            others[one.name] = others.get(one.name, 0) + 1
    assert len(others) <= 15, f"network rates: {sorted(others)}"


def network(*able: bool, most: int | None = None, gbps: float = 100.0) -> dict[str, Any]:
    """Cards that take an EFA or none, as DescribeInstanceTypes has them."""
    kinds = [["interface", "efa", "efa-only"] if one else ["interface"] for one in able]
    named = [
        {"NetworkCardIndex": at, "BaselineBandwidthInGbps": gbps, "InterfaceTypes": one} for at, one in enumerate(kinds)
    ]
    efa = {"MaximumEfaInterfaces": sum(able) if most is None else most}
    return {"EfaSupported": any(able), "EfaInfo": efa, "NetworkCards": named, "NetworkPerformance": "High"}


@pytest.mark.parametrize(
    ("told", "cards", "gbps"),
    [
        (network(True, True, True, True), (0, 1, 2, 3), 400.0),
        (network(False, True, True), (1, 2), 200.0),
        (network(True, True, most=1), (0,), 100.0),
        (network(True), (0,), 100.0),
        (network(False, False), (), 100.0),
    ],
    ids=["all", "not the first", "fewer than there are cards", "one", "no EFA"],
)
def test_the_bandwidth_is_that_of_the_cards_that_a_launch_attaches(
    told: dict[str, Any], cards: tuple[int, ...], gbps: float
) -> None:
    described_so = answer(NetworkInfo=told)
    assert efa_cards(described_so) == cards
    assert instance_type_of(described_so).bandwidth_gbps == gbps


def test_types_that_the_image_does_not_run_on_are_not_among_all_gpus_and_the_reason_names_its_source() -> None:
    line = image_line(AMI_PARAMETER)
    assert line is not None and "release" not in line.source and "2026" in line.source
    gpus = [one for one in packaged().instance_types if is_gpu(one)]
    offered = {family(one.name) for one in wanted(gpus, ["gpu"], line)}
    assert offered == line.families, "every family of the note is one that EC2 has"
    left = {family(one.name) for one in gpus} - offered
    assert {"p3dn", "g7", "g7e", "p6-b300"} <= left, "no Volta with the open driver, nothing that no note lists"
    volta = next(one for one in gpus if one.name == "p3dn.24xlarge")
    assert "p3dn (V100" in off_image(volta, line) and line.source in off_image(volta, line)
    assert wanted(gpus, ["p3dn.24xlarge"], line) == [volta], "by its name anything may be advised about"
    assert wanted(gpus, ["gpu"], None) == gpus, "of an image that nobody knows nothing is left out"


@pytest.mark.parametrize(("parameter", "newer"), [
    (AMI_PARAMETER, True),
    ("/aws/service/deeplearning/ami/x86_64/oss-nvidia-driver-gpu-pytorch-2.9-ubuntu-24.04/latest/ami-id", False),
    ("/aws/service/deeplearning/ami/arm64/oss-nvidia-driver-gpu-pytorch-2.11-ubuntu-24.04/latest/ami-id", None),
    ("/ours/ami", None),
])  # fmt: skip
def test_a_line_of_images_is_known_by_its_parameter(parameter: str, newer: bool | None) -> None:
    line = image_line(parameter)
    assert (None if line is None else "gr6f" in line.families) is newer


def test_every_line_has_a_dated_source() -> None:
    for line in IMAGE_LINES:
        assert line.source.startswith("https://") and "2026-" in line.source


def test_processors_run_any_image_and_arm_none() -> None:
    line = image_line(AMI_PARAMETER)
    types, _ = described([answer(InstanceType="m9.large", GpuInfo={}), answer(InstanceType="g5g.xlarge")])
    arm, cpu = types
    assert off_image(cpu, line) == "" and "ARM" in off_image(arm, line) and "ARM" in off_image(arm, None)
