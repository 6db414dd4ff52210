"""Data are where machines read them before any machine is bought; data that cannot be had are a
problem of their runs.
"""

from dataclasses import replace
from pathlib import Path

import boto3
import pytest

from tasks.execution import data_transfer
from tasks.execution.data_transfer import DataCarrier, fetch_s
from tasks.providers.ec2.leases import Ec2Leases
from tasks.providers.ec2.settings import Ec2
from tasks.workspace.settings import load_settings
from tests.installed import DescribedMachines, install

REGION = "us-east-1"
ADDRESS = "s3://mine-1/photos/cats/"
FILES = {"1.jpg": b"x" * 10, "deep/2.jpg": b"y" * 20}


@pytest.fixture
def s3(moto):
    client = boto3.client("s3", region_name=REGION)
    for bucket in ("mine-1", "mailbox"):
        client.create_bucket(Bucket=bucket)
    for name, content in FILES.items():
        client.put_object(Bucket="mine-1", Key=f"photos/cats/{name}", Body=content)
    client.put_object(Bucket="mine-1", Key="photos/dog.jpg", Body=b"z")
    return client


@pytest.fixture
def carrier(tmp_path):
    """Return a carrier for workload conv with the `data` that is named, or the folder `images`."""

    def made(data="images", provider="local", **ec2):
        installed = install(tmp_path, provider=DescribedMachines(name=provider))
        for name, content in FILES.items():
            file = tmp_path / f"images/{name}"
            file.parent.mkdir(exist_ok=True, parents=True)
            file.write_bytes(content)
        file = tmp_path / "srift.toml"
        file.write_text(file.read_text().replace("entrypoint", f'data = "{data}"\nentrypoint', 1))
        chosen = {"home": installed.home, "ec2": Ec2(bucket="mailbox", regions=(REGION,), **ec2)}
        workspace = replace(installed, settings=load_settings(file).model_copy(update=chosen))
        return DataCarrier(workspace)

    return made


def planned(carrier):
    carrier._plan.cache_clear()
    [plan] = carrier.plans(["conv", "lm"], REGION)
    return plan


def brought(carrier):
    return carrier.carry(planned(carrier))


def test_local_hosts_read_a_folder_where_it_lies(carrier, tmp_path):
    plan = brought(carrier())
    assert (plan.place, plan.problem, plan.move) == (f"{tmp_path}/images", "", "")
    assert plan.size == 30 and fetch_s(plan) == 0.0


def test_an_address_is_fetched_once_for_local_hosts(carrier, s3):
    here = carrier(ADDRESS)
    assert planned(here).move == "fetch"
    plan = brought(here)
    folder = Path(plan.place)
    assert plan.problem == "" and folder.is_relative_to(here._workspace.home / "data")
    assert {name: (folder / name).read_bytes() for name in FILES} == FILES
    assert planned(here).move == ""
    beside = folder.with_name(f"{folder.name}.part")  # as where a fetch was killed
    folder.rename(beside)
    (beside / "1.jpg").unlink()
    assert brought(here).problem == "" and not beside.exists()
    assert (folder / "1.jpg").read_bytes() == FILES["1.jpg"]


def test_an_object_that_changes_under_the_fetch_is_a_problem(carrier, s3):
    here = carrier(ADDRESS)
    plan = planned(here)
    s3.put_object(Bucket="mine-1", Key="photos/cats/1.jpg", Body=b"longer than it was")
    assert here.carry(plan).problem and not Path(plan.place).exists()


def test_without_room_a_fetch_is_refused(carrier, s3, monkeypatch):
    monkeypatch.setattr(data_transfer, "_LEFT_FREE_BYTES", 2**60)
    assert f"`aws s3 sync {ADDRESS} FOLDER`" in planned(carrier(ADDRESS)).problem


@pytest.mark.parametrize("address", ["s3://mine-1/none/", "s3://nobodys-bucket/"])
def test_an_address_without_objects_is_a_problem(carrier, s3, address):
    assert address in planned(carrier(address)).problem


