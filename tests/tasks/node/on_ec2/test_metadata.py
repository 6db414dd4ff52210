"""The metadata service as a machine sees it: tokens first, bounded attempts, notices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tasks.node.on_ec2.metadata import Metadata, MetadataError

NOW = 1_795_000_000.0  # 2026-11-18T11:06:40Z


class Service:
    """Issues tokens of which each serves `uses` questions, and answers from `values`."""

    def __init__(self, uses: int = 10_000) -> None:
        self.values: dict[str, str] = {"instance-id": "i-1", "local-ipv4": "10.0.0.4"}
        self.uses, self.left, self.tokens = uses, 0, 0
        self.faults: list[int | Exception] = []
        self.asked: list[str] = []

    def __call__(self, method: str, url: str, headers: Mapping[str, str]) -> tuple[int, str]:
        assert url.startswith("http://m/latest/")
        if self.faults:
            fault = self.faults.pop(0)
            if isinstance(fault, Exception):
                raise fault
            return fault, ""
        if url.endswith("/api/token"):
            assert method == "PUT" and int(headers["X-aws-ec2-metadata-token-ttl-seconds"]) <= 21600
            self.tokens, self.left = self.tokens + 1, self.uses
            return 200, f"token-{self.tokens}"
        if headers.get("X-aws-ec2-metadata-token") != f"token-{self.tokens}" or self.left == 0:
            return 401, ""
        self.left -= 1
        path = url.partition("/meta-data/")[2]
        self.asked.append(path)
        return (200, self.values[path]) if path in self.values else (404, "")


@pytest.fixture
def service(clock: Any) -> Service:
    clock.now = NOW
    return Service()


@pytest.mark.parametrize(("uses", "tokens"), [(10_000, 1), (1, 4)])
def test_one_token_serves_until_it_has_expired(service: Service, uses: int, tokens: int) -> None:
    service.uses = uses
    one = Metadata("http://m/", service)
    assert (one.require("instance-id"), one.require("local-ipv4")) == ("i-1", "10.0.0.4")
    assert [one.get("instance-id") for _ in range(2)] == ["i-1"] * 2
    assert service.tokens == tokens


def test_faults_are_tried_again_and_not_for_ever(service: Service) -> None:
    one = Metadata("http://m/", service)
    service.faults = [TimeoutError(), 500, 503]
    assert one.require("instance-id") == "i-1"
    service.faults = [500] * 1000
    with pytest.raises(MetadataError):
        one.require("instance-id")
    assert len(service.faults) > 900
    service.faults = [404] * 100  # no token is not "no notice"
    with pytest.raises(MetadataError):
        Metadata("http://m/", service).notice()


def test_the_address_comes_from_the_environment_where_ec2_is_emulated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert Metadata().base == "http://169.254.169.254"
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", "http://10.9.0.1:8111/")
    assert Metadata().base == "http://10.9.0.1:8111"


def test_an_interruption_outweighs_a_recommendation(service: Service) -> None:
    one = Metadata("http://m/", service)
    assert one.notice() is None
    service.values["events/recommendations/rebalance"] = '{"noticeTime": "2026-11-18T13:00:00Z"}'
    assert one.notice() == {"kind": "rebalance", "action": "", "at": ""}
    service.values["spot/instance-action"] = '{"action": "stop", "time": "2026-11-18T13:08:40Z"}'
    assert one.notice() == {"kind": "interruption", "action": "stop", "at": "2026-11-18T13:08:40Z"}
    service.values["spot/instance-action"] = "not what AWS writes"
    assert one.notice() == {"kind": "interruption", "action": "terminate", "at": ""}
