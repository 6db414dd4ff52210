"""Turn a launch of the shopping list into the job that nodes understand, each run with an envelope of provenance."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from models.campaign import Launch, Wanted
from models.cloud import Cluster, Offer
from models.workload import Setup

from .benchmark import Job
from .envelopes import whereabouts
from .node.record import Item, WorkloadFile
from .settings import Settings

START_UP_S = 150.0  # of the lease's deadline: hosts and torchrun may be slow, a hang must still end


def job_of(launch: Launch, settings: Settings, *, lease_id: str, seed: int, deadline_s: float) -> Job:
    """The job that serves `launch`; its runs are numbered within the lease. Raises SettingsError on a missing file."""
    items = [_item(wanted, f"{lease_id}-{n:03d}", seed) for n, wanted in enumerate(launch.items)]
    names = sorted({wanted.workload for wanted in launch.items if wanted.workload})
    files = [_file(settings, name) for name in names]
    digests = {spec.name: spec.digest for spec, _ in files}
    envelopes = {
        item.run_id: _envelope(wanted, [launch.cluster.members[n] for n in wanted.nodes], digests)
        for item, wanted in zip(items, launch.items, strict=True)
    }
    return Job(
        lease_id=lease_id,
        cluster=launch.cluster,
        items=tuple(items),
        envelopes=envelopes,
        files=files,
        seed=seed,
        deadline_s=deadline_s + START_UP_S,
    )


def _item(wanted: Wanted, run_id: str, seed: int) -> Item:
    return Item(
        run_id=run_id,
        kind=wanted.kind,
        nodes=list(wanted.nodes),
        workload=wanted.workload,
        batches=list(wanted.batches),
        accumulation_steps=wanted.accumulation_steps,
        message_bytes=list(wanted.message_bytes),
        seed=seed,
        devices=list(wanted.devices),
    )


def _file(settings: Settings, name: str) -> tuple[WorkloadFile, Path]:
    path, function = settings.entrypoint(name)
    digest = settings.workload_digest(name)
    spec = WorkloadFile(
        name=name,
        digest=digest,
        file=f"workloads/{digest}.py",
        function=function,
        arguments=dict(settings.workloads[name].arguments),
    )
    return spec, path


def _envelope(wanted: Wanted, members: Sequence[Offer], digests: dict[str, str]) -> dict[str, Any]:
    """What the controller knows of a run's setup, in the columns of the measurement rows."""
    cluster = Cluster(members=tuple(members))
    setup = Setup(
        workload=wanted.workload,
        cluster=cluster,
        layout=wanted.layout,
        batch_per_device=wanted.batches if wanted.kind == "train" else (1,) * len(members),
        accumulation_steps=wanted.accumulation_steps,
    )
    types = [member.instance_type for member in members]
    return (
        setup.row()
        | whereabouts(members)
        | {
            "workload": wanted.workload or None,
            "batch_per_device": setup.row()["batch_per_device"] if wanted.kind == "train" else None,
            "instance_types": [t.name for t in types],
            "instance_digests": [t.digest for t in types],
            "workload_digest": digests.get(wanted.workload),
            "code_commit": code_commit(),
            "reason_wanted": wanted.reason,
        }
    )


@cache
def code_commit() -> str:
    """Commit of the running code, with `-dirty` where the tree differs; "unknown" outside a checkout."""
    here = Path(__file__).parent
    try:
        return subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12", "--match", ""],
            cwd=here,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
