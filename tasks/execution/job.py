"""Describe a planned launch as the job that nodes run, with the setup of each run."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from models.campaign.campaign import PlannedLaunch
from models.campaign.candidates import PlannedRun
from models.domain.cluster import Cluster, Offer
from models.domain.workload import Setup
from models.planner.learning import LEARNING_MOST_S, LEARNING_STEPS, LEARNING_WINDOWS

from ..node.data import S3
from ..node.record import (
    ANY,
    CPU,
    ELASTIC,
    LEARN,
    TRAINING,
    Devices,
    Item,
    WorkloadFile,
    write_json,
)
from ..workspace.environments import environment_at
from ..workspace.settings import Settings, SettingsError
from ..workspace.sources import Source
from ..workspace.workspace import code_commit, spends_money
from .outcomes import RunSetup, RunSetups

POLL_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One launch in the form that nodes receive.

    expected: the devices that each machine was bought with.
    run_setups: the setup of each run, by run id.
    rows: rows of runs that are left out because their workload lacks its data.
    lacking: the reasons, by workload.
    lose_after_s: seconds after its start at which an elastic run loses its last machine, by run id.
    """

    lease_id: str
    cluster: Cluster
    expected: tuple[Devices, ...]
    items: tuple[Item, ...]
    run_setups: RunSetups
    files: Sequence[tuple[WorkloadFile, Source]]
    seed: int
    deadline_s: float  # after acquisition; the machines then end themselves
    patience_s: float = 0.0  # for repeating disturbed measurements
    rows: tuple[dict[str, Any], ...] = ()
    lacking: Mapping[str, str] = field(default_factory=dict)
    lose_after_s: Mapping[str, float] = field(default_factory=dict)

    @property
    def fetched(self) -> dict[str, str]:
        """Return S3 addresses of the data that each machine fetches, by digest of the data."""
        return {spec.data_digest: spec.data for spec, _ in self.files if spec.data.startswith(S3)}


@dataclass(slots=True, kw_only=True)
class Served:
    """The result of a launch.

    rows: the controller's rows, for runs without a record.
    usd: None if unknown.
    seconds: duration by phase.
    lacked_devices: True if a machine lacked the devices that it was bought with.
    over_cap: True if the launch was refused for its cost, before any machine was requested.
    lacked_data: why a workload's data or requirements could not be fetched, by workload.
    """

    lease_id: str
    mailbox: Path | None = None
    outcome: str = ""
    lacked_devices: bool = False
    recorded: set[str] = field(default_factory=set)
    usd: float | None = 0.0
    rows: list[dict[str, Any]] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    over_cap: bool = False
    lacked_data: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """The time source of a launch. Tests replace it, so that they need not wait."""

    monotonic: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


Watch = Callable[[str, int, float | None], None]
# Called with the id of the run under way, the number of runs with a record, and this launch's
# dollars (None if unknown).


class Stopwatch:
    """Measures the phases of a launch. `lap` adds the seconds since the last lap to a phase."""

    def __init__(self, seconds: dict[str, float], clock: Clock) -> None:
        self._seconds, self.clock = seconds, clock
        self.began_s = self._last = clock.monotonic()

    def lap(self, phase: str) -> None:
        now = self.clock.monotonic()
        self._seconds[phase] = self._seconds.get(phase, 0.0) + now - self._last
        self._last = now


def write_rows(served: Served) -> None:
    """Write the rows of `served` that the mailbox lacks.

    If the disk is full, the rows are kept in `served` only.
    """
    if served.mailbox is None or not served.mailbox.is_dir():
        return
    for row in served.rows:
        file = served.mailbox / "controller" / "rows" / f"{row['run_id']}.json"
        if not file.exists():
            with suppress(OSError):
                write_json(file, row)


def placement(members: Sequence[Offer]) -> dict[str, Any]:
    """Return market, zone, region and dollars per hour of the machines that take part."""
    return {
        "market": "+".join(sorted({member.market for member in members})),
        "zone": members[0].zone,
        "region": members[0].region,
        "usd_per_hour": Cluster(members=tuple(members)).usd_per_hour,
    }


def with_acquired(
    run_setups: RunSetups, items: Iterable[Item], got: Cluster, image_id: str
) -> dict[str, RunSetup]:
    """Return `run_setups` with the zone, price and image of the machines acquired for `items`."""
    found = dict(run_setups)
    for item in items:
        acquired = placement([got.members[node] for node in item.nodes])
        found[item.run_id] = {**found[item.run_id], **acquired, "image_id": image_id or None}
    return found


# Suffixes of AWS's endpoints [botocore's partitions].
_OF_AWS = (
    *(".amazonaws.com", ".api.aws", ".amazonaws.com.cn", ".api.amazonwebservices.com.cn"),
    *(".amazonaws.eu", ".api.amazonwebservices.eu"),
)
START_UP_S = 150.0  # extends the deadline: hosts and torchrun may start slowly, yet hangs must end


