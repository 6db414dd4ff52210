"""The report page of a real publication, as a person meets it in a real browser, with the network, the mouse or a
screen reader missing; and what a publication does when it cannot be drawn."""

from __future__ import annotations

import json
import re
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
from tests.installed import NOON, DescribedMachines, champion, install, measured
from tests.tasks.recommendation.test_publication import BLANK
from tests.warehouse.builders import body, judgement, recommendation, setup
from warehouse.append import append, append_records, append_scores
from warehouse.export import read_published

DAY = timedelta(days=1)
HOSTILE = "<script>document.title='taken'</script><b>net</b> & {{ 7 * 7 }} %{x}"
SCORE = {"split": "workload", "group": "all", "rows": 40, "p90_error": 0.3, "median_width": 0.4}
SECTIONS = ("recommendations", "frontier", "changes", "model", "ledger", "measured", "ages")

needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="Debian's chromium is not installed")


def publish(here: Workspace, refresh_id: str, at: Any, *, dearer: float = 1.0) -> None:
    """A publication at the prices of NOON, as many times `dearer`; a copy of conv has the HOSTILE name."""
    offers = [
        one
        for one in here.provider.offers(at)
        if one.instance_type.name != "s.small" or dearer == 1.0
    ]
    rows = recommend_all(here, champion(), offers, measured().runs)
    rows += [
        row | {"workload": HOSTILE, "reason": f"{row['reason']} <i>"}
        for row in rows
        if row["workload"] == "conv"
    ]
    unmet = {
        "goal": "fastest_within_budget",
        "constraint_usd": 0.001,
        "rank": 1,
        "status": "infeasible",
    }
    rows.append(
        rows[0]
        | BLANK
        | unmet
        | {"constraint_hours": None, "reason": "nothing costs as little as $0.001"}
    )
    store_publication(here, rows, champion(), refresh_id, at)


def history(here: Workspace) -> None:
    """Models, promises that were judged, leases with what was measured on them, drift and a slow run."""
    made = {"provider": "local", "training_digest": "d", "code_commit": "abc"}
    with here.warehouse.transact() as connection:
        for n in range(1, 7):
            of = {"version": str(n), "refresh_id": f"refresh-{n}"}
            row = made | of | {"trained_at": NOON + n * DAY, "promoted": n != 4}
            append(
                connection,
                "raw_models",
                [row | {"reason": "its errors are no larger" if n != 4 else "worse"}],
            )
            figures = {
                "mean_error": 0.2 / n + 0.03,
                "median_error": 0.12 / n + 0.02,
                "coverage_90": 0.8 + 0.02 * n,
            }
            append_scores(connection, [SCORE | figures], provider="local", **of)
            lease = {
                "lease_id": f"l{n}",
                "provider": "local",
                "cluster": "2xs.small",
                "market": "spot",
            }
            lease |= {
                "started_at": NOON + n * DAY,
                "ended_at": NOON + n * DAY + timedelta(minutes=8),
            }
            append(
                connection,
                "raw_leases",
                [lease | {"usd": 0.01 * n, "outcome": "finished"}],
                refresh_id=f"refresh-{n}",
            )
            of_run = setup(
                workload=HOSTILE if n == 6 else "conv",
                cluster="2xs.small",
                reason_wanted="most uncertain",
            )
            runs = [body(f"r{n}-{m}", of=of_run, lease_id=f"l{n}") for m in range(3)]
            runs.append(
                body(
                    f"r{n}-x",
                    of=of_run,
                    lease_id=f"l{n}",
                    status="failed",
                    reason="worker died",
                    values={},
                )
            )
            append_records(connection, runs, refresh_id=f"refresh-{n}", loaded_at=NOON + n * DAY)
        for n in range(1, 15):
            step = 0.5 * (0.75 + 0.05 * (n * 5 % 11))
            one = judgement(f"p{n}", workload=HOSTILE if n == 14 else "conv", measured_step_s=step)
            one |= {
                "within_interval": 0.4 <= step <= 0.6,
                "regret": 0.01 * n,
                "newest_measured_at": NOON + n * DAY,
            }
            append(
                connection, "raw_ledger", [one], refresh_id="refresh-6", judged_at=NOON + 7 * DAY
            )
        drift = {
            "scope": "type",
            "instance_type": "s.small",
            "zone": "a",
            "drifting": True,
            "direction": "slower",
        }
        drift |= {"runs": 9, "outside": 5, "median_ratio": 1.3, "chance": 0.001, "since": NOON}
        of = {
            "provider": "local",
            "refresh_id": "refresh-6",
            "judged_at": NOON + 6 * DAY,
            "model_version": "6",
        }
        append(connection, "raw_drift", [drift | of | {"newest_measured_at": NOON + 6 * DAY}])


