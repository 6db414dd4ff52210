"""A workload's data brought to where its machines read them, before any machine is asked for.

             local hosts                                  machines of EC2
a folder     read where it lies                           uploaded once below data/ of [ec2] bucket and prefix
an address   fetched once into SRIFT_HOME/data/<digest>   fetched by each machine itself (node/on_ec2/fetch.py)

What cannot be brought is a problem of that workload's runs; those of others go on.
"""

from __future__ import annotations

import hashlib
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

from ..node.data import KEPT_FREE_BYTES, S3, files_of
from ..providers.base import ProviderError
from ..providers.ec2 import api as ec2_api
from ..providers.ec2.api import Clients, Ec2Api, Store, Stored
from ..providers.ec2.errors import DENIED, NO_CREDENTIALS, AwsRefused
from ..providers.ec2.survey import least_gib
from ..providers.ec2.termination import with_retries
from ..reporting.progress import reporter
from ..workspace.settings import Settings
from ..workspace.workload_data import (
    MOST_FILES,
    Address,
    BadData,
    WorkloadData,
    digest_of_data,
    files_below,
    refuse_no_folder,
    said_bytes,
)
from ..workspace.workspace import Workspace

GIB = 2**30
MOST_LOCAL_BYTES = (
    50 * GIB
)  # fetched to this machine unasked; with more, somebody is to choose the disk
_LEFT_FREE_BYTES = GIB  # of the disk of SRIFT_HOME
_LARGEST_PUT_BYTES = (
    5 * GIB
)  # of one upload (docs.aws.amazon.com/AmazonS3/latest/userguide/qfacts.html)
_AT_ONCE = 8
_SAID_EVERY_S = 10.0
# What a machine fetches in a second, taken low, for a launch's deadline: half of what a gp3 volume writes (125 MiB/s)
# where nothing more is paid for it, and small objects one after the other on each of several connections.
FETCHED_BYTES_PER_S, FETCHED_FILES_PER_S = 60e6, 100.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DataPlan:
    """Where machines read the data of workload `name`, and what has to be moved before.

    `place` is a folder of this machine or an address. `files`: names and bytes; None where nobody could tell them.
    `problem`: why the workload cannot have its data, and what to do.
    """

    name: str
    place: str = ""
    files: Mapping[str, int] | None = None
    move: Literal["", "fetch", "upload"] = ""
    problem: str = ""

    @property
    def size(self) -> int | None:
        """Bytes of all files; None where unknown."""
        return None if self.files is None else sum(self.files.values())

    def __str__(self) -> str:
        """What would happen, for a dry run."""
        if self.problem:
            return f"data of {self.name}: {self.problem}"
        much = (
            "of unknown size"
            if self.files is None
            else f"{said_bytes(self.size or 0)} in {len(self.files)} files"
        )
        if self.place.startswith(S3):
            first = "would be uploaded to" if self.move else "lie in"
            return f"data of {self.name}: {much} {first} {self.place}, which each machine fetches before it measures"
        return f"data of {self.name}: {much} {'would be fetched into' if self.move else 'are read in'} {self.place}"


class CannotBring(Exception):
    """The data cannot be brought; the message says why and what to do."""


