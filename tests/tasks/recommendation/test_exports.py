"""Exports against the models of their tools: botocore, Python, and documented fields."""

import ast
import json
import os
import shlex
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from itertools import chain

import pytest
import torch
import yaml
from torch import nn
from typer.testing import CliRunner

from flows.cli import app
from models.domain.cluster import parse_cluster
from tasks.recommendation.exports import TARGETS, export
from tasks.recommendation.exports.selection import ExportRefused, select
from tasks.workspace.settings import SettingsError
from tests import aws_model
from tests.installed import furnished
from tests.ports import free_port
from tests.warehouse.builders import recommendation

NOW = datetime(2026, 11, 20, 12, 0, tzinfo=UTC)
PRICES = {"g4dn.xlarge": 0.526, "g4dn.12xlarge": 3.912, "g4dn.8xlarge": 2.176, "g5.12xlarge": 5.672}


PLAIN = {
    "workload": "resnet50",
    "provider": "ec2",
    "region": "us-east-1",
    "layout": "4",
    "batch_per_device": "64",
    "status": "alternative",
    "published_at": NOW - timedelta(hours=9),
    "price_as_of": NOW - timedelta(hours=10),
    "publication_id": "20261120T030000-ab12",
    "model_version": "7",
}


def row(rank, cluster, hours, **changes):
    place = {"market": changes.pop("market", "on-demand"), "zone": changes.pop("zone", "any")}
    kinds, rate = parse_cluster(cluster), 0.4 if place["market"] == "spot" else 1.0
    offers = [
        place
        | {
            "instance_type": kind,
            "count": kinds.count(kind),
            "usd_per_hour": PRICES.get(kind, 0.1) * rate,
        }
        for kind in dict.fromkeys(kinds)
    ]
    usd = hours * sum(offer["count"] * offer["usd_per_hour"] for offer in offers)
    figures = {"hours": hours, "hours_p90": 1.2 * hours, "usd": usd, "usd_p90": 1.2 * usd}
    return (
        recommendation(
            rank=rank, cluster=cluster, cluster_offers=offers, global_batch=256 * len(kinds)
        )
        | PLAIN
        | figures
        | changes
    )


# The second costs more per hour and less per job; both types are sold in both markets.
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
READERS = {
    "skypilot": yaml.safe_load,
    "karpenter": lambda text: list(yaml.safe_load_all(text)),
    "sagemaker": json.loads,
    "fleet": json.loads,
    "torchrun": ast.parse,
}


def selected(rows, now=NOW, **options):
    return select(rows, "resnet50", now, **options)


def document(rows, target, rank=1):
    return export(selected(rows, rank=rank), target)[0]["document"]


@pytest.mark.parametrize("target", TARGETS)
def test_every_export_is_readable_and_states_prediction_and_age(target):
    body, text = export(selected(UNIFORM), target)
    for fact in ("resnet50", "20261120T030000-ab12", "2026-11-20 03:00 UTC"):
        assert fact in text
    parsed = READERS[target](text)
    assert target == "torchrun" or parsed == body["document"]


def test_skypilot_lists_the_ranks_that_one_command_trains():
    task = document(UNIFORM, "skypilot")
    assert task["num_nodes"] == 2 and "--nproc-per-node 4" in task["run"]
    assert [tuple(resource.values()) for resource in task["resources"]["ordered"]] == [
        ("aws/us-east-1/us-east-1b", "g5.12xlarge", True),
        ("aws/us-east-1/us-east-1a", "g4dn.12xlarge", True),
        ("aws/us-east-1", "g5.12xlarge", False),
    ]  # the last costs four times as much
    uneven = row(1, "2xg4dn.12xlarge", 9.0, layout="4+3", batch_per_device="9")
    command = document([uneven], "skypilot")["run"]
    variables = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1", "PATH": os.environ["PATH"]}
    variables |= {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "TRAINING_SCRIPT": "my train.py"}
    shell = ["bash", "-c", f'torchrun() {{ echo "$@"; }}; {command}']
    printed = subprocess.run(shell, env=variables, capture_output=True, text=True, check=True)
    assert printed.stdout.split()[:8] == (
        ["--nnodes", "2", "--node-rank", "1", "--nproc-per-node", "3", "--master-addr", "10.0.0.1"]
    )


@pytest.mark.parametrize("target", ["skypilot", "karpenter", "fleet", "sagemaker"])
def test_local_machines_and_mixed_types_are_refused(target):
    local = [row(1, "2xlc.large", 0.5, provider="local", layout="1")]
    for rows in [local, MIXED] if target != "sagemaker" else [local]:
        with pytest.raises(ExportRefused):
            export(selected(rows), target)


