"""Spot placement scores, as EC2 tells them: how likely a request is to be served, 1 to 10, by zone.

They order zones of equal price and say nothing of how long machines stay. Where they may not be asked for, nothing
changes: equal zones come by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tasks.providers.base import ProviderError

Answer = Mapping[str, Any]


def zone_scores(answers: Iterable[Answer], zones: Iterable[Answer]) -> dict[str, int]:
    """Score by zone name, from GetSpotPlacementScores' rows and DescribeAvailabilityZones' (which name their ids)."""
    names = {str(one["ZoneId"]): str(one["ZoneName"]) for one in zones if "ZoneId" in one}
    return {
        names[str(row["AvailabilityZoneId"])]: int(row["Score"])
        for row in answers
        if str(row.get("AvailabilityZoneId")) in names and "Score" in row
    }


def scores_or_why(ask: Callable[[], dict[str, int]]) -> tuple[dict[str, int], str]:
    """What `ask` is told, or no scores and a sentence that says why not: many may launch who may not ask for these."""
    try:
        return ask(), ""
    except ProviderError as error:
        return {}, f"zones of equal price come by name, since spot placement scores were not told: {error}"
