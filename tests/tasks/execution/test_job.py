"""A planned launch becomes items with run ids, files with digests, and setups of what is bought."""

from dataclasses import replace

import pytest

from models.campaign.candidates import PlannedRun
from models.campaign.shopping_list import PlannedLaunch
from models.domain.cluster import Cluster
from tasks.execution.job import expected_devices, job_of
from tasks.node.record import ANY, CPU, Devices
from tasks.providers.ec2.settings import Ec2
from tasks.workspace.settings import SettingsError
from tests.installed import NOON, DescribedMachines, digests, install

HOST = Devices(name=CPU, count=1, threads=1)


@pytest.fixture
def settings(tmp_path):
    return install(tmp_path).settings


def made(settings):
    """Return the job of a train, a profile and a probe on four machines."""
    machines = DescribedMachines(unpriced=frozenset({"n.medium"}))
    offers = {
        offer.instance_type.name: offer for offer in machines.offers(NOON) if offer.market == "spot"
    }
    cluster = Cluster.of((1, offers["s.large"]), (2, offers["s.small"]), (1, offers["n.medium"]))
    train = PlannedRun(
        kind="train", workload="conv", nodes=(0, 1, 2), batches=(32, 8, 8), est_s=1.0, reason="a"
    )
    profile = replace(train, kind="profile", workload="lm", nodes=(1,), batches=(2, 4))
    probe = PlannedRun(kind="probe", nodes=(0, 3), message_bytes=(4096,), est_s=1.0)
    items = (replace(train, accumulation_steps=2), profile, probe)
    launch = PlannedLaunch(cluster=cluster, items=items, est_s=9.0, est_usd=0.1, reason="")
    return job_of(launch, settings, lease_id="L", deadline_s=60.0, data={})


def test_items_are_numbered_within_the_lease_and_carry_what_nodes_need(settings):
    job = made(settings)
    train, profile, probe = job.items
    assert [item.run_id for item in job.items] == ["L-000", "L-001", "L-002"]
    assert (train.nodes, train.batches, train.accumulation_steps) == ([0, 1, 2], [32, 8, 8], 2)
    assert (profile.workload, profile.nodes, profile.seed) == ("lm", [1], job.seed)
    assert (probe.workload, probe.nodes, probe.message_bytes) == ("", [0, 3], [4096])
    assert job.expected == (HOST,) * 4


def test_setups_describe_the_machines_that_take_part(settings):
    train, profile, probe = made(settings).run_setups.values()
    expected = {
        "cluster": "1xs.large+2xs.small",
        "batch_per_device": "32+8+8",
        "instance_types": ["s.large", "s.small", "s.small"],
        "instance_digests": [digests()[name] for name in ("s.large", "s.small", "s.small")],
        "market": "spot",
        "zone": "a",
        "usd_per_hour": pytest.approx(0.4 * (0.125 + 2 * 0.030)),
        "expected_devices": [{"name": CPU, "count": 1, "threads": 1}] * 3,
        "reason_wanted": "a",
    }
    assert {name: train[name] for name in expected} == expected
    assert (profile["cluster"], profile["batch_per_device"]) == ("1xs.small", None)
    assert (probe["cluster"], probe["workload"]) == ("1xs.large+1xn.medium", None)
    assert probe["usd_per_hour"] is None


def machine(device, devices=1, provider="ec2"):
    [offer, *_] = DescribedMachines().offers(NOON)
    changes = {"provider": provider, "devices": devices, "device": device}
    return replace(offer, instance_type=replace(offer.instance_type, **changes))


def test_a_machine_measures_on_its_types_devices_and_an_emulated_one_on_any():
    cluster = Cluster(members=(machine("A10G", 4), machine(CPU), machine(CPU, 1, "local")))
    bought = (Devices(name="A10G", count=4), Devices(name=CPU, count=1, threads=0), HOST)
    assert expected_devices(cluster, emulated=False) == bought
    emulated = (Devices(name=ANY, count=4), Devices(name=ANY, count=1), HOST)
    assert expected_devices(cluster, emulated=True) == emulated


@pytest.mark.parametrize(
    "endpoint",
    [
        "",
        "https://ec2.us-east-1.amazonaws.com:443/",
        "ec2.us-east-1.api.aws",
    ],
)
def test_machines_of_aws_itself_are_never_taken_for_emulated(settings, monkeypatch, endpoint):
    monkeypatch.delenv("AWS_ENDPOINT_URL_EC2", raising=False)
    emulated = settings.model_copy(update={"ec2": Ec2(emulated=True)})
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    with pytest.raises(SettingsError, match="AWS_ENDPOINT_URL"):
        made(emulated)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://amazonaws.com.localhost:5000/api.aws")
    assert made(emulated).expected
