"""An EC2 Fleet request: all machines at once in one zone, or none."""

from __future__ import annotations

import json
from typing import Any

from ...providers.ec2.api import malformed
from .selection import ExportRefused, Selection

LAUNCH_TEMPLATE = "YOUR-LAUNCH-TEMPLATE"


def fleet(selection: Selection) -> tuple[Any, str]:
    """Return a CreateFleet request of type instant, and its JSON.

    Interchangeable ranks of the same market and region are overrides in order of priority. Tags
    describe the recommendation, because a request has no comments.
    """
    selection.require_cloud("fleet")
    selection.require_one_type("fleet")
    first, spot = selection.first, selection.first.market == "spot"
    ranks = [
        one
        for one in selection.interchangeable
        if (one.market, one.row["region"]) == (first.market, first.row["region"])
    ]
    overrides = [
        {"InstanceType": one.types[0], "Priority": float(place)}
        | ({"AvailabilityZone": one.zone} if one.zone else {})
        for place, one in enumerate(ranks)
    ]
    template = {"LaunchTemplateName": LAUNCH_TEMPLATE, "Version": "$Default"}
    options = {
        "AllocationStrategy": "capacity-optimized-prioritized" if spot else "prioritized",
        "MinTargetCapacity": first.machines,
        "SingleInstanceType": True,
        "SingleAvailabilityZone": True,
    }
    request = {
        "Type": "instant",
        "LaunchTemplateConfigs": [
            {"LaunchTemplateSpecification": template, "Overrides": overrides}
        ],
        "TargetCapacitySpecification": {
            "TotalTargetCapacity": first.machines,
            "DefaultTargetCapacityType": first.market,
        },
        "SpotOptions" if spot else "OnDemandOptions": options,
        "TagSpecifications": [
            {"ResourceType": kind, "Tags": _tags(selection)} for kind in ("fleet", "instance")
        ],
    }
    problem = malformed("ec2", "CreateFleetRequest", request)
    if problem:
        raise ExportRefused(f"botocore refuses the request, which is a defect of Srift: {problem}")
    return request, json.dumps(request, indent=2)


def _tags(selection: Selection) -> list[dict[str, str]]:
    row = selection.first.row
    tags = {
        name: row[name]
        for name in (
            *("workload", "goal", "rank", "publication_id", "region", "strategy", "precision"),
            *("switches", "batch_per_device", "accumulation_steps", "p_meets_constraint"),
        )
        if row[name] is not None
    }
    tags |= {name: f"{row[name]:%Y-%m-%d %H:%M} UTC" for name in ("published_at", "price_as_of")}
    tags |= {
        name: f"{row[name]:.4g} (90th percentile {row[name + '_p90']:.4g})"
        for name in ("hours", "usd")
        if row[name] is not None
    }
    return [{"Key": f"srift:{name}", "Value": str(value)[:256]} for name, value in tags.items()]
