"""What a person reads where there is no terminal: no escape codes, no cut words, unknown said as unknown."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from models.campaign.campaign import PlannedLaunch
from models.domain.cluster import Cluster
from tasks.recommendation.recommend import recommend_all
from tasks.reporting import tables as printing
from tests.installed import NOON, DescribedMachines, champion, install, measured, scores

Rows = list[dict[str, Any]]
Printed = Callable[..., str]


@pytest.fixture
def rows(tmp_path: Path) -> Rows:
    here = install(
        tmp_path,
        "conv",
        "new_workload",
        provider=DescribedMachines(unpriced=frozenset({"s.whole"})),
    )
    return recommend_all(here, champion(), here.provider.offers(NOON), measured().runs)


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str]) -> Printed:
    def shown(rows: Rows, *now: datetime) -> str:
        printing.print_recommendations(rows, *now)
        return capsys.readouterr().out

    return shown


def test_the_table_in_plain_text(rows: Rows, printed: Printed) -> None:
    shown = printed(rows)
    assert "\x1b" not in shown
    assert "prices are illustrative" in shown
    for words in (
        "conv (local)",
        "new_workload (local)",
        "cheapest_within_deadline 4 h",
        "fastest_within_budget $0.3",
    ):
        assert words in shown
    for row in rows:
        assert row["cluster"] is None or row["cluster"] in shown
    assert any(row["usd"] is None and row["cluster"] for row in rows) and "unknown" in shown
    infeasible = next(row for row in rows if row["status"] == "infeasible")
    assert "infeasible" in shown and infeasible["reason"].split()[0] in shown


def test_a_workload_of_which_nothing_can_be_said_takes_a_line_and_no_table(
    rows: Rows, printed: Printed
) -> None:
    said = {"cluster": None, "status": "infeasible", "reason": "nothing is known of it"}
    several = [row | said for row in rows if row["workload"] == "conv" and row["rank"] == 1]
    shown = printed(several)
    assert len(several) > 1 and shown.count("infeasible") == 1 and "limited by" not in shown
    assert "limited by" in printed([several[0], several[1] | {"reason": "it is too slow"}]), (
        "goals that fail for reasons of their own"
    )


@pytest.mark.parametrize(("days", "old"), [(6, ""), (630, ", 630 days old")])
def test_old_prices_are_said_with_their_age(
    rows: Rows, printed: Printed, days: int, old: str
) -> None:
    assert f"prices as of 2026-11-20 12:00 UTC{old}\n" in printed(
        [row | {"provider": "ec2"} for row in rows], NOON + timedelta(days=days, minutes=1)
    )


def test_a_model_with_a_large_error_and_missing_prices_are_printed_once_above_all_answers(
    tmp_path: Path, printed: Printed
) -> None:
    few = DescribedMachines(unpriced=frozenset({"s.whole", "s.large"}))
    here, offers = install(tmp_path, "conv", "lm", provider=few), few.offers(NOON)
    doubtful = replace(champion(), scoreboard=scores(0.599))
    rows = recommend_all(here, doubtful, offers, measured().runs)
    firsts = [row for row in rows if row["rank"] == 1]
    assert len(firsts) > 4 and all("59.9%" in row["reason"] for row in firsts)
    assert not [row for row in rows if row["rank"] > 1 and "caution" in row["reason"]]
    shown = " ".join(printed(rows).split())
    assert shown.count("note: model version 3: mean error 59.9%") == 1
    assert shown.count("note: 2 of 5 instance types on offer have no known price") == 1
    assert shown.count("59.9%") == 1 and "caution" not in shown
    sure = recommend_all(
        here, replace(champion(), scoreboard=scores(0.05)), offers[4:], measured().runs
    )
    assert not [row for row in sure if "mean error" in row["reason"]]


def test_each_goal_is_named_once_and_its_rivals_stand_below_it(
    rows: Rows, printed: Printed
) -> None:
    conv = [row for row in rows if row["workload"] == "conv"]
    assert printed(conv).count("cheapest_within_deadline") == 1
    shown = printed([row | {"provider": "ec2"} for row in conv])
    assert "illustrative" not in shown and "prices as of 2026-11-20 12:00 UTC" in shown


def test_a_long_cluster_is_folded_and_a_reason_of_every_goal_printed_once(
    rows: Rows, printed: Printed
) -> None:
    conv = [row for row in rows if row["workload"] == "conv" and row["cluster"]]
    assert "\u2026" not in printed(
        [row | {"cluster": "1xg4dn.12xlarge+" * 9 + "2xlast.one"} for row in conv]
    )
    nothing = [
        row | {"cluster": None, "status": "infeasible", "reason": "nothing is known of it"}
        for row in conv
    ]
    assert printed(nothing).count("nothing is known of it") == 1


def test_a_dry_run_in_plain_text_adds_up_and_says_that_nothing_started(
    capsys: pytest.CaptureFixture[str],
) -> None:
    offer = DescribedMachines().offers(NOON)[0]
    launches = [
        PlannedLaunch(
            cluster=Cluster.of((2, offer)),
            items=(),
            est_s=10.0,
            est_usd=0.25,
            reason="two [profiles]",
        )
    ] * 2
    printing.print_launches(launches)
    shown = capsys.readouterr().out
    assert "2xs.small" in shown and "two [profiles]" in shown
    assert "2 launches, about 20 s and $0.5000; nothing was started" in shown
    assert [row["cluster"] for row in printing.launches_as_rows(launches)] == ["2xs.small"] * 2


def test_the_risk_stands_beside_spot_alone_and_only_where_there_is_any(
    rows: Rows, printed: Printed
) -> None:
    spot = [row for row in rows if row["market"] == "spot"]
    safe = [row for row in rows if row["market"] == "on-demand"]
    assert spot and safe
    sourced = [
        row | {"interruption_source": row["market"] == "spot" and "Spot Advisor"} for row in rows
    ]
    shown = printed([row | {"provider": "ec2"} for row in sourced])
    assert "risk" in shown and f"{spot[0]['interruption_risk']:.0%}" in shown
    assert shown.count("by Spot Advisor") == 1, "once a workload with an answer"
    assert "risk" not in printed(safe)


def test_the_mode_stands_in_the_table_where_one_is_other_than_plain_fp32(
    rows: Rows, printed: Printed
) -> None:
    assert " mode " not in printed(rows)
    shown = printed([rows[0] | {"precision": "bf16", "strategy": "fsdp"}, *rows[1:]])
    assert " mode " in shown and shown.count("bf16 fsdp") == 1 and "fp32" in shown
    front = [
        {"cluster": "1xs.large", "market": "spot", "hours": 1.0, "usd": 2.0, "precision": "bf16"}
    ]
    assert "1xs.large in bf16" in printed([rows[0] | {"frontier": front, "candidates": 1}])


def test_a_table_that_was_published_before_risks_were_is_printed_as_it_was(
    rows: Rows, printed: Printed
) -> None:
    new = (
        "market",
        "usd_machines",
        "usd_storage",
        "usd_other",
        "interruption_risk",
        "expected_interruptions",
    )
    new += ("interruption_source", "placement_score")
    shown = printed([{key: row[key] for key in row if key not in new} for row in rows])
    assert "risk" not in shown and " spot " in shown and " on-demand " in shown


def test_a_bill_with_volumes_in_it_is_said_to_have_them(rows: Rows, printed: Printed) -> None:
    billed = [row | {"provider": "ec2", "usd_storage": row["cluster"] and 0.1} for row in rows]
    assert "usd has volumes, public addresses and requests in it" in printed(billed)
    assert "volumes" not in printed(rows)


def test_cheap_and_short_jobs_keep_digits_that_count(rows: Rows, printed: Printed) -> None:
    row = next(row for row in rows if row["workload"] == "conv" and row["cluster"])
    tiny = {
        "step_s": 0.00172,
        "step_low_s": 0.00123,
        "step_high_s": 0.00241,
        "hours": 0.0021,
        "usd": 0.0000432,
    }
    shown = printed([row | tiny | {"reason": "so it is"}])
    assert "0.0017 (0.0012-0.0024)" in shown and "0.000043" in shown and "e-0" not in shown
    assert "p ok: chance" in shown, "what the columns mean"


def test_the_frontier_says_how_likely_each_keeps_to_the_limit_and_pilots_how_sure_one_then_is(
    rows: Rows, printed: Printed
) -> None:
    row = next(row for row in rows if row["goal"] == "cheapest_within_deadline" and row["cluster"])
    front = row | {"p_meets_constraint": 0.83}
    run = {
        "kind": "train", "cluster": "2xs.large", "layout": "1", "market": "spot", "batch_per_device": "8",
        "accumulation_steps": 1, "seconds": 70.0, "usd": 0.004, "regret_after": 0.1, "assured_after": 0.64,
    }  # fmt: skip
    none = {
        "cluster": None,
        "status": "infeasible",
        "p_required": 0.9,
        "reason": "none is sure enough",
    }
    pilots = {"settled": False, "regret": 0.2, "runs": [run], "reason": ""}
    shown = printed([row | none | {"frontier": [front], "candidates": 9, "pilots": pilots}])
    assert "83%" in shown and "less than the 90% required" in shown
    assert shown.split("90% required")[1].splitlines()[1].split()[-2:] == ["p", "ok"], (
        "the frontier's own column"
    )
    assert "chance one is sure then" in shown and "64%" in shown
    run["assured_after"] = None
    shown = printed([row | {"frontier": [], "candidates": 9, "pilots": pilots}])
    assert (
        "expected regret after" in shown
        and "exceeding the deadline counts too" in shown
        and "is sure then" not in shown
    )
