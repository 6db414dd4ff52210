"""The provider that the tests of real hosts use."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tasks.providers.local import catalogue as local_catalogue
from tasks.providers.local.provider import LocalProvider
from tests.local.hosts import provider


@pytest.fixture
def local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalProvider]:
    """A provider on a machine that says it is large: other hosts of this machine are none of the
    test's business.
    """
    monkeypatch.setattr(local_catalogue, "most_cores", lambda: 64.0)
    made = provider(tmp_path)
    yield made
    made.reap(datetime.now(UTC), all_of_them=True)
