"""Call AWS actions by their names in IAM policies, such as "ec2:CreateFleet".

A call raises AwsRefused if AWS refuses it or does not respond. boto3 retries throttled and
unanswered requests. boto3 is imported at the first call, so that commands without AWS start
quickly. Every wait has a time limit.
"""

import json
import math
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from functools import cache
from typing import Any, TypeVar

from botocore import xform_name

from ..base import ProviderError
from .errors import NO_CREDENTIALS, AwsRefused, code_of

Clients = Callable[[str, str], Any]  # (service, region) -> a boto3 client
Answer = dict[str, Any]
Filters = dict[str, str | Sequence[str]]
T = TypeVar("T")

PRICE_LIST_REGION = "us-east-1"  # here, the Price List API has the prices of every region
ATTEMPTS = 5
# States in which a machine costs money, or may cost money later.
ALIVE = ("pending", "running", "stopping", "stopped")
STILL_ALIVE: Filters = {"instance-state-name": ALIVE}
_SERVICES = {"servicequotas": "service-quotas"}  # IAM's name -> boto3's
_METHODS = {
    "s3:ListBucket": "list_objects_v2",
    "s3:GetBucketPublicAccessBlock": "get_public_access_block",
}
# Price List filters: Linux on shared hardware, no pre-installed software, on demand.
_ON_DEMAND = {
    "operatingSystem": "Linux",
    "tenancy": "Shared",
    "preInstalledSw": "NA",
    "capacitystatus": "Used",
    "marketoption": "OnDemand",
}


def boto_clients() -> Clients:
    """Return a function that takes (service, region) and returns a boto3 client.

    boto3 finds credentials in its usual places, and reads AWS_PROFILE and AWS_ENDPOINT_URL. Raises
    ProviderError if there are no credentials.
    """
    import boto3
    from botocore.config import Config

    with aws_errors("the credentials", "any region"):
        session = boto3.Session()
        if session.get_credentials() is None:
            raise ProviderError(NO_CREDENTIALS)
    retries = {"mode": "standard", "total_max_attempts": ATTEMPTS}
    config = Config(connect_timeout=5, read_timeout=30, retries=retries)
    return lambda service, region: session.client(service, region_name=region, config=config)


@contextmanager
def aws_errors(action: str, region: str) -> Iterator[None]:
    """Convert botocore's exceptions in the block to an AwsRefused that names `action` and `region`.

    AwsRefused does not quote AWS's message, which may contain a secret.
    """
    from botocore.exceptions import BotoCoreError, ClientError
    from botocore.parsers import ResponseParserError

    try:
        yield
    except (BotoCoreError, ClientError, ResponseParserError) as error:
        raise AwsRefused(code_of(error), action, region) from None


def shape_of(service: str, shape: str) -> Any:
    """Return the schema of the data type `shape` in botocore's model of `service`."""
    from botocore.session import Session

    return Session().get_service_model(service).shape_for(shape)


@dataclass(frozen=True, kw_only=True)
class AwsClock:
    """The functions for the current time and for sleeping. Tests replace them."""

    now: Callable[[], datetime] = lambda: datetime.now(UTC)
    sleep: Callable[[float], None] = time.sleep


