"""Progress: plain lines off a terminal, a bar on one that goes away; artifacts that hold no NaN."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tasks.reporting import progress as report
from tasks.reporting.progress import (
    LiveReporter,
    Reporter,
    reporter,
    reporting_to,
    seconds_listed,
    working,
)


def terminal() -> tuple[Console, io.StringIO]:
    shown = io.StringIO()
    return Console(file=shown, force_terminal=True, width=120), shown


def test_off_a_terminal_only_finished_steps_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    plain = Reporter()
    plain.start(3)
    plain.watch("2xa: train conv", 1, 0.1)
    plain.say("prices: 10 offers")
    plain.stop()
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "prices: 10 offers\n")


def test_on_a_terminal_the_bar_says_what_runs_how_much_is_left_and_what_it_cost() -> None:
    console, shown = terminal()
    live = LiveReporter(console)
    live.start(5)
    live.watch("2xa: train conv", 2, 0.1234)
    live.say("an [odd] word")
    live.stop()
    for words in ("2xa: train conv", "2/5", "$0.1234", "an [odd] word"):
        assert words in shown.getvalue()
    live.watch("after the end", 5, None)
    assert "after the end" not in shown.getvalue() and "price unknown" not in shown.getvalue()
    live.start(1)
    live.watch("1xa", 0, None)
    live.stop()
    assert "price unknown" in shown.getvalue()


def test_the_bar_goes_away_whatever_happens() -> None:
    console, _ = terminal()
    live = LiveReporter(console)
    with pytest.raises(KeyboardInterrupt), reporting_to(live):
        assert reporter() is live
        live.start(1)
        raise KeyboardInterrupt
    assert live._bar is None
    assert type(reporter()) is Reporter


def test_seconds_are_listed_longest_first() -> None:
    assert seconds_listed({"load": 0.25, "measure": 100.0}) == "measure 100.0 s, load 0.2 s"


@pytest.fixture
def artifacts(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    made: dict[str, Any] = {}
    monkeypatch.setattr("prefect.artifacts.create_link_artifact", lambda **_: None)
    monkeypatch.setattr(
        "prefect.artifacts.create_table_artifact", lambda key, table: made.update({key: table})
    )
    monkeypatch.setattr(
        "prefect.artifacts.create_markdown_artifact",
        lambda key, markdown: made.update({key: markdown}),
    )
    return made


ROW = dict.fromkeys(
    (
        "workload",
        "goal",
        "rank",
        "status",
        "cluster",
        "hours",
        "usd",
        "p_meets_constraint",
        "reason",
        "market",
    )
)


def test_artifacts_hold_the_table_without_nan_and_what_changed(artifacts: dict[str, Any]) -> None:
    row = ROW | {"workload": "conv", "rank": 1, "hours": 1.23456789, "usd": float("nan")}
    nan = float("nan")
    change: dict[str, Any] = {
        "workload": "conv",
        "goal": "cheapest_within_deadline",
        "constraint_hours": 1.5,
    }
    change |= {
        "status": "recommended",
        "cluster": "2xa",
        "hours": 1.25,
        "usd": nan,
        "constraint_usd": nan,
        "market": "spot",
    }
    change |= dict.fromkeys(
        ("previous_status", "previous_cluster", "previous_usd", "previous_market")
    )
    change |= {"previous_hours": nan, "change": "goal", "cause": "measurements"}
    cheaper = change | {
        "goal": "cheapest",
        "constraint_hours": None,
        "change": "price",
        "cause": "prices",
        "usd": 0.5,
    }
    cheaper |= {
        "previous_cluster": "2xa",
        "previous_hours": 1.25,
        "previous_usd": 1.0,
        "previous_market": "spot",
    }
    report.publish_artifacts([row], [cheaper, change], Path("/report.html"))
    (shown,) = artifacts["recommendations"]
    assert shown["hours"] == 1.2346 and shown["usd"] is None and shown["rank"] == 1
    assert artifacts["what-changed"].splitlines()[
        1:
    ] == [  # another choice comes before another price
        "- conv, cheapest_within_deadline 1.5: goal: not in the table -> 2xa spot, 1.25 h, price unknown"
        " (measurements)",
        "- conv, cheapest: price: 2xa spot, 1.25 h, $1.0000 -> 2xa spot, 1.25 h, $0.5000 (prices)",
    ]


def test_no_change_is_said_too(artifacts: dict[str, Any]) -> None:
    report.publish_artifacts([], [], Path("/report.html"))
    assert "Nothing changed" in artifacts["what-changed"]


def test_a_long_answer_shows_on_a_terminal_that_it_is_under_way_and_leaves_a_pipe_alone() -> None:
    console, shown = terminal()
    with working("asking about conv", console):
        pass
    assert "asking about conv" in shown.getvalue()
    pipe = io.StringIO()
    with working("asking about conv", Console(file=pipe)):
        pass
    assert pipe.getvalue() == ""
