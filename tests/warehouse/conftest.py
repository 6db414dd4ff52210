"""A fresh, migrated warehouse for each test."""

import pytest

from tests.warehouse.builders import fresh


@pytest.fixture
def warehouse(tmp_path):
    return fresh(tmp_path)
