"""A wrong name is refused before anything starts, with the nearest right ones."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tasks.providers.ec2.settings import AMI_PARAMETER
from tasks.workspace.settings import IMPORTED, SettingsError, load_settings
from tasks.workspace.shared import open_warehouse
from tasks.workspace.workspace import open_workspace, refuse_to_spend
from warehouse.database import WAIT_S
from warehouse.lake import TURN_S

FILE = """
[campaign]
max_usd = 2.0
[local.instance_types."lc.small"]
cores = 0.2
memory_gib = 2.0
bandwidth_gbps = 0.2
[workloads.tiny]
entrypoint = "tiny.py:build"
samples = 1000
global_batch = 16
goals = [{ goal = "cheapest" }]
"""


@pytest.fixture
def project(own_environment: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project of one workload; no variable of the session reaches it, and none that a command sets outlives it."""
    for name in [name for name in os.environ if name.startswith("SRIFT_")]:
        monkeypatch.delenv(name)
    (tmp_path / "srift.toml").write_text(FILE)
    (tmp_path / "tiny.py").write_text("def build(): ...\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def rewritten(project: Path, old: str, new: str) -> None:
    assert old in FILE
    (project / "srift.toml").write_text(FILE.replace(old, new))


WRONG_FILES = [
    ("[campaign]", "[campain]", "campain: unknown key; did you mean 'campaign'?"),
    ("max_usd", "max_usdd", "campaign.max_usdd: unknown key; did you mean 'max_usd'"),
    ("cores", "core", "local.instance_types.lc.small.core: unknown key; did you mean 'cores'"),
    ("samples", "sample", "workloads.tiny.sample: unknown key; did you mean 'samples'?"),
    (
        "samples",
        "flops_per_sample = 1e9\nsamples",
        "tiny.flops_per_sample: a fact of a workload and no setting",
    ),
    ("samples", "compile = true\nsamples", 'did you mean `switches = ["none", "compile"]`?'),
    ("samples", "bf16 = true\nsamples", 'did you mean `precisions = ["fp32", "bf16"]`?'),
    (
        "samples",
        "strategy = 1\nfsdp = true\nsamples",
        'did you mean `strategies = ["ddp", "fsdp"]`?',
    ),
    ("samples = 1000", "", "workloads.tiny.samples: this key is missing"),
    (
        "tiny.py:build",
        "code/tiny.py:build",
        "code/tiny.py; the path is looked for from the folder of srift.toml",
    ),
    ("samples", "parameters = 9\nsamples", "srift import --workloads FILE"),
    ('"cheapest" }', '"cheepest" }', "unknown goal 'cheepest'; did you mean 'cheapest'"),
    (
        '"cheapest" }',
        '"cheapest", hour = 2 }',
        "workloads.tiny.goals.0.hour: unknown key; did you mean 'hours'",
    ),
    ('"cheapest" }', '"cheapest_within_deadline" }', "takes hours"),
    (
        '"cheapest" }',
        '"cheapest" }, { goal = "cheapest", p_required = 0.5 }',
        "goal 'cheapest' stands twice",
    ),
    ("[campaign]", 'root = "/elsewhere"\n[campaign]', "root: unknown key"),
    ("[campaign]", "home = 3\n[campaign]", "home: "),
    ("tiny.py:build", "tinny.py:build", "did you mean 'tiny.py'?"),
    ("tiny.py:build", "tiny.py", "not of the form path/to/file.py:function"),
    ('"lc.small"', '"lc small"', "the name 'lc small' must be of letters"),
    ("[workloads.tiny]", '[workloads.""]', "the name '' must be of letters"),
    ("global_batch = 16", "global_batch = [16, 8]", "global_batch must be"),
    (
        "samples",
        'precisions = ["bf61"]\nsamples',
        "unknown precision 'bf61'; did you mean 'bf16'",
    ),
    ("samples", "precisions = []\nsamples", "workloads.tiny.precisions: "),
    ("samples", 'strategies = ["fsdpp"]\nsamples', "unknown strategy 'fsdpp'; did you mean 'fsdp'"),
    (
        "samples",
        'precisions = ["fp16"]\nstrategies = ["fsdp"]\nsamples',
        "fp16 with fsdp: no device sees all gradients",
    ),
    (
        "samples",
        'precisions = ["fp16"]\nstrategies = ["ddp", "ddp-mstopk"]\nsamples',
        "fp16 with ddp-mstopk: scaled gradients are not compressed",
    ),
    (
        "samples",
        'precisions = ["fp16"]\nstrategies = ["ddp", "adasum"]\nsamples',
        "fp16 with adasum: a scaled loss leaves steps out rank by rank",
    ),
    ("samples", 'switches = ["recompile"]\nsamples', "unknown switches 'recompile'; did you mean"),
    ("samples", 'switches = ["offload"]\nsamples', "offload takes fsdp or zero2"),
    (
        "samples",
        'strategies = ["zero1"]\nswitches = ["offload"]\nsamples',
        "offload takes fsdp or zero2",
    ),
    (
        "samples",
        'precisions = ["fp16"]\nstrategies = ["zero1"]\nsamples',
        "fp16 with zero1: an optimizer that scales",
    ),
    ("[campaign]", "[campaign", "not valid TOML"),
]
WRONG_SECTIONS = [  # in place of [ec2]
    ("[ec2]\nregion = []", "ec2.region: unknown key; did you mean 'regions'"),
    ('[ec2]\nregions = ["us-east-1a"]', "ec2.regions"),
    ("[ec2]\nregions = []", "ec2.regions: at least one that is known is wanted"),
    ('[ec2]\ninstance_types = ["G5 all"]', "ec2.instance_types"),
    ('[ec2]\nmarkets = ["sport"]', "ec2.markets"),
    ('[ec2]\nregions = "us-east-1"', "ec2.regions: a list is wanted"),
    ('[ec2]\nbukket = "a"', "ec2.bukket: unknown key; did you mean 'bucket'"),
    ('[ec2]\nbucket = "s3://mine/there"', "ec2.bucket"),
    ('[ec2]\nbucket = "my.bucket"', "ec2.bucket"),
    ('[ec2]\nprefix = "/srift/"', "ec2.prefix"),
    ('[ec2]\nprefix = "a/*"', "ec2.prefix: "),
    ('[ec2]\nprefix = "a/../b"', "ec2.prefix: "),
    ('[ec2]\ninstance_profile = "arn:aws:iam::1:instance-profile/x"', "ec2.instance_profile"),
    (
        '[ec2]\nsubnets = "pubic"',
        "ec2.subnets",
    ),
    ('[ec2]\nsubnet_ids = ["vpc-12345678"]', "ec2.subnet_ids"),
    ('[ec2]\nami_parameter = "ami-12345678"', "ec2.ami_parameter"),
    ("[ec2]\nvolume_gib = 4", "ec2.volume_gib: "),
    ('[ec2]\npython = "python3 -c x"', "ec2.python"),
    ('[ec2]\ndeployment = ""', "ec2.deployment"),
    ("[ec2]\nmax_usd_per_month = inf", "ec2.max_usd_per_month: "),
    ("[ec2]\nmax_usd_per_month = -1", "ec2.max_usd_per_month: "),
    ("[ec2]\nmax_minutes = 0", "ec2.max_minutes: "),
    (
        '[ec2.prices."p5.48xlarge"]\non_demand_usd_per_hours = 1',
        "did you mean 'on_demand_usd_per_hour'",
    ),
    ('[ec2.prices."p5.48xlarge"]\nspot_usd_per_hour = 0', "p5.48xlarge.spot_usd_per_hour: "),
    ('[ec2.prices."p5.48xlarge"]', "'p5.48xlarge' has no price"),
    ('[ec2.prices."p5.*"]\nspot_usd_per_hour = 1', "ec2.prices"),
    ('[ec2.discounts]\n"g5.*" = 1', "ec2.discounts.g5.*.on_demand: "),
    ('[ec2.discounts]\n"g5.*" = 28', "ec2.discounts.g5.*.on_demand: "),
    ('[ec2.discounts]\n"g5.*" = { sport = 0.1 }', "did you mean 'spot'"),
    ('[ec2.discounts]\n"G5 all" = 0.1', "ec2.discounts"),
]


WRONG_FILES += [
    ("[campaign]", f"{section}\n[campaign]", sentence) for section, sentence in WRONG_SECTIONS
]


@pytest.mark.parametrize(("old", "new", "sentence"), WRONG_FILES)
def test_a_wrong_file_is_refused_with_the_nearest_right_name(
    project: Path, old: str, new: str, sentence: str
) -> None:
    rewritten(project, old, new)
    with pytest.raises(SettingsError) as refused:
        load_settings()
    assert sentence in str(refused.value)


def test_a_misspelt_key_is_said_once_and_not_as_a_missing_one_too(project: Path) -> None:
    rewritten(project, "global_batch", "globel_batch")
    with pytest.raises(SettingsError) as refused:
        load_settings()
    (line,) = str(refused.value).splitlines()[1:]
    assert line == "  workloads.tiny.globel_batch: unknown key; did you mean 'global_batch'?"


WRONG_VARIABLES = [
    ("SRIFT_HOM", "x", "unknown variable SRIFT_HOM; did you mean 'SRIFT_HOME'"),
    ("SRIFT_CAMPAIGN__MAX_USDD", "1", "campaign.max_usdd: unknown key; did you mean 'max_usd'"),
    ("SRIFT_HOME__X", "1", "unknown variable SRIFT_HOME__X; did you mean 'SRIFT_HOME'"),
    ("SRIFT_CAMPAIGN__MAX_USD__A", "1", "SRIFT_CAMPAIGN__MAX_USD__A: campaign.max_usd: "),
    ("SRIFT_CAMPAIGN__MARKET__X", "1", "SRIFT_CAMPAIGN__MARKET__X: campaign.market: "),
    ("SRIFT_CAMPAIGN__MAX_USD", "cheap", "campaign.max_usd: "),
    ("SRIFT_CAMPAIGN", "cheap", "must be JSON"),
    ("SRIFT_EC2__VOLUME_GIB", "4", "ec2.volume_gib: "),
    ("SRIFT_EC2__REGIONS", "us-east-1", "must be JSON"),
    ("SRIFT_EC2", '{"bukket": "a"}', "ec2.bukket: unknown key; did you mean 'bucket'"),
    (
        "SRIFT_WORKLOADS__TINY__GOALS",
        '[{"goal": "cheepest"}]',
        "workloads.tiny.goals.0.goal: unknown goal 'cheepest'",
    ),
    (
        "SRIFT_LOCAL__INSTANCE_TYPES__LC.SMALLL__CORES",
        "1",
        "unknown instance type 'lc.smalll'; did you mean 'lc.small'",
    ),
    ("SRIFT_LOCAL__INSTANCE_TYPS__LC.SMALL__CORES", "1", "did you mean 'instance_types'?"),
    ("SRIFT_WORKLOADS__TINNY__SAMPLES", "1", "unknown workload 'tinny'; did you mean 'tiny'?"),
]


@pytest.mark.parametrize(("name", "value", "sentence"), WRONG_VARIABLES)
def test_a_wrong_variable_is_refused_with_the_nearest_right_name(
    project: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str, sentence: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(SettingsError) as refused:
        load_settings()
    assert sentence in str(refused.value)
    assert name in str(refused.value) and "srift.toml" not in str(refused.value), (
        "the variable is to be mended"
    )


def test_what_is_wrong_is_reported_of_the_file_and_of_each_variable_by_itself(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rewritten(project, "[campaign]", "[ec2]\nvolume_gib = 4\n[campaign]\nmax_hosts = 0")
    monkeypatch.setenv("SRIFT_EC2", '{"max_hosts": 65}')  # leaves volume_gib to the file
    monkeypatch.setenv("SRIFT_EC2__MAX_MINUTES", "0")
    monkeypatch.setenv(
        "SRIFT_CAMPAIGN__MAX_HOSTS", "2"
    )  # wins over the file's, so that nothing is wrong with it
    with pytest.raises(SettingsError) as refused:
        load_settings()
    problems = [line.split(": ")[:2] for line in str(refused.value).splitlines()]
    assert problems == [
        [f"{project / 'srift.toml'}:"],
        ["  ec2.volume_gib", "Input should be greater than or equal to 8"],
        ["SRIFT_EC2", "ec2.max_hosts"],
        ["SRIFT_EC2__MAX_MINUTES", "ec2.max_minutes"],
    ]


def test_variables_win_over_the_file_and_an_empty_one_is_as_good_as_none(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SRIFT_CAMPAIGN__MAX_USD", "0.5")
    monkeypatch.setenv("SRIFT_LOCAL__INSTANCE_TYPES__LC.SMALL__CORES", "0.3")
    for empty in ("SRIFT_HOME", "SRIFT_ROOT", "SRIFT_CAMPAIGN__MAX_MINUTES", "SRIFT_SOMETHING"):
        monkeypatch.setenv(empty, "")
    settings = load_settings()
    assert (
        settings.campaign.max_usd == 0.5 and settings.local.instance_types["lc.small"].cores == 0.3
    )
    assert settings.home == project / ".srift" and settings.root == project


def test_the_root_is_the_folder_of_the_file_wherever_one_starts_to_look(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    below = project / "deep" / "below"
    below.mkdir(parents=True)
    monkeypatch.setenv("SRIFT_ROOT", str(below))
    monkeypatch.chdir("/")
    assert load_settings().root == project
    monkeypatch.setenv("SRIFT_HOME", str(below / "state"))
    assert load_settings().home == below / "state"


@pytest.mark.parametrize(
    ("stated", "home"), [("state", "{project}/state"), ("/srv/state", "/srv/state")]
)
def test_a_home_in_the_file_is_beside_the_file(
    project: Path, monkeypatch: pytest.MonkeyPatch, stated: str, home: str
) -> None:
    rewritten(project, "[campaign]", f'home = "{stated}"\n[campaign]')
    monkeypatch.setenv("SRIFT_ROOT", str(project))
    monkeypatch.chdir("/")
    assert load_settings().home == Path(home.format(project=project))


def test_the_same_goal_with_another_constraint_is_another_goal(project: Path) -> None:
    both = [f'{{ goal = "cheapest_within_deadline", hours = {hours} }}' for hours in (1, 2)]
    rewritten(project, '{ goal = "cheapest" }', ", ".join(both))
    assert [goal.hours for goal in load_settings().workload("tiny").goals] == [1, 2]


def test_a_workload_without_an_entrypoint_is_known_by_imports_alone(project: Path) -> None:
    rewritten(project, 'entrypoint = "tiny.py:build"\n', "")
    settings = load_settings()
    assert settings.workload("tiny").digest == IMPORTED
    with pytest.raises(SettingsError, match="tiny has no entrypoint"):
        settings.entrypoint("tiny")
    here = open_workspace("local")
    assert [one.name for one in here.workloads] == ["tiny"] and here.measurable == []


def test_ec2_opens_without_credentials_and_asks_nothing(project: Path) -> None:
    here = open_workspace("ec2")
    assert here.provider.name == "ec2" and here.provider.leases() == []


@pytest.mark.parametrize(("provider", "max_usd", "bucket", "refused"), [
    ("ec2", None, "mine-1", "--max-usd"), ("ec2", 3.0, None, "bucket under \\[ec2\\]"), ("ec2", 3.0, "mine-1", ""),
    ("ec2", 0.0, None, ""), ("local", None, None, ""), ("ec2", float("inf"), "mine-1", "no number of dollars"),
    ("local", float("nan"), None, "no number of dollars"),
])  # fmt: skip
def test_ec2_spends_nothing_that_nobody_allowed(
    project: Path, provider: str, max_usd: float | None, bucket: str | None, refused: str
) -> None:
    if bucket:
        rewritten(project, "[campaign]", f'[ec2]\nbucket = "{bucket}"\n[campaign]')
    if not refused:
        refuse_to_spend(provider, max_usd)
        return
    with pytest.raises(SettingsError, match=refused):
        refuse_to_spend(provider, max_usd)


def test_ec2_launches_nothing_until_a_bucket_is_named_and_the_rest_has_defaults(
    project: Path,
) -> None:
    plain = load_settings().ec2
    assert (plain.bucket, plain.subnet_ids, plain.subnets) == (None, (), "public")
    assert plain.prefix == plain.deployment == "srift"
    stated = '[ec2]\nbucket = "mine-1"\nprefix = "team/srift"\nsubnet_ids = ["subnet-12345678"]\n[campaign]'
    rewritten(project, "[campaign]", stated)
    named = load_settings().ec2
    assert (named.bucket, named.prefix) == ("mine-1", "team/srift")
    assert named.subnet_ids == ("subnet-12345678",)


def test_the_image_of_ec2s_machines_has_the_torch_that_is_pinned() -> None:
    pins = (Path(__file__).parents[3] / "constraints.txt").read_text().splitlines()
    (pinned,) = [line.partition("==")[2] for line in pins if line.startswith("torch==")]
    assert f"-pytorch-{pinned.rpartition('.')[0]}-" in AMI_PARAMETER


def test_prices_of_ones_own_are_by_type_or_pattern_and_by_market(project: Path) -> None:
    sections = (
        '[ec2.discounts]\n"g5.*" = 0.28\n"p5.*" = { on_demand = 0.4, spot = 0.05 }\n'
        '[ec2.prices."p5.48xlarge"]\non_demand_usd_per_hour = 39.8\n[campaign]'
    )
    rewritten(project, "[campaign]", sections)
    ec2 = load_settings().ec2
    assert {name: (one.on_demand, one.spot) for name, one in ec2.discounts.items()} == {
        "g5.*": (0.28, 0.0),
        "p5.*": (0.4, 0.05),
    }
    own = ec2.prices["p5.48xlarge"]
    assert (own.on_demand_usd_per_hour, own.spot_usd_per_hour) == (39.8, None)


def test_a_writer_of_a_shared_warehouse_waits_for_its_turn_longer_than_for_a_file(
    tmp_path: Path,
) -> None:
    file = tmp_path / "srift.toml"
    file.write_text("")
    assert open_warehouse(load_settings(file))._wait_s == WAIT_S
    file.write_text('[shared]\nhost = "h"\ndatabase = "d"\nuser = "u"\ndata = "/tmp/data"\n')
    assert open_warehouse(load_settings(file))._wait_s == TURN_S > WAIT_S
    assert open_warehouse(load_settings(file), wait_s=1.0)._wait_s == 1.0
