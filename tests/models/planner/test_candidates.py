"""Candidates divide the batch exactly, fit memory and can be had; beaten zones are left out."""

from models.planner import candidates
from models.planner.candidates import Supply, without_beaten_zones
from models.planner.enumeration import compositions
from models.planner.planner import allowed_candidates
from tests.models.planning import (
    LineModel,
    cores_fit,
    offer,
    offers,
    workload,
)

MODEL = LineModel()


def test_setups_come_by_price_and_all_can_be_had():
    sold = [*offers(), offer("small", usd_per_hour=None, zone="other")]
    supply = Supply(offers=sold, max_hosts=3, fits=cores_fit)
    found = allowed_candidates(workload("mlp", 64, 128), supply, MODEL)
    listed = list(found.setups(found.by_price(), cores_fit))
    prices = [setup.cluster.total_usd_per_hour for setup in listed]
    known = [round(usd, 9) for usd in prices if usd is not None]
    assert known == sorted(known) and prices[len(known) :] == [None] * (len(prices) - len(known))
    assert not any(cores_fit(setup.cluster) for setup in listed)


def test_few_clusters_are_all_enumerated_and_many_by_ladders():
    every = compositions(3, max_hosts=4)
    assert len({tuple(row) for row in every.tolist()}) == len(every) == 3 + 6 + 10 + 15
    same = compositions(40, max_hosts=4, most_mixed=0)
    assert len(same) == 160 and ((same > 0).sum(axis=1) == 1).all()
    pairs = compositions(2, max_hosts=64, most=600)  # no cluster has three types
    assert len(pairs) > 128 and (pairs.sum(axis=1) <= 64).all()
    mixed = compositions(10, max_hosts=64)
    assert len({tuple(row) for row in mixed.tolist()}) == len(mixed)
    assert (mixed > 0).sum(axis=1).max() == 3 and mixed.sum(axis=1).max() == 64
    alone = mixed[(mixed > 0).sum(axis=1) == 1].max(axis=1)
    assert sorted(alone.tolist()) == sorted([*range(1, 65)] * 10)
    for types in (12, 60):
        counts = compositions(types, max_hosts=64)
        assert len(counts) <= 50_000 and (counts > 0).sum(axis=1).max() >= 2


def in_zones(zones, market="spot"):
    return [
        offer(name, market, zone=zone, usd_per_hour=usd, interruptions_per_hour=hazard)
        for zone, terms in zones.items()
        for name, (usd, hazard) in terms.items()
    ]


def test_a_beaten_zone_is_left_out():
    zones = {
        "best": {"small": (1.0, 0.1), "net": (2.0, 0.1)},
        "dearer": {"small": (1.1, 0.1), "net": (2.0, 0.1)},
        "riskier": {"small": (1.0, 0.2), "net": (2.0, 0.1)},
        "unpriced": {"small": (None, 0.1), "net": (2.0, 0.1)},
        "cheaper": {"net": (1.9, 0.3)},
    }
    kept = {zone.zone for zone in without_beaten_zones(in_zones(zones))}
    assert kept == {"best", "cheaper"}
    same = {"z": {"small": (1.0, 0.1)}, "m": {"small": (1.0, 0.1)}}
    other = in_zones({"k": {"small": (0.5, 0.0)}}, "on-demand")
    assert {zone.zone for zone in without_beaten_zones(in_zones(same) + other)} == {"m", "k"}


def test_of_too_many_zones_the_cheapest_for_most_types_stay(monkeypatch):
    monkeypatch.setattr(candidates, "MOST_ZONES", 1)
    zones = {f"z{n}": {"small": (1.0 + n, 0.9 - n / 10), "net": (2.0, 0.5)} for n in range(5)}
    zones["z3"] |= {"large": (1.0, 0.0), "whole": (1.0, 0.0)}
    kept = without_beaten_zones(in_zones(zones))
    found = [(offer.zone, offer.instance_type.name) for offer in kept]
    assert found == [("z0", "small"), ("z0", "net"), ("z3", "large"), ("z3", "whole")]
