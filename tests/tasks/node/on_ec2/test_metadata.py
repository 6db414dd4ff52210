"""The metadata service as a machine sees it: tokens first, bounded attempts, notices."""

from urllib.error import HTTPError

import pytest

from tasks.node.on_ec2.metadata import Metadata


class Service:
    """Answers from `values` if a token is shown; first come `faults`."""

    def __init__(self):
        self.values = {"instance-id": "i-1"}
        self.faults = []

    def __call__(self, machine, method, path, header, value):
        fault = self.faults.pop(0) if self.faults else None
        if isinstance(fault, int):
            raise HTTPError(path, fault, "", {}, None)
        if fault is not None:
            raise fault
        if (method, path) == ("PUT", "api/token"):
            assert header == "-ttl-seconds" and 0 < int(value) <= 21600
            return "token"
        assert (header, value) == ("", "token")
        found = self.values.get(path.removeprefix("meta-data/"))
        if found is None:
            raise HTTPError(path, 404, "", {}, None)
        return found


@pytest.fixture
def service(clock, monkeypatch):
    made = Service()
    monkeypatch.setattr(Metadata, "ask", lambda *given: made(*given))
    return made


def test_faults_are_tried_again_and_not_for_ever(service):
    machine = Metadata()
    service.faults = [TimeoutError(), 500, 503]
    assert machine.get("instance-id") == "i-1"
    service.faults = [500] * 1000
    with pytest.raises(OSError):
        machine.get("instance-id")
    assert len(service.faults) > 900
    service.faults = [404] * 100  # no token is not "no notice"
    with pytest.raises(OSError):
        machine.notice()


def test_an_interruption_is_noticed_and_no_recommendation(service):
    machine = Metadata()
    service.values["events/recommendations/rebalance"] = '{"noticeTime": "T"}'
    assert machine.notice() is None
    service.values["spot/instance-action"] = '{"action": "stop", "time": "T"}'
    assert machine.notice() == {"kind": "interruption", "at": "T"}