def test_a_folder_is_uploaded_once_for_machines_of_ec2(carrier, s3, tmp_path, monkeypatch):
    here = carrier(provider="ec2")
    usd = planned(here).upload_usd
    assert usd == pytest.approx(7 * 0.007 / 1000 + 30 / 1e9 * 0.0405, rel=0.01)
    leases = Ec2Leases(here._workspace.home)
    leases.begin_spent({})
    with monkeypatch.context() as broken:
        broken.setattr(here, "_move", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            brought(here)
    assert [spent for _, spent in leases.spent().values()] == [usd]  # paid before the transfer
    plan = brought(here)
    [row] = here._workspace.warehouse.select("lease_spend").to_dict("records")
    assert row["usd"] == usd and plan.upload_usd == planned(here).upload_usd == 0.0  # this month
    below = plan.place.removeprefix("s3://mailbox/")

    def stored():
        listed = s3.list_objects_v2(Bucket="mailbox")["Contents"]
        return {item["Key"].removeprefix(below): item for item in listed}

    first = stored()
    assert plan.problem == "" and plan.region == REGION and fetch_s(plan) > 0
    assert {name: item["Size"] for name, item in first.items()} == {"1.jpg": 10, "deep/2.jpg": 20}
    s3.put_object(Bucket="mailbox", Key=f"{below}1.jpg", Body=b"short")
    assert brought(here).place == plan.place and stored()["1.jpg"]["Size"] == 10
    assert stored()["deep/2.jpg"] == first["deep/2.jpg"]
    data = here._workspace.settings.data("conv")
    assert str(here._upload_address(replace(data, source=tmp_path / "other/images"))) != plan.place


def test_machines_of_ec2_fetch_an_address_themselves(carrier, s3, monkeypatch):
    here = carrier(ADDRESS, "ec2")
    plan = brought(here)
    assert (plan.place, plan.limits, plan.problem) == (ADDRESS, (33, 3), "")
    [stored] = here._workspace.warehouse.select("raw_downloads").to_dict("records")
    assert (stored["workload"], stored["region"], stored["bytes"]) == ("conv", REGION, 30)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    unlisted = planned(DataCarrier(here._workspace))
    assert (unlisted.place, unlisted.size, fetch_s(unlisted)) == (ADDRESS, None, 0.0)
    assert unlisted.limits == (100 * 2**30, 10**6)
    assert 100 * 2**30 / 1e9 * 0.147 < unlisted.download_usd < 20.0  # a volume holds no more


@pytest.mark.parametrize(
    "region, ec2, usd_per_gb",
    [
        (REGION, {}, 0.0),
        ("eu-west-1", {"subnets": "private"}, 0.113),
    ],
)
def test_a_download_costs_what_its_route_does(carrier, s3, monkeypatch, region, ec2, usd_per_gb):
    monkeypatch.setattr(data_transfer.Ec2Api, "_image", lambda *_: {})
    here = carrier(ADDRESS, "ec2", **ec2)
    monkeypatch.setattr(here, "_files", lambda _: ({"a": 10**9, "b": 10**9}, REGION))
    [plan] = here.plans(["conv"], region)
    assert plan.download_usd == pytest.approx(2.2 * usd_per_gb, abs=0.001) and plan.download_usd > 0


@pytest.mark.parametrize("volume_gib, fits", [(50, False), (51, True)])
def test_a_volume_that_cannot_hold_image_and_data_is_refused_before_anything_is_bought(
    carrier, monkeypatch, s3, volume_gib, fits
):
    monkeypatch.setattr(data_transfer, "least_gib", lambda _: 45)
    monkeypatch.setattr(data_transfer.Ec2Api, "_image", lambda *_: {})
    assert (planned(carrier(provider="ec2", volume_gib=volume_gib)).problem == "") is fits