class DataCarrier:
    """Plans and carries data of `workspace`'s workloads. `clients` stands in for boto3's, with credentials."""

    def __init__(self, workspace: Workspace, clients: Clients | None = None) -> None:
        self._workspace, self._given = workspace, clients
        self._settings: Settings = workspace.settings
        self._planned: dict[
            str, DataPlan
        ] = {}  # by name: several launches of a dry run have the same data

    def plans(self, names: Iterable[str], region: str) -> list[DataPlan]:
        """Of those of `names` that have data, as they are at the first question; machines stand in `region`.

        Moves nothing.
        """
        found, taken = [], 0
        for name in names:
            data = self._settings.data(name)
            if data is None:
                continue
            try:
                plan = self._planned.get(name) or self._plan(name, data)
                self._planned[name] = plan
                if not self._workspace.simulated and plan.size is not None:
                    self._refuse_too_much(taken + plan.size, region)
                    taken += plan.size
            except CannotBring as error:
                plan = DataPlan(name=name, problem=str(error))
            found.append(plan)
        return found

    def carry(self, plan: DataPlan) -> DataPlan:
        """Move what has to be moved; the plan as it came out, with a problem where it failed. Says how far it is."""
        data = self._settings.data(plan.name)
        if plan.problem or not plan.move or data is None:
            return plan
        try:
            if data.folder is not None:
                self._upload(plan, data.folder)
            elif data.address is not None:
                self._fetch(plan, data.address)
        except CannotBring as error:
            return DataPlan(name=plan.name, problem=str(error))
        except (ProviderError, OSError) as error:
            why = str(error)
            return DataPlan(
                name=plan.name, problem=f"its data could not be {plan.move}ed: {why}; refresh again"
            )
        return replace(plan, move="")

    def _plan(self, name: str, data: WorkloadData) -> DataPlan:
        here = self._workspace.simulated
        if data.folder is not None:
            files = self._unchanged(data, data.folder)
            if here:
                return DataPlan(name=name, place=str(data.folder), files=files)
            large = next((one for one, size in files.items() if size > _LARGEST_PUT_BYTES), "")
            if large:
                raise CannotBring(
                    f"{data.folder / large} has more than 5 GiB, which takes an upload of its own: type `aws s3 sync"
                    f" {data.folder} s3://BUCKET/PREFIX` and name that address as data"
                )
            return DataPlan(name=name, place=str(self._uploaded(data)), files=files, move="upload")
        assert data.address is not None
        if not here:
            return DataPlan(
                name=name, place=str(data.address), files=self._objects(data.address, needed=False)
            )
        folder = data.fetched_below(self._settings.home)
        if folder.is_dir():
            return DataPlan(name=name, place=str(folder), files=files_below(folder))
        objects = self._objects(data.address, needed=True) or {}
        self._refuse_no_room(data.address, sum(objects.values()))
        return DataPlan(name=name, place=str(folder), files=objects, move="fetch")

    def _unchanged(self, data: WorkloadData, folder: Path) -> dict[str, int]:
        """The folder's files, if they are those that its workload's digest stands for."""
        try:
            refuse_no_folder(folder, self._settings.home)
            files = files_below(folder)
        except BadData as error:
            raise CannotBring(f"{error} (it was there when this began)") from None
        if digest_of_data(data.text, files) != data.digest:
            raise CannotBring(
                f"files were added to {folder}, taken out or written anew: refresh again to measure it"
            )
        return files

    def _objects(self, address: Address, *, needed: bool) -> dict[str, int] | None:
        """Names and bytes; None where AWS does not tell this identity, unless that is `needed`."""
        try:
            listed, _ = self._store(address.bucket).listed(address.prefix, MOST_FILES)
            return {name: one.size for name, one in named(listed, address).items()}
        except AwsRefused as error:
            if error.code == "NoSuchBucket":
                raise CannotBring(
                    f"{address}: there is no bucket called {address.bucket}"
                ) from None
            if not needed:
                return None
            if error.code in DENIED:
                raise CannotBring(
                    f"{address} may not be read by this AWS identity: allow it s3:ListBucket and s3:GetObject there, or"
                    " fetch the data yourself and name their folder"
                ) from None
            raise CannotBring(f"{address} could not be listed: {error}") from None
        except ProviderError as error:
            if not needed:
                return None
            raise CannotBring(
                f"{address} is fetched with AWS credentials, and {error}; or fetch the data yourself and name their"
                " folder"
            ) from None

    def _refuse_no_room(self, address: Address, size: int) -> None:
        """Of what is fetched to this machine. Raises CannotBring."""
        instead = (
            f"type `aws s3 sync {address} FOLDER` where there is room, and name that folder as data"
        )
        if size > MOST_LOCAL_BYTES:
            raise CannotBring(
                f"{address} holds {said_bytes(size)}, and no more than {said_bytes(MOST_LOCAL_BYTES)} are fetched for"
                f" local hosts: {instead}"
            )
        free = shutil.disk_usage(
            self._settings.home if self._settings.home.is_dir() else self._settings.root
        ).free
        if size + _LEFT_FREE_BYTES > free:
            raise CannotBring(
                f"{address} holds {said_bytes(size)}, and the disk of {self._settings.home} has {said_bytes(free)}"
                f" free: {instead}"
            )

    def _refuse_too_much(self, size: int, region: str) -> None:
        """Of data that lie on one machine of EC2 together. Raises CannotBring where its volume is too small."""
        volume_gib = self._settings.ec2.volume_gib
        try:
            image_gib = least_gib(self._api.image(region, self._settings.ec2.ami_parameter))
        except ProviderError:
            image_gib = 0  # a launch will say what is wrong with it
        needed_gib = -(-(size + KEPT_FREE_BYTES) // GIB) + image_gib
        if needed_gib > volume_gib:
            beside = f", the image {image_gib} GiB," if image_gib else ""
            raise CannotBring(
                f"the data take {said_bytes(size)}{beside} and {said_bytes(KEPT_FREE_BYTES)} are kept free, and [ec2]"
                f" volume_gib is {volume_gib}: set it to at least {needed_gib}"
            )

    def _uploaded(self, data: WorkloadData) -> Address:
        """Where a folder goes; another folder whose files are called alike goes elsewhere."""
        ec2 = self._settings.ec2
        digest = hashlib.sha256(f"{data.digest} {data.source}".encode()).hexdigest()[:16]
        return Address(
            bucket=ec2.bucket or "(no bucket is set)", prefix=f"{ec2.prefix}/data/{digest}/"
        )

    def _upload(self, plan: DataPlan, folder: Path) -> None:
        """What the bucket lacks, by name and size."""
        bucket, _, prefix = plan.place.removeprefix(S3).partition("/")
        store, files = self._store(bucket), plan.files or {}
        listed, _ = with_retries(self._api, lambda: store.listed(prefix))
        there = {one.key: one.size for one in listed}
        lacking = [name for name, size in files.items() if there.get(f"{prefix}{name}") != size]
        progress = Progress(
            f"data of {plan.name}, to {plan.place}", sum(files[name] for name in lacking)
        )

        def put(name: str) -> None:
            def once() -> None:
                with (folder / name).open("rb") as file:
                    store.put(f"{prefix}{name}", file)

            try:
                with_retries(self._api, once)
            except FileNotFoundError:
                raise CannotBring(
                    f"{folder / name} went away while it was uploaded: put it back, and refresh again"
                ) from None
            progress.add(files[name])

        side_by_side(put, lacking)
        progress.end()

    def _fetch(self, plan: DataPlan, address: Address) -> None:
        """Object by object into a folder beside, which is renamed when it is whole; what a fetch before left counts."""
        target = Path(plan.place)
        beside = target.with_name(f"{target.name}.part")
        store = self._store(address.bucket)
        objects = named(
            with_retries(self._api, lambda: store.listed(address.prefix, MOST_FILES))[0], address
        )
        beside.mkdir(parents=True, exist_ok=True)
        lacking = {n: one for n, one in objects.items() if not _has(beside / n, one.size)}
        progress = Progress(
            f"data of {plan.name}, from {address}", sum(one.size for one in lacking.values())
        )

        def get(name: str) -> None:
            one, coming = lacking[name], beside / f"{name}.coming"
            coming.parent.mkdir(parents=True, exist_ok=True)
            try:
                with coming.open("wb") as file:
                    with_retries(self._api, lambda: store.append(one, file))
            except AwsRefused as error:
                gone = error.kind == "gone"
                if not gone and error.code not in ("PreconditionFailed", "412"):
                    raise
                what = "deleted" if gone else "written anew"
                raise CannotBring(
                    f"s3://{address.bucket}/{one.key} was {what} while it was fetched: refresh again"
                ) from None
            coming.rename(beside / name)
            progress.add(one.size)

        side_by_side(get, list(lacking))
        progress.end()
        beside.rename(target)

    def _store(self, bucket: str) -> Store:
        return Store(self._api, self._settings.ec2.regions[0], bucket)

    @cached_property
    def _api(self) -> Ec2Api:
        if self._given is None and not ec2_api.has_credentials():
            raise ProviderError(NO_CREDENTIALS)
        return Ec2Api(self._given or ec2_api.boto_clients())


def named(listed: Sequence[Stored], address: Address) -> dict[str, Stored]:
    """Objects by the names of the files that they become. Raises CannotBring where that cannot be."""
    if len(listed) > MOST_FILES:
        raise CannotBring(
            f"{address} holds more than {MOST_FILES} objects: pack them into archives, or name a part"
        )
    by_key = {one.key: one for one in listed}
    try:
        found = {name: by_key[key] for name, key in files_of(by_key, address.prefix).items()}
    except ValueError as error:
        raise CannotBring(f"{address}: {error}") from None
    if not found:
        raise CannotBring(
            f"{address} holds no object: is its prefix right? `aws s3 ls {address}` shows what is there"
        )
    return found


def fetch_s(plan: DataPlan) -> float:
    """Seconds within which a machine has fetched the data, where it fetches them and their size is known; else 0."""
    if plan.files is None or not plan.place.startswith(S3):
        return 0.0
    return (plan.size or 0) / FETCHED_BYTES_PER_S + len(plan.files) / FETCHED_FILES_PER_S


@dataclass(slots=True)
class Progress:
    """Says now and then how many of `of_bytes` of `what` were carried. Several threads may add."""

    what: str
    of_bytes: int
    done: int = 0
    said_at: float = field(default_factory=time.monotonic)
    lock: threading.Lock = field(default_factory=threading.Lock)
    say: Callable[[str], None] = field(
        default_factory=lambda: reporter().say
    )  # of the thread that began

    def add(self, size: int) -> None:
        """So many more."""
        with self.lock:
            self.done += size
            if time.monotonic() - self.said_at >= _SAID_EVERY_S:
                self.said_at = time.monotonic()
                self._say()

    def end(self) -> None:
        """All are there."""
        if self.of_bytes:
            self._say()

    def _say(self) -> None:
        self.say(f"{self.what}: {said_bytes(self.done)} of {said_bytes(self.of_bytes)}")


def side_by_side(act: Callable[[str], None], names: Sequence[str]) -> None:
    """`act` on each, some at once; the first error ends those that have not begun, and is raised."""
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        try:
            for _ in pool.map(act, names):
                pass
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _has(file: Path, size: int) -> bool:
    return file.is_file() and file.stat().st_size == size