class Ec2Api:
    """The AWS calls that Srift needs.

    `clients` takes (service, region) and returns a boto3 client. `clock` is used for all waits.
    """

    def __init__(self, clients: Clients, clock: AwsClock) -> None:
        self.clients = cache(clients)
        self.now, self.sleep = clock.now, clock.sleep
        self.image = cache(self._image)

    def ask(self, action: str, region: str, **words: Any) -> Answer:
        """Call the AWS action `action`, such as "ec2:CreateFleet", and return the response.

        `words` are the parameters of the call. Raises AwsRefused if AWS refuses the call or does
        not respond.
        """
        service, _, name = action.partition(":")
        method = _METHODS.get(action) or xform_name(name)
        with aws_errors(action, region):
            client = self.clients(_SERVICES.get(service, service), region)
            answer: Answer = getattr(client, method)(**words)
            return answer

    def ask_unless(self, refusals: Sequence[str], action: str, region: str, **words: Any) -> Answer:
        """Call `action`, and return the response, or {} after an error that is in `refusals`.

        refusals: AWS error codes, or kinds of error such as "gone" (see errors.py).

        Raises AwsRefused for any other error.
        """
        try:
            return self.ask(action, region, **words)
        except AwsRefused as error:
            if error.kind not in refusals and error.code not in refusals:
                raise
            return {}

    def ask_all(self, key: str, action: str, region: str, **words: Any) -> list[Any]:
        """Call `action` for all pages of the response, and return the items of all pages.

        In each page, the list of items has the key `key`. `words` are the parameters of the call.
        """
        items: list[Any] = []
        while True:
            page = self.ask(action, region, **words)
            items += page[key]
            if not (token := page.get("NextToken")):
                return items
            words["NextToken"] = token

    def described(self, key: str, action: str, region: str, filters: Filters) -> list[Answer]:
        """Call a Describe action, and return the items that match `filters` from all pages.

        `filters` maps the name of an EC2 filter to one or several values. In each page, the list of
        items has the key `key`, such as "Subnets".
        """
        words = [
            {"Name": name, "Values": [value] if isinstance(value, str) else value}
            for name, value in filters.items()
        ]
        return self.ask_all(key, action, region, Filters=words)

    def when_visible(self, call: Callable[[], T]) -> T:
        """Repeat `call` until EC2 finds a resource that was just created. Return the result.

        If EC2 does not find the resource within half a minute, AwsRefused is raised. Other errors
        are raised at once.
        """
        for pause_s in (1.0, 2.0, 4.0, 8.0, 16.0):
            try:
                return call()
            except AwsRefused as error:
                if error.kind != "gone":
                    raise
            self.sleep(pause_s)
        return call()

    def looks(self, every_s: float, within_s: float) -> Iterator[None]:
        """Yield None at once, and then every `every_s` seconds for `within_s` seconds.

        Callers poll AWS once in each step of a `for` loop over the result.
        """
        give_up = self.now() + timedelta(seconds=within_s)
        while True:
            yield
            if self.now() >= give_up:
                return
            self.sleep(every_s)

    def price_list(self, region: str) -> list[Answer]:
        """Return the Price List API's products for on-demand Linux machines in `region`."""
        filters = [
            {"Type": "TERM_MATCH", "Field": field, "Value": value}
            for field, value in (_ON_DEMAND | {"regionCode": region}).items()
        ]
        found = self.ask_all(
            "PriceList",
            "pricing:GetProducts",
            PRICE_LIST_REGION,
            ServiceCode="AmazonEC2",
            Filters=filters,
            MaxResults=100,
        )
        return [json.loads(product) for product in found]

    def spot_prices(self, region: str, at: datetime, names: Sequence[str] = ()) -> list[Answer]:
        """Return the spot prices at time `at` and later, as rows of DescribeSpotPriceHistory.

        names: the instance types. Empty means all types.
        """
        words: Answer = {"StartTime": at, "ProductDescriptions": ["Linux/UNIX"]}
        words |= {"InstanceTypes": names} if names else {}
        return self.ask_all("SpotPriceHistory", "ec2:DescribeSpotPriceHistory", region, **words)

    def instances(self, region: str, filters: Filters) -> dict[str, Answer]:
        """Return {instance id: description} of the machines that match `filters`."""
        groups = self.described("Reservations", "ec2:DescribeInstances", region, filters)
        return {
            instance["InstanceId"]: instance for group in groups for instance in group["Instances"]
        }

    def terminate(self, region: str, ids: Sequence[str]) -> set[str]:
        """Terminate the machines `ids`, and return the ids that EC2 does not find.

        EC2 does not find machines that ended long ago, and may not find new machines. Raises
        AwsRefused for any other refusal.
        """
        if not ids or self.ask_unless(("gone",), "ec2:TerminateInstances", region, InstanceIds=ids):
            return set()
        if len(ids) == 1:
            return {*ids}
        # EC2 may have refused the whole request because of a single unknown id
        return {name for each in ids for name in self.terminate(region, [each])}

    def _image(self, region: str, parameter: str) -> Answer:
        """Return the description of a machine image, as DescribeImages returns it.

        parameter: the name of the SSM parameter that contains the image's id.

        The result is cached, so that all launches use the same image. Raises AwsRefused if the
        image does not exist or is not available.
        """
        action = "ec2:DescribeImages"
        image_id = self.ask("ssm:GetParameter", region, Name=parameter)["Parameter"]["Value"]
        images: list[Answer] = self.ask(action, region, ImageIds=[image_id])["Images"]
        if not images or images[0].get("State", "available") != "available":
            raise AwsRefused("InvalidAMIID.NotFound", action, region)
        return images[0]


