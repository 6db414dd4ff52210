"""The Prefect server that a lone run starts for itself: spared by Ctrl-C in the terminal, and gone with the run.

Prefect's own would get the same Ctrl-C, and the run then tries for minutes to tell a dead server how it ended; and it
would outlive a run that is killed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from prefect.server.api.server import SubprocessASGIServer
from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY, get_current_settings, temporary_settings

from .node.processes import die_with_parent


class _OwnServer(SubprocessASGIServer):
    """Registers itself as the one server that this process uses, where no other is set."""

    def _run_uvicorn_command(self) -> subprocess.Popen[Any]:
        return subprocess.Popen(
            [
                *(sys.executable, "-m", "uvicorn", "--factory", "prefect.server.api.server:create_app"),
                *("--host", "127.0.0.1", "--port", str(self.port), "--log-level", "error", "--lifespan", "on"),
            ],
            env={
                **os.environ,
                "PREFECT_UI_ENABLED": "0",
                "PREFECT__SERVER_EPHEMERAL": "1",
                "PREFECT__SERVER_FINAL": "1",
                **get_current_settings().to_environment_variables(exclude_unset=True),
            },
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )


@contextmanager
def own_server() -> Iterator[None]:
    """Start it unless this process is told of another server. It ends when this process does, however that ends.

    Nobody there listens for the heartbeats of flows, and each flow that sends them takes a second more to end.
    """
    if get_current_settings().api.url is not None:
        yield
        return
    _OwnServer().start()
    with temporary_settings(updates={PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}):
        yield
