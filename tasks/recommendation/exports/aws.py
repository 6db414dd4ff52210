"""Requests to AWS itself: the resources of a SageMaker training job, and an EC2 Fleet."""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import Any

from ...providers.ec2.api import malformed, values_of
from .choice import Choice, ExportRefused, Ranked, refuse_local

_MOST_GROUPS = 5  # instance groups of a training job
_MOST_S = 28 * 86400  # that a training job may run
# A job that is ended by its limit has cost everything and made nothing: the limit is for a job that hangs.
_LIMIT_OF_P90 = 2.0
LAUNCH_TEMPLATE = "YOUR-LAUNCH-TEMPLATE"


def sagemaker(choice: Choice) -> tuple[Any, str]:
    """For the rank asked for and those below, in order, what of a CreateTrainingJob request the recommendation decides,
    and which ranks SageMaker cannot train, and why; and its JSON.

    Raises ExportRefused where it can train none of them.
    """
    refuse_local(choice, "sagemaker")
    offered = values_of("sagemaker", "TrainingInstanceType")
    ranks = [choice.first, *choice.below]
    why_not = {one.rank: _for_no_job(one, offered) for one in ranks}
    able = [one for one in ranks if not why_not[one.rank]]
    left_out = [
        f"rank {one.rank}, {one.name}: {why_not[one.rank]}" for one in ranks if why_not[one.rank]
    ]
    if not able:
        raise ExportRefused(f"sagemaker: no rank can be trained there; {'; '.join(left_out)}")
    jobs: list[list[Ranked]] = []
    for one in able:
        if jobs and _as_preferred(jobs[-1][0], one):
            jobs[-1].append(one)
        else:
            jobs.append([one])
    document = {
        "about": [
            *choice.about,
            "each request is part of a CreateTrainingJob: try them in order; add name, role, image, data, output, and"
            " VolumeSizeInGB to the ResourceConfig where a type has no disk of its own",
            "dollars and order are by EC2's prices; SageMaker's own for ml. types are not known here",
            *(
                ["a spot job needs a CheckpointConfig, or an interruption loses all of it"]
                if _any_spot(able)
                else []
            ),
        ],
        "jobs": [_job(one) for one in jobs],
        "left_out": left_out,
    }
    return document, json.dumps(document, indent=2)


def fleet(choice: Choice) -> tuple[Any, str]:
    """A CreateFleet request of type instant: all machines at once in one zone or none, the rank asked for first and
    then those below that the same command trains on as many machines of each market in the region; and its JSON. What
    is said of the recommendation stands in its tags, since a request has no comments.

    Raises ExportRefused where the machines are of several types: a fleet may choose among types, and not how many of
    which.
    """
    refuse_local(choice, "fleet")
    choice.refuse(
        "fleet",
        _for_no_fleet,
        "A Fleet chooses among types, and how many of which cannot be said; `--to sagemaker` and `--to torchrun` take"
        " machines of several types",
    )
    first, counts = choice.first, _by_market(choice.first)

    def able(one: Ranked) -> str:
        apart = one.region != first.region or _by_market(one) != counts
        return _for_no_fleet(one) or ("is of another market or region" if apart else "")

    taken, left_out = choice.alternatives(able)
    total = first.machines
    together = {"SingleInstanceType": True, "SingleAvailabilityZone": True}
    options: dict[str, Any] = {}
    if counts["spot"]:
        strategy = "capacity-optimized-prioritized"
        options["SpotOptions"] = {
            "AllocationStrategy": strategy,
            "MinTargetCapacity": counts["spot"],
            **together,
        }
    if counts["on-demand"]:
        least = {"MinTargetCapacity": counts["on-demand"]}
        options["OnDemandOptions"] = {"AllocationStrategy": "prioritized", **least, **together}
    request = {
        "Type": "instant",
        "LaunchTemplateConfigs": [
            {
                "LaunchTemplateSpecification": {
                    "LaunchTemplateName": LAUNCH_TEMPLATE,
                    "Version": "$Default",
                },
                "Overrides": [_override(one, float(place)) for place, one in enumerate(taken)],
            }
        ],
        "TargetCapacitySpecification": {
            "TotalTargetCapacity": total,
            "OnDemandTargetCapacity": counts["on-demand"],
            "SpotTargetCapacity": counts["spot"],
            "DefaultTargetCapacityType": "spot" if counts["spot"] else "on-demand",
        },
        **options,
        "TagSpecifications": [
            {"ResourceType": kind, "Tags": _tags(choice, left_out)}
            for kind in ("fleet", "instance")
        ],
    }
    problem = malformed("ec2", "CreateFleetRequest", request)
    if problem:
        raise ExportRefused(
            f"fleet: AWS's own model of a request refuses this one, which is a mistake here: {problem}"
        )
    return request, json.dumps(request, indent=2)


