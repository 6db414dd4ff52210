"""A launch of the campaign as the job that nodes understand, each run with what is known of its setup."""

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
from ..workspace.workspace import capabilities, code_commit

POLL_S = 0.1

Files = Sequence[tuple[WorkloadFile, Source]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One launch as the nodes will see it. `run_setups` tells for each run_id what the controller knows of its setup.

    `expected` are the devices that each machine of the cluster is bought for. `rows` are those of its runs that cannot
    be made, since the data of their workloads are not to be had; `lacking` says of which workloads, and why.
    `lose_after_s`: of elastic runs whose last machine is to be taken away, when, since all were let go.
    """

    lease_id: str
    cluster: Cluster
    expected: tuple[Devices, ...]
    items: tuple[Item, ...]
    run_setups: Mapping[str, Mapping[str, Any]]
    files: Files
    seed: int
    deadline_s: float  # from acquisition; the machines end themselves then
    patience_s: float = 0.0  # for measuring again what was disturbed
    rows: tuple[dict[str, Any], ...] = ()
    lacking: Mapping[str, str] = field(default_factory=dict)
    lose_after_s: Mapping[str, float] = field(default_factory=dict)

    @property
    def fetched(self) -> dict[str, str]:
        """Addresses of the data that each machine fetches before it measures, by the digest that names them there."""
        return {spec.data_digest: spec.data for spec, _ in self.files if spec.data.startswith(S3)}


@dataclass(slots=True, kw_only=True)
class Served:
    """What became of a launch. `rows` are the controller's: runs that have no record and why. `usd` None: unknown.

    `lacked_devices`: one of its machines did not have those that it was bought for.
    `over_cap`: it was refused for its dollars, and no machine was asked for. `lacked_data`: workloads whose data were
    not to be had, or whose requirements were not just then, and why.
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
    """Where the seconds come from, so that a test need not wait for them."""

    monotonic: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


Watch = Callable[[str, int, float | None], None]
"""Called with the run under way, how many runs have a record, and the dollars of this launch so far."""


class Stopwatch:
    """Adds the seconds since the last lap to a named phase."""

    def __init__(self, seconds: dict[str, float], clock: Clock) -> None:
        self._seconds, self.clock = seconds, clock
        self.began_s = self._last = clock.monotonic()

    def lap(self, phase: str) -> None:
        """The time since the last one went to `phase`."""
        now = self.clock.monotonic()
        self._seconds[phase] = self._seconds.get(phase, 0.0) + now - self._last
        self._last = now


def write_rows(served: Served) -> None:
    """Put the rows that are not there yet into the mailbox. One that a full disk refuses stays in `served`."""
    if served.mailbox is None or not served.mailbox.is_dir():
        return
    for row in served.rows:
        file = served.mailbox / "controller" / "rows" / f"{row['run_id']}.json"
        if not file.exists():
            with suppress(OSError):
                write_json(file, row)


RunSetup = Mapping[str, Any]


def placement(members: Sequence[Offer]) -> dict[str, Any]:
    """Market, zone, region and dollars an hour of the machines that take part; several markets are joined by '+'."""
    return {
        "market": "+".join(sorted({member.market for member in members})),
        "zone": members[0].zone,
        "region": members[0].region,
        "usd_per_hour": Cluster(members=tuple(members)).usd_per_hour,
    }


def with_acquired(
    run_setups: Mapping[str, RunSetup], items: Iterable[Item], got: Cluster, *, image_id: str = ""
) -> dict[str, RunSetup]:
    """`run_setups` with those of `items` as they are on the cluster that was got: it may be elsewhere, and dearer.

    `image_id`, where there is one, is the image that its machines started from.
    """
    image = {"image_id": image_id} if image_id else {}
    found = {
        item.run_id: placement([got.members[node] for node in item.nodes]) | image for item in items
    }
    return {
        run_id: {**run_setup, **found.get(run_id, {})} for run_id, run_setup in run_setups.items()
    }


# suffixes of AWS's own endpoints, the second of each line those with IPv6 [botocore's partitions]
_OF_AWS = (
    *(".amazonaws.com", ".api.aws"),
    *(".amazonaws.com.cn", ".api.amazonwebservices.com.cn"),
    *(".amazonaws.eu", ".api.amazonwebservices.eu"),
)
START_UP_S = 150.0  # of the lease's deadline: hosts and torchrun may be slow, a hang must still end


def job_of(
    launch: PlannedLaunch,
    settings: Settings,
    *,
    lease_id: str,
    seed: int,
    deadline_s: float,
    data: Mapping[str, str] | None = None,
) -> Job:
    """The job that serves `launch`; its runs are numbered within the lease.

    Raises SettingsError on a missing file, and for an elastic run where it cannot be.

    `data`: where machines read the data of workloads that have some, by name.
    """
    _refuse_elastic(launch)
    expected = expected_devices(launch.cluster, emulated=_emulated(settings))
    items = [_item(wanted, f"{lease_id}-{n:03d}", seed) for n, wanted in enumerate(launch.items)]
    names = workload_names(launch)
    simulated = capabilities(launch.cluster.members[0].instance_type.provider).simulated
    files = [
        _file(settings, name, (data or {}).get(name, ""), simulated=simulated) for name in names
    ]
    digests = {spec.name: spec.digest for spec, _ in files}
    run_setups = {
        item.run_id: _run_setup(wanted, [launch.cluster.members[n] for n in wanted.nodes], digests)
        | {"expected_devices": [asdict(expected[n]) for n in wanted.nodes]}
        for item, wanted in zip(items, launch.items, strict=True)
    }
    return Job(
        lease_id=lease_id,
        cluster=launch.cluster,
        expected=expected,
        items=tuple(items),
        run_setups=run_setups,
        files=files,
        seed=seed,
        deadline_s=deadline_s + START_UP_S,
        lose_after_s={
            item.run_id: wanted.lose_after_s
            for item, wanted in zip(items, launch.items, strict=True)
            if wanted.lose_after_s is not None
        },
    )


def _refuse_elastic(launch: PlannedLaunch) -> None:
    """Raises SettingsError for an elastic run on machines without a folder that all see, or whose first one may go."""
    elastic = [one for one in launch.items if one.kind == ELASTIC]
    provider, members = launch.cluster.members[0].instance_type.provider, launch.cluster.members
    if elastic and not capabilities(provider).simulated:
        raise SettingsError(
            f"an elastic run needs a folder for checkpoints that all its machines see, and those of {provider} have"
            " none yet: take local hosts. Nothing was launched"
        )
    for one in elastic:
        if members[one.nodes[0]].interruptions_per_hour > 0:
            raise SettingsError(
                "the first machine of an elastic run, where the others meet, must stay, and that of"
                f" {launch.cluster.name} may be taken away: buy it on demand. Nothing was launched"
            )


def expected_devices(cluster: Cluster, *, emulated: bool) -> tuple[Devices, ...]:
    """What each machine of `cluster` is bought for, and shall measure on or fail.

    A rented machine without accelerators computes with all its cores, a local host with one thread within its share. In
    an emulation no device is expected: its machines are parts of this one, whatever they are sold as.
    """

    def devices(member: Offer) -> Devices:
        one = member.instance_type
        rented = not capabilities(one.provider).simulated
        if emulated and rented:
            return Devices(name=ANY, count=one.devices)
        whole = one.device == CPU and rented
        return Devices(name=one.device, count=one.devices, threads=0 if whole else 1)

    return tuple(devices(member) for member in cluster.members)


def _emulated(settings: Settings) -> bool:
    """Whether [ec2] says that its machines are emulated. Raises SettingsError where they would be AWS's own."""
    endpoint = os.environ.get("AWS_ENDPOINT_URL_EC2") or os.environ.get("AWS_ENDPOINT_URL") or ""
    host = (urlsplit(endpoint).hostname or endpoint).lower().rstrip(".")
    if settings.ec2.emulated and f".{host}".endswith((".", *_OF_AWS)):
        raise SettingsError(
            "[ec2] emulated is for an AWS that is emulated, and AWS_ENDPOINT_URL names none: take it out of srift.toml."
            " Nothing was launched"
        )
    return settings.ec2.emulated


def _item(wanted: PlannedRun, run_id: str, seed: int) -> Item:
    workload, mode = wanted.trained
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
    if wanted.kind == ELASTIC:
        return replace(
            item,
            most_steps=wanted.steps,
            checkpoint_every=wanted.checkpoint_every,
            wait_s=wanted.wait_s,
            most_s=wanted.est_s,
        )
    if wanted.kind != LEARN:
        return item
    return replace(
        item,
        seed=wanted.seed,
        most_steps=LEARNING_STEPS,
        windows=LEARNING_WINDOWS,
        most_s=LEARNING_MOST_S,
    )


def _file(
    settings: Settings, name: str, data: str, *, simulated: bool
) -> tuple[WorkloadFile, Source]:
    """With where machines read its `data`, and the folder of its installed requirements where they share this disk."""
    spec, source = settings.travelling(name)
    if simulated and spec.requirements:
        spec = replace(spec, environment=str(environment_at(settings.home, spec)))
    return replace(spec, data=data), source


def workload_names(launch: PlannedLaunch) -> list[str]:
    """Workloads that `launch` measures."""
    return sorted({wanted.trained[0] for wanted in launch.items if wanted.workload})


def _run_setup(
    wanted: PlannedRun, members: Sequence[Offer], digests: dict[str, str]
) -> dict[str, Any]:
    """What the controller knows of a run's setup, in the columns of the measurement rows."""
    cluster = Cluster(members=tuple(members))
    workload, mode = wanted.trained
    setup = Setup(
        workload=workload,
        **mode._asdict(),
        cluster=cluster,
        layout=wanted.layout,
        batch_per_device=wanted.batches if wanted.kind in TRAINING else (1,) * len(members),
        accumulation_steps=wanted.accumulation_steps,
    )
    types = [member.instance_type for member in members]
    return (
        setup.row()
        | placement(members)
        | {
            "workload": wanted.trained[0] or None,
            "batch_per_device": setup.row()["batch_per_device"]
            if wanted.kind in TRAINING
            else None,
            "instance_types": [t.name for t in types],
            "instance_digests": [t.digest for t in types],
            "workload_digest": digests.get(wanted.trained[0]),
            "code_commit": code_commit(),
            "reason_wanted": wanted.reason,
            "kind": wanted.kind,
        }
    )
