"""[shared]: PostgreSQL and DuckLake in place of the home's files."""

import os
import subprocess
import sys
from contextlib import closing

import boto3
import pytest
from moto.server import ThreadedMotoServer

from tasks.training import registry
from tasks.workspace.settings import load_settings
from tests import postgres
from tests.installed import model, provenance, scores

pytestmark = [pytest.mark.slow, pytest.mark.local]
psycopg2 = pytest.importorskip("psycopg2")


@pytest.fixture(scope="module")
def server():
    with postgres.server() as folder:
        for database in ("team", "team_mlflow", "team_prefect"):
            postgres.create(folder, database)
        yield folder


def section(server, data="files"):
    user = f'user = "{postgres.USER}"\ndatabase = "team"'
    return f'[shared]\nhost = "{server}"\n{user}\ndata = "{data}"\n'


@pytest.fixture
def bucket(monkeypatch):
    """A bucket of a fake S3."""
    s3 = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    s3.start()
    address, port = s3.get_host_and_port()
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://{address}:{port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    boto3.client("s3", region_name="us-east-1").create_bucket(Bucket="team")
    yield "team"
    s3.stop()


def keys(bucket):
    found = boto3.client("s3", region_name="us-east-1").list_objects_v2(Bucket=bucket)
    return [one["Key"] for one in found.get("Contents", ())]


def test_registered_models_may_lie_in_s3(own_environment, server, bucket, tmp_path):
    (tmp_path / "srift.toml").write_text(section(server, f"s3://{bucket}/srift"))
    load_settings(tmp_path / "srift.toml").set_server_variables()
    version = registry.log_challenger(
        tmp_path, "ec2", model(), scoreboard=scores(), card="", provenance=provenance()
    )
    registry.promote(tmp_path, "ec2", version, "better")
    assert all(key.startswith("srift/mlflow/srift-step-time-ec2/") for key in keys(bucket))
    assert not list(tmp_path.rglob("model.pickle"))
    found = registry.load_champion(tmp_path / "another machine's home", "ec2")
    assert found is not None and found.version == version
    asked = registry.example(model())
    assert found.model.predict(asked).equals(model().predict(asked))
    for key in keys(bucket):
        boto3.client("s3", region_name="us-east-1").delete_object(Bucket=bucket, Key=key)
    with pytest.raises(registry.RegistryError):
        registry.load_champion(tmp_path, "ec2")


RUN = """
from tasks.workspace.settings import load_settings
load_settings().set_server_variables()
from prefect import flow
from tasks.workspace.prefect_server import own_server

@flow
def nightly():
    return 1

with own_server():
    nightly()
"""


def test_prefect_keeps_its_history_in_postgresql(server, tmp_path):
    (tmp_path / "srift.toml").write_text(section(server))
    env = dict(os.environ)
    env |= dict.fromkeys(("SRIFT_ROOT", "SRIFT_HOME", "PREFECT_HOME"), str(tmp_path))
    done = subprocess.run([sys.executable, "-c", RUN], env=env, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "prefect.db").exists()
    with closing(
        psycopg2.connect(host=server, user=postgres.USER, dbname="team_prefect")
    ) as connection:
        cursor = connection.cursor()
        cursor.execute("select name, state_type::text from flow_run")
        ((_, state),) = cursor.fetchall()
    assert state == "COMPLETED"
