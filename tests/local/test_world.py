"""The machines of the emulated EC2 are real ones: what they run, see and write, how they end, and who may know."""

from __future__ import annotations

import threading

import pytest

from tasks.providers.local import cpu_shares as local_cpu
from tests.local.emulated import TYPE, needs_machines, run, said, state, until
from tests.world import World
from tests.world.machines import Fate

pytestmark = [pytest.mark.local, needs_machines]


def test_user_data_runs_as_root_at_the_private_address_of_the_instance(world: World) -> None:
    (one,) = run(world, "id -u; ip -4 addr show dev eth0; echo done")
    text = said(world, one, "done")
    assert text.startswith("0\n") and f"inet {one['PrivateIpAddress']}/16" in text


def test_what_a_machine_writes_is_its_own_and_goes_with_it(world: World) -> None:
    script = "useradd --system srift-of-a-test && id -u srift-of-a-test && mkdir /var/lib/srift-t /opt/srift-t && echo done"
    first, second = run(world, script, count=2)
    for one in (first, second):
        assert "done" in said(world, one, "done"), (
            "the second machine found what the first had written"
        )
    (third,) = run(world, "id srift-of-a-test || ls -d /var/lib/srift-t /opt/srift-t || echo clean")
    assert "clean" in said(world, third, "clean")


def test_machines_of_a_region_reach_each_other(world: World) -> None:
    (first,) = run(world, "exec python3 -m http.server 8000")
    (second,) = run(
        world,
        f"exec 2>&1; until bash -c 'echo >/dev/tcp/{first['PrivateIpAddress']}/8000'; do sleep 0.1; done; echo reached",
    )
    said(world, second, "reached")


def test_the_metadata_service_wants_a_token_and_knows_who_asks(world: World) -> None:
    script = """
python3 - <<'END'
import json, urllib.error, urllib.request
base = "http://169.254.169.254/latest/"
def get(path, **headers):
    try:
        asked = urllib.request.Request(base + "meta-data/" + path, headers=headers)
        return urllib.request.urlopen(asked, timeout=5).read().decode()
    except urllib.error.HTTPError as error:
        return str(error.code)
print("without:", get("instance-id"))
ask = urllib.request.Request(base + "api/token", method="PUT", headers={"X-aws-ec2-metadata-token-ttl-seconds": "60"})
token = {"X-aws-ec2-metadata-token": urllib.request.urlopen(ask, timeout=5).read().decode()}
print("id:", get("instance-id", **token))
print("address:", get("local-ipv4", **token))
print("notice:", get("spot/instance-action", **token))
role = get("iam/security-credentials/", **token)
print("keys:", role, json.loads(get("iam/security-credentials/" + role, **token))["Code"])
print("end")
END"""
    (one,) = run(world, script)
    text = said(world, one, "end")
    assert (
        "without: 401" in text
        and f"id: {one['InstanceId']}" in text
        and f"address: {one['PrivateIpAddress']}" in text
    )
    assert "notice: 404" in text and f"keys: {world.profile} Success" in text


def test_terminating_ends_the_machine_before_the_answer(world: World) -> None:
    (one,) = run(world, "echo up; sleep 100")
    said(world, one, "up")
    world.client("ec2").terminate_instances(InstanceIds=[one["InstanceId"]])
    assert world.alive() == [] and state(world, one) == "terminated"


@pytest.mark.parametrize(
    "words",
    ["shutdown -h now", "shutdown -h +1 'the deadline'", "/usr/sbin/shutdown -h now", "poweroff"],
)
def test_a_machine_that_shuts_itself_down_is_terminated(world: World, words: str) -> None:
    (one,) = run(world, f"{words}; sleep 100")
    until(lambda: state(world, one) == "terminated")
    until(lambda: not world.alive())


def test_a_shutdown_that_is_taken_back_does_not_happen_and_stop_is_stop(world: World) -> None:
    (one,) = run(world, "shutdown -h +3; sleep 0.2; shutdown -c; sleep 1; echo alive; shutdown -h now",
                 InstanceInitiatedShutdownBehavior="stop")  # fmt: skip
    said(world, one, "alive")
    until(lambda: state(world, one) == "stopped")


def test_an_interruption_is_reported_before_it_happens(world: World) -> None:
    (one,) = run(world, "echo up; sleep 100", InstanceMarketOptions={"MarketType": "spot"})
    said(world, one, "up")
    world.interrupt(one["InstanceId"], in_s=0.5)
    action = world.metadata.value(
        "us-east-1", one["PrivateIpAddress"], "/latest/meta-data/spot/instance-action"
    )
    assert '"terminate"' in str(action)
    until(lambda: state(world, one) == "terminated")
    assert (
        world.account.instance(one["InstanceId"]).state_reason.code
        == "Server.SpotInstanceTermination"
    )


def test_some_machines_never_boot_and_some_hang() -> None:
    fates = iter([Fate.NEVER, Fate.HANGS, Fate.BOOTS])
    with World(seed=4, fate=lambda _: next(fates)) as world:
        never, hangs, boots = run(world, "echo up", count=3)
        said(world, boots, "up")
        assert world.console(never["InstanceId"]) == "" and "up" not in world.console(
            hangs["InstanceId"]
        )
        assert len(world.account.instances("running")) == 3, "EC2 says that all run"


@pytest.mark.skipif(bool(local_cpu.detect().why_not), reason=local_cpu.detect().why_not)
def test_a_machine_has_its_types_share_of_the_processor_and_may_freeze() -> None:
    busy = "import time\nends = time.time() + 1\nwhile time.time() < ends: pass\nprint('used', time.process_time())"
    with World(seed=6, cores={TYPE: 0.2}) as world:
        (one,) = run(world, f'python3 -c "{busy}"; while :; do echo tick; sleep 0.05; done')
        assert float(said(world, one, "tick").split()[1]) < 0.45, "a fifth of a core was promised"
        world.freeze(one["InstanceId"])
        before = world.console(one["InstanceId"])
        threading.Event().wait(0.3)
        assert world.console(one["InstanceId"]) == before and world.alive() == [one["InstanceId"]]
