"""What a machine is, as its kernel tells it."""

import os

from tasks.node import machine


def test_two_threads_of_one_core_count_once_and_only_what_may_be_used(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "_CPUS", tmp_path)
    for thread in range(8):  # four cores, thread t beside t + 4
        file = tmp_path / f"cpu{thread}" / "topology" / "thread_siblings_list"
        file.parent.mkdir(parents=True)
        file.write_text(f"{thread % 4},{thread % 4 + 4}\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    assert machine.cores() == 4
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 4, 5})
    assert machine.cores() == 2
