"""Add a check of the request's origin to MLflow's basic authentication.

MLflow's authentication alone accepts requests from every web page that is served on localhost.
"""

from typing import Any

from flask import make_response, request
from mlflow.server.auth import authenticate_request_basic_auth


def authenticate() -> Any:
    """Return 403 for a request from another web page, else the result of MLflow's authentication.

    A browser sends the operator's password with every request to MLflow, even if another web page
    makes the request. The 403 response has no body, because MLflow lets every page on localhost
    read its responses.
    """
    origin = request.headers.get("Origin")
    if origin not in (None, request.host_url.rstrip("/")):
        return make_response("", 403)
    return authenticate_request_basic_auth()
