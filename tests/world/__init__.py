"""An emulated AWS with real machines: moto is the API and S3, and a local host stands behind every
instance.

    with World(seed=1) as world:
        subprocess.run([...], env={**os.environ, **world.environment()})

Needs root (`World.why_not()`). What moto lacks or gets wrong is supplied here; the rest is moto's.
Machines live in namespaces: nothing of them is seen outside, and the world's own sockets are on
loopback.
"""

import logging
import os
import shutil
import socket
import tempfile
import threading
from pathlib import Path
from unittest.mock import patch

os.environ.setdefault("MOTO_EC2_LOAD_DEFAULT_AMIS", "false")  # half a second each time, for nothing

import boto3
import moto.ec2.urls
from moto.core.base_backend import BackendDict
from moto.moto_server.werkzeug_app import MotoRequestHandler
from werkzeug.serving import make_server

from tests.world import machines
from tests.world.account import Account, install
from tests.world.elastic import Elastic
from tests.world.front import Front
from tests.world.market import market
from tests.world.metadata import Metadata

logging.getLogger("werkzeug").setLevel(logging.ERROR)  # no line for every request
REGION, BUCKET, PROFILE = "us-east-1", "srift-mailbox", "srift-node"
# What the operators' own policy does not allow, machines cannot do.
NODE_POLICY = Path(__file__).resolve().parents[2] / "deployments" / "iam" / "node-policy.json"


class World:
    """moto's EC2 and S3 with a real host behind each instance."""

    why_not = staticmethod(machines.why_not)

    def __init__(self, *, seed=1):
        self.region, self.bucket, self.profile = REGION, BUCKET, PROFILE
        self.folder = Path(tempfile.mkdtemp(prefix="srift-world-"))
        self.account = Account(market=market(seed))
        self.front = Front(self.account, lambda: self.machines.end_terminated())
        loopback = socket.create_server(("127.0.0.1", 0))
        port = loopback.getsockname()[1]
        self.endpoint = f"http://127.0.0.1:{port}"  # on this machine and on every host
        self.machines = machines.Machines(self.account, self.folder, port, self._serve)
        self._servers = []
        self._serve("api", "", loopback)

    def __enter__(self):
        """Open, with a bucket, the nodes' role and instance profile, and a default VPC."""
        bound = type("Elastic", (Elastic,), {"account": self.account})
        self._patch = patch.dict(moto.ec2.urls.url_paths, {"{0}/": bound.dispatch})
        self._patch.start()
        BackendDict.reset()
        policy = NODE_POLICY.read_text().replace("{bucket}", BUCKET).replace("{prefix}", "srift")
        install(self.client, bucket=BUCKET, profile=PROFILE, policy=policy)
        self.machines.open()
        return self

    def __exit__(self, *_):
        """End every machine, switch and server, and delete the folder."""
        self.machines.close()
        for server in self._servers:
            server.shutdown()
            server.server_close()
        self._patch.stop()
        BackendDict.reset()
        shutil.rmtree(self.folder, ignore_errors=True)

    def environment(self):
        """What makes boto3 in a subprocess speak to this world and to nobody else."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": "AKIAEMULATED",
            "AWS_SECRET_ACCESS_KEY": "an-emulated-secret",
            "AWS_REGION": REGION,
            "AWS_DEFAULT_REGION": REGION,
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        }

    def client(self, service):
        session = boto3.Session("AKIAEMULATED", "an-emulated-secret", region_name=REGION)
        return session.client(service, endpoint_url=self.endpoint)

    def alive(self):
        return sorted({one.id for one in self.account.instances()} | {*self.machines.known()})

    def faults(self):
        """What the world itself could not do: a test that sees a fault has proved nothing."""
        return self.machines.faults

    def console(self, instance_id):
        file = self.machines.folder(instance_id) / "console.txt"
        return file.read_text(errors="replace") if file.exists() else ""

    def _serve(self, service, name, listening):
        """Start a server of "api", or of "metadata" in the region `name`, on a listening socket."""
        app = self.front
        if service == "metadata":
            app = Metadata(self.account, lambda address: self.machines.instance_at(name, address))
        with listening:  # the server has its own handle of it
            server = make_server(
                *listening.getsockname(),
                app,
                threaded=True,
                request_handler=MotoRequestHandler,
                fd=listening.fileno(),
            )
        server.daemon_threads, server.block_on_close = True, False
        serve = threading.Thread(
            target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True
        )
        serve.start()
        self._servers.append(server)
        return server
