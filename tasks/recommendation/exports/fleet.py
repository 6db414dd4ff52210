"""Export an EC2 Fleet request that starts all machines in one zone, or no machine."""

import json
from typing import Any

from .selection import Selection

LAUNCH_TEMPLATE = "YOUR-LAUNCH-TEMPLATE"
_TAGS = (
    *("workload", "goal", "rank", "publication_id", "region", "strategy", "precision", "switches"),
    *("batch_per_device", "accumulation_steps", "p_meets_constraint", "published_at"),
    *("price_as_of", "hours", "hours_p90", "usd", "usd_p90"),
)


def fleet(selection: Selection) -> tuple[Any, str]:
    """Return a CreateFleet request of type instant, and its JSON text.

    The request lists instance types in order of preference. The type of the requested cluster is
    first. The types of its replacements (`Selection.interchangeable`) in the same market and region
    follow. Tags describe the recommendation.

    Raises:
        ExportRefused: if the requested cluster has local hosts or several instance types.
    """
    selection.require_cloud("fleet")
    first, row = selection.first, selection.first.row
    spot = first.market == "spot"
    ranks = [
        choice
        for choice in selection.interchangeable
        if (choice.market, choice.row["region"]) == (first.market, row["region"])
    ]
    overrides = [
        {"InstanceType": choice.types[0], "Priority": float(place)}
        | ({"AvailabilityZone": choice.zone} if choice.zone else {})
        for place, choice in enumerate(ranks)
    ]
    template = {"LaunchTemplateName": LAUNCH_TEMPLATE, "Version": "$Default"}
    tags = [
        {"Key": f"srift:{name}", "Value": _text(row[name])}
        for name in _TAGS
        if row[name] is not None
    ]
    request = {
        "Type": "instant",
        "LaunchTemplateConfigs": [
            {"LaunchTemplateSpecification": template, "Overrides": overrides}
        ],
        "TargetCapacitySpecification": {
            "TotalTargetCapacity": first.machines,
            "DefaultTargetCapacityType": first.market,
        },
        "SpotOptions" if spot else "OnDemandOptions": {
            "AllocationStrategy": "capacity-optimized-prioritized" if spot else "prioritized",
            "MinTargetCapacity": first.machines,
            "SingleInstanceType": True,
            "SingleAvailabilityZone": True,
        },
        "TagSpecifications": [
            {"ResourceType": kind, "Tags": tags} for kind in ("fleet", "instance")
        ],
    }
    return request, json.dumps(request, indent=2)


def _text(value: Any) -> str:
    if hasattr(value, "strftime"):
        return f"{value:%Y-%m-%d %H:%M} UTC"
    return f"{value:.4g}" if isinstance(value, float) else str(value)[:256]
