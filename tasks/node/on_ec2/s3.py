"""S3's GET and PUT with AWS Signature Version 4 (docs.aws.amazon.com/AmazonS3/latest/API/sig-v4-header-based-auth).

Standard library, nothing of the package, Python 3.10: the user-data carries this file before the package is there.
What goes wrong is an OSError that names S3's code and never what was signed.
"""

from __future__ import annotations

import contextlib
import email.utils
import hashlib
import hmac
import http.client
import random
import re
import time
import urllib.parse
from collections.abc import Callable, Mapping
from typing import NamedTuple

Keys = tuple[str, str, str]  # access key, secret key, session token ("" where there is none)
_EXPIRED = ("ExpiredToken", "TokenRefreshRequired", "InvalidToken")
_AGAIN = ("SlowDown", "RequestTimeout", "InternalError", "ServiceUnavailable")
_LONGEST_PAUSE_S = 8.0


class S3Error(OSError):
    """S3 did not do it. `code` is S3's own, or the kind of fault where no answer came."""

    def __init__(self, method: str, key: str, status: int, code: str) -> None:
        super().__init__(
            f"S3 {method} {key}: {code or 'no reason given'}{f' ({status})' if status else ''}"
        )
        self.status, self.code = status, code


class Absent(S3Error):
    """There is no such object. To those who may not list a bucket, S3 says AccessDenied instead."""


class Answer(NamedTuple):
    """What came back; `date` is the store's clock."""

    status: int
    date: str
    body: bytes


def sign(
    method: str, host: str, path: str, body: bytes, *, region: str, keys: Keys, at_unix: float
) -> dict[str, str]:
    """The headers of a request. `path` is percent-encoded once, as S3 expects it; its query's names come in order."""
    access_key, secret_key, token = keys
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(at_unix))
    digest = hashlib.sha256(body).hexdigest()
    headers = {"host": host, "x-amz-content-sha256": digest, "x-amz-date": stamp}
    if token:
        headers["x-amz-security-token"] = token
    names = ";".join(sorted(headers))
    path, _, query = path.partition("?")
    canonical = [
        method,
        path,
        query,
        *(f"{name}:{headers[name]}" for name in sorted(headers)),
        "",
        names,
        digest,
    ]
    scope = f"{stamp[:8]}/{region}/s3/aws4_request"
    hashed = hashlib.sha256("\n".join(canonical).encode()).hexdigest()
    key = f"AWS4{secret_key}".encode()
    for part in scope.split("/"):
        key = hmac.new(key, part.encode(), hashlib.sha256).digest()
    text = "\n".join(("AWS4-HMAC-SHA256", stamp, scope, hashed))
    signature = hmac.new(key, text.encode(), hashlib.sha256).hexdigest()
    credential = f"AWS4-HMAC-SHA256 Credential={access_key}/{scope}"
    return {
        **headers,
        "authorization": f"{credential}, SignedHeaders={names}, Signature={signature}",
    }


class Bucket:
    """One bucket. `keys(fresh)` gives credentials, new ones where `fresh`; `endpoint` stands in for AWS's own."""

    def __init__(
        self,
        name: str,
        *,
        region: str,
        keys: Callable[[bool], Keys],
        endpoint: str | None = None,
        attempts: int = 5,
        timeout_s: float = 10.0,
    ) -> None:
        self._name, self._endpoint, self._timeout_s = name, endpoint, timeout_s
        self._keys, self.attempts = keys, attempts
        self.offset_s = 0.0  # the store's clock less this machine's, learned when S3 complains
        self._lies_in(region)

    def _lies_in(self, region: str) -> None:
        """Ask there from now on."""
        name, endpoint, self._region = self._name, self._endpoint, region
        domain = "amazonaws.com.cn" if region.startswith("cn-") else "amazonaws.com"
        virtual = endpoint is None and "." not in name  # a dot would not fit AWS's certificate
        url = (endpoint or f"https://{name + '.' if virtual else ''}s3.{region}.{domain}").rstrip(
            "/"
        )
        parts = urllib.parse.urlsplit(url)
        self._host, self._root = parts.netloc, parts.path + ("/" if virtual else f"/{name}/")
        kind = (
            http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        )
        self._connection = kind(parts.netloc, timeout=self._timeout_s)

    def get(self, key: str) -> bytes:
        """The object. Raises Absent, or S3Error when the attempts are used up."""
        return self._ask("GET", key, b"")

    def put(self, key: str, body: bytes) -> None:
        """Store the object whole: S3 checks what came against the digest that is signed. Raises S3Error."""
        self._ask("PUT", key, body)

    def _send(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> Answer:
        """Ask once, following no redirection. The connection is kept after a whole answer and new after any fault."""
        try:
            self._connection.request(
                method, path, body=body if method == "PUT" else None, headers=dict(headers)
            )
            answer = self._connection.getresponse()
            return Answer(answer.status, answer.getheader("Date") or "", answer.read())
        except BaseException:
            self._connection.close()
            raise

    def _ask(self, method: str, key: str, body: bytes, query: str = "") -> bytes:
        path = self._root + urllib.parse.quote(key, safe="/") + query
        problem, fresh = S3Error(method, key, 0, ""), False
        for attempt in range(self.attempts):
            if attempt:
                pause_s = min(_LONGEST_PAUSE_S, 0.2 * 2**attempt)
                time.sleep(
                    pause_s * random.uniform(0.5, 1.0)
                )  # machines of a cluster must not come back as one
            try:
                keys, at_unix = self._keys(fresh), time.time() + self.offset_s
                headers = sign(
                    method, self._host, path, body, region=self._region, keys=keys, at_unix=at_unix
                )
                answer = self._send(method, path, headers, body)
            except (OSError, http.client.HTTPException) as error:
                problem = S3Error(method, key, 0, type(error).__name__)
                continue
            if answer.status in (200, 204):
                return answer.body
            found = re.search(rb"<Code>(\w+)</Code>", answer.body)
            code = found.group(1).decode() if found else ""
            problem = S3Error(method, key, answer.status, code)
            fresh = code in _EXPIRED
            if code == "RequestTimeTooSkewed":
                with contextlib.suppress(TypeError, ValueError):  # a date that is none
                    self.offset_s = (
                        email.utils.parsedate_to_datetime(answer.date).timestamp() - time.time()
                    )
            elif code in ("NoSuchKey", "AccessDenied") and method == "GET":
                raise Absent(method, key, answer.status, code)
            elif not (fresh or code in _AGAIN or answer.status >= 500 or answer.status == 429):
                raise problem
        raise problem
