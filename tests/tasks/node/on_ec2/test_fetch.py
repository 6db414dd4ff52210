"""S3 as a machine's courier uses it, against moto: objects of the mailbox, and data that come whole
or with a reason.
"""

from __future__ import annotations

import os
import stat
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError
from moto import mock_aws

from tasks.node.data import KEPT_FREE_BYTES
from tasks.node.on_ec2 import fetch
from tasks.node.on_ec2.fetch import Fetcher
from tasks.node.on_ec2.s3 import MachineStore, S3Error, s3_client

CATS = {"1.jpg": b"x" * 10, "deep/2 +ü.jpg": b"y" * 20, "empty": b""}


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAEXAMPLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "very-secret")
    with mock_aws():
        found = s3_client("us-east-1", None, attempts=1, timeout_s=1.0)
        found.create_bucket(Bucket="mine-1")
        for name, content in CATS.items():
            found.put_object(Bucket="mine-1", Key=f"cats/{name}", Body=content)
        found.put_object(Bucket="mine-1", Key="cats/")
        found.put_object(Bucket="mine-1", Key="dogs/1.jpg", Body=b"z")
        yield found


def fetched(client: Any, mailbox: Path, address: str = "s3://mine-1/cats/") -> dict[str, Any]:
    fetcher = Fetcher(mailbox, client)
    fetcher._states = {"ab": {"state": "fetching", "bytes": 0, "of_bytes": None}}
    fetcher.fetch_all({"ab": address})
    state = fetcher.states()["ab"]
    assert not (mailbox / "data" / "ab.part").exists()
    assert (mailbox / "data" / "ab").is_dir() is (state["state"] == "ready")
    if state["state"] == "failed":
        assert (mailbox / "data" / "ab.failed").read_text() == state["reason"]
        assert "very-secret" not in state["reason"]
    return state


def files(mailbox: Path) -> dict[str, bytes]:
    folder = mailbox / "data" / "ab"
    found = (one for one in folder.rglob("*") if one.is_file())
    return {one.relative_to(folder).as_posix(): one.read_bytes() for one in found}


def test_a_machine_reads_its_inward_objects_and_writes_its_outward_ones(client: Any) -> None:
    store = MachineStore(client, "mine-1", "srift/leases/l/me")
    client.put_object(Bucket="mine-1", Key="srift/leases/l/me/in/plan.json", Body=b"{}")
    assert store.get("plan.json") == b"{}"
    store.put("records/a+b:c.json", b"1")
    written = client.get_object(Bucket="mine-1", Key="srift/leases/l/me/out/records/a+b:c.json")
    assert written["Body"].read() == b"1"
    with pytest.raises(S3Error) as refused:
        store.get("none.json")
    assert refused.value.code == "NoSuchKey"


def test_all_objects_below_a_prefix_become_files_that_others_read_and_do_not_write(
    client: Any, tmp_path: Path
) -> None:
    before = os.umask(0o022)
    try:
        state = fetched(client, tmp_path)
    finally:
        os.umask(before)
    assert (state["state"], state["bytes"], state["of_bytes"]) == ("ready", 30, 30)
    assert files(tmp_path) == CATS
    modes = {stat.S_IMODE(one.stat().st_mode) for one in (tmp_path / "data").rglob("*")}
    assert modes == {0o755, 0o644}


def test_what_was_requested_is_fetched_once_in_a_thread(client: Any, tmp_path: Path) -> None:
    fetcher, started = Fetcher(tmp_path, client), list[dict[str, str]]()
    fetcher.fetch_all = started.append  # type: ignore[assignment,method-assign]
    for _ in range(2):
        fetcher.request({"ab": "s3://mine-1/cats/"})
    assert started == [{"ab": "s3://mine-1/cats/"}]
    assert fetcher.states()["ab"]["state"] == "fetching"


@pytest.mark.parametrize(
    ("address", "named"),
    [
        ("s3://nobody/cats/", "no bucket called nobody"),
        ("s3://mine-1/cat/", "aws s3 ls s3://mine-1/cat/"),
    ],
)
def test_data_that_are_not_there_are_a_reason(
    client: Any, tmp_path: Path, address: str, named: str
) -> None:
    assert named in fetched(client, tmp_path, address)["reason"]


@pytest.mark.parametrize("operation", ["ListObjectsV2", "HeadObject", "GetObject"])
def test_a_role_without_rights_is_sent_to_the_doctor(
    client: Any, tmp_path: Path, operation: str
) -> None:
    def refuse(**_: Any) -> None:
        raise ClientError({"Error": {"Code": "AccessDenied"}}, operation)

    client.meta.events.register(f"before-call.s3.{operation}", refuse)
    assert "srift doctor" in fetched(client, tmp_path)["reason"]


def test_an_object_of_another_size_than_listed_is_not_taken(
    client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = Fetcher._listed
    monkeypatch.setattr(Fetcher, "_listed", lambda *given: listed(*given) | {"cats/1.jpg": 11})
    assert "cats/1.jpg" in fetched(client, tmp_path)["reason"]


@pytest.mark.parametrize("key", ["cats/../../../x", "cats//etc/passwd", "cats/1.jpg/x"])
def test_a_key_that_climbs_out_of_the_folder_is_refused_and_nothing_is_written(
    client: Any, tmp_path: Path, key: str
) -> None:
    mailbox = tmp_path / "mailbox"
    mailbox.mkdir()
    objects = {key: 4, "cats/1.jpg": 10}
    fetcher_listing = Fetcher._listed
    try:
        Fetcher._listed = lambda *_: objects  # type: ignore[method-assign]
        assert fetched(client, mailbox)["state"] == "failed"
    finally:
        Fetcher._listed = fetcher_listing  # type: ignore[method-assign]
    assert {one.name for one in tmp_path.rglob("*")} == {"mailbox", "data", "ab.failed"}


def test_free_space_is_looked_at_first(
    client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(fetch.shutil, "disk_usage", lambda _: usage(0, 0, KEPT_FREE_BYTES + 29))
    assert "at least 1" in fetched(client, tmp_path)["reason"]


def test_a_machine_that_goes_down_fetches_no_further(client: Any, tmp_path: Path) -> None:
    fetcher = Fetcher(tmp_path, client)
    fetcher._states = {"ab": {"state": "fetching", "bytes": 0, "of_bytes": None}}
    fetcher.stop()
    fetcher.fetch_all({"ab": "s3://mine-1/cats/"})
    assert fetcher.states()["ab"]["state"] == "failed" and not (tmp_path / "data" / "ab").exists()
