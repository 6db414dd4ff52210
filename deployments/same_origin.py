"""Add a check of the request's origin to MLflow's basic authentication.

MLflow's own authentication accepts requests from every web page that is served on localhost.
"""

from typing import Any

from flask import make_response, request
from mlflow.server.auth import authenticate_request_basic_auth


def authenticate() -> Any:
    """Return MLflow's authentication result, or an empty 403 response to a foreign web page.

    A web page is foreign if its origin is not this MLflow server. Browsers send the operator's
    password with every request to MLflow, even if a foreign page makes the request.
    """
    origin = request.headers.get("Origin")
    if origin not in (None, request.host_url.rstrip("/")):
        return make_response("", 403)
    return authenticate_request_basic_auth()
