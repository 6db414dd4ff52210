"""The user-data in a network of its own: what the user whose code runs can see and do, and that the
machine goes off.
"""

import hashlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
from contextlib import suppress
from pathlib import Path

import boto3
import pytest

from tasks.node.processes import descendants
from tasks.providers.ec2.userdata import user_data
from tests.local.hosts import HERE, ISOLATION, wait_for

NODE = HERE.parents[1] / "tasks/node"
PYTHON = "/usr/bin/python3"  # one that every user of this machine can run
ROLE, INSTANCE, LEASE = "AROAEXAMPLEEXAMPLE", "i-0123456789abcdef0", "lease-1"
CREDENTIALS = {
    "Code": "Success",
    "AccessKeyId": "AKIAEXAMPLE",
    "SecretAccessKey": "very-secret",
    "Token": "t",
    "Expiration": "2099-01-01T00:00:00Z",
}
METADATA = {
    "instance-id": INSTANCE,
    "local-ipv4": "10.77.0.2",
    "iam/security-credentials/.list": "srift-node",
    "iam/security-credentials/srift-node": json.dumps(CREDENTIALS),
}
CABLE = """ip link set lo up; ip link add v0 type veth peer name eth0 netns {machine}
ip link set v0 up; ip addr add 10.77.0.1/24 dev v0; ip addr add 169.254.169.254/32 dev v0"""
PLUG = """ip link set lo up; ip addr add 10.77.0.2/24 dev eth0; ip link set eth0 up
ip route add 169.254.169.254/32 dev eth0"""

pytestmark = [
    pytest.mark.local,
    pytest.mark.skipif(
        os.geteuid() != 0 or ISOLATION.kind != "root" or not os.access(PYTHON, os.X_OK),
        reason="needs root, namespaces and Debian's python3",
    ),
]


class Machine:
    """Two network namespaces: AWS's stand-in in one, and the machine, still off, in the other."""

    def __init__(self, base):
        self.base, self.cloud = base, base / "cloud"
        self.cloud.mkdir(mode=0o700)  # root's: the store is not on the machine
        bucket = self.cloud / "bucket/srift"
        self.code, self.lease = bucket / "code", bucket / "leases" / LEASE / f"{ROLE}:{INSTANCE}"
        for name, value in METADATA.items():
            self.metadata(name, value)
        self.program("shutdown", f'echo "$*" >> {base}/shutdowns')
        self.processes = []

    def plug_in(self):
        mine = os.readlink("/proc/self/ns/net")
        for _ in range(2):
            holder = subprocess.Popen(["unshare", "--net", "sleep", "infinity"])
            self.processes.append(holder)
            wait_for(lambda pid=holder.pid: os.readlink(f"/proc/{pid}/ns/net") != mine)
        for place, commands in enumerate((CABLE, PLUG)):
            commands = commands.format(machine=self.processes[1].pid)
            assert self.inside(place, "sh", "-ec", commands).wait() == 0
        serving = (sys.executable, f"{HERE}/standin/cloud.py", str(self.cloud))
        cloud = self.inside(
            0, *serving, "169.254.169.254:80", "10.77.0.1:5000", stdout=subprocess.PIPE
        )
        with cloud.stdout or io.BytesIO() as output:
            assert output.readline() == b"ready\n"

    def unplug(self):
        """End all processes with everything below them."""
        for process in self.processes:
            for pid in [*descendants(process.pid), process.pid]:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()

    def inside(self, place, *command, **options):
        enter = ("nsenter", "-t", str(self.processes[place].pid), "-n")
        self.processes.append(subprocess.Popen([*enter, *command], **options))
        return self.processes[-1]

    def boot(self, **changed):
        """Run the user-data. `shutdown` is a stand-in: it must never be this machine's own."""
        path = f"{self.base / 'bin'}:{os.environ['PATH']}:/usr/sbin:/sbin"
        assert shutil.which("shutdown", path=path) == f"{self.base}/bin/shutdown"
        values = {"bucket": "bucket", "prefix": "srift", "region": "us-east-1", "lease": LEASE}
        values |= {"role_id": ROLE, "python": PYTHON, "endpoint": "http://10.77.0.1:5000"}
        values |= {"code_sha256": self.upload(archive())} | changed
        file = self.base / "user-data"
        file.write_text(user_data(90.0, **values))
        environment = {
            "PATH": path,
            "SRIFT_BASE": str(self.base),
            "SRIFT_USER": "nobody",
            "AWS_SECRET_ACCESS_KEY": "leaks",
            "PYTHONPATH": str(Path(boto3.__file__).parents[1]),
        }
        with (self.base / "console.txt").open("wb") as console:
            command = ("setpriv", "--groups", "4,27", "bash", str(file))
            return self.inside(
                1, *command, env=environment, stdout=console, stderr=subprocess.STDOUT
            )

    def upload(self, content, digest=""):
        digest = digest or hashlib.sha256(content).hexdigest()
        self.code.mkdir(parents=True, exist_ok=True)
        (self.code / f"{digest}.tar.gz").write_bytes(content)
        return digest

    def metadata(self, name, value):
        path = self.cloud / f"meta-data/{name}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(value)

    def program(self, name, script):
        file = self.base / f"bin/{name}"
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"#!/bin/sh\n{script}\n")
        file.chmod(0o755)

    def brings(self, **bodies):
        """As the controller does: the files, then the manifest that names them."""
        files = {f"{name}.json": json.dumps(body) for name, body in bodies.items()}
        digests = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in files.items()}
        files["manifest.json"] = json.dumps({"files": digests})
        (self.lease / "in").mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (self.lease / f"in/{name}").write_text(text)

    def out(self, name):
        path = self.lease / f"out/{name}"
        return json.loads(path.read_text()) if path.is_file() else None

    def shutdowns(self):
        return (self.base / "shutdowns").read_text().splitlines()


