"""Whether a launch may be, and of what: the checks that EC2 makes and moto does not, and what a fleet chooses."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moto.ec2.exceptions import EC2ClientError
from moto.ec2.models.instance_types import INSTANCE_TYPES

from tests.world.market import Market, zones_of

MOST_USER_DATA = 16_384  # bytes before base64
# code -> (name, the types that it counts, market); in vCPUs
QUOTAS: Mapping[str, tuple[str, str, str]] = {
    "L-1216C47A": (
        "Running On-Demand Standard (A, C, D, H, I, M, R, T, Z) instances",
        "[acdhimrtz]",
        "on-demand",
    ),
    "L-34B43A08": (
        "All Standard (A, C, D, H, I, M, R, T, Z) Spot Instance Requests",
        "[acdhimrtz]",
        "spot",
    ),
    "L-DB2E81BA": ("Running On-Demand G and VT instances", "g|vt", "on-demand"),
    "L-3819A6DF": ("All G and VT Spot Instance Requests", "g|vt", "spot"),
    "L-417A185B": ("Running On-Demand P instances", "p", "on-demand"),
    "L-7212CCBC": ("All P4, P3 and P2 Spot Instance Requests", "p[234]", "spot"),
    "L-C4BD4855": ("All P5 Spot Instance Requests", "p[56]", "spot"),
}
Data = Mapping[str, Any]  # what to launch, as RunInstances and launch templates spell it


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """One instance that counts against capacity and quotas."""

    name: str
    market: str
    zone: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One override of a fleet with its template: what would be launched, where, for how much."""

    data: Data
    specification: Data
    override: Data
    name: str
    zone: str
    usd: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Ground:
    """What a launch is judged by. `images`: AMIs of the region; `groups`: its placement groups."""

    region: str
    market: Market
    quotas: Mapping[str, float]
    held: Sequence[Held]
    images: frozenset[str]
    groups: frozenset[str]
    default_subnets: Mapping[str, str]  # zone -> subnet
    zone_of_subnet: Mapping[str, str]

    def check(self, data: Data) -> None:
        """Raises EC2ClientError for what no zone would launch."""
        name, image = str(data.get("InstanceType")), str(data.get("ImageId"))
        if not any(name in names for names in zones_of(self.region).values()):
            raise EC2ClientError(
                "InvalidParameterValue", f"Invalid value '{name}' for InstanceType."
            )
        if re.fullmatch(r"ami-[0-9a-f]{8,17}", image) is None:
            raise EC2ClientError("InvalidAMIID.Malformed", f'Invalid id: "{image}"')
        if image not in self.images:
            raise EC2ClientError(
                "InvalidAMIID.NotFound", f"The image id '[{image}]' does not exist"
            )
        facts = INSTANCE_TYPES[name]
        placement = data.get("Placement") or {}
        group = placement.get("GroupName")
        if group and group not in self.groups:
            raise EC2ClientError(
                "InvalidPlacementGroup.Unknown", f"The Placement Group '{group}' is unknown."
            )
        if group and "cluster" not in facts["PlacementGroupInfo"]["SupportedStrategies"]:
            raise EC2ClientError(
                "InvalidParameterCombination", f"{name} cannot be in a cluster placement group"
            )
        efa = any(nic.get("InterfaceType") == "efa" for nic in data.get("NetworkInterfaces", ()))
        if efa and not facts["NetworkInfo"].get("EfaSupported"):
            raise EC2ClientError(
                "UnsupportedOperation", f"EFA interfaces are not supported on {name}"
            )
        text = str(data.get("UserData") or "")
        if len(text) * 3 // 4 - text.count("=") > MOST_USER_DATA:
            raise EC2ClientError("InvalidParameterValue", "User data is limited to 16384 bytes")

    def zone(self, data: Data) -> str:
        """Where the request says that it goes; empty where it leaves that to EC2."""
        nics = data.get("NetworkInterfaces") or [{}]
        subnet = data.get("SubnetId") or nics[0].get("SubnetId")
        if subnet:
            if subnet not in self.zone_of_subnet:
                raise EC2ClientError(
                    "InvalidSubnetID.NotFound", f"The subnet ID '{subnet}' does not exist"
                )
            return self.zone_of_subnet[subnet]
        return str((data.get("Placement") or {}).get("AvailabilityZone") or "")

    def room(self, name: str, market: str, zone: str) -> int:
        if self.market.lacks(name, market, zone):
            return 0
        held = sum(one == Held(name=name, market=market, zone=zone) for one in self.held)
        return self.market.room.get((name, market, zone), 1000) - held

    def refusal(self, name: str, market: str, zone: str, count: int) -> tuple[str, str]:
        """Code and message of why `count` are not to be had; empty where they are."""
        if name not in zones_of(self.region).get(zone, ()):
            message = f"Your requested instance type ({name}) is not supported in your requested Availability Zone ({zone})."
            return "Unsupported", message
        code = _quota_of(name, market)
        used = sum(_vcpus(one.name) for one in self.held if _quota_of(one.name, one.market) == code)
        if used + count * _vcpus(name) > self.quotas[code]:
            message = f"You have requested more vCPU capacity than your current vCPU limit of {self.quotas[code]:g} allows"
            return (
                "MaxSpotInstanceCountExceeded" if market == "spot" else "VcpuLimitExceeded"
            ), message
        if self.room(name, market, zone) < count:
            return (
                "InsufficientInstanceCapacity",
                f"We currently do not have sufficient {name} capacity in {zone}.",
            )
        return "", ""

    def placed(self, data: Data, zone: str) -> dict[str, Any]:
        found = {name: value for name, value in data.items() if name != "Placement"}
        found["Placement"] = dict(data.get("Placement") or {}) | {"AvailabilityZone": zone}
        nics = [dict(nic) for nic in data.get("NetworkInterfaces") or ()]
        subnet = (
            found.pop("SubnetId", None)
            or (nics[0].get("SubnetId") if nics else None)
            or self.default_subnets[zone]
        )
        if nics:
            return found | {"NetworkInterfaces": [nic | {"SubnetId": subnet} for nic in nics]}
        return found | {"SubnetId": subnet}

    def chosen(
        self, candidates: Iterable[Candidate], market: str, wanted: int
    ) -> tuple[Candidate | None, list[tuple[Candidate, str, str]]]:
        """The cheapest place that has all that a fleet asks for, and what those before it refused."""
        refused: list[tuple[Candidate, str, str]] = []
        for one in sorted(candidates, key=lambda one: one.usd):
            code, message = self.refusal(one.name, market, one.zone, wanted)
            most = one.override.get("MaxPrice")
            if not code and most and float(most) < one.usd:
                code, message = (
                    "SpotMaxPriceTooLow",
                    f"Your maximum price of {most} is lower than {one.usd}",
                )
            if not code:
                return one, refused
            refused.append((one, code, message))
        return None, refused


def _quota_of(name: str, market: str) -> str:
    return next(
        code
        for code, (_, kinds, sold) in QUOTAS.items()
        if sold == market and re.match(kinds, name)
    )


def _vcpus(name: str) -> int:
    return int(INSTANCE_TYPES[name]["VCpuInfo"]["DefaultVCpus"])
