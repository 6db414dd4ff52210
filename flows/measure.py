"""One campaign under a dollar cap: shop, then serve launch after launch, loading each before the next is bought."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any

from prefect import flow

from tasks.collect import bring_home
from tasks.installation import open_installation
from tasks.registry import load_champion
from tasks.report import reporter
from tasks.serve import serve_launch
from tasks.shopping import within
from tasks.tally import Tally


@flow(name="measure", log_prints=True)
def measure(refresh_id: str, provider: str = "local", max_usd: float | None = None) -> dict[str, Any]:
    """Buy what is worth most under the caps; returns launches, rows by status, dollars, and seconds by phase."""
    here = open_installation(provider)
    champion = load_champion(here.home, provider)
    tally = Tally(
        cap_usd=here.settings.campaign.max_usd if max_usd is None else max_usd,
        stop_at=time.monotonic() + here.max_minutes * 60.0,
        refresh_id=refresh_id,
    )
    for number, launch in enumerate(within(here, champion, tally)):
        served = serve_launch(here, launch, f"{refresh_id}-{number:02d}", tally)
        started = time.monotonic()
        collected = bring_home(here, served, refresh_id, datetime.now(UTC))
        tally.add(served, collected, load_s=time.monotonic() - started)
        reporter().say(f"  {launch.cluster.name}: {len(served.recorded)} runs, {served.outcome}")
    return tally.summary()
