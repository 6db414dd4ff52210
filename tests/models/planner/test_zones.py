"""Places that another beats are left out; the best cluster of every kind stays what it was."""

from __future__ import annotations

from datetime import UTC, datetime
from itertools import chain, combinations_with_replacement

from hypothesis import given
from hypothesis import strategies as st

from models.domain.cluster import Cluster, InstanceType, Offer
from models.planner.candidates import worth_asking
from models.planner.enumeration import sold_together

NOON = datetime(2026, 11, 20, 12, tzinfo=UTC)
Terms = dict[str, tuple[float | None, float]]


def kind(name: str) -> InstanceType:
    return InstanceType(
        name=name,
        provider="ec2",
        devices=1,
        device="T4",
        cores=4,
        memory_gib=16,
        device_memory_gib=16,
        bandwidth_gbps=5,
    )


def offers(places: dict[str, Terms], market: str = "spot") -> list[Offer]:
    return [
        Offer(
            instance_type=kind(name),
            market=market,
            zone=zone,
            region="here",
            usd_per_hour=usd,
            interruptions_per_hour=hazard,
            price_as_of=NOON,
        )
        for zone, terms in places.items()
        for name, (usd, hazard) in terms.items()
    ]


def zones(found: list[Offer]) -> set[str]:
    return {one.zone for one in found}


def test_a_place_that_another_beats_is_left_out_and_one_that_is_better_in_anything_stays() -> None:
    best: Terms = {"a": (1.0, 0.1), "b": (2.0, 0.1)}
    places = {
        "best": best,
        "dearer": {"a": (1.1, 0.1), "b": (2.0, 0.1)},
        "riskier": {"a": (1.0, 0.2), "b": (2.0, 0.1)},
        "poorer": {"a": (1.0, 0.1)},
        "unpriced": {"a": (None, 0.1), "b": (2.0, 0.1)},
        "safer": {"a": (1.5, 0.05)},
        "cheaper": {"b": (1.9, 0.3)},
        "wider": {"c": (9.0, 0.1)},
    }
    assert zones(worth_asking(offers(places))) == {"best", "safer", "cheaper", "wider"}


def test_of_equal_places_the_first_by_name_stays_and_markets_are_never_compared() -> None:
    same: dict[str, Terms] = {"z": {"a": (1.0, 0.1)}, "m": {"a": (1.0, 0.1)}}
    assert zones(worth_asking(offers(same))) == {"m"}
    both = worth_asking(offers(same) + offers({"k": {"a": (0.5, 0.0)}}, market="on-demand"))
    assert zones(both) == {"m", "k"}
    assert zones(worth_asking(offers({"x": {"a": (None, 0.1)}}))) == {"x"}, "unpriced machines are still the fastest"


def test_of_too_many_places_those_stay_that_are_the_cheapest_for_most_types() -> None:
    one_each: dict[str, Terms] = {f"z{n}": {"a": (1.0 + n, 0.9 - n / 10), "b": (2.0, 0.5)} for n in range(5)}
    one_each["z3"]["c"] = (1.0, 0.0)
    one_each["z3"]["d"] = (1.0, 0.0)
    kept = [(one.zone, one.instance_type.name) for one in worth_asking(offers(one_each), most=1)]
    assert kept == [("z0", "a"), ("z0", "b"), ("z3", "c"), ("z3", "d")], "nothing is lost that costs least somewhere"


@given(
    st.dictionaries(
        st.sampled_from("pqrs"),
        st.dictionaries(
            st.sampled_from("abc"), st.tuples(st.sampled_from([1.0, 2.0, 3.0]), st.sampled_from([0.1, 0.2])), min_size=1
        ),
        min_size=1,
    )
)
def test_no_cluster_is_dearer_or_riskier_than_before(places: dict[str, Terms]) -> None:
    def best(found: list[Offer]) -> dict[str, set[tuple[float, float]]]:
        seen: dict[str, set[tuple[float, float]]] = {}
        members = chain.from_iterable(
            combinations_with_replacement(group, size) for group in sold_together(found) for size in (1, 2)
        )
        for cluster in (Cluster(members=one) for one in members):
            hazard = sum(member.interruptions_per_hour for member in cluster.members)
            seen.setdefault(cluster.name, set()).add((cluster.usd_per_hour or 0.0, hazard))
        return seen

    every = best(offers(places))
    kept = best(worth_asking(offers(places)))
    assert every.keys() == kept.keys()
    for name, terms in every.items():
        for usd, hazard in terms:
            assert any(ours <= usd and risk <= hazard + 1e-12 for ours, risk in kept[name])