@pytest.fixture(scope="module")
def used(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """A home with two publications and a past; only read what is in it."""
    here = install(tmp_path_factory.mktemp("used"))
    prices.note_definitions(here, NOON)
    prices.snapshot_offers(here, "refresh-1", NOON)
    history(here)
    publish(here, "refresh-5", NOON + 5 * DAY)
    publish(here, "refresh-6", NOON + 6 * DAY, dearer=2.0)
    export_copies(here)
    return here


@contextmanager
def opened(file: Path, **context: Any) -> Iterator[Page]:
    """The file in Chromium. Whatever else it asked for, and whatever its console said, is an error."""
    trouble: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=QUIET.split())
        page = browser.new_context(
            **{"viewport": {"width": 1280, "height": 900}} | context
        ).new_page()
        page.on("console", lambda said: trouble.append(f"{said.type}: {said.text}"))
        page.on("pageerror", lambda error: trouble.append(str(error)))
        page.on(
            "request",
            lambda one: (
                trouble.append(one.url) if not one.url.startswith(("file:", "data:")) else None
            ),
        )
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


PHONE, DESKTOP = {"width": 390, "height": 844}, {"width": 1280, "height": 900}


@needs_browser
@pytest.mark.parametrize(
    ("viewport", "scheme"), [(PHONE, "light"), (DESKTOP, "dark")], ids=["phone", "desktop"]
)
def test_the_page_opens_from_disk_alone_fits_and_passes_an_accessibility_audit(
    used: Workspace, viewport: dict[str, int], scheme: str
) -> None:
    with opened(used.report_page, viewport=viewport, color_scheme=scheme) as page:
        assert page.locator("section").evaluate_all("all => all.map(one => one.id)") == list(
            SECTIONS
        )
        page.get_by_label("All rivals and reasons").check()
        scroll_through(page)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), (
            "it scrolls sideways"
        )
        assert page.locator(".chart .main-svg").count() >= page.locator(".chart").count() == 6
        page.locator("details").evaluate_all("all => all.forEach(one => one.open = true)")
        found = Axe().run(page).response["violations"]
    grave = [
        (one["id"], one["nodes"][0]["html"])
        for one in found
        if one["impact"] in ("serious", "critical")
    ]
    assert grave == []


@needs_browser
def test_a_name_from_a_user_is_text_in_the_table_and_in_charts(used: Workspace) -> None:
    with opened(used.report_page) as page:
        expect(page.locator("tbody th").first).to_contain_text(HOSTILE)
        expect(page.locator(".why").first).to_contain_text("<i>")
        scroll_through(page)
        page.locator("#ledger-local path.point").nth(10).hover(force=True)  # the newest, within
        expect(page.locator("#ledger-local .hoverlayer")).to_contain_text(HOSTILE)
        assert page.title() == "Srift: where to train" and page.locator("script").count() == 3


@needs_browser
def test_the_table_is_filtered_and_sorted(used: Workspace) -> None:
    with opened(used.report_page) as page:
        count, first, why = (
            page.locator("#count"),
            page.locator("#recommendations tbody:visible"),
            page.locator("tr.why:visible"),
        )
        expect(count).to_have_text("13 first choices, 48 rivals")
        page.locator("#recommendations").get_by_label("Workload").select_option("lm")
        expect(count).to_have_text("4 of 13 first choices, 16 rivals")
        page.get_by_label("Goal").select_option("fastest")
        assert first.count() == 1 and page.locator("tr.rival:visible").count() == 0 == why.count()
        page.get_by_label("Goal").select_option("")
        page.get_by_label("Text", exact=True).fill("2XS.LARGE")
        expect(count).to_have_text("2 of 13 first choices, 8 rivals")
        assert why.count() == 10, "a match among the rivals is unfolded"
        page.get_by_label("Text", exact=True).fill("no such thing")
        expect(count).to_have_text("0 of 13 first choices, 0 rivals")
        page.get_by_label("Text", exact=True).fill("")
        page.locator("#recommendations").get_by_label("Workload").select_option("")
        for order in ("ascending", "descending"):
            page.get_by_role("button", name="Hours").click()
            assert page.locator("th[aria-sort]").get_attribute("aria-sort") == order
            texts = page.locator("tr.first td:nth-of-type(5)").evaluate_all(
                "all => all.map(one => one.firstChild?.data)"
            )
            hours = [float(text) for text in texts[:-1]]
            assert hours == sorted(hours, reverse=order == "descending") and texts[-1] is None, (
                "unknown is last"
            )


