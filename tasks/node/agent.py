"""The agent, a process that runs the controller's plans on this machine with torchrun.

The controller is the process that launched the machine. Agent and controller exchange files through
a folder, the mailbox. The agent writes the machine's address once, and a heartbeat every second.
The agent never imports torch.

A plan lists the runs that the machines of a launch measure. An attempt is one start of torchrun for
a plan. Attempts are numbered from 1. When attempt 1 ends, the agent writes `finished-1.json` and
waits for a plan with a higher attempt number.

The agent exits when `done.json` appears in the mailbox, at its deadline, or on SIGTERM. Before the
exit, it kills all its descendant processes.
"""

import argparse
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from .machine import cores, interface_of
from .processes import (
    adopt_orphans,
    die_with_parent,
    end_descendants,
    exit_reason,
    worker_exit_code,
)
from .record import Plan, plan_from_json, write_json

EXIT_DEADLINE = 3
_POLL_S = 0.2
_HEARTBEAT_S = 1.0
# Settings of torchrun in elastic runs: seconds between heartbeats, the number of missed heartbeats
# after which a node counts as dead, and the maximum number of restarts. torch's defaults are 5 s
# and 3 heartbeats. 5 heartbeats tolerate a host with a third of a core, whose heartbeats are late.
_ALIVE_EVERY_S, _ALIVE_MISSED, _MOST_RESTARTS = 1, 5, 1000
# The agent sends the last _LOG_TAIL characters of a log to the controller. It searches the last
# _READ characters for exit codes.
_LOG_TAIL, _READ = 4000, 40_000
# The only environment variables that a workload inherits from this process.
_KEPT = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "CUDA_VISIBLE_DEVICES")


