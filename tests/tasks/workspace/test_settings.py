"""srift.toml and SRIFT_* variables: what is refused, what wins, what a workload gets."""

import os
from contextlib import nullcontext
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tasks.providers.ec2.settings import AMI_PARAMETER
from tasks.workspace.settings import IMPORTED, SettingsError, Shared, load_settings
from tasks.workspace.shared import open_warehouse
from tasks.workspace.workspace import open_workspace, refuse_to_spend
from warehouse.lake import SharedWarehouse

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
SHARED = '[shared]\nhost = "db.example.org"\ndata = "s3://bucket/srift/"\n'


@pytest.fixture
def project(clean_environment, tmp_path, monkeypatch):
    for name in [name for name in os.environ if name.startswith("SRIFT_")]:
        monkeypatch.delenv(name)
    (tmp_path / "srift.toml").write_text(FILE)
    (tmp_path / "tiny.py").write_text("def build(): ...\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def rewrite(project, old, new):
    assert old in FILE
    (project / "srift.toml").write_text(FILE.replace(old, new, 1))


def with_section(project, section):
    rewrite(project, "[campaign]", f"{section}\n[campaign]")


# Old text, new text, and the key that is named.
WRONG = r"""
[campaign] => [campain] => campain
"cheapest" } => "cheapest", hours = 2 } => workloads.tiny.goals.0
"cheapest" } => "cheapest" }, { goal = "cheapest" } => workloads.tiny
[campaign] => root = "/elsewhere"\n[campaign] => root
[campaign] => [campaign => TOML
[campaign] => [campaign]\nmax_minutes = inf => campaign.max_minutes
tiny.py:build => tinny.py:build => 'tiny.py'
tiny.py:build => tiny.py => workloads.tiny.entrypoint
"lc.small" => "lc small" => lc small
[workloads.tiny] => [workloads."a b"] => a b
global_batch = 16 => global_batch = [16, 8] => workloads.tiny.global_batch:
global_batch = 16 => global_batch = [16, "x"] => workloads.tiny.global_batch:
"cheapest" } => "quickest" } => fastest
samples => precisions = ["bf61"]\nsamples => 'bf16'
samples => precisions = ["fp16"]\nstrategies = ["fsdp"]\nsamples => fp16
samples => switches = ["offload"]\nsamples => offload
samples => arguments = { data = "x" }\ndata = "photos"\nsamples => data
samples => env = { LD_PRELOAD = "x" }\nsamples => LD_PRELOAD
entrypoint = "tiny.py:build" => requirements = "r.txt" => requirements
[campaign] => [ec2]\nbucket = "s3://mine/there"\n[campaign] => ec2.bucket
[campaign] => [shared]\nhost = "db"\ndata = "gs://b"\n[campaign] => shared.data
[campaign] => [shared]\npassword = "secret"\n[campaign] => shared.password
"""


@pytest.mark.parametrize("row", WRONG.strip().splitlines())
def test_a_wrong_file_is_refused_and_the_key_is_named(project, row):
    old, new, key = row.replace(r"\n", "\n").split(" => ")
    rewrite(project, old, new)
    with pytest.raises(SettingsError) as refused:
        load_settings()
    assert key in str(refused.value) and "secret" not in str(refused.value)


# Name, value, and the key that is named.
VARIABLES = """
SRIFT_CAMPAIN__MAX_USD 1 campain
SRIFT_CAMPAIGN cheap campaign
SRIFT_CAMPAIGN [1 SRIFT_CAMPAIGN
SRIFT_CAMPAIGN__MAX_USD__X 1 SRIFT_CAMPAIGN__MAX_USD__X
SRIFT_WORKLOADS__TINNY__SAMPLES 1 workloads.tinny
"""


@pytest.mark.parametrize("row", VARIABLES.strip().splitlines())
def test_a_wrong_variable_is_refused(project, monkeypatch, row):
    name, value, key = row.split()
    monkeypatch.setenv(name, value)
    with pytest.raises(SettingsError, match=key):
        load_settings()


def test_variables_win_over_the_file_and_an_empty_one_counts_as_none(project, monkeypatch):
    monkeypatch.setenv("SRIFT_CAMPAIGN__MAX_USD", "0.5")
    monkeypatch.setenv("SRIFT_LOCAL__INSTANCE_TYPES__LC.SMALL__CORES", "0.3")
    for empty in ("SRIFT_HOME", "SRIFT_ROOT", "SRIFT_CAMPAIGN__MAX_MINUTES", "SRIFT_SOMETHING"):
        monkeypatch.setenv(empty, "")
    settings = load_settings()
    assert settings.campaign.max_usd == 0.5
    assert settings.local.instance_types["lc.small"].cores == 0.3
    assert settings.home == project / ".srift" and settings.root == project


def test_a_section_in_a_variable_changes_only_the_keys_that_it_names(project, monkeypatch):
    rewrite(project, "[campaign]", "[ec2]\nmax_usd_per_month = 20.0\n[campaign]")
    monkeypatch.setenv("SRIFT_EC2", '{"regions": ["us-west-2"]}')
    monkeypatch.setenv("srift_ec2__max_hosts", "9")
    ec2 = load_settings().ec2
    assert (ec2.max_usd_per_month, ec2.regions, ec2.max_hosts) == (20.0, ("us-west-2",), 9)


def test_root_and_home_from_anywhere(project, monkeypatch):
    below = project / "deep/below"
    below.mkdir(parents=True)
    monkeypatch.setenv("SRIFT_ROOT", str(below))
    monkeypatch.chdir("/")
    rewrite(project, "[campaign]", 'home = "state"\n[campaign]')
    assert (load_settings().root, load_settings().home) == (project, project / "state")
    monkeypatch.setenv("SRIFT_HOME", f"{below}/state")
    assert load_settings().home == below / "state"
    monkeypatch.chdir(below)
    monkeypatch.setenv("SRIFT_HOME", "here")
    assert load_settings().home == below / "here"
    if os.geteuid() == 0:
        os.chown(project / "srift.toml", 65534, 65534)
        with pytest.raises(SettingsError, match="another user"):
            load_settings()


def test_the_facts_of_a_transformer_follow_from_its_shape(project):
    shape = "{ layers = 2, hidden = 64, sequence = 32, parameters = 1000 }"
    rewrite(project, "samples", f"transformer = {shape}\nsequence = 16\nsamples")
    file = project / "srift.toml"
    file.write_text(file.read_text(), encoding="utf-8-sig")
    found = load_settings().workload("tiny")
    assert (found.layers, found.hidden, found.sequence) == (2, 64, 16)
    assert found.gradient_bytes == 4000
    for wrong in ('"absent.json"', '"tiny.py"', "{ layers = 2 }"):
        rewrite(project, "samples", f"transformer = {wrong}\nsamples")
        with pytest.raises(SettingsError, match="transformer"):
            load_settings().workload("tiny")
    with pytest.raises(SettingsError, match="transformer"):
        load_settings()


def test_a_workload_without_an_entrypoint_is_imported(project):
    rewrite(project, 'entrypoint = "tiny.py:build"\n', "")
    settings = load_settings()
    assert settings.workload("tiny").digest == IMPORTED
    with pytest.raises(SettingsError):
        settings.source("tiny")
    assert open_workspace("local").measurable == []


@pytest.mark.parametrize(
    "provider, max_usd, bucket, allowed",
    [
        ("ec2", None, True, False),
        ("ec2", 3.0, False, False),
        ("ec2", 3.0, True, True),
        ("ec2", 0.0, False, True),
        ("local", None, False, True),
        ("ec2", float("inf"), True, False),
        ("local", float("nan"), False, False),
    ],
)
def test_nothing_is_spent_without_a_cap_and_a_bucket(project, provider, max_usd, bucket, allowed):
    if bucket:
        with_section(project, '[ec2]\nbucket = "mine-1"')
    with nullcontext() if allowed else pytest.raises(SettingsError):
        refuse_to_spend(provider, max_usd)


def test_the_shared_stores_are_named_without_a_password(project, monkeypatch):
    monkeypatch.setattr("os.environ", {"MLFLOW_TRACKING_URI": "mine"})
    load_settings().set_server_variables()
    assert os.environ == {"MLFLOW_TRACKING_URI": "mine"}
    with_section(project, SHARED)
    user = "srift@db.example.org:5432"
    load_settings().set_server_variables()
    assert os.environ.pop("MLFLOW_TRACKING_URI") == "mine"
    load_settings().set_server_variables()
    assert os.environ == {
        "PREFECT_SERVER_DATABASE_CONNECTION_URL": f"postgresql+asyncpg://{user}/srift_prefect",
        "MLFLOW_TRACKING_URI": f"postgresql+psycopg2://{user}/srift_mlflow",
        "MLFLOW_DEFAULT_ARTIFACT_ROOT": "s3://bucket/srift/mlflow",
    }
    assert isinstance(open_warehouse(load_settings()), SharedWarehouse)


def test_a_slash_in_a_user_does_not_change_the_host():
    shared = Shared(host="db", user="team/x", data="/data")
    assert urlsplit(shared.url("srift")).hostname == "db"


def test_the_image_of_ec2_has_the_pinned_torch():
    pins = (Path(__file__).parents[3] / "constraints.txt").read_text().splitlines()
    [pinned] = [line.partition("==")[2] for line in pins if line.startswith("torch==")]
    assert f"-pytorch-{pinned.rpartition('.')[0]}-" in AMI_PARAMETER
