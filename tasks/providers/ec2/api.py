"""The one file that speaks to AWS: prices, machines and the mailbox's files. Each call names its action as IAM does.

Every call goes through `Ec2Api.ask` and is answered in plain dicts; all raise AwsRefused with the fix. boto3 is
imported at the first question, so that a command that asks none starts quickly. Every wait is bounded.
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, BinaryIO

from tasks.providers.ec2.errors import AwsRefused, explained, refused
from tasks.providers.ec2.prices import zone_scores

Clients = Callable[[str, str], Any]  # (service, region) -> a boto3 client
Answer = dict[str, Any]

PRICE_LIST_REGION = "us-east-1"  # the Price List API answers for every region from here
ADVISOR = "https://spot-bid-advisor.s3.amazonaws.com/spot-advisor-data.json"
CONNECT_S, READ_S, ATTEMPTS, METADATA_S = 5, 30, 4, 1
ALIVE = ("pending", "running", "stopping", "stopped")  # what may cost money, or come back to do so
_ATONCE = 100  # types named in one question
_PIECE_BYTES = 2**20  # of an object that is written to disk as it comes
_SERVICES = {
    "servicequotas": "service-quotas"
}  # where boto3 spells a service otherwise than IAM does
_METHODS = {  # and an action
    "s3:ListBucket": "list_objects_v2",
    "s3:GetBucketPublicAccessBlock": "get_public_access_block",
    "s3:GetLifecycleConfiguration": "get_bucket_lifecycle_configuration",
}
# Linux on shared hardware, nothing pre-installed, paid by the hour as it is used: what RunInstances buys.
_ON_DEMAND = {
    "operatingSystem": "Linux",
    "tenancy": "Shared",
    "preInstalledSw": "NA",
    "capacitystatus": "Used",
    "marketoption": "OnDemand",
}


def has_credentials() -> bool:
    """Whether any credentials can be found; on a machine of EC2 the metadata service is asked, for a second at most.

    Raises ProviderError where AWS_PROFILE names none.
    """
    return _session().get_credentials() is not None


def boto_clients() -> Clients:
    """Clients of the ordinary credentials; AWS_PROFILE and AWS_ENDPOINT_URL count."""
    session = _session()

    def client(service: str, region: str) -> Any:
        from botocore.config import Config

        retries = {"mode": "standard", "total_max_attempts": ATTEMPTS}
        config = Config(connect_timeout=CONNECT_S, read_timeout=READ_S, retries=retries)
        return session.client(service, region_name=region, config=config)

    return client


def _session() -> Any:
    import boto3
    from botocore.session import Session

    with asking("the credentials", "any region"):
        plain = Session()
        plain.set_config_variable("metadata_service_timeout", METADATA_S)
        plain.set_config_variable("metadata_service_num_attempts", 1)
        return boto3.Session(botocore_session=plain)


@contextmanager
def asking(action: str, region: str) -> Iterator[None]:
    """Whatever botocore raises comes out as a ProviderError that names the fix."""
    from botocore.exceptions import BotoCoreError, ClientError
    from botocore.parsers import ResponseParserError

    try:
        yield
    except (BotoCoreError, ClientError, ResponseParserError) as error:
        raise explained(error, action=action, region=region) from None


def values_of(service: str, shape: str) -> frozenset[str]:
    """What an enumeration of a service may be, by the model of it that botocore has. Asks nobody."""
    return frozenset(_model(service).shape_for(shape).enum)


def malformed(service: str, shape: str, value: Answer) -> str:
    """What the service's model refuses in a request or a part of one; empty where nothing. Asks nobody."""
    from botocore.validate import ParamValidator

    return str(ParamValidator().validate(value, _model(service).shape_for(shape)).generate_report())


def _model(service: str) -> Any:
    from botocore.loaders import Loader
    from botocore.model import ServiceModel

    return ServiceModel(Loader().load_service_model(service, "service-2"), service)


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """Where the seconds come from, so that a test need not wait for them."""

    now: Callable[[], datetime] = lambda: datetime.now(UTC)
    sleep: Callable[[float], None] = time.sleep


