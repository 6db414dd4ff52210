"""What `make up` installs: deployments that exist and take the parameters given, and a schedule that fires.

And that its servers obey the operator alone, shown while they serve.
"""

from __future__ import annotations

import importlib
import json
import os
import queue
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import pytest
import tenacity
import yaml
from prefect import Flow
from prefect.client.schemas.schedules import CronSchedule

from tasks.workspace.credential import FILE, authorization
from tasks.workspace.home import HISTORY
from tests.flows import visitors

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "deployments"))
up = importlib.import_module("up")
UP = ROOT / "deployments" / "up.py"
AUTOMATIONS = ROOT / "deployments" / "automations.py"
DEPLOYMENTS: list[dict[str, Any]] = yaml.safe_load(
    (ROOT / "deployments" / "prefect.yaml").read_text()
)["deployments"]
each = pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=[one["name"] for one in DEPLOYMENTS])

FLOW = '''"""A flow that says which installation it was started for."""
import os
from pathlib import Path
from prefect import flow

@flow
def tick(said: str) -> None:
    Path(os.environ["SRIFT_HOME"], "ticks").open("a").write(said + " " + os.environ["SRIFT_ROOT"] + " " + os.getcwd())
'''
SCHEDULE = """
pull: []
deployments:
  - name: every-twenty-seconds
    entrypoint: trifle_of_the_test.tick
    parameters: { said: ticked }
    schedules: [{ interval: 20 }]
    concurrency_limit: { limit: 1, collision_strategy: CANCEL_NEW }
    work_pool: &pool
      name: srift
      job_variables:
        working_dir: "{{ $SRIFT_ROOT }}"
        env: { SRIFT_ROOT: "{{ $SRIFT_ROOT }}", SRIFT_HOME: "{{ $SRIFT_HOME }}" }
  - name: paused
    entrypoint: trifle_of_the_test.tick
    parameters: { said: never }
    schedules: [{ interval: 20, active: false }]
    work_pool: *pool
"""


@each
def test_a_deployment_takes_its_parameters_knows_its_installation_and_meets_none_of_its_kind(
    deployment: dict[str, Any],
) -> None:
    module, _, function = deployment["entrypoint"].rpartition(".")
    flow, parameters = (
        getattr(importlib.import_module(module), function),
        deployment.get("parameters", {}),
    )
    assert isinstance(flow, Flow)
    assert parameters.keys() <= flow.parameters.properties.keys()
    assert parameters.items() <= flow.validate_parameters(parameters).items()

    job = deployment["work_pool"]["job_variables"]
    assert deployment["work_pool"]["name"] == "srift"
    assert {"SRIFT_ROOT": "{{ $SRIFT_ROOT }}", "SRIFT_HOME": "{{ $SRIFT_HOME }}"}.items() <= job[
        "env"
    ].items()
    assert job["working_dir"] == "{{ $SRIFT_ROOT }}"
    assert deployment["concurrency_limit"]["limit"] == 1
    refresh = (
        deployment["entrypoint"] == "flows.refresh.refresh"
    )  # wanted whenever it is asked for; prices grow old
    assert deployment["concurrency_limit"]["collision_strategy"] == (
        "ENQUEUE" if refresh else "CANCEL_NEW"
    )


def test_the_clocks_are_utc_flows_start_apart_and_what_is_measured_is_reaped_but_aws_only_once_resumed() -> (
    None
):
    minutes, providers = set(), dict[str, set[str]]()
    for deployment in DEPLOYMENTS:
        (schedule,) = deployment["schedules"]
        cron = CronSchedule(cron=schedule["cron"], timezone=schedule["timezone"])
        assert cron.timezone == "UTC"
        minutes.add(cron.cron.split()[0])
        provider = deployment.get("parameters", {}).get("provider", "local")
        assert schedule.get("active", True) == (provider == "local"), (
            "asks AWS before somebody resumes it"
        )
        providers.setdefault(deployment["entrypoint"], set()).add(provider)
    assert minutes == {"17", "7", "47", "37", "*/10", "3-59/10"}
    assert providers["flows.refresh.refresh"] == providers["flows.reap.reap"] == {"local", "ec2"}


