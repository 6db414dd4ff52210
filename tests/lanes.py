"""Which tests stay together when several processes share them: a file's, and all that start hosts.

Hosts of two tests at once would not fit this machine's cores.
"""

from pathlib import Path

from xdist.scheduler import LoadFileScheduling

STARTING = """
test_failures.py test_local_endings.py test_local_provider.py test_cut_short.py
test_placement.py test_elastic.py test_end_to_end.py
"""
HOSTS = STARTING.split()


def lane(path):
    """What the tests of the file at `path` stay together with: "hosts", or the file alone."""
    file = Path(path)
    return "hosts" if file.parent.name == "local" and file.name in HOSTS else path


def order_of(item):
    """Where an item stands: what takes longest and cannot be divided comes first, then what waits
    for processes.
    """
    if lane(str(item.path)) == "hosts":
        return HOSTS.index(item.path.name)
    return len(HOSTS) if item.get_closest_marker("local") else len(HOSTS) + 1


class Lanes(LoadFileScheduling):
    """Hands out files in the order in which they were collected, hosts' tests to one process."""

    def _split_scope(self, nodeid):
        return lane(str(super()._split_scope(nodeid)))
