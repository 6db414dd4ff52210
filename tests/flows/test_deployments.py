"""`make up`: deployments that exist, a schedule that fires, servers that obey the operator."""

from __future__ import annotations

import importlib
import json
import os
import queue
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import yaml
from prefect import Flow
from prefect.client.schemas.schedules import CronSchedule

from tasks.workspace.credential import FILE
from tests.flows import visitors
from tests.flows.visitors import authorization

ROOT = Path(__file__).resolve().parents[2]
UP = ROOT / "deployments" / "up.py"
AUTOMATIONS = ROOT / "deployments" / "automations.py"
EXAMPLES = ROOT / "examples" / "reading"
DEPLOYMENTS: list[dict[str, Any]] = yaml.safe_load(
    (ROOT / "deployments" / "prefect.yaml").read_text()
)["deployments"]
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
NIGHTLY = next(one for one in DEPLOYMENTS if one["name"] == "refresh-nightly")


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=lambda one: str(one["name"]))
def test_a_deployment_takes_its_parameters_and_runs_once_at_a_time(
    deployment: dict[str, Any],
) -> None:
    module, _, function = deployment["entrypoint"].rpartition(".")
    flow = getattr(importlib.import_module(module), function)
    parameters = deployment.get("parameters", {})
    assert isinstance(flow, Flow)
    assert parameters.items() <= flow.validate_parameters(parameters).items()
    assert deployment["concurrency_limit"]["limit"] == 1
    (schedule,) = deployment["schedules"]
    assert CronSchedule(cron=schedule["cron"], timezone=schedule["timezone"]).timezone == "UTC"
    # Nothing asks AWS before somebody resumes it.
    assert schedule.get("active", True) == (parameters.get("provider", "local") == "local")


