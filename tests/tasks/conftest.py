import pytest

from tests.installed import install


@pytest.fixture
def here(tmp_path):
    """An installation with an empty warehouse."""
    return install(tmp_path)
