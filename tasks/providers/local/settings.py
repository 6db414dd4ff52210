"""Define the section [local] of srift.toml: types of local hosts, with illustrative prices."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from models.domain.suggestions import NAME_PATTERN

Name = Annotated[str, Field(pattern=NAME_PATTERN)]


class LocalInstanceType(BaseModel):
    """A type of local host: cores, memory, bandwidth, and illustrative prices.

    memory_gib: limit for each process of the host.
    spot_interruptions_per_hour: rate of simulated interruptions.
    spot_replaced: if True, a lost host of this type can be replaced at once.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    cores: float = Field(gt=0)
    memory_gib: float = Field(gt=0)
    bandwidth_gbps: float = Field(gt=0)
    usd_per_hour: float | None = Field(default=None, gt=0)
    spot_usd_per_hour: float | None = Field(default=None, gt=0)
    spot_interruptions_per_hour: float = Field(default=0.0, ge=0)
    spot_replaced: bool = False


class Local(BaseModel):
    """The section [local] of srift.toml, with the local instance types by name."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    instance_types: dict[Name, LocalInstanceType] = {}
