"""Data come whole onto the machine, or the reason is said: S3 in memory, answers cut short, keys that climb."""

from __future__ import annotations

import hashlib
import http.client
import io
import os
import shutil
import stat
import urllib.parse
from collections import namedtuple
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tasks.node.data import KEPT_FREE_BYTES
from tasks.node.on_ec2 import fetch, s3
from tasks.node.on_ec2.fetch import DataBucket, Fetcher

Act = Callable[["Store"], object]
CATS = {
    "cats/": b"",
    "cats/1.jpg": b"x" * 10,
    "cats/deep/2 +ü.jpg": b"y" * 20,
    "cats/empty": b"",
    "dogs/1.jpg": b"z",
}


class Store:
    """Buckets by name with their region and objects; listings by `page`.

    `cuts`: of the next answers of objects, after how many bytes each ends. `acts` are done before the next objects.
    """

    def __init__(self) -> None:
        self.objects = dict(CATS)
        self.regions = {"mine-1": "us-east-1"}
        self.page = 2
        self.cuts: list[int] = []
        self.acts: list[Act] = []
        self.refusal = ""
        self.asked: list[tuple[str, str, Mapping[str, str]]] = []

    def answer(
        self, host: str, path: str, headers: Mapping[str, str]
    ) -> tuple[int, dict[str, str], bytes, bytes]:
        self.asked.append((host, path, headers))
        name, region = host.split(".")[0], host.split(".")[2]
        if name not in self.regions:
            return 404, {}, *twice(b"<Error><Code>NoSuchBucket</Code></Error>")
        if region != self.regions[name]:
            there = {"x-amz-bucket-region": self.regions[name]}
            return 301, there, *twice(b"<Error><Code>PermanentRedirect</Code></Error>")
        if self.refusal:
            return 403, {}, *twice(f"<Error><Code>{self.refusal}</Code></Error>".encode())
        key, _, query = path.removeprefix("/").partition("?")
        return (
            self.listing(urllib.parse.parse_qs(query))
            if query
            else self.one(urllib.parse.unquote(key), headers)
        )

    def listing(self, asked: dict[str, list[str]]) -> tuple[int, dict[str, str], bytes, bytes]:
        assert asked["list-type"] == ["2"] and asked["encoding-type"] == ["url"]
        after = asked.get("continuation-token", [""])[0]
        keys = [
            one
            for one in sorted(self.objects)
            if one.startswith(asked["prefix"][0]) and one > after
        ]
        some = keys[: self.page]
        rows = "".join(
            f"<Contents><Key>{urllib.parse.quote_plus(key, safe='/')}</Key><Size>{len(self.objects[key])}</Size>"
            f"<ETag>{etag(self.objects[key])}</ETag></Contents>"
            for key in some
        )
        more = (
            f"<NextContinuationToken>{some[-1]}</NextContinuationToken>"
            if len(keys) > len(some)
            else ""
        )
        space = 'xmlns="http://s3.amazonaws.com/doc/2006-03-01/"'
        return (
            200,
            {},
            *twice(f"<ListBucketResult {space}>{rows}{more}</ListBucketResult>".encode()),
        )

    def one(self, key: str, headers: Mapping[str, str]) -> tuple[int, dict[str, str], bytes, bytes]:
        if self.acts:
            self.acts.pop(0)(self)
        if key not in self.objects:
            return 404, {}, *twice(b"<Error><Code>NoSuchKey</Code></Error>")
        content = self.objects[key]
        if headers["If-Match"] != etag(content):
            return 412, {}, *twice(b"<Error><Code>PreconditionFailed</Code></Error>")
        start = int(headers.get("Range", "bytes=0-").removeprefix("bytes=").removesuffix("-"))
        whole = content[start:]
        return (206 if start else 200), {}, whole, whole[: self.cuts.pop(0)] if self.cuts else whole


def twice(body: bytes) -> tuple[bytes, bytes]:
    return body, body


def etag(content: bytes) -> str:
    return f'"{hashlib.md5(content).hexdigest()}"'


