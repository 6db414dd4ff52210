"""Progress off and on a terminal; artifacts that hold no NaN."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from tasks.reporting import progress
from tasks.reporting.live_progress import LiveReporter, working
from tasks.reporting.progress import Reporter, reporter, reporting_to


def terminal():
    shown = io.StringIO()
    return Console(file=shown, force_terminal=True, width=120), shown


def test_off_a_terminal_only_finished_steps_are_lines(capsys):
    plain = Reporter()
    plain.start(3)
    plain.watch("2xa: train conv", 1, 0.1)
    plain.say("prices: 10 offers")
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "prices: 10 offers\n")


def test_the_bar_shows_runs_and_dollars_and_goes_away():
    console, shown = terminal()
    live = LiveReporter(console)
    with pytest.raises(KeyboardInterrupt), reporting_to(live):
        assert reporter() is live
        live.start(5)
        live.watch("2xa: train conv", 2, 0.1234)
        live.say("an [odd] word")
        raise KeyboardInterrupt
    for words in ("2xa: train conv", "2/5", "$0.1234", "an [odd] word"):
        assert words in shown.getvalue()
    live.watch("after the end", 5, None)
    assert "after the end" not in shown.getvalue() and type(reporter()) is Reporter


def test_a_long_answer_is_under_way_on_a_terminal_alone():
    console, shown = terminal()
    pipe = io.StringIO()
    for one in (console, Console(file=pipe)):
        with working("asking about conv", one):
            pass
    assert "asking about conv" in shown.getvalue() and pipe.getvalue() == ""


def test_artifacts_hold_the_table_without_nan_and_the_changes(monkeypatch):
    made = {}
    for kind, body in (("link", "link"), ("table", "table"), ("markdown", "markdown")):
        monkeypatch.setattr(
            f"prefect.artifacts.create_{kind}_artifact",
            lambda key, _body=body, **of: made.update({key: of[_body]}),
        )
    names = "workload goal rank status p_meets_constraint reason constraint_hours constraint_usd"
    choice = {"cluster": "2xa", "market": "spot", "hours": 1.25, "usd": float("nan")}
    row = dict.fromkeys(names.split()) | choice | {"hours": 1.23456789}
    before = {f"previous_{name}": value for name, value in choice.items()}
    change = row | choice | before | {"usd": 0.5, "change": "price", "cause": "prices"}
    gone = {"previous_cluster": None, "previous_status": None, "change": "goal"}
    progress.publish_artifacts([row], [change | gone, change], Path("/report.html"))
    assert made["recommendations"][0]["hours"] == 1.2346
    assert made["recommendations"][0]["usd"] is None and made["report"] == "file:///report.html"
    first, second = made["what-changed"].splitlines()[1:]
    assert "not in the table -> 2xa spot, 1.25 h, $0.5000" in first
    assert "price unknown -> 2xa spot" in second
    progress.publish_artifacts([], [], Path("/report.html"))
    assert "Nothing changed" in made["what-changed"]
