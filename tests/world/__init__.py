"""Emulate AWS on this computer: moto serves the APIs, and a local host runs each instance.

    with World(seed=1) as world:
        subprocess.run([...], env={**os.environ, **world.environment()})

Needs root (`World.why_not()`). This package adds what moto lacks or gets wrong. The hosts are in
namespaces, which nothing outside can reach. The sockets of the API are on loopback.
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
NODE_POLICY = Path(__file__).resolve().parents[2] / "deployments/iam/node-policy.json"


class World:
    """An emulated AWS: moto's EC2 and S3, and a local host for each instance."""

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
        """Create a bucket, a role and an instance profile for machines, and start the emulation."""
        bound = type("Elastic", (Elastic,), {"account": self.account})
        self._patch = patch.dict(moto.ec2.urls.url_paths, {"{0}/": bound.dispatch})
        self._patch.start()
        BackendDict.reset()
        policy = NODE_POLICY.read_text().replace("{bucket}", BUCKET).replace("{prefix}", "srift")
        install(self.client, bucket=BUCKET, profile=PROFILE, policy=policy)
        self.machines.open()
        return self

    def __exit__(self, *_):
        """End all hosts, networks and servers, and delete the folder."""
        self.machines.close()
        for server in self._servers:
            server.shutdown()
            server.server_close()
        self._patch.stop()
        BackendDict.reset()
        shutil.rmtree(self.folder, ignore_errors=True)

    def environment(self):
        """Return variables with which boto3 in a subprocess uses this emulation only."""
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
        return sorted(
            {machine.id for machine in self.account.instances()} | {*self.machines.known()}
        )

    def faults(self):
        """Return the errors of the emulation itself. If there are any, a test proves nothing."""
        return self.machines.faults

    def console(self, instance_id):
        file = self.machines.folder(instance_id) / "console.txt"
        return file.read_text(errors="replace") if file.exists() else ""

    def _serve(self, service, name, listening):
        """Start a server on a listening socket, and return it.

        `service` is "api" (of AWS), or "metadata" (the metadata service of the region `name`).
        """
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