def _for_no_job(one: Ranked, offered: frozenset[str]) -> str:
    missing = [f"ml.{kind}" for kind in one.types if f"ml.{kind}" not in offered]
    if missing:
        return f"SageMaker training has no {' and no '.join(missing)}"
    if len({group.market for group in one.groups}) > 1:
        return "a training job is on spot machines or on demand, and not on both"
    if len(one.groups) > _MOST_GROUPS:
        return f"a training job has at most {_MOST_GROUPS} groups of instances"
    if one.row["hours_p90"] * 3600 > _MOST_S:
        return f"a training job runs at most {_MOST_S // 86400} days"
    return ""


def _any_spot(ranks: list[Ranked]) -> bool:
    return any(group.spot for one in ranks for group in one.groups)


def _as_preferred(one: Ranked, other: Ranked) -> bool:
    """Whether SageMaker itself may take `other` where `one` is not to be had, which it does on demand alone."""
    uniform = not (one.not_uniform or other.not_uniform or _any_spot([one, other]))
    return (
        uniform
        and one.command == other.command
        and one.region == other.region
        and one.types != other.types
    )


def _job(ranks: list[Ranked]) -> dict[str, Any]:
    """One request for the first of `ranks`, or the next of them where SageMaker cannot get it."""
    first = ranks[0]
    groups = [(f"ml.{group.instance_type}", group.count) for group in first.groups]
    machines: dict[str, Any] = {"InstanceType": groups[0][0], "InstanceCount": groups[0][1]}
    if len(ranks) > 1:
        kinds = dict.fromkeys(one.types[0] for one in ranks)
        preferred = [
            {"InstanceType": f"ml.{kind}", "InstanceCount": first.machines} for kind in kinds
        ]
        machines = {"InstancePreferences": preferred}
    elif len(groups) > 1:
        machines = {
            "InstanceGroups": [
                {
                    "InstanceGroupName": f"group-{number}",
                    "InstanceType": kind,
                    "InstanceCount": count,
                }
                for number, (kind, count) in enumerate(groups, 1)
            ]
        }
    limit_s = min(
        _MOST_S, math.ceil(_LIMIT_OF_P90 * 3600 * max(one.row["hours_p90"] for one in ranks))
    )
    spot = {"EnableManagedSpotTraining": True} if first.groups[0].spot else {}
    return {
        "ranks": [one.rank for one in ranks],
        "region": first.region,
        "clusters": [one.row["cluster"] for one in ranks],
        "ec2_usd": [one.row["usd"] for one in ranks],
        "request": {
            "ResourceConfig": machines,
            **spot,
            "StoppingCondition": {"MaxRuntimeInSeconds": limit_s}
            | ({"MaxWaitTimeInSeconds": limit_s} if spot else {}),
            "Environment": first.environment,
        },
    }


def _for_no_fleet(one: Ranked) -> str:
    return (
        f"cannot be one fleet, since it is of the types {' and '.join(one.types)}"
        if len(one.types) > 1
        else ""
    )


def _by_market(one: Ranked) -> Counter[str]:
    counts: Counter[str] = Counter()
    for group in one.groups:
        counts[group.market] += group.count
    return counts


def _override(one: Ranked, priority: float) -> dict[str, Any]:
    """The lower its number the sooner it is taken."""
    zones = {group.zone for group in one.groups if group.zone is not None}
    place = {"AvailabilityZone": zones.pop()} if len(zones) == 1 else {}
    return {"InstanceType": one.types[0], "Priority": priority, **place}


def _tags(choice: Choice, left_out: list[str]) -> list[dict[str, str]]:
    row = choice.first.row
    dollars = (
        "unknown"
        if row["usd"] is None
        else f"{row['usd']:.4g} (90th percentile {row['usd_p90']:.4g})"
    )
    chance = row["p_meets_constraint"]
    tags = {
        "workload": row["workload"],
        "goal": row["goal"],
        "rank": choice.first.rank,
        "publication": row["publication_id"],
        "published-at": f"{row['published_at']:%Y-%m-%d %H:%M} UTC",
        "prices-as-of": f"{row['price_as_of']:%Y-%m-%d %H:%M} UTC",
        "region": choice.first.region,
        "predicted-hours": f"{row['hours']:.3g} (90th percentile {row['hours_p90']:.3g})",
        "predicted-usd": dollars,
        **({} if chance is None else {"p-meets-constraint": f"{chance:.2f}"}),
        "batch-per-device": row["batch_per_device"],
        "accumulation-steps": choice.first.accumulation_steps,
        "training": f"{choice.first.mode.strategy} {choice.first.mode.precision} {choice.first.mode.switches}",
        **({"ranks-left-out": len(left_out)} if left_out else {}),
    }
    return [{"Key": f"srift:{name}", "Value": str(value)[:256]} for name, value in tags.items()]
