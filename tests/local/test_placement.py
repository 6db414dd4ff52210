"""Four real hosts in two racks measure their links, and rings keep racks together."""

import json
import time

import pytest

from tasks.execution.session import serve
from tasks.node.record import Item
from tasks.providers.local.cluster import LocalCluster
from tests.benchmarks.placement import Hosts, rewired
from tests.fakes import job_of
from tests.local.hosts import HERE, cluster, left_over, needs_network, needs_quota, provider

pytestmark = [pytest.mark.local, pytest.mark.enable_socket]
RACK = (0, 1, 0, 1)


@needs_network
@needs_quota
def test_hosts_of_a_rack_send_to_each_other_before_they_send_to_another(tmp_path, monkeypatch):
    hosts = Hosts(name="", gbps=(), rack=RACK, uplink_gbps=0.02)
    plain = LocalCluster.go

    def go(running):
        running.network.run(rewired(hosts))
        plain(running)

    monkeypatch.setattr(LocalCluster, "go", go)
    item = Item(run_id="r", kind="probe", nodes=[0, 1, 2, 3], message_bytes=[100_000])
    for home in "abc":  # busy cores make the gain uncertain, and then the order stays as it is
        local = provider(tmp_path / home, HERE.parents[1] / "tasks/node")
        job = job_of([item], count=4, cluster=cluster(local, *("tenth",) * 4), deadline_s=200.0)
        seen = serve(local, job, stop_at=time.monotonic() + 200.0, watch=lambda *_: None)
        assert seen.recorded == {"r"}, seen.outcome
        values = json.loads((seen.mailbox / "node-0/records/r.json").read_text())["values"]
        if "rank_order" in values:
            break
    order = values["rank_order"]
    assert sum(RACK[order[place]] != RACK[order[(place + 1) % 4]] for place in range(4)) == 2, (
        values
    )
    byte_s = json.loads((seen.mailbox / "node-0/armed-1.json").read_text())["pairs"]["byte_s"][0]
    assert byte_s[0][1] > 3 * byte_s[0][2]
    assert left_over(local) == []
