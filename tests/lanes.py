"""Two lanes for the tests: those that run on machines of the test's own, one after the other, and all others by file.

Hosts of two tests at once would not fit this machine, and each would be measured while the other computes.
"""

from __future__ import annotations

import pytest
from xdist.scheduler import LoadGroupScheduling

MACHINES = "machines"  # the group of `pytest.mark.xdist_group` in files whose tests start hosts


class Lanes(LoadGroupScheduling):
    """What belongs to a group stays together, and so does a file, whose fixtures are then made once."""

    def _split_scope(self, nodeid: str) -> str:
        return str(super()._split_scope(nodeid)).partition("::")[0]


def longest_first(item: pytest.Item) -> int:
    """Where an item stands: machines before other processes, those before what only computes."""
    if any(mark.args == (MACHINES,) for mark in item.iter_markers("xdist_group")):
        return 0
    return 1 if item.get_closest_marker("local") else 2
