"""AWS as its price flows see it, without a socket: moto describes types, and what moto lacks is answered here.

Answers go in below botocore, as the bytes that AWS would send, so that its serializers and parsers are in the path.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import cache
from typing import Any
from unittest.mock import patch
from urllib.parse import parse_qs

import boto3
from botocore.awsrequest import AWSResponse
from botocore.config import Config
from moto import mock_aws
from moto.core.botocore_stubber import BotocoreStubber

from tests.world.market import Prices, Spot, page, products

_ONCE = Config(retries={"total_max_attempts": 1})  # nothing sleeps
NOON = datetime(2026, 11, 20, 12, 0, tzinfo=UTC)
_UNCHANGING = (
    "DescribeInstanceTypes",
    "DescribeInstanceTypeOfferings",
)  # moto reads them from its files
_answers: dict[tuple[str, str], Any] = {}  # what moto answered to those: it takes seconds over some


class Raw:
    """What botocore reads an answer's bytes from."""

    def __init__(self, content: bytes) -> None:
        self.content = content

    def stream(self, **_: Any) -> Iterator[bytes]:
        yield self.content

    def read(self, *_: Any) -> bytes:
        return self.content


@cache
def _session() -> boto3.Session:
    """One for all: each reads anew the megabytes that describe the services."""
    return boto3.Session(aws_access_key_id="AKIAEXAMPLE", aws_secret_access_key="very-secret-key")


class World:
    """`prices` and `spot` may be changed between questions. `refuse`: action -> (status, code) answered instead.

    Regions offer what `offered` says, or what moto knows of them.
    """

    def __init__(
        self,
        prices: Prices,
        spot: Mapping[str, Spot] | None = None,
        offered: Mapping[str, Collection[str]] | None = None,
    ) -> None:
        self.prices, self.spot, self.offered = prices, spot or {}, offered
        self.refuse: dict[str, tuple[int, str]] = {}
        self.asked: list[tuple[str, str]] = []
        self.page = {"GetProducts": 100, "DescribeSpotPriceHistory": 1000}

    def clients(self, service: str, region: str) -> Any:
        client = _session().client(service, region_name=region, config=_ONCE)

        def answer(event_name: str, request: Any, **_: Any) -> AWSResponse | None:
            found = self._answer(event_name.rpartition(".")[2], request, region)
            request.answered = found is not None
            request.unchanging = event_name.endswith(_UNCHANGING)
            return found

        client.meta.events.register_first(
            f"before-send.{client.meta.service_model.service_id.hyphenize()}", answer
        )
        return client

    def _answer(self, action: str, request: Any, region: str) -> AWSResponse | None:
        self.asked.append((action, region))
        if action in self.refuse:
            status, code = self.refuse[action]
            if code == "a proxy's page":
                return _sent(request, "<!doctype html>\n<p>sorry", status)
            if action == "GetProducts":
                return _sent(
                    request,
                    json.dumps({"__type": code, "message": "very-secret-key was wrong"}),
                    status,
                )
            text = f"<Errors><Error><Code>{code}</Code><Message>very-secret-key was wrong</Message></Error></Errors>"
            return _sent(request, f"<Response>{text}<RequestID>1</RequestID></Response>", status)
        if action == "GetProducts":
            return _sent(request, self._products(json.loads(request.body)))
        if action == "DescribeSpotPriceHistory":
            return _sent(request, self._history(parse_qs(_text(request.body)), region))
        if action == "DescribeInstanceTypeOfferings" and self.offered is not None:
            return _sent(request, _offerings(self.offered.get(region, ())))
        return None  # moto's

    def _products(self, asked: Mapping[str, Any]) -> str:
        return json.dumps(products(self.prices, asked, self.page["GetProducts"]))

    def _history(self, asked: Mapping[str, list[str]], region: str) -> str:
        listed = sorted(self.spot.get(region, {}).items())
        some, token = page(
            listed, asked.get("NextToken", [""])[0], self.page["DescribeSpotPriceHistory"]
        )
        items = "".join(
            f"<item><instanceType>{name}</instanceType><productDescription>Linux/UNIX</productDescription>"
            f"<spotPrice>{usd:.6f}</spotPrice><timestamp>2026-11-20T11:00:00+0000</timestamp>"
            f"<availabilityZone>{zone}</availabilityZone></item>"
            for (name, zone), usd in some
        )
        return (
            '<DescribeSpotPriceHistoryResponse xmlns="http://ec2.amazonaws.com/doc/2016-11-15/"><requestId>1</requestId>'
            f"<spotPriceHistorySet>{items}</spotPriceHistorySet><nextToken>{token}</nextToken>"
            "</DescribeSpotPriceHistoryResponse>"
        )


def _offerings(names: Collection[str]) -> str:
    items = "".join(f"<item><instanceType>{name}</instanceType></item>" for name in names)
    return (
        '<DescribeInstanceTypeOfferingsResponse xmlns="http://ec2.amazonaws.com/doc/2016-11-15/"><requestId>1</requestId>'
        f"<instanceTypeOfferingSet>{items}</instanceTypeOfferingSet></DescribeInstanceTypeOfferingsResponse>"
    )


def _text(body: Any) -> str:
    return body.decode() if isinstance(body, bytes) else str(body)


def _sent(request: Any, body: str, status: int = 200) -> AWSResponse:
    return AWSResponse(request.url, status, {"content-type": "text/xml"}, Raw(body.encode()))


@contextmanager
def emulated() -> Iterator[None]:
    """moto stands in for AWS, in this process; it is spared the questions that are answered here.

    botocore hands every request to all who listen, and moto would spend seconds on pages that nobody reads.
    """
    whole = BotocoreStubber.process_request

    def rest(self: BotocoreStubber, request: Any) -> Any:
        if getattr(request, "answered", False):
            return None
        if not getattr(request, "unchanging", False):
            return whole(self, request)
        asked = request.url, _text(request.body)
        if asked not in _answers:
            _answers[asked] = whole(self, request)
        return _answers[asked]

    with mock_aws(), patch.object(BotocoreStubber, "process_request", rest):
        yield