def test_what_was_cut_off_with_the_service_is_settled_with_its_subflows() -> None:
    runs = {
        "due": "SCHEDULED",
        "refresh": "RUNNING",
        "measure": "RUNNING",
        "market": "COMPLETED",
        "by hand": "RUNNING",
    }
    below = {"refresh": ["measure", "market"]}

    def post(path: str, body: dict[str, Any]) -> list[dict[str, str]]:
        """As Prefect's API, of a pool that knows `due` and `refresh`."""
        if path != "/flow_runs/filter":
            runs[path.split("/")[2]] = body["state"]["type"]
            return []
        where = body["flow_runs"]
        of = (
            below.get(where["parent_flow_run_id"]["any_"][0], [])
            if "parent_flow_run_id" in where
            else ["due", "refresh"]
        )
        return [{"id": one} for one in of if runs[one] in where["state"]["type"]["any_"]]

    service = up.Service(ROOT, ROOT, {"prefect": 1, "mlflow": 2}, ROOT, say=lambda _: None)
    service.post = post  # type: ignore[method-assign, assignment]
    service.settle_past()
    assert runs == {
        "due": "CANCELLED",
        "refresh": "CRASHED",
        "measure": "CRASHED",
        "market": "COMPLETED",
        "by hand": "RUNNING",
    }


def test_what_another_machine_runs_of_a_shared_history_is_not_settled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(HISTORY, "postgresql+asyncpg://srift@db:5432/srift_prefect")
    asked: list[str] = []
    online = [{"name": "srift-other-7", "status": "OFFLINE"}]

    def post(path: str, body: dict[str, Any]) -> list[dict[str, str]]:
        asked.append(path)
        return online if path.endswith("/workers/filter") else []

    service = up.Service(ROOT, ROOT, {"prefect": 1, "mlflow": 2}, ROOT, say=lambda _: None)
    service.post = post  # type: ignore[method-assign, assignment]
    service.settle_past()
    assert "/flow_runs/filter" in asked
    asked.clear()
    online[0]["status"] = "ONLINE"
    service.settle_past()
    assert asked == ["/work_pools/srift/workers/filter"]


TOML = """
[local.instance_types."lc.small"]
cores = 0.1
memory_gib = 1.0
bandwidth_gbps = 0.2
[workloads.imported-net]
samples = 1000
global_batch = 16
"""
NIGHTLY = next(one for one in DEPLOYMENTS if one["name"] == "refresh-nightly")
QUICK = {  # Prefect's own clocks, in seconds: half a minute until a run that waits is looked at again, by default
    "PREFECT_SERVER_DEPLOYMENTS_CONCURRENCY_SLOT_WAIT_SECONDS": "2",
    "PREFECT_WORKER_QUERY_SECONDS": "2",
}


def written(folder: Path) -> Path:
    """A srift.toml, a trivial flow that is due every twenty seconds, and the nightly refresh as we ship it.

    The refresh may spend nothing: it takes prices, has nothing to learn from, and publishes.
    """
    (folder / "srift.toml").write_text(TOML)
    (folder / "trifle_of_the_test.py").write_text(FLOW)
    deployments = yaml.safe_load(SCHEDULE)
    nothing = {"parameters": {"provider": "local", "max_usd": 0}}
    paid = next(one for one in DEPLOYMENTS if one["name"] == "refresh-ec2-nightly")
    deployments["deployments"] += [NIGHTLY | nothing, paid | nothing]
    (folder / "prefect.yaml").write_text(yaml.safe_dump(deployments))
    return folder


@pytest.fixture
def project(tmp_path: Path) -> Path:
    return written(tmp_path)


def free_ports(count: int) -> list[int]:
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


