"""`make up`: a Prefect server, an MLflow server and a worker on this machine, serving the schedule of prefect.yaml.

Everything listens on loopback, obeys whoever knows the credential of SRIFT_HOME, and keeps its state there. Only
starts, waits, tells and ends: what the flows do is theirs.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import FrameType
from typing import Any, Self
from urllib.error import HTTPError

import tenacity
import yaml

from models.domain.suggestions import nearest_names
from processes import HOST, Child, UpError, answers, listen
from tasks.workspace.credential import FILE, USER, authorization, make_credential, serving
from tasks.workspace.home import HISTORY
from tasks.workspace.settings import SettingsError, load_settings

POOL = "srift"
PREFECT_FILE = Path(__file__).with_name("prefect.yaml")
GUARDED = Path(__file__).with_name("guarded.py")
BIN = Path(sys.executable).parent
STARTED_WITHIN_S = 120.0
SERVER_GRACE_S = 10.0
RUN_GRACE_S = 30.0
"""What a run that is asked to end gets to release its hosts and load what it measured."""
FIRE_IN_S = 5.0
FAILED = ("FAILED", "CRASHED", "CANCELLED")


class Stop(BaseException):
    """The operator's Ctrl-C, a SIGTERM, or a terminal that went away."""


class Service:
    """The whole of `make up`, as a context: leaving it ends every process, the last started first.

    `home` is SRIFT_HOME, `root` the folder of srift.toml; the ports are TCP on loopback.
    """

    def __init__(
        self,
        root: Path,
        home: Path,
        ports: Mapping[str, int],
        prefect_file: Path,
        say: Callable[[str], None],
    ) -> None:
        self.root, self.home, self.ports, self.prefect_file, self.say = (
            root,
            home,
            ports,
            prefect_file,
            say,
        )
        self.prefect_url, self.mlflow_url = (
            f"http://{HOST}:{ports[name]}" for name in ("prefect", "mlflow")
        )
        self.credential = ""
        self.served = ExitStack()
        self.children: list[Child] = []
        self.deployments: dict[str, str] = {}
        self.paused: set[str] = set()
        self.seen: set[tuple[str, str]] = set()
        self.since = datetime.now(UTC)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        killed: list[int] = []
        for child in reversed(self.children):
            self.say(f"ending {child.name}")
            killed += child.end(grace_s=RUN_GRACE_S if child.name == "worker" else SERVER_GRACE_S)
        self.served.close()
        if killed:
            self.say(
                f"{len(killed)} processes had to be killed; `srift reap` ends what they may have left behind"
            )

    def start(self) -> None:
        """Start everything and install the schedule. Raises UpError, before anything runs, if a port is taken."""
        listening = {}
        for name, port in self.ports.items():
            if (found := listen(port)) is None:
                option = f'ARGS="--{name}-port N"'
                raise UpError(
                    f"port {port} is taken (is `make up` running already?); another: {option}"
                )
            listening[name] = found
        self.credential = make_credential(self.home, self.say)
        (self.home / "mlartifacts").mkdir(exist_ok=True)
        self.served.enter_context(serving(self.home, f"{HOST}:{self.ports['prefect']}"))
        self.say("starting the servers and the worker (half a minute)")
        server, pages = (self.serve(name, found) for name, found in listening.items())
        self.wait(
            server,
            lambda: answers(f"{self.prefect_url}/api/health", self.headers),
            "Prefect's server",
        )
        self.install()
        self.settle_past()
        name = f"srift-{socket.gethostname()}-{os.getpid()}"
        words = ("prefect", "worker", "start", f"--name={name}", f"--pool={POOL}", "--type=process")
        worker = self.spawn("worker", *words)
        self.wait(worker, lambda: self.worker_online(name), "the worker")
        self.wait(
            pages, lambda: answers(f"{self.mlflow_url}/health", self.headers), "MLflow's server"
        )
        self.wait(
            server, lambda: all(self.next_runs().values()), "a scheduled run of every deployment"
        )
        self.since = datetime.now(UTC)

    def install(self) -> None:
        """Install the deployments, those that are there already as they are written now.

        What was resumed or paused by hand stays so: Prefect would go by the file again, and is given one that says so.
        """
        self.prefect("work-pool", "create", POOL, "--type", "process", "--overwrite")
        before = {
            one["name"]: scheduled(one) for one in self.post("/deployments/filter", pool_filter())
        }
        written = yaml.safe_load(self.prefect_file.read_text())
        for one in written["deployments"]:
            clocks = one.get("schedules", [])
            kept = before.get(one["name"], any(clock.get("active", True) for clock in clocks))
            for clock in clocks:
                if clock.get("active", True) != kept:
                    self.say(
                        f"{one['name']} was {'resumed' if kept else 'paused'} by hand, and stays so"
                    )
                    clock["active"] = kept
        copy = self.home / "prefect.yaml"
        copy.write_text(yaml.safe_dump(written))
        self.prefect("deploy", "--all", "--prefect-file", str(copy))
        found = self.post("/deployments/filter", pool_filter())
        self.deployments = {one["id"]: one["name"] for one in found}
        self.paused = {one["id"] for one in found if one["paused"] or not scheduled(one)}

    @property
    def env(self) -> dict[str, str]:
        """The environment of every process started here, and through the worker of the flow runs.

        It holds the credential for Prefect's server: only the user who runs a process can read its environment, and
        anybody its command line.
        """
        scratch = self.home / "tmp"
        scratch.mkdir(parents=True, exist_ok=True)
        return {
            **os.environ,
            "SRIFT_ROOT": str(self.root),
            "SRIFT_HOME": str(self.home),
            "PREFECT_HOME": str(self.home / "prefect"),
            "TMPDIR": str(
                scratch
            ),  # Prefect's runner_storage there is another user's where both share /tmp
            "PREFECT_API_URL": f"{self.prefect_url}/api",
            "PREFECT_API_AUTH_STRING": self.credential,
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "PREFECT_RUNNER_AUTO_INSTALL_DEPENDENCIES": "false",
            "DO_NOT_TRACK": "1",
            "MLFLOW_DISABLE_TELEMETRY": "true",
            "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
            "PATH": f"{BIN}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
        }

    @property
    def headers(self) -> dict[str, str]:
        """Of every request to the two servers."""
        return {"Authorization": authorization(self.credential)}

    def serve(self, name: str, listening: socket.socket) -> Child:
        """Start the server of that name on a socket that it takes over."""
        with listening:
            number = listening.fileno()
            return self.spawn(
                f"{name}-server", "python", str(GUARDED), name, str(number), inherits=[number]
            )

    def spawn(self, name: str, program: str, *words: str, inherits: Sequence[int] = ()) -> Child:
        """Start a program of this environment and remember it: the last one started is the first to be ended."""
        log = self.home / "logs" / f"{name}.log"
        line = [str(BIN / program), *words]
        child = Child.start(name, line, cwd=self.root, env=self.env, log=log, inherits=inherits)
        self.children.append(child)
        return child

    def prefect(self, *words: str) -> None:
        """Run one `prefect` command to its end. Raises UpError with its output if it fails."""
        line = [str(BIN / "prefect"), "--no-prompt", *words]
        done = subprocess.run(
            line,
            cwd=self.root,
            env=self.env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise UpError(f"`prefect {' '.join(words)}` failed:\n{done.stdout}{done.stderr}")

    def wait(self, child: Child, ready: Callable[[], bool], what: str) -> None:
        """Poll until `ready` holds. Raises UpError when the child ends or STARTED_WITHIN_S have passed."""
        end = time.monotonic() + STARTED_WITHIN_S
        while not ready():
            child.check()
            if time.monotonic() > end:
                raise UpError(
                    f"{what} did not come within {STARTED_WITHIN_S:.0f} s; see {child.log}"
                )
            time.sleep(0.25)

    @tenacity.retry(
        retry=tenacity.retry_if_exception(
            lambda error: isinstance(error, HTTPError) and error.code >= 500
        ),
        stop=tenacity.stop_after_attempt(5),
        wait=tenacity.wait_fixed(0.5),
        reraise=True,
    )
    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """One call of Prefect's API, again if its SQLite was busy. Raises OSError when it does not answer."""
        url, headers = (
            f"{self.prefect_url}/api{path}",
            {"Content-Type": "application/json", **self.headers},
        )
        request = urllib.request.Request(url, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.load(answer)

    def worker_online(self, name: str) -> bool:
        """Whether the worker of that name has sent a heartbeat."""
        return name in self.workers_online()

    def workers_online(self) -> set[str]:
        """Names of the pool's workers that have sent a heartbeat of late, also of other machines."""
        workers = self.post(f"/work_pools/{POOL}/workers/filter", {})
        return {one["name"] for one in workers if one["status"] == "ONLINE"}

    def next_runs(self) -> dict[str, datetime | None]:
        """Deployment name -> when it runs next, None while the scheduler has not said; paused ones are left out."""
        runs: dict[str, datetime | None] = {}
        for key, name in self.deployments.items():
            if key in self.paused:
                continue
            where = {"deployment_id": {"any_": [key]}, "state": {"type": {"any_": ["SCHEDULED"]}}}
            body = {"flow_runs": where, "sort": "EXPECTED_START_TIME_ASC", "limit": 1}
            found = self.post("/flow_runs/filter", body)
            runs[name] = datetime.fromisoformat(found[0]["expected_start_time"]) if found else None
        return runs

    def settle_past(self) -> None:
        """Cancel what was due while nobody served the schedule, and declare crashed what was cut off when that ended.

        No worker of ours is up yet, so nothing of the pool can be running, also what died before it was recorded in
        SRIFT_HOME; runs outside the pool are for `srift reap`, which tells by that record.
        Nights that were missed are not all made up for at once. Where another machine's worker serves the pool, nothing
        was cut off.
        """
        if HISTORY in os.environ and self.workers_online():
            return
        now = {"before_": datetime.now(UTC).isoformat()}
        due = {"state": {"type": {"any_": ["SCHEDULED"]}}, "expected_start_time": now}
        cut_off = {"state": {"type": {"any_": ["PENDING", "RUNNING", "CANCELLING"]}}}
        for where, state, text in (
            (due, "CANCELLED", "was due"),
            (cut_off, "CRASHED", "was cut off"),
        ):
            while runs := self.post("/flow_runs/filter", {**pool_filter(), "flow_runs": where}):
                for run in runs:
                    change = {"type": state, "message": "the schedule was not being served"}
                    self.post(f"/flow_runs/{run['id']}/set_state", {"state": change, "force": True})
                    below = {"parent_flow_run_id": {"any_": [run["id"]]}, **cut_off}
                    for one in self.post("/flow_runs/filter", {"flow_runs": below}):
                        self.post(
                            f"/flow_runs/{one['id']}/set_state", {"state": change, "force": True}
                        )
                self.say(
                    f"{len(runs)} x {text} while the schedule was not being served: {state.lower()}"
                )

    def fire(self, deployment: str) -> None:
        """Schedule one more run of `deployment`, a few seconds ahead."""
        key = next(key for key, name in self.deployments.items() if name == deployment)
        when = datetime.now(UTC) + timedelta(seconds=FIRE_IN_S)
        state = {"type": "SCHEDULED", "state_details": {"scheduled_time": when.isoformat()}}
        self.post(f"/deployments/{key}/create_flow_run", {"state": state})

    def report(self) -> None:
        """Say which runs started or ended since the last time."""
        began = {"after_": self.since.isoformat(), "is_null_": False}
        where = {
            "start_time": began,
            "state": {"type": {"any_": ["RUNNING", "COMPLETED", *FAILED]}},
        }
        body = {**pool_filter(), "flow_runs": where, "sort": "START_TIME_DESC", "limit": 50}
        for run in reversed(self.post("/flow_runs/filter", body)):
            state = (run["id"], run["state_name"])
            if state not in self.seen:
                self.seen.add(state)
                name = self.deployments.get(run["deployment_id"], "?")
                self.say(
                    f"{datetime.now(UTC):%H:%M:%S} UTC  {name}  {run['name']}  {run['state_name']}"
                )


def scheduled(deployment: Mapping[str, Any]) -> bool:
    """Whether a schedule of it is active."""
    return any(clock["active"] for clock in deployment["schedules"])


def pool_filter() -> dict[str, Any]:
    """What belongs to our work pool, in the words of Prefect's API."""
    return {"work_pools": {"name": {"any_": [POOL]}}}


def stop(number: int, frame: FrameType | None) -> None:
    """Signal handler: end in order, and let no second signal cut that short."""
    for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(one, signal.SIG_IGN)
    raise Stop


def parse(words: list[str], say: Callable[[str], None]) -> tuple[Service, list[str]]:
    """What the command line and srift.toml ask for, and the deployments to run at once.

    Raises UpError for an unknown deployment, SettingsError for a bad srift.toml.
    """
    parser = argparse.ArgumentParser(
        prog="make up", description=__doc__, usage='make up [ARGS="..."]'
    )
    parser.add_argument(
        "--prefect-port", type=int, default=4200, metavar="N", help="default: %(default)s"
    )
    parser.add_argument(
        "--mlflow-port", type=int, default=5000, metavar="N", help="default: %(default)s"
    )
    parser.add_argument(
        "--prefect-file", type=Path, default=PREFECT_FILE, metavar="FILE", help="other deployments"
    )
    fired = "also schedule a run of this deployment a few seconds ahead; may be given again"
    parser.add_argument("--fire", metavar="NAME", action="append", default=[], help=fired)
    options = parser.parse_args(words)
    names = [one["name"] for one in yaml.safe_load(options.prefect_file.read_text())["deployments"]]
    for name in options.fire:
        if name not in names:
            raise UpError(f"no deployment {name!r}; {nearest_names(name, names)}")
    settings = load_settings()
    settings.set_server_variables()
    ports = {"prefect": options.prefect_port, "mlflow": options.mlflow_port}
    return Service(
        settings.root, settings.home, ports, options.prefect_file.resolve(), say
    ), options.fire


def main(words: list[str]) -> int:
    """Serve until a signal stops it. Exit status: 0 after a signal, 1 for what it explains, 2 for misuse."""
    try:
        made, fire = parse(words, lambda text: print(text, flush=True))
    except (UpError, SettingsError, OSError) as error:
        print(f"make up: {error}", file=sys.stderr)
        return 2
    for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(one, stop)
    try:
        with made as service:
            service.start()
            home = service.home
            service.say(
                f"Prefect  {service.prefect_url}\nMLflow   {service.mlflow_url}\nlogs     {home / 'logs'}"
            )
            service.say(
                f"log in   with {USER}:PASSWORD as in {home / FILE}: all of it for Prefect, both for MLflow"
            )
            for name, when in service.next_runs().items():
                service.say(f"next     {name}  {when:%Y-%m-%d %H:%M:%S} UTC")
            for name in fire:
                service.fire(name)
            service.say("Ctrl-C ends all of it.")
            while True:
                for child in service.children:
                    child.check()
                service.report()
                time.sleep(1.0)
    except Stop:
        print("ended; nothing of it is running any more", flush=True)
        return 0
    except (UpError, OSError) as error:
        print(f"make up: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
