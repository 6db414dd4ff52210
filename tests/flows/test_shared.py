"""One section of srift.toml moves an installation from its home to PostgreSQL and DuckLake, and no answer changes."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import boto3
import pandas as pd
import pytest
from moto.server import ThreadedMotoServer

from models.step_time.serialization import dump
from tasks.training import registry
from tasks.workspace.settings import SettingsError, load_settings
from tests import postgres
from tests.frozen.answers import said, standing_in, unpack
from tests.installed import model, provenance, scores
from warehouse.export import TABLES, read_published

psycopg2 = pytest.importorskip("psycopg2")
pytest.importorskip("duckdb_extension_ducklake")
FLOWS = ("reap", "market", "measure", "retrain", "publish")
OF_THE_REFRESH = {
    "publication_id",
    "refresh_id",
    "published_at",
    "judged_at",
    "price_as_of",
    "noted_order",
}


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with postgres.server() as folder:
        for database in ("team", "team_mlflow", "team_prefect"):
            postgres.create(folder, database)
        yield folder


def section(server: str) -> str:
    return f'\n[shared]\nhost = "{server}"\nuser = "{postgres.USER}"\ndatabase = "team"\ndata = "files"\n'


def published(folder: Path) -> dict[str, pd.DataFrame]:
    """Every published table, without what tells one refresh from another."""
    found = {name: read_published(folder / "state" / "published", name) for name in TABLES}
    return {
        name: frame.drop(columns=[*OF_THE_REFRESH & set(frame.columns)]).pipe(
            lambda one: one.iloc[one.astype(str).sort_values([*one.columns]).index].reset_index(
                drop=True
            )
        )
        for name, frame in found.items()
    }


def test_a_refresh_of_the_same_past_publishes_the_same_tables(
    own_environment: None, server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if os.geteuid() != 0 or len(os.sched_getaffinity(0)) < 2:
        pytest.skip("as another user or on one core fewer instance types are on offer")
    refresh = importlib.import_module("flows.refresh")
    for name in FLOWS:
        monkeypatch.setattr(refresh, name, getattr(refresh, name).fn)
    monkeypatch.setattr(
        importlib.import_module("flows.publish"), "publish_artifacts", lambda *_: None
    )
    tables = {}
    for kind in ("embedded", "shared"):
        folder = tmp_path / kind
        folder.mkdir()
        unpack(folder)
        (folder / "state" / "mlflow.db").unlink()  # both begin a registry
        with standing_in(folder) as home:
            if kind == "shared":
                with (folder / "srift.toml").open("a") as file:
                    file.write(section(server))
                assert "of raw_runs" in said("doctor", "--share-warehouse")
                (home / "warehouse.duckdb").unlink()
                load_settings().set_server_variables()
            ended = refresh.refresh.fn("local", 0.0)
            assert ended["published_rows"] and ended["promotion"].startswith("model version 1")
            tables[kind] = published(folder)
            assert (
                (home / "mlflow.db").exists()
                == (home / "warehouse.duckdb").exists()
                == (kind == "embedded")
            )
            if kind == "shared":
                assert list((folder / "files" / "mlflow").rglob("model.json"))
                assert list((folder / "files" / "warehouse").rglob("*.parquet"))
    assert len(tables["shared"]["recommendations"])
    for name in TABLES:
        pd.testing.assert_frame_equal(
            tables["embedded"][name], tables["shared"][name], rtol=1e-9, obj=name
        )


@pytest.mark.local
def test_registered_models_may_lie_in_s3(
    own_environment: None, server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3 = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    s3.start()
    try:
        address, port = s3.get_host_and_port()
        for name, value in {
            "AWS_ENDPOINT_URL_S3": f"http://{address}:{port}",  # the one variable that DuckLake's files go by, too
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
            "AWS_EC2_METADATA_DISABLED": "true",
        }.items():
            monkeypatch.setenv(name, value)
        bucket = boto3.client("s3", region_name="us-east-1")
        bucket.create_bucket(Bucket="team")
        (tmp_path / "srift.toml").write_text(
            section(server).replace('"files"', '"s3://team/srift"')
        )
        load_settings(tmp_path / "srift.toml").set_server_variables()
        version = registry.log_challenger(
            tmp_path,
            "ec2",
            model(),
            scoreboard=scores(),
            card="# a card",
            provenance=provenance(),
        )
        registry.promote(tmp_path, "ec2", version, "so says the rule")
        stored = {one["Key"] for one in bucket.list_objects_v2(Bucket="team")["Contents"]}
        assert all(one.startswith("srift/mlflow/srift-step-time-ec2/") for one in stored)
        assert any(one.endswith("/model.json") for one in stored) and any(
            one.endswith("/plot.png") for one in stored
        )
        assert not list(tmp_path.rglob("model.json"))
        found = registry.load_champion(tmp_path / "another machine's home", "ec2")
        assert found is not None and found.version == version and dump(found.model) == dump(model())
        asked = registry.example(found.model)
        served = registry.load_served(tmp_path, "ec2").predict(asked)
        assert served["step_s"].tolist() == model().predict(asked)["step_s"].tolist()
        for one in stored:
            bucket.delete_object(Bucket="team", Key=one)
        with pytest.raises(
            registry.RegistryError, match="could not be read, and nothing was decided"
        ):
            registry.load_champion(tmp_path, "ec2")
        bucket.delete_bucket(Bucket="team")
        with pytest.raises(
            registry.RegistryError, match="could not be read, and nothing was decided"
        ):
            registry.load_champion(tmp_path, "ec2")
    finally:
        s3.stop()


LONE_RUN = """
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


