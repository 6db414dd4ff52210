"""An emulated AWS with real machines: moto is the API and S3, and a local host stands behind every
instance.

    with World(seed=1) as world:
        subprocess.run([...], env={**os.environ, **world.environment()})

Needs root (`World.why_not()`). What moto lacks or gets wrong is supplied here; the rest is moto's.
Machines live in namespaces: nothing of them is seen outside, and the world's own sockets are on
loopback.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any
from unittest.mock import patch

os.environ.setdefault("MOTO_EC2_LOAD_DEFAULT_AMIS", "false")  # half a second each time, for nothing

import boto3
import moto.ec2.urls
from moto.core.base_backend import BackendDict
from werkzeug.serving import BaseWSGIServer, make_server

from tests.world.account import Account, Launch, install
from tests.world.elastic import Elastic
from tests.world.front import Front, Quiet
from tests.world.hosts import Hosts
from tests.world.machines import Keeper
from tests.world.market import Market
from tests.world.metadata import Metadata, served

__all__ = ["Launch", "World"]

BUCKET, PROFILE = "srift-mailbox", "srift-node"
NODE_POLICY = Path(__file__).resolve().parents[2] / "deployments" / "iam" / "node-policy.json"


class World:
    """moto's EC2 and S3 with a real host behind each instance."""

    def __init__(self, *, seed: int = 1) -> None:
        self.region, self.bucket, self.profile = "us-east-1", BUCKET, PROFILE
        self.folder = Path(tempfile.mkdtemp(prefix="srift-world-"))
        self.account = Account(market=Market.listed(seed))
        policy = (
            NODE_POLICY.read_text()
        )  # the one that operators install: what it does not allow, machines cannot do
        self._policy = policy.replace("{bucket}", BUCKET).replace("{prefix}", "srift")
        self._front = Front(self.account, self._look)
        self._hosts = Hosts(self.folder, switched_on=self._serve_metadata)
        self.metadata = Metadata(self.account, self._hosts.instance_at)
        self._keeper = Keeper(
            self.account, self._hosts, came=self._serve_at_home, went=self._unserve
        )
        self._servers: dict[str, list[Any]] = {}
        self._clients: dict[tuple[str, str], Any] = {}

    @staticmethod
    def why_not() -> str:
        return Hosts.why_not()

    def __enter__(self) -> World:
        """Open, with a bucket, the nodes' role and instance profile, and a default VPC."""
        bound = type("Elastic", (Elastic,), {"account": self.account})
        self._patch = patch.dict(moto.ec2.urls.url_paths, {"{0}/": bound.dispatch})
        self._patch.start()
        BackendDict.reset()
        self._port = self._serve("127.0.0.1", 0, None)
        self.account.heard = self._look
        self._keeper.open()
        install(self.client, bucket=self.bucket, profile=self.profile, policy=self._policy)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End every machine, switch and server; nothing is left but what a failed test may want to
        read elsewhere.
        """
        self._keeper.close()
        self._hosts.close()
        for name in list(self._servers):
            self._unserve(name)
        self._patch.stop()
        BackendDict.reset()
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def endpoint(self) -> str:
        """Of every service, for this machine's processes and, by the same words, on every host."""
        return f"http://127.0.0.1:{self._port}"

    def environment(self) -> dict[str, str]:
        """What makes boto3 in a subprocess speak to this world and to nobody else."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": "AKIAEMULATED",
            "AWS_SECRET_ACCESS_KEY": "an-emulated-secret",
            "AWS_REGION": self.region,
            "AWS_DEFAULT_REGION": self.region,
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        }

    def client(self, service: str, region: str = "") -> Any:
        environment, key = self.environment(), (service, region or self.region)
        if key not in self._clients:
            session = boto3.Session(
                environment["AWS_ACCESS_KEY_ID"], environment["AWS_SECRET_ACCESS_KEY"]
            )
            self._clients[key] = session.client(
                service, region_name=key[1], endpoint_url=self.endpoint
            )
        return self._clients[key]

    @property
    def launches(self) -> list[Launch]:
        return list(self.account.launches)

    @property
    def asked(self) -> list[tuple[str, str]]:
        """(action, region) of every request with the controller's keys: ("ec2:RunInstances",
        "us-east-1").
        """
        return list(self._front.asked)

    def alive(self) -> list[str]:
        return sorted({one.id for one in self.account.instances()} | set(self._hosts.alive()))

    def faults(self) -> list[str]:
        """What the world itself could not do: a test that sees one has proved nothing."""
        return list(self._keeper.faults)

    def console(self, instance_id: str) -> str:
        file = self._hosts.folder(instance_id) / "console.txt"
        return file.read_text(errors="replace") if file.exists() else ""

    def _look(self) -> None:
        self._keeper.look()

    def _serve(self, address: str, port: int, listening: Any, name: str = "") -> int:
        handle = None if listening is None else listening.fileno()
        server: BaseWSGIServer = make_server(
            address, port, self._front, threaded=True, request_handler=Quiet, fd=handle
        )
        if listening is not None:
            listening.close()  # the server has its own handle of it
        self._keep(name, server)
        return int(server.server_address[1])

    def _serve_at_home(self, instance_id: str) -> None:
        """The same endpoint on the host's own loopback: S3 as the machine reaches it."""
        self._serve(
            "127.0.0.1",
            self._port,
            self._hosts.listening(instance_id, "127.0.0.1", self._port),
            instance_id,
        )

    def _serve_metadata(self, region: str, listening: Any) -> None:
        self._keep("metadata", served(self.metadata, region, listening))

    def _keep(self, name: str, server: Any) -> None:
        server.daemon_threads = True
        server.block_on_close = False
        thread = threading.Thread(
            target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True
        )
        thread.start()
        self._servers.setdefault(name, []).append((server, thread))

    def _unserve(self, name: str) -> None:
        for server, thread in self._servers.pop(name, []):
            server.shutdown()
            thread.join()
            with suppress(OSError):
                server.server_close()
