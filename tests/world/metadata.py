"""Emulate the metadata service (IMDSv2) of a region, which knows a machine by its address."""

import json
import secrets
from datetime import UTC, datetime, timedelta

from werkzeug.wrappers import Request, Response

_ROLE = "iam/security-credentials"


class Metadata:
    """A WSGI application. `instance_at(address)` returns an instance id, or None if unknown."""

    def __init__(self, account, instance_at):
        self._account, self._instance_at = account, instance_at
        self._tokens = {}  # token -> address

    def __call__(self, environ, start):
        request = Request(environ)
        address = request.remote_addr or ""
        text = None
        if request.path == "/latest/api/token" and request.method == "PUT":
            granted = request.headers.get("X-aws-ec2-metadata-token-ttl-seconds", "").isdigit()
            status = 200 if granted else 400
            if granted:
                text = secrets.token_urlsafe(32)
                self._tokens[text] = address
        elif self._tokens.get(request.headers.get("X-aws-ec2-metadata-token", "")) != address:
            status = 401
        else:
            path = request.path.removeprefix("/latest/meta-data/")
            text = self._values(self._instance_at(address)).get(path.rstrip("/"))
            status = 404 if text is None else 200
        return Response(text or "", status, content_type="text/plain")(environ, start)

    def _values(self, instance_id):
        if instance_id is None:
            return {}
        address = str(self._account.instance(instance_id).private_ip)
        values = {"instance-id": instance_id, "local-ipv4": address}
        keys = self._account.role_keys(instance_id)
        if keys is not None:
            credentials = {
                "Code": "Success",
                "Type": "AWS-HMAC",
                "AccessKeyId": keys.access_key,
                "SecretAccessKey": f"secret-of-{keys.access_key}",
                "Token": f"token-of-{keys.access_key}",
                "Expiration": f"{datetime.now(UTC) + timedelta(hours=6):%Y-%m-%dT%H:%M:%SZ}",
            }
            name = str(keys.role.name)
            values |= {_ROLE: name, f"{_ROLE}/{name}": json.dumps(credentials)}
        return values
