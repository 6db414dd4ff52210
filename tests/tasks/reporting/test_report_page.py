"""The report page of a real publication, as a person meets it in a real browser, with the network, the mouse or a
screen reader missing; and what a publication does when it cannot be drawn."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect, sync_playwright

from tasks.market import offers as prices
from tasks.recommendation.publication import export_copies, store_publication
from tasks.recommendation.recommend import recommend_all
from tasks.reporting import report_page
from tasks.reporting.progress import Reporter, reporting_to
from tasks.workspace.workspace import Workspace
from tests.flows.visitors import CHROMIUM, QUIET
from tests.installed import NOON, champion, install, measured
from tests.tasks.recommendation.test_publication import BLANK
from tests.warehouse.builders import body, judgement, setup
from warehouse.append import append, append_records, append_scores
from warehouse.export import read_published

DAY = timedelta(days=1)
HOSTILE = "<script>document.title='taken'</script><b>net</b> & {{ 7 * 7 }} %{x}"
SCORE = {"split": "workload", "group": "all", "rows": 40, "p90_error": 0.3, "median_width": 0.4}
SECTIONS = ("recommendations", "frontier", "changes", "model", "ledger", "measured", "ages")

needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="Debian's chromium is not installed")


def publish(here: Workspace, refresh_id: str, at: Any, *, dearer: float = 1.0) -> None:
    """A publication at the prices of NOON, as many times `dearer`; a copy of conv has the HOSTILE name."""
    offers = [one for one in here.provider.offers(at) if one.instance_type.name != "s.small" or dearer == 1.0]
    rows = recommend_all.fn(here, champion(), offers, measured().runs)
    rows += [row | {"workload": HOSTILE, "reason": f"{row['reason']} <i>"} for row in rows if row["workload"] == "conv"]
    unmet = {"goal": "fastest_within_budget", "constraint_usd": 0.001, "rank": 1, "status": "infeasible"}
    rows.append(rows[0] | BLANK | unmet | {"constraint_hours": None, "reason": "nothing costs as little as $0.001"})
    store_publication.fn(here, rows, champion(), refresh_id, at)


def history(here: Workspace) -> None:
    """Models, promises that were judged, leases with what was measured on them, drift and a slow run."""
    made = {"provider": "local", "training_digest": "d", "code_commit": "abc"}
    with here.warehouse.transact() as connection:
        for n in range(1, 7):
            of = {"version": str(n), "refresh_id": f"refresh-{n}"}
            row = made | of | {"trained_at": NOON + n * DAY, "promoted": n != 4}
            append(connection, "raw_models", [row | {"reason": "its errors are no larger" if n != 4 else "worse"}])
            figures = {"mean_error": 0.2 / n + 0.03, "median_error": 0.12 / n + 0.02, "coverage_90": 0.8 + 0.02 * n}
            append_scores(connection, [SCORE | figures], provider="local", **of)
            lease = {"lease_id": f"l{n}", "provider": "local", "cluster": "2xs.small", "market": "spot"}
            lease |= {"started_at": NOON + n * DAY, "ended_at": NOON + n * DAY + timedelta(minutes=8)}
            append(connection, "raw_leases", [lease | {"usd": 0.01 * n, "outcome": "finished"}], refresh_id=f"refresh-{n}")
            of_run = setup(workload=HOSTILE if n == 6 else "conv", cluster="2xs.small", reason_wanted="most uncertain")
            runs = [body(f"r{n}-{m}", of=of_run, lease_id=f"l{n}") for m in range(3)]
            runs.append(body(f"r{n}-x", of=of_run, lease_id=f"l{n}", status="failed", reason="worker died", values={}))
            append_records(connection, runs, refresh_id=f"refresh-{n}", loaded_at=NOON + n * DAY)
        for n in range(1, 15):
            step = 0.5 * (0.75 + 0.05 * (n * 5 % 11))
            one = judgement(f"p{n}", workload=HOSTILE if n == 14 else "conv", measured_step_s=step)
            one |= {"within_interval": 0.4 <= step <= 0.6, "regret": 0.01 * n, "newest_measured_at": NOON + n * DAY}
            append(connection, "raw_ledger", [one], refresh_id="refresh-6", judged_at=NOON + 7 * DAY)
        drift = {"scope": "type", "instance_type": "s.small", "zone": "a", "drifting": True, "direction": "slower"}
        drift |= {"runs": 9, "outside": 5, "median_ratio": 1.3, "chance": 0.001, "since": NOON}
        of = {"provider": "local", "refresh_id": "refresh-6", "judged_at": NOON + 6 * DAY, "model_version": "6"}
        append(connection, "raw_drift", [drift | of | {"newest_measured_at": NOON + 6 * DAY}])


@pytest.fixture(scope="module")
def used(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """A home with two publications and a past; only read what is in it."""
    here = install(tmp_path_factory.mktemp("used"))
    prices.note_definitions.fn(here, NOON)
    prices.snapshot_offers.fn(here, "refresh-1", NOON)
    history(here)
    publish(here, "refresh-5", NOON + 5 * DAY)
    publish(here, "refresh-6", NOON + 6 * DAY, dearer=2.0)
    export_copies.fn(here)
    return here


@contextmanager
def opened(file: Path, **context: Any) -> Iterator[Page]:
    """The file in Chromium. Whatever else it asked for, and whatever its console said, is an error."""
    trouble: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=QUIET.split())
        page = browser.new_context(**{"viewport": {"width": 1280, "height": 900}} | context).new_page()
        page.on("console", lambda said: trouble.append(f"{said.type}: {said.text}"))
        page.on("pageerror", lambda error: trouble.append(str(error)))
        page.on("request", lambda one: trouble.append(one.url) if not one.url.startswith(("file:", "data:")) else None)
        page.goto(file.as_uri())
        yield page
        browser.close()
    assert trouble == []


def scroll_through(page: Page) -> None:
    """Every chart comes into view, and is drawn."""
    for chart in page.locator(".chart:visible").all():
        chart.scroll_into_view_if_needed()
        chart.locator("svg.main-svg").first.wait_for()
    page.evaluate("scrollTo(0, 0)")
