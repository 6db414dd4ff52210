"""Copy workloads' data to a place where machines can read them, before machines are requested.

The setting `data` is a folder on this machine or an S3 address:

             local hosts                                  EC2 machines
folder       read in place                                uploaded once to the bucket of [ec2]
S3 address   fetched once into SRIFT_HOME/data/<digest>   fetched by each machine (on_ec2/fetch.py)

If the data of a workload cannot be copied, only the runs of this workload are left out.
"""

import hashlib
import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cache, cached_property
from math import ceil
from pathlib import Path

from warehouse.append import append

from ..node.data_paths import KEPT_FREE_BYTES, S3, files_of
from ..providers.base import ProviderError
from ..providers.ec2.api import Answer, Clients, Ec2Api, Store, aws_errors, connect
from ..providers.ec2.leases import Ec2Leases
from ..providers.ec2.prices import download_usd, upload_usd
from ..providers.ec2.survey import least_gib
from ..reporting.progress import reporter
from ..workspace.workload_data import (
    MOST_FILES,
    Address,
    BadData,
    WorkloadData,
    digest_of_data,
    files_below,
    format_bytes,
)
from ..workspace.workspace import Workspace

GIB = 2**30
_LEFT_FREE_BYTES = GIB  # kept free on the disk of SRIFT_HOME
# Low estimates of a machine's download rates, for the deadline of a launch. A gp3 volume without
# additional throughput writes 125 MiB/s; half of this rate is assumed. Several connections download
# at least 100 small objects per second.
FETCHED_BYTES_PER_S, FETCHED_FILES_PER_S = 60e6, 100.0
_GROWTH = 1.1  # data may grow by this factor, in bytes and in files, until machines fetch them


@dataclass(frozen=True, kw_only=True)
class DataPlan:
    """The plan to make the data of the workload `name` available to machines.

    place: the folder on this computer, or the S3 address, from which machines read.
    files: {name: size in bytes}; None if unknown.
    region: the region of the S3 bucket; empty if unknown.
    move: "fetch" (from S3 to this computer), "upload" (to S3), or empty if no transfer is needed.
    limits: the maximum bytes and files that one machine downloads. They determine `download_usd`.
    download_usd: the maximum cost in dollars of the download to one machine.
    upload_usd: the maximum cost in dollars of an upload, with storage for a month.
    problem: why the data cannot be used; empty if there is no problem.
    """

    name: str
    place: str = ""
    files: Mapping[str, int] | None = None
    region: str = ""
    move: str = ""
    limits: tuple[int, int] = (0, 0)
    download_usd: float = 0.0
    upload_usd: float = 0.0
    problem: str = ""

    @property
    def size(self) -> int | None:
        """Return the total size of the files in bytes; None if unknown."""
        return None if self.files is None else sum(self.files.values())

    def __str__(self) -> str:
        size = "unknown size" if self.size is None else format_bytes(self.size)
        what = f"{self.move or 'read'} {self.place} ({size})"
        if self.download_usd + self.upload_usd >= 0.005:  # at least one cent after rounding
            what += f", at most ${self.upload_usd:.2f} once and ${self.download_usd:.2f} a machine"
        return f"data of {self.name}: {self.problem or what}"


