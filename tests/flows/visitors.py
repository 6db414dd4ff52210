"""Who may ask the servers of `make up`: programs, other users, and pages in a browser."""

from __future__ import annotations

import base64
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

CHROMIUM = shutil.which("chromium")
DEBIANS_PYTHON = Path("/usr/bin/python3")
NOBODY = 65534
QUIET = "--no-sandbox --disable-gpu --disable-background-networking --disable-sync"
Request = tuple[str, str, dict[str, Any] | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request that reads, one that creates, and a word that the first must not leak."""

    port: int
    read: Request
    create: Request
    secret: str

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"


def authorization(credential: str) -> str:
    """Return the value of the Authorization header."""
    return f"Basic {base64.b64encode(credential.encode()).decode()}"


def servers(prefect_port: int, mlflow_port: int) -> dict[str, Asked]:
    pools, experiments = "/api/work_pools/", "/api/2.0/mlflow/experiments/"
    return {
        "prefect": Asked(
            port=prefect_port,
            read=("POST", f"{pools}filter", {}),
            create=("POST", pools, {"name": "planted", "type": "process"}),
            secret='"srift"',
        ),
        "mlflow": Asked(
            port=mlflow_port,
            read=("GET", f"{experiments}search?max_results=99", None),
            create=("POST", f"{experiments}create", {"name": "planted"}),
            secret='"Default"',
        ),
    }


def answer(asked: Asked, what: Request, headers: dict[str, str]) -> tuple[int, str]:
    """Return status, and headers with body."""
    method, path, body = what
    connection = http.client.HTTPConnection("127.0.0.1", asked.port, timeout=30)
    try:
        data = None if body is None else json.dumps(body)
        connection.request(method, path, data, {"Content-Type": "application/json", **headers})
        found = connection.getresponse()
        return found.status, f"{found.headers}\n{found.read().decode()}"
    finally:
        connection.close()


def strangers() -> dict[str, dict[str, str]]:
    return {"no credential": {}, "wrong": {"Authorization": authorization("srift:wrong")}}


ANOTHER_USER = """
import json, os, sys, urllib.request
home, pids, urls = json.loads(sys.argv[1])
def tried(do):
    try: return str(do())
    except OSError as error: return getattr(error, "code", None) or type(error).__name__
print(json.dumps({
    "beside": tried(lambda: open(os.path.dirname(home) + "/readable").read()),
    "credential": tried(lambda: open(home + "/credential").read()),
    "environments": [tried(lambda: open(f"/proc/{pid}/environ").read()) for pid in pids],
    "servers": [tried(lambda: urllib.request.urlopen(url, timeout=30).read()) for url in urls],
}))
"""


def as_another_user(home: Path, pids: list[int], urls: list[str]) -> dict[str, Any]:
    """Return what the user `nobody` reads of the home, the processes and the servers."""
    (home.parent / "readable").write_text("seen")
    line = [str(DEBIANS_PYTHON), "-c", ANOTHER_USER, json.dumps([str(home), pids, urls])]
    identity: dict[str, Any] = {"user": NOBODY, "group": NOBODY, "extra_groups": []}
    done = subprocess.run(
        line, cwd="/", env={}, capture_output=True, text=True, timeout=60, check=True, **identity
    )
    return dict(json.loads(done.stdout))


# Everything that a page can try with the credentials that its browser knows.
TRY = """async ({address, read: [method, path, body], create: [, where, made]}) => {
  const url = "http://" + address, credentials = "include", text = JSON.stringify(made);
  const json = {"Content-Type": "application/json"}, data = body && JSON.stringify(body);
  const asked = async (path, options) => {
    try { return await (await fetch(url + path, {credentials, ...options})).text(); }
    catch (error) { return null; }
  };
  return [
    await asked(path, {method, body: data}), await asked("/", {}),
    await asked(where, {method: "POST", body: text, headers: json}),
    await asked(where, {method: "POST", body: text, mode: "no-cors"}),
  ];
}"""


@contextmanager
def foreign_page(folder: Path) -> Iterator[int]:
    """Serve a page of somebody else on this machine."""
    handler = partial(SimpleHTTPRequestHandler, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


def in_a_browser(asked: dict[str, Asked], credential: str, folder: Path) -> list[Any]:
    """Log in to both pages, then return what foreign pages in the same browser read."""
    from playwright.sync_api import sync_playwright

    user, _, password = credential.partition(":")
    addresses = {name: f"http://{one.address}" for name, one in asked.items()}
    with foreign_page(folder) as port, sync_playwright() as playwright:
        words = [*QUIET.split(), "--host-resolver-rules=MAP evil.example 127.0.0.1"]
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=words)
        known = {"username": user, "password": password, "origin": addresses["mlflow"]}
        context = browser.new_context(http_credentials=known)  # type: ignore[arg-type]
        context.set_default_timeout(60_000)
        page = context.new_page()
        page.goto(addresses["prefect"])
        page.locator("input").first.fill(credential)
        page.keyboard.press("Enter")
        page.get_by_text("Active Work Pools").wait_for()
        page.goto(addresses["mlflow"])
        page.get_by_role("link", name="Experiments").first.wait_for()
        seen = []
        for origin in (f"http://evil.example:{port}", f"http://127.0.0.1:{port}"):
            page.goto(origin)
            for one in asked.values():
                question = {"address": one.address, "read": one.read, "create": one.create}
                seen += page.evaluate(TRY, question)
        browser.close()
    return seen
