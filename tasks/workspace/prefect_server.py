"""The Prefect server that a lone run starts for itself: spared by Ctrl-C in the terminal, and gone with the run.

Prefect's own would get the same Ctrl-C, and the run then tries for minutes to tell a dead server how it ended; it would
outlive a run that is killed; and it would take orders from any page and user, in the database that `make up` serves.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Self

from prefect.server.api.server import SubprocessASGIServer
from prefect.settings import (
    PREFECT_API_AUTH_STRING,
    PREFECT_FLOWS_HEARTBEAT_FREQUENCY,
    PREFECT_SERVER_API_AUTH_STRING,
    PREFECT_SERVER_CORS_ALLOWED_ORIGINS,
    get_current_settings,
    temporary_settings,
)

from ..node.processes import die_with_parent
from .credential import new_credential
from .home import HISTORY, Wrong, check_home, damage

_MOST_STARTS = 5  # Prefect starts a server that ends at once on another port, and again without end


class _OwnServer(SubprocessASGIServer):
    """Registers itself as the one server that this process uses, where no other is set."""

    def __new__(cls, port: int | None = None) -> Self:
        """In the place of Prefect's own, which it makes once anything asks for a server, and would give out here."""
        known = cls._instances.get(port)
        if known is not None and not isinstance(known, cls):
            known.stop()
            cls._instances.pop(port, None)
        return super().__new__(cls, port)

    def __init__(self, port: int | None = None) -> None:
        super().__init__(port)
        self._starts = 0

    def _run_uvicorn_command(self) -> subprocess.Popen[Any]:
        self._starts += 1
        if self._starts > _MOST_STARTS:
            raise RuntimeError(f"it ended {_MOST_STARTS} times at its start")
        return subprocess.Popen(
            [
                *(
                    sys.executable,
                    "-m",
                    "uvicorn",
                    "--factory",
                    "prefect.server.api.server:create_app",
                ),
                *(
                    "--host",
                    "127.0.0.1",
                    "--port",
                    str(self.port),
                    "--log-level",
                    "error",
                    "--lifespan",
                    "on",
                ),
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
    """Start it unless this process is given another server. It ends when this process does, however that ends.

    It obeys this process alone. Nobody there listens for the heartbeats of flows, and each flow that sends them takes a
    second more to end. Raises Wrong where it cannot start: without room on the disk Prefect would try for two minutes.
    """
    if get_current_settings().api.url is not None:
        yield
        return
    home = get_current_settings().home
    check_home(home)
    if said := damage(home / "prefect.db", thorough=False):
        raise Wrong(_not_started(home, f"its database is damaged ({said})"))
    with temporary_settings(
        updates={
            PREFECT_API_AUTH_STRING: _credential(),
            PREFECT_SERVER_API_AUTH_STRING: _credential(),
            PREFECT_SERVER_CORS_ALLOWED_ORIGINS: "http://127.0.0.1",  # no page is served; the default is any
            PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None,
        }
    ):
        try:
            _OwnServer().start()
        except RuntimeError as error:
            raise Wrong(_not_started(home, str(error))) from error
        yield


def _not_started(home: Path, why: str) -> str:
    if HISTORY in os.environ:
        return (
            f"Prefect's server for this run did not start: {why}. Nothing was measured or changed. It keeps the history"
            f" of runs where {HISTORY} or [shared] in srift.toml says: see that PostgreSQL answers there and has that"
            " database, and run the command again"
        )
    store = home / "prefect.db"
    return (
        f"Prefect's server for this run did not start: {why}. Nothing was measured or changed. What it keeps in {store}"
        " is the history of runs on Prefect's page and no more; to start without it, type\n"
        f"  mv {shlex.quote(str(store))} {shlex.quote(str(store.with_name('damaged-prefect.db')))}\n"
        "and run the command again"
    )


@cache
def _credential() -> str:
    """Of this process: its one server is started once."""
    return new_credential()
