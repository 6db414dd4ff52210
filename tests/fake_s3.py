"""S3 in memory: one bucket, the store's own clock, pages, answers that are cut off."""

from __future__ import annotations

import hashlib
import io
import json
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from email.utils import format_datetime
from typing import Any

from botocore.exceptions import ClientError
from botocore.response import StreamingBody

ROLE = "AROAEXAMPLEROLE"


@dataclass(slots=True, kw_only=True)
class FakeS3:
    """`skew_s`: seconds that its clock is ahead. `cut`: number of next objects that come short."""

    bucket: str = "mailbox"
    region: str = "us-east-1"
    objects: dict[str, tuple[bytes, datetime]] = field(default_factory=dict)
    page: int = 1000
    skew_s: float = 0.0
    cut: int = 0

    def upload(self, now: datetime, lease_id: str, instance_id: str, name: str, body: Any) -> None:
        """As a node's courier does it."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        key = f"srift/leases/{lease_id}/{ROLE}:{instance_id}/out/{name}"
        self.objects[key] = (content, self._clock(now))

    def read(self, lease_id: str, instance_id: str, name: str) -> Any:
        """What the controller has written for a node."""
        content, _ = self.objects[f"srift/leases/{lease_id}/{ROLE}:{instance_id}/in/{name}"]
        return json.loads(content)

    def get_bucket_location(self, *, region: str, now: datetime, Bucket: str) -> Any:
        self._there(Bucket, "GetBucketLocation")
        return {"LocationConstraint": None if self.region == "us-east-1" else self.region}

    def list_objects_v2(
        self, *, region: str, now: datetime, Bucket: str, Prefix: str, ContinuationToken: str = ""
    ) -> Any:
        self._there(Bucket, "ListObjectsV2")
        keys = [
            key
            for key in sorted(self.objects)
            if key.startswith(Prefix) and key > ContinuationToken
        ]
        some = keys[: self.page]
        contents = [
            {"Key": key, "Size": len(self.objects[key][0]), "LastModified": self.objects[key][1],
             "ETag": _etag(self.objects[key][0])} for key in some
        ]  # fmt: skip
        more = {"NextContinuationToken": some[-1]} if len(keys) > len(some) else {}
        return {"Contents": contents, "ResponseMetadata": self._headers(now), **more}

    def get_object(self, *, region: str, now: datetime, Bucket: str, Key: str) -> Any:
        self._there(Bucket, "GetObject")
        if Key not in self.objects:
            raise ClientError({"Error": {"Code": "NoSuchKey", "Message": Key}}, "GetObject")
        content, moment = self.objects[Key]
        whole = len(content)
        if self.cut:
            self.cut -= 1
            content = content[: whole // 2]
        body = StreamingBody(io.BytesIO(content), whole)
        answer = {"Body": body, "ContentLength": whole, "LastModified": moment}
        return answer | {"ResponseMetadata": self._headers(now)}

    def put_object(self, *, region: str, now: datetime, Bucket: str, Key: str, Body: bytes) -> Any:
        self._there(Bucket, "PutObject")
        self.objects[Key] = (Body, self._clock(now))
        return {"ResponseMetadata": self._headers(now)}

    def _there(self, bucket: str, operation: str) -> None:
        if bucket != self.bucket:
            raise ClientError({"Error": {"Code": "NoSuchBucket", "Message": bucket}}, operation)

    def _clock(self, now: datetime) -> datetime:
        return (now + timedelta(seconds=self.skew_s)).replace(microsecond=0)

    def _headers(self, now: datetime) -> Any:
        date = format_datetime(self._clock(now), usegmt=True)
        return {"HTTPHeaders": {"date": date, "x-amz-bucket-region": self.region}}


def _etag(content: bytes) -> str:
    return f'"{hashlib.md5(content, usedforsecurity=False).hexdigest()}"'
