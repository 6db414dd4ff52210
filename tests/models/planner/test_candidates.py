"""Every candidate divides the batch exactly, can be had and fits memory; zones and mixtures of markets."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, combinations_with_replacement
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.domain.cluster import Cluster, Offer, parse_cluster
from models.domain.setup_table import setup_key
from models.domain.workload import Mode, Setup
from models.job.job_conditions import Stated
from models.planner import candidates as module
from models.planner.candidates import Supply, mixed_options, without_beaten_zones
from models.planner.enumeration import clusters_of, compositions, sold_together
from models.planner.planner import allowed, candidates
from tests.models.planning import CORES, LineModel, cores_fit, machine, offer, offers, workload

PLAIN = Mode()

MODEL = LineModel()


def setups(
    sold: list[Offer], max_hosts: int = 3, least: int = 64, most: int | None = None
) -> list[Setup]:
    return candidates(
        workload("mlp", least, most),
        Supply(offers=sold, max_hosts=max_hosts, fits=cores_fit),
        MODEL,
    )


@settings(max_examples=25, deadline=None)
@given(least=st.integers(1, 300), times=st.sampled_from([1, 2, 4]), max_hosts=st.integers(1, 4))
def test_the_global_batch_is_divided_exactly(least: int, times: int, max_hosts: int) -> None:
    for setup in setups(offers("spot"), max_hosts, least, least * times):
        assert (
            setup.global_batch in {least, 2 * least, 4 * least}
            and setup.global_batch <= least * times
        )
        assert len(setup.batch_per_device) == len(setup.cluster.members) <= max_hosts
        assert not cores_fit(setup.cluster)


def test_every_multiset_appears_once_per_market_and_mixtures_are_of_one_type_in_one_zone() -> None:
    found = [one.cluster for one in setups(offers()) if one.accumulation_steps == 1]
    seen = [
        (one.market, tuple(offer.market for offer in one.members), sorted(parse_cluster(one.name)))
        for one in found
    ]
    assert len({str(one) for one in seen}) == len(seen)
    mixed = [(names, markets) for market, markets, names in seen if market == "mixed"]
    threes = ("small", "medium", "net")
    assert sorted(mixed) == sorted(
        [([name] * 2, ("on-demand", "spot")) for name in (*threes, "large")]
        + [([name] * 3, ("on-demand", "spot", "spot")) for name in threes]
    )
    assert ("spot", ("spot",) * 3, ["large", "medium", "medium"]) in seen
    assert ("spot", ("spot",) * 2, ["whole", "whole"]) not in seen  # two whole cores of 1.75


def test_the_order_of_offers_changes_nothing_and_the_cheapest_of_a_type_stands_for_it() -> None:
    first, second = (setups(order) for order in (offers(), offers()[::-1]))
    assert [one.row() for one in first] == [one.row() for one in second]
    sold = [offer("small", usd_per_hour=usd) for usd in (0.5, 0.1, None)]
    assert {one.cluster.usd_per_hour for one in setups(sold)} == {
        count * 0.1 for count in (1, 2, 3)
    }


def test_equal_hosts_share_equally_and_a_faster_host_gets_more() -> None:
    shares = {
        (one.cluster.name, one.accumulation_steps): one.batch_per_device
        for one in setups(offers("spot"), 3, 96)
    }
    assert shares["3xsmall", 1] == (32, 32, 32) and shares["2xmedium", 4] == (12, 12)
    fast, slow = shares["1xlarge+1xmedium", 1]
    assert fast > slow and fast + slow == 96


@pytest.mark.parametrize(("bytes_a_sample", "steps"), [(2**30 / 16, {2, 4}), (np.nan, {1, 2, 4})])
def test_what_does_not_fit_memory_is_left_out_and_what_nobody_knows_stays(
    bytes_a_sample: float, steps: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        LineModel,
        "peak_bytes",
        lambda self, _, name, batch, *ranks, **steps: batch * bytes_a_sample,
    )
    found = {(one.cluster.name, one.accumulation_steps) for one in setups(offers("spot"), 1)}
    assert found == {(f"1x{name}", each) for name in CORES for each in steps}, (
        "2 GiB hold 32 samples of 64"
    )


def test_many_types_stay_countable() -> None:
    """Fifty types on eight hosts are 2e9 multisets; the planner keeps to two types a cluster, in counts of a ladder."""
    asked: list[Cluster] = []

    def fits(cluster: Cluster) -> str:
        asked.append(cluster)
        return "none left"

    class Same(LineModel):
        def compute_line(
            self, workload: str, instance_type: str, mode: Mode = PLAIN
        ) -> tuple[float, float]:
            return 0.0, 1.0

    many = [
        offer("small", instance_type=replace(machine("small"), name=f"t{at:02}"))
        for at in range(50)
    ]
    assert candidates(workload(), Supply(offers=many, max_hosts=8, fits=fits), Same()) == []
    assert len(asked) < 80_000
    assert max(len({one.instance_type.name for one in cluster.members}) for cluster in asked) == 2


@pytest.mark.parametrize("most", [20_000, 0], ids=["asked before", "asked when it comes to one"])
def test_setups_come_by_price_those_asked_for_first_and_none_that_cannot_be_had(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_CLUSTERS", most)
    supply = Supply(
        offers=[*offers(), offer("small", usd_per_hour=None, zone="other")],
        max_hosts=3,
        fits=cores_fit,
    )
    found = allowed(workload("mlp", 64, 128), supply, MODEL)
    assert found is not None and found.all_fit == (most > 0)
    every = candidates(workload("mlp", 64, 128), supply, MODEL)
    wanted = {setup_key(every[at]) for at in (0, 7, len(every) - 1)}

    def order(one: Setup) -> tuple[bool, float]:
        usd = one.cluster.total_usd_per_hour
        return setup_key(one) not in wanted, np.inf if usd is None else round(usd, 9)

    rows = found.of_keys_first(found.by_price(np.arange(len(found))), wanted)
    assert list(found.setups(rows, cores_fit)) == sorted(every, key=order)
    single = found.setups(rows[found.machines[rows] == 1], cores_fit)
    assert list(single) == [one for one in sorted(every, key=order) if len(one.layout) == 1]


@pytest.mark.parametrize("most", [20_000, 0], ids=["asked before", "asked when it comes to one"])
def test_the_cheapest_of_each_kind_of_device_can_be_had(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_CLUSTERS", most)
    kinds = {"small": "a", "medium": "b", "large": "b", "net": "c", "whole": "d"}
    sold = [
        replace(one, instance_type=replace(one.instance_type, device=kinds[one.instance_type.name]))
        for one in offers("spot")
    ]

    def fits(cluster: Cluster) -> str:
        return "none left" if cluster.name == "1xmedium" else cores_fit(cluster)

    found = allowed(workload(), Supply(offers=sold, max_hosts=3, fits=fits), MODEL)
    assert found is not None
    cheapest = found.cheapest_of_each(["c", "b", "c", "other"], np.arange(len(found)), fits)
    alone = [
        one
        for one in found.setups(found.by_price(np.arange(len(found))), fits)
        if {member.instance_type.device for member in one.cluster.members} in ({"b"}, {"c"})
    ]
    first = {one.cluster.members[0].instance_type.device: one for one in reversed(alone)}
    assert sorted(map(str, cheapest)) == sorted(map(str, first.values())) and len(cheapest) == 2
    usd = [one.cluster.total_usd_per_hour or 0.0 for one in cheapest]
    assert usd == sorted(usd)


def test_few_clusters_are_all_enumerated_and_many_by_ladders() -> None:
    every = compositions(3, max_hosts=4, most=20_000)
    assert len(every) == 3 + 6 + 10 + 15 and len({tuple(row) for row in every.tolist()}) == len(
        every
    )
    mixed = compositions(10, max_hosts=64, most=20_000)
    assert len({tuple(row) for row in mixed.tolist()}) == len(mixed)
    assert (mixed > 0).sum(axis=1).max() == 3 and mixed.sum(axis=1).max() == 64
    alone = mixed[(mixed > 0).sum(axis=1) == 1].max(axis=1)
    assert sorted(alone.tolist()) == sorted([*range(1, 65)] * 10)
    assert [3, 2, 1] in [[int(one) for one in row if one] for row in mixed[:3000].tolist()]
    for types in (12, 60):
        counts = compositions(types, max_hosts=64, most=20_000)
        assert len(counts) <= 100_000 and (counts > 0).sum(axis=1).max() >= 2


def test_a_campaigns_clusters_are_of_two_types_where_there_are_too_many() -> None:
    few, many = (
        list(clusters_of(offers("spot"), max_hosts=3, fits=cores_fit, most=most))
        for most in (600, 10)
    )
    kinds = [{one.instance_type.name for one in cluster.members} for cluster in many]
    assert max(map(len, kinds)) == 2 and {one.name for one in many} < {one.name for one in few}
    assert {one.name for one in few} - {one.name for one in many} == {
        one.name for one in few if len({offer.instance_type.name for offer in one.members}) > 2
    }


def test_a_price_on_demand_of_any_zone_holds_beside_each_zone_of_its_region() -> None:
    sold = [
        offer("small", zone="any", region="r1"),
        offer("small", "spot", zone="r1a", region="r1"),
        offer("large", "spot", zone="r1a", region="r1"),
        offer("small", "spot", zone="r1b", region="r1"),
        offer("small", "spot", zone="r2a", region="r2"),
    ]
    found = list(mixed_options(sold_together(sold)))
    assert [(sorted(one.sold), one.sold["small"].zone, one.half) for one in found] == [
        (["small"], zone, half) for zone in ("r1a", "r1b") for half in (False, True)
    ]


@given(count=st.integers(4, 40), half=st.booleans())
def test_members_of_a_mixture_are_those_that_are_bought(count: int, half: bool) -> None:
    groups = sold_together([offer("small"), offer("small", "spot")])
    (option,) = [one for one in mixed_options(groups) if one.half == half]
    members = option.members("small", count)
    safe = sum(one.market == "on-demand" for one in members)
    assert len(members) == count and safe == (count // 2 if half else 1)
    pools, bought, usd = option.bought(["large", "small"], np.array([[0, count]]))
    assert {pool.market: int(many) for pool, many in zip(pools, bought[0], strict=True)} == {
        "on-demand": safe,
        "spot": count - safe,
    }
    assert float(bought[0] @ usd) == pytest.approx(sum(one.usd_per_hour or 0.0 for one in members))
    assert Stated().gangs(pools, bought, 0.0).hazard_per_hour[0] == pytest.approx(
        0.3 * (count - safe)
    )


Terms = dict[str, tuple[float | None, float]]


def in_zones(zones: dict[str, Terms], market: str = "spot") -> list[Offer]:
    return [
        offer(name, market, zone=zone, usd_per_hour=usd, interruptions_per_hour=hazard)
        for zone, terms in zones.items()
        for name, (usd, hazard) in terms.items()
    ]


def kept(sold: list[Offer], **options: Any) -> set[str]:
    return {one.zone for one in without_beaten_zones(sold, **options)}


def test_a_zone_that_another_beats_is_left_out_and_one_that_is_better_in_anything_stays() -> None:
    zones: dict[str, Terms] = {
        "best": {"small": (1.0, 0.1), "net": (2.0, 0.1)},
        "dearer": {"small": (1.1, 0.1), "net": (2.0, 0.1)},
        "riskier": {"small": (1.0, 0.2), "net": (2.0, 0.1)},
        "poorer": {"small": (1.0, 0.1)},
        "unpriced": {"small": (None, 0.1), "net": (2.0, 0.1)},
        "safer": {"small": (1.5, 0.05)},
        "cheaper": {"net": (1.9, 0.3)},
        "wider": {"large": (9.0, 0.1)},
    }
    assert kept(in_zones(zones)) == {"best", "safer", "cheaper", "wider"}
    same: dict[str, Terms] = {"z": {"small": (1.0, 0.1)}, "m": {"small": (1.0, 0.1)}}
    assert kept(in_zones(same)) == {"m"}, "of equal ones the first by name"
    assert kept(in_zones(same) + in_zones({"k": {"small": (0.5, 0.0)}}, "on-demand")) == {
        "m",
        "k",
    }, "not of markets"
    assert kept(in_zones({"x": {"small": (None, 0.1)}})) == {"x"}, (
        "unpriced machines are still the fastest"
    )


def test_of_too_many_zones_those_stay_that_are_the_cheapest_for_most_types() -> None:
    zones: dict[str, Terms] = {
        f"z{n}": {"small": (1.0 + n, 0.9 - n / 10), "net": (2.0, 0.5)} for n in range(5)
    }
    zones["z3"] |= {"large": (1.0, 0.0), "whole": (1.0, 0.0)}
    found = [
        (one.zone, one.instance_type.name) for one in without_beaten_zones(in_zones(zones), most=1)
    ]
    assert found == [("z0", "small"), ("z0", "net"), ("z3", "large"), ("z3", "whole")], (
        "each where it costs least"
    )


TERMS = st.tuples(st.sampled_from([1.0, 2.0, 3.0]), st.sampled_from([0.1, 0.2]))


@given(
    st.dictionaries(
        st.sampled_from("pqrs"),
        st.dictionaries(st.sampled_from(["small", "net", "large"]), TERMS, min_size=1),
        min_size=1,
    )
)
def test_without_beaten_zones_no_cluster_is_dearer_or_riskier(zones: dict[str, Terms]) -> None:
    def best(found: list[Offer]) -> dict[str, set[tuple[float, float]]]:
        seen: dict[str, set[tuple[float, float]]] = {}
        groups = sold_together(found)
        for one in chain.from_iterable(
            combinations_with_replacement(group, size) for group in groups for size in (1, 2)
        ):
            hazard = sum(member.interruptions_per_hour for member in one)
            cluster = Cluster(members=one)
            seen.setdefault(cluster.name, set()).add((cluster.usd_per_hour or 0.0, hazard))
        return seen

    every, asked = best(in_zones(zones)), best(without_beaten_zones(in_zones(zones)))
    assert every.keys() == asked.keys()
    for name, terms in every.items():
        for usd, hazard in terms:
            assert any(ours <= usd and risk <= hazard + 1e-12 for ours, risk in asked[name])
