"""A machine measures the device that it was bought for, or nothing: the names, and the wait."""

import re

import pytest
import torch

from tasks.node import device, device_check
from tasks.node.device import device_of_rank
from tasks.node.device_check import is_named, wait_for_devices
from tasks.node.record import ANY, CPU, Devices

FOUR = Devices(name="A10G", count=4)
A10G = ["NVIDIA A10G"] * 4
A100 = "NVIDIA A100-SXM4-40GB"


@pytest.mark.parametrize(
    ("expected", "names", "others"),
    [
        ("A10G", ["NVIDIA A10G"], [CPU, "NVIDIA A10", A100]),
        ("T4", ["Tesla T4"], []),
        ("A100", [A100], ["NVIDIA A10G", f"{A100} MIG 1g.5gb"]),
        ("RTX PRO Server 6000", ["NVIDIA RTX PRO 6000 Blackwell Server Edition"], []),
        ("L4", [], ["NVIDIA L40S", "NVIDIA L4-3Q"]),
        ("L4 1/8", ["NVIDIA L4-3Q", "NVIDIA L4"], ["NVIDIA L40S"]),
        (CPU, [CPU], ["NVIDIA L4"]),
        (ANY, [CPU, "NVIDIA L4"], []),
    ],
)
def test_a_device_is_known_by_the_name_that_torch_gives_it_and_no_other_goes_under_it(
    expected, names, others
):
    assert all(is_named(expected, name) for name in names)
    assert not any(is_named(expected, name) for name in others)


@pytest.mark.parametrize(
    ("works_at", "cold_s", "reason", "least_s", "most_s"),
    [
        (1e9, 0.0, "have 4 x A10G.*Error 802", 60.0, 70.0),  # a wait has its end
        (30.0, 0.0, "", 30.0, 32.0),  # a driver that comes up late is waited for
        (170.0, 120.0, "", 170.0, 172.0),  # from the end of the first look on,
        (1e9, 1e9, "no answer", 300.0, 300.0),  # which has its end too,
        (1e9, 265.0, "Error 802", 265.0, 300.0),  # and so has all of it
    ],
)
def test_a_machine_is_waited_for_and_its_reason_is_in_torchs_words(
    clock, monkeypatch, works_at, cold_s, reason, least_s, most_s
):
    """Its driver works from a moment on. The first look takes `cold_s`, as far as it may."""
    colds = [cold_s]

    def look(within_s):
        assert within_s > 0.0
        needed_s = colds.pop() if colds else 0.0
        clock.now += min(needed_s, within_s)
        if needed_s > within_s:
            return [], "no answer"
        return (A10G, "") if clock.now >= works_at else ([], "Error 802")

    monkeypatch.setattr(device_check, "torch_sees", look)
    found = wait_for_devices(FOUR, 300.0)
    assert bool(found) is bool(reason) and re.search(reason, found)
    assert least_s <= clock.now <= most_s


@pytest.mark.parametrize(
    ("expected", "there", "rank", "found"),
    [
        (FOUR, A10G, 3, "cuda:3"),
        (Devices(name=CPU, count=1), A10G, 0, CPU),  # a processor was bought
        (Devices(name=ANY, count=4), [], 0, CPU),  # a processor serves if anything will do
    ],
)
def test_a_rank_takes_the_device_of_its_place_and_of_the_kind_that_was_bought_or_none(
    monkeypatch, expected, there, rank, found
):
    current = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(there))
    monkeypatch.setattr(
        torch.cuda,
        "get_device_name",
        lambda device: there[device if isinstance(device, int) else device.index],
    )
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setenv("LOCAL_RANK", str(rank))
    assert device_of_rank(expected) == torch.device(found)
    assert device.name_of(torch.device(found)) == (there[rank] if found != CPU else CPU)
    assert current == ([torch.device(found)] if found == "cuda:3" else [])
