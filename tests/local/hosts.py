"""What the tests of real hosts share: a provider with stand-in agents, and jobs for its hosts."""

import json
import os
import sys
import threading
import time
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

import psutil
import pytest

from models.domain.cluster import Cluster
from tasks.providers.local import cpu_shares as local_cpu
from tasks.providers.local.leases import LeaseStore
from tasks.providers.local.network import detect
from tasks.providers.local.processes import hosts
from tasks.providers.local.provider import LocalProvider
from tasks.providers.local.settings import LocalInstanceType

HERE = Path(__file__).parent
ISOLATION = detect()
SHARES = local_cpu.detect()
SHARE = 1.0 if SHARES.why_not else 0.3  # whole cores are all that an ordinary user can enforce
needs_network = pytest.mark.skipif(
    not ISOLATION.namespaces, reason=f"no namespaces: {ISOLATION.why_not}"
)
needs_quota = pytest.mark.skipif(bool(SHARES.why_not), reason=f"no CPU quotas: {SHARES.why_not}")


def instance_type(**changes):
    stated = {"cores": SHARE, "memory_gib": 1.0, "bandwidth_gbps": 0.2, "usd_per_hour": 0.036}
    return LocalInstanceType(spot_usd_per_hour=0.018, **stated | changes)


TYPES = {
    "narrow": instance_type(),
    "tenth": instance_type(cores=0.1),
    "wide": instance_type(bandwidth_gbps=1.0),
    "replaced": instance_type(spot_replaced=True),
}


def provider(home, agent=HERE / "standin/node"):
    return LocalProvider(home, TYPES, agent, sys.executable)


def cluster(local, *names):
    offers = local.offers(datetime.now(UTC))
    sold = {offer.instance_type.name: offer for offer in offers if offer.market == "on-demand"}
    return Cluster(members=tuple(sold[name] for name in names))


@contextmanager
def acquired(local, *names, lease_id="lease"):
    """Acquire hosts that have reported themselves."""
    hosts = cluster(local, *names)
    with local.acquire(
        hosts, lease_id=lease_id, deadline_s=600, seed=1, max_usd_per_hour=1e9
    ) as running:
        ready(running)
        yield running


def wait_for(answer, within_s=60.0, why=lambda: ""):
    until = time.monotonic() + within_s
    while not (value := answer()):
        assert time.monotonic() < until, f"not within {within_s} s: {why() or answer}"
        threading.Event().wait(0.01)
    return value


def ready(running):
    nodes = range(len(running.addresses))
    files = [running.mailbox / f"node-{node}/ready.json" for node in nodes]
    wait_for(lambda: all(file.exists() for file in files))
    return [json.loads(file.read_text()) for file in files]


def post(running, node, **job):
    """Give a node its next job; return the file of the answer."""
    folder = running.mailbox / f"node-{node}"
    number = len(list(folder.glob("job-*.json")))
    (folder / ".job").write_text(json.dumps(job))  # or the agent may read half of it
    (folder / ".job").rename(folder / f"job-{number}.json")
    return folder / f"answer-{number}.json"


def ask(running, node, **job):
    answer = post(running, node, **job)
    wait_for(answer.exists)
    return json.loads(answer.read_text())


def best(measure, enough):
    """Return the highest of up to fifteen tries: a busy machine only reduces a rate or a share."""
    highest = 0.0
    for _ in range(15):
        highest = max(highest, measure())
        if highest >= enough:
            break
    return highest


def rate_gbps(running, sender, receiver):
    size = 10_000_000
    answer = ask(running, sender, kind="send", address=running.addresses[receiver], count=size)
    return size * 8 / answer["seconds"] / 1e9


def share(running):
    return ask(running, 0, kind="burn", seconds=0.6)["share"]


def left_over(of):
    """What should not be there after an end: processes that name this home, marked hosts, CPU
    groups.
    """
    home = of if isinstance(of, Path) else of.store.root.parent
    store = LeaseStore(home)
    found = [str(mark) for mark in hosts() if mark.home == store.token]
    found += [group.name for group in SHARES.base.glob(f"{store.prefix}*")]
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            words = [*process.environ().values(), *process.cmdline()]
            if process.pid != os.getpid() and any(str(home) in word for word in words):
                found.append(f"process {process.pid}: {' '.join(process.cmdline()[:5])}")
    return found


def links():
    return sorted(os.listdir("/sys/class/net"))