class Ec2Api:
    """Questions and orders through `clients`; who waits for an answer does so by `clock`."""

    def __init__(self, clients: Clients, clock: Clock | None = None) -> None:
        self.clock = clock or Clock()
        self._clients, self._made, self._lock = (
            clients,
            dict[tuple[str, str], Any](),
            threading.Lock(),
        )

    def ask(self, action: str, region: str, **words: Any) -> Answer:
        """One call of `action`, spelt as in an IAM policy ("ec2:RunInstances")."""
        service, _, name = action.partition(":")
        client = self._client(_SERVICES.get(service, service), region)
        method = _METHODS.get(action) or re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()
        with asking(action, region):
            answer: Answer = getattr(client, method)(**words)
            return answer

    def ask_unless(self, refusals: Sequence[str], action: str, region: str, **words: Any) -> Answer:
        """As `ask`; empty where AWS refuses with one of those codes, or kinds of them."""
        try:
            return self.ask(action, region, **words)
        except AwsRefused as error:
            if error.kind not in refusals and error.code not in refusals:
                raise
            return {}

    def ask_all(self, key: str, action: str, region: str, **words: Any) -> Iterator[Any]:
        """As `ask`: what lies under `key` of answer after answer, until no token for a next one comes."""
        token: dict[str, str] = {}
        while True:
            page = self.ask(action, region, **words, **token)
            yield from page[key]
            if not page.get("NextToken"):
                return
            token = {"NextToken": str(page["NextToken"])}

    def type_names(self, region: str) -> list[str]:
        """Instance types that the region offers."""
        found = self.ask_all(
            "InstanceTypeOfferings",
            "ec2:DescribeInstanceTypeOfferings",
            region,
            MaxResults=1000,
            LocationType="region",
        )
        return [str(one["InstanceType"]) for one in found]

    def instance_types(self, region: str, names: Sequence[str]) -> list[Answer]:
        """Descriptions of `names`, which the region must offer, as DescribeInstanceTypes gives them."""
        return [
            one
            for first in range(0, len(names), _ATONCE)
            for one in self.ask_all(
                "InstanceTypes",
                "ec2:DescribeInstanceTypes",
                region,
                InstanceTypes=list(names[first : first + _ATONCE]),
            )
        ]

    def price_list(self, region: str) -> Iterator[Answer]:
        """Products of the Price List API for on-demand Linux in `region`."""
        wanted = _ON_DEMAND | {"regionCode": region}
        filters = [
            {"Type": "TERM_MATCH", "Field": field, "Value": value}
            for field, value in wanted.items()
        ]
        words = {
            "ServiceCode": "AmazonEC2",
            "Filters": filters,
            "FormatVersion": "aws_v1",
            "MaxResults": 100,
        }
        yield from map(
            json.loads, self.ask_all("PriceList", "pricing:GetProducts", PRICE_LIST_REGION, **words)
        )

    def spot_prices(self, region: str, at: datetime, names: Sequence[str] = ()) -> Iterator[Answer]:
        """Rows of DescribeSpotPriceHistory in force at `at`, of `names` or every type, in each zone of the region."""
        words: Answer = {"InstanceTypes": list(names)} if names else {"MaxResults": 1000}
        words |= {"StartTime": at, "ProductDescriptions": ["Linux/UNIX"]}
        return self.ask_all("SpotPriceHistory", "ec2:DescribeSpotPriceHistory", region, **words)

    def placement_scores(self, region: str, names: Sequence[str], count: int) -> dict[str, int]:
        """Spot placement score by zone of a request for `count` machines of any of `names`."""
        wanted = {
            "InstanceTypes": list(names),
            "TargetCapacity": count,
            "SingleAvailabilityZone": True,
        }
        rows = list(
            self.ask_all(
                "SpotPlacementScores",
                "ec2:GetSpotPlacementScores",
                region,
                **wanted,
                RegionNames=[region],
            )
        )
        return zone_scores(
            rows, self.ask("ec2:DescribeAvailabilityZones", region)["AvailabilityZones"]
        )

    def bucket_region(self, region: str, bucket: str) -> str:
        """Where the bucket is. Refused with NoSuchBucket where there is none of that name."""
        stated = self.ask("s3:GetBucketLocation", region, Bucket=bucket).get("LocationConstraint")
        return {None: "us-east-1", "": "us-east-1", "EU": "eu-west-1"}.get(stated, str(stated))

    def security_group(self, region: str, create: Answer, rules: dict[str, list[Answer]]) -> str:
        """The id of the group, made or found by its name, with `rules` (see `requests.rules`) and no others."""
        made = self.ask_unless(("there",), "ec2:CreateSecurityGroup", region, **create)
        if not made:
            filters = [
                _filter("group-name", create["GroupName"]),
                _filter("vpc-id", create["VpcId"]),
            ]
            found = self.ask("ec2:DescribeSecurityGroups", region, Filters=filters)[
                "SecurityGroups"
            ]
            if not found:  # there, and not shown yet
                raise refused(
                    "InvalidGroup.NotFound", action="ec2:DescribeSecurityGroups", region=region
                )
            made = found[0]
        group = str(made["GroupId"])
        for kind, action in (
            ("ingress", "ec2:AuthorizeSecurityGroupIngress"),
            ("egress", "ec2:AuthorizeSecurityGroupEgress"),
        ):
            for rule in rules[kind]:
                self.ask_unless(
                    ("there",), action, region, GroupId=group, IpPermissions=[_to(rule, group)]
                )
        # Every new group lets everything out. "gone" is not passed over: a group that is not found yet would go on so.
        revoked = {"GroupId": group, "IpPermissions": rules["revoked"]}
        self.ask_unless(
            ("InvalidPermission.NotFound",), "ec2:RevokeSecurityGroupEgress", region, **revoked
        )
        return group

    def instances(
        self,
        region: str,
        *,
        ids: Sequence[str] = (),
        tags: dict[str, str] | None = None,
        states: Sequence[str] = (),
    ) -> list[Answer]:
        """By id, or by tags and states. Ids that EC2 no longer knows are left out, as machines long gone are."""
        filters = [_filter(f"tag:{name}", value) for name, value in (tags or {}).items()]
        filters += [_filter("instance-state-name", *states)] if states else []
        filters += [_filter("instance-id", *ids)] if ids else []
        groups = self.ask_all("Reservations", "ec2:DescribeInstances", region, Filters=filters)
        return [one for group in groups for one in group["Instances"]]

    def terminate(self, region: str, ids: Iterable[str]) -> set[str]:
        """All of them; returns those that EC2 does not know: long gone, or so new that it does not show them yet.

        One that it does not know makes it refuse the others too: then they are asked for one by one.
        """
        wanted = sorted(set(ids))
        if not wanted:
            return set()
        try:
            self.ask("ec2:TerminateInstances", region, InstanceIds=wanted)
        except AwsRefused as error:
            if error.kind != "gone":
                raise
            if len(wanted) == 1:
                return {*wanted}
            return set().union(*(self.terminate(region, [one]) for one in wanted))
        return set()

    def zones_offering(self, region: str, name: str) -> set[str]:
        """Zones of the region that have instance type `name`."""
        words = {"LocationType": "availability-zone", "Filters": [_filter("instance-type", name)]}
        found = self.ask_all(
            "InstanceTypeOfferings", "ec2:DescribeInstanceTypeOfferings", region, **words
        )
        return {str(one["Location"]) for one in found}

    def image(self, region: str, parameter: str) -> Answer:
        """The machine image that the public parameter names now, as DescribeImages gives it."""
        found = self.ask("ssm:GetParameter", region, Name=parameter)["Parameter"]["Value"]
        images = self.ask("ec2:DescribeImages", region, ImageIds=[str(found)])["Images"]
        if not images or images[0].get("State", "available") != "available":
            raise refused("InvalidAMIID.NotFound", action="ec2:DescribeImages", region=region)
        return dict(images[0])

    def roles(self, region: str, instance_profile: str) -> list[Answer]:
        """The roles in it. Refused with NoSuchEntity where there is no such profile."""
        profile = self.ask("iam:GetInstanceProfile", region, InstanceProfileName=instance_profile)[
            "InstanceProfile"
        ]
        return list(profile["Roles"])

    def quota(self, region: str, code: str) -> tuple[str, float]:
        """Name and value of a quota of EC2."""
        words = {"ServiceCode": "ec2", "QuotaCode": code}
        found = self.ask("servicequotas:GetServiceQuota", region, **words)["Quota"]
        return str(found["QuotaName"]), float(found["Value"])

    def _client(self, service: str, region: str) -> Any:
        with self._lock:  # a session makes clients one at a time, and each takes half a second
            if (service, region) not in self._made:
                with asking(f"{service} (the client)", region):
                    self._made[service, region] = self._clients(service, region)
            return self._made[service, region]


