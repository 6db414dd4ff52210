"""A rented machine's life: no user code behind a fence that does not hold, and all is carried."""

import argparse
import os
import pwd
from types import SimpleNamespace

import pytest

from tasks.node.on_ec2 import courier
from tasks.node.on_ec2.courier import Delivery
from tasks.providers.ec2.prices import PUTS_PER_HOUR
from tests.tasks.node.on_ec2.store import Store

USER = pwd.struct_passwd(("srift", "x", 12345, 12345, "", "/", "/bin/sh"))
GOES = {"kind": "interruption", "at": "2026-11-20T12:00:00Z"}
SOONER = GOES | {"at": "2026-11-20T11:00:00Z"}


@pytest.mark.parametrize("reason", ["it does not hold", ""])
def test_nothing_is_served_behind_a_fence_that_does_not_hold(tmp_path, monkeypatch, reason):
    served = SimpleNamespace(serve=lambda: "served", leave=None)
    fakes = {"account": USER, "fence": reason, "Delivery": served}
    for name, value in fakes.items():
        monkeypatch.setattr(courier, name, lambda *_, value=value, **__: value)
    monkeypatch.setattr(courier.signal, "signal", lambda *_: None)
    given = argparse.Namespace(user="srift", python="/python", directory=tmp_path)
    metadata = SimpleNamespace(get=lambda _: "10.0.0.4", base="http://m", notice=None)
    none = None
    assert courier.deliver(given, metadata, none, none, ends=1e12) == (reason or "served")


class World(Store):
    """Store, agent, notices and data of one machine, which has its place from the beginning."""

    def __init__(self, directory, clock):
        super().__init__(clock)
        self.mailbox, self.node_folder = directory, directory / "node-1"
        self.inward["node.json"] = b'{"node": 1, "nodes": 2}'
        self.code = None
        self.started = self.ended = -1.0
        self.given = None
        self.requested = {}
        self.states = {}

    def serve(self, ends_at, code=0, deadline_s=1000.0):
        """Until its agent ends with `code`."""
        self.sets(ends_at, code=code)
        world = self
        delivery = Delivery(
            store=world,
            start=world.start,
            notice=self.notice,
            owner=os.getuid(),
            ends=deadline_s,
            data=world,
        )
        return delivery.serve()

    def start(self, rank, deadline_unix):
        self.started = self.clock.now
        return self

    def poll(self):
        return self.code

    def end(self):
        self.ended = self.clock.now
        (self.mailbox / "agent.txt").write_text("Traceback: no such thing")

    def notice(self):
        if self.given is None and self.clock.now > 3.0:
            raise OSError("the metadata service is away")
        return self.given

    def request(self, addresses):
        self.requested |= addresses

    def writes(self, moment, name, content="{}"):
        def act():
            (self.node_folder / name).parent.mkdir(exist_ok=True)
            (self.node_folder / name).write_text(content)

        self.clock.at(moment, act)

    def sets(self, moment, **values):
        self.clock.at(moment, lambda: self.__dict__.update(values))


@pytest.fixture
def world(tmp_path, clock, monkeypatch):
    made = World(tmp_path, clock)
    monkeypatch.setattr(courier, "end_descendants", made.end)
    return made


def test_a_machine_reports_itself_takes_its_place_and_carries_both_ways(world):
    place = world.inward
    world.inward = {}
    world.sets(3, inward=place)
    world.clock.at(5, lambda: world.brings(plan__json='{"attempt": 1}'))
    world.writes(8, "records/r.json", '"whole"')
    assert world.serve(20) == ""
    assert 3 <= world.started <= 4
    assert (world.mailbox / "plan.json").read_bytes() == b'{"attempt": 1}'
    assert world.bodies("records/r.json") == ["whole"]
    assert world.moments("records/r.json")[0] <= 8.5 and world.ended >= 20


@pytest.mark.parametrize(
    ("name", "back_at", "least_s", "most_s"),
    [
        ("records/r.json", 400, 400, 411),  # a record outlives the agent
        ("records/r.json", 1e9, 980, 1000),  # until the deadline
        ("log-1.txt", 1e9, 0, 80),
    ],
)
def test_a_store_that_is_away_is_waited_for(world, name, back_at, least_s, most_s):
    world.sets(8, down=True)
    world.writes(10, name)
    world.sets(back_at, down=False)
    assert world.serve(12) == ""
    assert least_s <= world.clock.now <= most_s
    assert bool(world.moments(name)) is (back_at < 1000)


def test_a_notice_is_passed_on_at_once(world):
    world.sets(2, given=GOES)
    world.sets(31, given=SOONER)
    world.serve(40)
    assert world.bodies("notice.json") == [GOES, SOONER]
    assert 31 <= world.moments("notice.json")[1] <= 33.5


def test_an_agent_that_fails_is_reported_with_its_last_output(world):
    assert world.serve(5, code=1).endswith("1: Traceback: no such thing")


def test_requested_data_are_fetched_and_their_progress_is_reported(world):
    world.brings(data__json='{"data": {"aabb": ["s3://mine-1/cats/", 50, 6]}}', plan__json="{}")
    world.inward["plan.json"] = b"replaced since"
    for second in range(5, 60):
        world.sets(second, states={"aabb": {"state": "fetching", "at": second}})
    world.sets(58, down=True)
    world.sets(60, states={"aabb": {"state": "ready"}})
    world.sets(63, down=False)
    assert world.serve(80) == ""
    assert world.requested == {"aabb": ["s3://mine-1/cats/", 50, 6]}
    reports = [body["aabb"] for body in world.bodies("data.json")]
    assert {state["state"] for state in reports[:-1]} == {"fetching"} and 20 <= len(reports) <= 30
    assert 63 <= world.moments("data.json")[-1] <= 66 and reports[-1]["state"] == "ready"


def test_a_machine_at_work_asks_and_sends_no_more_than_the_bill_counts(world):
    world.brings(plan__json='{"attempt": 1}')
    for second in range(1, 300):
        world.writes(second, "heartbeat.json", str(second))
        world.writes(second, "log-1.txt", "x" * second)
    world.serve(300, deadline_s=3000.0)
    lists, records = 720, 60  # of an hour: the controller's, and of the runs
    heartbeats = (PUTS_PER_HOUR - lists - records) / 12
    assert 0.9 * heartbeats <= len(world.came) <= 1.05 * heartbeats
    assert len(world.requests) <= 1.05 * 1800 / 12
