"""Stands in for the agent on a rented machine: says what it could see and do, leaves a record,
waits for the end.
"""

import argparse
import ctypes
import json
import os
import socket
import time
from pathlib import Path


def tried(act) -> str:
    try:
        act()
    except OSError as error:
        return type(error).__name__
    return "done"


def write(path: Path, body: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}")
    beside.write_text(json.dumps(body))
    beside.rename(path)


parser = argparse.ArgumentParser()
parser.add_argument("--mailbox", type=Path)
parser.add_argument("--node")
parser.add_argument("--address")
parser.add_argument("--deadline", type=float)
given = parser.parse_args()
own = given.mailbox / f"node-{given.node}"
signal = ctypes.c_int()
ctypes.CDLL(None).prctl(2, ctypes.byref(signal))
status = dict(
    line.split(":\t", 1)
    for line in Path("/proc/self/status").read_text().splitlines()
    if ":\t" in line
)
code = Path(__file__).parent
seen = {
    "ids": [os.getuid(), os.geteuid(), os.getgid(), *os.getgroups()],
    "environment": dict(os.environ),
    "address": given.address,
    "left_s": given.deadline - time.time(),
    "metadata": tried(lambda: socket.create_connection(("169.254.169.254", 80), timeout=3)),
    "cluster": tried(lambda: socket.create_connection(("10.77.0.1", 5000), timeout=3)),
    "code": tried(lambda: (code / "agent.py").write_text("raise SystemExit")),
    "beside_code": tried(lambda: (code / "torch.py").write_text("")),
    "mailbox": tried(lambda: (given.mailbox / "done.json").write_text("{}")),
    "death_signal": signal.value,
    "no_new_privileges": status["NoNewPrivs"],
    "capabilities": [status[name] for name in ("CapInh", "CapPrm", "CapEff", "CapAmb")],
}
write(own / "ready.json", seen)
(own / "secret.json").symlink_to("/etc/shadow")
while not (given.mailbox / "plan.json").exists():
    time.sleep(0.05)
write(own / "records" / "run+1.json", {"plan": (given.mailbox / "plan.json").read_text()})
while not (given.mailbox / "done.json").exists():
    write(own / "heartbeat.json", {"beat_unix": time.time()})
    time.sleep(0.05)