def start(project: Path, *words: str) -> subprocess.Popen[str]:
    env = {**os.environ, "SRIFT_ROOT": str(project), "SRIFT_HOME": str(project / "state"), **QUICK}
    env["PYTHONPATH"] = os.pathsep.join((str(ROOT), str(project)))
    line = [sys.executable, str(UP), "--prefect-file", str(project / "prefect.yaml"), *words]
    return subprocess.Popen(
        line, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def processes_of(project: Path) -> Iterator[psutil.Process]:
    """Everything that was started with this project's SRIFT_HOME."""
    for process in psutil.process_iter():
        try:
            if process.environ().get("SRIFT_HOME") == str(project / "state"):
                yield process
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue


@dataclass(frozen=True, slots=True, kw_only=True)
class Visits:
    """What others than the operator's programs got of the two servers, and what was there afterwards."""

    answers: dict[
        str, dict[str, list[tuple[int, str]]]
    ]  # server -> who asks -> reading, creating, its preflight
    handshakes: dict[str, int]
    another_user: dict[str, Any]
    browser: dict[str, Any] | None
    read_afterwards: dict[str, str]
    created_with_it: dict[str, int]
    in_command_lines: list[list[str]]
    credential: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """`make up`, from its start to its end: what it said, and what outlived it."""

    project: Path
    said: list[str]
    left: list[psutil.Process]
    visits: Visits
    reaped: tuple[str, dict[str, str]]  # what `srift reap` said, and flow run -> its state then
    notified: tuple[list[str], dict[str, str]]
    examples: tuple[str, str]
    schedules: dict[
        str, bool
    ]  # name -> whether it was active once the deployments had been installed again


def prefect(home: Path, port: str, path: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    headers = {
        "Content-Type": "application/json",
        "Authorization": authorization((home / FILE).read_text().strip()),
    }
    request = urllib.request.Request(f"http://127.0.0.1:{port}/api{path}", data, headers)
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


def visit(home: Path, prefect_port: str, mlflow_port: str) -> Visits:
    """Everybody tries, then the operator's program."""
    asked = visitors.servers(int(prefect_port), int(mlflow_port))
    credential = (home / FILE).read_text().strip()
    preflight = {
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "content-type",
    }
    answers: dict[str, dict[str, list[tuple[int, str]]]] = {}
    for name, one in asked.items():
        answers[name] = {}
        for who, headers in visitors.foreign(credential).items():
            first = visitors.request(one, ("OPTIONS", one.create[1], None), headers | preflight)
            others = [visitors.request(one, what, headers) for what in (one.read, one.create)]
            answers[name][who] = [*others, first]
    ours = {"Authorization": authorization(credential)}
    elsewhere = home.parent / "elsewhere"
    elsewhere.mkdir()
    pids = [process.pid for process in processes_of(home.parent)]
    return Visits(
        answers=answers,
        handshakes={
            who: visitors.handshake(asked["prefect"], headers)
            for who, headers in visitors.foreign(credential).items()
            if headers.keys() & {"Origin", "Host"}
        },
        another_user={}
        if os.geteuid() or not visitors.DEBIANS_PYTHON.exists()
        else visitors.as_another_user(
            home, pids, [f"http://{one.address}{one.read[1]}" for one in asked.values()]
        ),
        browser=visitors.in_a_browser(asked, credential, elsewhere) if visitors.CHROMIUM else None,
        read_afterwards={
            name: visitors.request(one, one.read, ours)[1] for name, one in asked.items()
        },
        created_with_it={
            name: visitors.request(one, one.create, ours)[0] for name, one in asked.items()
        },
        in_command_lines=[
            line
            for line in (one.info["cmdline"] for one in psutil.process_iter(["cmdline"]))
            if credential in str(line)
        ],
        credential=credential,
    )


BLOCKED = """
import os, threading
from pathlib import Path
from prefect import flow
from tasks.workspace.prefect_runtime import recorded_flow_run

@flow(flow_run_name="killed-below")
def below():
    Path("blocked").touch()
    threading.Event().wait()

@flow(flow_run_name="killed")
def above():
    with recorded_flow_run(Path(os.environ["SRIFT_HOME"])):
        below()

above()
"""


def reap_after_a_kill(project: Path, port: str) -> tuple[str, dict[str, str]]:
    """A program is killed in the middle of a flow, and `srift reap` comes."""
    home = project / "state"
    outside = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    env = {**outside, "SRIFT_ROOT": str(project), "SRIFT_HOME": str(home), "PYTHONPATH": str(ROOT)}
    env |= {
        "PREFECT_API_URL": f"http://127.0.0.1:{port}/api",
        "PREFECT_HOME": str(home / "prefect"),
    }
    known = {**env, "PREFECT_API_AUTH_STRING": (home / FILE).read_text().strip()}
    with subprocess.Popen([sys.executable, "-c", BLOCKED], cwd=project, env=known) as blocked:
        until = time.monotonic() + 120.0
        while not (project / "blocked").exists():
            assert time.monotonic() < until and blocked.poll() is None, "no flow run came about"
            threading.Event().wait(0.1)
        blocked.kill()
    line = [sys.executable, "-c", "from flows.cli import main; main()", "reap"]
    where = {"flow_runs": {"name": {"any_": ["killed", "killed-below"]}}}
    # A flow of the schedule may hold the dead run's file just then and tell Prefect itself: ask again.
    said, until, shown = "", time.monotonic() + 90.0, dict[str, str]()
    while shown.get("killed-below") != "CRASHED" and time.monotonic() < until:
        reaped = subprocess.run(
            line, cwd=project, env=env, capture_output=True, text=True, timeout=120
        )
        said += reaped.stdout + reaped.stderr
        shown = {
            run["name"]: run["state_type"]
            for run in prefect(home, port, "/flow_runs/filter", where)
        }
    return said, shown


NOTIFIED = """
from prefect.blocks.notifications import CustomWebhookNotificationBlock
from tasks.reporting.progress import PROMOTION_REFUSED, announce

url, call = {url!r}, {call!r}
if call == "block":
    told = {{"subject": "{{{{subject}}}}", "body": "{{{{body}}}}"}}
    CustomWebhookNotificationBlock(name="here", url=url, method="POST", json_data=told).save("here")
else:
    announce(PROMOTION_REFUSED, "model.local", "model version 3: it is worse", version=3)
"""


CHANGED = """
from tasks.reporting.progress import announce_changes

row = {"workload": "conv", "goal": "cheapest", "change": "choice", "cause": "prices", "constraint_hours": None}
row |= {"constraint_usd": None, "cluster": "2xa", "market": "spot", "hours": 1.25, "usd": 0.5}
announce_changes("local", [row | {"previous_cluster": None, "previous_status": None, "previous_usd": None}])
"""


def operators(project: Path, port: str) -> dict[str, str]:
    """The environment of a program that knows the credential."""
    env = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PREFECT_HOME": str(project / "state" / "prefect"),
    }
    env |= {"PREFECT_API_URL": f"http://127.0.0.1:{port}/api"}
    return env | {"PREFECT_API_AUTH_STRING": (project / "state" / FILE).read_text().strip()}


def examples(project: Path, port: str) -> tuple[str, str]:
    """What `examples/reading` print that need a server: of a changed choice, and of a refresh that they asked for."""
    env, folder = operators(project, port), ROOT / "examples" / "reading"
    follow = [sys.executable, str(folder / "on_change.py")]
    with subprocess.Popen(
        follow, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as following:
        watchdog = threading.Timer(90.0, following.kill)
        watchdog.start()
        assert following.stdout is not None and following.stderr is not None
        assert following.stdout.readline() == "following\n", following.stderr.read()
        subprocess.run(
            [sys.executable, "-c", CHANGED], env=env, check=True, capture_output=True, timeout=120
        )
        told = following.stdout.readline()
        watchdog.cancel()
        following.kill()
    own = [sys.executable, str(folder / "from_a_flow.py"), str(project / "state" / "published")]
    done = subprocess.run(own, env=env, capture_output=True, text=True, timeout=300)
    return told, done.stdout + done.stderr


def notified(project: Path, port: str) -> tuple[list[str], dict[str, str]]:
    """What installing the automations printed, the second time too, and what a refused promotion made them send."""
    env = operators(project, port)
    got = queue.Queue[dict[str, str]]()

    class Hook(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

    with HTTPServer(("127.0.0.1", 0), Hook) as hook:
        threading.Thread(target=hook.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{hook.server_port}/"
        block, refusal = (
            ["-c", NOTIFIED.format(url=url, call=call)] for call in ("block", "refusal")
        )
        install = [str(AUTOMATIONS), "--notify"]
        said = []
        for words in (
            block,
            [*install, "custom-webhook/here"],
            [*install, "custom-webhook/here"],
            refusal,
        ):
            done = subprocess.run(
                [sys.executable, *words], env=env, capture_output=True, text=True, timeout=120
            )
            said.append(done.stdout)
            assert done.returncode == 0, done.stderr
        other = subprocess.run(
            [sys.executable, *install, "slack-webhook/none"],
            env=env,
            capture_output=True,
            text=True,
        )
        try:
            sent = got.get(timeout=60)
        finally:
            hook.shutdown()
    count = prefect(project / "state", port, "/automations/count", {})
    return [said[1], said[2], str(count), other.stderr], sent


@tenacity.retry(
    retry=tenacity.retry_if_exception(
        lambda error: getattr(error, "code", 0) == 503
    ),  # its SQLite was busy
    stop=tenacity.stop_after_delay(60),
    wait=tenacity.wait_fixed(1),
    reraise=True,
)
def set_active(service: Any, deployment: str, clock: str, active: bool) -> None:
    """As `prefect deployment schedule resume` and `pause`."""
    url, body = (
        f"{service.prefect_url}/api/deployments/{deployment}/schedules/{clock}",
        json.dumps({"active": active}),
    )
    headers = {"Content-Type": "application/json", **service.headers}
    request = urllib.request.Request(url, body.encode(), headers, method="PATCH")
    with urllib.request.urlopen(request, timeout=30):
        pass


def installed_again(project: Path, port: str) -> dict[str, bool]:
    """Which schedules are active once the paused one was resumed, another was paused, and all were installed anew."""
    service = up.Service(
        project,
        project / "state",
        {"prefect": int(port), "mlflow": 1},
        project / "prefect.yaml",
        say=lambda _: None,
    )
    service.credential = (project / "state" / FILE).read_text().strip()
    known = {one["name"]: one for one in service.post("/deployments/filter", up.pool_filter())}
    for name, active in (("paused", True), (NIGHTLY["name"], False)):
        (clock,) = known[name]["schedules"]
        set_active(service, known[name]["id"], clock["id"], active)
    with patch.dict(os.environ, PYTHONPATH=os.pathsep.join((str(ROOT), str(project)))):
        service.install()
    shown = {
        one["name"]: up.scheduled(one)
        for one in service.post("/deployments/filter", up.pool_filter())
    }
    key = known["paused"]["id"]
    for clock in service.post("/deployments/filter", {"deployments": {"id": {"any_": [key]}}})[0][
        "schedules"
    ]:
        set_active(service, key, clock["id"], False)  # it ticks, too
    return shown


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """Served until the trifle has run by its schedule, and the nightly refresh once.

    In a folder that every user may enter, since what must be kept from them is not kept by that.
    """
    folder = Path(tempfile.mkdtemp(prefix="srift-served-"))
    folder.chmod(0o755)
    try:
        yield serve(written(folder))
    finally:
        shutil.rmtree(folder)


def serve(project: Path) -> Served:
    home, (port, mlflow_port) = project / "state", map(str, free_ports(2))
    waited_for = ["every-twenty-seconds", NIGHTLY["name"]]
    fired = ("--fire", NIGHTLY["name"])
    with start(project, "--prefect-port", port, "--mlflow-port", mlflow_port, *fired) as process:
        watchdog = threading.Timer(480.0, process.kill)
        watchdog.start()
        try:
            assert process.stdout is not None
            said: list[str] = []
            for line in process.stdout:
                said.append(line)
                if line.startswith("Ctrl-C"):
                    visits = visit(home, port, mlflow_port)
                    reaped = reap_after_a_kill(project, port)
                    told = notified(project, port)
                    shown = examples(project, port)
                    schedules = installed_again(project, port)
                ended = re.search(r"UTC  (\S+)  \S+  (?:Completed|Failed|Crashed)", line)
                if ended and ended[1] in waited_for:
                    waited_for.remove(ended[1])
                if not waited_for:
                    break
            process.send_signal(signal.SIGTERM)
            said += process.stdout.readlines()
            assert process.wait() == 0, "".join(said)
        finally:
            watchdog.cancel()
            process.kill()
            left = list(processes_of(project))
            for one in left:
                one.kill()
    return Served(
        project=project,
        said=said,
        left=left,
        visits=visits,
        reaped=reaped,
        notified=told,
        examples=shown,
        schedules=schedules,
    )


@pytest.mark.local
def test_a_scheduled_deployment_fires_and_nothing_outlives_the_end(served: Served) -> None:
    """The scheduler of Prefect's server stays silent, without an error, on some versions of what it stands on."""
    ticks = (served.project / "state" / "ticks").read_text()
    assert f"ticked {served.project} {served.project}" in ticks and "never" not in ticks
    assert served.left == [], "".join(served.said)
    assert any("next" in line and "every-twenty-seconds" in line for line in served.said)
    assert any(NIGHTLY["name"] in line and "Completed" in line for line in served.said), "".join(
        served.said
    )
    assert (served.project / "state" / "published" / "recommendations.duckdb").exists()


@pytest.mark.local
@pytest.mark.parametrize("server", ["prefect", "mlflow"])
def test_without_the_credential_or_from_elsewhere_nothing_is_read_or_created(
    served: Served, server: str
) -> None:
    visits = served.visits
    said = visitors.servers(0, 0)[server].said
    for who, answers in visits.answers[server].items():
        for status, text in answers[:2]:
            assert status in (401, 403), f"{who}: {text}"
        for _, text in answers:
            assert said not in text and "access-control-allow-origin: *" not in text.lower(), (
                f"{who}: {text}"
            )
            assert "evil.example" not in text, f"{who}: {text}"
    assert said in visits.read_afterwards[server], "the operator's program cannot read"
    assert "planted" not in visits.read_afterwards[server], "somebody planted something"
    assert visits.created_with_it[server] == visitors.servers(0, 0)[server].created
    assert set(visits.handshakes.values()) == {403} and len(visits.handshakes) == 2


@pytest.mark.local
def test_another_user_of_the_machine_gets_neither_the_credential_nor_anything_else(
    served: Served,
) -> None:
    got = served.visits.another_user
    if not got:
        pytest.skip("to ask as another user takes root and Debian's python3")
    assert got["beside"] == "seen", "that user could read nothing at all"
    assert got["home"] == "PermissionError"
    assert got["credential"] == "PermissionError"
    assert set(got["environments"]) == {"PermissionError"} and len(got["environments"]) >= 3
    assert set(got["servers"]) <= {401, 405}


@pytest.mark.local
def test_a_browser_shows_the_pages_to_the_operator_and_gives_other_pages_nothing(
    served: Served,
) -> None:
    seen = served.visits.browser
    if seen is None:
        pytest.skip("Debian's chromium is not installed")
    assert seen["operator"].startswith("http://127.0.0.1:")
    assert len(seen["elsewhere"]) == 4
    for where, got in seen["elsewhere"].items():
        assert len(got) == 5 and not any(got), f"{where} got something"
    for server in ("prefect", "mlflow"):
        assert "asked for as http://127.0.0.1" in seen[f"{server} under another name"]
        assert "planted" not in served.visits.read_afterwards[server]


@pytest.mark.local
def test_the_credential_is_in_its_file_and_in_no_other_nor_in_a_command_line(
    served: Served,
) -> None:
    home, secret = served.project / "state", served.visits.credential.partition(":")[2].encode()
    files = [path for path in home.rglob("*") if path.is_file() and secret in path.read_bytes()]
    assert files == [home / FILE] and stat.S_IMODE(files[0].stat().st_mode) == 0o600
    assert served.visits.in_command_lines == []
    said = "".join(served.said)
    assert secret.decode() not in said and str(home / FILE) in said


@pytest.mark.local
def test_automations_are_installed_once_and_tell_of_a_refused_promotion(served: Served) -> None:
    (first, again, count, unknown), sent = served.notified
    names = [
        f"srift: {NIGHTLY['name']} did not complete",
        "srift: promotion.refused",
        "srift: drift",
    ]
    *told, paused = first.splitlines()
    assert told == [*names, "srift: money.short"] and paused.startswith(
        "refresh-ec2-nightly is paused: no alarm"
    )
    assert again == first and int(count) == 4
    assert f"oncall\n{first}```" in (ROOT / "docs" / "operations.md").read_text()
    assert sent == {
        "subject": "Srift: a new model was not put in force",
        "body": "model version 3: it is worse",
    }
    assert (
        unknown == "no block 'slack-webhook/none': `prefect block ls` lists those that there are\n"
    )


@pytest.mark.local
def test_a_program_follows_changes_of_the_table_and_another_has_it_renewed(served: Served) -> None:
    told, renewed = served.examples
    assert told.endswith(
        "conv, cheapest: choice: not in the table -> 2xa spot, 1.25 h, $0.5000 (prices)\n"
    )
    assert "imported-net" in renewed or "nothing is recommended yet" in renewed, renewed


@pytest.mark.local
def test_what_was_resumed_or_paused_by_hand_stays_so_when_the_schedule_is_served_again(
    served: Served,
) -> None:
    assert served.schedules == {
        "every-twenty-seconds": True,
        "paused": True,
        NIGHTLY["name"]: False,
        "refresh-ec2-nightly": False,
    }


@pytest.mark.local
def test_after_a_kill_the_reaper_shows_the_run_and_its_subflow_as_crashed(served: Served) -> None:
    said, states = served.reaped
    assert states == {"killed": "CRASHED", "killed-below": "CRASHED"}, said


@pytest.mark.local
def test_a_taken_port_is_said_before_anything_starts(project: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = str(server.getsockname()[1])
        with start(
            project, "--prefect-port", taken, "--mlflow-port", str(*free_ports(1))
        ) as process:
            output, _ = process.communicate(timeout=30)
    assert process.returncode == 1
    assert f"port {taken} is taken" in output
    assert "--prefect-port" in output
    assert not (project / "state").exists()


@pytest.mark.local
def test_nobody_comes_between_a_port_that_was_found_free_and_the_server_that_is_to_have_it() -> (
    None
):
    with up.listen(free_ports(1)[0]) as ours:
        port = ours.getsockname()[1]
        assert up.listen(port) is None
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            other.bind(("127.0.0.1", port))


@pytest.mark.local
def test_an_unknown_deployment_to_fire_is_refused_with_the_nearest_name(project: Path) -> None:
    with start(project, "--fire", "every-twenty-second") as process:
        output, _ = process.communicate(timeout=30)
    assert process.returncode == 2
    assert "did you mean 'every-twenty-seconds'?" in output
