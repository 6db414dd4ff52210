"""Reads EC2's instance metadata service, version 2: the machine's identity, and notices.

The user-data contains this file, since it runs before the package is on the machine. So it needs
only Python 3.10 and its standard library. Where EC2 is emulated,
AWS_EC2_METADATA_SERVICE_ENDPOINT, which botocore reads too, is the address of the service.
"""

from __future__ import annotations

import http.client
import json
import os
import time
import urllib.error
import urllib.request

_TIMEOUT_S = 2.0


class MetadataError(OSError):
    """Raised if the service does not answer or lacks a required value."""


def ask(method: str, url: str, headers: dict[str, str]) -> tuple[int, str]:
    """Send one request without any proxy; return status and body.

    Raises OSError or HTTPException if there is no answer.
    """
    request = urllib.request.Request(url, method=method, headers=headers)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=_TIMEOUT_S) as answer:
            return int(answer.status), answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, ""


class Metadata:
    """The metadata service of this machine. Each request has a time limit and few attempts."""

    def __init__(self) -> None:
        named = os.environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT")
        self.base = (named or "http://169.254.169.254").rstrip("/")

    def get(self, path: str, *, attempts: int = 5) -> str | None:
        """Return the value at `meta-data/<path>`; None if there is none.

        Raises MetadataError if the service does not answer.
        """
        problem = ""
        for attempt in range(attempts):
            if attempt:
                time.sleep(0.2 * 2**attempt)
            try:
                lifetime = {"X-aws-ec2-metadata-token-ttl-seconds": "60"}
                status, body = ask("PUT", f"{self.base}/latest/api/token", lifetime)
                if status == 200:  # without a token, 404 does not mean that there is no value
                    url = f"{self.base}/latest/meta-data/{path}"
                    status, body = ask("GET", url, {"X-aws-ec2-metadata-token": body})
                    if status in (200, 404):
                        return body if status == 200 else None
                problem = f"status {status}"
            except (OSError, http.client.HTTPException, ValueError) as error:
                problem = type(error).__name__
        raise MetadataError(f"the metadata service at {self.base} does not give {path}: {problem}")

    def require(self, path: str) -> str:
        """Return the value at `meta-data/<path>`. Raises MetadataError if there is none."""
        found = (self.get(path) or "").strip()
        if not found:
            raise MetadataError(f"the metadata service at {self.base} has no {path}")
        return found

    def notice(self) -> dict[str, str] | None:
        """Return EC2's notice that it takes this spot machine back; None if there is none.

        `kind` is "interruption", with its time in `at`, or "rebalance" if an interruption is
        likely. Raises MetadataError if the service does not answer.
        """
        action = self.get("spot/instance-action", attempts=2)
        if action is not None:
            try:
                body = dict(json.loads(action))
            except (ValueError, TypeError):
                body = {}
            kind = str(body.get("action") or "terminate")
            return {"kind": "interruption", "action": kind, "at": str(body.get("time") or "")}
        if self.get("events/recommendations/rebalance", attempts=2) is not None:
            return {"kind": "rebalance", "action": "", "at": ""}
        return None