class Agent:
    """Reads plans from the mailbox folder, and starts and ends torchrun on this machine.

    node: the machine's index in the cluster.
    address: the machine's IP address.
    """

    def __init__(self, *, mailbox: Path, node: int, address: str, deadline_unix: float) -> None:
        self.mailbox, self.node, self.address = mailbox.resolve(), node, address
        self.deadline_unix = deadline_unix
        self.folder = self.mailbox / f"node-{node}"
        self.scratch = self.folder / "scratch"
        self.attempt = 0
        self.launch: subprocess.Popen[bytes] | None = None
        self.beaten = 0.0

    def run(self) -> NoReturn:
        """Run plans until the deadline, a signal, or the file `done.json` in the mailbox."""
        adopt_orphans()
        signal.signal(signal.SIGTERM, lambda number, _frame: self.leave(128 + number))
        self.scratch.mkdir(parents=True, exist_ok=True)
        self.write("ready.json", {"address": self.address})
        while True:
            if (self.mailbox / "done.json").exists():
                self.leave(0)
            if time.time() > self.deadline_unix:
                self.leave(EXIT_DEADLINE)
            plan = self.new_plan()
            if plan is not None:
                self.end_launch()
                self.start(plan)
            elif self.launch is not None and self.launch.poll() is not None:
                self.end_launch()
            if time.monotonic() - self.beaten >= _HEARTBEAT_S:
                self.beaten = time.monotonic()
                self.write("heartbeat.json", {"beat_unix": time.time()})
            time.sleep(_POLL_S)

    def new_plan(self) -> Plan | None:
        """Return the plan in the mailbox if its attempt is new to this agent, else None."""
        try:
            plan = plan_from_json((self.mailbox / "plan.json").read_text())
        except FileNotFoundError:
            return None
        return plan if plan.attempt > self.attempt else None

    def start(self, plan: Plan) -> None:
        """Start torchrun for `plan`, if this machine takes part in it."""
        self.attempt = plan.attempt
        if not plan.items or self.node not in plan.rank_counts:
            return
        (self.folder / "progress.json").unlink(missing_ok=True)
        # Workers read this copy, because the controller may replace the plan at any time.
        copy = self.scratch / f"plan-{plan.attempt}.json"
        write_json(copy, plan)
        interface = interface_of(self.address)
        variables = clean_environment(self.scratch) | {
            "GLOO_SOCKET_IFNAME": interface,
            "NCCL_SOCKET_IFNAME": interface,
            "OMP_NUM_THREADS": str(plan.expected[self.node].threads or cores()),
            "SRIFT_MAILBOX": str(self.mailbox),
            "SRIFT_PLAN": str(copy),
            "SRIFT_NODE": str(self.node),
        }
        if plan.elastic is not None:
            # If workers share torchrun's store, torch 2.13 ends the job when a node joins.
            variables["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
            # Skip torchrun's exchange of the number of ranks per node, which is 1 in elastic runs.
            # torch 2.13 ends the job if a node is lost during this exchange.
            variables["TORCH_ELASTIC_WORKER_IDENTICAL"] = "1"
        with self.log_path.open("wb") as log:
            self.launch = subprocess.Popen(
                self.command(plan),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.scratch,
                env=variables,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )

    def command(self, plan: Plan) -> list[str]:
        """Return the command that runs `node.prepare` and then torchrun on this machine."""
        counts, item = plan.rank_counts, plan.elastic
        host, port = plan.addresses[plan.host], plan.port + plan.attempt
        options: dict[str, object] = {
            "monitor-interval": 0.3,
            "nproc-per-node": counts[self.node],
        }
        if item is None:
            module = "node.worker"
            options |= {
                "nnodes": len(counts),
                "node-rank": list(counts).index(self.node),
                "master-addr": host,
                "master-port": port,
                "rdzv-conf": f"timeout={plan.meet_s:.0f}",
            }
        else:
            module = "node.elastic"
            settings = {
                "is_host": int(self.node == plan.host),
                "join_timeout": math.ceil(plan.meet_s + item.wait_s),
                # An upper limit: torchrun starts as soon as all nodes have joined.
                "last_call_timeout": max(1, math.ceil(item.wait_s)),
                "keep_alive_interval": _ALIVE_EVERY_S,
                "keep_alive_max_attempt": _ALIVE_MISSED,
            }
            options |= {
                "nnodes": f"1:{len(item.nodes)}",
                "max-restarts": _MOST_RESTARTS,
                "rdzv-backend": "c10d",
                "rdzv-id": f"{plan.lease_id}-{plan.attempt}",
                "rdzv-endpoint": f"{host}:{port}",
                "local-addr": self.address,
                "rdzv-conf": ",".join(f"{name}={value}" for name, value in settings.items()),
            }
        return [
            sys.executable,
            "-m",
            "node.prepare",
            "-m",
            "torch.distributed.run",
            *(f"--{name}={value}" for name, value in options.items()),
            "-m",
            module,
        ]

    def end_launch(self) -> None:
        """Kill torchrun and all its descendants, and write `finished-<attempt>.json`.

        Does nothing if no torchrun was started since the last call.
        """
        if self.launch is None:
            return
        self.launch.kill()  # a new attempt may start before this attempt has ended
        code = self.launch.wait()
        end_descendants()
        self.launch = None
        log = self.log_path.read_text(errors="replace")[-_READ:]
        worker_code = worker_exit_code(log, code)
        self.write(
            f"finished-{self.attempt}.json",
            {
                "exit_code": code,
                "worker_exit_code": worker_code,
                "reason": exit_reason(log, worker_code),
                "run_id": self.run_id(),
                "log_tail": log[-_LOG_TAIL:],
            },
        )

    @property
    def log_path(self) -> Path:
        return self.folder / f"log-{self.attempt}.txt"

    def run_id(self) -> str:
        """Return the id of the latest run that began in this attempt; "" if none has begun."""
        try:
            return str(json.loads((self.folder / "progress.json").read_text())["run_id"])
        except (OSError, ValueError, KeyError, TypeError):  # user code can write to this file
            return ""

    def write(self, name: str, body: dict[str, Any]) -> None:
        """Write `body` as JSON to the file `name` in this node's folder.

        Errors, such as a full disk, are ignored. The controller then notices that heartbeats stop.
        """
        with suppress(OSError):
            write_json(self.folder / name, body)

    def leave(self, code: int) -> NoReturn:
        """Kill all descendants of this process, delete the scratch folder, and exit with `code`."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        end_descendants()
        shutil.rmtree(self.scratch, ignore_errors=True)
        os._exit(code)


def clean_environment(scratch: Path) -> dict[str, str]:
    """Return the environment variables for an agent or a workload.

    Only the variables in _KEPT are inherited from this process. HOME and TMPDIR are set to
    `scratch`.
    """
    return {name: os.environ[name] for name in _KEPT if name in os.environ} | {
        "HOME": str(scratch),
        "TMPDIR": str(scratch),
        "PYTHONPATH": str(Path(__file__).resolve().parent.parent),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONUNBUFFERED": "1",
    }


def main() -> None:
    """Run the agent: `python -m node --mailbox DIR --node I --address A --deadline UNIX`.

    DIR: the folder that agent and controller share.
    I: this machine's index in the cluster.
    A: this machine's IP address.
    UNIX: the Unix time at which the agent exits.
    """
    parser = argparse.ArgumentParser(prog="node")
    parser.add_argument("--mailbox", type=Path, required=True, help="shared with the controller")
    parser.add_argument("--node", type=int, required=True, help="index in the cluster")
    parser.add_argument("--address", required=True, help="IP address for the other machines")
    parser.add_argument("--deadline", dest="deadline_unix", type=float, required=True)
    Agent(**vars(parser.parse_args())).run()
