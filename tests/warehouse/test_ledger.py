"""Promises to be judged, judgements, drift and alarms."""

from datetime import timedelta

import pandas as pd
import pytest

from tests.warehouse.builders import (
    NOON,
    ROWS,
    body,
    define,
    judgement,
    load,
    offered,
    recommendation,
    stamp,
    write,
)
from warehouse.append import append
from warehouse.publication import publish

HOUR, DAY = timedelta(hours=1), timedelta(days=1)


def measure(warehouse, run_id, at, **changes):
    define(warehouse)
    load(warehouse, body(run_id, ended_unix=at.timestamp(), **changes), at=at)


def test_a_question_is_judged_with_all_its_ranks_once_its_choice_was_measured(warehouse):
    small = {"cluster": "1xsmall", "batch_per_device": "16"}
    rival = recommendation(rank=2, cluster_offers=[offered("small", 1, 0.01)], **small)
    billed = recommendation(
        hours=2.0, usd=0.048, usd_machines=0.04, usd_storage=0.006, usd_other=0.002
    )
    publish(warehouse, [billed, rival, recommendation(goal="fastest", **small)], stamp(0))
    measure(warehouse, "before", NOON - HOUR)
    assert warehouse.select("promises").empty
    measure(warehouse, "after", NOON + HOUR)
    found = warehouse.select("promises")
    assert found[["goal", "rank"]].values.tolist() == [["cheapest", 1], ["cheapest", 2]]
    assert found["usd_per_hour"][0] == pytest.approx(0.024)  # with storage and addresses


def test_of_a_repeated_promise_the_last_before_the_run_is_judged(warehouse):
    for night in range(4):
        dearer = offered("small", 2, 0.01 * (night + 1))
        publish(warehouse, [recommendation(cluster_offers=[dearer])], stamp(night))
    measure(warehouse, "a run", NOON + 1.5 * DAY)
    [found] = warehouse.select("promises").to_dict("records")
    assert (found["publication_id"], found["usd_per_hour"]) == ("local-1", 0.04)
    assert found["promised_again_at"] == pd.Timestamp(NOON + 2 * DAY).tz_localize(None)


def test_interruptions_are_as_they_were_when_it_was_published(warehouse):
    offer = ROWS["offer"] | {"price_as_of": NOON}
    for snapshot, rate, at in (
        ("old", 9.0, NOON - DAY),
        ("then", 0.2, NOON - HOUR),
        ("later", 9.0, NOON + HOUR),
    ):
        rows = [
            offer | {"market": market, "interruptions_per_hour": rate}
            for market in ("spot", "on-demand")
        ]
        write(warehouse, append, "raw_offers", rows, snapshot_id=snapshot, as_of=at)
    safe = [offered("small", 2, 0.01) | {"market": "on-demand"}]
    publish(warehouse, [recommendation(), recommendation(rank=2, cluster_offers=safe)], stamp(0))
    measure(warehouse, "a run", NOON + 2 * HOUR)
    assert warehouse.select("promises")["interruptions_per_hour"].tolist() == [0.4, 0.0]


def test_the_judgement_with_most_evidence_counts(warehouse):
    rows = [
        judgement(),
        judgement(),
        judgement(evidence="e2", evidence_runs=5, regret=0.2),
        judgement(evidence="e3", evidence_runs=1, regret=0.9),
        judgement("p2"),
    ]
    for new in (4, 0):
        assert write(warehouse, append, "raw_ledger", rows, refresh_id="r", judged_at=NOON) == new
    assert sorted(warehouse.select("regret_ledger")["regret"]) == [0.1, 0.2]


def test_the_newest_judgement_of_a_group_says_whether_it_drifts(warehouse):
    times = {"since": NOON, "newest_measured_at": NOON, "judged_at": NOON}
    row = ROWS["drift"] | times | {"refresh_id": "r1"}
    large = row | {"instance_type": "large", "zone": ""}
    again = row | {"refresh_id": "r2", "judged_at": NOON + DAY, "drifting": False}

    def drifting(provider):
        return {
            *warehouse.select("drift", {"provider": provider, "drifting": True})["instance_type"]
        }

    write(warehouse, append, "raw_drift", [row, large])
    assert (drifting("local"), drifting("ec2")) == ({"large", "small"}, set())
    write(warehouse, append, "raw_drift", [again])
    assert drifting("local") == {"large"}


def test_an_alarm_stands_until_its_setup_is_measured_again(warehouse):
    measure(warehouse, "slow", NOON)
    row = ROWS["alarm"] | {"measured_at": NOON, "judged_at": NOON}
    write(warehouse, append, "raw_alarms", [row])
    assert warehouse.select("alarms").run_id.tolist() == ["slow"]
    measure(warehouse, "other", NOON + HOUR, precision="bf16")
    assert warehouse.select("alarms").run_id.tolist() == ["slow"]
    measure(warehouse, "again", NOON + HOUR)
    assert warehouse.select("alarms").empty
