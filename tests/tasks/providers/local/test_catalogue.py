"""What is on offer, what fits, and the reasons given for the rest."""

import math
import subprocess
from pathlib import Path

import psutil
import pytest

from models.domain.cluster import Cluster
from tasks.providers.local import cpu_shares as local_cpu
from tasks.providers.local.catalogue import LocalMachine
from tasks.providers.local.cpu_shares import CpuShares
from tasks.providers.local.network import Host, Isolation
from tasks.providers.local.settings import LocalInstanceType
from tests.warehouse.builders import NOON

GROUPS = CpuShares(1, Path("/groups"))
ROOT, USER = Isolation(kind="root"), Isolation(kind="user")
BARE = Isolation(kind="none", why_not="Operation not permitted")


def spec(cores):
    return LocalInstanceType(
        cores=cores,
        memory_gib=2.0,
        bandwidth_gbps=0.2,
        usd_per_hour=0.03,
        spot_usd_per_hour=0.01,
        spot_interruptions_per_hour=0.4,
    )


TYPES = {"part": spec(0.4), "whole": spec(1.0), "huge": spec(8.0)}


@pytest.fixture(autouse=True)
def _two_cores(monkeypatch):
    """We may use two cores of a large machine."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: {3, 7})
    monkeypatch.setattr(local_cpu, "quota_cores", lambda: math.inf)


def machine(isolation=ROOT, shares=GROUPS, types=TYPES):
    made = LocalMachine(types, "python3")  # type: ignore[arg-type]
    made.isolation, made.shares = isolation, shares
    return made


def of(local, *names):
    offers = {offer.instance_type.name: offer for offer in local.offers(NOON)}
    return Cluster(members=tuple(offers[name] for name in names))


def test_a_type_larger_than_the_machine_is_left_out_with_the_reason():
    [sentence] = machine().limits()
    assert "huge" in sentence and "1.75" in sentence and "part" not in sentence


@pytest.mark.parametrize(
    "names, fits", [(["part"] * 4, True), (["part"] * 5, False), (["whole", "whole"], False)]
)
def test_shares_add_up_to_the_cores_less_a_quarter(names, fits):
    assert (machine().fits(of(machine(), *names)) == "") is fits


def test_a_quota_on_ourselves_is_shared_out_and_no_more(monkeypatch):
    both = of(machine(), "whole", "part")
    monkeypatch.setattr(local_cpu, "quota_cores", lambda: 1.5)
    assert "1.25" in machine().fits(both)


def test_an_ordinary_user_is_offered_whole_cores_and_reads_why():
    user = machine(USER, CpuShares(why_not="/sys/fs/cgroup: Permission denied"))
    assert [kind.name for kind in user.instance_types()] == ["whole"]
    first, _ = user.limits()
    assert "part" in first and "Permission denied" in first
    assert "not on offer" in user.fits(of(machine(), "part"))


def test_without_namespaces_one_host_fits_and_the_user_is_warned():
    bare = machine(BARE)
    assert bare.fits(of(bare, "part")) == ""
    assert "network" in bare.fits(of(bare, "part", "part"))
    assert "Operation not permitted" in bare.limits()[0]


def test_a_host_whose_process_has_gone_is_ended_without_an_error():
    with subprocess.Popen(["true"]) as process:
        host = Host(process, psutil.Process(process.pid))
    host.end()
