"""The scheduled parent: market -> measure -> retrain -> publish, under one refresh id."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any

from prefect import flow

from flows.market import market
from flows.measure import measure
from flows.publish import publish
from flows.reap import reap
from flows.retrain import retrain
from tasks.doctor import refuse_unless_well
from tasks.installation import new_refresh_id, open_installation, refuse_to_spend
from tasks.report import reporter, seconds_listed
from tasks.turn import patience_s, store_timings, taking_turn


@flow(name="refresh", log_prints=True)
def refresh(provider: str = "local", max_usd: float | None = None) -> dict[str, Any]:
    """The whole story once. Returns the refresh id, what was measured, the rule's sentence, and seconds by phase."""
    refuse_to_spend(provider, max_usd)
    here = open_installation(provider)
    refuse_unless_well(here.settings, provider, max_usd)
    refresh_id = new_refresh_id(datetime.now(UTC))
    with taking_turn(here.home, refresh_id, patience_s=patience_s()):
        clock = time.monotonic()
        for limit in here.provider.limits():
            reporter().say(f"note: {limit}")
        reap(provider)
        market(provider, refresh_id, republish=False)
        before_s = time.monotonic() - clock
        measured = measure(refresh_id, provider, max_usd)
        clock = time.monotonic()
        promotion = retrain(refresh_id, provider)
        retrain_s, clock = time.monotonic() - clock, time.monotonic()
        rows = publish(provider, refresh_id)
        seconds = {"reap and prices": before_s, **measured["seconds"], "retrain": retrain_s}
        seconds["publish"] = time.monotonic() - clock
        store_timings(here, refresh_id, seconds)
    reporter().say(f"seconds: {seconds_listed(seconds)}")
    return {
        "refresh_id": refresh_id,
        "measured": measured,
        "promotion": promotion,
        "published_rows": rows,
        "seconds": seconds,
    }
