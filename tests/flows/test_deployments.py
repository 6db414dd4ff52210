"""What `make up` installs: deployments that exist and take the parameters given, and a schedule that fires."""

from __future__ import annotations

import importlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
  - name: every-five-seconds
    entrypoint: trifle_of_the_test.tick
    parameters: { said: ticked }
    schedules: [{ interval: 5 }]
    concurrency_limit: { limit: 1, collision_strategy: CANCEL_NEW }
    work_pool: &pool
      name: srift
      job_variables:
        working_dir: "{{ $SRIFT_ROOT }}"
        env: { SRIFT_ROOT: "{{ $SRIFT_ROOT }}", SRIFT_HOME: "{{ $SRIFT_HOME }}" }
  - name: paused
    entrypoint: trifle_of_the_test.tick
    parameters: { said: never }
    schedules: [{ interval: 5, active: false }]
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


def test_the_clocks_are_utc_and_the_flows_do_not_start_together() -> None:
    minutes = set()
    for deployment in DEPLOYMENTS:
        (schedule,) = deployment["schedules"]
        cron = CronSchedule(cron=schedule["cron"], timezone=schedule["timezone"])
        assert cron.timezone == "UTC"
        minutes.add(cron.cron.split()[0])
    assert minutes == {"17", "47", "37", "*/10"}


def test_nothing_asks_aws_before_somebody_resumes_it() -> None:
    for deployment in DEPLOYMENTS:
        ours = deployment.get("parameters", {}).get("provider", "local") == "local"
        assert [schedule.get("active", True) for schedule in deployment["schedules"]] == [ours]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with a srift.toml, a trivial flow, and a deployment that is due every five seconds."""
    (tmp_path / "srift.toml").write_text("")
    (tmp_path / "trifle_of_the_test.py").write_text(FLOW)
    (tmp_path / "prefect.yaml").write_text(SCHEDULE)
    return tmp_path


def free_ports(count: int) -> list[int]:
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


def up(project: Path, *words: str) -> subprocess.Popen[str]:
    env = {**os.environ, "SRIFT_ROOT": str(project), "SRIFT_HOME": str(project / "state")}
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


@pytest.mark.local
def test_a_scheduled_deployment_fires_and_nothing_outlives_the_end(project: Path) -> None:
    """The scheduler of Prefect's server stays silent, without an error, on some versions of what it stands on."""
    prefect_port, mlflow_port = map(str, free_ports(2))
    with up(project, "--prefect-port", prefect_port, "--mlflow-port", mlflow_port) as process:
        watchdog = threading.Timer(240.0, process.kill)
        watchdog.start()
        try:
            assert process.stdout is not None
            said: list[str] = []
            for line in process.stdout:
                said.append(line)
                if re.search(r"every-five-seconds .* Completed", line):
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
    ticks = (project / "state" / "ticks").read_text()
    assert f"ticked {project} {project}" in ticks and "never" not in ticks
    assert left == [], "".join(said)
    assert any("next" in line and "every-five-seconds" in line for line in said)


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
    with up(project, "--fire", "every-five-second") as process:
        output, _ = process.communicate(timeout=30)
    assert process.returncode == 2
    assert "did you mean 'every-five-seconds'?" in output
