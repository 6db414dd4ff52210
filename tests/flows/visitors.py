"""Who may ask the servers of `make up`, from where: programs, another user of the machine, pages in a browser."""

from __future__ import annotations

import http.client
import json
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tasks.workspace.credential import authorization

CHROMIUM = shutil.which("chromium")
DEBIANS_PYTHON = Path("/usr/bin/python3")
NOBODY = 65534
QUIET = "--no-sandbox --disable-gpu --disable-background-networking --disable-component-update --disable-sync"


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A way to read from a server, and a way to create something that can be read there afterwards."""

    port: int
    read: tuple[str, str, dict[str, Any] | None]
    create: tuple[str, str, dict[str, Any] | None]
    said: str  # stands in what is read
    created: int

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"


def servers(prefect_port: int, mlflow_port: int) -> dict[str, Asked]:
    pools, experiments = "/api/work_pools/", "/api/2.0/mlflow/experiments/"
    return {
        "prefect": Asked(
            port=prefect_port,
            read=("POST", f"{pools}filter", {}),
            create=("POST", pools, {"name": "planted", "type": "process"}),
            said='"srift"',
            created=201,
        ),
        "mlflow": Asked(
            port=mlflow_port,
            read=("GET", f"{experiments}search?max_results=99", None),
            create=("POST", f"{experiments}create", {"name": "planted"}),
            said='"Default"',
            created=200,
        ),
    }


def request(
    asked: Asked, what: tuple[str, str, dict[str, Any] | None], headers: dict[str, str]
) -> tuple[int, str]:
    """Status and headers with text of one answer."""
    method, path, body = what
    connection = http.client.HTTPConnection("127.0.0.1", asked.port, timeout=30)
    try:
        data = None if body is None else json.dumps(body)
        connection.request(method, path, data, {"Content-Type": "application/json", **headers})
        answer = connection.getresponse()
        return answer.status, f"{answer.headers}\n{answer.read().decode()}"
    finally:
        connection.close()


def handshake(asked: Asked, headers: dict[str, str]) -> int:
    """Status of the answer to a websocket's handshake at Prefect's events."""
    key = {"Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==", "Sec-WebSocket-Version": "13"}
    upgrade = {
        "Connection": "Upgrade",
        "Upgrade": "websocket",
        "Sec-WebSocket-Protocol": "prefect",
        **key,
    }
    connection = http.client.HTTPConnection("127.0.0.1", asked.port, timeout=30)
    try:
        connection.request("GET", "/api/events/out", None, {**upgrade, **headers})
        return connection.getresponse().status
    finally:
        connection.close()


def foreign(credential: str) -> dict[str, dict[str, str]]:
    """Headers of those who are not the operator's program; a browser adds what it knows of credentials."""
    ours = {"Authorization": authorization(credential)}
    return {
        "no credential": {},
        "a page": {**ours, "Origin": "https://evil.example"},
        "a name pointed here": {**ours, "Host": "evil.example"},
    }


ANOTHER_USER = """
import json, os, sys, urllib.request, urllib.error
home, pids, urls = json.loads(sys.argv[1])
def tried(do):
    try: return str(do())
    except (OSError, urllib.error.HTTPError) as error: return getattr(error, "code", None) or type(error).__name__
print(json.dumps({
    "beside": tried(lambda: open(os.path.dirname(home) + "/world-readable").read()),
    "home": tried(lambda: open(home + "/world-readable").read()),
    "credential": tried(lambda: open(home + "/credential").read()),
    "environments": [tried(lambda: open(f"/proc/{pid}/environ").read()) for pid in pids],
    "servers": [tried(lambda: urllib.request.urlopen(url, timeout=30).read()) for url in urls],
}))
"""


def as_another_user(home: Path, pids: list[int], urls: list[str]) -> dict[str, Any]:
    """What the user `nobody` gets of the credential, of processes' environments, and of the servers."""
    for folder in (home, home.parent):
        (folder / "world-readable").write_text("seen")
    line = [str(DEBIANS_PYTHON), "-c", ANOTHER_USER, json.dumps([str(home), pids, urls])]
    done = subprocess.run(
        line,
        user=NOBODY,
        group=NOBODY,
        extra_groups=[],
        cwd="/",
        env={},
        capture_output=True,
        text=True,
        timeout=60,
    )
    return dict(json.loads(done.stdout)) if done.returncode == 0 else {"failed": done.stderr}


# What a page can try with what the browser knows: read, create without and with a look at the answer, listen.
TRY = """async ({address, read: [method, path, body], create: [, where, made]}) => {
  const url = "http://" + address, credentials = "include", text = JSON.stringify(made);
  const json = {"Content-Type": "application/json"}, data = body && JSON.stringify(body);
  const asked = async (path, options) => {
    try { return await (await fetch(url + path, {credentials, ...options})).text(); } catch (error) { return null; }
  };
  const socket = new Promise(yes => {
    const one = new WebSocket("ws://" + address + "/api/events/out", "prefect");
    [one.onopen, one.onerror] = [() => yes("open"), () => yes(null)];
  });
  return [
    await asked(path, {method, body: data}), await asked("/", {}),
    await asked(where, {method: "POST", body: text, headers: json}),
    await asked(where, {method: "POST", body: text, mode: "no-cors"}), await socket,
  ];
}"""


@contextmanager
def page_elsewhere(folder: Path) -> Iterator[int]:
    """The port of a server on this machine that is not ours."""
    handler = partial(SimpleHTTPRequestHandler, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


def in_a_browser(asked: dict[str, Asked], credential: str, folder: Path) -> dict[str, Any]:
    """What an operator who has logged in sees, and what pages of others get in the same browser afterwards."""
    from playwright.sync_api import sync_playwright

    user, _, password = credential.partition(":")
    addresses = {name: f"http://{one.address}" for name, one in asked.items()}
    requests = {
        name: {"address": one.address, "read": one.read, "create": one.create}
        for name, one in asked.items()
    }
    seen: dict[str, Any] = {"elsewhere": {}}
    with page_elsewhere(folder) as port, sync_playwright() as playwright:
        words = [*QUIET.split(), "--host-resolver-rules=MAP evil.example 127.0.0.1"]
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=words)
        known = {
            "username": user,
            "password": password,
            "origin": addresses["mlflow"],
            "send": "unauthorized",
        }
        context = browser.new_context(http_credentials=known)  # type: ignore[arg-type]
        context.set_default_timeout(60_000)
        page = context.new_page()
        page.goto(addresses["prefect"])
        page.locator("input").first.fill(credential)
        page.keyboard.press("Enter")
        page.get_by_text("Active Work Pools").wait_for()
        page.get_by_role("link", name="srift").first.wait_for()
        page.goto(addresses["mlflow"])
        page.get_by_role("link", name="Experiments").first.wait_for()
        seen["operator"] = page.url
        for origin in (f"http://evil.example:{port}", f"http://127.0.0.1:{port}"):
            page.goto(origin)
            seen["elsewhere"] |= {
                (origin, name): page.evaluate(TRY, one) for name, one in requests.items()
            }
        for name, one in asked.items():
            page.goto(f"http://evil.example:{one.port}/")
            seen[f"{name} under another name"] = page.content()
        browser.close()
    return seen