def _filter(name: str, *values: str) -> Answer:
    return {"Name": name, "Values": list(values)}


def _to(rule: Answer, group: str) -> Answer:
    """A rule about the cluster itself names the group, which has an id only now."""
    return rule if "IpRanges" in rule else rule | {"UserIdGroupPairs": [{"GroupId": group}]}


def spot_advisor() -> Answer:
    """Spot Advisor's public file; empty where it cannot be had (or AWS is emulated): its figures are a prior only."""
    if any(name.startswith("AWS_ENDPOINT_URL") for name in os.environ):
        return {}
    try:
        with urllib.request.urlopen(ADVISOR, timeout=10) as answer:
            body = json.load(answer)
    except (OSError, ValueError):
        return {}
    return body if isinstance(body, dict) else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """One object as a listing tells of it. `version` changes whenever it is written anew."""

    key: str
    version: str
    size: int

    @property
    def etag(self) -> str:
        """By which S3 tells whether it is still the same object."""
        return self.version.partition(" ")[0]


class Store:
    """One bucket. `region` is where it is asked for at first, and after a listing where it really lies."""

    def __init__(self, api: Ec2Api, region: str, bucket: str) -> None:
        self._api, self.region, self.bucket = api, region, bucket

    def listed(self, prefix: str, most: int | None = None) -> tuple[list[Stored], float]:
        """Every object below `prefix`, and the store's clock when the listing began, in unix seconds.

        With `most` it ends with the first page by which there are more.
        """
        found: list[Stored] = []
        token, began = "", float("nan")
        while True:
            more = {"ContinuationToken": token} if token else {}
            answer = self._api.ask(
                "s3:ListBucket", self.region, Bucket=self.bucket, Prefix=prefix, **more
            )
            began = began if began == began else _date(answer)
            self.region = str(_headers(answer).get("x-amz-bucket-region") or self.region)
            found += [_stored(one) for one in answer.get("Contents", ())]
            token = str(answer.get("NextContinuationToken") or "")
            if not token or (most is not None and len(found) > most):
                return found, began

    def get(self, key: str, most_bytes: int) -> tuple[bytes, float]:
        """The whole object, and when it was written (unix, the store's clock). One that is too large comes empty."""
        action = "s3:GetObject"
        answer = self._api.ask(action, self.region, Bucket=self.bucket, Key=key)
        size = int(answer["ContentLength"])
        with asking(action, self.region):
            content: bytes = answer["Body"].read() if size <= most_bytes else b""
        if len(content) != size and size <= most_bytes:
            raise refused("IncompleteReadError", action=action, region=self.region)
        return content, float(answer["LastModified"].timestamp())

    def append(self, one: Stored, file: BinaryIO) -> None:
        """Write to the end of `file` what it lacks of the object, whatever its size.

        Refused with PreconditionFailed where the object was written anew since it was listed, NoSuchKey where it is
        gone. After any other refusal what came is in the file, and asking again goes on from there. Raises OSError of
        the file's.
        """
        have = file.seek(0, os.SEEK_END)
        if have >= one.size:
            return
        action, words = "s3:GetObject", {"Bucket": self.bucket, "Key": one.key, "IfMatch": one.etag}
        answer = self._api.ask(
            action, self.region, **words, **({"Range": f"bytes={have}-"} if have else {})
        )
        with asking(action, self.region):
            while piece := answer["Body"].read(_PIECE_BYTES):
                file.write(piece)
                have += len(piece)
        if have != one.size:
            raise refused("IncompleteReadError", action=action, region=self.region)

    def put(self, key: str, content: bytes | BinaryIO) -> None:
        """Written whole or not at all; of a file, up to 5 GiB."""
        self._api.ask("s3:PutObject", self.region, Bucket=self.bucket, Key=key, Body=content)


def _stored(one: Answer) -> Stored:
    version = f"{one.get('ETag', '')} {one['LastModified'].timestamp():.3f}"
    return Stored(key=str(one["Key"]), version=version, size=int(one["Size"]))


def _date(answer: Answer) -> float:
    """The Date header; NaN where there is none."""
    text = _headers(answer).get("date")
    try:
        return parsedate_to_datetime(str(text)).timestamp()
    except (TypeError, ValueError):
        return float("nan")


def _headers(answer: Answer) -> Answer:
    return dict(answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}))
