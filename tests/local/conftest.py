"""The provider that the tests of real hosts use."""

from datetime import UTC, datetime

import pytest

from tasks.providers.local import catalogue as local_catalogue
from tasks.providers.local.cluster import LocalCluster
from tests.local.hosts import provider


@pytest.fixture
def local(tmp_path, monkeypatch):
    """A provider on a machine that says it is large: other hosts of this machine are none of the
    test's business.
    """
    monkeypatch.setattr(local_catalogue, "most_cores", lambda: 64.0)
    made = provider(tmp_path)
    yield made
    made.reap(datetime.max.replace(tzinfo=UTC))


@pytest.fixture
def clusters(monkeypatch):
    """Every cluster from its acquisition on."""
    made, init = [], LocalCluster.__init__

    def noted(self, *arguments, **named):
        init(self, *arguments, **named)
        made.append(self)

    monkeypatch.setattr(LocalCluster, "__init__", noted)
    return made
