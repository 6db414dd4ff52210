"""A fresh, migrated warehouse for each test."""

from pathlib import Path

import pytest

from tests.warehouse.builders import fresh
from warehouse.database import Warehouse


@pytest.fixture
def warehouse(tmp_path: Path) -> Warehouse:
    return fresh(tmp_path)
