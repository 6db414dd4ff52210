"""Which tests stay together when several processes share them: a file's, and all that start hosts
of the same kind.

Hosts of two tests at once would not fit this machine's cores; those of the emulated EC2 have no
share of them.
"""

from pathlib import Path

from xdist.scheduler import LoadFileScheduling

EMULATED = ("test_emulated_ec2.py",)
STARTING = """
test_failures.py test_local_endings.py test_local_provider.py test_cut_short.py
test_placement.py test_elastic.py test_end_to_end.py
"""
HOSTS = STARTING.split()


def lane(path):
    """What the tests of the file at `path` stay together with: "emulated", "hosts", or the file
    alone.
    """
    if Path(path).parent.name == "local":
        for name, files in (("emulated", EMULATED), ("hosts", HOSTS)):
            if Path(path).name in files:
                return name
    return path


def order_of(item):
    """Where an item stands: what takes longest and cannot be divided comes first, then what waits
    for processes.
    """
    first = (*EMULATED, *HOSTS)
    if lane(str(item.path)) in ("emulated", "hosts"):
        return first.index(item.path.name)
    return len(first) if item.get_closest_marker("local") else len(first) + 1


class Lanes(LoadFileScheduling):
    """Hands out files in the order in which they were collected, hosts' tests to one process."""

    def _split_scope(self, nodeid):
        return lane(str(super()._split_scope(nodeid)))
