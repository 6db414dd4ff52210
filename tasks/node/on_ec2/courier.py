"""`python -m node.on_ec2.courier`: a rented machine's first process of ours, as root, from boot to power-off.

It keeps the user whose code is measured from the machine's credentials, starts the agent as that user, carries the
mailbox, and whatever happens powers the machine off. `shutdown` is the one on PATH: an emulated host has its own.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import subprocess
import time
import traceback
from contextlib import suppress
from pathlib import Path

from ..processes import adopt_orphans, end_descendants
from .metadata import Metadata
from .metadata_fence import Account, account, fence, start_as
from .s3 import Bucket
from .sync import Delivery

_KEPT = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH")  # of the environment; nothing else reaches the agent
_PATIENCE_S = 10.0
_TIMEOUT_S = 5.0  # a store that is silent must not keep a notice waiting
_POWER_OFF_TRIES = 12
_LAST_TO_DIE = "-500"  # of /proc/PID/oom_score_adj: memory that a workload eats must not cost its records


class MachineStore:
    """`in/` and `out/` under this machine's own identity."""

    def __init__(self, bucket: Bucket, root: str) -> None:
        self._bucket, self._root = bucket, root

    def get(self, name: str) -> bytes:
        """Raises OSError."""
        return self._bucket.get(f"{self._root}/in/{name}")

    def put(self, name: str, content: bytes) -> None:
        """Raises OSError."""
        self._bucket.put(f"{self._root}/out/{name}", content)


class AgentProcess:
    """The agent as an ordinary user; what it says goes to a file that it cannot write otherwise."""

    def __init__(
        self, user: Account, python: str, directory: Path, *, rank: int, address: str, deadline_unix: float
    ) -> None:
        own, self._log = directory / f"node-{rank}", directory / "agent.txt"
        command = [
            *(python, "-m", "node", "--mailbox", str(directory), "--node", str(rank)),
            *("--address", address, "--deadline", str(deadline_unix)),
        ]
        with self._log.open("wb") as log:
            self._process = start_as(
                user,
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=own,
                env=environment(user, own),
                start_new_session=True,
            )
        _score(self._process.pid, "0")

    def poll(self) -> int | None:
        """Its exit code; None while it runs."""
        return self._process.poll()

    def end(self) -> None:
        """Let it end its launch, then end whatever is left below this process."""
        with suppress(OSError):
            self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_PATIENCE_S)
        end_descendants()

    def said(self) -> str:
        """The end of what it said."""
        try:
            return self._log.read_text(errors="replace").strip()[-1000:]
        except OSError:
            return ""


def environment(user: Account, home: Path) -> dict[str, str]:
    """What the agent sees: where to find programs and its own code, and nothing of the machine's rights."""
    return {name: os.environ[name] for name in _KEPT if name in os.environ} | {
        "HOME": str(home),
        "USER": user.name,
        "LOGNAME": user.name,
        "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def serve(arguments: argparse.Namespace) -> None:
    """From the first look at the metadata service to the last upload. Raises OSError where it cannot even begin."""
    ends = time.monotonic() + arguments.deadline_s
    metadata = Metadata()
    root = f"{arguments.prefix}/leases/{arguments.lease}/{arguments.role_id}:{metadata.instance_id()}"

    def bucket(attempts: int) -> Bucket:
        return Bucket(
            arguments.bucket,
            region=arguments.region,
            endpoint=arguments.endpoint,
            keys=metadata.keys,
            attempts=attempts,
            timeout_s=_TIMEOUT_S,
        )

    try:
        reason = deliver(arguments, metadata, MachineStore(bucket(2), root), ends)
    except Exception as error:
        traceback.print_exc()
        reason = f"the courier failed: {error!r}"[:500]
    if reason:
        report(MachineStore(bucket(6), root), reason)


def deliver(arguments: argparse.Namespace, metadata: Metadata, store: MachineStore, ends: float) -> str:
    """Empty, or why the machine could not serve. Raises OSError."""
    user, address = account(arguments.user), metadata.address()
    reason = fence(user, metadata.base, arguments.python)
    if reason:
        return reason
    delivery = Delivery(
        directory=arguments.directory,
        store=store,
        start=lambda rank, deadline_unix: AgentProcess(
            user,
            arguments.python,
            arguments.directory,
            rank=rank,
            address=address,
            deadline_unix=deadline_unix,
        ),
        notice=metadata.notice,
        owner=user.uid,
        deadline_s=ends - time.monotonic(),
    )
    for told in (signal.SIGTERM, signal.SIGINT):
        signal.signal(told, delivery.leave)
    return delivery.serve()


def report(store: MachineStore, reason: str) -> None:
    """Tell the controller why this machine goes, and the console."""
    print(f"srift: {reason}", flush=True)
    try:
        store.put("failed.json", json.dumps({"reason": reason, "failed_unix": time.time()}).encode())
    except OSError as error:
        print(f"srift: nor could that be told: {error}", flush=True)


def power_off() -> None:
    """The machine terminates when it is off. The timer that was set at boot stands behind this."""
    for _ in range(_POWER_OFF_TRIES):
        with suppress(OSError):
            if subprocess.run(("shutdown", "-h", "now"), stdin=subprocess.DEVNULL).returncode == 0:
                return
        time.sleep(5.0)


def main() -> None:
    """Serve, and power off whatever came of it."""
    parser = argparse.ArgumentParser(
        prog="node.on_ec2.courier", description="Serve one rented machine of a Srift cluster."
    )
    parser.add_argument("--bucket", required=True)
    parser.add_argument("--prefix", required=True)
    parser.add_argument("--region", required=True)
    parser.add_argument("--endpoint", help="of an S3 that stands in for AWS's")
    parser.add_argument("--lease", required=True)
    parser.add_argument("--role-id", required=True, help="of the machine's role: half of what IAM calls its user id")
    parser.add_argument("--user", required=True, help="whom the agent and the workloads run as; not root")
    parser.add_argument("--python", required=True, help="the Python that has torch")
    parser.add_argument("--deadline-s", type=float, required=True, help="seconds from now to the machine's end")
    parser.add_argument("--directory", type=Path, required=True, help="the machine's mailbox")
    arguments = parser.parse_args()
    os.umask(0o022)
    adopt_orphans()
    _score(os.getpid(), _LAST_TO_DIE)
    with suppress(OSError, ValueError):  # fast network cards pin memory
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    try:
        serve(arguments)
    except Exception:
        traceback.print_exc()
    finally:
        power_off()


def _score(process: int, score: str) -> None:
    with suppress(OSError):
        Path(f"/proc/{process}/oom_score_adj").write_text(score)


if __name__ == "__main__":
    main()
