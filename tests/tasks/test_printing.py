"""What a person reads where there is no terminal: no escape codes, no cut words, unknown said as unknown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from models.campaign import Launch
from models.cloud import Cluster
from tasks import printing
from tasks.recommend import recommend_all
from tests.installed import NOON, DescribedMachines, champion, install, measured


@pytest.fixture
def rows(tmp_path: Path) -> list[dict[str, Any]]:
    here = install(tmp_path, "conv", "newcomer", provider=DescribedMachines(unpriced=frozenset({"s.whole"})))
    return recommend_all.fn(here, champion(), here.provider.offers(NOON), measured().runs)


def test_the_table_in_plain_text(rows: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]) -> None:
    printing.print_recommendations(rows)
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert "prices are illustrative" in shown
    for words in ("conv (local)", "newcomer (local)", "cheapest_within_deadline 4 h", "fastest_within_budget $0.3"):
        assert words in shown
    for row in rows:
        assert row["cluster"] is None or row["cluster"] in shown
    assert any(row["usd"] is None and row["cluster"] for row in rows) and "unknown" in shown
    infeasible = next(row for row in rows if row["status"] == "infeasible")
    assert "infeasible" in shown and infeasible["reason"].split()[0] in shown


def test_each_goal_is_named_once_and_its_rivals_stand_below_it(
    rows: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    conv = [row for row in rows if row["workload"] == "conv"]
    printing.print_recommendations(conv)
    assert capsys.readouterr().out.count("cheapest_within_deadline") == 1
    printing.print_recommendations([row | {"provider": "ec2"} for row in conv])
    shown = capsys.readouterr().out
    assert "illustrative" not in shown and "prices as of 2026-11-20 12:00 UTC" in shown


def test_a_long_cluster_is_folded_and_a_reason_of_every_goal_told_once(
    rows: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    conv = [row for row in rows if row["workload"] == "conv" and row["cluster"]]
    printing.print_recommendations([row | {"cluster": "1xg4dn.12xlarge+" * 9 + "2xlast.one"} for row in conv])
    assert "\u2026" not in capsys.readouterr().out
    nothing = [row | {"cluster": None, "status": "infeasible", "reason": "nothing is known of it"} for row in conv]
    printing.print_recommendations(nothing)
    assert capsys.readouterr().out.count("nothing is known of it") == 1


def test_a_dry_run_in_plain_text_adds_up_and_says_that_nothing_started(capsys: pytest.CaptureFixture[str]) -> None:
    offer = DescribedMachines().offers(NOON)[0]
    launches = [Launch(cluster=Cluster.of((2, offer)), items=(), est_s=10.0, est_usd=0.25, reason="two [profiles]")] * 2
    printing.print_launches(launches)
    shown = capsys.readouterr().out
    assert "2xs.small" in shown and "two [profiles]" in shown
    assert "2 launches, about 20 s and $0.5000; nothing was started" in shown
    assert [row["cluster"] for row in printing.launches_as_rows(launches)] == ["2xs.small"] * 2
