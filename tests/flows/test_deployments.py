"""`make up`: deployments that exist, a schedule that fires, servers that obey the operator."""

import importlib
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import psutil
import pytest
import yaml
from prefect import Flow

from tasks.workspace.credential import FILE
from tests.flows.visitors import (
    CHROMIUM,
    DEBIANS_PYTHON,
    as_another_user,
    follow_the_report,
    in_a_browser,
    servers,
)
from tests.installed import log_champion
from tests.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
UP = ROOT / "deployments/up.py"
DEPLOYMENTS = yaml.safe_load((ROOT / "deployments/prefect.yaml").read_text())["deployments"]
TOML = """
[local.instance_types."lc.small"]
cores = 0.1
memory_gib = 1.0
bandwidth_gbps = 0.2
[workloads.imported-net]
samples = 1000
global_batch = 16
"""
FLOW = """
import os, time
from pathlib import Path
from prefect import flow

@flow
def tick(word: str) -> None:
    with Path(os.environ["SRIFT_HOME"], "ticks").open("a") as file:
        file.write(word + " " + os.environ["SRIFT_ROOT"] + " " + os.getcwd())

@flow
def hang() -> None:
    Path(os.environ["SRIFT_HOME"], "hanging").write_text(str(os.getpid()))
    time.sleep(600)
"""
SCHEDULE = """
pull: []
deployments:
  - name: every-twenty-seconds
    entrypoint: flow_of_the_test.tick
    parameters: { word: ticked }
    schedules: [{ interval: 20 }]
    work_pool: &pool
      name: srift
      job_variables:
        working_dir: "{{ $SRIFT_ROOT }}"
        env: { SRIFT_ROOT: "{{ $SRIFT_ROOT }}", SRIFT_HOME: "{{ $SRIFT_HOME }}" }
  - name: paused
    entrypoint: flow_of_the_test.tick
    parameters: { word: never }
    schedules: [{ interval: 20, active: false }]
    work_pool: *pool
  - name: hanging
    entrypoint: flow_of_the_test.hang
    work_pool: *pool
"""
NIGHTLY = "refresh-nightly"


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=lambda deployment: deployment["name"])
def test_a_deployment_takes_its_parameters_and_runs_once_at_a_time(deployment):
    module, _, function = deployment["entrypoint"].rpartition(".")
    flow = getattr(importlib.import_module(module), function)
    parameters = deployment.get("parameters", {})
    assert isinstance(flow, Flow)
    assert parameters.items() <= flow.validate_parameters(parameters).items()
    assert deployment["concurrency_limit"]["limit"] == 1
    [schedule] = deployment["schedules"]
    assert schedule["timezone"] == "UTC"
    # Nothing asks AWS before somebody resumes it.
    assert schedule.get("active", True) == (parameters.get("provider", "local") == "local")


