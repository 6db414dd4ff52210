"""S3 in memory: the store's own clock, pages, answers that are cut off."""

import hashlib
import io
import json
from dataclasses import dataclass, field
from datetime import timedelta
from email.utils import format_datetime

from botocore.exceptions import ClientError
from botocore.response import StreamingBody

ROLE = "AROAEXAMPLEROLE"


@dataclass
class FakeS3:
    """`skew_s`: seconds that its clock is ahead. `cut`: number of next objects that come short.

    All `buckets` hold the same `objects`.
    """

    buckets: set = field(default_factory=lambda: {"mailbox"})
    objects: dict = field(default_factory=dict)
    page: int = 1000
    skew_s: float = 0.0
    cut: int = 0

    def upload(self, now, lease_id, instance_id, name, body):
        """As a node's courier does it."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        key = f"srift/leases/{lease_id}/{ROLE}:{instance_id}/out/{name}"
        self.objects[key] = (content, self._clock(now))

    def read(self, lease_id, instance_id, name):
        """What the controller has written for a node."""
        content, _ = self.objects[f"srift/leases/{lease_id}/{ROLE}:{instance_id}/in/{name}"]
        return json.loads(content)

    def get_bucket_location(self, *, now, Bucket, **_):
        return self._answer(Bucket, now) | {"LocationConstraint": None}

    def list_objects_v2(self, *, now, Bucket, Prefix, ContinuationToken="", **_):
        answer = self._answer(Bucket, now)
        below = sorted(key for key in self.objects if key.startswith(Prefix))
        keys = [key for key in below if key > ContinuationToken]
        some = keys[: self.page]
        answer["Contents"] = [
            {"Key": key, "Size": len(content), "LastModified": moment}
            | {"ETag": f'"{hashlib.md5(content, usedforsecurity=False).hexdigest()}"'}
            for key in some
            for content, moment in [self.objects[key]]
        ]
        return answer | ({"NextContinuationToken": some[-1]} if len(keys) > len(some) else {})

    def get_object(self, *, now, Bucket, Key, **_):
        answer = self._answer(Bucket, now)
        if Key not in self.objects:
            raise ClientError({"Error": {"Code": "NoSuchKey", "Message": Key}}, "GetObject")
        content, moment = self.objects[Key]
        whole = len(content)
        if self.cut:
            self.cut -= 1
            content = content[: whole // 2]
        body = StreamingBody(io.BytesIO(content), whole)
        return answer | {"Body": body, "ContentLength": whole, "LastModified": moment}

    def put_object(self, *, now, Bucket, Key, Body, **_):
        self.objects[Key] = (Body, self._clock(now))
        return self._answer(Bucket, now)

    def delete_object(self, *, now, Bucket, Key, **_):
        del self.objects[Key]
        return self._answer(Bucket, now)

    def _clock(self, now):
        return (now + timedelta(seconds=self.skew_s)).replace(microsecond=0)

    def _answer(self, bucket, now):
        if bucket not in self.buckets:
            raise ClientError({"Error": {"Code": "NoSuchBucket", "Message": bucket}}, "an action")
        return self.headers(now)

    def headers(self, now):
        """What every answer of AWS has."""
        date = format_datetime(self._clock(now), usegmt=True)
        return {"ResponseMetadata": {"HTTPHeaders": {"date": date}}}
