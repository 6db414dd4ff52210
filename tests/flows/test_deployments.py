"""What `make up` installs: deployments that exist and take the parameters given, and a schedule that fires."""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import duckdb
import psutil
import pytest
import yaml
from prefect import Flow
from prefect.client.schemas.schedules import CronSchedule

ROOT = Path(__file__).resolve().parents[2]
UP = ROOT / "deployments" / "up.py"
DEPLOYMENTS: list[dict[str, Any]] = yaml.safe_load((ROOT / "deployments" / "prefect.yaml").read_text())["deployments"]
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


def flow_of(deployment: dict[str, Any]) -> Flow[..., Any]:
    module, _, function = deployment["entrypoint"].rpartition(".")
    found = getattr(importlib.import_module(module), function)
    assert isinstance(found, Flow)
    return found


@each
def test_a_deployment_names_a_flow_and_parameters_that_it_takes(deployment: dict[str, Any]) -> None:
    flow, parameters = flow_of(deployment), deployment.get("parameters", {})
    assert parameters.keys() <= flow.parameters.properties.keys()
    assert parameters.items() <= flow.validate_parameters(parameters).items()


@each
def test_a_run_is_told_its_installation_and_never_meets_another_of_its_kind(deployment: dict[str, Any]) -> None:
    job = deployment["work_pool"]["job_variables"]
    assert deployment["work_pool"]["name"] == "srift"
    assert {"SRIFT_ROOT": "{{ $SRIFT_ROOT }}", "SRIFT_HOME": "{{ $SRIFT_HOME }}"}.items() <= job["env"].items()
    assert job["working_dir"] == "{{ $SRIFT_ROOT }}"
    assert deployment["concurrency_limit"]["limit"] == 1
    refresh = deployment["entrypoint"] == "flows.refresh.refresh"  # wanted whenever it is asked for; prices grow old
    assert deployment["concurrency_limit"]["collision_strategy"] == ("ENQUEUE" if refresh else "CANCEL_NEW")


def test_the_clocks_are_utc_and_the_flows_do_not_start_together() -> None:
    minutes = set()
    for deployment in DEPLOYMENTS:
        (schedule,) = deployment["schedules"]
        cron = CronSchedule(cron=schedule["cron"], timezone=schedule["timezone"])
        assert cron.timezone == "UTC"
        minutes.add(cron.cron.split()[0])
    assert minutes == {"17", "7", "47", "37", "*/10", "3-59/10"}


def test_nothing_asks_aws_before_somebody_resumes_it() -> None:
    for deployment in DEPLOYMENTS:
        ours = deployment.get("parameters", {}).get("provider", "local") == "local"
        assert [schedule.get("active", True) for schedule in deployment["schedules"]] == [ours]


def test_every_provider_that_is_measured_by_schedule_is_reaped_by_schedule() -> None:
    def providers(of: str) -> set[str]:
        return {one.get("parameters", {}).get("provider", "local") for one in DEPLOYMENTS if one["entrypoint"] == of}

    assert providers("flows.refresh.refresh") == providers("flows.reap.reap") == {"local", "ec2"}


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
    deployments["deployments"].append(NIGHTLY | {"parameters": {"provider": "local", "max_usd": 0}})
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