class Session:
    """A running `make up`."""

    def __init__(self, project):
        self.project, self.home = project, project / "state"
        self.ports = [free_port(), free_port()]
        self.servers = servers(*self.ports)
        self.env = {
            **os.environ,
            "SRIFT_ROOT": str(project),
            "SRIFT_HOME": str(self.home),
            "PYTHONPATH": os.pathsep.join((str(ROOT), str(project))),
            "PREFECT_WORKER_QUERY_SECONDS": "2",
        }
        for name in ("PREFECT_API_URL", "PREFECT_HOME", "PREFECT_LOGGING_LEVEL"):
            self.env.pop(name, None)
        self.process = self.start()
        for name in (NIGHTLY, "hanging"):
            self.create_run(name)

    def start(self):
        prefect, mlflow = map(str, self.ports)
        line = [sys.executable, UP, "--prefect-file", self.project / "prefect.yaml"]
        line += ["--prefect-port", prefect, "--mlflow-port", mlflow]
        process = subprocess.Popen(line, env=self.env, stdout=subprocess.PIPE, text=True)
        for text in process.stdout:
            if text.startswith("Ctrl-C"):
                return process
        raise AssertionError(process.wait())

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        self.process.communicate(timeout=240)
        assert self.process.returncode == 0

    @property
    def credential(self):
        return (self.home / FILE).read_text().strip()

    @property
    def operator(self):
        """The environment of a program that knows the credential."""
        return self.env | {
            "PREFECT_HOME": f"{self.home}/prefect",
            "PREFECT_API_URL": f"{self.servers['prefect'].url}/api",
            "PREFECT_API_AUTH_STRING": self.credential,
        }

    def run(self, *words):
        line = [sys.executable, *words]
        done = subprocess.run(line, env=self.operator, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def ask(self, path, body, method="POST"):
        for _ in range(30):  # SQLite is busy at times
            request = (method, f"/api{path}", body)
            answer = self.servers["prefect"].ask(request, {}, self.credential)
            if answer.status_code != 503:
                break
            time.sleep(1)
        assert answer.is_success, answer.text
        return answer.json() if answer.text else None

    def deployments(self):
        return {
            deployment["name"]: deployment for deployment in self.ask("/deployments/filter", {})
        }

    def create_run(self, name, **parameters):
        body = {"parameters": parameters}
        self.ask(f"/deployments/{self.deployments()[name]['id']}/create_flow_run", body)

    def run_of(self, name, state):
        """Wait until a run of the deployment is in this state, and return its id."""
        where = {"deployments": {"name": {"any_": [name]}}}
        where["flow_runs"] = {"state": {"type": {"any_": [state]}}}
        return wait_for(lambda: self.ask("/flow_runs/filter", where))[0]["id"]

    def set_active(self, name, active):
        deployment = self.deployments()[name]
        [schedule] = deployment["schedules"]
        path = f"/deployments/{deployment['id']}/schedules/{schedule['id']}"
        self.ask(path, {"active": active}, "PATCH")

    def processes(self):
        for process in psutil.process_iter(["environ"]):
            if (process.info["environ"] or {}).get("SRIFT_HOME") == str(self.home):
                yield process

    def nothing_was_planted(self):
        for server in self.servers.values():
            text = server.ask(server.read, {}, self.credential).text
            assert server.secret in text and "planted" not in text


def wait_for(found):
    end = time.monotonic() + 300
    while not (got := found()):
        assert time.monotonic() < end
        time.sleep(1)
    return got


@pytest.fixture(scope="module")
def session():
    """`make up` in a folder that every user may enter; the tests below share it in order."""
    project = Path(tempfile.mkdtemp(prefix="srift-served-"))
    project.chmod(0o755)
    (project / "state").mkdir(mode=0o700)
    log_champion(project / "state")
    (project / "srift.toml").write_text(TOML)
    (project / "flow_of_the_test.py").write_text(FLOW)
    written = yaml.safe_load(SCHEDULE)
    [nightly] = [deployment for deployment in DEPLOYMENTS if deployment["name"] == NIGHTLY]
    written["deployments"].append(nightly | {"parameters": {"provider": "local", "max_usd": 0}})
    (project / "prefect.yaml").write_text(yaml.safe_dump(written))
    made = Session(project)
    try:
        yield made
    finally:
        for process in made.processes():
            process.kill()
        made.process.communicate()
        shutil.rmtree(project)


def slow(test):
    return pytest.mark.slow(pytest.mark.local(test))


@slow
@pytest.mark.parametrize("credential", ["", "srift:wrong"])
def test_nobody_reads_or_creates_without_the_credential(session, credential):
    for server in session.servers.values():
        for request in (server.read, server.create):
            answer = server.ask(request, {}, credential)
            assert answer.status_code == 401 and server.secret not in answer.text
    session.nothing_was_planted()


@slow
def test_foreign_pages_and_hosts_get_nothing(session, tmp_path):
    prefect, mlflow = session.servers.values()
    evil = {"Origin": "https://evil.example"}
    for headers in (evil, {"Origin": "http://127.0.0.1:9"}, {"Host": "evil.example"}):
        answer = mlflow.ask(mlflow.create, headers, session.credential)
        # MLflow lets a page of localhost read its refusal, which is empty.
        assert answer.status_code == 403
    answer = prefect.ask(prefect.read, evil, session.credential)
    assert "access-control-allow-origin" not in answer.headers
    if CHROMIUM:
        found = in_a_browser(session.servers, session.credential, tmp_path)
        assert len(found) == 16 and not any(found)
    session.nothing_was_planted()  # a page may send a blind request


@slow
@pytest.mark.skipif(os.geteuid() != 0 or not DEBIANS_PYTHON.exists(), reason="needs root, python3")
def test_another_user_of_the_machine_gets_nothing(session):
    pids = [process.pid for process in session.processes()]
    urls = [f"{server.url}{server.read[1]}" for server in session.servers.values()]
    found = as_another_user(session.home, pids, urls)
    assert "imported-net" in found["beside"] and found["credential"] == "PermissionError"
    assert set(found["environments"]) == {"PermissionError"} and len(pids) >= 3
    assert set(found["servers"]) <= {401, 405}


@slow
def test_the_credential_is_on_no_command_line(session):
    secret = session.credential.partition(":")[2]
    assert all(secret not in str(process.info) for process in psutil.process_iter(["cmdline"]))


@slow
def test_a_killed_run_is_crashed_by_its_missing_heartbeat(session):
    mark = session.home / "hanging"
    wait_for(mark.exists)
    os.kill(int(mark.read_text()), signal.SIGKILL)
    session.run_of("hanging", "CRASHED")


NOTIFY = """
from prefect.blocks.notifications import CustomWebhookNotificationBlock
data = {{"subject": "{{{{subject}}}}", "body": "{{{{body}}}}"}}
CustomWebhookNotificationBlock(name="here", url={url!r}, method="POST", json_data=data).save("here")
"""
REFUSED = """
from tasks.reporting.progress import PROMOTION_REFUSED, announce
announce(PROMOTION_REFUSED, "model.local", "worse", version=3)
"""


@slow
def test_automations_are_installed_once_and_notify(session):
    got = queue.Queue()

    class Hook(BaseHTTPRequestHandler):
        def do_POST(self):
            got.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

    with HTTPServer(("127.0.0.1", 0), Hook) as hook:
        threading.Thread(target=hook.serve_forever, daemon=True).start()
        session.run("-c", NOTIFY.format(url=f"http://127.0.0.1:{hook.server_port}/"))
        install = (UP.with_name("automations.py"), "--notify", "custom-webhook/here")
        first, again = (session.run(*install).splitlines() for _ in range(2))
        session.run("-c", REFUSED)
        assert got.get(timeout=120)["body"] == "worse"
        hook.shutdown()
    assert first == again and f"srift: {NIGHTLY} did not complete" in first


@slow
@pytest.mark.skipif(not CHROMIUM, reason="needs Chromium")
def test_the_page_of_a_refresh_shows_its_lines_and_artifacts_and_links_to_the_report(session):
    run = session.run_of(NIGHTLY, "COMPLETED")
    session.create_run(NIGHTLY, provider="ec2", max_usd=None)
    runs = run, session.run_of(NIGHTLY, "FAILED")
    assert "imported-net" in follow_the_report(session.servers, session.credential, *runs)


@slow
def test_a_schedule_fires_nothing_outlives_the_end_and_the_operators_schedules_stay(session):
    """With some versions of SQLAlchemy the scheduler is silent, without an error."""
    ticks = session.home / "ticks"
    table = session.home / "published/recommendations.duckdb"
    wait_for(lambda: ticks.exists() and table.exists())
    assert f"ticked {session.project} {session.project}" in ticks.read_text()
    session.set_active("paused", True)
    session.set_active(NIGHTLY, False)
    session.stop()
    assert list(session.processes()) == []
    secret = session.credential.partition(":")[2].encode()
    kept = session.home.rglob("*")
    found = [path for path in kept if path.is_file() and secret in path.read_bytes()]
    assert found == [session.home / FILE]
    session.process = session.start()
    assert secret not in session.credential.encode()
    deployments = session.deployments()
    active = {"every-twenty-seconds": True, "paused": True, NIGHTLY: False}
    assert active == {name: deployments[name]["schedules"][0]["active"] for name in active}
    session.stop()


@pytest.mark.local
def test_make_up_refuses_a_wrong_project(tmp_path):
    (tmp_path / "srift.toml").write_text("[wrong]\n")
    env = {**os.environ, "SRIFT_ROOT": str(tmp_path), "PYTHONPATH": str(ROOT)}
    assert subprocess.run([sys.executable, UP], env=env, capture_output=True).returncode == 2
