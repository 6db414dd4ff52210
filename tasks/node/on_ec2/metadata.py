"""Read EC2's instance metadata service, version 2: the machine's identity, and notices.

The user-data contains this file, because it runs before the package is on the machine. It needs
only Python 3.10 and its standard library. If EC2 is emulated, AWS_EC2_METADATA_SERVICE_ENDPOINT is
the address of the service, as in botocore.
"""

import http.client
import json
import os
import time
import urllib.request

_TIMEOUT_S = 2.0
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # without any proxy


class MetadataError(OSError):
    """The metadata service does not respond or lacks a required value."""


class Metadata:
    """The metadata service of this machine. Each request has a time limit and few attempts."""

    def __init__(self) -> None:
        named = os.environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT")
        self.base = (named or "http://169.254.169.254").rstrip("/")

    def ask(self, method: str, path: str, header: str, value: str) -> str:
        """Send one request and return the response's body.

        Raises OSError (for example HTTPError) or HTTPException.
        """
        headers = {f"X-aws-ec2-metadata-token{header}": value}
        request = urllib.request.Request(f"{self.base}/latest/{path}", None, headers, method=method)
        with _DIRECT.open(request, timeout=_TIMEOUT_S) as answer:
            return str(answer.read().decode())

    def get(self, path: str, *, attempts: int = 5) -> str | None:
        """Return the value at `meta-data/<path>`; None if there is none.

        Raises MetadataError if the service does not respond.
        """
        problem: Exception | None = None
        for attempt in range(attempts):
            if attempt:
                time.sleep(0.2 * 2**attempt)
            token = ""
            try:
                token = self.ask("PUT", "api/token", "-ttl-seconds", "60")
                return self.ask("GET", f"meta-data/{path}", "", token)
            except (OSError, http.client.HTTPException) as error:
                if token and getattr(error, "code", None) == 404:
                    return None  # without a token, 404 does not mean that there is no value
                problem = error
        raise MetadataError(f"the metadata service at {self.base} does not give {path}: {problem}")

    def require(self, path: str) -> str:
        """Return the value at `meta-data/<path>`. Raises MetadataError if there is none."""
        found = self.get(path)
        if not found:
            raise MetadataError(f"the metadata service at {self.base} has no {path}")
        return found

    def notice(self) -> dict[str, str] | None:
        """Return EC2's notice of an interruption of this spot machine; None if there is none.

        `kind` is "interruption", with its time in `at`, or "rebalance" if an interruption is
        likely. Raises MetadataError if the service does not respond.
        """
        action = self.get("spot/instance-action", attempts=2)
        if action is not None:
            body = json.loads(action)
            return {"kind": "interruption", "action": body["action"], "at": body["time"]}
        if self.get("events/recommendations/rebalance", attempts=2) is not None:
            return {"kind": "rebalance"}
        return None