def up(project: Path, *words: str) -> subprocess.Popen[str]:
    env = {**os.environ, "SRIFT_ROOT": str(project), "SRIFT_HOME": str(project / "state"), **QUICK}
    env["PYTHONPATH"] = os.pathsep.join((str(ROOT), str(project)))
    line = [sys.executable, str(UP), "--prefect-file", str(project / "prefect.yaml"), *words]
    return subprocess.Popen(line, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def processes_of(project: Path) -> Iterator[psutil.Process]:
    """Everything that was started with this project's SRIFT_HOME."""
    for process in psutil.process_iter():
        try:
            if process.environ().get("SRIFT_HOME") == str(project / "state"):
                yield process
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """`make up`, from its start to its end: what it said, what outlived it, and the runs of the nightly refresh."""

    project: Path
    said: list[str]
    left: list[psutil.Process]
    nightly: list[dict[str, Any]]  # the earliest first, each with its `states`


def prefect(port: str, path: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}/api{path}", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


def runs_of(port: str, deployment: str) -> list[dict[str, Any]]:
    where = {"deployments": {"name": {"any_": [deployment]}}, "flow_runs": {"start_time": {"is_null_": False}}}
    runs = prefect(port, "/flow_runs/filter", {**where, "sort": "START_TIME_ASC"})
    states = [prefect(port, f"/flow_run_states/?flow_run_id={run['id']}") for run in runs]
    return [run | {"states": [one["name"] for one in each]} for run, each in zip(runs, states, strict=True)]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    """Served until the trifle has run by its schedule, and the nightly refresh twice, due at the same moment."""
    project = written(tmp_path_factory.mktemp("served"))
    port, mlflow_port = map(str, free_ports(2))
    twice = ("--fire", NIGHTLY["name"]) * 2
    waited_for = ["every-twenty-seconds", NIGHTLY["name"], NIGHTLY["name"]]
    with up(project, "--prefect-port", port, "--mlflow-port", mlflow_port, *twice) as process:
        watchdog = threading.Timer(240.0, process.kill)
        watchdog.start()
        try:
            assert process.stdout is not None
            said: list[str] = []
            nightly: list[dict[str, Any]] = []
            for line in process.stdout:
                said.append(line)
                ended = re.search(r"UTC  (\S+)  \S+  (?:Completed|Failed|Crashed)", line)
                if ended and ended[1] in waited_for:
                    waited_for.remove(ended[1])
                if not waited_for:
                    nightly = runs_of(port, NIGHTLY["name"])
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
    return Served(project=project, said=said, left=left, nightly=nightly)


@pytest.mark.local
def test_a_scheduled_deployment_fires_and_nothing_outlives_the_end(served: Served) -> None:
    """The scheduler of Prefect's server stays silent, without an error, on some versions of what it stands on."""
    ticks = (served.project / "state" / "ticks").read_text()
    assert f"ticked {served.project} {served.project}" in ticks and "never" not in ticks
    assert served.left == [], "".join(served.said)
    assert any("next" in line and "every-twenty-seconds" in line for line in served.said)


@pytest.mark.local
def test_of_two_refreshes_due_at_once_one_runs_and_the_other_waits_and_then_runs(served: Served) -> None:
    assert [run["state_name"] for run in served.nightly] == ["Completed", "Completed"], "".join(served.said)
    first, second = served.nightly
    assert "AwaitingConcurrencySlot" in second["states"] and "AwaitingConcurrencySlot" not in first["states"]
    assert datetime.fromisoformat(first["end_time"]) <= datetime.fromisoformat(second["start_time"])
    with duckdb.connect(
        str(served.project / "state" / "published" / "recommendations.duckdb"), read_only=True
    ) as table:
        assert table.execute("select count(distinct publication_id) from recommendation_history").fetchall() == [(2,)]


@pytest.mark.local
def test_a_taken_port_is_said_before_anything_starts(project: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = str(server.getsockname()[1])
        with up(project, "--prefect-port", taken, "--mlflow-port", str(*free_ports(1))) as process:
            output, _ = process.communicate(timeout=30)
    assert process.returncode == 1
    assert f"port {taken} is taken" in output
    assert "--prefect-port" in output
    assert not (project / "state").exists()


@pytest.mark.local
def test_an_unknown_deployment_to_fire_is_refused_with_the_nearest_name(project: Path) -> None:
    with up(project, "--fire", "every-twenty-second") as process:
        output, _ = process.communicate(timeout=30)
    assert process.returncode == 2
    assert "did you mean 'every-twenty-seconds'?" in output
