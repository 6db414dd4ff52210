"""Export a SkyPilot task that starts the recommended machines and trains on them."""

from typing import Any

from .selection import PORT, RankedCluster, Selection, as_comment, as_yaml, label


def skypilot(selection: Selection) -> tuple[Any, str]:
    """Return a SkyPilot task as a dictionary, and its YAML text.

    SkyPilot tries the requested cluster first, then the lower-ranked clusters that can replace it.

    Raises:
        ExportRefused: if the requested cluster has local hosts or several instance types.
    """
    selection.require_cloud("skypilot")
    first = selection.first
    resources = [
        {
            "infra": "/".join(filter(None, ("aws", choice.row["region"], choice.zone))),
            "instance_type": choice.types[0],
            "use_spot": choice.market == "spot",
        }
        for choice in selection.interchangeable
    ]
    task = {
        "name": label(first.row["workload"]),
        "num_nodes": first.machines,
        "resources": resources[0] if len(resources) == 1 else {"ordered": resources},
        "envs": first.environment | {"TRAINING_SCRIPT": "train.py"},
        "workdir": ".",
        "setup": 'python3 -c "import torch" || pip install torch',
        "run": _run(first),
    }
    notes = [
        *selection.about,
        "set TRAINING_SCRIPT to your script; `srift export --to torchrun` writes a sampler for it",
    ]
    return task, as_comment(notes) + as_yaml(task)


def _run(cluster: RankedCluster) -> str:
    """Return the shell command that starts torchrun on each node."""
    devices, before = str(cluster.layout[0]), ""
    if len(set(cluster.layout)) > 1:
        before = f"devices=({' '.join(map(str, cluster.layout))})\n"
        devices = '"${devices[$SKYPILOT_NODE_RANK]}"'
    return (
        f'{before}torchrun --nnodes "$SKYPILOT_NUM_NODES" --node-rank "$SKYPILOT_NODE_RANK"'
        f' --nproc-per-node {devices} --master-addr "$(echo "$SKYPILOT_NODE_IPS" | head -n1)"'
        f' --master-port {PORT} "$TRAINING_SCRIPT"'
    )
