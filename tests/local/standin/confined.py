"""Stands in for the agent on a rented machine: reports what it can see and do, leaves a record."""

import ctypes
import json
import os
import socket
import sys
import time
from pathlib import Path

GIVEN = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=True))
MAILBOX, CODE = Path(GIVEN["--mailbox"]), Path(__file__).parent
NODE = MAILBOX / f"node-{GIVEN['--node']}"


def tried(act):
    try:
        act()
    except OSError as error:
        return type(error).__name__
    return "done"


def write(path, body):
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}")
    beside.write_text(json.dumps(body))
    beside.rename(path)


signal = ctypes.c_int()
ctypes.CDLL(None).prctl(2, ctypes.byref(signal))
lines = Path("/proc/self/status").read_text().splitlines()
status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
seen = {
    "ids": [os.getuid(), os.geteuid(), os.getgid(), *os.getgroups()],
    "environment": dict(os.environ),
    "address": GIVEN["--address"],
    "left_s": float(GIVEN["--deadline"]) - time.time(),
    "metadata": tried(lambda: socket.create_connection(("169.254.169.254", 80), timeout=3)),
    "cluster": tried(lambda: socket.create_connection(("10.77.0.1", 5000), timeout=3)),
    "code": tried(lambda: (CODE / "agent.py").write_text("raise SystemExit")),
    "beside_code": tried(lambda: (CODE / "torch.py").write_text("")),
    "mailbox": tried(lambda: (MAILBOX / "done.json").write_text("{}")),
    "death_signal": signal.value,
    "no_new_privileges": status["NoNewPrivs"],
    "capabilities": [status[name] for name in ("CapInh", "CapPrm", "CapEff", "CapAmb")],
}
write(NODE / "ready.json", seen)
(NODE / "secret.json").symlink_to("/etc/shadow")
while not (MAILBOX / "plan.json").exists():
    time.sleep(0.05)
write(NODE / "records/run+1.json", {"plan": (MAILBOX / "plan.json").read_text()})
while not (MAILBOX / "done.json").exists():
    write(NODE / "heartbeat.json", {"beat_unix": time.time()})
    time.sleep(0.05)
