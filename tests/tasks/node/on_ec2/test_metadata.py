"""The metadata service as a machine sees it: tokens first, bounded attempts, notices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tasks.node.on_ec2.metadata import Metadata, MetadataError


class Service:
    """Answers from `values` if a token is shown; first come `faults`."""

    def __init__(self) -> None:
        self.values = {"instance-id": "i-1"}
        self.faults: list[int | Exception] = []

    def __call__(self, method: str, url: str, headers: Mapping[str, str]) -> tuple[int, str]:
        fault = self.faults.pop(0) if self.faults else None
        if isinstance(fault, Exception):
            raise fault
        if fault is not None:
            return fault, ""
        if (method, url) == ("PUT", "http://m/latest/api/token"):
            assert 0 < int(headers["X-aws-ec2-metadata-token-ttl-seconds"]) <= 21600
            return 200, "token"
        if headers.get("X-aws-ec2-metadata-token") != "token":
            return 401, ""
        value = self.values.get(url.removeprefix("http://m/latest/meta-data/"))
        return (404, "") if value is None else (200, value)


@pytest.fixture
def service(clock: Any) -> Service:
    return Service()


def test_faults_are_tried_again_and_not_for_ever(service: Service) -> None:
    metadata = Metadata("http://m/", service)
    service.faults = [TimeoutError(), 500, 503]
    assert metadata.require("instance-id") == "i-1"
    with pytest.raises(MetadataError):
        metadata.require("local-ipv4")
    service.faults = [500] * 1000
    with pytest.raises(MetadataError):
        metadata.require("instance-id")
    assert len(service.faults) > 900
    service.faults = [404] * 100  # no token is not "no notice"
    with pytest.raises(MetadataError):
        metadata.notice()


def test_the_address_comes_from_the_environment_where_ec2_is_emulated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert Metadata().base == "http://169.254.169.254"
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", "http://10.9.0.1:8111/")
    assert Metadata().base == "http://10.9.0.1:8111"


def test_an_interruption_outweighs_a_recommendation(service: Service) -> None:
    metadata = Metadata("http://m/", service)
    assert metadata.notice() is None
    service.values["events/recommendations/rebalance"] = '{"noticeTime": "T"}'
    assert metadata.notice() == {"kind": "rebalance", "action": "", "at": ""}
    service.values["spot/instance-action"] = '{"action": "stop", "time": "T"}'
    assert metadata.notice() == {"kind": "interruption", "action": "stop", "at": "T"}
    service.values["spot/instance-action"] = "not what AWS writes"
    assert metadata.notice() == {"kind": "interruption", "action": "terminate", "at": ""}
