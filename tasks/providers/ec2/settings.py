"""Define the section [ec2] of srift.toml: regions, types, launches, prices and spending caps.

The section has no AWS credentials, because boto3 finds them in its usual places.
"""

import re
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

# The image has the torch version that pyproject.toml pins: step times depend on the version.
AMI_PARAMETER = (
    "/aws/service/deeplearning/ami/x86_64/"
    "oss-nvidia-driver-gpu-pytorch-2.13-ubuntu-26.04/latest/ami-id"
)
_TORCH = re.compile(r"pytorch-(\d+\.\d+)")
Region = Annotated[str, Field(pattern=r"^[a-z]{2}(-[a-z]+)+-\d$")]
TypePattern = Annotated[str, Field(pattern=r"^[a-z0-9.*?\[\]-]+$")]
TypeName = Annotated[str, Field(pattern=r"^[a-z0-9-]+\.[a-z0-9-]+$")]
SubnetId = Annotated[str, Field(pattern=r"^subnet-([0-9a-f]{8}|[0-9a-f]{17})$")]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, defer_build=True)


class OwnPrice(_Section):
    """The prices that this account pays for one instance type, in dollars per hour."""

    on_demand_usd_per_hour: float | None = Field(default=None, gt=0)
    spot_usd_per_hour: float | None = Field(default=None, gt=0)


class Discount(_Section):
    """This account's discounts on public prices, as fractions: 0.28 is 28 %."""

    on_demand: float = Field(default=0.0, ge=0, lt=1)
    spot: float = Field(default=0.0, ge=0, lt=1)


def _on_demand(discount: object) -> object:
    """Convert a plain number to a discount on on-demand prices. Return other values unchanged.

    The number does not apply to spot prices, because Savings Plans do not cover them.
    """
    return {"on_demand": discount} if type(discount) in (int, float) else discount


class Ec2(_Section):
    """The section [ec2] of srift.toml.

    instance_types: patterns such as `g5.*`, or `gpu` for all NVIDIA types that the image supports.
    bucket: S3 bucket for the machines' files. Nothing is launched without a bucket.
    subnets: if "public", machines get a public IP address. If "private", machines get none, and the
    subnets need a route to S3.
    prices: this account's prices by instance type.
    discounts: discounts by type pattern; the first pattern that matches applies. A price in
    `prices` overrides a discount.
    emulated: True if AWS is emulated (AWS_ENDPOINT_URL). Emulated machines measure on the CPU.

    Machines are launched into the first of these groups of subnets that is not empty:

    1. The subnets in `subnet_ids`.
    2. The subnets with the tag srift:deployment = `deployment`.
    3. The subnets of the default VPC, if `subnets` is "public".
    """

    regions: tuple[Region, ...] = Field(default=("us-east-1",), min_length=1)
    instance_types: tuple[TypePattern, ...] = Field(default=("gpu",), min_length=1)
    max_hosts: int = Field(default=64, ge=1, le=64)  # maximum machines in a planned cluster
    markets: tuple[Literal["on-demand", "spot"], ...] = Field(
        default=("on-demand", "spot"), min_length=1
    )
    # No dots: S3's TLS certificates do not match host names that begin with a dotted bucket name.
    bucket: str | None = Field(default=None, pattern=r"^[a-z0-9][a-z0-9-]{1,61}[a-z0-9]$")
    # No '*' or '$': IAM policies contain the prefix.
    prefix: str = Field(
        default="srift", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)*$"
    )
    instance_profile: str = Field(
        default="srift-node",
        pattern=r"^[A-Za-z0-9+=,.@_-]{1,128}$",
        description="the profile's name, not its ARN",
    )
    subnet_ids: tuple[SubnetId, ...] = ()
    subnets: Literal["public", "private"] = "public"
    ami_parameter: str = Field(default=AMI_PARAMETER, pattern=r"^(/[A-Za-z0-9._-]+)+$")
    volume_gib: int = Field(default=100, ge=8, le=16384)
    python: str = Field(default="/opt/pytorch/bin/python3", pattern=r"^(/[A-Za-z0-9._+-]+)+$")
    deployment: str = Field(default="srift", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")
    max_usd_per_month: float = Field(default=100.0, ge=0)
    max_minutes: float = Field(default=120.0, gt=0, le=10080)
    prices: dict[TypeName, OwnPrice] = {}
    discounts: dict[TypePattern, Annotated[Discount, BeforeValidator(_on_demand)]] = {}
    emulated: bool = False

    @property
    def public(self) -> bool:
        """Return True if machines get a public IP address."""
        return self.subnets == "public"

    @property
    def torch_line(self) -> str:
        """Return the torch version of the machine image as "major.minor"; "" if unknown."""
        found = _TORCH.search(self.ami_parameter)
        return found.group(1) if found else ""
