"""The metadata service as a machine sees it: tokens first, bounded attempts, notices."""

import pytest

from tasks.node.on_ec2 import metadata
from tasks.node.on_ec2.metadata import Metadata, MetadataError


class Service:
    """Answers from `values` if a token is shown; first come `faults`."""

    def __init__(self):
        self.values = {"instance-id": "i-1"}
        self.faults = []

    def __call__(self, method, url, headers):
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
def service(clock, monkeypatch):
    made = Service()
    monkeypatch.setattr(metadata, "ask", made)
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", "http://m/")
    return made


def test_faults_are_tried_again_and_not_for_ever(service):
    machine = Metadata()
    service.faults = [TimeoutError(), 500, 503]
    assert machine.require("instance-id") == "i-1"
    with pytest.raises(MetadataError):
        machine.require("local-ipv4")
    service.faults = [500] * 1000
    with pytest.raises(MetadataError):
        machine.require("instance-id")
    assert len(service.faults) > 900
    service.faults = [404] * 100  # no token is not "no notice"
    with pytest.raises(MetadataError):
        machine.notice()


def test_the_service_is_that_of_aws_by_default():
    assert Metadata().base == "http://169.254.169.254"


def test_an_interruption_outweighs_a_recommendation(service):
    machine = Metadata()
    assert machine.notice() is None
    service.values["events/recommendations/rebalance"] = '{"noticeTime": "T"}'
    assert machine.notice() == {"kind": "rebalance", "action": "", "at": ""}
    service.values["spot/instance-action"] = '{"action": "stop", "time": "T"}'
    assert machine.notice() == {"kind": "interruption", "action": "stop", "at": "T"}
    service.values["spot/instance-action"] = "not what AWS writes"
    assert machine.notice() == {"kind": "interruption", "action": "terminate", "at": ""}
