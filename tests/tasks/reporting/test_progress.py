"""Progress off and on a terminal; artifacts that hold no NaN."""

import io
from types import SimpleNamespace

import pytest

from tasks.reporting import progress
from tasks.reporting.progress import Reporter


@pytest.mark.parametrize("terminal", [False, True])
def test_the_current_step_is_shown_on_a_terminal_and_as_an_artifact(monkeypatch, terminal):
    written, percents = io.StringIO(), []
    written.isatty = lambda: terminal
    monkeypatch.setattr("sys.stderr", written)
    monkeypatch.setattr(progress, "_run_loggers", lambda: {"r": SimpleNamespace(info=print)})
    monkeypatch.setattr("prefect.artifacts.create_progress_artifact", lambda *_, **__: "id")
    monkeypatch.setattr(
        "prefect.artifacts.update_progress_artifact", lambda _, at: percents.append(at) or 1 / 0
    )
    plain = Reporter()
    plain.start(5)
    for done in (0, 2, 2):
        plain.watch("2xa: train conv", done, 0.1234)
    plain.say("prices: 10 offers")
    plain.stop()
    assert percents == [40.0]
    plain.finish()
    assert ("2/5 runs  $0.1234  2xa: train conv" in written.getvalue()) is terminal
    assert "prices: 10 offers\n" in written.getvalue() and percents == [40.0, 100.0]


def test_artifacts_hold_the_table_without_nan_and_the_changes(monkeypatch):
    made = {}
    for kind in ("table", "markdown"):
        monkeypatch.setattr(
            f"prefect.artifacts.create_{kind}_artifact",
            lambda body, key, **_: made.update({key: body}),
        )
    names = (
        "workload goal rank status cause constraint_hours constraint_usd"
        " previous_cluster previous_status"
    )
    choice = {"cluster": "2xa", "market": "spot", "hours": 1.23456789, "usd": float("nan")}
    row = dict.fromkeys(names.split()) | choice
    progress.publish_artifacts([row], [row | {"change": "goal"}])
    assert made["recommendations"][0]["hours"] == 1.2346
    assert made["recommendations"][0]["usd"] is None
    assert "not in the table -> 2xa spot, 1.23 h, price unknown" in made["what-changed"]
