"""A lone run has a server of its own and sends it no heartbeats; one that is told of a server sends them there."""

from __future__ import annotations

import pytest
from prefect.settings import PREFECT_API_URL, get_current_settings, temporary_settings

from tasks import own_server


@pytest.mark.parametrize("url", [None, "http://127.0.0.1:4200/api"])
def test_heartbeats_go_where_somebody_listens(url: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[object] = []
    monkeypatch.setattr(own_server._OwnServer, "start", lambda self: started.append(self))
    with temporary_settings(updates={PREFECT_API_URL: url}):
        with own_server.own_server():
            listened = get_current_settings().flows.heartbeat_frequency is not None
            assert (len(started), listened) == ((1, False) if url is None else (0, True))
        assert get_current_settings().flows.heartbeat_frequency is not None, "this program goes on as before"