def test_sagemaker_requests_are_valid_and_in_order_of_rank():
    metal = row(2, "2xg4dn.metal", 8.0, layout="8", batch_per_device="32")
    spot = row(3, "2xg5.12xlarge", 10.0, market="spot", zone="us-east-1b")
    slow = row(4, "1xg4dn.xlarge", 1000.0, layout="1", batch_per_device="8", accumulation_steps=32)
    found = document([MIXED[0], metal, spot, slow], "sagemaker")
    assert [job["ranks"] for job in found["jobs"]] == [[1], [3]] and len(found["left_out"]) == 2
    first, second = (job["request"] for job in found["jobs"])
    groups = first["ResourceConfig"]["InstanceGroups"]
    assert [(group["InstanceType"], group["InstanceCount"]) for group in groups] == [
        ("ml.g4dn.12xlarge", 2),
        ("ml.g4dn.8xlarge", 1),
    ]
    assert "EnableManagedSpotTraining" not in first and second["EnableManagedSpotTraining"]
    assert second["StoppingCondition"]["MaxWaitTimeInSeconds"] == 86400
    alike = [row(1, "2xg4dn.12xlarge", 24.0), row(2, "2xg5.12xlarge", 12.0), MIXED[0] | {"rank": 3}]
    preferred, _ = document(alike, "sagemaker")["jobs"]
    kinds = preferred["request"]["ResourceConfig"]["InstancePreferences"]
    assert [kind["InstanceType"] for kind in kinds] == ["ml.g4dn.12xlarge", "ml.g5.12xlarge"]
    rest = {"TrainingJobName": "a", "RoleArn": "arn:aws:iam::111122223333:role/a"}
    rest |= {"OutputDataConfig": {"S3OutputPath": "s3://a"}}  # type: ignore[dict-item]
    for job in [*found["jobs"], preferred]:
        aws_model.valid("sagemaker", "create_training_job", rest | job["request"])
    with pytest.raises(ExportRefused):
        document([metal | {"rank": 1}], "sagemaker")


def test_karpenters_lowest_price_is_the_cheapest_job_at_any_prices():
    hours = {"g4dn.12xlarge": 24.0, "g5.12xlarge": 16.0}
    rows = [row(n, f"2x{kind}", job_hours) for n, (kind, job_hours) in enumerate(hours.items(), 1)]
    pool, *overlays = document(rows, "karpenter")
    assert pool["apiVersion"] == "karpenter.sh/v1"
    factors = {}
    for overlay in overlays:
        assert (overlay["apiVersion"], overlay["kind"]) == ("karpenter.sh/v1alpha1", "NodeOverlay")
        needs = {need["key"]: need["values"] for need in overlay["spec"]["requirements"]}
        labels = pool["spec"]["template"]["metadata"]["labels"]
        assert needs["srift/pool"] == [labels["srift/pool"]]
        share = float(overlay["spec"]["priceAdjustment"].strip("+%"))
        factors[needs["node.kubernetes.io/instance-type"][0]] = 1 + share / 100
    for prices in (PRICES, PRICES | {"g5.12xlarge": 9.0}):
        adjusted = [
            prices[kind] * factors[kind] / (job_hours * prices[kind])
            for kind, job_hours in hours.items()
        ]
        assert adjusted[0] == pytest.approx(adjusted[1])


def test_karpenter_prices_by_hours_for_fastest():
    found = document([line | {"goal": "fastest"} for line in UNIFORM], "karpenter")
    prices = [
        float(document["spec"]["price"]) for document in found if document["kind"] == "NodeOverlay"
    ]
    assert prices[1] / prices[0] == pytest.approx(2.4, rel=1e-3)


def test_a_fleet_gets_all_machines_and_its_tags_name_the_publication():
    request = document(UNIFORM, "fleet")
    overrides = request["LaunchTemplateConfigs"][0]["Overrides"]
    assert [(override["InstanceType"], override["AvailabilityZone"]) for override in overrides] == [
        ("g5.12xlarge", "us-east-1b"),
        ("g4dn.12xlarge", "us-east-1a"),
    ]
    assert request["SpotOptions"]["MinTargetCapacity"] == 2
    aws_model.valid("ec2", "create_fleet", request)
    for tagged in document(UNIFORM, "fleet", rank=3)["TagSpecifications"]:
        tags = {tag["Key"]: tag["Value"] for tag in tagged["Tags"]}
        assert tags["srift:publication_id"] == "20261120T030000-ab12" and tags["srift:rank"] == "3"


def test_the_row_is_selected_by_goal_provider_and_rank():
    limited = [
        row(1, "1xg4dn.12xlarge", 9.0, goal="cheapest_within_deadline", constraint_hours=hours)
        for hours in (12.0, 24.0)
    ]
    rows = [*UNIFORM, *limited]
    chosen = selected(rows, goal="cheapest_within_deadline 24 h")
    assert chosen.first.row["constraint_hours"] == 24.0
    local = row(1, "1xlc.large", 1.0, provider="local")
    refused = [
        (rows, {}),
        (rows, {"goal": "cheapest_within_deadline"}),
        (rows, {"goal": "cheepest"}),
        (UNIFORM, {"rank": 6}),
        ([*UNIFORM, local], {}),
    ]
    for among, options in refused:
        with pytest.raises(SettingsError):
            selected(among, **options)
    with pytest.raises(SettingsError):
        select(UNIFORM, "resnet5", NOW)
    never = row(1, "1xg4dn.xlarge", 1.0) | {"status": "infeasible", "cluster": None}
    with pytest.raises(ExportRefused):
        selected([never])


