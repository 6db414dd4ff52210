"""Export Karpenter NodePools, and NodeOverlays that adjust prices to the goal.

Karpenter buys the instance type with the lowest price per hour, but a job may take more hours on
this type. An overlay therefore raises the price of each type that is slower than the fastest type.
For example, 20 % more hours raise the price by 20 %. If the goal is to minimize hours, an overlay
replaces a type's price by a price proportional to the job's hours. The fastest type is then the
cheapest.
"""

from typing import Any

from models.domain.workload import Goal

from .selection import RankedCluster, Selection, as_comment, as_yaml, label


def karpenter(selection: Selection) -> tuple[Any, str]:
    """Return a list of Kubernetes objects, and their YAML text.

    The objects are a NodePool for each market and a NodeOverlay for each instance type and market.

    Raises:
        ExportRefused: if the requested cluster has local hosts or several instance types.
    """
    selection.require_cloud("karpenter")
    first, ranks = selection.first, selection.interchangeable
    name = label(f"srift-{first.row['workload']}")[:40].rstrip("-")
    markets = list(dict.fromkeys(choice.market for choice in ranks))
    objects = [
        _pool(name, [choice for choice in ranks if choice.market == market], len(markets) - place)
        for place, market in enumerate(markets)
    ]
    objects += _overlays(name, ranks)
    notes = [
        *selection.about,
        f"for a job of {first.machines} pods, one on each node (devices: {first.row['layout']});"
        " replace nodeClassRef with your EC2NodeClass",
        "keep the pods of a job together with a podAffinity on topology.kubernetes.io/zone and"
        " node.kubernetes.io/instance-type",
        "overlays are an alpha feature: start Karpenter with the feature gate NodeOverlay=true",
    ]
    return objects, as_comment(notes) + "---\n".join(map(as_yaml, objects))


def _pool(name: str, ranks: list[RankedCluster], weight: int) -> dict[str, Any]:
    """Return a Karpenter NodePool for the clusters `ranks`, which have the same market.

    Karpenter tries the pool with the highest `weight` first.
    """
    name = f"{name}-{ranks[0].market}"
    zones = [choice.zone for choice in ranks]
    requirements = [
        _in("node.kubernetes.io/instance-type", *(choice.types[0] for choice in ranks)),
        _in("karpenter.sh/capacity-type", ranks[0].market),
        _in("topology.kubernetes.io/region", *(choice.row["region"] for choice in ranks)),
        *([] if None in zones else [_in("topology.kubernetes.io/zone", *zones)]),
    ]
    node_class = {"group": "karpenter.k8s.aws", "kind": "EC2NodeClass", "name": "default"}
    spec = {"nodeClassRef": node_class, "requirements": requirements, "expireAfter": "Never"}
    return {
        "apiVersion": "karpenter.sh/v1",
        "kind": "NodePool",
        "metadata": {"name": name},
        "spec": {
            "weight": weight,
            "template": {"metadata": {"labels": {"srift/pool": name}}, "spec": spec},
            "disruption": {"consolidationPolicy": "WhenEmpty", "consolidateAfter": "60s"},
        },
    }


def _overlays(name: str, ranks: list[RankedCluster]) -> list[dict[str, Any]]:
    """Return a Karpenter NodeOverlay for each instance type and market.

    The adjusted price is computed from the hours of the best cluster with this type and market.
    """
    best: dict[tuple[str, str], RankedCluster] = {}
    for choice in ranks:
        best.setdefault((choice.types[0], choice.market), choice)
    by_hours = Goal(goal=ranks[0].row["goal"]).objective == "hours"
    price, hours = ranks[0].offers[0]["usd_per_hour"], ranks[0].row["hours"]
    fastest = min(choice.row["hours"] for choice in best.values())
    overlays = []
    for (kind, market), choice in best.items():
        adjustment = {"priceAdjustment": f"+{100 * (choice.row['hours'] / fastest - 1):.1f}%"}
        if by_hours and price is not None:
            adjustment = {"price": f"{price * choice.row['hours'] / hours:.4f}"}
        requirements = [
            _in("srift/pool", f"{name}-{market}"),
            _in("node.kubernetes.io/instance-type", kind),
            _in("karpenter.sh/capacity-type", market),
        ]
        overlays.append(
            {
                "apiVersion": "karpenter.sh/v1alpha1",
                "kind": "NodeOverlay",
                "metadata": {"name": f"{name}-{market}-{kind}"},
                "spec": {"weight": 100, "requirements": requirements, **adjustment},
            }
        )
    return overlays


def _in(key: str, *values: str | None) -> dict[str, Any]:
    """Return a Karpenter requirement: the node label `key` must have one of `values`."""
    return {"key": key, "operator": "In", "values": list(dict.fromkeys(values))}
