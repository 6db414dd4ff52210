"""The section [ec2] of srift.toml: which part of EC2 is considered. Credentials are AWS's own."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

_REGION = re.compile(r"[a-z]{2}(-[a-z]+)+-\d")
_PATTERN = re.compile(r"[a-z0-9.*?\[\]-]+")


class Ec2(BaseModel):
    """Regions; types as patterns (`g5.*`, `p4d.24xlarge`, `gpu` for all of NVIDIA); markets to be asked for prices."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    regions: tuple[str, ...] = Field(default=("us-east-1",), min_length=1)
    instance_types: tuple[str, ...] = Field(default=("gpu",), min_length=1)
    max_hosts: int = Field(default=64, ge=1, le=64)  # of a cluster that is planned; a campaign buys by its own limit
    markets: tuple[Literal["on-demand", "spot"], ...] = Field(default=("on-demand", "spot"), min_length=1)
    bucket: str | None = None  # the mailbox of the machines; without one none can be launched
    prefix: str = "srift"
    instance_profile: str = "srift-node"
    vpc: str | None = None  # the default one
    ami_parameter: str = (
        "/aws/service/deeplearning/ami/x86_64/oss-nvidia-driver-gpu-pytorch-2.7-ubuntu-22.04/latest/ami-id"
    )
    volume_gib: int = Field(default=100, ge=1)
    python: str = "/opt/pytorch/bin/python3"
    deployment: str = "srift"

    @field_validator("regions")
    @classmethod
    def _regions(cls, regions: tuple[str, ...]) -> tuple[str, ...]:
        for region in regions:
            if _REGION.fullmatch(region) is None:
                raise ValueError(f"{region!r} is not of the form us-east-1 (a region, not one of its zones)")
        return tuple(dict.fromkeys(regions))

    @field_validator("instance_types")
    @classmethod
    def _patterns(cls, patterns: tuple[str, ...]) -> tuple[str, ...]:
        for pattern in patterns:
            if _PATTERN.fullmatch(pattern) is None:
                raise ValueError(f"{pattern!r} is no name of an instance type, no pattern like 'g5.*', and not 'gpu'")
        return patterns
