"""The metadata service as machines see it at 169.254.169.254: version 2 alone, each machine known
by its address.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import socket
from typing import Any

from tests.world.account import Account

ADDRESS, PORT = "169.254.169.254", 80
_ROOT = "/latest/meta-data/"
_LEAST_S, _MOST_S = 1, 21_600


class Metadata:
    """Answers for `account`'s instances; `instance_at` says which one has an address in a
    region.
    """

    def __init__(self, account: Account, instance_at: Callable[[str, str], str | None]) -> None:
        self.account, self._instance_at = account, instance_at
        self._tokens: dict[str, tuple[str, float]] = {}

    def token(self, address: str, lifetime_s: int) -> str:
        made = secrets.token_urlsafe(32)
        self._tokens[made] = (address, time.monotonic() + lifetime_s)
        return made

    def knows(self, address: str, token: str) -> bool:
        holder, until = self._tokens.get(token, ("", 0.0))
        return holder == address and time.monotonic() < until

    def value(self, region: str, address: str, path: str) -> str | None:
        instance_id = self._instance_at(region, address)
        if instance_id is None or not path.startswith(_ROOT):
            return None
        return self._values(instance_id).get(path.removeprefix(_ROOT), lambda: None)()

    def _values(self, instance_id: str) -> Mapping[str, Callable[[], str | None]]:
        one, keys = self.account.instance(instance_id), self.account.role_keys(instance_id)
        role = keys.role if keys else "none"
        return {
            "instance-id": lambda: instance_id,
            "local-ipv4": lambda: str(one.private_ip),
            "iam/security-credentials": lambda: role if keys else None,
            "iam/security-credentials/": lambda: role if keys else None,
            f"iam/security-credentials/{role}": lambda: _credentials(keys) if keys else None,
        }


def served(metadata: Metadata, region: str, listening: socket) -> ThreadingHTTPServer:
    """A server for one region on a socket that listens already; it serves once `serve_forever` is
    called.
    """

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_PUT(self) -> None:
            try:
                lifetime_s = int(self.headers.get("X-aws-ec2-metadata-token-ttl-seconds", ""))
            except ValueError:
                lifetime_s = 0
            if self.path != "/latest/api/token" or self.headers.get("X-Forwarded-For"):
                self.answer(403 if self.path == "/latest/api/token" else 404, "")
            elif not _LEAST_S <= lifetime_s <= _MOST_S:
                self.answer(400, "")
            else:
                self.answer(200, metadata.token(self.client_address[0], lifetime_s))

        def do_GET(self) -> None:
            address = self.client_address[0]
            if not metadata.knows(address, self.headers.get("X-aws-ec2-metadata-token", "")):
                self.answer(401, "")
                return
            found = metadata.value(region, address, self.path)
            self.answer(404 if found is None else 200, found or "")

        def answer(self, status: int, text: str) -> None:
            body = text.encode()
            self.send_response(status)
            self.send_header("Content-Type", "text/plain")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer((ADDRESS, PORT), Handler, bind_and_activate=False)
    server.socket.close()
    server.socket, server.daemon_threads = listening, True
    return server


def _credentials(keys: Any) -> str:
    until = datetime.fromtimestamp(time.time() + 6 * 3600, UTC)
    return json.dumps(
        {
            "Code": "Success",
            "Type": "AWS-HMAC",
            "AccessKeyId": keys.access_key,
            "SecretAccessKey": keys.secret_key,
            "Token": keys.token,
            "Expiration": f"{until:%Y-%m-%dT%H:%M:%SZ}",
        }
    )
