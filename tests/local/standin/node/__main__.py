"""A stand-in for the node agent: reports itself, takes any bytes, and does the jobs it finds."""

import json
import os
import resource
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

PORT = 5001
GIVEN = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=True))
NODE = Path(GIVEN["--mailbox"]) / f"node-{GIVEN['--node']}"


def write(name, body):
    NODE.mkdir(parents=True, exist_ok=True)
    beside = NODE / "beside"
    beside.write_text(json.dumps(body))
    beside.rename(NODE / name)


def serve():
    with socket.create_server((GIVEN["--address"], PORT)) as server:
        while True:
            peer, _ = server.accept()
            with peer:
                while peer.recv(1 << 20):
                    pass
                peer.sendall(b"k")


def send(address, count):
    with socket.create_connection((address, PORT), timeout=20) as peer:
        began = time.monotonic()
        peer.sendall(b"x" * count)
        peer.shutdown(socket.SHUT_WR)
        peer.recv(1)
        return {"seconds": time.monotonic() - began}


def burn(seconds):
    began, used = time.monotonic(), time.process_time()
    while time.monotonic() - began < seconds:
        pass
    return {"share": (time.process_time() - used) / (time.monotonic() - began)}


def leave(status):
    print("leaving as asked")
    raise SystemExit(status)


threading.Thread(target=serve, daemon=True).start()
write(
    "ready.json",
    {
        "address": GIVEN["--address"],
        "environment": dict(os.environ),
        "bytes": resource.getrlimit(resource.RLIMIT_DATA),
        "cores": len(os.sched_getaffinity(0)),
        "held": subprocess.call(["umount", "/proc"]) != 0,
        "links": [name for _, name in socket.if_nameindex()],
    },
)
done = 0
while time.time() < float(GIVEN["--deadline"]):
    job = NODE / f"job-{done}.json"
    if job.exists():
        body = json.loads(job.read_text())
        jobs = {"send": send, "burn": burn, "leave": leave}
        write(f"answer-{done}.json", jobs[body.pop("kind")](**body))
        done += 1
    time.sleep(0.01)
