from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tasks.providers.ec2.cluster import Ec2Cluster
from tests.ec2_home import Home
from tests.fake_ec2 import FakeAws


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path)


@pytest.fixture
def aws(home: Home) -> FakeAws:
    return home.world


@pytest.fixture
def running(home: Home) -> Iterator[Ec2Cluster]:
    """Two machines of lease r-1."""
    with home.acquire(home.two()) as cluster:
        yield cluster
