"""Serve all requests to the emulated AWS.

The application answers what moto lacks. It checks requests of machines against their role's policy,
and passes all other requests to moto's server.
"""

import io
import json
import re
from urllib.parse import parse_qs, unquote

from botocore import xform_name
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.wrappers import Request, Response

from tests.world.elastic import Elastic
from tests.world.policy import allows

_CREDENTIAL = re.compile(r"Credential=([^/]+)/\d+/([^/]+)/([^/]+)/aws4_request")
_S3 = {"GET": "GetObject", "PUT": "PutObject", "DELETE": "DeleteObject", "HEAD": "GetObject"}


class Front:
    """The WSGI application of the emulated AWS.

    `actions` lists the actions that were requested with the operator's keys, spelt as in IAM
    policies. `changed()` is called after each request to EC2.
    """

    def __init__(self, account, changed):
        self.actions = []
        self._account, self._changed = account, changed
        self._moto = DomainDispatcherApplication(create_backend_app)

    def __call__(self, environ, start):
        request = Request(environ)
        found = _CREDENTIAL.search(request.headers.get("Authorization", ""))
        access_key, region, service = found.groups() if found else ("", "", "s3")
        if body := request.get_data():
            environ["wsgi.input"] = io.BytesIO(body)  # for moto
        action = _action(request, service, body)
        if keys := self._account.keys.get(access_key):
            response = self._answer_machine(environ, action, keys)
        else:
            self.actions.append(action)
            response = self._answer_operator(environ, action, region, body)
        return response(environ, start)

    def _answer_operator(self, environ, action, region, body):
        """Answer an operator's request if moto cannot; otherwise, let moto answer it."""
        if action == "pricing:GetProducts":
            return _json(self._account.market.get_products(**json.loads(body)))
        if action == "servicequotas:GetServiceQuota":
            return _json({"Quota": {"QuotaName": "", "Value": 768.0, "ServiceCode": "ec2"}})
        if action == "ssm:GetParameter":
            return _json({"Parameter": {"Value": self._account.image_id(region)}})
        if not action.startswith("ec2:"):
            return self._pass_on(environ)
        if not hasattr(Elastic, xform_name(action.removeprefix("ec2:"))):
            return _refusal("InvalidAction", 400)
        with self._account.lock:
            response = self._pass_on(environ)
        self._changed()
        return response

    def _answer_machine(self, environ, action, keys):
        """Answer a request that was signed with an instance's keys.

        Only requests to S3 that the role's policy allows are served.
        """
        if not action.startswith("s3:"):
            return _refusal("UnauthorizedOperation", 403)
        statements = [
            statement
            for document in keys.role.policies.values()
            for statement in json.loads(document)["Statement"]
        ]
        userid = f"{keys.role.id}:{keys.instance_id}"
        path = unquote(environ.get("RAW_URI", environ["PATH_INFO"]).partition("?")[0]).lstrip("/")
        bucket, prefix = f"arn:aws:s3:::{path.split('/')[0]}", None
        if action == "s3:ListBucket":
            prefix = parse_qs(environ["QUERY_STRING"]).get("prefix", [""])[0]
        resource = bucket if prefix is not None else f"arn:aws:s3:::{path}"
        if not allows(statements, action, resource, userid, prefix):
            return _refusal("AccessDenied", 403)
        response = self._pass_on(environ)
        if response.status_code == 404 and not allows(statements, "s3:ListBucket", bucket, userid):
            return _refusal("AccessDenied", 403)  # a role that may not list learns no names
        return response

    def _pass_on(self, environ):
        app = self._moto.get_application(environ)
        return Response.from_app(app, environ, buffered=True)


def _action(request, service, body):
    """Return the requested action as IAM policies spell it, such as "ec2:CreateFleet"."""
    if "X-Amz-Target" in request.headers:
        name = request.headers["X-Amz-Target"].rpartition(".")[2]
    elif service != "s3":
        name = parse_qs(body.decode(errors="replace")).get("Action", [""])[0]
    elif "/" in request.path.strip("/"):
        name = _S3.get(request.method, "Object")
    else:
        name = "ListBucket" if request.method in ("GET", "HEAD") else "Bucket"
    return f"{service}:{name}"


def _json(answer):
    return Response(json.dumps(answer), content_type="application/x-amz-json-1.1")


def _refusal(code, status):
    """Return an error response that clients of S3 and clients of EC2 can parse."""
    error = f"<Error><Code>{code}</Code><Message>refused by the emulated AWS</Message></Error>"
    if code != "AccessDenied":
        error = f"<Response><Errors>{error}</Errors><RequestID>1</RequestID></Response>"
    return Response(error, status, content_type="application/xml")
