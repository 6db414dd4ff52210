"""What a launch needs to know before anything is asked for: image, subnets, role, quotas, zones, the archive.

Whatever is wrong with account or settings is said here, while nothing costs anything yet. A machine needs S3 and
nothing else beyond its own VPC (time, DNS and metadata come from addresses inside it):

    [ec2] subnets = "public"    a default route to an internet gateway; the launch asks for a public address
    [ec2] subnets = "private"   no public address: a default route to anything else (a NAT or transit gateway), or an
                                S3 endpoint of the VPC, which serves buckets of its own region alone

Of several such subnets in a zone one is taken, always the same one. Those in Local and Wavelength Zones are left out:
they lie elsewhere, have few types, and prices of their own.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import re
import tarfile
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from models.domain.cluster import Cluster, Offer
from tasks.providers.base import NoCapacity, NotSupported, ProviderError
from tasks.providers.ec2.api import Answer, Ec2Api
from tasks.providers.ec2.capacity_ladder import Rung, ladder, spot_ties
from tasks.providers.ec2.catalogue import (
    TypeFacts,
    facts_of,
    image_line,
    off_image,
    quota_of,
    vcpus_by_quota,
    vcpus_held,
)
from tasks.providers.ec2.errors import DENIED, AwsRefused
from tasks.providers.ec2.requests import LaunchSpec
from tasks.providers.ec2.settings import Ec2


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """What one region of the account says, asked once a provider: the image is pinned for a campaign."""

    image: Answer
    role_id: str
    network: Network


class Surveyor:
    """Asks AWS what a launch stands on."""

    def __init__(self, api: Ec2Api, choices: Ec2) -> None:
        self._api, self._choices = api, choices
        self._accounts: dict[str, Account] = {}
        self._facts: dict[str, TypeFacts] = {}
        self._no_scores = False  # they may not be asked for: that was said

    def account(self, region: str) -> Account:
        """Raises NotSupported or AwsRefused with the fix."""
        if region not in self._accounts:
            choices = self._choices
            self._accounts[region] = Account(
                network=network_of(self._api, region, choices),
                image=self._api.image(region, choices.ami_parameter),
                role_id=str(self._api.roles(region, choices.instance_profile)[0]["RoleId"]),
            )
        return self._accounts[region]

    def types(self, region: str, names: Sequence[str]) -> dict[str, TypeFacts]:
        """Raises NotSupported for processors that the image does not run on."""
        unknown = [name for name in dict.fromkeys(names) if name not in self._facts]
        for answer in self._api.instance_types(region, unknown) if unknown else ():
            facts = facts_of(answer)
            self._facts[facts.name] = facts
        arm = [
            name for name in dict.fromkeys(names) if name in self._facts and self._facts[name].arm
        ]
        if arm:
            raise NotSupported(
                f"{', '.join(arm)}: an ARM processor, for which there is no image here; take it out of [ec2] "
                "instance_types"
            )
        lacking = [name for name in dict.fromkeys(names) if name not in self._facts]
        if lacking:
            raise NotSupported(f"EC2 does not describe {', '.join(lacking)} in {region}")
        return {name: self._facts[name] for name in names}

    def launch_spec(
        self, cluster: Cluster, *, lease_id: str, controller: str, deadline_unix: int
    ) -> LaunchSpec:
        """For one lease. Raises NotSupported or AwsRefused with the fix."""
        region = cluster.members[0].region
        types = self.types(region, [one.instance_type.name for one in cluster.members])
        several = [name for name, facts in types.items() if facts.several_interfaces]
        if why := not_launched(cluster, self._choices, several):
            raise NotSupported(why)
        account, choices = self.account(region), self._choices
        if why := too_small(choices.volume_gib, account.image):
            raise NotSupported(why)
        return LaunchSpec(
            region=region,
            vpc=account.network.vpc,
            subnets=account.network.subnets,
            public=account.network.public,
            types=types,
            image_id=str(account.image["ImageId"]),
            root_device=root_device(account.image),
            volume_gib=choices.volume_gib,
            instance_profile=choices.instance_profile,
            deployment=choices.deployment,
            controller=controller,
            lease_id=lease_id,
            deadline_unix=deadline_unix,
        )

    def rungs(
        self, spec: LaunchSpec, cluster: Cluster, offers: Sequence[Offer]
    ) -> tuple[list[Rung], list[str]]:
        """The ladder as far as quotas and prices go, and why rungs are left out. Raises NoCapacity if none is left."""
        zones = set(spec.subnets)
        for name in spec.types:
            zones &= self._api.zones_offering(spec.region, name)
        climb = partial(ladder, cluster, offers, sorted(zones), self._choices.markets)
        rungs, said = climb()
        if spot_ties(rungs) and not self._no_scores:
            try:
                rungs, said = climb(
                    self._api.placement_scores(spec.region, list(spec.types), len(cluster.members))
                )
            except ProviderError as error:
                self._no_scores = True
                said += [
                    f"zones of equal price come by name, since spot placement scores were not given: {error}"
                ]
        refused: dict[str, str] = {}
        for rung in rungs:
            if rung.markets not in refused:
                refused[rung.markets] = self.over_quota(rung.cluster)
        said += [sentence for sentence in refused.values() if sentence]
        left = [rung for rung in rungs if not refused[rung.markets]]
        if not left:
            raise NoCapacity(
                "; ".join(said) or f"no zone of {spec.region} offers all of {cluster.name}"
            )
        return left, said

    def over_quota(self, cluster: Cluster) -> str:
        """Why the account's quotas leave no room for `cluster`, held machines counted; empty where they do."""
        region = cluster.members[0].region
        types = self.types(region, [one.instance_type.name for one in cluster.members])
        found: list[str] = []
        held: Mapping[str, int] | None = None
        for code, wanted in vcpus_by_quota(cluster.members, types).items():
            try:
                name, value = self._api.quota(region, code)
                if held is None:
                    held = vcpus_held(self._api.instances(region, states=("pending", "running")))
            except ProviderError:
                continue  # a right that is missing here shows when machines are refused; nothing is bought by it
            mine = held.get(code, 0)
            if wanted + mine > value:
                used = f", of which {mine} are held now" if mine else ""
                found.append(
                    f"{wanted} vCPUs are wanted and the quota {name!r} ({code}) in {region} is {value:g}{used}: ask for"
                    " more in Service Quotas, or take a smaller cluster"
                )
        return "; ".join(found)


