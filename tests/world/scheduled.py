"""The nightly EC2 deployment as shipped, due twice at the same moment on a process worker in the emulated world."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

from tests.world import World
from tests.world.proof import Campaign, Operator

NIGHTLY = "refresh-ec2-nightly"
_UP = Path(__file__).resolve().parents[2] / "deployments" / "up.py"
_QUICK = {  # Prefect's own clocks: half a minute until a run that waits is looked at again, by default
    "PREFECT_SERVER_DEPLOYMENTS_CONCURRENCY_SLOT_WAIT_SECONDS": "2",
    "PREFECT_WORKER_QUERY_SECONDS": "2",
}


def twice(
    world: World,
    folder: Path,
    *,
    minutes: float,
    say: Callable[[str], None],
    within_s: float = 600.0,
) -> list[str]:
    """What should have been seen and was not: both runs completed, one after the other, and nothing is left alive."""
    operator = Operator(folder=folder / "scheduled", world=world)
    operator.settle_in(Campaign(market="spot", machines=2), minutes)
    ended = _served(operator, say, within_s)
    wrong = (
        [] if ended == ["Completed", "Completed"] else [f"the two scheduled runs ended: {ended}"]
    )
    if alive := world.alive():
        wrong.append(f"still alive: {', '.join(alive)}")
    leases = "select min(started_at) as began, max(ended_at), lease_id from raw_leases group by lease_id order by began"
    spans = operator.rows(leases)
    wrong += [
        f"{late[2]} began before {early[2]} was over"
        for early, late in pairwise(spans)
        if late[0] < early[1]
    ]
    publications = operator.publications()
    if publications < 2:
        wrong.append(f"{publications} publications instead of two")
    say(
        f"scheduled twice: {ended}, {len(spans)} leases one after the other, {publications} publications"
    )
    return wrong


def _served(operator: Operator, say: Callable[[str], None], within_s: float) -> list[str]:
    ports = _free_ports(2)
    words = ["--prefect-port", ports[0], "--mlflow-port", ports[1], *("--fire", NIGHTLY) * 2]
    environment = operator.environment() | _QUICK | {"SRIFT_ROOT": str(operator.folder)}
    ended: list[str] = []
    with subprocess.Popen(
        [sys.executable, str(_UP), *words], env=environment, cwd=operator.folder, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as process:  # fmt: skip
        watchdog = threading.Timer(within_s, process.terminate)
        watchdog.start()
        assert process.stdout is not None
        for line in process.stdout:
            say(line.rstrip())
            state = re.search(r"UTC  (\S+)  \S+  (Completed|Failed|Crashed|Cancelled)", line)
            if state and state[1] == NIGHTLY:
                ended.append(state[2])
            if len(ended) == 2:
                process.send_signal(signal.SIGTERM)
        watchdog.cancel()
    return ended


def _free_ports(count: int) -> list[str]:
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [str(probe.getsockname()[1]) for probe in probes]
    for probe in probes:
        probe.close()
    return ports
