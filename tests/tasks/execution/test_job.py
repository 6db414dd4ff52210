"""A line of the shopping list becomes items with run ids, files with digests, and setups that say
where from.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from models.campaign.campaign import PlannedLaunch
from models.campaign.candidates import PlannedRun
from models.domain.cluster import Cluster, InstanceType, Offer
from tasks.execution.job import START_UP_S, Job, expected_devices, job_of
from tasks.node.record import ANY, CPU, Devices
from tasks.providers.ec2.settings import Ec2
from tasks.workspace.settings import SettingsError
from tasks.workspace.workspace import Workspace
from tests.installed import NOON, DescribedMachines, install


def wanted(
    kind: str, workload: str, nodes: tuple[int, ...], batches: tuple[int, ...]
) -> PlannedRun:
    of_kind = {
        "accumulation_steps": 2 if kind == "train" else 1,
        "message_bytes": (4096,) if kind == "probe" else (),
    }
    return PlannedRun(
        kind=kind,
        workload=workload,
        nodes=nodes,
        batches=batches,
        reason=f"a {kind}",
        est_s=1.0,
        **of_kind,
    )


@pytest.fixture
def here(tmp_path: Path) -> Workspace:
    return install(tmp_path, provider=DescribedMachines(unpriced=frozenset({"n.medium"})))


def launch(here: Workspace) -> PlannedLaunch:
    offers = {o.instance_type.name: o for o in here.provider.offers(NOON) if o.market == "spot"}
    cluster = Cluster.of((1, offers["s.large"]), (2, offers["s.small"]), (1, offers["n.medium"]))
    items = (
        wanted("train", "conv", (0, 1, 2), (32, 8, 8)),
        wanted("profile", "lm", (1,), (2, 4, 8)),
        wanted("probe", "", (0, 3), ()),
    )
    return PlannedLaunch(cluster=cluster, items=items, est_s=10.0, est_usd=0.1, reason="three runs")


@pytest.fixture
def job(here: Workspace) -> Job:
    return job_of(launch(here), here.settings, lease_id="L", seed=5, deadline_s=60.0)


def test_items_are_numbered_within_the_lease_and_carry_what_nodes_need(job: Job) -> None:
    assert [item.run_id for item in job.items] == ["L-000", "L-001", "L-002"]
    assert [item.nodes for item in job.items] == [[0, 1, 2], [1], [0, 3]]
    assert job.items[0].batches == [32, 8, 8] and job.items[0].accumulation_steps == 2
    assert job.items[2].message_bytes == [4096] and job.items[2].workload == ""
    assert {item.seed for item in job.items} == {5}
    assert job.deadline_s == 60.0 + START_UP_S


def test_run_setups_describe_the_hosts_that_take_part_and_no_others(
    here: Workspace, job: Job
) -> None:
    run_setups = job.run_setups
    train, profile, probe = (run_setups[f"L-00{n}"] for n in range(3))
    assert (train["cluster"], train["batch_per_device"], train["layout"]) == (
        "1xs.large+2xs.small",
        "32+8+8",
        "1",
    )
    assert train["instance_types"] == ["s.large", "s.small", "s.small"]
    digests = {one.name: one.digest for one in here.provider.instance_types()}
    assert train["instance_digests"] == [digests[name] for name in train["instance_types"]]
    assert (train["market"], train["zone"], train["region"]) == ("spot", "a", "here")
    assert train["usd_per_hour"] == pytest.approx(0.4 * (0.125 + 2 * 0.030))
    assert (profile["cluster"], profile["batch_per_device"]) == ("1xs.small", None)
    assert probe["cluster"] == "1xs.large+1xn.medium" and probe["workload"] is None
    assert probe["usd_per_hour"] is None
    assert {one["reason_wanted"] for one in run_setups.values()} == {
        "a train",
        "a profile",
        "a probe",
    }


def machine(name: str, device: str, devices: int, provider: str = "ec2") -> Offer:
    kind = InstanceType(
        name=name,
        provider=provider,
        devices=devices,
        device=device,
        cores=8.0,
        memory_gib=32.0,
        device_memory_gib=16.0,
        bandwidth_gbps=10.0,
    )
    return Offer(
        instance_type=kind,
        market="spot",
        zone="a",
        region="here",
        usd_per_hour=1.0,
        interruptions_per_hour=0.0,
        price_as_of=NOON,
    )


MIXED = Cluster.of(
    (1, machine("g5.12xlarge", "A10G", 4)),
    (1, machine("c7i.24xlarge", CPU, 1)),
    (1, machine("s", CPU, 1, "local")),
)


def test_a_machine_measures_on_its_types_devices_and_an_emulated_one_on_any(
    job: Job,
) -> None:
    gpu, processor, host = expected_devices(MIXED, emulated=False)
    assert gpu == Devices(name="A10G", count=4, threads=1)
    assert processor == Devices(name=CPU, count=1, threads=0)
    assert host == Devices(name=CPU, count=1, threads=1)
    emulated = (Devices(name=ANY, count=4), Devices(name=ANY, count=1), host)
    assert expected_devices(MIXED, emulated=True) == emulated
    assert job.expected == (host,) * 4
    assert (
        job.run_setups["L-000"]["expected_devices"] == [{"name": CPU, "count": 1, "threads": 1}] * 3
    )


@pytest.mark.parametrize(
    "endpoint",
    [
        *("", "https://ec2.us-east-1.amazonaws.com", "https://EC2.us-east-1.AmazonAWS.com.:443/"),
        *("https://ec2.us-east-1.api.aws", "ec2.us-east-1.api.aws", "https://api.aws"),
        *(
            "https://ec2.cn-north-1.amazonaws.com.cn",
            "https://ec2.cn-north-1.api.amazonwebservices.com.cn",
        ),
        *(
            "https://ec2.eusc-de-east-1.amazonaws.eu",
            "https://ec2.eusc-de-east-1.api.amazonwebservices.eu",
        ),
    ],
)
def test_machines_of_aws_itself_are_never_taken_for_emulated(
    here: Workspace, monkeypatch: pytest.MonkeyPatch, endpoint: str
) -> None:
    monkeypatch.delenv("AWS_ENDPOINT_URL_EC2", raising=False)
    settings = here.settings.model_copy(update={"ec2": Ec2(emulated=True)})
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    with pytest.raises(SettingsError, match="AWS_ENDPOINT_URL"):
        job_of(launch(here), settings, lease_id="L", seed=5, deadline_s=60.0)
    for emulated in ("http://127.0.0.1:5000", "http://amazonaws.com.localhost:5000/api.aws"):
        monkeypatch.setenv("AWS_ENDPOINT_URL", emulated)
        assert job_of(launch(here), settings, lease_id="L", seed=5, deadline_s=60.0).expected
    assert not Ec2().emulated
