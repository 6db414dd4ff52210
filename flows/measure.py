"""One campaign under a dollar cap: shop, then serve launch after launch, loading each before the next is bought."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any

from prefect import flow

from tasks.campaign.budget import Tally, money_short
from tasks.campaign.campaign import serve_launch, with_requirements_installed, within
from tasks.execution.collect import collect_launch, refuse_unless_swept
from tasks.reporting.progress import MONEY_SHORT, announce, reporter
from tasks.training.registry import load_champion
from tasks.workspace.workspace import open_workspace


@flow(name="measure", log_prints=True)
def measure(refresh_id: str, provider: str = "local", max_usd: float | None = None) -> dict[str, Any]:
    """Buy what is most valuable under the caps; returns launches, rows by status, dollars, and seconds by phase."""
    workspace = open_workspace(provider)
    if max_usd != 0:
        refuse_unless_swept(workspace, datetime.now(UTC))
        workspace = with_requirements_installed(workspace)  # before the campaign's minutes begin
    champion = load_champion(workspace.home, provider)
    tally = Tally(
        cap_usd=workspace.settings.campaign.max_usd if max_usd is None else max_usd,
        stop_at=time.monotonic() + workspace.max_minutes * 60.0,
        refresh_id=refresh_id,
    )
    for number, launch in enumerate(within(workspace, champion, tally)):
        served = serve_launch(workspace, launch, f"{refresh_id}-{number:02d}", tally)
        started = time.monotonic()
        collected = collect_launch(workspace, served, refresh_id, datetime.now(UTC))
        tally.add(served, collected, load_s=time.monotonic() - started, cluster=launch.cluster)
        reporter().say(f"  {launch.cluster.name}: {len(served.recorded)} runs, {served.outcome}")
    if max_usd != 0 and (short := money_short(workspace, tally, datetime.now(UTC))):
        reporter().say(short)
        announce(MONEY_SHORT, f"provider.{provider}", short)
    return tally.summary()
