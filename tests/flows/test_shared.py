"""[shared]: PostgreSQL and DuckLake in place of the home's files."""

import os
import subprocess
import sys
from contextlib import closing

import pytest

from tasks.training import registry
from tasks.workspace.settings import load_settings
from tests import postgres
from tests.installed import log_champion, model

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


def test_registered_models_may_lie_in_s3(clean_environment, server, s3, tmp_path):
    def keys():
        return [entry["Key"] for entry in s3.list_objects_v2(Bucket="team")["Contents"]]

    s3.create_bucket(Bucket="team")
    (tmp_path / "srift.toml").write_text(section(server, "s3://team/srift"))
    settings = load_settings(tmp_path / "srift.toml")
    settings.set_server_variables()
    version = log_champion(tmp_path, "ec2")
    assert all(key.startswith("srift/mlflow/srift-step-time-ec2/") for key in keys())
    assert not list(tmp_path.rglob("model.pickle"))
    url = postgres.admit_reader(settings.shared.url("team_mlflow"))
    reader = psycopg2.connect(url)
    with closing(reader), pytest.raises(psycopg2.Error, match="permission denied"):
        reader.cursor().execute("delete from registered_model_aliases")
    os.environ["MLFLOW_TRACKING_URI"] = url.replace("postgresql", "postgresql+psycopg2", 1)
    found = registry.load_champion(tmp_path / "a reader's home", "ec2")
    assert found.version == version
    setups = registry.example(model())
    assert found.model.predict(setups).equals(model().predict(setups))
    for key in keys():
        s3.delete_object(Bucket="team", Key=key)
    with pytest.raises(registry.RegistryError):
        registry.load_champion(tmp_path, "ec2")


RUN = """
from tasks.workspace.settings import load_settings
load_settings().set_server_variables()
from prefect import flow
from tasks.workspace.prefect_server import local_server

@flow
def nightly():
    return 1

with local_server():
    nightly()
"""


def test_prefect_keeps_its_history_in_postgresql(server, tmp_path):
    (tmp_path / "srift.toml").write_text(section(server))
    homes = dict.fromkeys(("SRIFT_ROOT", "SRIFT_HOME", "PREFECT_HOME"), str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-c", RUN], env=os.environ | homes, capture_output=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "prefect.db").exists()
    with closing(
        psycopg2.connect(host=server, user=postgres.USER, dbname="team_prefect")
    ) as connection:
        cursor = connection.cursor()
        cursor.execute("select state_type::text from flow_run")
        assert cursor.fetchall() == [("COMPLETED",)]
