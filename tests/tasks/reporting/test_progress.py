"""Progress off and on a terminal; artifacts that hold no NaN."""

import io
from pathlib import Path
from types import SimpleNamespace

import pytest

from tasks.reporting import progress
from tasks.reporting.progress import Reporter


@pytest.mark.parametrize(("terminal", "shown"), [(False, False), (True, True)])
def test_the_current_step_is_shown_on_a_terminal_alone(monkeypatch, terminal, shown):
    written = io.StringIO()
    written.isatty = lambda: terminal
    monkeypatch.setattr("sys.stderr", written)
    plain = Reporter()
    plain.start(5)
    plain.watch("2xa: train conv", 2, 0.1234)
    plain.say("prices: 10 offers")
    plain.stop()
    assert ("2/5 runs  $0.1234  2xa: train conv" in written.getvalue()) is shown
    assert "prices: 10 offers\n" in written.getvalue() and ("\x1b" in written.getvalue()) is shown


def test_a_line_goes_once_to_the_run_and_once_to_the_scheduled_run(monkeypatch):
    lines, runs = [], ["refresh", "refresh", "measure"]

    def logger():
        run = runs.pop(0)
        extra = {"flow_run_id": run}
        return SimpleNamespace(extra=extra, info=lambda text: lines.append((run, text)))

    monkeypatch.setattr(progress, "_STORY", [])
    monkeypatch.setattr("prefect.logging.get_run_logger", logger)
    progress.tell_all()
    for text in "ab":
        progress.log_to_run(text)
    assert lines == [("refresh", "a"), ("refresh", "b"), ("measure", "b")]


def test_a_flow_has_its_progress_as_an_artifact(monkeypatch):
    shown = []
    monkeypatch.setattr(progress, "_run_loggers", lambda: {"run": None})
    monkeypatch.setattr("prefect.artifacts.create_progress_artifact", lambda *_, **__: "id")
    monkeypatch.setattr(
        "prefect.artifacts.update_progress_artifact", lambda *of: shown.append(of) or 1 / 0
    )
    reporter = Reporter()
    reporter.start(4)
    for done in (0, 1, 1, 3):
        reporter.watch("", done, None)
    reporter.stop()
    assert shown == [("id", 25.0), ("id", 75.0), ("id", 100.0)]


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
