"""The instance metadata service, version 2 only: who this machine is, its role's credentials, notices that it must go.

Standard library, nothing of the package, Python 3.10: the user-data carries this file before the package is there.
SRIFT_METADATA stands in for the service's address where EC2 is emulated.
"""

from __future__ import annotations

import calendar
import http.client
import json
import os
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any

BASE = "http://169.254.169.254"
_TOKEN_S = 21600  # the longest that there is
_REFRESH_S = 300.0  # AWS has the next credentials ready five minutes before the last expire
_TIMEOUT_S = 2.0
Ask = Callable[
    [str, str, Mapping[str, str]], tuple[int, str]
]  # method, URL, headers -> status, body


class MetadataError(OSError):
    """The service does not answer, or not with what it should."""


def ask_once(method: str, url: str, headers: Mapping[str, str]) -> tuple[int, str]:
    """One question, through no proxy whatever the environment says. Raises OSError or HTTPException."""
    request = urllib.request.Request(url, method=method, headers=dict(headers))
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(
            request, timeout=_TIMEOUT_S
        ) as answer:
            return int(answer.status), answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, ""


class Metadata:
    """One machine's service. Every question is bounded in time and tries."""

    def __init__(self, base: str = "", ask: Ask = ask_once) -> None:
        self.base, self._ask = (base or os.environ.get("SRIFT_METADATA") or BASE).rstrip("/"), ask
        self._token = self._role = ""
        self._held: tuple[str, str, str] | None = None
        self._expires_unix = 0.0
        self._lock = threading.Lock()

    def get(self, path: str, *, attempts: int = 5) -> str | None:
        """What stands under `meta-data/`; None where there is nothing. Raises MetadataError."""
        problem = ""
        for attempt in range(attempts):
            if attempt:
                time.sleep(0.2 * 2**attempt)
            try:
                status, body = self._get(path)
            except (OSError, http.client.HTTPException, ValueError) as error:
                problem = type(error).__name__
                continue
            if status in (200, 404):
                return body if status == 200 else None
            problem = f"status {status}"
        raise MetadataError(f"the metadata service at {self.base} does not give {path}: {problem}")

    def instance_id(self) -> str:
        """Of this machine. Raises MetadataError."""
        return self._must("instance-id")

    def address(self) -> str:
        """At which the other machines of its network reach it. Raises MetadataError."""
        return self._must("local-ipv4")

    def keys(self, fresh: bool = False) -> tuple[str, str, str]:
        """The role's access key, secret key and session token, renewed before they expire. Raises MetadataError.

        Several threads may ask.
        """
        with self._lock:
            return self._keys(fresh)

    def _keys(self, fresh: bool) -> tuple[str, str, str]:
        if not fresh and self._held is not None and time.time() < self._expires_unix - _REFRESH_S:
            return self._held
        try:
            self._held = self._renewed()
        except MetadataError:
            if fresh or self._held is None or time.time() >= self._expires_unix:
                raise
        return self._held

    def notice(self) -> dict[str, str] | None:
        """That EC2 takes the machine back, or may soon: `kind`, `action`, and `at` where the moment is fixed.

        Raises MetadataError.
        """
        action = self.get("spot/instance-action", attempts=2)
        if action is not None:
            body = _object(action)
            asked = str(body.get("action") or "terminate")
            return {"kind": "interruption", "action": asked, "at": str(body.get("time") or "")}
        if self.get("events/recommendations/rebalance", attempts=2) is not None:
            return {
                "kind": "rebalance",
                "action": "",
                "at": "",
            }  # its noticeTime is when it was said, not when it ends
        return None

    def _get(self, path: str) -> tuple[int, str]:
        for _ in range(2):
            if not self._token:
                wanted = {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_S)}
                status, self._token = self._ask("PUT", f"{self.base}/latest/api/token", wanted)
                if status != 200:
                    self._token = ""
                    return (status if status != 404 else 500), ""  # no token is not "no such value"
            url = f"{self.base}/latest/meta-data/{path}"
            status, body = self._ask("GET", url, {"X-aws-ec2-metadata-token": self._token})
            if status != 401:
                break
            self._token = ""  # expired, or not this machine's any more
        return status, body

    def _must(self, path: str) -> str:
        found = (self.get(path) or "").strip()
        if not found:
            raise MetadataError(f"the metadata service at {self.base} has no {path}")
        return found

    def _renewed(self) -> tuple[str, str, str]:
        self._role = self._role or self._must("iam/security-credentials/").splitlines()[0].strip()
        body = _object(self._must(f"iam/security-credentials/{self._role}"))
        try:
            keys = (str(body["AccessKeyId"]), str(body["SecretAccessKey"]), str(body["Token"]))
            expires = time.strptime(body["Expiration"], "%Y-%m-%dT%H:%M:%SZ")
        except (KeyError, ValueError, TypeError):
            raise MetadataError(
                f"the credentials of role {self._role} are not whole: {body.get('Code')}"
            ) from None
        self._expires_unix = float(calendar.timegm(expires))
        return keys


def _object(text: str) -> dict[str, Any]:
    try:
        body = json.loads(text)
    except ValueError:
        return {}
    return body if isinstance(body, dict) else {}