class DataCarrier:
    """Plans transfers of workloads' data, and carries them out.

    clients: `clients(service, region)` returns an AWS client. None means boto3's clients.
    """

    def __init__(self, workspace: Workspace, clients: Clients | None = None) -> None:
        self._workspace, self._given = workspace, clients
        self._settings = workspace.settings
        self._plan = cache(self._read_plan)  # because the launches of a dry run share data

    def plans(self, names: Iterable[str], region: str) -> list[DataPlan]:
        """Return a transfer plan for each workload in `names` that has data. Transfers nothing.

        A plan has a `problem` if the data cannot be used. It also has a `problem` if an EC2 volume
        cannot hold the data of this workload and of all earlier workloads in `names`.

        names: the workloads of the launch.
        region: the region of the launch's machines.
        """
        transfer_plans, total_bytes = [], 0
        for name in names:
            data = self._settings.data(name)
            if data is None:
                continue
            try:
                plan = self._plan(name, data)
                if plan.place.startswith(S3):
                    ec2 = self._settings.ec2
                    limits = ec2.volume_gib * GIB, MOST_FILES  # a volume holds no more
                    if plan.size is not None:
                        limits = ceil(_GROWTH * plan.size), ceil(_GROWTH * len(plan.files or ()))
                    usd = download_usd(
                        *limits, source=plan.region, region=region, public=ec2.public
                    )
                    plan = replace(plan, limits=limits, download_usd=usd)
                total_bytes += plan.size or 0
                if plan.size and self._workspace.spends_money:
                    self._refuse_too_much(total_bytes, region)
            except (ValueError, ProviderError) as error:
                plan = DataPlan(name=name, problem=f"{data.text}: {error}")
            transfer_plans.append(plan)
        return transfer_plans

    def carry(self, plan: DataPlan, refresh_id: str = "") -> DataPlan:
        """Transfer the files of `plan` if needed, and return a plan that needs no transfer.

        If the transfer fails, the returned plan has a `problem`. The cost of an upload and the size
        of downloads are stored in the warehouse before the transfer.

        refresh_id: the refresh to which the cost of the upload is charged.
        """
        data, now = self._settings.data(plan.name), datetime.now(UTC)
        warehouse = self._workspace.warehouse
        # recommendations include the cost of EC2 machines' downloads, computed from these rows
        if plan.size and plan.region:
            row = {
                "workload": plan.name,
                "workload_digest": self._settings.workload_digest(plan.name),
                "region": plan.region,
                "bytes": plan.size,
                "files": len(plan.files or ()),
                "planned_at": now,
            }
            with warehouse.transact() as connection:
                append(connection, "raw_downloads", [row])
        if not plan.move or data is None:
            return plan
        if plan.upload_usd:
            charge = f"{plan.place}{now:%Y-%m}"
            row = {
                "lease_id": charge,
                "provider": "ec2",
                "refresh_id": refresh_id,
                "cluster": "data",
                "market": "",
                "started_at": now,
                "ended_at": now,
                "usd": plan.upload_usd,
                "outcome": "uploaded",
            }
            with warehouse.transact() as connection:
                append(connection, "raw_leases", [row])
            Ec2Leases(self._settings.home).note_spent(charge, now, plan.upload_usd)
        try:
            if isinstance(data.source, Path):
                self._move(plan, data.source, self._upload_address(data))
            else:
                folder = Path(plan.place)
                beside = folder.with_name(f"{folder.name}.part")  # may have files of an earlier try
                self._move(plan, beside, data.source)
                beside.rename(folder)
        except (BadData, ProviderError, OSError) as error:
            problem = f"its data could not be {plan.move}ed: {error}; refresh again"
            return DataPlan(name=plan.name, problem=problem)
        return replace(plan, move="", upload_usd=0.0)

    def _read_plan(self, name: str, data: WorkloadData) -> DataPlan:
        """Return the transfer plan of one workload.

        Raises ValueError or ProviderError if the data cannot be used.
        """
        local, home = not self._workspace.spends_money, self._settings.home
        files: Mapping[str, int] | None = None
        region = ""
        if isinstance(data.source, Path):
            files = files_below(data.source)
            if digest_of_data(data.text, files) != data.digest:
                raise BadData("the data files changed after the refresh began: refresh again")
            if not local:
                address = self._upload_address(data)
                key = {"lease_id": f"{address}{datetime.now(UTC):%Y-%m}"}
                is_paid = len(self._workspace.warehouse.select("raw_leases", key))
                return DataPlan(
                    name=name,
                    place=str(address),
                    files=files,
                    region=self.bucket_region,
                    move="upload",
                    upload_usd=0.0 if is_paid else upload_usd(sum(files.values()), len(files)),
                )
        elif local:
            folder = data.fetched_below(home)
            if folder.is_dir():
                return DataPlan(name=name, place=str(folder), files=files_below(folder))
            files, _ = self._files(data.source)
            size = sum(files.values())
            free = shutil.disk_usage(home if home.is_dir() else self._settings.root).free
            if size > free - _LEFT_FREE_BYTES:
                raise BadData(
                    f"the data take {format_bytes(size)}, but the disk of {home} has"
                    f" {format_bytes(free)} free, and 1 GiB must stay free. Choose a FOLDER on a"
                    f" larger disk, run `aws s3 sync {data.source} FOLDER`, and set `data` to"
                    " FOLDER"
                )
            return DataPlan(name=name, place=str(folder), files=files, move="fetch")
        else:
            try:
                files, region = self._files(data.source)
            except ProviderError as error:  # the machines' IAM role may have more rights
                if getattr(error, "code", "") == "NoSuchBucket":
                    raise
        return DataPlan(name=name, place=str(data.source), files=files, region=region)

    def _objects(self, address: Address) -> tuple[list[Answer], str]:
        """Return S3's list of the objects below `address`, and the bucket's region."""
        store = Store(self._api, self._settings.ec2.regions[0], address.bucket)
        return store.listed(address.prefix, MOST_FILES)[0], store.region

    def _files(self, address: Address) -> tuple[dict[str, int], str]:
        """Return the files below `address` as {name: size in bytes}, and the bucket's region.

        Raises ValueError if there are no files, too many files or files that `files_of` refuses,
        and ProviderError if AWS refuses the request.
        """
        objects, region = self._objects(address)
        if len(objects) > MOST_FILES:
            raise BadData(f"{address} has more than {MOST_FILES} objects: pack them into archives")
        files = files_of(objects, address.prefix)
        if not files:
            raise BadData(f"{address} contains no file: `aws s3 ls {address}` lists its objects")
        return {name: entry["Size"] for name, entry in files.items()}, region

    def _refuse_too_much(self, size: int, region: str) -> None:
        """Raise BadData if an EC2 volume cannot hold the machine image and `size` bytes of data."""
        volume_gib = self._settings.ec2.volume_gib
        try:
            image_gib = least_gib(self._api.image(region, self._settings.ec2.ami_parameter))
        except ProviderError:
            image_gib = 0  # the launch reports what is wrong with the image
        needed_gib = -(-(size + KEPT_FREE_BYTES) // GIB) + image_gib
        if needed_gib > volume_gib:
            raise BadData(
                f"the launch's data take {format_bytes(size)}, but [ec2] volume_gib is {volume_gib}"
                f": set volume_gib to at least {needed_gib}"
            )

    def _upload_address(self, data: WorkloadData) -> Address:
        """Return the S3 address to which the folder of `data` is uploaded."""
        ec2 = self._settings.ec2
        # The folder's path is hashed too, so that two folders never share an address.
        digest = hashlib.sha256(f"{data.digest} {data.source}".encode()).hexdigest()[:16]
        bucket = ec2.bucket or "(no bucket is set)"
        return Address(bucket=bucket, prefix=f"{ec2.prefix}/data/{digest}/")

    def _move(self, plan: DataPlan, folder: Path, address: Address) -> None:
        """Transfer the files of `plan` between the local `folder` and the S3 `address`.

        Files with equal name and size at the target are skipped.

        Raises:
            ProviderError: if AWS refuses a request.
            OSError: if a file cannot be read or written.
            BadData: if a file's size changes during the transfer.
        """
        from s3transfer.manager import TransferManager

        files, transfers = plan.files or {}, []
        objects, region = self._objects(address)
        sizes = {entry["Key"]: entry["Size"] for entry in objects}
        reporter().say(str(plan))
        client = self._api.clients("s3", region)
        with aws_errors(f"to {plan.move} data", region), TransferManager(client) as s3:
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
                raise BadData(f"the size of file {name} changed during the transfer")

    @cached_property
    def bucket_region(self) -> str:
        """Return the region of [ec2] `bucket`; empty if unknown, or if no EC2 machine uses it."""
        ec2, region = self._settings.ec2, ""
        if ec2.bucket and self._workspace.spends_money:
            with suppress(ProviderError):  # without credentials, the region stays unknown
                _, region = self._objects(
                    Address(bucket=ec2.bucket, prefix=f"{ec2.prefix}/data/-/")
                )
        return region

    @cached_property
    def _api(self) -> Ec2Api:
        return connect(self._given)


def fetch_s(plan: DataPlan) -> float:
    """Return the estimated seconds to download the data of `plan` to a machine; 0 if unknown."""
    if not plan.place.startswith(S3):
        return 0.0
    return (plan.size or 0) / FETCHED_BYTES_PER_S + len(plan.files or ()) / FETCHED_FILES_PER_S


def _has(file: Path, size: int) -> bool:
    return file.is_file() and file.stat().st_size == size
