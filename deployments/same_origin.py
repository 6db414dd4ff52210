"""Refuse requests from other origins before MLflow's basic authentication.

MLflow's authentication alone trusts every page of localhost.
"""

from typing import Any

from flask import make_response, request
from mlflow.server.auth import authenticate_request_basic_auth


def authenticate() -> Any:
    """Return 403 for a request from another origin, else the result of MLflow's authentication.

    A browser would send such a request with the operator's password. The response is empty,
    because MLflow lets every page of localhost read responses.
    """
    origin = request.headers.get("Origin")
    if origin not in (None, request.host_url.rstrip("/")):
        return make_response("", 403)
    return authenticate_request_basic_auth()
