"""What a person reads off a terminal: whole cells, unknown values said, no escape codes."""

from datetime import timedelta

import pytest

from tasks.reporting import tables as printing
from tests.installed import NOON
from tests.warehouse.builders import recommendation

DEADLINE = {"goal": "cheapest_within_deadline", "constraint_hours": 4.0}
NOTHING = {"cluster": None, "cluster_offers": [], "status": "infeasible", "reason": "too slow"}


def row(**changes):
    return {"provider": "local"} | recommendation(**changes)


@pytest.fixture
def printed(capsys):
    def shown(rows, *now):
        printing.print_recommendations(rows, *now)
        return capsys.readouterr().out

    return shown


def test_first_choices_rivals_and_reasons(printed):
    rows = [
        row(**DEADLINE),
        row(**DEADLINE, rank=2, cluster="1xbig+" * 20, usd=0.0000432, reason="it is dearer"),
        row(goal="fastest", **NOTHING),
    ]
    shown = printed(rows)
    assert "\x1b" not in shown and "illustrative" in shown
    assert shown.count("cheapest_within_deadline 4 h") == 1
    for word in (
        "tiny (local)",
        "2xsmall",
        "1xbig+" * 20,
        "0.000043",
        "infeasible",
        "too slow",
        "70%",
    ):
        assert word in shown, word
    assert "0.500 (0.400-0.600)" in shown


def test_doubtful_choices_and_devices_without_a_cluster_are_seen(printed):
    shown = printed([row(status="measure_first"), row(rank=2, device="T4", **NOTHING)])
    assert "measure_first" in shown and "T4" in shown
    assert "measure_first" not in printed([row()])


def test_sizing_is_printed(capsys):
    alike = {"instance_type": "small", "devices_each": 1, "global_batch": 64, "micro_batch": None}
    scaling = alike | {"largest_90": 3, "largest_80": 7, "needed_gbps": 2.5, "servers": 2}
    check = alike | {"size": 2, "step_s": 0.5, "efficiency": 0.9, "by_rule": 0.8}
    best = alike | {"batch": 32, "samples_per_s": 9.0, "largest_measured": 64}
    found = {"workload": "tiny", "provider": "local", "scaling": [scaling], "checks": [check]}
    printing.print_sizing(found | {"best_batch": [best], "notes": ["few runs"]})
    shown = capsys.readouterr().out
    for word in ("small", "at 90 %", "2.5", "90.0%", "samples/s", "few runs"):
        assert word in shown, word


def test_prices_have_their_age(printed):
    shown = printed([row(provider="ec2", usd_storage=0.1)], NOON + timedelta(days=630, minutes=1))
    assert "2026-11-20 12:00 UTC, 630 days old; usd" in shown and "illustrative" not in shown


def test_cautions_are_printed_once(printed):
    reason = "it costs least" + printing.as_caution("the model is off by 60%")
    shown = printed([row(reason=reason), row(goal="fastest", reason=reason)])
    assert shown.count("60%") == 1 and "caution" not in shown


def test_the_frontier_and_pilots(printed):
    run = {"kind": "train", "cluster": "2xs.large", "batch_per_device": "8", "usd": 0.004}
    run |= {"accumulation_steps": 2, "precision": "bf16"}
    run |= {"regret_after": 0.1}
    pilots = {"settled": False, "regret": 0.2, "runs": [run], "reason": ""}
    front = {"frontier": [row(p_meets_constraint=0.83)], "candidates": 9}
    shown = printed([row() | front | {"pilots": pilots}])
    assert "83%" in shown and "22.1%" in shown and "10.5%" in shown
    assert "2xs.large in bf16" in shown and "8 x2" in shown and "$0.004" in shown
