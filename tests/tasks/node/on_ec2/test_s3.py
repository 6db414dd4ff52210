"""S3 on the machine: signed as botocore signs, patient with what passes, quick to give up on what does not."""

from __future__ import annotations

import calendar
import http.client
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from tasks.node.on_ec2 import s3
from tasks.node.on_ec2.s3 import Absent, Answer, Bucket, S3Error, sign

KEYS = ("AKIAEXAMPLE", "very/secret+key", "session==token")
NOW = 1_795_000_000.0
Bucketed = Callable[..., Bucket]


class Wire:
    """Answers in turn what a script says, the last again and again; keeps what was asked."""

    def __init__(self, *script: Answer | Exception) -> None:
        self.script = list(script)
        self.asked: list[tuple[str, str, Mapping[str, str], bytes]] = []

    def __call__(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> Answer:
        self.asked.append((method, path, headers, body))
        answer = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


def no(status: int, code: str, date: str = "") -> Answer:
    return Answer(
        status, date, f"<Error><Code>{code}</Code><Message>{KEYS[1]}</Message></Error>".encode()
    )


GOOD = Answer(200, "", b"content")


@pytest.fixture
def bucket(clock: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Bucket]:
    """A bucket of four attempts, whose connection is the wire that it is given."""
    clock.now = NOW

    def made(wire: Wire, name: str = "b", **options: Any) -> Bucket:
        monkeypatch.setattr(Bucket, "_send", lambda _, *asked: wire(*asked))
        return Bucket(
            name, **{"region": "us-east-1", "keys": lambda _: KEYS, "attempts": 4} | options
        )

    return made


@pytest.mark.parametrize("token", ["", KEYS[2]])
@pytest.mark.parametrize("method", ["GET", "PUT"])
@pytest.mark.parametrize(
    ("url", "region"),
    [
        ("https://bucket.s3.us-east-1.amazonaws.com/srift/code/abc.tar.gz", "us-east-1"),
        (
            "https://bucket.s3.eu-west-2.amazonaws.com/srift/leases/l/AROA%3Ai-0abc/out/records/a%2Bb.json",
            "eu-west-2",
        ),
        ("http://127.0.0.1:5000/bucket/srift/a%20b/~c_d-e.f", "ap-southeast-1"),
    ],
)
def test_a_request_is_signed_as_botocore_signs_it(
    url: str, region: str, method: str, token: str
) -> None:
    body = b'{"step_s": 0.1}' if method == "PUT" else b""
    theirs = AWSRequest(method=method, url=url, data=body)
    S3SigV4Auth(Credentials(KEYS[0], KEYS[1], token or None), "s3", region).add_auth(theirs)
    at_unix = calendar.timegm(time.strptime(theirs.headers["X-Amz-Date"], "%Y%m%dT%H%M%SZ"))
    _, _, rest = url.partition("//")
    host, _, path = rest.partition("/")
    ours = sign(
        method, host, f"/{path}", body, region=region, keys=(*KEYS[:2], token), at_unix=at_unix
    )
    assert ours["authorization"] == theirs.headers["Authorization"]
    assert ours.get("x-amz-security-token") == theirs.headers.get("X-Amz-Security-Token")


@pytest.mark.parametrize(
    ("name", "endpoint", "region", "asked"),
    [
        ("b", None, "us-east-1", "b.s3.us-east-1.amazonaws.com/p/AROA%3Ai-1/a%2Bb"),
        ("my.b", None, "us-east-1", "s3.us-east-1.amazonaws.com/my.b/p/AROA%3Ai-1/a%2Bb"),
        ("b", "http://127.0.0.1:5000/", "us-east-1", "127.0.0.1:5000/b/p/AROA%3Ai-1/a%2Bb"),
        ("b", None, "cn-north-1", "b.s3.cn-north-1.amazonaws.com.cn/p/AROA%3Ai-1/a%2Bb"),
    ],
)
def test_the_bucket_stands_in_the_name_or_where_that_cannot_be_in_the_path(
    bucket: Bucketed, name: str, endpoint: str | None, region: str, asked: str
) -> None:
    wire = Wire(GOOD)
    bucket(wire, name, endpoint=endpoint, region=region).get("p/AROA:i-1/a+b")
    assert wire.asked[0][2]["host"] + wire.asked[0][1] == asked


@pytest.mark.parametrize(
    "fault",
    [
        no(503, "SlowDown"),
        no(500, ""),
        no(400, "RequestTimeout"),
        TimeoutError(),
        http.client.IncompleteRead(b""),
    ],
)
def test_what_passes_is_waited_for_longer_and_longer_and_not_for_ever(
    bucket: Bucketed, clock: Any, fault: Answer | Exception
) -> None:
    assert bucket(Wire(fault, fault, GOOD)).get("k") == b"content"
    assert len(clock.slept) == 2 and 0 < clock.slept[0] < clock.slept[1] < 2.0
    wire = Wire(fault)
    with pytest.raises(S3Error, match="S3 PUT k: "):
        bucket(wire).put("k", b"x")
    assert len(wire.asked) == 4


def test_what_stays_is_reported_at_once(bucket: Bucketed) -> None:
    wire = Wire(no(403, "SignatureDoesNotMatch"))
    with pytest.raises(S3Error, match="SignatureDoesNotMatch") as raised:
        bucket(wire).put("k", b"x")
    assert len(wire.asked) == 1
    assert not any(secret in repr(raised.value) + str(raised.value) for secret in KEYS)


@pytest.mark.parametrize("fault", [ConnectionResetError, TimeoutError, http.client.BadStatusLine])
def test_a_fault_of_the_connection_is_named_by_its_kind_and_tells_nothing_that_was_sent(
    bucket: Bucketed, fault: type[Exception]
) -> None:
    class Telling(Wire):
        def __call__(
            self, method: str, path: str, headers: Mapping[str, str], body: bytes
        ) -> Answer:
            raise fault(
                f"{method} {path} {dict(headers)}"
            )  # as a library may put the request into its message

    with pytest.raises(S3Error, match=f"S3 PUT k: {fault.__name__}$") as raised:
        bucket(Telling()).put("k", b"x")
    said = repr(raised.value) + str(raised.value)
    assert not any(secret in said for secret in KEYS) and "Signature" not in said


@pytest.mark.parametrize(
    ("answer", "absent"),
    [
        (no(404, "NoSuchKey"), True),
        (no(403, "AccessDenied"), True),
        (no(404, "NoSuchBucket"), False),
    ],
)
def test_what_is_not_there_may_be_called_forbidden(
    bucket: Bucketed, answer: Answer, absent: bool
) -> None:
    with pytest.raises(S3Error) as raised:
        bucket(Wire(answer)).get("k")
    assert isinstance(raised.value, Absent) is absent


def test_a_clock_that_is_wrong_is_put_right_by_the_stores(bucket: Bucketed) -> None:
    late = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(NOW + 7200))
    wire = Wire(no(403, "RequestTimeTooSkewed", late), GOOD)
    one = bucket(wire)
    assert one.get("k") == b"content"
    one.put("k", b"x")  # and stays right
    stamps = [
        calendar.timegm(time.strptime(asked[2]["x-amz-date"], "%Y%m%dT%H%M%SZ"))
        for asked in wire.asked
    ]
    assert [round(stamp - NOW, -1) for stamp in stamps] == [0, 7200, 7200]
    with pytest.raises(S3Error, match="RequestTimeTooSkewed"):
        bucket(Wire(no(403, "RequestTimeTooSkewed", "noon"))).get("k")


def test_credentials_that_have_expired_are_asked_for_anew(bucket: Bucketed) -> None:
    fresh: list[bool] = []
    bucket(Wire(no(400, "ExpiredToken"), GOOD), keys=lambda anew: fresh.append(anew) or KEYS).put(
        "k", b"x"
    )
    assert fresh == [False, True]


def test_both_files_work_alone_side_by_side(tmp_path: Path) -> None:
    for name in ("s3.py", "metadata.py"):
        (tmp_path / name).write_text((Path(s3.__file__).parent / name).read_text())
    (tmp_path / "fetch").write_text(
        "import s3, metadata\ns3.Bucket('b', region='r', keys=metadata.Metadata().keys)\n"
    )
    assert subprocess.run([sys.executable, str(tmp_path / "fetch")], cwd="/").returncode == 0
