"""The one door of the emulated AWS: what moto lacks is answered here, faults are played here,
machines are judged here.

Everything that passes goes to moto's own server application.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs, unquote

from moto.moto_server.werkzeug_app import (
    DomainDispatcherApplication,
    MotoRequestHandler,
    create_backend_app,
)

from tests.world.account import Account
from tests.world.elastic import Elastic
from tests.world.market import products
from tests.world.policy import allows

Start = Callable[..., Any]
Answer = tuple[int, str, bytes]  # status, content type, body
_CREDENTIAL = re.compile(r"Credential=([^/]+)/\d+/([^/]+)/([^/]+)/aws4_request")
_S3 = {"GET": "GetObject", "PUT": "PutObject", "DELETE": "DeleteObject", "HEAD": "GetObject"}
_JSON = "application/x-amz-json-1.1"


class Quiet(MotoRequestHandler):
    """moto's own, without a line for every request."""

    def log(self, type: str, message: str, *args: Any) -> None:
        """Say nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One request, as far as it must be read. `action` is spelt as in IAM policies:
    "ec2:RunInstances".
    """

    service: str
    region: str
    access_key: str
    action: str
    body: bytes


class Front:
    """A WSGI application. `asked` lists (action, region) of what was asked with the controller's
    keys.
    """

    def __init__(self, account: Account, ended: Callable[[], None]) -> None:
        self.account, self.asked = account, list[tuple[str, str]]()
        self._ended, self._moto = ended, DomainDispatcherApplication(create_backend_app)

    def __call__(self, environ: dict[str, Any], start: Start) -> Iterable[bytes]:
        asked = _read(environ)
        keys = self.account.keys.get(asked.access_key)
        if keys is not None:
            return self._machine(environ, start, asked)
        self.asked.append((asked.action, asked.region))
        answer = self._own(asked)
        return _send(start, answer) if answer is not None else self._pass_on(environ, start, asked)

    def _own(self, asked: Asked) -> Answer | None:
        if asked.action == "pricing:GetProducts":
            sold = {
                region: {name: usd for name, usd in prices.items() if self.account.sells(name)}
                for region, prices in self.account.market.usd.items()
            }
            return 200, _JSON, json.dumps(products(sold, json.loads(asked.body))).encode()
        if asked.action == "servicequotas:GetServiceQuota":
            quota = {
                "QuotaCode": json.loads(asked.body)["QuotaCode"],
                "QuotaName": "",
                "Value": 768.0,
            }
            return 200, _JSON, json.dumps({"Quota": quota | {"ServiceCode": "ec2"}}).encode()
        if asked.action == "ssm:GetParameter":
            name = str(json.loads(asked.body)["Name"])
            image = self.account.image_of(name, asked.region)
            answer = {"Parameter": {"Name": name, "Type": "String", "Value": image, "Version": 1}}
            return None if image is None else (200, _JSON, json.dumps(answer).encode())
        return None

    def _machine(self, environ: dict[str, Any], start: Start, asked: Asked) -> Iterable[bytes]:
        """A request with the keys of an instance's role: S3 alone, and within the role's policy."""
        keys = self.account.keys[asked.access_key]
        path = unquote(environ.get("RAW_URI", environ["PATH_INFO"]).partition("?")[0])
        if asked.service != "s3":
            return _send(start, _refusal(asked.service, 403, "UnauthorizedOperation"))
        statements = list(self.account.policies_of(keys.role))
        userid = f"{keys.role_id}:{keys.instance_id}"
        bucket = path.split("/")[1]
        named, prefix = path.lstrip("/"), None
        if asked.action == "s3:ListBucket":
            named, prefix = bucket, parse_qs(environ["QUERY_STRING"]).get("prefix", [""])[0]
        if not allows(statements, asked.action, f"arn:aws:s3:::{named}", userid, prefix):
            return _send(start, _refusal("s3", 403, "AccessDenied"))
        statuses: list[str] = []

        def start_or_hide(status: str, *rest: Any) -> Any:
            statuses.append(status)
            return start(status, *rest) if not status.startswith("404") else lambda _: None

        passed = list(self._pass_on(environ, start_or_hide, asked))
        if statuses[0].startswith("404"):
            listed = allows(statements, "s3:ListBucket", f"arn:aws:s3:::{bucket}", userid)
            # Who may not list a bucket does not learn what is missing from it.
            return _send(
                start,
                _refusal("s3", 404 if listed else 403, "NoSuchKey" if listed else "AccessDenied"),
            )
        return passed

    def _pass_on(self, environ: dict[str, Any], start: Start, asked: Asked) -> Iterable[bytes]:
        app = self._moto.get_application(environ)
        if asked.service != "ec2":
            return app(environ, start)
        if not hasattr(Elastic, _snake(asked.action.partition(":")[2])):
            return _send(start, _refusal("ec2", 400, "InvalidAction"))
        with self.account.lock:
            answer = list(app(environ, start))
        self._ended()
        return answer


def _read(environ: dict[str, Any]) -> Asked:
    found = _CREDENTIAL.search(environ.get("HTTP_AUTHORIZATION", ""))
    access_key, region, service = found.groups() if found else ("", "", "s3")
    length = int(environ.get("CONTENT_LENGTH") or 0)
    body = environ["wsgi.input"].read(length) if length else b""
    if length:
        environ["wsgi.input"] = io.BytesIO(body)
    if "HTTP_X_AMZ_TARGET" in environ:
        action = environ["HTTP_X_AMZ_TARGET"].rpartition(".")[2]
    elif service == "s3":
        whole = environ["PATH_INFO"].strip("/").count("/") == 0
        action = (
            ("ListBucket" if environ["REQUEST_METHOD"] in ("GET", "HEAD") else "Bucket")
            if whole
            else _S3.get(environ["REQUEST_METHOD"], "Object")
        )
    else:
        action = parse_qs(body.decode(errors="replace")).get("Action", [""])[0]
    return Asked(
        service=service,
        region=region,
        access_key=access_key,
        action=f"{service}:{action}",
        body=body,
    )


def _snake(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def _refusal(service: str, status: int, code: str) -> Answer:
    message = "refused by the emulated AWS"
    if service in ("pricing", "ssm", "servicequotas"):
        return status, _JSON, json.dumps({"__type": code, "message": message}).encode()
    if service == "s3":
        return (
            status,
            "application/xml",
            f"<Error><Code>{code}</Code><Message>{message}</Message></Error>".encode(),
        )
    error = f"<Error><Code>{code}</Code><Message>{message}</Message></Error>"
    if service == "ec2":
        return (
            status,
            "text/xml",
            f"<Response><Errors>{error}</Errors><RequestID>1</RequestID></Response>".encode(),
        )
    return (
        status,
        "text/xml",
        f"<ErrorResponse>{error}<RequestId>1</RequestId></ErrorResponse>".encode(),
    )


def _send(start: Start, answer: Answer) -> Iterable[bytes]:
    status, kind, body = answer
    headers = {"Content-Type": kind, "Content-Length": str(len(body))}
    start(f"{status} {'OK' if status == 200 else 'Refused'}", list(headers.items()))
    return [body]