@needs_browser
def test_the_keyboard_reaches_and_does_everything(used: Workspace) -> None:
    with opened(used.report_page) as page:

        def tab_to(selector: str) -> str:
            for _ in range(60):
                page.keyboard.press("Tab")
                if page.evaluate("selector => document.activeElement.matches(selector)", selector):
                    return str(
                        page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
                    )
            raise AssertionError(f"no key reaches {selector}")

        assert tab_to(".skip") == "solid", "focus is not seen"
        assert tab_to("[data-filter=text]") == "solid"
        assert tab_to("th[data-column=usd] button") == "solid"
        page.keyboard.press("Enter")
        assert page.locator("th[data-column=usd]").get_attribute("aria-sort") == "ascending"
        assert tab_to(".fold") == "solid"
        page.keyboard.press("Enter")
        assert (
            page.locator("tr.rival:visible").count() == 4
            and page.locator("tr.why:visible").count() == 6
        )
        assert page.locator(".fold[aria-expanded=true]").count() == 1
        assert tab_to("#frontier .scroll, #frontier summary") == "solid"


@needs_browser
def test_charts_follow_the_colour_scheme(used: Workspace) -> None:
    with opened(used.report_page, color_scheme="light") as page:
        scroll_through(page)
        label = page.locator("#frontier-1 .xtick text").first
        light = label.evaluate("one => getComputedStyle(one).fill")
        page.emulate_media(color_scheme="dark")
        expect(label).not_to_have_css("fill", light)


def test_a_chart_and_its_table_show_what_was_published(used: Workspace) -> None:
    data = json.loads(re.findall(r'id="data">(.*?)</script>', used.report_page.read_text())[0])
    pareto = read_published(used.published, "pareto").query("workload == 'lm'")
    place = sorted({HOSTILE, "conv", "lm"}).index("lm") + 1
    frontier, rest, firsts = data["figures"][f"frontier-{place}"]["data"]
    assert sorted(frontier["x"]) == sorted(pareto["hours"]) and sorted(frontier["y"]) == sorted(
        pareto["usd"]
    )
    p90 = [x + more for x, more in zip(frontier["x"], frontier["error_x"]["array"], strict=True)]
    assert sorted(p90) == pytest.approx(sorted(pareto["hours_p90"]))
    named = read_published(used.published).query("workload == 'lm'")
    every = set(zip(named["hours"], named["usd"], strict=True))
    assert {
        *zip(frontier["x"], frontier["y"], strict=True),
        *zip(rest["x"], rest["y"], strict=True),
    } == every
    assert {*firsts["x"]} == {*named.query("rank == 1")["hours"]}


def test_where_there_is_nothing_yet_the_page_says_why_and_what_fills_it(tmp_path: Path) -> None:
    here = install(tmp_path, provider=DescribedMachines(name="ec2"))
    unmet = BLANK | {"status": "infeasible", "price_as_of": None, "newest_measurement_at": None}
    rows = [
        recommendation(**unmet | {"goal": goal, "reason": "no price is known"})
        for goal in ("cheapest", "fastest")
    ]
    store_publication(here, rows, None, "refresh-1", NOON)
    export_copies(here)
    page = here.report_page.read_text()
    for said in (
        *(
            "No setup of this publication has a price",
            "this is the first publication",
            "no model was trained yet",
        ),
        *("no published first choice was measured afterwards", "no refresh has held a machine yet"),
        *(
            "nothing was judged for drift yet",
            "No slow run waits",
            "never measured",
            "no price known",
        ),
    ):
        assert said in page, said
    assert page.count("srift refresh --provider ec2 --max-usd") >= 6


class Said(Reporter):
    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)


def test_a_page_that_cannot_be_drawn_keeps_the_old_one_and_never_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, told = install(tmp_path), Said()
    store_publication(here, [recommendation()], None, "refresh-1", NOON)
    export_copies(here)
    before = here.report_page.read_text()
    monkeypatch.setattr(report_page, "draw", lambda *_: {}["step_s"])
    store_publication(here, [recommendation()], None, "refresh-2", NOON + DAY)
    with reporting_to(told):
        export_copies(here)
    assert read_published(here.published)["publication_id"].tolist() == ["refresh-2"]
    assert here.report_page.read_text() == before
    (said,) = told.said
    assert "report.html could not be drawn (KeyError: 'step_s'); the one drawn before stays" in said
    monkeypatch.setattr(
        "warehouse.export.fsync", lambda path: {}[str(path)] if "html" in str(path) else None
    )
    monkeypatch.setattr(report_page, "draw", lambda *_: "half a page")
    export_copies(here)
    assert here.report_page.read_text() == before
    assert not [path for path in here.published.iterdir() if path.name.startswith(".")], "litter"
