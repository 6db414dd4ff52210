"""Who may ask the servers of `make up`: programs, other users, and pages in a browser."""

import json
import shutil
import subprocess
import threading
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx

CHROMIUM = shutil.which("chromium")
DEBIANS_PYTHON = Path("/usr/bin/python3")
NOBODY = 65534
QUIET = "--no-sandbox --disable-gpu --disable-background-networking --disable-sync"


@dataclass
class Server:
    """`secret` is in the answer to `read`; `create` makes something named "planted"."""

    url: str
    read: tuple
    create: tuple
    secret: str

    def ask(self, request, headers, credential=""):
        method, path, body = request
        auth = tuple(credential.split(":")) if credential else None
        with httpx.Client(trust_env=False, timeout=60) as client:
            url = f"{self.url}{path}"
            return client.request(method, url, json=body, headers=headers, auth=auth)


def servers(prefect_port, mlflow_port):
    pools, experiments = "/api/work_pools/", "/api/2.0/mlflow/experiments/"
    return {
        "prefect": Server(
            url=f"http://127.0.0.1:{prefect_port}",
            read=("POST", f"{pools}filter", {}),
            create=("POST", pools, {"name": "planted", "type": "process"}),
            secret='"srift"',
        ),
        "mlflow": Server(
            url=f"http://127.0.0.1:{mlflow_port}",
            read=("GET", f"{experiments}search?max_results=99", None),
            create=("POST", f"{experiments}create", {"name": "planted"}),
            secret='"Default"',
        ),
    }


ANOTHER_USER = """
import json, os, sys, urllib.request
home, pids, urls = json.loads(sys.argv[1])
def tried(do):
    try: return str(do())
    except OSError as error: return getattr(error, "code", None) or type(error).__name__
print(json.dumps({
    "beside": tried(lambda: open(os.path.dirname(home) + "/srift.toml").read()),
    "credential": tried(lambda: open(home + "/credential").read()),
    "environments": [tried(lambda: open(f"/proc/{pid}/environ").read()) for pid in pids],
    "servers": [tried(lambda: urllib.request.urlopen(url, timeout=60).read()) for url in urls],
}))
"""


def as_another_user(home, pids, urls):
    """Return what the user `nobody` reads of the home, the processes and the servers."""
    line = [DEBIANS_PYTHON, "-c", ANOTHER_USER, json.dumps([str(home), pids, urls])]
    identity = {"user": NOBODY, "group": NOBODY, "extra_groups": []}
    done = subprocess.run(line, cwd="/", env={}, capture_output=True, check=True, **identity)
    return json.loads(done.stdout)


# Everything that a page can try with the credentials that its browser knows.
TRY = """async ({url, read: [method, path, body], create: [, where, made]}) => {
  const credentials = "include", text = JSON.stringify(made);
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
def foreign_page(folder):
    """Serve a page of somebody else on this machine."""
    handler = partial(SimpleHTTPRequestHandler, directory=folder)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


@contextmanager
def operators_page(servers, credential):
    """A page of a browser that is logged in to both servers."""
    from playwright.sync_api import sync_playwright

    user, _, password = credential.partition(":")
    words = [*QUIET.split(), "--host-resolver-rules=MAP evil.example 127.0.0.1"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=words)
        known = {"username": user, "password": password, "origin": servers["mlflow"].url}
        page = browser.new_page(http_credentials=known)
        page.context.set_default_timeout(120_000)
        page.goto(servers["prefect"].url)
        page.locator("input").first.fill(credential)
        page.keyboard.press("Enter")
        page.get_by_text("Active Work Pools").wait_for()
        page.goto(servers["mlflow"].url)
        page.get_by_role("link", name="Experiments").first.wait_for()
        yield page
        browser.close()


def in_a_browser(servers, credential, folder):
    """Return what foreign pages read in the browser of an operator."""
    seen = []
    with foreign_page(folder) as port, operators_page(servers, credential) as page:
        for origin in (f"http://evil.example:{port}", f"http://127.0.0.1:{port}"):
            page.goto(origin)
            for server in servers.values():
                seen += page.evaluate(TRY, asdict(server))
    return seen


def follow_the_report(servers, credential, run, failed):
    """Read the log and the artifacts of a refresh, and return the report that they link to.

    The log of a failed refresh must say what to do.
    """
    with operators_page(servers, credential) as page:
        page.goto(f"{servers['prefect'].url}/runs/flow-run/{failed}")
        page.get_by_text("set a dollar cap with --max-usd").last.wait_for()
        page.goto(f"{servers['prefect'].url}/runs/flow-run/{run}")
        page.get_by_text("published 2 rows: ").wait_for()
        page.get_by_text("Artifacts", exact=True).click()
        page.get_by_text("launches", exact=True).wait_for()
        page.get_by_text("refresh", exact=True).last.click()
        with page.expect_popup() as opened:
            page.get_by_role("link", name="/report.html").click()
        return opened.value.frame_locator("iframe").locator("main").inner_text()
