"""Run a private Prefect server while one command runs."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
from prefect.events.worker import EventsWorker
from prefect.logging.handlers import APILogHandler
from prefect.settings import (
    PREFECT_API_AUTH_STRING,
    PREFECT_API_URL,
    PREFECT_FLOWS_HEARTBEAT_FREQUENCY,
    get_current_settings,
    temporary_settings,
)

from ..node.processes import die_with_parent
from .credential import new_credential
from .home import Wrong, check_home

_HOST = "127.0.0.1"
_START_S = 120.0


@contextmanager
def local_server() -> Iterator[None]:
    """Run Prefect's server during the block, unless PREFECT_API_URL names another server.

    Raises Wrong if the disk is full or not writable, or if the server does not start.
    """
    settings = get_current_settings()
    if settings.api.url is not None:
        yield
        return
    home = settings.home
    check_home(home)
    home.mkdir(parents=True, exist_ok=True)
    port, credential = _free_port(), new_credential()
    start = f"-m prefect server start --host {_HOST} --port {port} --no-ui --no-services"
    with (home / "server.log").open("wb") as log:
        server = subprocess.Popen(
            [sys.executable, *start.split()],
            env=os.environ
            | {
                "PREFECT_HOME": str(home),
                "PREFECT_SERVER_API_AUTH_STRING": credential,
                "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": f"http://{_HOST}:{port}",
            },
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # Ctrl-C ends the flow first, then the server
            preexec_fn=die_with_parent,
        )
    try:
        wait_until_serving(server, port)
        url = f"http://{_HOST}:{port}/api"
        with temporary_settings(
            {
                PREFECT_API_URL: url,
                PREFECT_API_AUTH_STRING: credential,
                PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None,  # unused; heartbeats cost 1 s per flow
            }
        ):
            try:
                yield
            finally:  # send queued logs and events while the server still runs
                APILogHandler().flush()
                EventsWorker.drain_all(timeout=5)
    except ServerEnded as error:
        raise Wrong(
            f"nothing was measured: Prefect's server did not start (log: {log.name})."
            f" If its database is damaged, move {home / 'prefect.db'} away and try again"
        ) from error
    finally:
        server.terminate()
        server.wait()


class ServerEnded(Exception):
    """The server process ended, or did not listen on its port in time."""


def wait_until_serving(server: subprocess.Popen[bytes], port: int) -> None:
    """Wait until `server` or one of its child processes listens on the loopback port `port`.

    The wait does not end if an unrelated process listens on the port. Clients would send the
    server's password to that process.

    Raises ServerEnded if `server` ends or does not listen within two minutes.
    """
    end = time.monotonic() + _START_S
    while server.poll() is None and time.monotonic() < end:
        if _listens(server.pid, port):
            return
        time.sleep(0.1)
    raise ServerEnded


def _listens(pid: int, port: int) -> bool:
    """Return True if the process `pid` or one of its child processes listens on `port`."""
    try:
        process = psutil.Process(pid)
        return any(
            connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
            for member in (process, *process.children(recursive=True))
            for connection in member.net_connections("tcp4")
        )
    except psutil.NoSuchProcess:
        return False


def _free_port() -> int:
    with socket.create_server((_HOST, 0)) as probe:
        return int(probe.getsockname()[1])
