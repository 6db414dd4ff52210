"""Prefect's or MLflow's server for this home's operator alone: `python guarded.py prefect|mlflow FILE`.

FILE is the number of an open file, a socket that listens on loopback.

In front of both stands a guard, since loopback keeps out neither other users of the machine nor pages of the web: it
checks the Host that was asked for (DNS rebinding), the page that asks, and the credential of SRIFT_HOME.
"""

from __future__ import annotations

import hmac
import os
import socket
import sys
from pathlib import Path

import uvicorn
from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from tasks.workspace.credential import FILE, USER, authorization, read_credential
from tasks.workspace.home import OPERATORS_ARTIFACTS, OPERATORS_STORE
from tasks.workspace.settings import load_settings


class Guard:
    """Passes on what is asked of `address` (host:port) by its own pages or by programs, with `credential` if given.

    Browsers send a password that they know along with whatever any page asks for: therefore the page is checked too.
    """

    def __init__(self, app: ASGIApp, *, address: str, credential: str | None = None) -> None:
        self._app = app
        self._address = address
        self._authorization = None if credential is None else authorization(credential).encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request or websocket."""
        refusal = None if scope["type"] == "lifespan" else self._refusal(scope)
        if refusal is None:
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await refusal(scope, receive, send)

    def _refusal(self, scope: Scope) -> PlainTextResponse | None:
        headers = Headers(scope=scope)
        if headers.getlist("host") != [self._address]:
            return PlainTextResponse(
                f"This server is asked for as http://{self._address} only.\n", 403
            )
        if any(
            origin != f"http://{self._address}" for origin in headers.getlist("origin")
        ) or _of_a_page(scope, headers):
            return PlainTextResponse("Pages of other origins may not ask this server.\n", 403)
        if self._authorization is not None:
            given = headers.get("authorization", "").encode("latin-1")
            if not hmac.compare_digest(given, self._authorization):
                text = f"User {USER}, and the password that stands after it in the file {FILE} of SRIFT_HOME.\n"
                return PlainTextResponse(text, 401, {"WWW-Authenticate": 'Basic realm="Srift"'})
        return None


def _of_a_page(scope: Scope, headers: Headers) -> bool:
    """Whether a page of another origin asks, as browsers say even where they send no Origin.

    A link that a person follows is none: it opens a page of ours, and the page with the link sees nothing of it.
    """
    if headers.get("sec-fetch-site", "none") in ("same-origin", "none"):
        return False
    followed = (headers.get("sec-fetch-mode"), headers.get("sec-fetch-dest")) == (
        "navigate",
        "document",
    )
    return not (followed and scope["type"] == "http" and scope["method"] == "GET")


def prefect_app(address: str, credential: str) -> ASGIApp:
    """Prefect asks for the credential itself: its page has a form for it, its clients send it on websockets too."""
    os.environ["PREFECT_SERVER_API_AUTH_STRING"] = credential
    os.environ["PREFECT_SERVER_CORS_ALLOWED_ORIGINS"] = f"http://{address}"
    from prefect.server.api.server import create_app

    return Guard(create_app(final=True), address=address)


def mlflow_app(address: str, credential: str, home: Path) -> ASGIApp:
    """MLflow's application on this home's files, or what is shared, without `mlflow server`'s proxy for artifacts.

    Nobody needs that: artifacts are files of this home, which the page shows and clients of this machine open. MLflow's
    own log-in would need a database of users.
    """
    from mlflow.server.constants import ARTIFACT_ROOT_ENV_VAR, BACKEND_STORE_URI_ENV_VAR

    shared = load_settings().server_variables()
    os.environ[BACKEND_STORE_URI_ENV_VAR] = shared.get(
        OPERATORS_STORE, f"sqlite:///{home}/mlflow.db"
    )
    os.environ[ARTIFACT_ROOT_ENV_VAR] = shared.get(OPERATORS_ARTIFACTS, str(home / "mlartifacts"))
    from mlflow.server.fastapi_app import app
    from mlflow.server.handlers import initialize_backend_stores

    initialize_backend_stores(
        os.environ[BACKEND_STORE_URI_ENV_VAR], None, os.environ[ARTIFACT_ROOT_ENV_VAR]
    )
    return Guard(app, address=address, credential=credential)


def main(server: str, number: str) -> None:
    """Serve until a signal ends it. SRIFT_HOME holds the credential already."""
    listening = socket.socket(fileno=int(number))
    listening.set_inheritable(False)
    home = Path(os.environ["SRIFT_HOME"])
    credential = read_credential(home)
    if credential is None:
        raise SystemExit(f"{home / FILE} is missing; `make up` makes it")
    host, port = listening.getsockname()
    address = f"{host}:{port}"
    app = (
        prefect_app(address, credential)
        if server == "prefect"
        else mlflow_app(address, credential, home)
    )
    uvicorn.Server(uvicorn.Config(app, log_level="warning", proxy_headers=False)).run(
        sockets=[listening]
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
