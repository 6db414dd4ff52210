"""Export a recommendation as part of a request for a SageMaker training job."""

import json
import math
from itertools import groupby
from typing import Any

from ...providers.ec2.api import shape_of
from .selection import ExportRefused, RankedCluster, Selection

MAX_RUNTIME_S = 28 * 86400  # SageMaker's limit on the duration of a training job
# The runtime limit is this factor times the 90th percentile of the hours. Only jobs that hang
# should reach the limit, because a stopped job costs money and produces nothing.
RUNTIME_LIMIT_FACTOR = 2.0


def sagemaker(selection: Selection) -> tuple[Any, str]:
    """Return a document with CreateTrainingJob requests, best cluster first, and its JSON text.

    The requests are incomplete. The user adds, for example, a name, a role and an image.

    Raises:
        ExportRefused: if the requested cluster has local hosts, or if SageMaker can run none of the
            clusters in `selection.candidates`.
    """
    selection.require_cloud("sagemaker", single_type=False)
    instance_types = shape_of("sagemaker", "TrainingInstanceType").enum
    able, left_out = [], []
    for choice in selection.candidates:
        if problem := _problem(choice, instance_types):
            left_out.append(f"rank {choice.rank}: {problem}")
        else:
            able.append(choice)
    if not able:
        raise ExportRefused(f"SageMaker cannot run any of the clusters: {'; '.join(left_out)}")
    document = {
        "about": [
            *selection.about,
            "try the requests in order; add name, role, image, data, output and volume size",
            "dollars are EC2 prices, not SageMaker prices",
        ],
        "jobs": [_job(list(ranks)) for _, ranks in groupby(able, _alternatives)],
        "left_out": left_out,
    }
    return document, json.dumps(document, indent=2)


def _problem(cluster: RankedCluster, instance_types: frozenset[str]) -> str:
    """Return the reason why SageMaker cannot train on the cluster, or "" if it can.

    instance_types: the names of SageMaker's instance types.
    """
    missing = [f"ml.{kind}" for kind in cluster.types if f"ml.{kind}" not in instance_types]
    if missing:
        return f"SageMaker does not offer {' and '.join(missing)}"
    if cluster.row["hours_p90"] * 3600 > MAX_RUNTIME_S:
        return f"a training job runs at most {MAX_RUNTIME_S // 86400} days"
    return ""


def _alternatives(cluster: RankedCluster) -> tuple[object, ...]:
    """Return a key. Consecutive clusters with equal keys become alternatives in one request.

    SageMaker starts one of the alternatives. On-demand clusters of a single instance type have
    equal keys if they have the same region and training command. Any other cluster has a unique
    key.
    """
    if cluster.market == "spot" or len(cluster.types) > 1:
        return (cluster.rank,)
    return cluster.row["region"], cluster.training


def _job(ranks: list[RankedCluster]) -> dict[str, Any]:
    """Return one job of the exported document, with its CreateTrainingJob request.

    ranks: the clusters among which SageMaker chooses, best first.
    """
    first = ranks[0]
    groups = [
        {"InstanceType": f"ml.{offer['instance_type']}", "InstanceCount": offer["count"]}
        for choice in ranks
        for offer in choice.offers
    ]
    machines: dict[str, Any] = groups[0]
    if len(ranks) > 1:
        machines = {"InstancePreferences": groups}
    elif len(groups) > 1:
        instance_groups = [
            {"InstanceGroupName": f"group-{n}"} | choice for n, choice in enumerate(groups, 1)
        ]
        machines = {"InstanceGroups": instance_groups}
    hours = RUNTIME_LIMIT_FACTOR * max(choice.row["hours_p90"] for choice in ranks)
    stop_condition = {"MaxRuntimeInSeconds": min(MAX_RUNTIME_S, math.ceil(3600 * hours))}
    request: dict[str, Any] = {"ResourceConfig": machines, "Environment": first.environment}
    if first.market == "spot":
        request["EnableManagedSpotTraining"] = True
        stop_condition["MaxWaitTimeInSeconds"] = stop_condition["MaxRuntimeInSeconds"]
    return {
        "ranks": [choice.rank for choice in ranks],
        "region": first.row["region"],
        "clusters": [choice.row["cluster"] for choice in ranks],
        "ec2_usd": [choice.row["usd"] for choice in ranks],
        "request": request | {"StoppingCondition": stop_condition},
    }