def job_of(
    launch: PlannedLaunch,
    settings: Settings,
    *,
    lease_id: str,
    seed: int,
    deadline_s: float,
    data: Mapping[str, str] | None = None,
) -> Job:
    """Return the job for `launch`. A run's id is the lease's id and a number.

    deadline_s: seconds after acquisition, without START_UP_S.
    data: where machines read each workload's data, by workload name.
    Raises SettingsError if a file of a workload is missing, or if the cluster cannot serve an
    elastic run.
    """
    cluster = launch.cluster
    simulated = not spends_money(cluster.members[0].instance_type.provider)
    expected = expected_devices(cluster, emulated=_emulated(settings))
    files = []
    for name in workload_names(launch):
        spec, source = settings.travelling(name)
        if simulated and spec.requirements:  # local machines share this disk
            spec = replace(spec, environment=str(environment_at(settings.home, spec)))
        files.append((replace(spec, data=(data or {}).get(name, "")), source))
    digests = {spec.name: spec.digest for spec, _ in files}
    items, run_setups, lose_after_s = [], {}, {}
    for number, wanted in enumerate(launch.items):
        item = _item(wanted, f"{lease_id}-{number:03d}", seed)
        items.append(item)
        members = [cluster.members[node] for node in wanted.nodes]
        # needs a shared folder for checkpoints, and a rendezvous host that is never interrupted
        if item.kind == ELASTIC and not (simulated and members[0].interruptions_per_hour == 0):
            raise SettingsError(
                "nothing was launched: an elastic run needs local hosts, the first one on-demand"
            )
        devices = [asdict(expected[node]) for node in wanted.nodes]
        setup = _run_setup(wanted, members, digests)
        run_setups[item.run_id] = setup | {"expected_devices": devices}
        if wanted.lose_after_s is not None:
            lose_after_s[item.run_id] = wanted.lose_after_s
    return Job(
        lease_id=lease_id,
        cluster=cluster,
        expected=expected,
        items=tuple(items),
        run_setups=run_setups,
        files=files,
        seed=seed,
        deadline_s=deadline_s + START_UP_S,
        lose_after_s=lose_after_s,
    )


def expected_devices(cluster: Cluster, *, emulated: bool) -> tuple[Devices, ...]:
    """Return the devices of each machine in `cluster`. A machine fails if it lacks its devices.

    A rented machine without accelerators uses all its cores, a local host one thread within its
    CPU share. If `emulated`, rented machines are parts of this computer, and any device is right.
    """
    found = []
    for member in cluster.members:
        kind = member.instance_type
        rented = spends_money(kind.provider)
        name = ANY if emulated and rented else kind.device
        threads = 0 if name == CPU and rented else 1
        found.append(Devices(name=name, count=kind.devices, threads=threads))
    return tuple(found)


def _emulated(settings: Settings) -> bool:
    """Return True if [ec2] sets `emulated`.

    Raises SettingsError if `emulated` is set but the endpoint is AWS's own or missing.
    """
    endpoint = os.environ.get("AWS_ENDPOINT_URL_EC2") or os.environ.get("AWS_ENDPOINT_URL") or ""
    host = (urlsplit(endpoint).hostname or endpoint).lower().rstrip(".")
    if settings.ec2.emulated and f".{host}".endswith((".", *_OF_AWS)):
        raise SettingsError(
            "nothing was launched: [ec2] emulated needs AWS_ENDPOINT_URL to name an emulated AWS."
            " Set that variable, or remove emulated from srift.toml"
        )
    return settings.ec2.emulated


def _item(wanted: PlannedRun, run_id: str, seed: int) -> Item:
    workload, mode = wanted.trained
    kinds: dict[str, dict[str, Any]] = {
        LEARN: {
            "seed": wanted.seed,
            "most_steps": LEARNING_STEPS,
            "windows": LEARNING_WINDOWS,
            "most_s": LEARNING_MOST_S,
        },
        ELASTIC: {
            "most_steps": wanted.steps,
            "checkpoint_every": wanted.checkpoint_every,
            "wait_s": wanted.wait_s,
            "most_s": wanted.est_s,
        },
    }
    item = Item(
        run_id=run_id,
        kind=wanted.kind,
        nodes=list(wanted.nodes),
        workload=workload,
        **mode._asdict(),
        batches=list(wanted.batches),
        accumulation_steps=wanted.accumulation_steps,
        message_bytes=list(wanted.message_bytes),
        seed=seed,
        devices=list(wanted.devices),
    )
    return replace(item, **kinds.get(wanted.kind, {}))


def workload_names(launch: PlannedLaunch) -> list[str]:
    return sorted({wanted.trained[0] for wanted in launch.items if wanted.workload})


def _run_setup(
    wanted: PlannedRun, members: Sequence[Offer], digests: dict[str, str]
) -> dict[str, Any]:
    """Return the setup of a run, in columns of the measurement rows.

    digests: the workload's digest by name.
    """
    workload, mode = wanted.trained
    trains = wanted.kind in TRAINING
    setup = Setup(
        workload=workload,
        **mode._asdict(),
        cluster=Cluster(members=tuple(members)),
        layout=wanted.layout,
        batch_per_device=wanted.batches if trains else (1,) * len(members),
        accumulation_steps=wanted.accumulation_steps,
    ).row()
    types = [member.instance_type for member in members]
    return {
        **setup,
        **placement(members),
        "workload": workload or None,
        "batch_per_device": setup["batch_per_device"] if trains else None,
        "instance_types": [one.name for one in types],
        "instance_digests": [one.digest for one in types],
        "workload_digest": digests.get(workload),
        "code_commit": code_commit(),
        "reason_wanted": wanted.reason,
        "kind": wanted.kind,
    }
