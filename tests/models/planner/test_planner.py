"""Every candidate divides the batch exactly, can be had, fits memory; multisets, not sequences."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from models.domain.cluster import Cluster, parse_cluster
from models.planner.planner import candidates
from tests.models.planning import CORES, LineModel, cores_fit, offer, offers, workload

MODEL = LineModel()


def line(name: str) -> tuple[float, float]:
    return MODEL.compute_line("mlp", name)


@settings(max_examples=25, deadline=None)
@given(least=st.integers(1, 300), times=st.sampled_from([1, 2, 4]), max_hosts=st.integers(1, 4))
def test_the_global_batch_is_divided_exactly(least: int, times: int, max_hosts: int) -> None:
    job = workload("mlp", least, least * times)
    for setup in candidates(job, offers("spot"), max_hosts=max_hosts, fits=cores_fit, line=line):
        assert least <= setup.global_batch <= least * times
        assert setup.global_batch in {least, 2 * least, 4 * least}
        assert len(setup.batch_per_device) == len(setup.cluster.members) <= max_hosts
        assert not cores_fit(setup.cluster)


def test_every_multiset_appears_once_per_market_and_mixtures_are_of_one_type_in_one_zone() -> None:
    setups = candidates(workload(), offers(), max_hosts=3, fits=cores_fit, line=line)
    setups = [one for one in setups if one.accumulation_steps == 1]
    markets = [[o.market for o in s.cluster.members] for s in setups]
    seen = [
        (tuple(one) if len(set(one)) > 1 else one[0], tuple(sorted(parse_cluster(s.cluster.name))))
        for one, s in zip(markets, setups, strict=True)
    ]
    assert len(seen) == len(set(seen))
    mixed = {(names, one) for one, names in seen if isinstance(one, tuple)}
    safe, cheap = "on-demand", "spot"
    assert mixed == {
        (("small",) * 2, (safe, cheap)),
        (("small",) * 3, (safe, cheap, cheap)),
        (("medium",) * 2, (safe, cheap)),
        (("medium",) * 3, (safe, cheap, cheap)),
        (("net",) * 2, (safe, cheap)),
        (("net",) * 3, (safe, cheap, cheap)),
        (("large",) * 2, (safe, cheap)),
    }
    assert {one for one, _ in seen if isinstance(one, str)} == {"on-demand", "spot"}
    assert ("spot", ("large", "medium", "medium")) in seen
    assert ("spot", ("whole", "whole")) not in seen  # two whole cores of 1.75


def test_the_order_of_offers_changes_nothing() -> None:
    sold = offers()
    first, second = (
        candidates(workload(), order, max_hosts=3, fits=cores_fit, line=line) for order in (sold, sold[::-1])
    )
    assert [s.row() for s in first] == [s.row() for s in second]


def test_equal_hosts_share_equally_and_a_faster_host_gets_more() -> None:
    setups = candidates(workload("mlp", 96), offers("spot"), max_hosts=3, fits=cores_fit, line=line)
    shares = {(s.cluster.name, s.accumulation_steps): s.batch_per_device for s in setups}
    assert shares["3xsmall", 1] == (32, 32, 32)
    fast, slow = shares["1xlarge+1xmedium", 1]
    assert fast > slow and fast + slow == 96
    assert shares["2xmedium", 4] == (12, 12)


def test_what_does_not_fit_memory_is_left_out_and_what_nobody_knows_stays() -> None:
    def peak(name: str, batch: int) -> float:
        return math.nan if name == "net" else batch * 2**30 / 16  # 2 GiB hold 32 samples

    setups = candidates(workload(), offers("spot"), max_hosts=1, fits=cores_fit, line=line, peak_bytes=peak)
    assert {(s.cluster.name, s.accumulation_steps) for s in setups if s.cluster.name != "1xnet"} == {
        (f"1x{name}", steps) for name in CORES if name != "net" for steps in (2, 4)
    }
    assert ("1xnet", 1) in {(s.cluster.name, s.accumulation_steps) for s in setups}


def test_the_cheapest_offer_of_a_type_stands_for_it() -> None:
    sold = [offer("small", usd_per_hour=0.5), offer("small", usd_per_hour=0.1), offer("small", usd_per_hour=None)]
    setups = candidates(workload(), sold, max_hosts=1, fits=cores_fit, line=line)
    assert {setup.cluster.usd_per_hour for setup in setups} == {0.1}


def test_many_types_stay_countable() -> None:
    """Fifty types on eight hosts are 2e9 multisets; the planner keeps to two types a cluster, in counts of a ladder."""
    asked: list[Cluster] = []

    def fits(cluster: Cluster) -> str:
        asked.append(cluster)
        return "none left"

    one = offer("small").instance_type
    many = [
        offer("small", instance_type=type(one)(**{f: getattr(one, f) for f in one.__slots__} | {"name": f"t{i:02}"}))
        for i in range(50)
    ]
    assert candidates(workload(), many, max_hosts=8, fits=fits, line=lambda _: (0.0, 1.0)) == []
    assert len(asked) < 80_000
    assert max(len({o.instance_type.name for o in c.members}) for c in asked) == 2
