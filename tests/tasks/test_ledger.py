"""Promises of a publication, judged by what was measured the next day: stored once, published, told by status."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pandas as pd
import pytest

from tasks import status
from tasks.installation import Installation
from tasks.ledger import judge_promises, ledger_sentence
from tasks.prices import snapshot_offers
from tasks.printing import print_status
from tasks.publish import export_copies, store_publication
from tasks.recommend import recommend_all
from tests.installed import NOON, champion, install, measured
from warehouse import reads
from warehouse.append import append_imports
from warehouse.reads import mart

DAY = timedelta(days=1)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Installation:
    made = install(tmp_path)
    snapshot_offers.fn(made, "refresh-1", NOON)  # how often spot machines are interrupted
    rows = recommend_all.fn(made, champion(), made.provider.offers(NOON), measured().runs)
    store_publication.fn(made, rows, champion(), "refresh-1", NOON)
    export_copies.fn(made)
    monkeypatch.setattr(status, "open_installation", lambda provider: made)
    return made


def measure(here: Installation, ranks: tuple[int, ...], times: float) -> dict[str, pd.DataFrame]:
    """What the ranks of every goal of conv took the next day: so many times what was promised."""
    table = mart(here.warehouse, "recommendations", workload="conv").query("rank in @ranks and cluster.notna()")
    named = table.drop_duplicates(["cluster", "batch_per_device", "accumulation_steps"])
    columns = ["workload", "cluster", "layout", "batch_per_device", "accumulation_steps", "strategy", "precision"]
    rows = []
    for number, row in enumerate(named.to_dict("records")):
        told = {name: row[name] for name in columns} | {"step_s": times * row["step_s"]}
        body = told | {"accumulation_steps": int(row["accumulation_steps"]), "measured_at": (NOON + DAY).isoformat()}
        rows.append({"identity": f"{ranks} {number}", "row_number": number, "provider": "local", "body": body})
    with here.warehouse.transact() as connection:
        append_imports(connection, rows, file_digest="d", loaded_at=NOON + DAY)
    return reads.training_frames(here.warehouse, "local")


def test_what_was_promised_and_measured_since_is_judged_once(here: Installation) -> None:
    nothing = reads.training_frames(here.warehouse, "local")
    assert judge_promises.fn(here, nothing, "refresh-2", NOON + DAY) == 0
    frames = measure(here, (1, 2, 3), 1.0)
    new = judge_promises.fn(here, frames, "refresh-2", NOON + DAY)
    assert new == 4, "conv has four goals"
    assert judge_promises.fn(here, frames, "refresh-3", NOON + 2 * DAY) == 0
    ledger = mart(here.warehouse, "regret_ledger")
    assert set(ledger["verdict"]) == {"compared"} and set(ledger["publication_id"]) == {"refresh-1"}
    assert ledger["measured_hours"].tolist() == pytest.approx(ledger["promised_hours"].tolist(), rel=1e-6)
    assert ledger["measured_usd"].tolist() == pytest.approx(ledger["promised_usd"].tolist(), rel=1e-6)
    assert ledger["regret"].max() < 0.01 and ledger["within_interval"].all()


def test_the_ledger_is_published_and_status_tells_of_it(here: Installation, capsys: pytest.CaptureFixture[str]) -> None:
    before = status.status_of("local")
    assert before["ledger"]["measured"] == 0 and before["ledger_sentence"] == ""
    frames = measure(here, (1,), 100.0)
    judge_promises.fn(here, frames, "refresh-2", NOON + DAY)
    export_copies.fn(here)
    told = status.status_of("local")
    assert told["ledger"]["failures"] == 2, "a deadline and a budget"
    print_status(told)
    shown = capsys.readouterr().out
    assert "4 published choices measured since, 0% within the promised interval" in shown
    assert "2 missed their constraint" in shown and "no rival of one that held was measured" in shown


def test_status_of_a_table_that_an_older_version_published_does_without(
    here: Installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("warehouse.export.has_relation", lambda connection, name: name == "recommendations")
    told = status.status_of("local")
    assert told["published"] is not None and told["ledger"]["measured"] == 0 and told["drift"] == []


def test_one_choice_is_one_choice() -> None:
    one = pd.DataFrame({"verdict": ["compared"], "regret": [0.02], "within_interval": [True]})
    assert ledger_sentence(one) == (
        "ledger: 1 published choice measured since, 100% within the promised interval; "
        "mean regret 2.0% over 1 compared with rivals; 0 missed their constraint"
    )
