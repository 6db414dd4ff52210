"""The instance metadata service, version 2: who this machine is, and notices that it must go.

Standard library, nothing of the package, Python 3.10: the user-data carries this file before the
package is there. AWS_EC2_METADATA_SERVICE_ENDPOINT, which botocore reads too, names the service
where EC2 is emulated.
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
    """The service does not answer, or has no value."""


def ask(method: str, url: str, headers: dict[str, str]) -> tuple[int, str]:
    """Send one request without any proxy; return status and body.

    Raises OSError or HTTPException.
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
    """The service of one machine. Every request is bounded in time and attempts."""

    def __init__(self) -> None:
        named = os.environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT")
        self.base = (named or "http://169.254.169.254").rstrip("/")

    def get(self, path: str, *, attempts: int = 5) -> str | None:
        """Return the value under `meta-data/`, or None if there is none. Raises MetadataError."""
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
        """Return the value under `meta-data/`. Raises MetadataError if there is none."""
        found = (self.get(path) or "").strip()
        if not found:
            raise MetadataError(f"the metadata service at {self.base} has no {path}")
        return found

    def notice(self) -> dict[str, str] | None:
        """Return the notice that EC2 takes the machine back (`kind` "interruption") or may soon
        ("rebalance").

        `at` is the moment of an interruption. Raises MetadataError.
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
