"""The courier's way to S3, against moto's server on loopback, with credentials from a metadata service's stand-in."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto.server import ThreadedMotoServer

from tasks.node.on_ec2 import courier
from tasks.node.on_ec2.courier import Delivery, MachineStore
from tasks.node.on_ec2.fetch import DataBucket, Fetcher
from tasks.node.on_ec2.metadata import Metadata
from tasks.node.on_ec2.s3 import Absent, Bucket
from tests.local.machine import metadata_files
from tests.local.standin.cloud import serve

pytestmark = pytest.mark.local
DATA = {"cats/1.jpg": b"x" * 3_000_000, "cats/a+b c&d.txt": b"", "ünïcode.txt": b"u"}
ADDRESSES = {
    "aa": "s3://mailbox/srift/data/ab/",
    "bb": "s3://mailbox/srift/none/",
    "cc": "s3://nobody/",
}


class Agent:
    """Has written a record; leaves when it is asked to."""

    def __init__(self, mailbox: Path, own: Path) -> None:
        self.mailbox = mailbox
        (own / "records").mkdir()
        (own / "records" / "a+b c.json").write_text("a name that cannot be")
        (own / "records" / "a+b:c.json").write_text('{"step_s": 0.1}')

    def poll(self) -> int | None:
        ended = [
            (self.mailbox / "data" / name).exists() for name in ("aa", "bb.failed", "cc.failed")
        ]
        return 0 if (self.mailbox / "done.json").exists() and all(ended) else None

    def end(self) -> None:
        pass

    def said(self) -> str:
        return ""


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def s3(endpoint: str) -> Any:
    keys = {
        "aws_access_key_id": "AKIAEXAMPLE",
        "aws_secret_access_key": "s",
        "region_name": "us-east-1",
    }
    client = boto3.client("s3", endpoint_url=endpoint, **keys)
    client.create_bucket(Bucket="mailbox")
    return client


@pytest.fixture
def metadata(tmp_path: Path) -> Iterator[Metadata]:
    metadata_files(tmp_path / "cloud")
    (server,) = serve(tmp_path / "cloud", "127.0.0.1:0")
    yield Metadata(f"http://127.0.0.1:{server.server_port}")
    server.shutdown()
    server.server_close()


def test_a_lease_is_served_through_s3(
    s3: Any, endpoint: str, metadata: Metadata, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = Bucket("mailbox", region="us-east-1", endpoint=endpoint, keys=metadata.keys)
    with pytest.raises(Absent):
        bucket.get("srift/none")
    root = f"srift/leases/l/AROAEXAMPLE:{metadata.instance_id()}"
    for name, content in DATA.items():
        s3.put_object(Bucket="mailbox", Key=f"srift/data/ab/{name}", Body=content)
    done, asked = b"{}", json.dumps({"data": ADDRESSES}).encode()
    contents = {"node.json": b'{"node": 0, "nodes": 1}', "done.json": done, "data.json": asked}
    files = {
        name: hashlib.sha256(contents[name]).hexdigest() for name in ("done.json", "data.json")
    }
    contents["manifest.json"] = json.dumps({"files": files}).encode()
    for name, content in contents.items():
        s3.put_object(Bucket="mailbox", Key=f"{root}/in/{name}", Body=content)
    directory = tmp_path / "mailbox"
    directory.mkdir()

    def opened(name: str) -> DataBucket:
        return DataBucket(name, region="us-east-1", endpoint=endpoint, keys=metadata.keys)

    delivery = Delivery(
        store=MachineStore(bucket, root),
        start=lambda rank, _: Agent(directory, directory / f"node-{rank}"),
        notice=metadata.notice,
        owner=os.getuid(),
        deadline_s=30.0,
        data=Fetcher(directory, opened),
    )
    monkeypatch.setattr(courier, "POLL_S", 0.01)
    assert delivery.serve() == ""
    listed = s3.list_objects_v2(Bucket="mailbox", Prefix=f"{root}/out/")["Contents"]
    names = [one["Key"].partition("/out/")[2] for one in listed]
    assert names == ["booted.json", "data.json", "records/a+b:c.json"]
    folder = directory / "data" / "aa"
    there = {
        one.relative_to(folder).as_posix(): one.read_bytes()
        for one in folder.rglob("*")
        if one.is_file()
    }
    assert there == DATA
    assert (
        "no object is there: `aws s3 ls s3://mailbox/srift/none/`"
        in (directory / "data" / "bb.failed").read_text()
    )
    assert "there is no bucket called nobody" in (directory / "data" / "cc.failed").read_text()
    body = s3.get_object(Bucket="mailbox", Key=f"{root}/out/records/a+b:c.json")["Body"].read()
    assert body == b'{"step_s": 0.1}'