class Connection:
    """To the store of the test; what it answers goes through http.client as bytes of a socket."""

    store: ClassVar[Store]

    def __init__(self, host: str, timeout: float) -> None:
        self.host = host

    def request(self, method: str, path: str, headers: Mapping[str, str]) -> None:
        assert method == "GET" and "authorization" in headers
        status, more, whole, comes = self.store.answer(self.host, path, headers)
        head = "".join(f"{name}: {value}\r\n" for name, value in more.items())
        self.raw = (
            f"HTTP/1.1 {status} x\r\nContent-Length: {len(whole)}\r\n{head}\r\n".encode() + comes
        )

    def getresponse(self) -> http.client.HTTPResponse:
        raw = self.raw

        class Socket:
            def makefile(self, *_: Any) -> io.BytesIO:
                return io.BytesIO(raw)

        answer = http.client.HTTPResponse(Socket())  # type: ignore[arg-type]
        answer.begin()
        return answer

    def close(self) -> None:
        pass


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    Connection.store = Store()
    monkeypatch.setattr(s3.http.client, "HTTPSConnection", Connection)
    monkeypatch.setattr(s3.time, "sleep", lambda _: None)
    monkeypatch.setattr(fetch, "_PIECE_BYTES", 4)
    return Connection.store


def fetched(mailbox: Path, address: str = "s3://mine-1/cats/") -> dict[str, Any]:
    keys = ("AKIAEXAMPLE", "very-secret", "token")
    fetcher = Fetcher(
        mailbox, lambda name: DataBucket(name, region="us-east-1", keys=lambda _: keys, attempts=4)
    )
    fetcher.ask({"ab": address})
    fetcher.ask({"ab": address})
    thread = fetcher._thread
    if thread is not None:
        thread.join()
    (state,) = fetcher.states().values()
    assert not (mailbox / "data" / "ab.part").exists(), "what is not whole is no data"
    assert (mailbox / "data" / "ab").is_dir() is (state["state"] == "ready")
    if state["state"] == "failed":
        assert (mailbox / "data" / "ab.failed").read_text() == state["reason"]
        assert state["reason"].startswith(f"the data of {address} could not be fetched: ")
        assert "very-secret" not in state["reason"]
    return state


def files(mailbox: Path) -> dict[str, bytes]:
    folder = mailbox / "data" / "ab"
    return {
        one.relative_to(folder).as_posix(): one.read_bytes()
        for one in folder.rglob("*")
        if one.is_file()
    }


WHOLE = {
    name.removeprefix("cats/"): content
    for name, content in CATS.items()
    if name[5:] and name[0] == "c"
}


def test_all_objects_below_a_prefix_become_files_that_others_read_and_do_not_write(
    store: Store, tmp_path: Path
) -> None:
    before = os.umask(0o022)
    try:
        state = fetched(tmp_path)
    finally:
        os.umask(before)
    assert (state["state"], state["bytes"], state["of_bytes"]) == ("ready", 30, 30)
    assert files(tmp_path) == WHOLE
    modes = {stat.S_IMODE(one.stat().st_mode) for one in (tmp_path / "data").rglob("*")}
    assert modes == {0o755, 0o644}
    listings = [path for _, path, _ in store.asked if "list-type" in path]
    assert len(listings) == 2, "by page, and not twice for who asks twice"


def test_a_bucket_of_another_region_is_found_there(store: Store, tmp_path: Path) -> None:
    store.regions["mine-1"] = "eu-west-1"
    assert fetched(tmp_path)["state"] == "ready" and files(tmp_path) == WHOLE
    assert {host for host, _, _ in store.asked} >= {"mine-1.s3.eu-west-1.amazonaws.com"}


def test_an_object_that_comes_in_parts_is_asked_for_from_where_it_was(
    store: Store, tmp_path: Path
) -> None:
    store.objects = {"cats/1.jpg": bytes(range(100))}
    store.cuts = [7] * 10  # more often than one that never comes would be asked for
    assert fetched(tmp_path)["state"] == "ready" and files(tmp_path) == {"1.jpg": bytes(range(100))}
    ranges = [
        headers.get("Range", "") for _, path, headers in store.asked if "list-type" not in path
    ]
    assert ranges[:3] == ["", "bytes=7-", "bytes=14-"] and len(ranges) == 11


def test_one_that_never_comes_ends_in_a_reason(store: Store, tmp_path: Path) -> None:
    store.objects, store.cuts = {"cats/1.jpg": b"x" * 10}, [0] * 99
    assert "IncompleteRead" in fetched(tmp_path)["reason"]
    assert len(store.asked) == 1 + 4


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (lambda store: store.objects.pop("cats/1.jpg"), "an object was deleted meanwhile"),
        (
            lambda store: store.objects.update({"cats/1.jpg": b"w" * 10}),
            "an object was written anew meanwhile",
        ),
    ],
)
def test_an_object_that_changes_under_the_fetch_is_named(
    store: Store, tmp_path: Path, act: Act, said: str
) -> None:
    store.objects, store.acts = {"cats/1.jpg": b"x" * 10}, [act]
    reason = fetched(tmp_path)["reason"]
    assert said in reason and "cats/1.jpg" in reason


