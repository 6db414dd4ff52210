"""How a worker ends: a full mailbox, a lost peer, and a fault of the workload are distinguished."""

import pytest
import torch.distributed as dist

from tasks.node import launch, worker
from tasks.node.processes import EXIT_ITEM_FAILED, EXIT_LOST_PEER
from tasks.node.record import CPU, Devices, Item
from tests.tasks.node.conftest import Left, plan, records

pytestmark = pytest.mark.usefixtures("ends")

ITEM = Item(run_id="late", kind="train", nodes=[0, 1], devices=[2, 1], workload="w", batches=[2, 2])


class Store(dict[str, str]):
    """The launch's: a dictionary, or gone."""

    is_gone = False

    def set(self, key, value):
        self[key] = value

    def check(self, _keys):
        if self.is_gone:
            raise dist.DistNetworkError("failed to send")
        return True


def aborted(number, mailbox, store, error):
    mine = object.__new__(launch.Launch)  # without its peers
    mine.mailbox, mine.plan = mailbox, plan(ITEM, ranks=[0, 1])
    mine.rank, mine.node, mine.store, mine.started_unix = number, number // 2, store, 0.0
    mine.devices = {n: Devices(name=name, count=1) for n, name in enumerate(("NVIDIA L4", CPU))}
    with pytest.raises(Left) as left:
        worker.abort(mine, ITEM, error)
    return int(left.value.args[0])


@pytest.mark.parametrize(
    ("number", "node", "label"), [(0, "node-0", "node 0 device 0"), (2, "node-1", "node 1")]
)
def test_a_rank_that_fails_writes_the_record_and_the_first_one_wakes_the_others(
    tmp_path, number, node, label
):
    store, reason = Store(), "Connection closed by peer"  # in the workload's words
    assert aborted(number, tmp_path, store, ValueError(reason)) == EXIT_ITEM_FAILED
    (found,) = records(tmp_path).items()
    assert (found[0], found[1]["reason"]) == (f"{node}/late", f"{label}: ValueError: {reason}")
    assert store == ({"late": "abort"} if number == 0 else {})


def test_a_rank_that_lost_a_peer_or_the_store_blames_nobody(tmp_path):
    store, gone = Store(), Store()
    gone.is_gone = True
    closed = RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.2]")
    for error in (closed, dist.DistNetworkError("failed to recv, got 0 bytes")):
        assert aborted(0, tmp_path, store, error) == EXIT_LOST_PEER
    assert aborted(2, tmp_path, gone, ValueError("row 17")) == EXIT_LOST_PEER
    assert not records(tmp_path) and store == {"late": "abort"}
