"""The one file that speaks to AWS: every call goes through `Ec2Api.ask`, and is answered in plain dicts.

Questions about types and prices are here; machines are asked for in `ec2_machines_api`, files in `ec2_store_api`.

boto3 is imported at the first question, so that a command that asks none starts quickly. Every wait is bounded.
"""

from __future__ import annotations

import json
import os
import re
import threading
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any

from tasks.providers.ec2_errors import explained
from tasks.providers.ec2_scores import zone_scores

Clients = Callable[[str, str], Any]  # (service, region) -> a boto3 client
Answer = dict[str, Any]

PRICE_LIST_REGION = "us-east-1"  # the Price List API answers for every region from here
ADVISOR = "https://spot-bid-advisor.s3.amazonaws.com/spot-advisor-data.json"
CONNECT_S, READ_S, ATTEMPTS, METADATA_S = 5, 30, 4, 1
_ATONCE = 100  # types named in one question
_SERVICES = {"servicequotas": "service-quotas"}  # where boto3 spells a service otherwise than IAM does
_METHODS = {  # and an action
    "s3:ListBucket": "list_objects_v2",
    "s3:GetBucketPublicAccessBlock": "get_public_access_block",
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


class Ec2Api:
    """Questions to EC2 and its price list through `clients`. All raise ProviderError with the fix."""

    def __init__(self, clients: Clients) -> None:
        self._clients, self._made, self._lock = clients, dict[tuple[str, str], Any](), threading.Lock()

    def type_names(self, region: str) -> list[str]:
        """Instance types that the region offers."""
        pages = self.ask_pages("ec2:DescribeInstanceTypeOfferings", region, MaxResults=1000, LocationType="region")
        return [str(one["InstanceType"]) for page in pages for one in page["InstanceTypeOfferings"]]

    def instance_types(self, region: str, names: Sequence[str]) -> list[Answer]:
        """Descriptions of `names`, which the region must offer, as DescribeInstanceTypes gives them."""
        found: list[Answer] = []
        for first in range(0, len(names), _ATONCE):
            some = list(names[first : first + _ATONCE])
            for page in self.ask_pages("ec2:DescribeInstanceTypes", region, InstanceTypes=some):
                found += page["InstanceTypes"]
        return found

    def price_list(self, region: str) -> Iterator[Answer]:
        """Products of the Price List API for on-demand Linux in `region`."""
        wanted = _ON_DEMAND | {"regionCode": region}
        filters = [{"Type": "TERM_MATCH", "Field": field, "Value": value} for field, value in wanted.items()]
        for page in self.ask_pages("pricing:GetProducts", PRICE_LIST_REGION, ServiceCode="AmazonEC2",
                                   Filters=filters, FormatVersion="aws_v1", MaxResults=100):  # fmt: skip
            yield from (json.loads(product) for product in page["PriceList"])

    def spot_prices(self, region: str, at: datetime) -> Iterator[Answer]:
        """Rows of DescribeSpotPriceHistory in force at `at`, of every type and zone of the region."""
        for page in self.ask_pages("ec2:DescribeSpotPriceHistory", region, StartTime=at,
                                   ProductDescriptions=["Linux/UNIX"], MaxResults=1000):  # fmt: skip
            yield from page["SpotPriceHistory"]

    def ask(self, action: str, region: str, **words: Any) -> Answer:
        """One call of `action`, spelt as in an IAM policy ("ec2:RunInstances")."""
        service, _, name = action.partition(":")
        client = self._client(_SERVICES.get(service, service), region)
        method = _METHODS.get(action) or re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()
        with asking(action, region):
            answer: Answer = getattr(client, method)(**words)
            return answer

    def ask_pages(self, action: str, region: str, **words: Any) -> Iterator[Answer]:
        """As `ask`, answer after answer until no token for a next one comes (absent or empty)."""
        token = ""
        while True:
            page = self.ask(action, region, **words, **({"NextToken": token} if token else {}))
            yield page
            token = str(page.get("NextToken") or "")
            if not token:
                return

    def placement_scores(self, region: str, names: Sequence[str], count: int) -> dict[str, int]:
        """Spot placement score by zone of a request for `count` machines of any of `names`."""
        rows: list[Answer] = []
        wanted = {"InstanceTypes": list(names), "TargetCapacity": count, "SingleAvailabilityZone": True}
        for page in self.ask_pages("ec2:GetSpotPlacementScores", region, **wanted, RegionNames=[region]):
            rows += page["SpotPlacementScores"]
        return zone_scores(rows, self.ask("ec2:DescribeAvailabilityZones", region)["AvailabilityZones"])

    def _client(self, service: str, region: str) -> Any:
        with self._lock:  # a session makes clients one at a time, and each takes half a second
            if (service, region) not in self._made:
                with asking(f"{service} (the client)", region):
                    self._made[service, region] = self._clients(service, region)
            return self._made[service, region]


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
