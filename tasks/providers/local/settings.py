"""The section [local] of srift.toml: the hosts on offer here, their illustrative prices and
interruptions.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, field_validator

from models.domain.suggestions import refuse_odd_names


class LocalInstanceType(BaseModel):
    """A local host: CPU share, memory, bandwidth, and illustrative prices.

    `spot_replaced`: whether a lost spot host is replaced at once.
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
    """The local provider's instance types, by name."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    instance_types: dict[str, LocalInstanceType] = {}

    @field_validator("instance_types")
    @classmethod
    def _plain(cls, types: dict[str, LocalInstanceType]) -> dict[str, LocalInstanceType]:
        refuse_odd_names(types)
        return types