def archive():
    """The package `node`, whose agent is a stand-in."""
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w:gz") as tar:
        for file in NODE.rglob("*.py"):
            is_agent = file == NODE / "__main__.py"
            source = HERE / "standin/confined.py" if is_agent else file
            tar.add(source, f"node/{file.relative_to(NODE)}")
    return held.getvalue()


@pytest.fixture
def rented():
    base = Path(tempfile.mkdtemp(prefix="srift-machine-"))  # pytest's are closed to other users
    base.chmod(0o755)
    machine = Machine(base)
    try:
        machine.plug_in()
        yield machine
    finally:
        machine.unplug()
        shutil.rmtree(base, ignore_errors=True)


def test_a_machine_serves_as_a_user_without_rights_and_then_goes_off(rented):
    booted = rented.boot()
    rented.brings(node={"node": 0, "nodes": 1})
    ready = wait_for(lambda: rented.out("ready.json"))
    assert rented.shutdowns() == ["-h +2 srift: the deadline of lease lease-1"]
    assert set(ready["ids"]) == {65534}
    assert ready["metadata"] != "done" and ready["cluster"] == "done"
    assert not [name for name in ready["environment"] if name.startswith("AWS")]
    assert "very-secret" not in json.dumps(ready) and "leaks" not in json.dumps(ready)
    assert (ready["code"], ready["beside_code"], ready["mailbox"]) == ("PermissionError",) * 3
    assert (ready["death_signal"], ready["no_new_privileges"]) == (9, "1")
    assert set(ready["capabilities"]) == {"0" * 16}
    assert ready["address"] == "10.77.0.2" and 0 < ready["left_s"] < 90
    rented.brings(plan={"attempt": 1})
    assert wait_for(lambda: rented.out("records/run+1.json")) == {"plan": '{"attempt": 1}'}
    wait_for(lambda: rented.out("heartbeat.json"))
    rented.metadata("spot/instance-action", '{"action": "terminate", "time": "T"}')
    assert wait_for(lambda: rented.out("notice.json")) == {"kind": "interruption", "at": "T"}
    rented.brings(plan={"attempt": 1}, done={})
    booted.wait(30)
    assert rented.shutdowns()[1:] == ["-h now"] * 2
    assert rented.out("failed.json") is None
    assert not (rented.lease / "out/secret.json").exists()


def test_where_no_rule_holds_no_code_of_the_users_runs(rented):
    for tool in ("ip", "iptables"):
        rented.program(tool, "exit 0")  # succeeds and does nothing
    rented.brings(node={"node": 0, "nodes": 1})
    rented.boot().wait(30)
    assert "metadata service" in rented.out("failed.json")["reason"]
    assert rented.out("ready.json") is None
    assert "-h now" in rented.shutdowns()


@pytest.mark.parametrize(
    "changed, reason",
    [
        ({"code_sha256": "0" * 64}, "a wrong SHA-256 digest"),
        ({"python": "/opt/none/python3"}, "no /opt/none/python3"),
    ],
)
def test_a_machine_that_cannot_start_reports_why_and_goes_off(rented, changed, reason):
    rented.upload(b"another archive", "0" * 64)
    rented.boot(**changed).wait(30)
    assert reason in rented.out("failed.json")["reason"]
    assert rented.shutdowns()[0].startswith("-h +2") and rented.shutdowns()[-1] == "-h now"
    assert rented.out("ready.json") is None