def test_old_publications_and_missed_constraints_are_warned_of():
    assert selected(UNIFORM).warnings == []
    assert len(selected(UNIFORM, now=NOW + timedelta(days=3)).warnings) == 2
    assert len(selected(MIXED, rank=2).warnings) == 1
    first = row(1, "2xg5.12xlarge", 10.0, p_meets_constraint=0.6, p_required=None)
    assert selected([first]).warnings == []
    assert len(selected([first | {"p_required": 0.9}]).warnings) == 1


def test_newlines_in_names_stay_inside_comments():
    hostile = [row(1, "2xg5.12xlarge", 10.0, model_version="7\nimport os")]
    for target in ("torchrun", "skypilot", "karpenter"):
        assert "\nimport os" not in export(selected(hostile), target)[1]


def test_the_command_prints_or_writes_the_file_of_a_goal_or_of_the_only_goal(
    clean_environment, monkeypatch, tmp_path
):
    monkeypatch.chdir(furnished())
    monkeypatch.setenv("SRIFT_HOME", str(furnished() / "state"))
    words = ["export", "conv", "--to", "torchrun"]
    printed = CliRunner().invoke(app, [*words, "--goal", "fastest"])
    assert printed.exit_code == 0 and ast.parse(printed.stdout) and printed.stderr
    monkeypatch.chdir(tmp_path)
    stated = "[workloads.conv]\nsamples = 1\nglobal_batch = 8\ngoals = [{ goal = 'fastest' }]"
    (tmp_path / "srift.toml").write_text(stated)
    assert CliRunner().invoke(app, [*words, "--output", "shares.py"]).exit_code == 0
    assert (tmp_path / "shares.py").read_text() == printed.stdout
    edited = stated.replace("'fastest'", "'cheapest_within_deadline', hours = 0.01")
    (tmp_path / "srift.toml").write_text(edited)
    assert CliRunner().invoke(app, words).exit_code == 2


TRAINING = """
import sys
import torch, torch.distributed as dist
from torch import nn
import srift_shares as split

folder = sys.argv.pop()
end, dist.destroy_process_group = dist.destroy_process_group, lambda: None
split.main()  # its group serves the training too
rank = dist.get_rank()
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(nn.Linear(3, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = [(torch.full((3,), float(n % 5)) + torch.arange(3), torch.tensor([float(n)])) for n in range(19)]
loader = torch.utils.data.DataLoader(data, batch_sampler=split.SharesSampler(len(data), rank))
batches, seen = list(loader), list(split.SharesSampler(len(data), rank))
for first in range(0, len(batches), split.ACCUMULATION_STEPS):
    split.train_step(model, optimizer, nn.functional.mse_loss, batches[first : first + split.ACCUMULATION_STEPS])
torch.save([seen, model.module.state_dict()], f"{folder}/{rank}.pt")
end()
"""


@pytest.mark.local
def test_unequal_shares_train_like_one_process(tmp_path):
    shares = {"layout": "1", "batch_per_device": "3+1", "accumulation_steps": 2}
    unequal = row(1, "1xg5.12xlarge+1xg4dn.xlarge", 1.0, **shares)
    body, text = export(selected([unequal]), "torchrun")
    (tmp_path / "srift_shares.py").write_text(text)
    (tmp_path / "mine.py").write_text(TRAINING)
    port, started = str(free_port()), []
    for command in body["document"]["commands"]:  # of each node, run on this machine
        local = command.replace("ADDRESS-OF-NODE-0", "127.0.0.1").replace("29500", port)
        torchrun, *options, _ = shlex.split(local)
        assert torchrun == "torchrun"
        words = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", *options]
        words += ["mine.py", tmp_path]
        started.append(subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE, text=True))
    printed = "".join(process.communicate(timeout=120)[0] for process in started)
    assert [process.returncode for process in started] == [0, 0]
    assert "60 of 80" in printed and "rank 1: 1 of 4" in printed
    (first, weights), (second, others) = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    assert [len(losses) for losses in [*first, *second]] == [3] * 4 + [1] * 4
    assert len({*chain(*first, *second)}) == 16

    torch.manual_seed(0)
    alone = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for step in range(2):
        accumulated = slice(2 * step, 2 * step + 2)
        samples = torch.tensor([*chain(*first[accumulated], *second[accumulated])])[:, None]
        optimizer.zero_grad()
        inputs = samples % 5.0 + torch.arange(3)
        nn.functional.mse_loss(alone(inputs), samples.float()).backward()
        optimizer.step()
    torch.testing.assert_close(weights, alone.state_dict())
    torch.testing.assert_close(others, weights)
