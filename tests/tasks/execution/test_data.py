"""Data are where machines read them before any machine is bought; data that cannot be had are a
problem of their runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto import mock_aws

from tasks.execution import data as execution_data
from tasks.execution.data import DataCarrier, DataPlan, fetch_s
from tasks.providers.ec2.settings import Ec2
from tasks.workspace.settings import load_settings
from tasks.workspace.workspace import Workspace
from tests.installed import DescribedMachines, install

REGION = "us-east-1"
CATS = {"photos/cats/1.jpg": b"x" * 10, "photos/cats/deep/2.jpg": b"y" * 20, "photos/dog.jpg": b"z"}
ADDRESS = "s3://mine-1/photos/cats/"


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAEXAMPLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    with mock_aws():
        client = boto3.client("s3", region_name=REGION)
        for bucket in ("mine-1", "mailbox"):
            client.create_bucket(Bucket=bucket)
        for key, content in CATS.items():
            client.put_object(Bucket="mine-1", Key=key, Body=content)
        yield client


@pytest.fixture
def here(tmp_path: Path) -> Callable[..., Workspace]:
    """A workspace whose workload conv has the `data` that is named, on local hosts or on EC2."""

    def made(data: str, provider: str = "local", **ec2: Any) -> Workspace:
        installed = install(tmp_path, provider=DescribedMachines(name=provider))
        (tmp_path / "images" / "deep").mkdir(parents=True)
        (tmp_path / "images" / "1.jpg").write_bytes(b"x" * 10)
        (tmp_path / "images" / "deep" / "2.jpg").write_bytes(b"y" * 20)
        file = tmp_path / "srift.toml"
        file.write_text(file.read_text().replace("entrypoint", f'data = "{data}"\nentrypoint', 1))
        chosen = {"home": installed.home, "ec2": Ec2(bucket="mailbox", regions=(REGION,), **ec2)}
        return replace(installed, settings=load_settings(file).model_copy(update=chosen))

    return made


def carrier(workspace: Workspace) -> DataCarrier:
    return DataCarrier(workspace, lambda service, region: boto3.client(service, region))


def planned(workspace: Workspace) -> DataPlan:
    (plan,) = carrier(workspace).plans(["conv", "lm"], REGION)
    return plan


def brought(workspace: Workspace) -> DataPlan:
    return carrier(workspace).carry(planned(workspace))


def stored(s3: Any) -> dict[str, Any]:
    listed = s3.list_objects_v2(Bucket="mailbox").get("Contents", ())
    return {one["Key"].rpartition("/data/")[2].partition("/")[2]: one for one in listed}


def test_local_hosts_read_a_folder_where_it_lies(
    here: Callable[..., Workspace], tmp_path: Path
) -> None:
    plan = brought(here("images"))
    assert (plan.place, plan.problem, plan.move) == (str(tmp_path / "images"), "", "")
    assert plan.size == 30 and fetch_s(plan) == 0.0


def test_an_address_is_fetched_once_for_local_hosts(
    here: Callable[..., Workspace], s3: Any
) -> None:
    workspace = here(ADDRESS)
    assert planned(workspace).move == "fetch"
    plan = brought(workspace)
    folder = Path(plan.place)
    assert plan.problem == "" and folder.is_relative_to(workspace.home / "data")
    assert (folder / "deep" / "2.jpg").read_bytes() == b"y" * 20
    assert planned(workspace).move == ""
    beside = folder.with_name(f"{folder.name}.part")  # as where a fetch was killed
    folder.rename(beside)
    (beside / "1.jpg").unlink()
    (beside / "deep" / "2.jpg").write_bytes(b"z" * 20)
    assert brought(workspace).problem == "" and not beside.exists()
    assert (folder / "deep" / "2.jpg").read_bytes() == b"z" * 20


@pytest.mark.parametrize("change", ["deleted", "written anew"])
def test_an_object_that_changes_under_the_fetch_is_a_problem(
    here: Callable[..., Workspace], s3: Any, change: str
) -> None:
    carried = carrier(here(ADDRESS))
    (plan,) = carried.plans(["conv"], REGION)
    if change == "deleted":
        s3.delete_object(Bucket="mine-1", Key="photos/cats/1.jpg")
    else:
        s3.put_object(Bucket="mine-1", Key="photos/cats/1.jpg", Body=b"longer than it was")
    assert carried.carry(plan).problem and not Path(plan.place).exists()


@pytest.mark.parametrize(
    ("limit", "value"), [("MOST_LOCAL_BYTES", 29), ("_LEFT_FREE_BYTES", 2**60)]
)
def test_without_room_a_fetch_is_refused(
    here: Callable[..., Workspace],
    s3: Any,
    monkeypatch: pytest.MonkeyPatch,
    limit: str,
    value: int,
) -> None:
    monkeypatch.setattr(execution_data, limit, value)
    assert f"`aws s3 sync {ADDRESS} FOLDER`" in planned(here(ADDRESS)).problem


def test_a_folder_is_uploaded_once_for_machines_of_ec2(
    here: Callable[..., Workspace], s3: Any, tmp_path: Path
) -> None:
    workspace = here("images", "ec2")
    plan = brought(workspace)
    assert plan.place.startswith("s3://mailbox/srift/data/") and plan.problem == ""
    assert {name: one["Size"] for name, one in stored(s3).items()} == {
        "1.jpg": 10,
        "deep/2.jpg": 20,
    }
    assert fetch_s(plan) > 0
    written = {name: one["LastModified"] for name, one in stored(s3).items()}
    key = plan.place.removeprefix("s3://mailbox/") + "1.jpg"
    s3.put_object(Bucket="mailbox", Key=key, Body=b"short")
    assert brought(workspace).place == plan.place and stored(s3)["1.jpg"]["Size"] == 10
    assert stored(s3)["deep/2.jpg"]["LastModified"] == written["deep/2.jpg"]
    data = workspace.settings.data("conv")
    assert data is not None
    moved = replace(data, source=tmp_path / "elsewhere" / "images")
    assert str(carrier(workspace)._uploaded(moved)) != plan.place


def test_machines_of_ec2_fetch_an_address_themselves(
    here: Callable[..., Workspace], s3: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace = here(ADDRESS, "ec2")
    plan = brought(workspace)
    assert (plan.place, plan.size, plan.problem) == (ADDRESS, 30, "")
    monkeypatch.setattr(DataCarrier, "_listed", lambda *_, **__: None)
    assert (planned(workspace).size, fetch_s(planned(workspace))) == (None, 0.0)


@pytest.mark.parametrize(("volume_gib", "fits"), [(50, False), (51, True)])
def test_a_volume_that_cannot_hold_image_and_data_is_refused_before_anything_is_bought(
    here: Callable[..., Workspace],
    monkeypatch: pytest.MonkeyPatch,
    s3: Any,
    volume_gib: int,
    fits: bool,
) -> None:
    monkeypatch.setattr(execution_data, "least_gib", lambda _: 45)
    monkeypatch.setattr(execution_data.Ec2Api, "image", lambda *_: {})
    assert (planned(here("images", "ec2", volume_gib=volume_gib)).problem == "") is fits
