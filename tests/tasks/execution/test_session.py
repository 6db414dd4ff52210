"""Whatever ends a launch: records stay, runs without one get a row, and machines are released."""

import os
from dataclasses import replace
from types import SimpleNamespace

import pytest

from models.domain.cluster import Cluster
from tasks.execution.mailbox import read_object
from tasks.execution.session import serve
from tasks.node.processes import EXIT_NO_DEVICE
from tasks.node.record import Item, WorkloadFile
from tasks.providers.base import NodeState, ProviderError
from tasks.workspace.sources import file_source
from tests.fakes import (
    FakeProvider,
    armed,
    fails,
    fast,
    finished,
    job_of,
    offer,
    ready,
    reported,
)

KILLED = {"exit_code": 1, "worker_exit_code": -9}
LOST_PEER = {"exit_code": 1, "worker_exit_code": 4}
FAULT = {"exit_code": 1, "worker_exit_code": 3, "reason": "row 17 is not a number"}
NO_MODULE = {"exit_code": 1, "worker_exit_code": 1, "reason": "no module named torch"}
FULL = {"exit_code": 1, "worker_exit_code": 5, "reason": "No space left"}
NO_DEVICE = {"exit_code": EXIT_NO_DEVICE, "worker_exit_code": EXIT_NO_DEVICE, "reason": "no GPU"}
TAKEN = NodeState(alive=False, interrupted=True, reason="taken")


def item(run_id, **changes):
    """Runs s and t are for the first of two machines, all others for both."""
    nodes = [0] if run_id in "st" else [0, 1]
    whole = {"kind": "train", "nodes": nodes, "workload": "tiny", "batches": [8] * len(nodes)}
    return Item(run_id=run_id, **whole | changes)  # type: ignore[arg-type]


def job(runs="abc", **changes):
    return job_of([item(run_id) for run_id in runs], **changes)


def serve_fast(provider, of, stop_at=100.0):
    return serve(provider, of, stop_at=stop_at, watch=lambda *_: None, clock=fast())


def launch(home, of, *script, stop_at=1000.0, **provider):
    """Serve a job by a script; return what became of it, with the controller's rows on disk."""
    fake = FakeProvider(home, script, **provider)
    served = serve_fast(fake, of, stop_at)
    assert fake.held == [] and [lease.outcome for lease in fake.over] == ["released"]
    mailbox = fake.over[0].mailbox
    plan, setups = (
        read_object(mailbox / name) or {} for name in ("plan.json", "controller/envelopes.json")
    )
    rows = [read_object(file) or {} for file in sorted(mailbox.glob("controller/rows/*.json"))]
    assert {row["run_id"] for row in rows} == {row["run_id"] for row in served.rows}
    return SimpleNamespace(
        served=served,
        cluster=fake.clusters[0],
        plan=plan,
        setups=setups,
        rows=[f"{row['run_id']} {row['status']} {row['reason']}" for row in rows],
        runs="".join(entry["run_id"] for entry in plan.get("items", ())),
    )


def becomes(node, state):
    def step(cluster):
        cluster.states = [state if n == node else old for n, old in enumerate(cluster.states)]

    return step


def noticed(leaving_s):
    return becomes(1, NodeState(alive=True, leaving_s=leaving_s))


def silent(seconds):
    """Node 1 sent its last heartbeat so many seconds before 1970, the time of the fake cluster."""
    return lambda cluster: (
        cluster.say("heartbeat.json", 1),
        os.utime(cluster.mailbox / "node-1/heartbeat.json", (-seconds, -seconds)),
    )


def sells_a_machine(cluster):
    cluster.for_sale = 1


def at(run_id, attempt=1):
    return lambda cluster: cluster.everyone("progress.json", attempt=attempt, run_id=run_id)


def first(name):
    return lambda cluster: cluster.say(name, 0)


def new(node):
    return lambda cluster: cluster.say("ready.json", node, address=cluster.addresses[node])


def waits(polls):
    """So many polls (a tenth of a second each) in which nothing happens."""
    return [lambda _: None] * polls


def failed(run_id):
    return lambda cluster: cluster.report(run_id, status="failed")