class Session:
    """A running `make up`."""

    def __init__(self, project: Path) -> None:
        self.project, self.home = project, project / "state"
        self.ports = free_ports(2)
        self.env = {
            **os.environ,
            "SRIFT_ROOT": str(project),
            "SRIFT_HOME": str(self.home),
            "PYTHONPATH": os.pathsep.join((str(ROOT), str(project))),
            "PREFECT_WORKER_QUERY_SECONDS": "2",
        }
        for name in ("PREFECT_API_URL", "PREFECT_HOME"):
            self.env.pop(name, None)
        self.lines: queue.Queue[str] = queue.Queue()
        self.process = self.start("--fire", NIGHTLY["name"], "--fire", "hanging")

    def start(self, *words: str) -> subprocess.Popen[str]:
        prefect, mlflow = map(str, self.ports)
        line = [sys.executable, str(UP), "--prefect-file", str(self.project / "prefect.yaml")]
        process = subprocess.Popen(
            [*line, "--prefect-port", prefect, "--mlflow-port", mlflow, *words],
            env=self.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert process.stdout is not None
        for text in process.stdout:
            if text.startswith("Ctrl-C"):
                return process
        raise AssertionError(process.wait())

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.communicate(timeout=120)
        assert self.process.returncode == 0

    @property
    def credential(self) -> str:
        return (self.home / FILE).read_text().strip()

    @property
    def operator(self) -> dict[str, str]:
        """The environment of a program that knows the credential."""
        return self.env | {
            "PREFECT_HOME": str(self.home / "prefect"),
            "PREFECT_API_URL": f"http://127.0.0.1:{self.ports[0]}/api",
            "PREFECT_API_AUTH_STRING": self.credential,
        }

    def run(self, *words: str) -> str:
        done = subprocess.run(
            [sys.executable, *words], env=self.operator, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def ask(self, path: str, body: dict[str, Any], method: str = "POST") -> Any:
        asked = visitors.servers(*self.ports)["prefect"]
        headers = {"Authorization": authorization(self.credential)}
        status, text = 503, ""
        for _ in range(30):  # SQLite is busy at times
            status, text = visitors.answer(asked, (method, f"/api{path}", body), headers)
            if status != 503:
                break
            time.sleep(1)
        assert status < 300, text
        return json.loads(text.partition("\n\n")[2].strip() or "null")

    def deployments(self) -> dict[str, Any]:
        return {one["name"]: one for one in self.ask("/deployments/filter", {})}

    def set_active(self, name: str, active: bool) -> None:
        deployment = self.deployments()[name]
        (schedule,) = deployment["schedules"]
        path = f"/deployments/{deployment['id']}/schedules/{schedule['id']}"
        self.ask(path, {"active": active}, "PATCH")

    def processes(self) -> Iterator[psutil.Process]:
        for process in psutil.process_iter():
            try:
                if process.environ().get("SRIFT_HOME") == str(self.home):
                    yield process
            except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
                continue


def free_ports(count: int) -> list[int]:
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(probe.getsockname()[1]) for probe in probes]
    for probe in probes:
        probe.close()
    return ports


def wait_for(found: Callable[[], bool]) -> None:
    end = time.monotonic() + 240
    while not found():
        assert time.monotonic() < end
        time.sleep(1)


NOTIFY = """
from prefect.blocks.notifications import CustomWebhookNotificationBlock
data = {{"subject": "{{{{subject}}}}", "body": "{{{{body}}}}"}}
CustomWebhookNotificationBlock(name="here", url={url!r}, method="POST", json_data=data).save("here")
"""
REFUSED = """
from tasks.reporting.progress import PROMOTION_REFUSED, announce
announce(PROMOTION_REFUSED, "model.local", "worse", version=3)
"""
CHANGED = """
from tasks.reporting.progress import announce_changes
row = {"workload": "conv", "goal": "cheapest", "change": "choice", "cause": "prices"}
row |= {"constraint_hours": None, "constraint_usd": None, "cluster": "2xa", "market": "spot"}
row |= {"hours": 1.25, "usd": 0.5}
row |= dict.fromkeys(("previous_cluster", "previous_status", "previous_usd"))
announce_changes("local", [row])
"""


def notify(session: Session) -> tuple[dict[str, str], list[list[str]]]:
    """Install the automations twice; return what a refused promotion sends, and both lists."""
    got: queue.Queue[dict[str, str]] = queue.Queue()

    class Hook(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

    with HTTPServer(("127.0.0.1", 0), Hook) as hook:
        threading.Thread(target=hook.serve_forever, daemon=True).start()
        session.run("-c", NOTIFY.format(url=f"http://127.0.0.1:{hook.server_port}/"))
        install = (str(AUTOMATIONS), "--notify", "custom-webhook/here")
        lists = [session.run(*install).splitlines() for _ in range(2)]
        session.run("-c", REFUSED)
        try:
            return got.get(timeout=60), lists
        finally:
            hook.shutdown()


def follow(session: Session) -> str:
    """Return what the example prints of a changed choice."""
    line = [sys.executable, str(EXAMPLES / "on_change.py")]
    with subprocess.Popen(
        line, env=session.operator, stdout=subprocess.PIPE, text=True
    ) as following:
        watchdog = threading.Timer(90.0, following.kill)
        watchdog.start()
        assert following.stdout is not None
        following.stdout.readline()
        session.run("-c", CHANGED)
        text = following.stdout.readline()
        watchdog.cancel()
        following.kill()
    return text


def crash(session: Session) -> str:
    """Kill a run; return the state that the missing heartbeat gives it."""
    mark = session.home / "hanging"
    wait_for(mark.exists)
    os.kill(int(mark.read_text()), signal.SIGKILL)
    key = session.deployments()["hanging"]["id"]
    where = {"deployments": {"id": {"any_": [key]}}}
    state = ""

    def ended() -> bool:
        nonlocal state
        (run,) = session.ask("/flow_runs/filter", where)
        state = run["state_type"]
        return state not in ("PENDING", "RUNNING")

    wait_for(ended)
    return state


@pytest.fixture(scope="module")
def served() -> Iterator[SimpleNamespace]:
    """One session of `make up`, in a folder that every user may enter."""
    project = Path(tempfile.mkdtemp(prefix="srift-served-"))
    project.chmod(0o755)
    (project / "srift.toml").write_text(TOML)
    (project / "flow_of_the_test.py").write_text(FLOW)
    written = yaml.safe_load(SCHEDULE)
    written["deployments"].append(NIGHTLY | {"parameters": {"provider": "local", "max_usd": 0}})
    (project / "prefect.yaml").write_text(yaml.safe_dump(written))
    session = Session(project)
    try:
        yield observe(session)
    finally:
        for process in session.processes():
            process.kill()
        session.process.wait()
        if session.process.stdout is not None:
            session.process.stdout.close()
        shutil.rmtree(project)


def observe(session: Session) -> SimpleNamespace:
    """Return what a session of `make up` shows, by the name of what was tried."""
    home, credential = session.home, session.credential
    asked = visitors.servers(*session.ports)
    ours = {"Authorization": authorization(credential)}
    answers = {
        name: {
            who: [visitors.answer(one, what, headers) for what in (one.read, one.create)]
            for who, headers in visitors.strangers().items()
        }
        for name, one in asked.items()
    }
    foreign = {
        "page of prefect": ("prefect", {"Origin": "https://evil.example"}),
        "page of mlflow": ("mlflow", {"Origin": "https://evil.example"}),
        "local page of mlflow": ("mlflow", {"Origin": "http://127.0.0.1:9"}),
        "host of mlflow": ("mlflow", {"Host": "evil.example"}),
    }
    seen = {
        who: visitors.answer(asked[name], asked[name].create, ours | headers)
        for who, (name, headers) in foreign.items()
        if name == "mlflow"
    }
    seen["page of prefect"] = visitors.answer(
        asked["prefect"], asked["prefect"].read, ours | foreign["page of prefect"][1]
    )
    elsewhere = session.project / "elsewhere"
    elsewhere.mkdir()
    pids = [process.pid for process in session.processes()]
    urls = [f"http://{one.address}{one.read[1]}" for one in asked.values()]
    another_user = {}
    if not os.geteuid() and visitors.DEBIANS_PYTHON.exists():
        another_user = visitors.as_another_user(home, pids, urls)
    browser = visitors.in_a_browser(asked, credential, elsewhere) if visitors.CHROMIUM else None
    lines = [str(one.info["cmdline"]) for one in psutil.process_iter(["cmdline"])]
    crashed = crash(session)
    notified, automations = notify(session)
    followed = follow(session)
    ticks, table = home / "ticks", home / "published" / "recommendations.duckdb"
    wait_for(lambda: ticks.exists() and table.exists())
    reads = {name: visitors.answer(one, one.read, ours)[1] for name, one in asked.items()}
    session.set_active("paused", True)
    session.set_active(NIGHTLY["name"], False)
    session.stop()
    left = list(session.processes())
    ticks.write_text(ticks.read_text().replace("never", ""))
    session.process = session.start()
    schedules = {
        name: one["schedules"][0]["active"]
        for name, one in session.deployments().items()
        if one["schedules"]
    }
    session.stop()
    return SimpleNamespace(
        project=session.project,
        left=left,
        answers=answers,
        foreign=seen,
        read_afterwards=reads,
        another_user=another_user,
        browser=browser,
        command_lines=[line for line in lines if credential.partition(":")[2] in line],
        crashed=crashed,
        notified=notified,
        automations=automations,
        followed=followed,
        schedules=schedules,
    )


def slow(test: Callable[..., None]) -> Callable[..., None]:
    return pytest.mark.slow(pytest.mark.local(test))


@slow
def test_a_schedule_fires_and_nothing_outlives_the_end(served: SimpleNamespace) -> None:
    """With some versions of SQLAlchemy the scheduler is silent, without an error."""
    ticks = (served.project / "state" / "ticks").read_text()
    assert f"ticked {served.project} {served.project}" in ticks
    assert served.left == []
    assert (served.project / "state" / "published" / "recommendations.duckdb").exists()


@slow
@pytest.mark.parametrize("server", ["prefect", "mlflow"])
def test_nobody_reads_or_creates_without_the_credential(
    served: SimpleNamespace, server: str
) -> None:
    secret = visitors.servers(0, 0)[server].secret
    for answers in served.answers[server].values():
        for status, text in answers:
            assert status == 401 and secret not in text
    assert secret in served.read_afterwards[server]
    assert "planted" not in served.read_afterwards[server]


@slow
def test_foreign_pages_and_hosts_get_nothing(served: SimpleNamespace) -> None:
    for who in ("page of mlflow", "local page of mlflow", "host of mlflow"):
        assert served.foreign[who][0] == 403
    for status, text in served.foreign.values():
        # MLflow lets a page of localhost read its refusal, which is empty.
        assert status == 403 or "access-control-allow-origin" not in text.lower()
    if served.browser is not None:
        assert len(served.browser) == 16
        # A page may send a blind request; whether it created anything is checked above.
        assert not any(one for one in served.browser if one not in ("", None))


@slow
def test_another_user_of_the_machine_gets_nothing(served: SimpleNamespace) -> None:
    found = served.another_user
    if not found:
        pytest.skip("needs root and Debian's python3")
    assert found["beside"] == "seen"
    assert found["credential"] == "PermissionError"
    assert set(found["environments"]) == {"PermissionError"} and len(found["environments"]) >= 3
    assert set(found["servers"]) <= {401, 405}


@slow
def test_the_credential_is_in_its_file_alone(served: SimpleNamespace) -> None:
    home = served.project / "state"
    secret = (home / FILE).read_text().strip().partition(":")[2].encode()
    files = [path for path in home.rglob("*") if path.is_file() and secret in path.read_bytes()]
    assert files == [home / FILE] and stat.S_IMODE(files[0].stat().st_mode) == 0o600
    assert served.command_lines == []


@slow
def test_a_killed_run_is_crashed_by_its_missing_heartbeat(served: SimpleNamespace) -> None:
    assert served.crashed == "CRASHED"


@slow
def test_automations_are_installed_once_and_notify(served: SimpleNamespace) -> None:
    first, again = served.automations
    assert first == again and f"srift: {NIGHTLY['name']} did not complete" in first
    assert served.notified["body"] == "worse"


@slow
def test_a_program_follows_changes(served: SimpleNamespace) -> None:
    assert "2xa" in served.followed


@slow
def test_schedules_that_were_resumed_or_paused_stay_so(served: SimpleNamespace) -> None:
    assert served.schedules == {
        "every-twenty-seconds": True,
        "paused": True,
        NIGHTLY["name"]: False,
    }


@pytest.mark.local
@pytest.mark.parametrize("words", [["--fire", "none"], []])
def test_make_up_refuses_an_unknown_deployment_and_a_wrong_project(
    tmp_path: Path, words: list[str]
) -> None:
    (tmp_path / "srift.toml").write_text("[wrong]\n")
    env = {**os.environ, "SRIFT_ROOT": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, str(UP), *words], env=env, capture_output=True)
    assert done.returncode == 2
