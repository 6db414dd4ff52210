"""Data are where machines read them before any is bought; what cannot be had says so in one sentence, and no more."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tasks.execution import data as execution_data
from tasks.execution.data import DataCarrier, DataPlan, fetch_s
from tasks.providers.ec2 import api as ec2_api
from tasks.providers.ec2.settings import Ec2
from tasks.workspace.settings import load_settings
from tasks.workspace.workspace import Workspace
from tests.fake_ec2 import FakeAws, Fault
from tests.installed import DescribedMachines, install

REGION = "us-east-1"
CATS = {
    "photos/cats/": b"",
    "photos/cats/1.jpg": b"x" * 10,
    "photos/cats/deep/2.jpg": b"y" * 20,
    "photos/dog.jpg": b"z",
}


@pytest.fixture
def aws() -> FakeAws:
    world = FakeAws()
    world.s3.objects = {key: (content, world.now) for key, content in CATS.items()}
    return world


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Workspace]:
    """A workspace whose workload conv has the `data` that is asked for, on local hosts or on EC2."""

    def made(data: str, provider: str = "local", **ec2: Any) -> Workspace:
        installed = install(tmp_path, provider=DescribedMachines(name=provider))
        images = tmp_path / "images"
        (images / "deep").mkdir(parents=True)
        (images / "1.jpg").write_bytes(b"x" * 10)
        (images / "deep" / "2.jpg").write_bytes(b"y" * 20)
        file = tmp_path / "srift.toml"
        file.write_text(file.read_text().replace("entrypoint", f'data = "{data}"\nentrypoint', 1))
        settings = load_settings(file)
        chosen = Ec2(bucket="mailbox", regions=(REGION,), **ec2)
        return replace(
            installed, settings=settings.model_copy(update={"home": installed.home, "ec2": chosen})
        )

    return made


def brought(workspace: Workspace, aws: FakeAws) -> DataPlan:
    carrier = DataCarrier(workspace, aws.clients)
    (plan,) = carrier.plans(["conv", "lm"], REGION)
    return carrier.carry(plan)


def puts(aws: FakeAws) -> int:
    return sum(action == "s3:PutObject" for action, _ in aws.calls)


def gets(aws: FakeAws) -> int:
    return sum(action == "s3:GetObject" for action, _ in aws.calls)


def test_local_hosts_read_a_folder_where_it_lies_and_nobody_is_asked(
    here: Callable[..., Workspace], aws: FakeAws, tmp_path: Path
) -> None:
    plan = brought(here("images"), aws)
    assert (plan.place, plan.problem, plan.move) == (
        str(tmp_path / "images"),
        "",
        "",
    ) and plan.size == 30
    assert aws.calls == [] and fetch_s(plan) == 0.0
    assert str(plan) == f"data of conv: 30 bytes in 2 files are read in {tmp_path / 'images'}"


def test_an_address_is_fetched_once_for_local_hosts(
    here: Callable[..., Workspace], aws: FakeAws, capsys: Any
) -> None:
    aws.s3.bucket, workspace = "mine-1", here("s3://mine-1/photos/cats")
    carrier = DataCarrier(workspace, aws.clients)
    (plan,) = carrier.plans(["conv"], REGION)
    assert plan.move == "fetch" and "would be fetched into" in str(plan) and gets(aws) == 0
    plan = carrier.carry(plan)
    folder = Path(plan.place)
    assert plan.problem == "" and folder.is_relative_to(workspace.home / "data")
    assert {str(one.relative_to(folder)) for one in folder.rglob("*.jpg")} == {
        "1.jpg",
        "deep/2.jpg",
    }
    assert (folder / "deep" / "2.jpg").read_bytes() == b"y" * 20
    assert "from s3://mine-1/photos/cats/: 30 bytes of 30 bytes" in capsys.readouterr().err
    calls = len(aws.calls)
    assert brought(workspace, aws).place == str(folder) and len(aws.calls) == calls


def test_a_fetch_that_was_cut_short_goes_on_where_it_was(
    here: Callable[..., Workspace], aws: FakeAws
) -> None:
    aws.s3.bucket, aws.s3.cut = "mine-1", 3  # answers that come half
    workspace = here("s3://mine-1/photos/cats")
    plan = brought(workspace, aws)
    assert plan.problem == "" and (Path(plan.place) / "deep" / "2.jpg").read_bytes() == b"y" * 20
    assert gets(aws) == 2 + 3
    Path(plan.place).rename(
        Path(plan.place).with_name(f"{Path(plan.place).name}.part")
    )  # killed before its end
    (Path(f"{plan.place}.part") / "1.jpg").unlink()
    asked = gets(aws)
    assert brought(workspace, aws).problem == "" and gets(aws) == asked + 1
    assert not Path(f"{plan.place}.part").exists()


class Swaps:
    """Clients before whose first GetObject `act` is done, once."""

    def __init__(self, aws: FakeAws, act: Callable[[], object]) -> None:
        self.aws, self.act = aws, act

    def __call__(self, service: str, region: str) -> Any:
        client, swaps = self.aws.clients(service, region), self

        class Client:
            def __getattr__(self, name: str) -> Any:
                if name == "get_object" and swaps.act is not None:
                    swaps.act()
                return getattr(client, name)

        return Client()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda objects: objects.pop("photos/cats/deep/2.jpg", None),
            "deep/2.jpg was deleted while it was fetched",
        ),
        (
            lambda objects: objects.update({"photos/cats/deep/2.jpg": (b"w" * 20, CATS)}),
            "deep/2.jpg was written anew while it was fetched",
        ),
    ],
)
def test_an_object_that_changes_under_the_fetch_is_named(
    here: Callable[..., Workspace], aws: FakeAws, change: Callable[[Any], object], said: str
) -> None:
    aws.s3.bucket = "mine-1"
    workspace = here("s3://mine-1/photos/cats")
    carrier = DataCarrier(workspace, Swaps(aws, lambda: change(aws.s3.objects)))
    (plan,) = carrier.plans(["conv"], REGION)
    failed = carrier.carry(plan)
    assert (
        said in failed.problem
        and "refresh again" in failed.problem
        and not Path(plan.place).exists()
    )


def test_without_room_or_credentials_or_rights_a_fetch_is_refused_with_what_to_type(
    here: Callable[..., Workspace], aws: FakeAws, monkeypatch: pytest.MonkeyPatch
) -> None:
    aws.s3.bucket, workspace = "mine-1", here("s3://mine-1/photos/cats")
    address = "s3://mine-1/photos/cats/"

    def problem(clients: Any = aws.clients) -> str:
        (plan,) = DataCarrier(workspace, clients).plans(["conv"], REGION)
        return plan.problem

    monkeypatch.setattr(execution_data, "MOST_LOCAL_BYTES", 29)
    assert f"{address} holds 30 bytes, and no more than 29 bytes" in problem()
    assert f"`aws s3 sync {address} FOLDER`" in problem()
    monkeypatch.setattr(execution_data, "MOST_LOCAL_BYTES", 31)
    monkeypatch.setattr(execution_data, "_LEFT_FREE_BYTES", 2**60)
    assert "free: type `aws s3 sync" in problem()
    aws.faults = [Fault(action="s3:ListBucket", code="AccessDenied")]
    assert (
        "may not be read by this AWS identity: allow it s3:ListBucket and s3:GetObject there"
        in problem()
    )
    monkeypatch.setattr(ec2_api, "has_credentials", lambda: False)
    assert "no AWS credentials were found: set AWS_PROFILE" in problem(None)
    aws.faults, aws.s3.bucket = [], "another"
    assert problem() == f"{address}: there is no bucket called mine-1"
    aws.s3.bucket, aws.s3.objects = "mine-1", {}
    assert f"{address} holds no object: is its prefix right?" in problem()
    aws.s3.objects = {"photos/cats/../../../etc/cron.d/x": (b"x", aws.now)}
    assert "cannot be a file of a folder" in problem()


def test_a_folder_that_changed_since_the_command_began_is_said(
    here: Callable[..., Workspace], aws: FakeAws
) -> None:
    workspace = here("images")
    assert workspace.settings.workload("conv").digest
    images = workspace.settings.root / "images"
    (images / "3.jpg").touch()
    assert f"files were added to {images}" in brought(workspace, aws).problem
    images.rename(images.with_name("imagess"))
    assert (
        "no folder" in brought(workspace, aws).problem
        and "'imagess'" in brought(workspace, aws).problem
    )


def test_a_folder_is_uploaded_once_for_machines_of_ec2(
    here: Callable[..., Workspace], aws: FakeAws, capsys: Any
) -> None:
    workspace = here("images", "ec2")
    plan = brought(workspace, aws)
    prefix = plan.place.removeprefix("s3://mailbox/")
    assert prefix.startswith("srift/data/") and prefix.endswith("/") and plan.problem == ""
    stored = {
        key: content for key, (content, _) in aws.s3.objects.items() if key.startswith(prefix)
    }
    assert stored == {f"{prefix}1.jpg": b"x" * 10, f"{prefix}deep/2.jpg": b"y" * 20}
    assert "30 bytes of 30 bytes" in capsys.readouterr().err and fetch_s(plan) > 0
    assert puts(aws) == 2 and brought(workspace, aws).place == plan.place and puts(aws) == 2
    aws.s3.objects[f"{prefix}1.jpg"] = (b"short", aws.now)
    assert brought(workspace, aws).problem == "" and puts(aws) == 3


def test_another_folder_whose_files_are_called_alike_goes_elsewhere(
    here: Callable[..., Workspace], aws: FakeAws, tmp_path: Path
) -> None:
    workspace = here("images", "ec2")
    (first,) = DataCarrier(workspace, aws.clients).plans(["conv"], REGION)
    data = workspace.settings.data("conv")
    assert data is not None
    moved = replace(data, source=tmp_path / "elsewhere" / "images")
    assert str(DataCarrier(workspace, aws.clients)._uploaded(moved)) != first.place


def test_an_upload_that_fails_is_said(
    here: Callable[..., Workspace], aws: FakeAws, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace = here("images", "ec2")
    carrier = DataCarrier(workspace, aws.clients)
    (plan,) = carrier.plans(["conv"], REGION)
    (workspace.settings.root / "images" / "1.jpg").unlink()
    assert "1.jpg went away while it was uploaded: put it back" in carrier.carry(plan).problem
    (workspace.settings.root / "images" / "1.jpg").write_bytes(b"x" * 10)
    aws.faults = [Fault(action="s3:PutObject", code="AccessDenied", times=9)]
    assert (
        "could not be uploaded: this AWS identity may not call s3:PutObject"
        in carrier.carry(plan).problem
    )
    monkeypatch.setattr(execution_data, "_LARGEST_PUT_BYTES", 15)
    (plan,) = DataCarrier(workspace, aws.clients).plans(["conv"], REGION)
    assert "2.jpg has more than 5 GiB" in plan.problem and "`aws s3 sync" in plan.problem


def test_machines_of_ec2_fetch_an_address_themselves_and_its_size_is_known_where_it_may_be_listed(
    here: Callable[..., Workspace], aws: FakeAws
) -> None:
    aws.s3.bucket, workspace = "mine-1", here("s3://mine-1/photos/cats", "ec2")
    plan = brought(workspace, aws)
    assert (plan.place, plan.size, plan.problem) == ("s3://mine-1/photos/cats/", 30, "") and gets(
        aws
    ) == 0
    assert "30 bytes in 2 files lie in s3://mine-1/photos/cats/, which each machine fetches" in str(
        plan
    )
    aws.faults = [Fault(action="s3:ListBucket", code="AccessDenied")]
    plan = brought(workspace, aws)
    assert (plan.place, plan.size, plan.problem) == (
        "s3://mine-1/photos/cats/",
        None,
        "",
    ) and fetch_s(plan) == 0.0


@pytest.mark.parametrize(("volume_gib", "fits"), [(50, False), (51, True)])
def test_a_volume_that_cannot_hold_image_and_data_is_refused_before_anything_is_bought(
    here: Callable[..., Workspace], aws: FakeAws, volume_gib: int, fits: bool
) -> None:
    workspace = here("images", "ec2", volume_gib=volume_gib)
    (plan,) = DataCarrier(workspace, aws.clients).plans(["conv"], REGION)
    said = "the image 45 GiB, and 5.0 GiB are kept free, and [ec2] volume_gib is 50: set it to at least 51"
    assert said in plan.problem if not fits else plan.problem == ""


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("time.sleep", lambda _: None)
    yield
