import pytest

from tests.ec2_home import Home


@pytest.fixture
def home(tmp_path):
    return Home(tmp_path)


@pytest.fixture
def aws(home):
    return home.world


@pytest.fixture
def running(home):
    """Two machines of lease r-1."""
    with home.acquire() as cluster:
        yield cluster
