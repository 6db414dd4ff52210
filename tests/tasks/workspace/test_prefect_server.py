"""A lone run has a server of its own, which obeys nobody else and gets no heartbeats; another server gets them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prefect.server.api.server import SubprocessASGIServer
from prefect.settings import PREFECT_API_URL, PREFECT_HOME, get_current_settings, temporary_settings

from tasks.doctor.report import refuse_unless_well
from tasks.workspace import prefect_server as own_server
from tasks.workspace.home import Wrong
from tests.installed import install


@pytest.mark.parametrize("url", [None, "http://127.0.0.1:4200/api"])
def test_heartbeats_go_where_somebody_listens(
    url: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[object] = []
    monkeypatch.setattr(own_server._OwnServer, "start", lambda self: started.append(self))
    with temporary_settings(updates={PREFECT_API_URL: url}):
        with own_server.own_server():
            listened = get_current_settings().flows.heartbeat_frequency is not None
            assert (len(started), listened) == ((1, False) if url is None else (0, True))
        assert get_current_settings().flows.heartbeat_frequency is not None, (
            "this program goes on as before"
        )


def test_it_takes_the_place_of_the_server_that_prefect_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[object] = []
    monkeypatch.setattr(SubprocessASGIServer, "_instances", {})
    monkeypatch.setattr(own_server._OwnServer, "start", lambda self: started.append(self))
    others = SubprocessASGIServer()  # as any question to Prefect makes it, one that failed too
    with temporary_settings(updates={PREFECT_API_URL: None}), own_server.own_server():
        assert started == [SubprocessASGIServer()] != [others]


def test_its_server_obeys_this_process_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    environments: list[dict[str, str]] = []

    def started(line: list[str], env: dict[str, str], **_: Any) -> None:
        lines.extend(line)
        environments.append(env)

    monkeypatch.setattr(own_server.subprocess, "Popen", started)
    monkeypatch.setattr(own_server._OwnServer, "start", own_server._OwnServer._run_uvicorn_command)
    twice = (
        own_server.own_server(),
        own_server.own_server(),
    )  # in one process the second changes nothing
    with temporary_settings(updates={PREFECT_API_URL: None}), twice[0], twice[1]:
        known = get_current_settings().api.auth_string
        assert known is not None
    credential = known.get_secret_value()
    assert len(environments) == 2
    for environment in environments:
        assert environment["PREFECT_SERVER_API_AUTH_STRING"] == credential and len(credential) > 40
        assert "*" not in environment["PREFECT_SERVER_API_CORS_ALLOWED_ORIGINS"]
    assert not any(credential in word for word in lines) and credential not in os.environ.values()


def test_a_server_that_ends_at_its_start_is_not_started_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts: list[object] = []

    class Ended:
        returncode = 3

        def __init__(self, *words: object, **_: object) -> None:
            starts.append(words)
            assert len(starts) < 50, "it is started for ever"

        def poll(self) -> int:
            return self.returncode

        terminate = wait = kill = lambda self, *_, **__: None

    monkeypatch.setattr(own_server.subprocess, "Popen", Ended)
    monkeypatch.setattr(own_server._OwnServer, "find_available_port", lambda self: 4299)
    with (
        temporary_settings(updates={PREFECT_API_URL: None, PREFECT_HOME: tmp_path}),
        pytest.raises(Wrong, match=r"did not start: it ended 5 times.*prefect.db"),
        own_server.own_server(),
    ):
        pass
    assert len(starts) == 5


def test_a_refresh_is_refused_where_its_home_has_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=2**20))
    settings = install(tmp_path).settings
    for provider, max_usd in (("local", None), ("ec2", 0.0)):
        with pytest.raises(Wrong, match="1 MiB are left"):
            refuse_unless_well(settings, provider, max_usd)
