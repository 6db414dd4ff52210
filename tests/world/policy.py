"""Whether the role of a machine may do what it asks for, by its own policy, its signature and its clock.

The policy is the one that was put into IAM: what it does not allow is refused here as AWS would refuse it.
"""

from __future__ import annotations

import hashlib
import re
import time
from calendar import timegm
from collections.abc import Iterable, Mapping
from typing import Any

from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from tests.world.account import RoleKeys

_SKEW_S = 900.0


def allows(
    statements: Iterable[Mapping[str, Any]],
    action: str,
    resource: str,
    userid: str,
    prefix: str | None = None,
) -> bool:
    """Whether one statement allows it and none denies it. `prefix`: of a listing, which conditions may name.

    A statement with a condition of another kind never allows.
    """
    allowed = False
    for one in statements:
        named = any(_like(pattern, action) for pattern in _list(one.get("Action")))
        meant = any(
            _like(str(pattern).replace("${aws:userid}", userid), resource)
            for pattern in _list(one.get("Resource"))
        )
        if named and meant and one["Effect"] == "Deny":
            return False
        allowed = allowed or (named and meant and _holds(one.get("Condition") or {}, prefix))
    return allowed


def _holds(condition: Mapping[str, Any], prefix: str | None) -> bool:
    if not condition:
        return True
    patterns = _list(condition.get("StringLike", {}).get("s3:prefix", []))
    alone = condition == {
        "StringLike": {"s3:prefix": condition.get("StringLike", {}).get("s3:prefix")}
    }
    return alone and prefix is not None and any(_like(pattern, prefix) for pattern in patterns)


def forged(keys: RoleKeys, method: str, url: str, body: bytes, headers: Mapping[str, str]) -> str:
    """S3's error code for a request that these keys did not sign; empty for one that they did."""
    lowered = {name.lower(): value for name, value in headers.items()}
    if lowered.get("x-amz-security-token") != keys.token:
        return "InvalidToken"
    stamp = lowered.get("x-amz-date", "")
    if abs(timegm(time.strptime(stamp, "%Y%m%dT%H%M%SZ")) - time.time()) > _SKEW_S:
        return "RequestTimeTooSkewed"
    found = re.search(
        r"Credential=[^/]+/\d+/([^/]+)/s3/aws4_request, *SignedHeaders=([^,]+), *Signature=(\w+)",
        lowered["authorization"],
    )
    if found is None:
        return "AuthorizationHeaderMalformed"
    region, names, signature = found.groups()
    digest = lowered.get("x-amz-content-sha256", "")
    if digest != hashlib.sha256(body).hexdigest():
        return "XAmzContentSHA256Mismatch"
    request = AWSRequest(
        method=method,
        url=url,
        data=body,
        headers={name: lowered[name] for name in names.split(";")},
    )
    request.context["timestamp"] = stamp
    auth = S3SigV4Auth(Credentials(keys.access_key, keys.secret_key, keys.token), "s3", region)
    wanted = auth.signature(auth.string_to_sign(request, auth.canonical_request(request)), request)
    return "" if wanted == signature else "SignatureDoesNotMatch"


def _like(pattern: str, text: str) -> bool:
    return (
        re.fullmatch(re.escape(pattern).replace(r"\*", ".*").replace(r"\?", "."), text, re.DOTALL)
        is not None
    )


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
