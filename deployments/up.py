"""Run the Prefect server, the MLflow server and a Prefect worker on this machine: `make up`.

The worker runs the schedule of prefect.yaml. All state is in SRIFT_HOME. Both servers listen on
loopback and require the password that is stored in SRIFT_HOME.
"""

import argparse
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from automations import put, without_heartbeat
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter, WorkPoolFilter
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings
from prefect.states import Cancelled, Crashed

from tasks.workspace.credential import FILE, USER, new_credential, store_credential
from tasks.workspace.home import HISTORY, MLFLOW_PAGES, OPERATORS_ARTIFACTS, OPERATORS_STORE
from tasks.workspace.prefect_server import ServerEnded, wait_until_serving
from tasks.workspace.settings import Settings, SettingsError, load_settings

POOL = "srift"
GRACE_S = 30.0  # time for a run to release its machines and load its records
HOST = "127.0.0.1"
FOLDER = Path(__file__).resolve().parent
BIN = Path(sys.executable).parent
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
AUTH_INI = """[mlflow]
default_permission = READ
database_uri = sqlite:///{database}
authorization_function = same_origin:authenticate
"""


say = partial(print, flush=True)


class UpError(Exception):
    """`make up` cannot start or continue."""


@dataclass(frozen=True, kw_only=True)
class Child:
    """A child process and its log file."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    def check(self) -> None:
        """Raise UpError with the end of the log if the process has ended."""
        if self.process.poll() is not None:
            tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-15:])
            raise UpError(f"{self.name} ended. The last lines of {self.log} are:\n{tail}")

    def end(self) -> int:
        """Terminate the process and its flow runs.

        Processes that still run after GRACE_S seconds are killed. Returns the number of killed
        descendants of the process.
        """
        try:
            first = psutil.Process(self.process.pid)
            family = [first, *first.children(recursive=True)]
        except psutil.NoSuchProcess:
            return 0
        # Flow runs have their own process groups, so each is terminated. The worker waits for them.
        for process in family:
            with suppress(psutil.NoSuchProcess):
                if process == first or "prefect." in " ".join(process.cmdline()):
                    process.terminate()
        _, left = psutil.wait_procs(family, timeout=GRACE_S)
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=5.0)
        self.process.wait()
        return sum(process != first for process in left)


class Service:
    """The servers and the worker of `make up`, which are child processes.

    credential: `user:password` for both servers. The servers receive it in environment variables,
    because other users of this machine can read command lines.
    """

    def __init__(self, settings: Settings, **ports: int) -> None:
        self.home, self.ports = settings.home, ports
        os.makedirs(self.home, 0o700, exist_ok=True)
        self.credential = new_credential()
        self.api = f"http://{HOST}:{ports['prefect']}/api"
        self.children: list[Child] = []
        # Prefect's default folder in /tmp may belong to another user.
        scratch = self.home / "tmp"
        scratch.mkdir(exist_ok=True)
        self.env = {
            **os.environ,
            "SRIFT_ROOT": str(settings.root),
            "SRIFT_HOME": str(self.home),
            "PREFECT_HOME": str(self.home / "prefect"),
            "TMPDIR": str(scratch),
            "PREFECT_API_URL": self.api,
            MLFLOW_PAGES: f"http://{HOST}:{ports['mlflow']}",
            "PREFECT_API_AUTH_STRING": self.credential,
            "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "PREFECT_RUNNER_AUTO_INSTALL_DEPENDENCIES": "false",
            "DO_NOT_TRACK": "1",
            "MLFLOW_DISABLE_TELEMETRY": "true",
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        }

    def spawn(self, name: str, command: str, *words: str, **env: str) -> Child:
        """Start a program of this Python environment. The program ends when this script ends.

        name: the name of the process and of its log file.
        command: the program and its arguments, separated by spaces.
        words: more arguments, which may contain spaces.
        env: additional environment variables.
        """
        log = self.home / "logs" / f"{name}.log"
        log.parent.mkdir(exist_ok=True)
        with log.open("wb") as out:
            process = subprocess.Popen(
                [*f"setpriv --pdeathsig TERM {command}".split(), *words],
                env=self.env | env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
                umask=0o077,  # other users must not read databases and logs
            )
        self.children.append(Child(name=name, process=process, log=log))
        return self.children[-1]

    def start_prefect(self) -> Child:
        port = self.ports["prefect"]
        return self.spawn(
            "prefect",
            f"prefect server start --host {HOST} --port {port}",
            PREFECT_SERVER_API_AUTH_STRING=self.credential,
            PREFECT_SERVER_CORS_ALLOWED_ORIGINS=f"http://{HOST}:{port}",
        )

    def start_mlflow(self) -> Child:
        port, password = self.ports["mlflow"], self.credential.partition(":")[2]
        # Recreate the user database at each start, because MLflow ignores a changed password.
        users = self.home / "mlflow-users.db"
        users.unlink(missing_ok=True)
        ini = self.home / "mlflow-auth.ini"
        ini.write_text(AUTH_INI.format(database=users))
        artifacts = self.env.get(OPERATORS_ARTIFACTS, str(self.home / "mlartifacts"))
        store = self.env.get(OPERATORS_STORE, f"sqlite:///{self.home / 'mlflow.db'}")
        return self.spawn(
            "mlflow",
            f"mlflow server --app-name basic-auth --workers 1 --host {HOST} --port {port}"
            f" --allowed-hosts {HOST}:{port} --cors-allowed-origins http://{HOST}:{port}"
            " --no-serve-artifacts --backend-store-uri",
            *(store, "--default-artifact-root", artifacts),
            PYTHONPATH=os.pathsep.join((str(FOLDER), os.environ.get("PYTHONPATH", ""))),
            MLFLOW_AUTH_CONFIG_PATH=str(ini),
            MLFLOW_AUTH_ADMIN_USERNAME=USER,
            MLFLOW_AUTH_ADMIN_PASSWORD=password,
            MLFLOW_FLASK_SERVER_SECRET_KEY=secrets.token_urlsafe(32),
            MLFLOW_SERVER_ENABLE_JOB_EXECUTION="false",
        )

    def wait(self, child: Child) -> None:
        try:
            wait_until_serving(child.process, self.ports[child.name])
        except ServerEnded:
            child.check()
            raise UpError(f"{child.name} did not start in time; see {child.log}") from None

    def prefect(self, command: str, *words: str) -> None:
        """Run a `prefect` command. Raises UpError with the output if the command fails."""
        line = [*f"prefect --no-prompt {command}".split(), *words]
        done = subprocess.run(line, env=self.env, capture_output=True, text=True)
        if done.returncode:
            raise UpError(f"`prefect {command}` failed:\n{done.stdout}{done.stderr}")

    def install(self, client: SyncPrefectClient, prefect_file: Path) -> None:
        """Install the deployments of `prefect_file` on the Prefect server.

        Schedules that an operator has paused stay paused. Resumed schedules stay active.
        """
        before = {
            deployment.name: [s.active for s in deployment.schedules]
            for deployment in client.read_deployments()
        }
        self.prefect(f"work-pool create {POOL} --type process --overwrite")
        self.prefect("deploy --all --prefect-file", str(prefect_file))
        for deployment in client.read_deployments():
            for schedule, active in zip(
                deployment.schedules, before.get(deployment.name, ()), strict=False
            ):
                if schedule.active != active:
                    client.update_deployment_schedule(deployment.id, schedule.id, active=active)
        put(client, without_heartbeat())

    def end(self) -> None:
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)  # a second signal must not interrupt the shutdown
        for child in reversed(self.children):
            say(f"ending {child.name}")
            if killed := child.end():
                say(
                    f"{killed} processes did not end and were killed. Their machines may still run:"
                    " `srift reap` ends them"
                )


def settle(client: SyncPrefectClient) -> None:
    """Cancel flow runs that were due while no worker ran. Mark interrupted flow runs as crashed.

    Without the cancellation, all missed refreshes would start at once, each with its full dollar
    cap. If several machines share the Prefect database, flow runs are not marked as crashed,
    because they may run on another machine.
    """
    pool = WorkPoolFilter.model_validate({"name": {"any_": [POOL]}})
    missed = _in_state("SCHEDULED", expected_start_time={"before_": datetime.now(UTC)})
    for run in client.read_flow_runs(flow_run_filter=missed, work_pool_filter=pool):
        client.set_flow_run_state(run.id, Cancelled(message="no worker ran when due"), force=True)
    if HISTORY in os.environ:  # a shared Prefect database: another machine may run these flow runs
        return
    for run in client.read_flow_runs(flow_run_filter=_in_state("PENDING", "RUNNING", "CANCELLING")):
        client.set_flow_run_state(run.id, Crashed(message="its process ended"), force=True)


def _in_state(*types: str, **more: Any) -> FlowRunFilter:
    return FlowRunFilter.model_validate({"state": {"type": {"any_": types}}, **more})


@contextmanager
def serve(service: Service, prefect_file: Path) -> Iterator[None]:
    """Start the servers and the worker, run the `with` block, and end all processes.

    Raises UpError if a process does not start or a `prefect` command fails.
    """
    try:
        say("starting the servers and the worker (half a minute)")
        server, pages = service.start_prefect(), service.start_mlflow()
        service.wait(server)
        with (
            temporary_settings(
                {PREFECT_API_URL: service.api, PREFECT_API_AUTH_STRING: service.credential}
            ),
            get_client(sync_client=True) as client,
        ):
            service.install(client, prefect_file)
            settle(client)
            service.spawn("worker", f"prefect worker start --pool {POOL}")
            service.wait(pages)
            store_credential(service.home, service.credential)
            yield
    finally:
        service.end()


def main() -> None:
    """Run the servers and the worker until a signal arrives.

    The exit code is 0 after a signal, 1 after a failure, and 2 for invalid settings.
    """
    parser = argparse.ArgumentParser(prog="make up", description=__doc__)
    parser.add_argument("--prefect-port", type=int, default=4200, metavar="N")
    parser.add_argument("--mlflow-port", type=int, default=5000, metavar="N")
    parser.add_argument(
        "--prefect-file", type=Path, default=FOLDER / "prefect.yaml", metavar="FILE"
    )
    options = parser.parse_args()
    try:
        settings = load_settings()
        settings.set_server_variables()
        service = Service(settings, prefect=options.prefect_port, mlflow=options.mlflow_port)
    except (SettingsError, OSError) as error:
        parser.exit(2, f"make up: {error}\n")
    for number in SIGNALS:
        signal.signal(number, signal.default_int_handler)
    try:
        with serve(service, options.prefect_file.resolve()):
            say(f"Prefect  {service.api.removesuffix('/api')}")
            say(f"MLflow   http://{HOST}:{options.mlflow_port}")
            say(f"log in   as {USER} with the password in {service.home / FILE}")
            say("Ctrl-C ends the servers and the worker.")
            while True:
                for child in service.children:
                    child.check()
                time.sleep(1.0)
    except KeyboardInterrupt:
        say("ended")
    except (UpError, OSError) as error:
        parser.exit(1, f"make up: {error}\n")


if __name__ == "__main__":
    main()
