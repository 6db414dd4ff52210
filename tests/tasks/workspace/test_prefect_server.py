"""The Prefect server of a single command: who may ask it, and when it ends."""

import os

import httpx
import psutil
import pytest
from prefect.settings import PREFECT_API_URL, PREFECT_HOME, get_current_settings, temporary_settings
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from tasks.workspace import prefect_server
from tasks.workspace.home import Wrong


def test_a_server_that_ends_at_its_start_fails_the_command(tmp_path, monkeypatch):
    monkeypatch.setattr(prefect_server, "_free_port", lambda: 4299)
    monkeypatch.setattr(prefect_server.sys, "executable", "/bin/false")
    with (
        temporary_settings({PREFECT_API_URL: None, PREFECT_HOME: tmp_path}),
        pytest.raises(Wrong),
        prefect_server.local_server(),
    ):
        pass


def answer(url, credential=":", **headers):
    user, _, password = credential.partition(":")
    with httpx.Client(trust_env=False, timeout=60, auth=(user, password)) as client:
        return client.post(f"{url}/flows/filter", json={}, headers=headers)


@pytest.mark.local
def test_the_server_obeys_this_process_alone_and_ends_with_it(tmp_path):
    with temporary_settings({PREFECT_API_URL: None, PREFECT_HOME: tmp_path}):
        with prefect_server.local_server():
            api = get_current_settings().api
            url, secret = str(api.url), api.auth_string
            for credential in (":", "srift:wrong"):
                assert answer(url, credential).status_code == 401
            found = answer(url, secret.get_secret_value(), Origin="https://evil.example")
            assert found.is_success and "access-control-allow-origin" not in found.headers
            events = url.replace("http", "ws", 1) + "/events/out"
            with pytest.raises(InvalidStatus), connect(events):
                pass
            with connect(events, subprotocols=["prefect"]) as stranger:
                stranger.send('{"type": "auth", "token": "srift:wrong"}')
                with pytest.raises(ConnectionClosed):
                    stranger.recv(timeout=30)
            children = psutil.Process().children()
            [server] = (child for child in children if "prefect" in " ".join(child.cmdline()))
            assert secret.get_secret_value() not in " ".join(server.cmdline())
            assert secret.get_secret_value() not in os.environ.values()
        assert not server.is_running()


def test_a_server_that_the_operator_names_is_used(monkeypatch):
    monkeypatch.setattr(prefect_server.subprocess, "Popen", lambda *_, **__: pytest.fail())
    url = "http://127.0.0.1:4200/api"
    with temporary_settings({PREFECT_API_URL: url}), prefect_server.local_server():
        assert get_current_settings().api.url == url
