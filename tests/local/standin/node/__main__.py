"""A stand-in for the node agent: reports itself, takes whatever bytes come, and does the small jobs
it finds.
"""

import argparse
import json
import os
import socket
import threading
import time
from pathlib import Path

PORT = 5001


def write(path: Path, body: dict[str, object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".beside")
    beside.write_text(json.dumps(body))
    beside.rename(path)


def serve(server: socket.socket) -> None:
    while True:
        peer, _ = server.accept()
        with peer:
            while peer.recv(1 << 20):
                pass
            peer.sendall(b"k")


def send(address: str, count: int) -> dict[str, object]:
    with socket.create_connection((address, PORT), timeout=20) as peer:
        began = time.monotonic()
        peer.sendall(b"x" * count)
        peer.shutdown(socket.SHUT_WR)
        peer.recv(1)
        return {"seconds": time.monotonic() - began}


def burn(seconds: float) -> dict[str, object]:
    began, used = time.monotonic(), time.process_time()
    while time.monotonic() - began < seconds:
        pass
    return {"share": (time.process_time() - used) / (time.monotonic() - began)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mailbox", type=Path)
    parser.add_argument("--node", type=int)
    parser.add_argument("--address")
    parser.add_argument("--deadline", type=float)
    args = parser.parse_args()
    mine = args.mailbox / f"node-{args.node}"
    server = socket.create_server((args.address, PORT))  # listens before it says that it is ready
    threading.Thread(target=serve, args=(server,), daemon=True).start()
    ready = {
        "address": args.address,
        "environment": dict(os.environ),
        "cores": len(os.sched_getaffinity(0)),
    }
    write(mine / "ready.json", ready | {"links": [name for _, name in socket.if_nameindex()]})
    done = 0
    while time.time() < args.deadline:
        job = mine / f"job-{done}.json"
        if not job.exists():
            time.sleep(0.01)
            continue
        body = json.loads(job.read_text())
        if body["kind"] == "leave":
            print("leaving as asked")
            raise SystemExit(body["status"])
        answer = (
            send(body["address"], body["count"])
            if body["kind"] == "send"
            else burn(body["seconds"])
        )
        write(mine / f"answer-{done}.json", answer)
        done += 1


main()
