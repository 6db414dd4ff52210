"""S3 as a machine's courier uses it, against moto: data come whole or with a reason."""

import os
import stat
from collections import namedtuple

import pytest
from botocore.exceptions import ClientError

from tasks.node.data_paths import KEPT_FREE_BYTES, Download
from tasks.node.on_ec2 import fetch
from tasks.node.on_ec2.fetch import Fetcher
from tasks.node.on_ec2.s3 import s3_client

CATS = {"1.jpg": b"x" * 10, "deep/2 +ü.jpg": b"y" * 20, "empty": b""}


@pytest.fixture
def fetcher(moto, tmp_path):
    made = s3_client("us-east-1", None, attempts=1, timeout_s=1.0)
    made.create_bucket(Bucket="mine-1")
    for name, content in (CATS | {"": b""}).items():
        made.put_object(Bucket="mine-1", Key=f"cats/{name}", Body=content)
    made.put_object(Bucket="mine-1", Key="dogs/1.jpg", Body=b"z")
    return Fetcher(tmp_path, made)


def fetched(fetcher, address="s3://mine-1/cats/", most_bytes=30, most_files=3):
    fetcher.fetch_all({"ab": Download(address, most_bytes, most_files)})
    state, data = fetcher.states["ab"], fetcher.mailbox / "data"
    if state["state"] == "failed":
        assert [path.name for path in data.rglob("*")] == ["ab.failed"]
        assert (data / "ab.failed").read_text() == state["reason"]
        assert address in state["reason"] and "very-secret" not in state["reason"]
    return state


def test_all_objects_below_a_prefix_become_files_that_others_read_and_do_not_write(fetcher):
    before = os.umask(0o022)
    try:
        state = fetched(fetcher)
    finally:
        os.umask(before)
    assert state == {"state": "ready"}
    folder = fetcher.mailbox / "data"
    assert {name: (folder / "ab" / name).read_bytes() for name in CATS} == CATS
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.rglob("*")} == {0o755, 0o644}


@pytest.mark.parametrize("address", ["s3://nobody/cats/", "s3://mine-1/cat/"])
def test_data_that_are_not_there_are_a_reason(fetcher, address):
    assert fetched(fetcher, address)["state"] == "failed"


@pytest.mark.parametrize("operation", ["ListObjectsV2", "HeadObject", "GetObject"])
def test_a_role_without_rights_is_sent_to_the_doctor(fetcher, operation):
    def refuse(**_):
        raise ClientError({"Error": {"Code": "AccessDenied"}}, operation)

    fetcher.client.meta.events.register(f"before-call.s3.{operation}", refuse)
    assert "srift doctor" in fetched(fetcher)["reason"]


def test_an_object_below_another_is_refused(fetcher):
    fetcher.client.put_object(Bucket="mine-1", Key="cats/1.jpg/x", Body=b"evil")
    assert fetched(fetcher, most_bytes=99, most_files=9)["state"] == "failed"


@pytest.mark.parametrize("limits", [(29, 3), (30, 2)])
def test_data_that_grew_after_the_plan_are_refused(fetcher, limits):
    assert "refresh again" in fetched(fetcher, "s3://mine-1/cats/", *limits)["reason"]


def test_free_space_is_looked_at_first(fetcher, monkeypatch):
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(fetch.shutil, "disk_usage", lambda _: usage(KEPT_FREE_BYTES + 29))
    assert "at least 1" in fetched(fetcher, most_bytes=29)["reason"]  # as if of unknown size