def not_launched(cluster: Cluster, choices: Ec2, several_interfaces: Collection[str]) -> str:
    """Why `choices` keep `cluster` from being launched; empty where they do not. Asks nothing.

    `several_interfaces`: types whose whole network takes more than one interface.
    """
    names = dict.fromkeys(one.instance_type.name for one in cluster.members)
    line = image_line(choices.ami_parameter)
    if off := next(
        filter(None, (off_image(one.instance_type, line) for one in cluster.members)), ""
    ):
        return f"{off}; take it out of [ec2] instance_types, or name an image that does"
    wide = [name for name in names if name in several_interfaces]
    if choices.subnets == "public" and len(cluster.members) > 1 and wide:
        return (
            f"{', '.join(wide)} has several network cards, and EC2 gives no public address to a machine that uses them"
            ' all: several such machines are launched with [ec2] subnets = "private" alone'
        )
    return ""


def root_device(image: Answer) -> str:
    """Name of the device that the image starts from."""
    return str(image.get("RootDeviceName") or "/dev/sda1")


def least_gib(image: Answer) -> int:
    """What the image itself takes of a volume, at most."""
    volumes = (one.get("Ebs", {}) for one in image.get("BlockDeviceMappings", ()))
    return max((int(one.get("VolumeSize", 0)) for one in volumes), default=0)


def too_small(volume_gib: int, image: Answer) -> str:
    """Why machines of `image` cannot have a volume of so many GiB; empty where they can."""
    least = least_gib(image)
    if volume_gib >= least:
        return ""
    return f"{image['ImageId']} needs {least} GiB, and [ec2] volume_gib is {volume_gib}: set it to at least {least}"


