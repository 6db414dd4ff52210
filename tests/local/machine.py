"""A rented machine without EC2: two network namespaces, AWS's stand-in in one, and the user-data
run in the other.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
import pytest

from tasks.providers.ec2.userdata import user_data
from tests.local.hosts import HERE, ISOLATION, wait_for

NODE = HERE.parents[1] / "tasks" / "node"
PYTHON = "/usr/bin/python3"  # one that every user of this machine can run
ROLE, INSTANCE, LEASE = "AROAEXAMPLEEXAMPLE", "i-0123456789abcdef0", "lease-1"
CREDENTIALS = {
    "Code": "Success",
    "AccessKeyId": "AKIAEXAMPLE",
    "SecretAccessKey": "very-secret",
    "Token": "t",
}
needs_root = pytest.mark.skipif(
    os.geteuid() != 0 or ISOLATION.kind != "root" or not os.access(PYTHON, os.X_OK),
    reason="needs root, namespaces and Debian's python3",
)


def archive(agent: Path | None) -> bytes:
    """The package `node`, with `agent` instead of what `python -m node` starts."""
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w:gz") as tar:
        for file in sorted(NODE.rglob("*.py")):
            stands = agent if agent is not None and file == NODE / "__main__.py" else file
            tar.add(stands, f"node/{file.relative_to(NODE)}")
    return held.getvalue()


def metadata_files(folder: Path) -> None:
    values = {
        "instance-id": INSTANCE,
        "local-ipv4": "10.77.0.2",
        "iam/security-credentials/.list": "srift-node",
        "iam/security-credentials/srift-node": json.dumps(
            CREDENTIALS | {"Expiration": "2099-01-01T00:00:00Z"}
        ),
    }
    for name, value in values.items():
        path = folder / "meta-data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(value)


@dataclass(kw_only=True)
class Machine:
    """`folder` holds the stand-in's objects, `bin` programs that come before this machine's own."""

    folder: Path
    bin: Path
    base: Path
    holders: tuple[int, int]  # processes in the namespaces of the cloud and of the machine

    def inside(self, holder: int, *command: str, **options: Any) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            ["nsenter", "-t", str(self.holders[holder]), "-n", *command], **options
        )

    def boot(
        self, script: str, environment: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Run the user-data. `shutdown` is a stand-in: it must never be this machine's own."""
        path = f"{self.bin}:{os.environ['PATH']}:/usr/sbin:/sbin"
        assert shutil.which("shutdown", path=path) == str(self.bin / "shutdown")
        seen = {
            "PATH": path,
            "SRIFT_BASE": str(self.base),
            "SRIFT_USER": "nobody",
            "AWS_SECRET_ACCESS_KEY": "leaks",
            "PYTHONPATH": str(Path(boto3.__file__).parents[1]),
        }
        file = self.base / "user-data"
        file.write_text(script)
        with (self.base / "console.txt").open("wb") as console:
            return self.inside(
                1,
                "setpriv",
                "--groups",
                "4,27",
                "bash",
                str(file),
                env=seen | dict(environment or {}),
                stdout=console,
                stderr=subprocess.STDOUT,
            )

    def put(self, name: str, body: Any) -> None:
        path = self.own / "in" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(body))

    def out(self, name: str) -> Any:
        path = self.own / "out" / name
        return json.loads(path.read_text()) if path.is_file() else None

    @property
    def own(self) -> Path:
        return self.folder / "bucket" / "srift" / "leases" / LEASE / f"{ROLE}:{INSTANCE}"

    def shutdowns(self) -> list[str]:
        file = self.base / "shutdowns"
        return file.read_text().splitlines() if file.exists() else []

    def program(self, name: str, script: str) -> None:
        (self.bin / name).write_text(f"#!/bin/sh\n{script}\n")
        (self.bin / name).chmod(0o755)

    def script(self, agent: Path | None, **changed: Any) -> str:
        content = archive(agent)
        digest = hashlib.sha256(content).hexdigest()
        file = self.folder / "bucket" / "srift" / "code" / f"{digest}.tar.gz"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
        values: dict[str, Any] = {
            "bucket": "bucket",
            "prefix": "srift",
            "region": "us-east-1",
            "endpoint": "http://10.77.0.1:5000",
            "code_sha256": digest,
            "lease": LEASE,
            "role_id": ROLE,
            "python": PYTHON,
        }
        deadline_s = changed.pop("deadline_s", 90.0)
        return user_data(deadline_s, **values | changed)


@contextmanager
def machine(base: Path) -> Iterator[Machine]:
    """A machine that is plugged in and off. `base` must be readable for every user."""
    folder, programs = base / "cloud", base / "bin"
    folder.mkdir(mode=0o700)  # root's: the store is not on the machine
    programs.mkdir()
    metadata_files(folder)
    holders = [subprocess.Popen(["unshare", "--net", "sleep", "infinity"]) for _ in range(2)]
    started: list[subprocess.Popen[bytes]] = list(holders)
    made = Machine(folder=folder, bin=programs, base=base, holders=(holders[0].pid, holders[1].pid))
    made.program("shutdown", f'echo "$*" >> {base}/shutdowns')
    try:
        mine = os.readlink("/proc/self/ns/net")
        for one in holders:
            wait_for(lambda one=one: os.readlink(f"/proc/{one.pid}/ns/net") != mine)
        cable = (
            f"ip link set lo up; ip link add v0 type veth peer name eth0 netns {holders[1].pid};"
            "ip link set v0 up;"
            "ip addr add 10.77.0.1/24 dev v0; ip addr add 169.254.169.254/32 dev v0"
        )
        plug = (
            "ip link set lo up; ip addr add 10.77.0.2/24 dev eth0; ip link set eth0 up;"
            "ip route add 169.254.169.254/32 dev eth0"
        )
        for holder, commands in ((0, cable), (1, plug)):
            assert made.inside(holder, "sh", "-ec", commands).wait() == 0
        serving = (sys.executable, str(HERE / "standin" / "cloud.py"), str(folder))
        cloud = made.inside(
            0, *serving, "169.254.169.254:80", "10.77.0.1:5000", stdout=subprocess.PIPE
        )
        started.append(cloud)
        assert cloud.stdout is not None and cloud.stdout.readline() == b"ready\n"
        yield made
    finally:
        for one in started:
            one.kill()
            one.wait()
        if started[-1].stdout is not None:
            started[-1].stdout.close()


def end(process: subprocess.Popen[bytes]) -> None:
    """Bring a user-data script down with everything below it, as a machine that goes off does."""
    from tasks.node.processes import descendants

    for pid in [*descendants(process.pid), process.pid]:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    process.wait()


def over(process: subprocess.Popen[bytes], within_s: float = 30.0) -> None:
    until = time.monotonic() + within_s
    while process.poll() is None:
        assert time.monotonic() < until
        time.sleep(0.02)
