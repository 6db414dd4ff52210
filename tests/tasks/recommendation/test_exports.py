"""What a published row becomes for other tools: refused with the reason or accepted by the tool's own model of it."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import boto3
import pytest
import torch
import yaml
from moto import mock_aws
from torch import nn
from typer.testing import CliRunner

from flows.cli import app
from models.domain.cluster import parse_cluster
from tasks.providers.ec2.api import malformed
from tasks.recommendation.exports.aws import LAUNCH_TEMPLATE
from tasks.recommendation.exports.choice import Choice, ExportRefused, Wanted, choose
from tasks.recommendation.exports.export import TARGETS, export
from tasks.workspace.settings import SettingsError
from tests.installed import furnished

NOW = datetime(2026, 11, 20, 12, 0, tzinfo=UTC)
PRICES = {
    "g4dn.xlarge": 0.526,
    "g4dn.12xlarge": 3.912,
    "g4dn.8xlarge": 2.176,
    "g4dn.metal": 7.824,
    "g5.12xlarge": 5.672,
}


def row(rank: int, cluster: str, hours: float, **changes: Any) -> dict[str, Any]:
    """Of a job whose dollars are those of its machines."""
    market, zone = changes.pop("market", "on-demand"), changes.pop("zone", "any")
    kinds = parse_cluster(cluster)
    usd = hours * sum(PRICES.get(kind, 0.1) for kind in kinds) * (0.4 if market == "spot" else 1.0)
    offers = [
        {
            "instance_type": kind,
            "count": kinds.count(kind),
            "market": market,
            "zone": zone,
            "usd_per_hour": PRICES.get(kind, 0.1) * (0.4 if market == "spot" else 1.0),
        }
        for kind in dict.fromkeys(kinds)
    ]
    whole = {
        "publication_id": "20261120T030000-ab12",
        "published_at": NOW - timedelta(hours=9),
        "provider": "ec2",
        "model_version": "7",
        "workload": "resnet50",
        "goal": "cheapest",
        "constraint_hours": None,
        "constraint_usd": None,
        "rank": rank,
        "status": "recommended" if rank == 1 else "alternative",
        "cluster": cluster,
        "cluster_offers": offers,
        "layout": "4",
        "batch_per_device": "64",
        "accumulation_steps": 1,
        "global_batch": 256 * len(kinds),
        "strategy": "ddp",
        "precision": "fp32",
        "switches": "none",
        "region": "us-east-1",
        "step_s": 0.5,
        "step_low_s": 0.4,
        "step_high_s": 0.6,
        "hours": hours,
        "hours_p90": 1.2 * hours,
        "usd": usd,
        "usd_p90": 1.2 * usd,
        "p_meets_constraint": None,
        "p_best": 0.5,
        "reason": "the reason",
        "price_as_of": NOW - timedelta(hours=10),
    }
    return whole | changes


# the second is dearer by the hour and cheaper by the job; the third is sold on both markets
UNIFORM = [
    row(1, "2xg5.12xlarge", 10.0, market="spot", zone="us-east-1b"),
    row(2, "2xg4dn.12xlarge", 24.0, market="spot", zone="us-east-1a"),
    row(3, "2xg5.12xlarge", 9.9),
    row(4, "2xg4dn.12xlarge", 23.0),
    row(5, "3xg4dn.12xlarge", 20.0, layout="4", batch_per_device="43+43+42"),
]
MIXED = [
    row(1, "2xg4dn.12xlarge+1xg4dn.8xlarge", 20.0, layout="4+4+1", batch_per_device="86+85+84"),
    row(2, "3xg4dn.12xlarge", 18.0, status="misses_constraint", p_meets_constraint=0.31),
    row(3, "2xg4dn.12xlarge", 24.0),
]


def chosen(rows: list[dict[str, Any]], rank: int = 1, now: datetime = NOW, **words: Any) -> Choice:
    return choose(rows, Wanted(workload="resnet50", rank=rank, **words), now)


def document(rows: list[dict[str, Any]], to: str, rank: int = 1) -> Any:
    return export(chosen(rows, rank), to)[0]["document"]


READERS: dict[str, Callable[[str], object]] = {
    "skypilot": yaml.safe_load,
    "karpenter": lambda text: list(yaml.safe_load_all(text)),
    "sagemaker": json.loads,
    "fleet": json.loads,
    "torchrun": ast.parse,
}


@pytest.mark.parametrize("to", TARGETS)
def test_every_export_says_what_was_recommended_and_how_old_that_is(to: str) -> None:
    body, text = export(chosen(UNIFORM), to)
    said = ["resnet50", "20261120T030000-ab12", "2026-11-20 03:00 UTC", "2026-11-20 02:00 UTC"]
    assert [one for one in said if one not in text] == []
    assert re.search(r"10( hours)? \(90th percentile 12\)", text)
    read = READERS[to](text)
    assert to == "torchrun" or read == body["document"]


def test_a_skypilot_task_has_the_ranks_that_one_command_trains_in_their_order() -> None:
    task = document(UNIFORM, "skypilot")
    assert task["num_nodes"] == 2 and "--nproc-per-node 4" in task["run"]
    kinds = [
        (one["infra"], one["instance_type"], one["use_spot"])
        for one in task["resources"]["ordered"]
    ]
    assert kinds == [
        ("aws/us-east-1/us-east-1b", "g5.12xlarge", True),
        ("aws/us-east-1/us-east-1a", "g4dn.12xlarge", True),
        ("aws/us-east-1", "g5.12xlarge", False),
        ("aws/us-east-1", "g4dn.12xlarge", False),
    ]
    assert (
        "rank 5, 3xg4dn.12xlarge (on-demand), is left out: it is split otherwise"
        in export(chosen(UNIFORM), "skypilot")[1]
    )
    uneven = document(
        [row(1, "2xg4dn.12xlarge", 9.0, layout="4+3", batch_per_device="9")], "skypilot"
    )
    said = subprocess.run(
        ["bash", "-c", f"torchrun() {{ echo \"$@\"; }}; {uneven['run']}"],
        env={"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"}
        | {"TRAINING_SCRIPT": "my train.py", "PATH": os.environ["PATH"]},
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert (
        said.startswith("--nnodes 2 --node-rank 1 --nproc-per-node 3 --master-addr 10.0.0.1 ")
        and "my train" in said
    )


def test_skypilot_itself_takes_the_task() -> None:
    schemas = pytest.importorskip("sky.utils.schemas", reason="SkyPilot is not installed")
    jsonschema = pytest.importorskip("jsonschema")
    for rank in range(1, 6):
        jsonschema.Draft7Validator(schemas.get_task_schema()).validate(
            document(UNIFORM, "skypilot", rank)
        )


@pytest.mark.parametrize("to", ["skypilot", "karpenter", "fleet"])
def test_a_mixed_cluster_is_refused_with_the_reason_and_the_best_rank_that_can(to: str) -> None:
    why = r"since .*g4dn.12xlarge and g4dn.8xlarge; rank 3 can, 2xg4dn.12xlarge \(on-demand\), \$187.8 .*: --rank 3\."
    with pytest.raises(ExportRefused, match=why):
        export(chosen(MIXED), to)
    with pytest.raises(ExportRefused, match="none of the 1 published ranks can"):
        export(chosen(MIXED[:1]), to)


def test_sagemaker_has_requests_in_the_order_of_rank_and_names_what_it_cannot_train() -> None:
    metal = row(2, "2xg4dn.metal", 8.0, layout="8", batch_per_device="32")
    slow = row(4, "1xg4dn.xlarge", 1000.0, layout="1", batch_per_device="8", accumulation_steps=32)
    spot = row(3, "2xg5.12xlarge", 10.0, market="spot", zone="us-east-1b")
    found = document([MIXED[0], metal, spot, slow], "sagemaker")
    assert [one["ranks"] for one in found["jobs"]] == [[1], [3]]
    assert found["left_out"] == [
        "rank 2, 2xg4dn.metal (on-demand): SageMaker training has no ml.g4dn.metal",
        "rank 4, 1xg4dn.xlarge (on-demand): a training job runs at most 28 days",
    ]
    first, second = (one["request"] for one in found["jobs"])
    groups = [
        (one["InstanceType"], one["InstanceCount"])
        for one in first["ResourceConfig"]["InstanceGroups"]
    ]
    assert (
        groups == [("ml.g4dn.12xlarge", 2), ("ml.g4dn.8xlarge", 1)]
        and "EnableManagedSpotTraining" not in first
    )
    assert (
        second["EnableManagedSpotTraining"] is True
        and second["StoppingCondition"]["MaxWaitTimeInSeconds"] == 86400
    )
    alike = document(
        [row(1, "2xg4dn.12xlarge", 24.0), row(2, "2xg5.12xlarge", 12.0), MIXED[0] | {"rank": 3}],
        "sagemaker",
    )
    [preferred, _] = alike["jobs"]
    assert preferred["ranks"] == [1, 2]
    assert [
        one["InstanceType"] for one in preferred["request"]["ResourceConfig"]["InstancePreferences"]
    ] == [
        "ml.g4dn.12xlarge",
        "ml.g5.12xlarge",
    ]
    others = {
        "TrainingJobName": "a",
        "RoleArn": "arn:aws:iam::111122223333:role/a",
        "OutputDataConfig": {"S3OutputPath": "s3://a"},
    }
    for one in [*found["jobs"], *alike["jobs"]]:
        assert malformed("sagemaker", "CreateTrainingJobRequest", others | one["request"]) == ""
    with pytest.raises(ExportRefused, match=r"no rank can be trained there; rank 1, 2xg4dn\.metal"):
        document([metal | {"rank": 1}], "sagemaker")


def test_karpenters_least_price_is_the_least_dollars_of_the_job_at_any_prices() -> None:
    """The adjusted price of a type is in proportion to what the job costs on it, whatever the prices are that day."""
    rows = [row(1, "2xg4dn.12xlarge", 24.0), row(2, "2xg5.12xlarge", 16.0)]
    pool, *overlays = document(rows, "karpenter")
    assert (pool["apiVersion"], pool["kind"]) == ("karpenter.sh/v1", "NodePool")
    factors = {}
    for one in overlays:
        assert (one["apiVersion"], one["kind"]) == ("karpenter.sh/v1alpha1", "NodeOverlay")
        assert set(one["spec"]) == {"weight", "requirements", "priceAdjustment"}
        wanted = {need["key"]: need["values"] for need in one["spec"]["requirements"]}
        labels = pool["spec"]["template"]["metadata"]["labels"]
        assert wanted.pop("srift/pool") == [labels["srift/pool"]], "other pools keep their prices"
        adjusted = re.fullmatch(r"\+(\d+\.\d+)%", one["spec"]["priceAdjustment"])
        assert adjusted is not None
        factors[wanted["node.kubernetes.io/instance-type"][0]] = 1 + float(adjusted[1]) / 100
    for prices in (PRICES, PRICES | {"g5.12xlarge": 9.0}):
        usd = {
            kind: hours * 2 * prices[kind]
            for kind, hours in (("g4dn.12xlarge", 24.0), ("g5.12xlarge", 16.0))
        }
        priced = {kind: prices[kind] * factor for kind, factor in factors.items()}
        assert priced["g4dn.12xlarge"] / priced["g5.12xlarge"] == pytest.approx(
            usd["g4dn.12xlarge"] / usd["g5.12xlarge"]
        )


def test_karpenters_pools_are_one_a_market_and_a_goal_of_hours_has_prices_by_hours() -> None:
    found = document([one | {"goal": "fastest"} for one in UNIFORM], "karpenter")
    pools = [one for one in found if one["kind"] == "NodePool"]
    assert [(one["metadata"]["name"], one["spec"]["weight"]) for one in pools] == [
        ("srift-resnet50-spot", 2),
        ("srift-resnet50-on-demand", 1),
    ]
    for one in pools:
        needs = {
            need["key"]: need["values"] for need in one["spec"]["template"]["spec"]["requirements"]
        }
        assert needs["node.kubernetes.io/instance-type"] == ["g5.12xlarge", "g4dn.12xlarge"]
        assert one["metadata"]["name"].endswith(needs["karpenter.sh/capacity-type"][0])
    prices = [float(one["spec"]["price"]) for one in found if one["kind"] == "NodeOverlay"]
    assert prices[1] / prices[0] == pytest.approx(2.4, rel=1e-3) and len(prices) == 4
    assert len({one["metadata"]["name"] for one in found}) == 6


def test_a_fleet_is_had_whole_and_its_tags_say_whence_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    request = document(UNIFORM, "fleet")
    [config] = request["LaunchTemplateConfigs"]
    assert [
        (one["InstanceType"], one["AvailabilityZone"], one["Priority"])
        for one in config["Overrides"]
    ] == [
        ("g5.12xlarge", "us-east-1b", 0.0),
        ("g4dn.12xlarge", "us-east-1a", 1.0),
    ]
    assert (
        request["SpotOptions"]["MinTargetCapacity"] == 2
        and request["SpotOptions"]["SingleInstanceType"]
    )
    on_demand = document(UNIFORM, "fleet", rank=3)
    with mock_aws():
        ec2 = boto3.client("ec2", region_name="us-east-1")
        image = ec2.register_image(Name="torch", Architecture="x86_64")["ImageId"]
        template = {"ImageId": image, "InstanceType": "t2.micro"}
        ec2.create_launch_template(LaunchTemplateName=LAUNCH_TEMPLATE, LaunchTemplateData=template)
        fleet = ec2.create_fleet(**on_demand)
        assert sum(len(one["InstanceIds"]) for one in fleet["Instances"]) == 2
        [kept] = ec2.describe_fleets(FleetIds=[fleet["FleetId"]])["Fleets"]
    tags = {one["Key"]: one["Value"] for one in kept["Tags"]}
    assert tags["srift:publication"] == "20261120T030000-ab12" and tags["srift:rank"] == "3"


def test_a_fleet_that_awss_model_refuses_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "tasks.recommendation.exports.aws._override", lambda one, priority: {"InstanceTypo": "x"}
    )
    with pytest.raises(ExportRefused, match="InstanceTypo"):
        document(UNIFORM, "fleet")


@pytest.mark.parametrize("to", TARGETS)
def test_machines_of_this_computer_are_no_other_tools(to: str) -> None:
    choice = chosen([row(1, "2xlc.large", 0.5, provider="local", layout="1")])
    if to == "torchrun":
        assert export(choice, to)[0]["document"]["devices"] == (1, 1)
        return
    with pytest.raises(
        ExportRefused, match=rf"{to}: .*parts of this computer.*--to torchrun.*--provider ec2"
    ):
        export(choice, to)


def test_what_nothing_meets_is_refused_with_what_would_meet_it() -> None:
    never = row(1, "1xg4dn.xlarge", 1.0) | {
        "status": "infeasible",
        "cluster": None,
        "reason": "12.4 h would be enough",
    }
    with pytest.raises(
        ExportRefused, match=r"nothing meets resnet50, cheapest: 12\.4 h would be enough"
    ):
        chosen([never])


def test_which_row_is_meant_is_asked_for_by_the_names_there_are() -> None:
    limited = [
        row(1, "1xg4dn.12xlarge", 9.0, goal="cheapest_within_deadline", constraint_hours=hours)
        for hours in (12.0, 24.0)
    ]
    rows = [*UNIFORM, *limited]
    with pytest.raises(
        SettingsError,
        match="several goals, say which: --goal cheapest, --goal 'cheapest_within_deadline 12 h'",
    ):
        chosen(rows)
    with pytest.raises(
        SettingsError, match="several goals, say which: --goal 'cheapest_within_deadline 12 h', "
    ):
        chosen(rows, goal="cheapest_within_deadline")
    assert chosen(rows, goal="cheapest_within_deadline 24 h").first.row["constraint_hours"] == 24.0
    with pytest.raises(SettingsError, match="did you mean 'cheapest'"):
        chosen(rows, goal="cheepest")
    with pytest.raises(SettingsError, match="no rank 6 of cheapest: ranks 1 to 5"):
        chosen(UNIFORM, rank=6)
    with pytest.raises(
        SettingsError, match="published by ec2 and local: say which with --provider"
    ):
        chosen([*UNIFORM, row(1, "1xlc.large", 1.0, provider="local")])
    with pytest.raises(SettingsError, match="did you mean 'resnet50'"):
        choose(UNIFORM, Wanted(workload="resnet5"), NOW)
    with pytest.raises(SettingsError, match="did you mean 'skypilot'"):
        export(chosen(UNIFORM), "skypilots")


def test_an_old_table_and_a_row_that_misses_its_goal_are_warned_of() -> None:
    assert chosen(UNIFORM).warnings == []
    old = chosen(UNIFORM, now=NOW + timedelta(days=3)).warnings
    assert (
        old[0].startswith("the publication is 3.4 days old: `srift refresh")
        and "prices are 3.4 days" in old[1]
    )
    assert chosen(MIXED, rank=2).warnings == [
        "rank 2 meets its constraint with 31% probability only: the reason"
    ]
    first = row(1, "2xg5.12xlarge", 10.0, p_meets_constraint=0.03, p_required=None)
    (said,) = chosen([first]).warnings
    assert said.startswith("rank 1 meets its constraint with 3% probability only")
    sure = first | {"p_meets_constraint": 0.6}
    assert chosen([sure]).warnings == [] and chosen([sure | {"p_required": 0.9}]).warnings != []


def test_the_command_prints_or_writes_the_file_and_warns_beside_it(
    own_environment: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(furnished())
    monkeypatch.setenv("SRIFT_HOME", str(furnished() / "state"))
    words = ["export", "conv", "--to", "torchrun", "--goal", "fastest"]
    printed = CliRunner().invoke(app, words)
    assert (
        printed.exit_code == 0
        and ast.parse(printed.stdout)
        and printed.stdout.startswith("# conv, fastest: rank 1, ")
    )
    assert "warning: the publication is" in printed.stderr
    written = CliRunner().invoke(app, [*words, "--output", str(tmp_path / "shares.py")])
    assert (
        written.stdout == f"written: {tmp_path}/shares.py\n"
        and (tmp_path / "shares.py").read_text() == printed.stdout
    )
    body = json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)
    assert (
        body["to"] == "torchrun"
        and body["document"]["precision"] == "fp32"
        and len(body["warnings"]) == 2
    )
    for changed, code, says in (
        (
            ["export", "conv", "--to", "torchrun"],
            2,
            "conv has several goals, say which: --goal cheapest",
        ),
        (["export", "conv", "--to", "fleet", "--goal", "fastest"], 1, "parts of this computer"),
        (
            ["export", "conv", "--to", "torchrun", "--goal", "fastest", "--output", "/nowhere/x"],
            1,
            "/nowhere/x",
        ),
    ):
        refused = CliRunner().invoke(app, changed)
        assert refused.exit_code == code and says in refused.stderr and refused.stdout == ""


TRAINING = """
import sys
import torch, torch.distributed as dist
from torch import nn
import srift_shares as split

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(nn.Linear(3, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = [(torch.full((3,), float(n % 5)) + torch.arange(3), torch.tensor([float(n)])) for n in range(19)]
loader = torch.utils.data.DataLoader(data, batch_sampler=split.SharesSampler(len(data), rank))
batches, seen = list(loader), list(split.SharesSampler(len(data), rank))
for first in range(0, len(batches), split.ACCUMULATION_STEPS):
    split.train_step(model, optimizer, nn.functional.mse_loss, batches[first : first + split.ACCUMULATION_STEPS])
torch.save([seen, model.module.state_dict()], f"{sys.argv[1]}/{rank}.pt")
dist.destroy_process_group()
"""


def run_nodes(commands: list[str], folder: Path, script: str) -> list[str]:
    """What each node's command printed, started on this machine with `script` in place of the exported file."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = []
    for command in commands:
        words = shlex.split(
            command.replace("ADDRESS-OF-NODE-0", "127.0.0.1").replace("29500", str(port))
        )
        assert words[0] == "torchrun" and words[-1] == "srift_shares.py"
        words = [
            sys.executable,
            "-W",
            "ignore",
            "-m",
            "torch.distributed.run",
            *words[1:-1],
            *script.split(" "),
        ]
        started.append(
            subprocess.Popen(
                words,
                cwd=folder,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                text=True,
            )
        )
    try:
        said = [one.communicate(timeout=120)[0] for one in started]
        assert [one.returncode for one in started] == [0] * len(commands)
    finally:
        for one in started:
            one.kill()
    return said


@pytest.mark.local
def test_unequal_shares_see_each_sample_once_and_train_as_one_process_would(tmp_path: Path) -> None:
    one = row(
        1,
        "1xg5.12xlarge+1xg4dn.xlarge",
        1.0,
        layout="1",
        batch_per_device="3+1",
        accumulation_steps=2,
    )
    body, text = export(chosen([one]), "torchrun")
    (tmp_path / "srift_shares.py").write_text(text)
    (tmp_path / "mine.py").write_text(TRAINING)
    said = "".join(run_nodes(body["document"]["commands"], tmp_path, "srift_shares.py"))
    assert (
        "rank 0: 3 of 4 samples a micro-step, 60 of 80 an epoch; all ranks 80" in said
        and "rank 1: 1 of 4" in said
    )

    run_nodes(body["document"]["commands"], tmp_path, f"mine.py {tmp_path}")
    (first, weights), (second, others) = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    assert [len(one) for one in first] == [3] * 4 and [len(one) for one in second] == [1] * 4
    seen = [sample for batch in [*first, *second] for sample in batch]
    assert len(seen) == len(set(seen)) == 16, "of 19 samples, in two steps of 8"

    torch.manual_seed(0)
    alone = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for step in range(2):
        samples = [
            n for part in (first, second) for batch in part[2 * step : 2 * step + 2] for n in batch
        ]
        inputs = torch.stack([torch.full((3,), float(n % 5)) + torch.arange(3) for n in samples])
        optimizer.zero_grad()
        nn.functional.mse_loss(
            alone(inputs), torch.tensor(samples, dtype=torch.float32)[:, None]
        ).backward()
        optimizer.step()
    for name, value in alone.state_dict().items():
        torch.testing.assert_close(weights[name], value)
        torch.testing.assert_close(others[name], value)