@pytest.mark.local
def test_the_server_of_a_lone_run_keeps_its_history_in_postgresql(
    server: str, tmp_path: Path
) -> None:
    (tmp_path / "srift.toml").write_text(section(server))
    env = {
        **os.environ,
        "SRIFT_ROOT": str(tmp_path),
        "SRIFT_HOME": str(tmp_path),
        "PREFECT_HOME": str(tmp_path),
    }
    run = [sys.executable, "-c", LONE_RUN]
    done = subprocess.run(run, env=env, stderr=subprocess.PIPE, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "prefect.db").exists()
    with closing(
        psycopg2.connect(host=server, user=postgres.USER, dbname="team_prefect")
    ) as connection:
        cursor = connection.cursor()
        cursor.execute(
            "select flow.name, flow_run.state_type::text from flow_run join flow on flow.id = flow_id"
        )
        assert cursor.fetchall() == [("nightly", "COMPLETED")]


@pytest.mark.parametrize(
    ("text", "refusal"),
    [
        ('host = "db"', "data is missing"),
        ('data = "files"', "host is missing"),
        ('host = "postgres://me:secret@db/x"\ndata = "files"', "is a URL"),
        ('host = "db"\ndata = "gs://bucket"', "s3://bucket/prefix"),
        (
            'host = "db"\ndata = "files"\npassword = "secret"',
            "shared.password: a password stands in no settings: set PGP",
        ),
        ('host = "db"\ndata = "files"\ndatabse = "x"', "did you mean"),
    ],
)
def test_half_a_section_and_a_password_are_refused(tmp_path: Path, text: str, refusal: str) -> None:
    (tmp_path / "srift.toml").write_text(f"[shared]\n{text}\n")
    with pytest.raises(SettingsError, match=refusal):
        load_settings(tmp_path / "srift.toml")


def test_servers_are_told_where_by_name_or_by_socket_and_never_the_password(tmp_path: Path) -> None:
    (tmp_path / "srift.toml").write_text(
        '[shared]\nhost = "db.example.org"\ndata = "s3://bucket/srift/"\n'
    )
    assert load_settings(tmp_path / "srift.toml").server_variables() == {
        "PREFECT_SERVER_DATABASE_CONNECTION_URL": "postgresql+asyncpg://srift@db.example.org:5432/srift_prefect",
        "MLFLOW_TRACKING_URI": "postgresql+psycopg2://srift@db.example.org:5432/srift_mlflow",
        "MLFLOW_DEFAULT_ARTIFACT_ROOT": "s3://bucket/srift/mlflow",
    }
    (tmp_path / "srift.toml").write_text("")
    assert load_settings(tmp_path / "srift.toml").server_variables() == {}
