"""The report page of a publication: its sections, text from outside, and in a browser."""

from contextlib import contextmanager
from datetime import timedelta

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import sync_playwright

from tasks.reporting import report_page
from tests.flows.visitors import CHROMIUM, QUIET
from tests.warehouse.builders import (
    INFEASIBLE,
    NOON,
    ROWS,
    body,
    fresh,
    judgement,
    lease,
    offered,
    recommendation,
    setup,
    stamp,
)
from warehouse.append import append, append_records
from warehouse.publication import publish
from warehouse.reads import report_rows

HOSTILE = "<script>document.title='taken'</script><b>net</b> & {{ 7 * 7 }} $x$"
SOURCES = {"local": {"illustrative": False, "refresh": "srift refresh"}}
NOTHING = INFEASIBLE | {"reason": "nothing is that cheap", "price_as_of": None}


def history(warehouse):
    """Models, judged promises, leases with their runs, and drift."""
    made = {"provider": "local", "training_digest": "d", "code_commit": "abc", "reason": HOSTILE}
    score = {"split": "workload", "group": "all", "rows": 40, "p90_error": 0.3, "median_width": 0.4}
    drift = ROWS["drift"] | {"refresh_id": "r", "since": NOON}
    with warehouse.transact() as connection:
        for n in (1, 2):
            at, of = NOON + timedelta(days=n), {"version": str(n), "refresh_id": f"refresh-{n}"}
            append(connection, "raw_models", [made | of], trained_at=at, promoted=n == 2)
            figures = {"mean_error": 0.2 / n, "median_error": 0.1 / n, "coverage_90": 0.9}
            append(connection, "raw_scores", [score | figures], provider="local", **of)
            paid = lease(at, lease_id=f"l{n}", refresh_id=f"refresh-{n}", usd=0.01 * n)
            append(connection, "raw_leases", [paid])
            run = setup(workload=HOSTILE, reason_wanted="most uncertain")
            rows = [
                body(f"r{n}", of=run, lease_id=f"l{n}"),
                body(f"x{n}", of=run, lease_id=f"l{n}", status="failed", reason="worker died"),
            ]
            append_records(connection, rows, refresh_id=f"refresh-{n}", loaded_at=at)
            promise = judgement(f"p{n}", workload=HOSTILE, within_interval=n == 1)
            append(connection, "raw_ledger", [promise], refresh_id="r", judged_at=at)
        append(connection, "raw_drift", [drift], judged_at=NOON, newest_measured_at=NOON)


@pytest.fixture(scope="module")
def used(tmp_path_factory):
    """The page of a warehouse with two publications and a past; only read it."""
    folder = tmp_path_factory.mktemp("used")
    warehouse = fresh(folder)
    history(warehouse)
    for n, usd in enumerate((0.02, 0.04), 1):
        dear = {"usd": usd, "usd_p90": usd * 2, "cluster_offers": [offered("small", 2, usd)]}
        rows = [
            recommendation(workload=name, rank=rank, hours=float(rank), reason="why <i>", **dear)
            for name in (HOSTILE, "lm")
            for rank in (1, 2, 3)
        ]
        publish(warehouse, [*rows, recommendation(goal="fastest", **NOTHING)], stamp(n))
    path = folder / "report.html"
    path.write_text(report_page.draw(report_rows(warehouse), SOURCES))
    return path


def test_every_section_has_its_figures(used):
    page = used.read_text()
    assert len(page) < 1_000_000
    assert page.count("<section") == 7
    assert page.count("<svg") == 3  # two workloads and the model
    words = "nothing is that cheap, worker died, most uncertain, 20.0%, 0.04, days old"
    for word in (*words.split(", "), ">measured<", ">fp32<"):
        assert word in page, word


def test_text_from_outside_is_escaped_in_tables_and_charts(used):
    page = used.read_text()
    assert "<script>document" not in page and "<b>net" not in page and "why <i>" not in page
    assert "&lt;b&gt;net" in page and page.count("<script") == 1
    assert "connect-src" not in page and "default-src 'none'" in page and "src=" not in page


def test_an_empty_past_has_sentences_in_place_of_figures(tmp_path):
    warehouse = fresh(tmp_path)
    publish(warehouse, [recommendation(**NOTHING)], stamp(1))
    page = report_page.draw(report_rows(warehouse), SOURCES)
    assert "<svg" not in page and page.count("srift refresh") >= 3


RIGHT = "cells => cells.map(cell => cell.getBoundingClientRect().right)"


@contextmanager
def opened(file, **context):
    """The file in Chromium; a request or a message on the console is an error."""
    trouble = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=QUIET.split())
        page = browser.new_context(**context).new_page()
        page.on("console", lambda message: trouble.append(message.text))
        page.on("pageerror", lambda error: trouble.append(str(error)))
        page.on(
            "request",
            lambda request: trouble.append(request.url) if request.url[:4] == "http" else None,
        )
        page.goto(file.as_uri())
        yield page
        browser.close()
    assert trouble == []


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="Debian's chromium is not installed")
def test_the_page_works_in_a_browser(used):
    for width, scheme in ((390, "light"), (1280, "dark")):
        view = {"width": width, "height": 900}
        with opened(used, viewport=view, color_scheme=scheme) as page:
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
            assert page.title() == "Srift: where to train"
            cells = page.locator("#recommendations .first td").evaluate_all(RIGHT)
            assert width > 390 or max(cells) <= width  # each row is a card
            page.locator("details").evaluate_all("all => all.forEach(one => one.open = true)")
            page.get_by_label("All rivals and reasons").check()
            found = Axe().run(page).response["violations"]
            grave = [
                violation["id"]
                for violation in found
                if violation["impact"] in ("serious", "critical")
            ]
            assert grave == []