def connect(clients: Clients | None = None, clock: AwsClock | None = None) -> Ec2Api:
    """Return an `Ec2Api`, by default with boto3's clients and the real clock.

    Raises ProviderError if `clients` is None and there are no AWS credentials.
    """
    return Ec2Api(clients or boto_clients(), clock or AwsClock())


def spot_advisor() -> Answer:
    """Return the content of AWS's public Spot Advisor file: interruption rates by instance type.

    Returns {} if the file cannot be read.
    """
    url = "https://spot-bid-advisor.s3.amazonaws.com/spot-advisor-data.json"
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return dict(json.load(answer))
    except (OSError, ValueError, TypeError):
        return {}


class Store:
    """Reads and writes the objects of one S3 bucket.

    region: the region to which requests are sent. A call of the method `listed` replaces this value
        with the bucket's region.
    """

    def __init__(self, api: Ec2Api, region: str, bucket: str) -> None:
        self._api, self.region, self.bucket = api, region, bucket

    def listed(self, prefix: str, most: float = math.inf) -> tuple[list[Answer], float]:
        """Return the objects below `prefix`, and the time at which S3 sent the first page.

        Each object is an entry of S3's list, with key, size and ETag. The time is Unix time on S3's
        clock.

        most: stop requesting pages when the list has more than this number of objects. The list
            may be longer than `most`.
        """
        words = {"Bucket": self.bucket, "Prefix": prefix}
        page = first = self._api.ask("s3:ListBucket", self.region, **words)
        headers = first["ResponseMetadata"]["HTTPHeaders"]
        self.region = headers.get("x-amz-bucket-region") or self.region
        found = list(first.get("Contents", ()))
        while (token := page.get("NextContinuationToken")) and len(found) <= most:
            page = self._api.ask("s3:ListBucket", self.region, **words, ContinuationToken=token)
            found += page.get("Contents", ())
        return found, answered_at(first)

    def get(self, key: str, most_bytes: int) -> bytes:
        """Return an object's content; b"" if the object is larger than `most_bytes`."""
        action = "s3:GetObject"
        answer = self._api.ask(action, self.region, Bucket=self.bucket, Key=key)
        if answer["ContentLength"] > most_bytes:
            return b""
        with aws_errors(action, self.region):
            return bytes(answer["Body"].read())

    def put(self, key: str, content: bytes) -> None:
        """Write an object atomically, so that readers never see an incomplete object."""
        self._api.ask("s3:PutObject", self.region, Bucket=self.bucket, Key=key, Body=content)


def answered_at(answer: Answer) -> float:
    """Return the time in the Date header of a response, as Unix time."""
    date = answer["ResponseMetadata"]["HTTPHeaders"]["date"]
    return parsedate_to_datetime(date).timestamp()