GONE = "node 1: taken"
GIVEN_UP = f"{GONE}; all remaining runs need the machine, and no other machine is available"
SIGKILL = "node 1: its rank was killed (SIGKILL): out of memory, or killed by a user"
LATE = "node 1 did not report itself within 60 s"
NOTICE = "node 1 got an interruption notice and ends in 8 s"
NO_TORCH = "node 0: no module named torch"
GOES = (ready, armed(1))
HALF_HERE = (first("ready.json"), *waits(610), first("armed-1.json"))

# By name: runs, script, runs with a record, the row of another, and the runs of the last attempt.
ENDS = {
    "all goes well": ("abc", [*GOES, reported(*"abc")], "abc", "", "abc"),
    "three attempts that die before any run are one row of the launch": (
        "abc",
        [ready, *(finished(attempt, **NO_MODULE) for attempt in (1, 2, 3))],
        "",
        f"r-00-launch failed {NO_TORCH}",
        "abc",
    ),
    "nodes name the run, and a silent one is not waited for": (
        "abc",
        [*GOES, finished(1, 0, run_id="b", **FAULT), *waits(60), armed(2), reported(*"ac")],
        "ac",
        f"b failed node 0: {FAULT['reason']}",
        "ac",
    ),
    "a record that the disk refused ends the launch": (
        "abc",
        [*GOES, reported("a"), finished(1, 0, run_id="b", **FULL)],
        "a",
        "b failed node 0: No space left",
        "abc",
    ),
    "a machine that is taken away interrupts the run under way": (
        "abc",
        [*GOES, reported("a"), becomes(1, TAKEN)],
        "a",
        f"b interrupted {GIVEN_UP}",
        "abc",
    ),
    "a machine is lost once it has been silent for half a minute": (
        "ab",
        [*GOES, silent(25), reported("a"), silent(35)],
        "a",
        f"b failed node 1 fell silent{GIVEN_UP.removeprefix(GONE)}",
        "ab",
    ),
    "a peer's own record of a loss leaves the next run unblamed": (
        "abc",
        [*GOES, at("a"), lambda c: (failed("a")(c), becomes(1, TAKEN)(c))],
        "a",
        f"r-00-launch interrupted {GIVEN_UP}",
        "abc",
    ),
    "peers of a lost machine are not blamed before its provider answers": (
        "b",
        [*GOES, finished(1, 0, run_id="b", **LOST_PEER), *waits(300), becomes(1, TAKEN)],
        "",
        f"b interrupted {GIVEN_UP}",
        "b",
    ),
    "a machine that never boots costs only what needs it": (
        "sb",
        [*HALF_HERE, reported("s")],
        "s",
        f"r-00-launch failed {LATE}",
        "s",
    ),
    "a notice lets a short run end, and acts before the machine is gone": (
        "bdt",
        [
            *GOES,
            at("b"),
            noticed(100.0),
            reported("b"),
            at("d"),
            noticed(8.0),
            first("armed-2.json"),
            reported("t"),
        ],
        "bt",
        f"d interrupted {NOTICE}",
        "t",
    ),
    "a notice counts only the seconds that the run still needs": (
        "b",
        [*GOES, at("b"), *waits(50), noticed(14.0), reported("b")],
        "b",
        "",
        "b",
    ),
}


@pytest.mark.parametrize("name", ENDS)
def test_an_end_costs_what_it_hit_and_no_more(tmp_path, name):
    runs, script, *expected = ENDS[name]
    seen = launch(tmp_path, job(runs), *script)
    recorded = "".join(sorted(seen.served.recorded))
    assert [recorded, "\n".join(seen.rows), seen.runs] == expected


def test_a_killed_rank_costs_its_run_and_shares_are_in_force_while_it_measures(tmp_path):
    hit = (finished(1, 0, run_id="b", **LOST_PEER), finished(1, 1, run_id="b", **KILLED))
    costly = job(download_usd=7.0)
    seen = launch(tmp_path, costly, *GOES, reported("a"), *hit, armed(2), reported("c"))
    assert seen.cluster.download_usd == 7.0
    assert (seen.served.recorded, seen.runs) == (set("ac"), "c")
    assert seen.rows == [f"b failed {SIGKILL}"]
    assert seen.cluster.settled == [True, False, True] and seen.served.outcome == "finished"
    assert {setup["image_id"] for setup in seen.setups.values()} == {"ami-1"}


