"""The section [ec2] of srift.toml: which part of EC2 is considered, how machines are launched there, and the money.

Credentials are AWS's own and never stand here.
"""

from __future__ import annotations

import re
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from models.domain.suggestions import nearest_names

# Of the image's lines the one with the torch that pyproject.toml pins: another version's step times are not pooled.
AMI_PARAMETER = "/aws/service/deeplearning/ami/x86_64/oss-nvidia-driver-gpu-pytorch-2.13-ubuntu-26.04/latest/ami-id"
_TORCH = re.compile(r"pytorch-(\d+\.\d+)")
_REGION = re.compile(r"[a-z]{2}(-[a-z]+)+-\d")
_PATTERN = re.compile(r"[a-z0-9.*?\[\]-]+")
_TYPE = re.compile(r"[a-z0-9-]+\.[a-z0-9-]+")
# S3's own rule, without the dots that it allows: they break TLS for a client that puts the bucket into the host name.
_BUCKET = re.compile(r"[a-z0-9][a-z0-9-]{1,61}[a-z0-9]")
_PREFIX = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)*")  # no '*' or '$': it enters policies
_PROFILE = re.compile(r"[A-Za-z0-9+=,.@_-]{1,128}")
_VPC = re.compile(r"vpc-([0-9a-f]{8}|[0-9a-f]{17})")
_PARAMETER = re.compile(r"(/[A-Za-z0-9._-]+)+")
_PYTHON = re.compile(r"(/[A-Za-z0-9._+-]+)+")
SUBNETS = ("public", "private")
_DEPLOYMENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


class OwnPrice(BaseModel):
    """Dollars an hour of one instance type under terms of one's own (a private offer, a savings plan), by market."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    on_demand_usd_per_hour: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    spot_usd_per_hour: float | None = Field(default=None, gt=0, allow_inf_nan=False)


class Discount(BaseModel):
    """Part of the public price that is not paid, by market: 0.28 is 28 % off."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    on_demand: float = Field(default=0.0, ge=0, lt=1)
    spot: float = Field(default=0.0, ge=0, lt=1)


class Ec2(BaseModel):
    """Regions; types as patterns (`g5.*`, `p4d.24xlarge`, `gpu` for all of NVIDIA); markets; what a launch needs.

    Without a bucket nothing is launched. `vpc` None is the account's default VPC. `prices` are by instance type and
    come before `discounts`, which are by pattern; of several patterns the first that matches counts. `emulated`: the
    machines lack the devices that their types have, and measure all the same; refused where no other endpoint stands
    in for AWS. In "public" `subnets` machines get a public address; "private" ones reach S3 through a NAT gateway or an
    endpoint (see `providers.ec2.survey`).
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
    subnets: Literal["public", "private"] = "public"
    ami_parameter: str = AMI_PARAMETER
    volume_gib: int = Field(default=100, ge=8, le=16384)
    python: str = "/opt/pytorch/bin/python3"
    deployment: str = "srift"
    max_usd_per_month: float = Field(default=100.0, ge=0, allow_inf_nan=False)
    max_minutes: float = Field(default=120.0, gt=0, le=10080, allow_inf_nan=False)
    prices: dict[str, OwnPrice] = {}
    discounts: dict[str, Discount] = {}
    emulated: bool = False

    @property
    def torch_line(self) -> str:
        """Major.minor of the image's torch, as its parameter's name says; "" where it does not."""
        found = _TORCH.search(self.ami_parameter)
        return found.group(1) if found else ""

    @field_validator("discounts", mode="before")
    @classmethod
    def _of_on_demand(cls, discounts: object) -> object:
        """A number is of prices on demand: savings plans know no spot."""
        if not isinstance(discounts, dict):
            return discounts
        plain = (int, float)
        return {
            name: {"on_demand": one} if isinstance(one, plain) and not isinstance(one, bool) else one
            for name, one in discounts.items()
        }

    @field_validator("prices")
    @classmethod
    def _priced(cls, prices: dict[str, OwnPrice]) -> dict[str, OwnPrice]:
        for name, one in prices.items():
            if _TYPE.fullmatch(name) is None:
                raise ValueError(f"{name!r} is no name of an instance type like 'p5.48xlarge'; patterns take discounts")
            if one.on_demand_usd_per_hour is None and one.spot_usd_per_hour is None:
                raise ValueError(f"{name!r} has no price: give it on_demand_usd_per_hour or spot_usd_per_hour")
        return prices

    @field_validator("discounts")
    @classmethod
    def _discounted(cls, discounts: dict[str, Discount]) -> dict[str, Discount]:
        for pattern in discounts:
            if _PATTERN.fullmatch(pattern) is None:
                raise ValueError(f"{pattern!r} is no name of an instance type and no pattern like 'g5.*'")
        return discounts

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

    @field_validator("subnets", mode="before")
    @classmethod
    def _subnets(cls, subnets: object) -> object:
        if subnets not in SUBNETS:
            raise ValueError(f"{subnets!r} is neither 'public' nor 'private'; {nearest_names(str(subnets), SUBNETS)}")
        return subnets

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
