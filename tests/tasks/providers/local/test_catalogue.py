"""What is on offer, what fits, and what is said about the rest."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import UTC, datetime

import pytest

from models.domain.cluster import Cluster
from tasks.providers.local import cpu_shares as local_cpu
from tasks.providers.local.catalogue import LocalCatalogue
from tasks.providers.local.cpu_shares import Affinity, CgroupsV1, CpuShares
from tasks.providers.local.network import Isolation

NOW = datetime(2026, 11, 20, tzinfo=UTC)


@dataclass(frozen=True, kw_only=True)
class Spec:
    cores: float
    memory_gib: float = 2.0
    bandwidth_gbps: float = 0.2
    usd_per_hour: float = 0.03
    spot_usd_per_hour: float = 0.01
    spot_interruptions_per_hour: float = 0.4


TYPES = {"part": Spec(cores=0.4), "whole": Spec(cores=1.0), "huge": Spec(cores=8.0)}


@pytest.fixture
def catalogue(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> LocalCatalogue:
    """As root, on the two cores of a large machine that we may use."""
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: {3, 7})
    monkeypatch.setattr(local_cpu, "quota_cores", lambda: math.inf)
    return limited(Isolation(kind="root"), CgroupsV1(tmp_path_factory.mktemp("groups")))


def limited(isolation: Isolation, shares: CpuShares) -> LocalCatalogue:
    made = LocalCatalogue(TYPES)
    made.isolation, made.shares = isolation, shares
    return made


def of(catalogue: LocalCatalogue, *names: str) -> Cluster:
    offers = {one.instance_type.name: one for one in catalogue.offers(NOW) if one.market == "spot"}
    return Cluster(members=tuple(offers[name] for name in names))


def test_each_type_is_offered_in_both_markets_and_only_spot_is_interrupted(
    catalogue: LocalCatalogue,
) -> None:
    offers = [
        (one.instance_type.name, one.market, one.usd_per_hour) for one in catalogue.offers(NOW)
    ]
    assert offers == [
        (name, market, usd)
        for name in ("part", "whole")
        for market, usd in (("on-demand", 0.03), ("spot", 0.01))
    ]
    assert {one.market: one.interruptions_per_hour for one in catalogue.offers(NOW)} == {
        "on-demand": 0,
        "spot": 0.4,
    }
    assert all(one.price_as_of == NOW for one in catalogue.offers(NOW))


def test_a_type_larger_than_the_machine_is_left_out_with_the_reason(
    catalogue: LocalCatalogue,
) -> None:
    [sentence] = catalogue.limits()
    assert "huge" in sentence and "1.75" in sentence and "part" not in sentence


@pytest.mark.parametrize(
    ("names", "fits"),
    [
        (["part"] * 4, True),
        (["part"] * 5, False),
        (["whole", "part"], True),
        (["whole", "whole"], False),
        ([], False),
    ],
)
def test_shares_add_up_to_the_cores_less_a_quarter(
    catalogue: LocalCatalogue, names: list[str], fits: bool
) -> None:
    assert (catalogue.fits(of(catalogue, *names)) == "") is fits


def test_a_quota_on_ourselves_is_shared_out_and_no_more(
    catalogue: LocalCatalogue, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = of(catalogue, "whole", "part")
    assert catalogue.fits(both) == ""
    monkeypatch.setattr(local_cpu, "quota_cores", lambda: 1.5)
    assert "1.25" in catalogue.fits(both)


def test_an_unknown_type_does_not_fit_and_the_known_ones_are_named(
    catalogue: LocalCatalogue,
) -> None:
    stranger = LocalCatalogue({"strange": Spec(cores=0.1)})
    stranger.isolation, stranger.shares = catalogue.isolation, catalogue.shares
    assert "part, whole" in catalogue.fits(of(stranger, "strange"))


def test_an_ordinary_user_is_offered_whole_cores_and_reads_why(catalogue: LocalCatalogue) -> None:
    user = limited(Isolation(kind="user"), Affinity("/sys/fs/cgroup: Permission denied"))
    assert [one.name for one in user.instance_types()] == ["whole"]
    first, _ = user.limits()
    assert "part" in first and "Permission denied" in first and "root" in first
    assert "not on offer" in user.fits(of(catalogue, "part"))


def test_without_namespaces_one_host_fits_and_the_user_is_warned(catalogue: LocalCatalogue) -> None:
    bare = limited(
        Isolation(kind="none", why_not="unshare: Operation not permitted"), catalogue.shares
    )
    assert bare.fits(of(bare, "part")) == ""
    assert "network" in bare.fits(of(bare, "part", "part"))
    assert "one host" in bare.limits()[0] and "Operation not permitted" in bare.limits()[0]


def test_the_digest_follows_the_definition(
    catalogue: LocalCatalogue, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {one.name: one.digest for one in catalogue.instance_types()}
    monkeypatch.setitem(catalogue._specs, "part", Spec(cores=0.4, bandwidth_gbps=0.3))
    after = {one.name: one.digest for one in catalogue.instance_types()}
    assert before["part"] != after["part"] and before["whole"] == after["whole"]
