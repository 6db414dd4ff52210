"""What tests of the emulated EC2 ask of it: machines by RunInstances and by fleets, what they said, how they stand."""

from __future__ import annotations

import time
from base64 import b64encode
from collections.abc import Callable
from typing import Any

import pytest
from botocore.exceptions import ClientError

from tests.local.hosts import wait_for as until
from tests.world import World

PARAMETER = "/aws/service/deeplearning/ami/x86_64/oss-nvidia-driver-gpu-pytorch-2.13-ubuntu-26.04/latest/ami-id"
TYPE, ZONE = "g4dn.xlarge", "us-east-1a"
needs_machines = pytest.mark.skipif(bool(World.why_not()), reason=World.why_not())


def image(world: World) -> str:
    return str(world.client("ssm").get_parameter(Name=PARAMETER)["Parameter"]["Value"])


def run(world: World, script: str = "", count: int = 1, **words: Any) -> list[dict[str, Any]]:
    asked: dict[str, Any] = {
        "ImageId": image(world), "InstanceType": TYPE, "MinCount": count, "MaxCount": count,
        "UserData": f"#!/bin/sh\n{script}\n", "InstanceInitiatedShutdownBehavior": "terminate",
        "IamInstanceProfile": {"Name": world.profile}, "Placement": {"AvailabilityZone": ZONE},
    }  # fmt: skip
    return list(world.client("ec2").run_instances(**asked | words)["Instances"])


def fleet(world: World, script: str, overrides: list[dict[str, Any]], count: int) -> dict[str, Any]:
    ec2, name = world.client("ec2"), f"t{time.monotonic_ns()}"
    data = {
        "ImageId": image(world),
        "InstanceType": TYPE,
        "UserData": b64encode(f"#!/bin/sh\n{script}\n".encode()).decode(),
    }
    ec2.create_launch_template(LaunchTemplateName=name, LaunchTemplateData=data)
    return dict(
        ec2.create_fleet(
            Type="instant",
            SpotOptions={
                "SingleInstanceType": True,
                "SingleAvailabilityZone": True,
                "MinTargetCapacity": count,
            },
            TargetCapacitySpecification={
                "TotalTargetCapacity": count,
                "DefaultTargetCapacityType": "spot",
            },
            LaunchTemplateConfigs=[
                {
                    "LaunchTemplateSpecification": {
                        "LaunchTemplateName": name,
                        "Version": "$Latest",
                    },
                    "Overrides": overrides,
                }
            ],
        )
    )


def said(world: World, instance: dict[str, Any], what: str) -> str:
    until(lambda: what in world.console(instance["InstanceId"]))
    return world.console(instance["InstanceId"])


def state(world: World, instance: dict[str, Any]) -> str:
    return str(world.account.instance(instance["InstanceId"]).state)


def refused(ask: Callable[[], Any]) -> str:
    with pytest.raises(ClientError) as error:
        ask()
    return str(error.value.response["Error"]["Code"])