def test_one_that_changes_between_its_parts_is_not_pieced_together(
    store: Store, tmp_path: Path
) -> None:
    store.objects, store.cuts = {"cats/1.jpg": b"x" * 10}, [4]
    store.acts = [lambda _: None, lambda store: store.objects.update({"cats/1.jpg": b"w" * 10})]
    assert "written anew meanwhile" in fetched(tmp_path)["reason"]


@pytest.mark.parametrize(
    ("address", "refusal", "said"),
    [
        (
            "s3://mine-1/cats/",
            "AccessDenied",
            "the machines' role may not list or read them (AccessDenied): `srift doctor",
        ),
        ("s3://nobody/cats/", "", "there is no bucket called nobody"),
        ("s3://mine-1/cat/", "", "no object is there: `aws s3 ls s3://mine-1/cat/` shows what is"),
        ("s3://mine-1/cats/deep/none/", "", "no object is there"),
    ],
)
def test_what_may_not_be_read_or_is_not_there_is_said(
    store: Store, tmp_path: Path, address: str, refusal: str, said: str
) -> None:
    store.refusal = refusal
    assert said in fetched(tmp_path, address)["reason"]


def test_the_role_may_list_and_not_read(store: Store, tmp_path: Path) -> None:
    store.acts = [lambda store: setattr(store, "refusal", "AccessDenied")]
    assert fetched(tmp_path)["state"] == "failed"


@pytest.mark.parametrize(
    "key", ["cats/../../../etc/cron.d/x", "cats//etc/passwd", "cats/a/../../../x", "cats/1.jpg/x"]
)
def test_a_key_that_climbs_out_of_the_folder_is_refused_and_nothing_is_written(
    store: Store, tmp_path: Path, key: str
) -> None:
    store.objects[key] = b"evil"
    (tmp_path / "m").mkdir()
    assert (
        repr(key) in fetched(tmp_path / "m")["reason"]
        or "others lie below it" in fetched(tmp_path / "m")["reason"]
    )
    assert {one.name for one in tmp_path.rglob("*")} <= {"m", "data", "ab.failed"}


def test_free_space_is_looked_at_first_and_said(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(fetch.shutil, "disk_usage", lambda _: usage(0, 0, KEPT_FREE_BYTES + 29))
    reason = fetched(tmp_path)["reason"]
    assert (
        "the volume has 5.0 GiB free, of which 5 are kept: set [ec2] volume_gib higher by at least 1"
        in reason
    )
    assert all("list-type" in path for _, path, _ in store.asked)
    monkeypatch.setattr(fetch.shutil, "disk_usage", lambda _: usage(0, 0, KEPT_FREE_BYTES + 30))
    shutil.rmtree(tmp_path / "data")
    assert fetched(tmp_path)["state"] == "ready"


def test_a_disk_that_refuses_is_said_and_s3_is_not_asked_again(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full(io.FileIO):
        def write(self, _: Any) -> int:
            raise OSError(28, "No space left on device")

    plain = Path.open
    monkeypatch.setattr(
        Path,
        "open",
        lambda path, mode="r", **how: Full(path, "w") if mode == "wb" else plain(path, mode, **how),
    )
    store.objects = {"cats/1.jpg": b"x" * 10}
    reason = fetched(tmp_path)["reason"]
    assert (
        "No space left on device; set [ec2] volume_gib higher" in reason and len(store.asked) == 2
    )


def test_a_machine_that_goes_down_fetches_no_further(store: Store, tmp_path: Path) -> None:
    fetcher = Fetcher(
        tmp_path,
        lambda name: DataBucket(
            name, region="us-east-1", keys=lambda _: ("a", "b", ""), attempts=4
        ),
    )
    store.objects = {f"cats/{n}": b"x" * 10 for n in range(200)}
    store.acts = [lambda _: fetcher.stop()]
    fetcher.ask({"ab": "s3://mine-1/cats/"})
    if fetcher._thread is not None:
        fetcher._thread.join()
    assert fetcher.states()["ab"]["state"] == "failed" and not (tmp_path / "data" / "ab").exists()
    assert sum("list-type" not in path for _, path, _ in store.asked) < 100
