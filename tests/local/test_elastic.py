"""An elastic run on real hosts that loses one: it goes on, without it or with another, from its
newest checkpoint.
"""

import math
import time
from dataclasses import replace
from datetime import UTC, datetime

import pytest

from models.domain.cluster import Cluster
from tasks.execution.collect import collect
from tasks.execution.session import serve
from tasks.providers.local import catalogue as local_catalogue
from tests.local.hosts import left_over
from tests.local.test_failures import PROJECT, TINY, here, job, laid_out, needs_two_hosts
from tests.warehouse.builders import NOON, TYPES, write
from warehouse.append import note_instance_types

pytestmark = [pytest.mark.local, pytest.mark.slow]

STEPS, EVERY = 400, 20
# a step is to take longer than the controller's look at the host
SLOW = TINY.replace("import torch", "import time\nimport torch").replace(
    "        return torch.randn", "        time.sleep(0.02)\n        return torch.randn"
)


@pytest.fixture
def project(tmp_path, monkeypatch, outcome):
    replaced = str(outcome == "replaced").lower()
    stated = f"usd_per_hour = 0.05\nspot_usd_per_hour = 0.02\nspot_replaced = {replaced}"
    # other hosts of this machine do not matter here
    monkeypatch.setattr(local_catalogue, "most_cores", lambda: 64.0)
    yield from laid_out(tmp_path, monkeypatch, PROJECT.replace("usd_per_hour = 0.05", stated), SLOW)


@needs_two_hosts
@pytest.mark.parametrize("outcome", ["fewer", "replaced"])
def test_a_lost_host_costs_the_steps_since_the_last_checkpoint_and_no_more(
    project, clusters, outcome
):
    installation, lost = here(project), []
    write(installation.warehouse, note_instance_types, TYPES, noted_at=NOON)

    def watch(run_id, _done, _usd):
        """Take the second host away once five checkpoints were written."""
        written = [*(clusters[0].checkpoints / run_id).glob("step-*.json")]
        if len(written) >= 5 and not lost:
            lost.append(clusters[0].revoke(1))

    is_replaced = outcome == "replaced"
    run = {"kind": "elastic", "most_steps": STEPS, "checkpoint_every": EVERY}
    run["wait_s"] = 30.0 if is_replaced else 1.0
    offers = {offer.market: offer for offer in installation.provider.offers(datetime.now(UTC))}
    cluster = Cluster(members=(offers["on-demand"], offers["spot"]))
    request = replace(job(installation, 2, {"run": run}, SLOW), cluster=cluster)
    seen = serve(installation.provider, request, stop_at=time.monotonic() + 100.0, watch=watch)
    assert seen.outcome == "finished" and seen.rows == [], seen.outcome
    assert left_over(installation.home) == []
    collect(installation, datetime.now(UTC))
    body = installation.warehouse.select("raw_runs", {"kind": "elastic"}).iloc[0]
    first, second = body["starts"]
    assert (first["step"], list(first["nodes"]), list(first["batches"])) == (0, [0, 1], [8, 8])
    assert list(second["nodes"]) == ([0, 1] if is_replaced else [0])
    assert sum(second["batches"]) == 16
    assert second["micro_steps"] == (1 if is_replaced else 2)
    written = body["checkpoints"]
    before = [
        checkpoint["step"]
        for checkpoint in written
        if checkpoint["ended_unix"] < second["began_unix"]
    ]
    assert second["step"] == max(before)
    assert 5 * EVERY <= second["step"] < STEPS and 0 <= second["lost_steps"] < EVERY
    assert [checkpoint["step"] for checkpoint in written] == list(range(EVERY, STEPS + 1, EVERY))
    assert math.isfinite(body["last_loss"])
    [restart] = installation.warehouse.select("restarts", {"provider": "local"}).to_dict("records")
    assert restart["outcome"] == outcome and 1 < restart["seconds"] < 60
    assert restart["restore_bytes"] > 0
    machines = installation.warehouse.select("machines").sort_values(["node", "number"])
    assert machines["interrupted"].tolist() == [False, True, *[False] * is_replaced]
    assert machines[machines["number"] == 0]["startup_s"].gt(0).all()
