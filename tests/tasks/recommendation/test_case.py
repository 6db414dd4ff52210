"""Rows for every goal of every workload, from the champion or with the reason why there is none."""

from dataclasses import dataclass, field, replace
from datetime import timedelta

import pytest

from models.domain.workload import Mode
from tasks.market.job_conditions import experience_of
from tasks.providers.base import ProviderError
from tasks.recommendation import table
from tasks.recommendation.case import Case, supply_of, with_usual_goals
from tasks.recommendation.table import recommend_all
from tests.installed import NOON, DescribedMachines, champion, changed, install, measured
from warehouse.append import append

REGIONS = ["us-east-1", "eu-west-1"]
GOALS = ["cheapest_within_deadline", "fastest_within_budget", "cheapest", "fastest"]


def rows_of(here, offers=None, model=None):
    sold = here.provider.offers(NOON) if offers is None else offers
    return recommend_all(here, model, sold, measured().runs)


def case_of(here, offers=None, **changes):
    """The case of conv, its definition changed so."""
    conv = replace(with_usual_goals(here.workloads[0]), **changes)
    sold = here.provider.offers(NOON) if offers is None else offers
    return Case.of(here, champion(), conv, sold, measured().runs)


def test_every_goal_of_every_workload_has_a_row(here):
    rows = rows_of(here, model=champion(7))
    firsts = {(row["workload"], row["goal"]): row["status"] for row in rows if row["rank"] == 1}
    questions = [(workload, goal) for workload in ("conv", "lm") for goal in GOALS]
    assert list(firsts) == questions
    assert firsts["conv", "fastest"] == firsts["lm", "fastest"] == "recommended"
    assert {row["model_version"] for row in rows} == {"7"}
    ages = {row[name] for row in rows for name in ("price_as_of", "newest_measurement_at")}
    assert ages == {NOON}
    bare = rows_of(here)
    assert [(row["workload"], row["goal"]) for row in bare] == questions
    for row in bare:
        assert row["status"] == "unknown" and row["reason"] and "offers" not in row
        assert (row["cluster"], row["usd"], row["model_version"]) == (None, None, None)


def test_the_choice_is_among_tolerated_and_measured_precisions(here):
    def rows(*precisions, **facts):
        modes = tuple(map(Mode, precisions))
        return case_of(here, modes=modes, **facts).plan().rows

    best = [row for row in rows("fp32", "fp16") if row["rank"] == 1]
    assert {row["precision"] for row in best} == {"fp32"}
    assert all("fp16" in row["reason"] for row in best)
    for facts in ({}, {"flops_per_sample": 1e9}):  # no other precision stands in
        assert {row["status"] for row in rows("fp16", **facts)} == {"unknown"}


def test_types_that_the_champion_does_not_know_are_not_guessed(here):
    offers = here.provider.offers(NOON)
    kind = replace(offers[0].instance_type, name="x.new")
    stranger = [replace(offers[0], usd_per_hour=1e-6, instance_type=kind)]
    rows = rows_of(here, stranger + offers, model=champion())
    assert not any("x.new" in row["cluster"] for row in rows if row["cluster"])
    assert {row["status"] for row in rows_of(here, stranger, model=champion())} == {"unknown"}
    small = replace(offers[0].instance_type, bandwidth_gbps=9.0)
    redefined = [
        replace(offer, instance_type=small, usd_per_hour=1e-6)
        if offer.instance_type.name == small.name
        else offer
        for offer in offers
    ]
    rows = case_of(here, redefined).plan().rows
    assert rows[0]["status"] == "recommended"
    assert not any(small.name in row["cluster"] for row in rows if row["cluster"])


def test_the_reason_names_a_command_that_spends_money_only_if_machines_can_be_launched(tmp_path):
    bare = install(tmp_path, "conv", provider=DescribedMachines(name="ec2"))
    able = changed(bare, "ec2", bucket="mine-1")
    for here, spends in ((able, True), (bare, False)):
        for row in rows_of(here):
            assert ("--max-usd 25" in row["reason"]) is spends
            assert ("srift import" in row["reason"]) is not spends


@dataclass
class Scored(DescribedMachines):
    """Machines with a placement score; after `patience` questions nobody answers."""

    patience: int = 1000
    requests: list = field(default_factory=list)

    def placement_scores(self, region, names, count):
        self.requests.append((region, tuple(names), count))
        if len(self.requests) > self.patience:
            raise ProviderError("too many different questions")
        return {"a": 10 - count, "b": 1}


