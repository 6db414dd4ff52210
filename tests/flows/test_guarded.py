"""What stands in front of both servers of `make up`: Host, the page that asks, the credential."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from tasks.workspace.credential import authorization

sys.path.append(str(Path(__file__).parents[2] / "deployments"))
from guarded import Guard

from processes import Child

OWN = "127.0.0.1:4200"
WITH = {"Authorization": authorization("srift:secret")}
FOLLOWED = {
    "Sec-Fetch-Site": "cross-site",
    "Sec-Fetch-Mode": "navigate",
    "Sec-Fetch-Dest": "document",
}
FOREIGN = [
    {"Host": "evil.example:4200"},  # a name that its owner points to 127.0.0.1
    {"Host": "127.0.0.1"},
    {"Host": "localhost:4200"},
    {"Origin": "https://evil.example"},
    {"Origin": "http://127.0.0.1:4201"},  # another user's server on this machine
    {"Origin": "http://localhost:4200"},
    {"Origin": "null"},
    {"Sec-Fetch-Site": "cross-site"},
    {"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "no-cors", "Sec-Fetch-Dest": "script"},
    {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "iframe"},
]


def asked(
    kind: str, credential: str | None = None, **headers: str
) -> tuple[list[dict[str, Any]], bool]:
    """What `kind` ("GET" ... or "websocket") is answered at ASGI's level, and whether it reached the server."""
    sent: list[dict[str, Any]] = []
    reached: list[bool] = []

    async def server(*_: object) -> None:
        reached.append(True)

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b""}

    async def send(message: Any) -> None:
        sent.append(message)

    sort: dict[str, Any] = (
        {"type": "websocket"} if kind == "websocket" else {"type": "http", "method": kind}
    )
    lines = [
        (name.lower().encode(), value.encode("latin-1"))
        for name, value in ({"Host": OWN} | headers).items()
    ]
    guard = Guard(server, address=OWN, credential=credential)
    asyncio.run(guard({**sort, "path": "/", "headers": lines}, receive, send))
    return sent, bool(reached)


@pytest.mark.parametrize("headers", FOREIGN, ids=str)
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS"])
def test_nothing_foreign_passes_even_with_the_credential(
    headers: dict[str, str], method: str
) -> None:
    for credential in (None, "srift:secret"):
        (start, _), reached = asked(method, credential, **WITH, **headers)
        assert (start["status"], reached) == (403, False)
        assert "access-control" not in str(start["headers"])


@pytest.mark.parametrize("headers", [*FOREIGN, FOLLOWED], ids=str)
def test_nor_does_a_foreign_websocket(headers: dict[str, str]) -> None:
    (closed,), reached = asked("websocket", **headers)
    assert (closed["type"], reached) == ("websocket.close", False), "it was opened"


@pytest.mark.parametrize("kind", ["GET", "POST", "websocket"])
@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Origin": f"http://{OWN}"},
        {"Sec-Fetch-Site": "same-origin"},
        {"Sec-Fetch-Site": "none"},
    ],
    ids=str,
)
def test_programs_and_own_pages_pass(headers: dict[str, str], kind: str) -> None:
    assert asked(kind, **headers) == ([], True)
    assert asked(kind, "srift:secret", **headers, **WITH) == ([], True)


def test_a_link_to_the_page_may_be_followed_and_a_form_may_not_be_sent() -> None:
    assert asked("GET", **FOLLOWED) == ([], True)
    assert not asked("POST", **FOLLOWED)[1]


@pytest.mark.parametrize(
    "given",
    [
        "",
        "Basic",
        authorization("srift:secrat"),
        authorization("srift:secret") + "x",
        "Bearer srift:secret",
        "Basic é",
    ],
)
def test_without_the_credential_a_browser_is_asked_for_it(given: str) -> None:
    (start, body), reached = asked("GET", "srift:secret", Authorization=given)
    assert (start["status"], reached) == (401, False)
    assert (
        dict(start["headers"])[b"www-authenticate"].startswith(b"Basic")
        and b"secret" not in body["body"]
    )
    assert not asked("websocket", "srift:secret", Authorization=given)[1]


def test_what_a_process_of_make_up_writes_is_nobody_elses(tmp_path: Path) -> None:
    child = Child.start(
        "one", ["touch", "new"], cwd=tmp_path, env={"PATH": "/usr/bin:/bin"}, log=tmp_path / "log"
    )
    assert child.process.wait() == 0 and (tmp_path / "new").stat().st_mode & 0o077 == 0
