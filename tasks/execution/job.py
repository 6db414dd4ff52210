"""Convert a planned launch to a job.

A job has an `Item` and a setup for each run. Machines receive the items. The setups are stored with
the results.
"""

import math
import os
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from models.campaign.candidates import PlannedRun
from models.campaign.shopping_list import PlannedLaunch
from models.domain.cluster import Cluster, Offer, cluster_name
from models.planner.learning import LEARNING_MOST_S, LEARNING_STEPS, LEARNING_WINDOWS

from ..node.data_paths import S3, Download
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
from .outcomes import RunSetups

POLL_S = 0.1


@dataclass(frozen=True, kw_only=True)
class Job:
    """One launch of a cluster, and the runs to measure on it.

    expected: the devices that each machine must have, in rank order.
    items: the runs, as machines receive them.
    run_setups: {run id: setup}, stored with the measurements. A setup is {column: value}, such as
        the run's cluster, batch and prices.
    files: the description and the source code of each workload.
    data: {workload: the place of its data, with the limits of its download}.
    lose_after_s: {id of an elastic run: seconds from its start until Srift stops the machine with
        the highest rank}. An elastic run measures the cost of losing a machine.
    """

    lease_id: str
    cluster: Cluster
    expected: tuple[Devices, ...]
    items: tuple[Item, ...]
    run_setups: RunSetups
    files: Sequence[tuple[WorkloadFile, Source]]
    seed: int
    deadline_s: float  # seconds after acquisition at which the machines end themselves
    max_usd_per_hour: float = math.inf  # maximum price of all machines; see `Allowance`
    download_usd: float = 0.0  # maximum dollars for the data that one machine downloads
    patience_s: float = 0.0  # seconds for repeating disturbed measurements
    lose_after_s: Mapping[str, float] = field(default_factory=dict)
    data: Mapping[str, Download] = field(default_factory=dict)

    @property
    def fetched(self) -> dict[str, Download]:
        """Return the data sets that every machine downloads, as {digest: download}."""
        return {
            spec.data_digest: self.data[spec.name]
            for spec, _ in self.files
            if spec.data.startswith(S3)
        }


@dataclass(kw_only=True)
class Served:
    """The result of a launch.

    mailbox: the folder with the files that machines wrote; None if no machines were acquired.
    outcome: how the launch ended, or why it got no machines, as text.
    unavailable: True if the provider could not supply the cluster, or if a machine lacked its
        expected devices.
    recorded: ids of the runs for which a machine wrote a record.
    usd: cost of the machines in dollars; None if unknown.
    rows: warehouse rows about runs without a record, and about failures of the launch. This process
        creates the rows, not the machines.
    seconds: {phase of the launch: seconds spent in it}.
    """

    lease_id: str
    mailbox: Path | None = None
    outcome: str = ""
    unavailable: bool = False
    recorded: set[str] = field(default_factory=set)
    usd: float | None = 0.0
    rows: list[dict[str, Any]] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Clock:
    """The time source of a launch. Tests replace the clock to avoid waits."""

    monotonic: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


# A function of the id of the current run, the number of runs with a record, and the dollars of the
# launch (None if unknown).
Watch = Callable[[str, int, float | None], None]


class Stopwatch:
    """Measures how long each phase of a launch takes.

    `lap(phase)` adds the seconds since the previous `lap` to the total of `phase`.
    """

    def __init__(self, seconds: dict[str, float], clock: Clock) -> None:
        self._seconds, self.clock = seconds, clock
        self._began = self._last = clock.monotonic()

    @property
    def passed_s(self) -> float:
        """Return the seconds since this stopwatch was created.

        A launch creates its stopwatch just before it requests machines.
        """
        return self.clock.monotonic() - self._began

    def lap(self, phase: str) -> None:
        now = self.clock.monotonic()
        self._seconds[phase] = self._seconds.get(phase, 0.0) + now - self._last
        self._last = now


def write_rows(result: Served) -> None:
    """Write each row of `result` to a file in the mailbox folder.

    On a full disk, the rows stay only in `result`.
    """
    if result.mailbox is None or not result.mailbox.is_dir():
        return
    for row in result.rows:
        file = result.mailbox / "controller" / "rows" / f"{row['run_id']}.json"
        with suppress(OSError):
            write_json(file, row)


def placement(members: Sequence[Offer]) -> dict[str, Any]:
    """Return market, zone, region and dollars per hour of a run's machines, as {column: value}.

    members: the offers of the machines.
    """
    return {
        "market": "+".join(sorted({member.market for member in members})),
        "zone": members[0].zone,
        "region": members[0].region,
        "usd_per_hour": Cluster(members=tuple(members)).usd_per_hour,
    }


