"""Files of what starts machines and keeps them: a SkyPilot task, and NodePools of Karpenter with their overlays."""

from __future__ import annotations

import re
from typing import Any

import yaml

from models.domain.workload import Goal

from .choice import Choice, Ranked, refuse_local

PORT = 29500  # torchrun's own
_MIXED_GO = "`--to sagemaker` and `--to torchrun` take machines of several types"


def as_comment(lines: list[str]) -> str:
    """Lines with a # before each."""
    return "".join(f"# {line}\n" for line in lines)


def skypilot(choice: Choice) -> tuple[Any, str]:
    """A task with the rank asked for and, in order, those below that the same command trains; and its YAML.

    Raises ExportRefused where its machines are not all alike: a task has one kind of machine for all its nodes.
    """
    refuse_local(choice, "skypilot")
    choice.refuse(
        "skypilot",
        _for_one_task,
        f"A SkyPilot task has the same machines on all its nodes; {_MIXED_GO}",
    )
    first = choice.first
    taken, left_out = choice.alternatives(_for_one_task)
    places = [
        {
            "infra": "/".join(filter(None, ["aws", one.region, one.groups[0].zone])),
            "instance_type": one.types[0],
            "use_spot": one.groups[0].spot,
        }
        for one in taken
    ]
    task = {
        "name": _label(str(first.row["workload"])),
        "num_nodes": first.machines,
        "resources": places[0] if len(places) == 1 else {"ordered": places},
        "envs": first.environment | {"TRAINING_SCRIPT": "train.py"},
        "workdir": ".",
        "setup": 'python3 -c "import torch" || pip install torch\n',
        "run": _run(first),
    }
    said = [
        *choice.about,
        *left_out,
        "set TRAINING_SCRIPT to your script in this folder; `srift export --to torchrun` has the split and its sampler",
        *(
            ["`sky jobs launch` starts a spot task anew after an interruption"]
            if first.groups[0].spot
            else []
        ),
    ]
    return task, as_comment(said) + _as_yaml(task)


def karpenter(choice: Choice) -> tuple[Any, str]:
    """A NodePool for each market, the best rank's first, and an overlay for each type in it; and their YAML.

    Karpenter takes the type with the least price. An overlay adds to a type's price the share by which the job takes
    more machine hours on it than on the quickest of them, so that the least price is the least dollars of the job, at
    whatever Karpenter knows as the price that day. For a goal of hours it states a price in proportion to the hours.
    Raises ExportRefused where its machines are not all alike.
    """
    refuse_local(choice, "karpenter")
    choice.refuse(
        "karpenter",
        _for_one_pool,
        f"Karpenter chooses a type for each pod, and how many of which cannot be said; {_MIXED_GO}",
    )
    first = choice.first
    taken, left_out = choice.alternatives(_for_one_pool)
    name = _label(f"srift-{first.row['workload']}")[:40].rstrip("-")
    markets = list(dict.fromkeys(one.groups[0].market for one in taken))
    pools = [
        _pool(
            f"{name}-{market}",
            [one for one in taken if one.groups[0].market == market],
            len(markets) - at,
        )
        for at, market in enumerate(markets)
    ]
    overlays = _overlays(name, taken)
    nodes = f"{first.machines} pod{'s' if first.machines > 1 else ''}, one a node (devices: {first.row['layout']})"
    said = [
        *choice.about,
        *left_out,
        f"for a job of {nodes}; change nodeClassRef to your own EC2NodeClass",
        "a pool does not keep the pods of a job together: give them a podAffinity on topology.kubernetes.io/zone and"
        " node.kubernetes.io/instance-type, where there are several",
        "overlays are an alpha feature of Karpenter: start it with the feature gate NodeOverlay=true",
    ]
    objects = [*pools, *overlays]
    return objects, as_comment(said) + "---\n".join(map(_as_yaml, objects))


def _for_one_task(one: Ranked) -> str:
    return "" if not one.not_uniform else f"cannot be one task, since {one.not_uniform}"