@pytest.mark.parametrize("script", [(), (*GOES, reported("a"))])
def test_when_the_time_is_up_runs_that_are_left_get_no_row(tmp_path, script):
    seen = launch(tmp_path, job(), *script, stop_at=30.0)
    assert seen.rows == [] and seen.served.outcome.startswith("time: ")


def test_ctrl_c_leaves_a_row_of_the_run_under_way_and_releases_the_machines(tmp_path):
    provider = FakeProvider(tmp_path, [*GOES, reported("a"), fails(KeyboardInterrupt())])
    with pytest.raises(KeyboardInterrupt):
        serve_fast(provider, job())
    [lease] = provider.over
    assert provider.held == [] and (lease.mailbox / "done.json").exists()
    row = read_object(lease.mailbox / "controller/rows/b.json") or {}
    assert row["status"] == "interrupted" and "KeyboardInterrupt" in row["reason"]


def test_a_full_disk_fails_the_launch_and_names_the_command_that_ends_machines(tmp_path):
    full = OSError(28, "No space left on device")
    seen = serve_fast(FakeProvider(tmp_path, (), acquired=fails(full)), job())
    assert "No space left" in seen.outcome and "srift reap" in seen.rows[0]["reason"]


def test_an_error_after_a_loss_hides_no_row(tmp_path):
    stays = fails(ProviderError("a machine did not end"))
    lost = (*GOES, reported("s"), becomes(1, TAKEN), stays)
    seen = launch(tmp_path, job("st"), *lost)
    about_launch = [row.split()[1] for row in seen.rows if row.startswith("r-00-launch")]
    assert sorted(about_launch) == ["failed", "interrupted"]


def test_a_refusal_is_one_row_and_no_failure(tmp_path):
    provider = FakeProvider(tmp_path, refusal="others hold the cores")
    seen = serve_fast(provider, job())
    assert seen.mailbox is None and seen.outcome.startswith("refused: ")
    assert [(row["run_id"], row["status"]) for row in seen.rows] == [("r-00-refused", "refused")]


def test_another_machine_takes_the_place_and_the_interrupted_run_is_tried_again(tmp_path):
    lost = (sells_a_machine, *GOES, at("b"), becomes(1, TAKEN))
    found = launch(tmp_path / "a", job("b"), *lost, new(1), armed(3), reported("b"))
    assert found.rows == [f"r-00-launch interrupted {GONE}"]
    assert (found.served.recorded, found.cluster.replaced) == ({"b"}, [1])
    assert found.plan["addresses"][1] == "10.0.1.1" and found.plan["ranks"] == [0, 1]


def test_no_machine_is_requested_without_need_or_time(tmp_path):
    idle = (sells_a_machine, *GOES, reported("s"), becomes(1, TAKEN), reported("t"))
    alone = launch(tmp_path / "a", job("st"), *idle)  # leaves the attempt alone
    assert (alone.served.recorded, alone.runs, alone.cluster.replaced) == ({*"st"}, "st", [])
    assert alone.rows == [f"r-00-launch interrupted {GONE}"]
    late = launch(tmp_path / "b", job("b"), sells_a_machine, *GOES, becomes(1, TAKEN), stop_at=10.0)
    assert late.cluster.replaced == [] and "too little time" in late.rows[0]


def test_a_machine_without_its_devices_fails_its_runs_and_the_others_go_on(tmp_path):
    lacking = (finished(1, 1, **NO_DEVICE), finished(1, 0, **LOST_PEER))
    rest = (first("armed-2.json"), reported("s", "t"))
    seen = launch(tmp_path, job("bst"), ready, failed("b"), *lacking, *rest)
    assert (seen.plan["attempt"], seen.plan["ranks"], seen.runs) == (2, [0], "st")
    assert seen.served.recorded == set("bst") and seen.rows == [] and seen.served.unavailable


@pytest.mark.parametrize("got_usd, measured", [(3.6, 1), (36.0, 0)])
def test_on_dearer_machines_than_requested_the_money_ends_sooner(tmp_path, got_usd, measured):
    def dearer(cluster):
        cluster.cluster = Cluster.of((2, offer(got_usd)))

    script = (*GOES, *waits(200), reported("b"))
    seen = launch(tmp_path, job("b"), *script, stop_at=100.0, acquired=dearer)
    assert len(seen.served.recorded) == measured
    assert seen.setups["b"]["usd_per_hour"] == pytest.approx(2 * got_usd)


