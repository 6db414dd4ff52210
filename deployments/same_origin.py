"""MLflow's basic auth that refuses other origins. MLflow trusts every page of localhost."""

from __future__ import annotations

from typing import Any

from flask import make_response, request
from mlflow.server.auth import authenticate_request_basic_auth


def authenticate() -> Any:
    """Refuse a request of another page, which a browser sends with the operator's password.

    The refusal is empty: MLflow lets every page of localhost read it.
    """
    origin = request.headers.get("Origin")
    if origin not in (None, request.host_url.rstrip("/")):
        return make_response("", 403)
    return authenticate_request_basic_auth()