def same_quotas(rung: Rung, other: Rung) -> bool:
    """Whether a refusal for quota on one holds for the other."""
    return {quota_of(o.instance_type.name, o.market) for o in rung.cluster.members} == {
        quota_of(o.instance_type.name, o.market) for o in other.cluster.members
    }


@cache
def archive(package: Path) -> tuple[bytes, str]:
    """The node package as .tar.gz, the same bytes for the same files, and its sha256."""
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as tar:
        for path in sorted(package.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                entry = tarfile.TarInfo(f"node/{path.relative_to(package).as_posix()}")
                content = path.read_bytes()
                entry.size, entry.mode = len(content), 0o644
                tar.addfile(entry, io.BytesIO(content))
    content = gzip.compress(raw.getvalue(), mtime=0)
    return content, hashlib.sha256(content).hexdigest()


ANYWHERE = "0.0.0.0/0"
_ON_TRUST = (
    "this AWS identity may not call ec2:DescribeRouteTables, so that subnets count as public where they say so"
    " themselves (MapPublicIpOnLaunch): add that action to its IAM policy (`srift doctor --print-policies`)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Where machines of one region are launched. `subnets`: zone -> subnet; `public`: they get a public address.

    `note` is for information and stops nothing.
    """

    vpc: str
    subnets: Mapping[str, str]
    public: bool
    note: str = ""


def network_of(api: Ec2Api, region: str, choices: Ec2) -> Network:
    """The network that launches in `region` use, as AWS describes it now.

    Raises NotSupported with the fix where no subnet will do, AwsRefused where AWS does.
    """
    name, public = _vpc(api, region, choices.vpc), choices.subnets == "public"
    inside = partial(api.ask_all, region=region, Filters=[{"Name": "vpc-id", "Values": [name]}])
    subnets = [
        one
        for one in inside("Subnets", "ec2:DescribeSubnets")
        if re.fullmatch(
            f"{region}[a-z]", str(one["AvailabilityZone"])
        )  # us-east-1-atl-1a is a Local Zone
    ]
    try:
        tables: list[Answer] | None = list(inside("RouteTables", "ec2:DescribeRouteTables"))
    except AwsRefused as error:
        if (
            error.code not in DENIED or not public
        ):  # without it nobody knows which private subnets reach S3
            raise
        tables = None
    if public:
        found = public_subnets(subnets, tables)
        if not found:
            raise NotSupported(_no_public(name, region))
        return Network(
            vpc=name, subnets=found, public=True, note=_ON_TRUST if tables is None else ""
        )
    endpoints = list(inside("VpcEndpoints", "ec2:DescribeVpcEndpoints"))
    if choices.bucket is not None and api.bucket_region(region, choices.bucket) != region:
        endpoints = []  # of an endpoint S3 is reached in its own region alone
    found = private_subnets(subnets, tables or [], s3_endpoints(endpoints, region))
    if not found:
        raise NotSupported(_no_private(name, region))
    return Network(vpc=name, subnets=found, public=False)


def public_subnets(subnets: Iterable[Answer], tables: Sequence[Answer] | None) -> dict[str, str]:
    """Zone -> subnet with a way to an internet gateway; without `tables`, that gives machines a public address itself.

    Before others comes one that gives addresses itself, then the lowest id.
    """

    def leads_out(subnet: Answer) -> bool:
        if tables is None:
            return bool(subnet.get("MapPublicIpOnLaunch"))
        return _gateway(_table(subnet, tables)).startswith("igw-")

    return _one_a_zone(subnets, leads_out, lambda one: not one.get("MapPublicIpOnLaunch"))


def private_subnets(
    subnets: Iterable[Answer], tables: Sequence[Answer], endpoints: Iterable[Answer]
) -> dict[str, str]:
    """Zone -> subnet from which S3 is reached without a public address; `endpoints` are those of S3.

    Before others comes one without a way to an internet gateway, then the lowest id.
    """
    gateways = {str(table) for one in endpoints for table in one.get("RouteTableIds", ())}
    interfaces = any(_leads_to_interfaces(one) for one in endpoints)

    def reaches_s3(subnet: Answer) -> bool:
        table = _table(subnet, tables)
        out = _gateway(table)
        return (
            interfaces
            or str(table.get("RouteTableId")) in gateways
            or bool(out and not out.startswith("igw-"))
        )

    return _one_a_zone(
        subnets, reaches_s3, lambda one: _gateway(_table(one, tables)).startswith("igw-")
    )


def _leads_to_interfaces(endpoint: Answer) -> bool:
    """Whether the names of S3 are, within the VPC, those of an interface endpoint, which every subnet reaches.

    Where its private DNS is for inbound resolvers alone, AWS leads the VPC's own machines to the gateway endpoint.
    """
    inbound_only = endpoint.get("DnsOptions", {}).get("PrivateDnsOnlyForInboundResolverEndpoint")
    return bool(
        endpoint.get("VpcEndpointType") == "Interface"
        and endpoint.get("PrivateDnsEnabled")
        and not inbound_only
    )


def s3_endpoints(endpoints: Iterable[Answer], region: str) -> list[Answer]:
    """Those of `endpoints` that serve S3."""
    return [
        one
        for one in endpoints
        if one.get("ServiceName") == f"com.amazonaws.{region}.s3"
        and str(one.get("State", "")).lower() == "available"
    ]


def _one_a_zone(
    subnets: Iterable[Answer], will_do: Callable[[Answer], bool], later: Callable[[Answer], bool]
) -> dict[str, str]:
    """The first by `later` and id of each zone, so that a request is the same when it is asked again."""
    found: dict[str, str] = {}
    for one in sorted(subnets, key=lambda one: (later(one), str(one["SubnetId"]))):
        if one.get("State", "available") == "available" and will_do(one):
            found.setdefault(str(one["AvailabilityZone"]), str(one["SubnetId"]))
    return found


def _table(subnet: Answer, tables: Sequence[Answer]) -> Answer:
    """The subnet's own route table, else the main one of its VPC."""
    main: Answer = {}
    for table in tables:
        for association in table.get("Associations", ()):
            if association.get("SubnetId") == subnet["SubnetId"]:
                return table
            if association.get("Main"):
                main = table
    return main


def _gateway(table: Answer) -> str:
    """Where the default route leads, by id; empty where there is none, or none that works."""
    for route in table.get("Routes", ()):
        if (
            route.get("DestinationCidrBlock") == ANYWHERE
            and route.get("State", "active") == "active"
        ):
            ways = ("GatewayId", "NatGatewayId", "TransitGatewayId", "NetworkInterfaceId", "InstanceId",
                    "CoreNetworkArn")  # fmt: skip
            return next((str(route[way]) for way in ways if route.get(way)), "")
    return ""


def _vpc(api: Ec2Api, region: str, vpc: str | None) -> str:
    words: dict[str, Any] = (
        {"VpcIds": [vpc]} if vpc else {"Filters": [{"Name": "is-default", "Values": ["true"]}]}
    )
    found = api.ask_unless(("InvalidVpcID.NotFound",), "ec2:DescribeVpcs", region, **words).get(
        "Vpcs"
    )
    if not found:
        missing = f"{vpc} is not there" if vpc else f"there is no default VPC in {region}"
        raise NotSupported(
            f"{missing}: name one in [ec2] vpc, or run `aws ec2 create-default-vpc --region {region}`"
        )
    return str(found[0]["VpcId"])


def _no_public(vpc: str, region: str) -> str:
    return (
        f"no subnet of {vpc} in {region} has a route to an internet gateway, which machines with a public address need"
        ' ([ec2] subnets is "public"): name another VPC in [ec2] vpc, route a subnet to an internet gateway, or set'
        ' [ec2] subnets = "private" where a NAT gateway or an S3 endpoint leads to S3'
    )


def _no_private(vpc: str, region: str) -> str:
    return (
        f'{vpc} in {region} has no subnet from which S3 is reached without a public address ([ec2] subnets is "private"'
        "): give its route tables an S3 gateway endpoint, which is free (aws ec2 create-vpc-endpoint --region"
        f" {region} --vpc-id {vpc} --service-name com.amazonaws.{region}.s3 --route-table-ids rtb-...; the bucket must"
        " lie in that region), or a default route to a NAT gateway; machines reach nothing else"
    )