def _for_one_pool(one: Ranked) -> str:
    return "" if not one.not_uniform else f"cannot be asked of a NodePool, since {one.not_uniform}"


def _run(one: Ranked) -> str:
    """Of each node, by SkyPilot's variables."""
    devices = str(one.layout[0])
    before = ""
    if len(set(one.layout)) > 1:
        before = f"devices=({' '.join(map(str, one.layout))})\n"
        devices = '"${devices[$SKYPILOT_NODE_RANK]}"'
    return (
        f'{before}torchrun --nnodes "$SKYPILOT_NUM_NODES" --node-rank "$SKYPILOT_NODE_RANK" --nproc-per-node {devices}'
        f' --master-addr "$(echo "$SKYPILOT_NODE_IPS" | head -n1)" --master-port {PORT} "$TRAINING_SCRIPT"\n'
    )


def _pool(name: str, ranks: list[Ranked], weight: int) -> dict[str, Any]:
    zones = [one.groups[0].zone for one in ranks]
    requirements = [
        _among("node.kubernetes.io/instance-type", [one.types[0] for one in ranks]),
        _among("karpenter.sh/capacity-type", [ranks[0].groups[0].market]),
        _among("topology.kubernetes.io/region", [one.region for one in ranks]),
        *(
            []
            if None in zones
            else [_among("topology.kubernetes.io/zone", [str(one) for one in zones])]
        ),
    ]
    spec = {
        "nodeClassRef": {"group": "karpenter.k8s.aws", "kind": "EC2NodeClass", "name": "default"},
        "requirements": requirements,
        "expireAfter": "Never",  # a training is not moved because its node is old
    }
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


def _overlays(name: str, ranks: list[Ranked]) -> list[dict[str, Any]]:
    """One a type and market: the best of its ranks counts."""
    by_kind: dict[tuple[str, str], Ranked] = {}
    for one in ranks:
        by_kind.setdefault((one.types[0], one.groups[0].market), one)
    least = min(_machine_hours(one) for one in by_kind.values())
    return [
        {
            "apiVersion": "karpenter.sh/v1alpha1",
            "kind": "NodeOverlay",
            "metadata": {"name": f"{name}-{market}-{kind}"},
            "spec": {
                "weight": 100,
                "requirements": [
                    _among("srift/pool", [f"{name}-{market}"]),
                    _among("node.kubernetes.io/instance-type", [kind]),
                    _among("karpenter.sh/capacity-type", [market]),
                ],
                **_priced(one, ranks[0], least),
            },
        }
        for (kind, market), one in by_kind.items()
    ]


def _priced(one: Ranked, first: Ranked, least_machine_hours: float) -> dict[str, str]:
    """Each has the same number of machines, so that hours compare as machine hours do."""
    price = first.groups[0].usd_per_hour
    if Goal(goal=str(first.row["goal"])).objective == "hours" and price is not None:
        return {"price": f"{price * one.row['hours'] / first.row['hours']:.4f}"}
    return {"priceAdjustment": f"+{100 * (_machine_hours(one) / least_machine_hours - 1):.1f}%"}


def _machine_hours(one: Ranked) -> float:
    return float(one.row["hours"]) * one.machines


def _among(key: str, values: list[str]) -> dict[str, Any]:
    return {"key": key, "operator": "In", "values": list(dict.fromkeys(values))}


def _label(text: str) -> str:
    """As a name of Kubernetes or of a SkyPilot task: small letters, digits and -."""
    return re.sub(r"[^a-z0-9-]+", "-", text.lower()).strip("-")


def _as_yaml(value: Any) -> str:
    return str(
        yaml.dump(value, Dumper=_Dumper, sort_keys=False, default_flow_style=False, width=1000)
    )


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    """Texts of several lines as blocks."""


def _text(dumper: yaml.SafeDumper, text: str) -> Any:
    return dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style="|" if "\n" in text else None
    )


_Dumper.add_representer(str, _text)
