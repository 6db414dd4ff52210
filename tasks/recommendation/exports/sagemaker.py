"""The resources of SageMaker training jobs."""

from __future__ import annotations

import json
import math
from typing import Any

from ...providers.ec2.api import shape_of
from .selection import ExportRefused, RankedCluster, Selection

MAX_GROUPS = 5  # instance groups of a training job
MAX_RUNTIME_S = 28 * 86400
# A stopped job has cost everything and produced nothing, so the limit only catches hangs.
RUNTIME_LIMIT_FACTOR = 2.0


def sagemaker(selection: Selection) -> tuple[Any, str]:
    """Return parts of CreateTrainingJob requests in order of rank, and their JSON.

    Raises ExportRefused if SageMaker can train no rank.
    """
    selection.require_cloud("sagemaker")
    offered = shape_of("sagemaker", "TrainingInstanceType").enum
    problems = {one.rank: _problem(one, offered) for one in selection.candidates}
    jobs: list[list[RankedCluster]] = []
    for one in selection.candidates:
        if problems[one.rank]:
            continue
        if jobs and _can_replace(jobs[-1][0], one):
            jobs[-1].append(one)
        else:
            jobs.append([one])
    left_out = [f"rank {rank}: {problem}" for rank, problem in problems.items() if problem]
    if not jobs:
        raise ExportRefused(f"sagemaker can train no rank: {'; '.join(left_out)}")
    document = {
        "about": [
            *selection.about,
            "try the requests in order; add name, role, image, data, output and volume size",
            "dollars are EC2 prices, not SageMaker prices",
        ],
        "jobs": [_job(ranks) for ranks in jobs],
        "left_out": left_out,
    }
    return document, json.dumps(document, indent=2)


def _problem(cluster: RankedCluster, offered: frozenset[str]) -> str:
    missing = [f"ml.{kind}" for kind in cluster.types if f"ml.{kind}" not in offered]
    if missing:
        return f"SageMaker does not offer {' and '.join(missing)}"
    if len(cluster.offers) > MAX_GROUPS:
        return f"a training job has at most {MAX_GROUPS} instance groups"
    if cluster.row["hours_p90"] * 3600 > MAX_RUNTIME_S:
        return f"a training job runs at most {MAX_RUNTIME_S // 86400} days"
    return ""


def _can_replace(first: RankedCluster, other: RankedCluster) -> bool:
    """Return True if SageMaker may choose between the clusters; it does so on-demand only."""
    return (
        (len(first.types), len(other.types)) == (1, 1)
        and (first.market, other.market) == ("on-demand", "on-demand")
        and first.training == other.training
        and first.row["region"] == other.row["region"]
        and first.types != other.types
    )


def _job(ranks: list[RankedCluster]) -> dict[str, Any]:
    first = ranks[0]
    groups = [
        {"InstanceType": f"ml.{offer['instance_type']}", "InstanceCount": int(offer["count"])}
        for offer in first.offers
    ]
    machines: dict[str, Any] = groups[0]
    if len(ranks) > 1:
        kinds = dict.fromkeys(f"ml.{one.types[0]}" for one in ranks)
        preferences = [{"InstanceType": kind, "InstanceCount": first.machines} for kind in kinds]
        machines = {"InstancePreferences": preferences}
    elif len(groups) > 1:
        named = [{"InstanceGroupName": f"group-{n}"} | one for n, one in enumerate(groups, 1)]
        machines = {"InstanceGroups": named}
    hours = RUNTIME_LIMIT_FACTOR * max(one.row["hours_p90"] for one in ranks)
    limit_s = min(MAX_RUNTIME_S, math.ceil(3600 * hours))
    request: dict[str, Any] = {
        "ResourceConfig": machines,
        "StoppingCondition": {"MaxRuntimeInSeconds": limit_s},
        "Environment": first.environment,
    }
    if first.market == "spot":
        request["EnableManagedSpotTraining"] = True
        request["StoppingCondition"]["MaxWaitTimeInSeconds"] = limit_s
    return {
        "ranks": [one.rank for one in ranks],
        "region": first.row["region"],
        "clusters": [one.row["cluster"] for one in ranks],
        "ec2_usd": [one.row["usd"] for one in ranks],
        "request": request,
    }
