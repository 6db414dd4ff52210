"""S3 as the mailbox needs it: list, get, put, and the store's clock. All raise AwsRefused with the fix."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from email.utils import parsedate_to_datetime

from tasks.providers.ec2_api import Answer, Ec2Api, asking
from tasks.providers.ec2_errors import refused


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """One object as a listing tells of it. `version` changes whenever it is written anew."""

    key: str
    version: str
    size: int


class Store:
    """One bucket. `region` is where it is asked for at first, and after a listing where it really lies."""

    def __init__(self, api: Ec2Api, region: str, bucket: str) -> None:
        self._api, self.region, self.bucket = api, region, bucket

    def listed(self, prefix: str) -> tuple[list[Stored], float]:
        """Every object below `prefix`, and the store's clock when the listing began, in unix seconds."""
        found: list[Stored] = []
        token, began = "", float("nan")
        while True:
            more = {"ContinuationToken": token} if token else {}
            answer = self._api.ask("s3:ListBucket", self.region, Bucket=self.bucket, Prefix=prefix, **more)
            began = began if began == began else _date(answer)
            self.region = str(_headers(answer).get("x-amz-bucket-region") or self.region)
            found += [_stored(one) for one in answer.get("Contents", ())]
            token = str(answer.get("NextContinuationToken") or "")
            if not token:
                return found, began

    def get(self, key: str, most_bytes: int) -> tuple[bytes, float]:
        """The whole object, and when it was written (unix, the store's clock). One that is too large comes empty."""
        action = "s3:GetObject"
        answer = self._api.ask(action, self.region, Bucket=self.bucket, Key=key)
        size = int(answer["ContentLength"])
        with asking(action, self.region):
            content: bytes = answer["Body"].read() if size <= most_bytes else b""
        if len(content) != size and size <= most_bytes:
            raise refused("IncompleteReadError", action=action, region=self.region)
        return content, _unix(answer["LastModified"])

    def put(self, key: str, content: bytes) -> None:
        """Written whole or not at all."""
        self._api.ask("s3:PutObject", self.region, Bucket=self.bucket, Key=key, Body=content)


def _stored(one: Answer) -> Stored:
    version = f"{one.get('ETag', '')} {_unix(one['LastModified']):.3f}"
    return Stored(key=str(one["Key"]), version=version, size=int(one["Size"]))


def _date(answer: Answer) -> float:
    """The Date header; NaN where there is none."""
    text = _headers(answer).get("date")
    try:
        return parsedate_to_datetime(str(text)).timestamp()
    except (TypeError, ValueError):
        return float("nan")


def _headers(answer: Answer) -> Answer:
    return dict(answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}))


def _unix(moment: datetime) -> float:
    return moment.timestamp()