def job_of(
    launch: PlannedLaunch,
    settings: Settings,
    *,
    lease_id: str,
    deadline_s: float,
    data: Mapping[str, Download],
) -> Job:
    """Return the job for `launch`. The id of a run is `lease_id` followed by a number.

    data: {workload: the folder or S3 address from which machines read its data, with the limits of
        a download from S3}.

    Raises:
        SettingsError: if a workload's code cannot be sent to machines, or if [ec2] emulated is set
            but AWS_ENDPOINT_URL does not name this computer.
    """
    cluster = launch.cluster
    seed = zlib.crc32(f"{settings.campaign.seed}/{lease_id}".encode())
    local = not spends_money(cluster.members[0].instance_type.provider)
    expected = expected_devices(cluster, emulated=_is_emulated(settings))
    files = []
    for name in workload_names(launch):
        spec, source = settings.code_to_send(name)
        if local and spec.requirements:  # local machines share this disk
            spec = replace(spec, environment=str(environment_at(settings.home, spec)))
        files.append((replace(spec, data=data[name].address if name in data else ""), source))
    digests = {spec.name: spec.digest for spec, _ in files}
    items, run_setups, lose_after_s = [], {}, {}
    for number, run in enumerate(launch.items):
        item = _item(run, f"{lease_id}-{number:03d}", seed)
        items.append(item)
        members = [cluster.members[node] for node in run.nodes]
        devices = [asdict(expected[node]) for node in run.nodes]
        setup = _run_setup(run, members, digests)
        run_setups[item.run_id] = setup | {"expected_devices": devices}
        if run.lose_after_s is not None:
            lose_after_s[item.run_id] = run.lose_after_s
    return Job(
        lease_id=lease_id,
        cluster=cluster,
        expected=expected,
        items=tuple(items),
        run_setups=run_setups,
        files=files,
        data=data,
        seed=seed,
        deadline_s=deadline_s,
        lose_after_s=lose_after_s,
    )


def expected_devices(cluster: Cluster, *, emulated: bool) -> tuple[Devices, ...]:
    """Return the devices that each machine in `cluster` must have, in rank order.

    A run fails on a machine without these devices. The field `threads` is the number of CPU
    threads per rank:

    - EC2 machines without accelerators: 0, which means one thread per core
    - Local hosts, EC2 machines with accelerators and emulated EC2 machines: 1

    emulated: True if EC2 machines are emulated on this computer. An emulated machine may have any
        device.
    """
    devices = []
    for member in cluster.members:
        kind = member.instance_type
        is_rented = spends_money(kind.provider)
        name = ANY if emulated and is_rented else kind.device
        threads = 0 if name == CPU and is_rented else 1
        devices.append(Devices(name=name, count=kind.devices, threads=threads))
    return tuple(devices)


def _is_emulated(settings: Settings) -> bool:
    """Return True if [ec2] sets `emulated`.

    Raises SettingsError if `emulated` is set but AWS_ENDPOINT_URL does not name this computer.
    """
    endpoint = os.environ.get("AWS_ENDPOINT_URL_EC2") or os.environ.get("AWS_ENDPOINT_URL", "")
    host = f".{urlsplit(endpoint).hostname}"
    if settings.ec2.emulated and not host.endswith((".localhost", ".127.0.0.1")):
        raise SettingsError(
            "nothing was launched: srift.toml sets `emulated` in section [ec2], but the environment"
            " variable AWS_ENDPOINT_URL does not name a server on this computer. Set"
            " AWS_ENDPOINT_URL to such a server, or remove `emulated` from srift.toml"
        )
    return settings.ec2.emulated


def _item(run: PlannedRun, run_id: str, seed: int) -> Item:
    """Convert a planned run to the `Item` that machines receive."""
    item = Item(
        run_id=run_id,
        kind=run.kind,
        nodes=list(run.nodes),
        workload=run.workload,
        **run.mode._asdict(),
        batches=list(run.batches),
        accumulation_steps=run.accumulation_steps,
        message_bytes=list(run.message_bytes),
        seed=seed,
        devices=list(run.devices),
    )
    if run.kind == LEARN:
        return replace(
            item,
            seed=run.seed,
            most_steps=LEARNING_STEPS,
            windows=LEARNING_WINDOWS,
            most_s=LEARNING_MOST_S,
        )
    if run.kind == ELASTIC:
        return replace(
            item,
            most_steps=run.steps,
            checkpoint_every=run.checkpoint_every,
            wait_s=run.wait_s,
            most_s=run.est_s,
        )
    return item


def workload_names(launch: PlannedLaunch) -> list[str]:
    return sorted({run.workload for run in launch.items} - {""})


def _run_setup(
    run: PlannedRun, members: Sequence[Offer], digests: dict[str, str]
) -> dict[str, Any]:
    """Return the setup of a run as {column: value}, to be stored with its measurement.

    members: the offers of the run's machines.
    digests: {workload: digest of its code and settings}.
    """
    types, setup = [member.instance_type for member in members], run.row()
    names = [instance_type.name for instance_type in types]
    return {
        **setup,
        "cluster": cluster_name(names),
        **placement(members),
        "provider": types[0].provider,
        "workload": run.workload or None,
        "batch_per_device": setup["batch_per_device"] if run.kind in TRAINING else None,
        "instance_types": names,
        "instance_digests": [instance_type.digest for instance_type in types],
        "workload_digest": digests.get(run.workload),
        "code_commit": code_commit(),
        "reason_wanted": run.reason,
    }
