"""The section [ec2] of srift.toml: which part of EC2 is considered, how machines are launched there, and the money.

Credentials are AWS's own and never stand here.
"""

from __future__ import annotations

import re
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

# Of the image's lines the one with the torch that pyproject.toml pins: another version's step times are not pooled.
AMI_PARAMETER = "/aws/service/deeplearning/ami/x86_64/oss-nvidia-driver-gpu-pytorch-2.13-ubuntu-26.04/latest/ami-id"
_REGION = re.compile(r"[a-z]{2}(-[a-z]+)+-\d")
_PATTERN = re.compile(r"[a-z0-9.*?\[\]-]+")
# S3's own rule, without the dots that it allows: they break TLS for a client that puts the bucket into the host name.
_BUCKET = re.compile(r"[a-z0-9][a-z0-9-]{1,61}[a-z0-9]")
_PREFIX = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)*")  # no '*' or '$': it enters policies
_PROFILE = re.compile(r"[A-Za-z0-9+=,.@_-]{1,128}")
_VPC = re.compile(r"vpc-([0-9a-f]{8}|[0-9a-f]{17})")
_PARAMETER = re.compile(r"(/[A-Za-z0-9._-]+)+")
_PYTHON = re.compile(r"(/[A-Za-z0-9._+-]+)+")
_DEPLOYMENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


class Ec2(BaseModel):
    """Regions; types as patterns (`g5.*`, `p4d.24xlarge`, `gpu` for all of NVIDIA); markets; what a launch needs.

    Without a bucket nothing is launched. `vpc` None is the account's default VPC.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    regions: tuple[str, ...] = Field(default=("us-east-1",), min_length=1)
    instance_types: tuple[str, ...] = Field(default=("gpu",), min_length=1)
    max_hosts: int = Field(default=64, ge=1, le=64)  # of a cluster that is planned; a campaign buys by its own limit
    markets: tuple[Literal["on-demand", "spot"], ...] = Field(default=("on-demand", "spot"), min_length=1)
    bucket: str | None = None
    prefix: str = "srift"
    instance_profile: str = "srift-node"
    vpc: str | None = None
    ami_parameter: str = AMI_PARAMETER
    volume_gib: int = Field(default=100, ge=8, le=16384)
    python: str = "/opt/pytorch/bin/python3"
    deployment: str = "srift"
    max_usd_per_month: float = Field(default=100.0, ge=0, allow_inf_nan=False)
    max_minutes: float = Field(default=120.0, gt=0, le=10080, allow_inf_nan=False)

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

    @field_validator("bucket")
    @classmethod
    def _bucket(cls, bucket: str | None) -> str | None:
        if bucket is not None and _BUCKET.fullmatch(bucket) is None:
            raise ValueError(
                f"{bucket!r} is no bucket's name: 3 to 63 lower case letters, digits and '-', without dots, and without"
                " s3:// and a path (the path is the key prefix)"
            )
        return bucket

    @field_validator("prefix")
    @classmethod
    def _prefix(cls, prefix: str) -> str:
        return _of_form(
            prefix, _PREFIX, "srift or team/srift (letters, digits, '.', '_', '-'; no '/' at either end, no '*' or '$')"
        )

    @field_validator("instance_profile")
    @classmethod
    def _profile(cls, profile: str) -> str:
        return _of_form(profile, _PROFILE, "srift-node (the instance profile's name, not its ARN)")

    @field_validator("vpc")
    @classmethod
    def _vpc(cls, vpc: str | None) -> str | None:
        return None if vpc is None else _of_form(vpc, _VPC, "vpc-0123456789abcdef0; without the key: the default VPC")

    @field_validator("ami_parameter")
    @classmethod
    def _parameter(cls, parameter: str) -> str:
        form = f"{AMI_PARAMETER} (an SSM parameter that holds the id of an image, not the id)"
        return _of_form(parameter, _PARAMETER, form)

    @field_validator("python")
    @classmethod
    def _python(cls, python: str) -> str:
        return _of_form(python, _PYTHON, "/opt/pytorch/bin/python3 (the interpreter with torch, as the image has it)")

    @field_validator("deployment")
    @classmethod
    def _deployment(cls, deployment: str) -> str:
        return _of_form(deployment, _DEPLOYMENT, "srift (1 to 63 letters, digits, '.', '_' and '-'; the tag's value)")


def _of_form(value: str, pattern: re.Pattern[str], form: str) -> str:
    if pattern.fullmatch(value) is None:
        raise ValueError(f"{value!r} is not of the form {form}")
    return value