def test_each_row_on_spot_has_the_score_of_its_request_asked_once(tmp_path):
    machines = Scored()
    rows = rows_of(install(tmp_path, provider=machines), model=champion())
    for row in rows:
        spot = [offer for offer in row["cluster_offers"] or () if offer["market"] == "spot"]
        single = len({pool["instance_type"] for pool in spot}) == 1
        count = sum(pool["count"] for pool in spot)
        assert row["placement_score"] == (10 - count if single else None)
    assert len(machines.requests) == len(set(machines.requests)) <= table.MOST_SCORES


def test_a_row_states_the_source_of_its_risk_and_of_a_price_that_is_not_public(here):
    offers = [
        replace(offer, interruption_source="Spot Advisor", price_note="own", price_source="guess")
        for offer in here.provider.offers(NOON)
    ]
    case = case_of(here, offers)
    known = replace(case.experience, interruptions={"s.large": "own launches"})
    sources = {True: set(), False: set()}
    for row in replace(case, experience=known).plan(top=40).rows:
        types = {
            offer["instance_type"] for offer in row["cluster_offers"] if offer["market"] == "spot"
        }
        assert {"own", "guess"} <= set(row["reason"].split("; "))
        assert (row["interruption_source"] is None) == (not types)
        if len(types) == 1:
            sources["s.large" in types].add(row["interruption_source"])
    assert sources == {True: {"own launches"}, False: {"Spot Advisor"}}


def test_a_strategy_without_proof_of_learning_is_vetoed(here):
    sparse = Mode(strategy="ddp-mstopk")
    case = case_of(here, modes=(Mode(), sparse))
    supply = supply_of(here, case.workload, case.known, case.experience)
    assert list(supply.vetoes) == [sparse]


def test_downloads_from_another_region_are_part_of_the_dollars(tmp_path):
    here = install(tmp_path, provider=DescribedMachines(name="ec2"))
    conv = here.workloads[0]
    row = {"workload": "conv", "workload_digest": conv.digest}
    row |= {"bytes": 200e9, "files": 1000}
    for hour, region in enumerate(("us-east-1", "eu-west-1", "us-east-1")):  # the last counts
        at = NOON + timedelta(hours=hour)
        with here.warehouse.transact() as connection:
            append(connection, "raw_downloads", [row | {"region": region, "planned_at": at}])
    offers = [replace(offer, region=at) for offer in here.provider.offers(NOON) for at in REGIONS]
    experience = experience_of(here)
    supply = supply_of(here, conv, offers, experience)
    # at the same price the other region is dearer, since it downloads
    assert {offer.region for offer in supply.offers} == {"us-east-1"}
    dearer = [
        replace(offer, usd_per_hour=2.0) if offer.region == "us-east-1" else offer
        for offer in offers
    ]
    supply = supply_of(here, conv, dearer, experience)
    usd = {offer.region: offer.start_usd for offer in supply.offers}
    assert usd["us-east-1"] < 0.1
    assert usd["eu-west-1"] == pytest.approx(200 * 0.02 + usd["us-east-1"])


@pytest.mark.parametrize(("patience", "most", "requests"), [(1, 20, 2), (1000, 1, 1)])
def test_without_more_scores_the_others_stay_unknown(
    tmp_path, monkeypatch, patience, most, requests
):
    monkeypatch.setattr(table, "MOST_SCORES", most)
    machines = Scored(patience=patience)
    rows = rows_of(install(tmp_path, provider=machines), model=champion())
    assert len(machines.requests) == requests
    assert {row["placement_score"] for row in rows} > {None}


def test_doubtful_choices_say_what_to_measure_where_that_costs_money(here, monkeypatch):
    monkeypatch.setattr("tasks.recommendation.pilots._UNSURE", 0.0)
    monkeypatch.setattr("tasks.recommendation.pilots._DOUBTFUL", 2.0)
    for spends in (True, False):
        monkeypatch.setattr(table, "spends_money", lambda name, spends=spends: spends)
        rows = rows_of(here, model=champion())
        doubtful = [row for row in rows if row["status"] == "measure_first"]
        assert bool(doubtful) is spends
        assert all(row["rank"] == 1 and " first: " in row["reason"] for row in doubtful)
