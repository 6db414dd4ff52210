"""A machine measures the device that it was bought for, or nothing: the names, the wait, and what a failure leaves."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tasks.node import device, device_check
from tasks.node.device import NoSuchDevice, own_device
from tasks.node.device_check import (
    is_named,
    wait_for_devices,
)
from tasks.node.processes import EXIT_NO_DEVICE
from tasks.node.record import ANY, CPU, Devices, Item, Plan, WorkloadFile, write_json

FOUR = Devices(name="A10G", count=4)


A100 = "NVIDIA A100-SXM4-40GB"


@pytest.mark.parametrize(
    ("expected", "names", "others"),
    [
        ("A10G", ["NVIDIA A10G"], [CPU, "NVIDIA A10", A100]),
        ("T4", ["Tesla T4"], []),
        ("T4g", ["NVIDIA T4G"], []),
        ("V100", ["Tesla V100-SXM2-16GB"], []),
        ("A100", [A100], ["NVIDIA A10G", f"{A100} MIG 1g.5gb"]),
        ("H100", ["NVIDIA H100 80GB HBM3"], []),
        ("H200", ["NVIDIA H200"], []),
        ("B300", ["NVIDIA B300 SXM6 AC"], []),
        ("RTX PRO Server 6000", ["NVIDIA RTX PRO 6000 Blackwell Server Edition"], []),
        ("L4", [], ["NVIDIA L40S", "NVIDIA L4-3Q"]),
        ("L4 1/8", ["NVIDIA L4-3Q"], ["NVIDIA L40S"]),
        ("L4 1/2", ["NVIDIA L4"], []),
        ("L40S", [], ["NVIDIA L4"]),
        ("Trainium", [], [CPU]),
        (CPU, [CPU], ["NVIDIA L4"]),
        (ANY, [CPU, "NVIDIA L4"], []),
    ],
)
def test_a_device_is_known_by_the_name_that_torch_gives_it_and_no_other_goes_under_it(
    expected: str, names: list[str], others: list[str]
) -> None:
    assert [is_named(expected, one) for one in names + others] == [True] * len(names) + [
        False
    ] * len(others)


@pytest.mark.parametrize(
    ("works_at", "cold_s", "wait_s", "said", "least_s", "most_s"),
    [
        (1e9, 0.0, 60.0, "bought for 4 x A10G.*Error 802", 60.0, 70.0),  # a wait has its end
        (1e9, 0.0, 0.0, "Error 802", 0.0, 0.0),  # and one look there is
        (30.0, 0.0, 60.0, "", 30.0, 32.0),  # a driver that comes up late is waited for
        (0.0, 290.0, 60.0, "", 290.0, 290.0),  # a slow disk is no fault of the devices:
        (170.0, 120.0, 60.0, "", 170.0, 172.0),  # the wait begins when the first look is over
        (
            1e9,
            1e9,
            60.0,
            "torch did not answer within 300 s",
            300.0,
            300.0,
        ),  # which has its end too,
        (1e9, 265.0, 60.0, "Error 802", 265.0, 300.0),  # and so has all of it
    ],
)
def test_a_machine_is_waited_for_and_its_reason_is_what_torch_said(
    clock: Any,
    works_at: float,
    cold_s: float,
    wait_s: float,
    said: str,
    least_s: float,
    most_s: float,
) -> None:
    """Its driver works from a moment on. The first look takes `cold_s`, as far as it may."""
    colds = [cold_s]

    def look(within_s: float) -> tuple[list[str], str]:
        assert within_s > 0.0
        needed_s = colds.pop() if colds else 0.0
        clock.now += min(needed_s, within_s)
        if needed_s > within_s:
            return [], f"torch did not answer within {within_s:.0f} s"
        return (
            (["NVIDIA A10G"] * 4, "")
            if clock.now >= works_at
            else ([], "Error 802: system not yet initialized")
        )

    reason = wait_for_devices(FOUR, look, wait_s=wait_s, most_s=300.0)
    assert bool(reason) is bool(said) and re.search(said, reason)
    assert least_s <= clock.now <= most_s and not colds


def plan(*nodes: list[int]) -> Plan:
    items = [
        Item(run_id=f"r{n}", kind="train", nodes=one, workload="w", batches=[8] * len(one))
        for n, one in enumerate(nodes)
    ]
    workloads = [WorkloadFile(name="w", digest="d", file="workloads/d.py", function="build")]
    addresses = ["10.0.0.1", "10.0.0.2"]
    return Plan(
        lease_id="l",
        attempt=1,
        addresses=addresses,
        expected=[FOUR] * 2,
        workloads=workloads,
        items=items,
    )


def check(folder: Path, monkeypatch: pytest.MonkeyPatch, there: list[str]) -> list[str]:
    """What the check of node 1 becomes, or its exit status."""
    became: list[str] = []
    write_json(folder / "plan.json", plan([0], [0, 1], [1]))
    words = [
        "--mailbox",
        str(folder),
        "--plan",
        str(folder / "plan.json"),
        "--node",
        "1",
        "--wait-s",
        "0",
    ]
    monkeypatch.setattr(
        sys, "argv", ["node.device_check", *words, "--", "/bin/torchrun", "--nnodes", "2"]
    )
    monkeypatch.setattr(device_check, "torch_sees", lambda within_s: (there, ""))

    def become(program: str, command: list[str]) -> None:
        assert program == command[0]
        became.extend(command)
        raise SystemExit(0)

    monkeypatch.setattr(os, "execv", become)
    with pytest.raises(SystemExit) as ended:
        device_check.main()
    return became or [str(ended.value.code)]


def test_without_them_its_runs_and_no_others_are_failed_with_that_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check(tmp_path, monkeypatch, []) == [str(EXIT_NO_DEVICE)]
    records = [
        json.loads(file.read_text()) for file in sorted((tmp_path / "node-1" / "records").iterdir())
    ]
    assert [(one["run_id"], one["status"], one["workload_digest"]) for one in records] == [
        ("r1", "failed", "d"),
        ("r2", "failed", "d"),
    ]
    assert all("4 x A10G" in one["reason"] for one in records)
    assert capsys.readouterr().err.startswith(f"srift[{EXIT_NO_DEVICE}]: this machine")


@pytest.mark.parametrize(
    ("expected", "there", "rank", "found"),
    [
        (FOUR, ["NVIDIA A10G"] * 4, 3, "cuda:3"),
        (Devices(name=CPU, count=1), ["NVIDIA A10G"] * 4, 0, CPU),  # a processor was bought
        (
            Devices(name=ANY, count=4),
            [],
            0,
            CPU,
        ),  # only where anything will do is it taken for want of a GPU:
        (FOUR, [], 0, "bought for 4 x A10G"),  # never for what a GPU was bought for
        (FOUR, ["NVIDIA A10G"] * 3, 0, "bought for 4 x A10G"),
        (FOUR, ["NVIDIA L4"] * 4, 0, "bought for 4 x A10G"),
        (Devices(name=ANY, count=1), ["NVIDIA L4"], 1, "torch can use 1"),
    ],
)
def test_a_rank_takes_the_device_of_its_place_and_of_the_kind_that_was_bought_or_none(
    monkeypatch: pytest.MonkeyPatch, expected: Devices, there: list[str], rank: int, found: str
) -> None:
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(there))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(there))
    monkeypatch.setattr(
        torch.cuda, "get_device_name", lambda one: there[one if isinstance(one, int) else one.index]
    )
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setenv("LOCAL_RANK", str(rank))
    if found in (CPU, "cuda:3"):
        assert own_device(expected) == torch.device(found)
        assert device.name_of(torch.device(found)) == (there[rank] if found != CPU else CPU)
    else:
        with pytest.raises(NoSuchDevice, match=found):
            own_device(expected)
    assert current == ([torch.device(found)] if found == "cuda:3" else [])