def file_of(folder, name="tiny", *, data="", data_digest="", **env):
    """A workload that is a file, with what travels."""
    (folder / "w.py").write_text("def build(data): ...\n")
    source = file_source(folder, "w.py", "")
    digest = source.digest(source.read(), "build", {}, env=env, data=data_digest)
    more = {"env": env, "data": data, "data_digest": data_digest}
    spec = WorkloadFile(name=name, digest=digest, file="workloads/w.py", function="build", **more)
    return spec, source


@pytest.fixture
def with_data(tmp_path):
    """The workload of run a has data that machines fetch."""
    file = file_of(tmp_path, data="s3://mine-1/cats/", data_digest="aabb")
    return replace(job("a"), files=(file,), data={"tiny": ("s3://mine-1/cats/", 50, 6)})


def has(state, node, **more):
    return lambda cluster: cluster.say("data.json", node, aabb={"state": state} | more)


def test_no_attempt_starts_before_all_machines_have_their_data(tmp_path, with_data):
    slow = [ready, *waits(2000), has("ready", 0), has("fetching", 1, bytes=1), *waits(2000)]
    rest = (has("ready", 1), armed(1), reported("a"))
    seen = launch(tmp_path / "a", with_data, *slow, *rest).served
    assert (seen.recorded, seen.rows) == ({"a"}, [])
    download = ["s3://mine-1/cats/", 50, 6]
    assert read_object(seen.mailbox / "data.json") == {"data": {"aabb": download}}
    assert seen.seconds["start hosts"] > 400.0
    late = launch(tmp_path / "b", with_data, *slow, stop_at=300.0)
    assert late.rows[0].startswith("r-00-launch failed ") and len(late.rows) == 1


def test_data_that_cannot_be_fetched_delay_nobody(tmp_path, with_data):
    lacking = (ready, has("ready", 0), has("failed", 1, reason="denied"))
    seen = launch(tmp_path, with_data, *lacking, armed(1), reported("a")).served
    assert seen.recorded == {"a"}


def test_a_workload_that_cannot_be_prepared_costs_its_own_runs_alone(tmp_path):
    files = (file_of(tmp_path, "other", WIDTH="3"), file_of(tmp_path))
    items = (item("b", workload="other"), item("c", workload="other"), item("a"))
    three = (finished(attempt, **NO_MODULE) for attempt in (2, 3, 4))
    script = (*GOES, reported("a"), finished(1), *three)
    seen = launch(tmp_path / "a", job_of(items, files=files), *script)
    assert (seen.served.recorded, seen.runs) == ({"a"}, "bc")
    assert seen.rows == [f"r-00-launch failed {NO_TORCH}"]


ELASTIC = job_of([item("e", kind="elastic", checkpoint_every=2)])


def begins(node, *script):
    """An elastic run that loses `node`, then `script`."""

    def keeps(cluster):
        cluster.checkpoints = cluster.mailbox.parent / "checkpoints"
        ready(cluster)

    return (keeps, armed(1), *waits(3), becomes(node, TAKEN), *waits(3), *script)


def test_an_elastic_run_continues_without_a_lost_machine(tmp_path):
    seen = launch(tmp_path, ELASTIC, *begins(1, reported("e")))
    assert seen.served.outcome == "finished" and seen.rows == seen.cluster.replaced == []
    assert [loss["node"] for loss in seen.setups["e"]["losses"]] == [1]
    assert seen.plan["attempt"] == 1 and seen.plan["checkpoints"].endswith("checkpoints/e")


def test_an_elastic_run_without_its_first_machine_resumes_in_another_attempt_or_is_given_up(
    tmp_path,
):
    lost = launch(tmp_path / "a", ELASTIC, *begins(0))
    assert lost.rows[0].startswith("e interrupted ") and len(lost.rows) == 1
    again = begins(0, new(0), *waits(3), armed(3), reported("e"))
    seen = launch(tmp_path / "b", ELASTIC, sells_a_machine, *again)
    assert seen.served.outcome.startswith("finished") and "e" in seen.served.recorded
    assert seen.plan["checkpoints"].endswith("checkpoints/e")
