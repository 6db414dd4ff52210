"""A workload's data brought to where its machines read them, before any machine is requested.

             local hosts                                  machines of EC2
a folder     read where it lies                           uploaded once below data/ of [ec2] bucket
an address   fetched once into SRIFT_HOME/data/<digest>   fetched by each machine (on_ec2/fetch.py)

Data that cannot be brought are a problem of that workload's runs; the runs of other workloads go
on.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from ..node.data import KEPT_FREE_BYTES, S3, files_of
from ..providers.base import ProviderError
from ..providers.ec2.api import Clients, Ec2Api, Store, asking, connect
from ..providers.ec2.survey import least_gib
from ..reporting.progress import reporter
from ..workspace.workload_data import (
    MOST_FILES,
    Address,
    BadData,
    WorkloadData,
    digest_of_data,
    files_below,
    said_bytes,
)
from ..workspace.workspace import Workspace

GIB = 2**30
MOST_LOCAL_BYTES = 50 * GIB  # with more, the user chooses the disk
_LEFT_FREE_BYTES = GIB  # of the disk of SRIFT_HOME
# What a machine fetches in a second, taken low, for a launch's deadline: half of what a gp3 volume
# writes (125 MiB/s) where nothing more is paid for it, and small objects on several connections.
FETCHED_BYTES_PER_S, FETCHED_FILES_PER_S = 60e6, 100.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DataPlan:
    """Where machines read the data of workload `name`, and what has to be moved before.

    `place` is a folder of this machine or an address. `files`: bytes by name; None if unknown.
    `move` is "fetch", "upload" or empty. `problem`: why the workload cannot have its data.
    """

    name: str
    place: str = ""
    files: Mapping[str, int] | None = None
    move: str = ""
    problem: str = ""

    @property
    def size(self) -> int | None:
        """Bytes of all files; None if unknown."""
        return None if self.files is None else sum(self.files.values())

    def __str__(self) -> str:
        size = "unknown size" if self.size is None else said_bytes(self.size)
        what = f"{self.move or 'read'} {self.place} ({size})"
        return f"data of {self.name}: {self.problem or what}"


class DataCarrier:
    """Plans and moves data of `workspace`'s workloads. `clients` replaces boto3's."""

    def __init__(self, workspace: Workspace, clients: Clients | None = None) -> None:
        self._workspace, self._given = workspace, clients
        self._settings = workspace.settings
        self._planned: dict[str, DataPlan] = {}  # launches of a dry run share data

    def plans(self, names: Iterable[str], region: str) -> list[DataPlan]:
        """Plan the workloads of `names` that have data, for machines in `region`. Moves nothing."""
        found, taken = [], 0
        for name in names:
            data = self._settings.data(name)
            if data is None:
                continue
            try:
                if name not in self._planned:
                    self._planned[name] = self._plan(name, data)
                plan = self._planned[name]
                taken += plan.size or 0
                if plan.size and self._workspace.spends_money:
                    self._refuse_too_much(taken, region)
            except (ValueError, ProviderError) as error:
                plan = DataPlan(name=name, problem=f"{data.text}: {error}")
            found.append(plan)
        return found

    def carry(self, plan: DataPlan) -> DataPlan:
        """Move what has to be moved. Returns the plan, with a problem if that failed."""
        data = self._settings.data(plan.name)
        if plan.problem or not plan.move or data is None:
            return plan
        try:
            if isinstance(data.source, Path):
                self._move(plan, data.source, self._uploaded(data))
            else:
                folder = Path(plan.place)
                beside = folder.with_name(f"{folder.name}.part")  # files of an earlier try count
                self._move(plan, beside, data.source)
                beside.rename(folder)
        except (BadData, ProviderError, OSError) as error:
            problem = f"its data could not be {plan.move}ed: {error}; refresh again"
            return DataPlan(name=plan.name, problem=problem)
        return replace(plan, move="")

    def _plan(self, name: str, data: WorkloadData) -> DataPlan:
        local, files = not self._workspace.spends_money, None
        if isinstance(data.source, Path):
            files = files_below(data.source)
            if digest_of_data(data.text, files) != data.digest:
                raise BadData("its files were changed: refresh again to measure it")
            if local:
                return DataPlan(name=name, place=str(data.source), files=files)
            return DataPlan(name=name, place=str(self._uploaded(data)), files=files, move="upload")
        if not local:
            try:
                files = self._listed(data.source)
            except ProviderError as error:  # the machines' role may list what this identity may not
                if getattr(error, "code", "") == "NoSuchBucket":
                    raise
            return DataPlan(name=name, place=str(data.source), files=files)
        folder = data.fetched_below(self._settings.home)
        if folder.is_dir():
            return DataPlan(name=name, place=str(folder), files=files_below(folder))
        files = self._listed(data.source)
        self._refuse_no_room(data.source, sum(files.values()))
        return DataPlan(name=name, place=str(folder), files=files, move="fetch")

    def _listed(self, address: Address) -> dict[str, int]:
        """Return bytes by file name. Raises ValueError or ProviderError."""
        listed, _ = self._store(address.bucket).listed(address.prefix, MOST_FILES)
        if len(listed) > MOST_FILES:
            raise BadData(f"it holds more than {MOST_FILES} objects: pack them")
        sizes = {stored["Key"]: stored["Size"] for stored in listed}
        keys = files_of(sizes, address.prefix)
        if not keys:
            raise BadData(f"it holds no object: `aws s3 ls {address}` shows what is there")
        return {name: sizes[key] for name, key in keys.items()}

    def _refuse_no_room(self, address: Address, size: int) -> None:
        """Raise BadData if data are too large for this machine."""
        home = self._settings.home
        free = shutil.disk_usage(home if home.is_dir() else self._settings.root).free
        most = max(0, min(MOST_LOCAL_BYTES, free - _LEFT_FREE_BYTES))
        if size > most:
            raise BadData(
                f"it holds {said_bytes(size)}, and {home} takes at most {said_bytes(most)}: type"
                f" `aws s3 sync {address} FOLDER` where there is room, and name that folder as data"
            )

    def _refuse_too_much(self, size: int, region: str) -> None:
        """Raise BadData if a machine's volume is too small for its data."""
        volume_gib = self._settings.ec2.volume_gib
        try:
            image_gib = least_gib(self._api.image(region, self._settings.ec2.ami_parameter))
        except ProviderError:
            image_gib = 0  # a launch will say what is wrong with it
        needed_gib = -(-(size + KEPT_FREE_BYTES) // GIB) + image_gib
        if needed_gib > volume_gib:
            raise BadData(
                f"it takes {said_bytes(size)}, and [ec2] volume_gib is {volume_gib}: set it to at"
                f" least {needed_gib}"
            )

    def _uploaded(self, data: WorkloadData) -> Address:
        """Where a folder goes; another folder whose files have the same names goes elsewhere."""
        ec2 = self._settings.ec2
        digest = hashlib.sha256(f"{data.digest} {data.source}".encode()).hexdigest()[:16]
        bucket = ec2.bucket or "(no bucket is set)"
        return Address(bucket=bucket, prefix=f"{ec2.prefix}/data/{digest}/")

    def _move(self, plan: DataPlan, folder: Path, address: Address) -> None:
        """Move the files of `plan` that are not there yet, by name and size. Raises ProviderError,
        OSError, BadData.
        """
        from s3transfer.manager import TransferManager

        store, files, transfers = self._store(address.bucket), plan.files or {}, []
        sizes = {one["Key"]: one["Size"] for one in store.listed(address.prefix, MOST_FILES)[0]}
        reporter().say(str(plan))
        action = "s3:PutObject" if plan.move == "upload" else "s3:GetObject"
        with (
            asking(action, store.region),
            TransferManager(self._api.clients("s3", store.region)) as s3,
        ):
            for name, size in files.items():
                file, key = folder / name, f"{address.prefix}{name}"
                if plan.move == "upload" and sizes.get(key) != size:
                    transfers.append(s3.upload(str(file), address.bucket, key))
                elif plan.move == "fetch" and not _has(file, size):
                    file.parent.mkdir(parents=True, exist_ok=True)
                    transfers.append(s3.download(address.bucket, key, str(file)))
            for transfer in transfers:
                transfer.result()
        for name, size in files.items():
            if not _has(folder / name, size):
                raise BadData(f"{name} was written anew meanwhile")

    def _store(self, bucket: str) -> Store:
        return Store(self._api, self._settings.ec2.regions[0], bucket)

    @cached_property
    def _api(self) -> Ec2Api:
        return connect(self._given)


def fetch_s(plan: DataPlan) -> float:
    """Seconds in which a machine has fetched the data; 0 where it fetches none or their size is
    unknown.
    """
    if plan.files is None or not plan.place.startswith(S3):
        return 0.0
    return (plan.size or 0) / FETCHED_BYTES_PER_S + len(plan.files) / FETCHED_FILES_PER_S


def _has(file: Path, size: int) -> bool:
    return file.is_file() and file.stat().st_size == size
