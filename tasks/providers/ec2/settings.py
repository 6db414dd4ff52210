"""The section [ec2] of srift.toml: which part of EC2 is considered, how machines are launched there, and the money.

Credentials are AWS's own and never stand here.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator

from models.domain.suggestions import nearest_names


def _of_form(pattern: str, says: str) -> AfterValidator:
    """Of a word, of each of several, or of a table's names: what is refused begins the sentence."""

    def checked(value: Any) -> Any:
        for word in [value] if isinstance(value, str) else value or ():
            if re.fullmatch(pattern, word) is None:
                raise ValueError(f"{word!r} {says}")
        return value

    return AfterValidator(checked)


# Of the image's lines the one with the torch that pyproject.toml pins: another version's step times are not pooled.
AMI_PARAMETER = "/aws/service/deeplearning/ami/x86_64/oss-nvidia-driver-gpu-pytorch-2.13-ubuntu-26.04/latest/ami-id"
_TORCH = re.compile(r"pytorch-(\d+\.\d+)")
_REGION = _of_form(
    r"[a-z]{2}(-[a-z]+)+-\d", "is not of the form us-east-1 (a region, not one of its zones)"
)
_PATTERN = r"[a-z0-9.*?\[\]-]+"
_TYPE = _of_form(
    r"[a-z0-9-]+\.[a-z0-9-]+",
    "is no name of an instance type like 'p5.48xlarge'; patterns take discounts",
)
_BUCKET = _of_form(  # S3's own rule, without the dots that it allows: they break TLS where the host name has them
    r"[a-z0-9][a-z0-9-]{1,61}[a-z0-9]",
    "is no bucket's name: 3 to 63 lower case letters, digits and '-', without dots, and without s3:// and a path (the"
    " path is the key prefix)",
)
_PREFIX = _of_form(  # no '*' or '$': it enters policies
    r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)*",
    "is not of the form srift or team/srift (letters, digits, '.', '_', '-'; no '/' at either end, no '*' or '$')",
)
_PARAMETER = _of_form(
    r"(/[A-Za-z0-9._-]+)+",
    f"is not of the form {AMI_PARAMETER} (an SSM parameter that holds the id of an image, not the id)",
)
_PYTHON = _of_form(
    r"(/[A-Za-z0-9._+-]+)+",
    "is not of the form /opt/pytorch/bin/python3 (the interpreter with torch, as the image has it)",
)
_SUBNETS = ("public", "private")


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

    regions: Annotated[
        tuple[str, ...],
        Field(min_length=1),
        _REGION,
        AfterValidator(lambda found: tuple(dict.fromkeys(found))),
    ] = ("us-east-1",)
    instance_types: Annotated[
        tuple[str, ...],
        Field(min_length=1),
        _of_form(_PATTERN, "is no name of an instance type, no pattern like 'g5.*', and not 'gpu'"),
    ] = ("gpu",)
    max_hosts: int = Field(
        default=64, ge=1, le=64
    )  # of a cluster that is planned; a campaign buys by its own limit
    markets: tuple[Literal["on-demand", "spot"], ...] = Field(
        default=("on-demand", "spot"), min_length=1
    )
    bucket: Annotated[str | None, _BUCKET] = None
    prefix: Annotated[str, _PREFIX] = "srift"
    instance_profile: Annotated[
        str,
        _of_form(
            r"[A-Za-z0-9+=,.@_-]{1,128}",
            "is not of the form srift-node (the instance profile's name, not its ARN)",
        ),
    ] = "srift-node"
    vpc: Annotated[
        str | None,
        _of_form(
            r"vpc-([0-9a-f]{8}|[0-9a-f]{17})",
            "is not of the form vpc-0123456789abcdef0; without the key: the default VPC",
        ),
    ] = None
    subnets: Literal["public", "private"] = "public"
    ami_parameter: Annotated[str, _PARAMETER] = AMI_PARAMETER
    volume_gib: int = Field(default=100, ge=8, le=16384)
    python: Annotated[str, _PYTHON] = "/opt/pytorch/bin/python3"
    deployment: Annotated[
        str,
        _of_form(
            r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}",
            "is not of the form srift (1 to 63 letters, digits, '.', '_' and '-'; the tag's value)",
        ),
    ] = "srift"
    max_usd_per_month: float = Field(default=100.0, ge=0, allow_inf_nan=False)
    max_minutes: float = Field(default=120.0, gt=0, le=10080, allow_inf_nan=False)
    prices: Annotated[dict[str, OwnPrice], _TYPE] = {}
    discounts: Annotated[
        dict[str, Discount],
        _of_form(_PATTERN, "is no name of an instance type and no pattern like 'g5.*'"),
    ] = {}
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
            name: {"on_demand": one}
            if isinstance(one, plain) and not isinstance(one, bool)
            else one
            for name, one in discounts.items()
        }

    @field_validator("prices")
    @classmethod
    def _priced(cls, prices: dict[str, OwnPrice]) -> dict[str, OwnPrice]:
        for name, one in prices.items():
            if one.on_demand_usd_per_hour is None and one.spot_usd_per_hour is None:
                raise ValueError(
                    f"{name!r} has no price: give it on_demand_usd_per_hour or spot_usd_per_hour"
                )
        return prices

    @field_validator("subnets", mode="before")
    @classmethod
    def _near(cls, subnets: object) -> object:
        if subnets not in _SUBNETS:
            raise ValueError(
                f"{subnets!r} is neither 'public' nor 'private'; {nearest_names(str(subnets), _SUBNETS)}"
            )
        return subnets
