import os

import pytest
from prefect import flow

from flows.spread import each_by_task


def _negated(value):
    return -value, os.getpid()


@flow
def _spread():
    """Results and process ids from threads, then from processes."""
    return [each_by_task("", processes=own)(_negated, range(4)) for own in (False, True)]


@pytest.mark.slow
@pytest.mark.local
def test_results_come_in_order_from_threads_and_from_processes(own_environment):
    for found, here in zip(_spread(), (True, False), strict=True):
        numbers, places = zip(*found, strict=True)
        assert numbers == (0, -1, -2, -3)
        assert (os.getpid() in places) is here
