"""What an operator sees of a refresh on Prefect's pages."""

import shutil
from unittest.mock import DEFAULT, Mock

import pandas as pd
import pytest
from prefect.client.orchestration import get_client
from prefect.logging.handlers import APILogHandler

from flows.refresh import refresh
from tasks.providers.base import ProviderError
from tasks.workspace.prefect_server import local_server
from tests.flows.test_cli import enter
from tests.flows.test_measure import LOCAL, Measuring
from tests.installed import furnished


@pytest.mark.slow
@pytest.mark.local
def test_a_refresh_asks_services_again_and_shows_names_lines_artifacts_and_what_to_do(
    monkeypatch, tmp_path, caplog
):
    project = shutil.copytree(furnished(), tmp_path / "project")
    machines = Measuring(project / "state")
    for name, task in (("offers", "market.ask"), ("reap", "reap.end_overdue")):
        once = Mock(side_effect=[ProviderError, DEFAULT, DEFAULT], wraps=getattr(machines, name))
        monkeypatch.setattr(machines, name, once)
        monkeypatch.setattr(f"flows.{task}.retry_delay_seconds", 0)
    monkeypatch.setattr(LOCAL, Mock(return_value=machines))
    enter(project, monkeypatch)
    monkeypatch.setattr("tasks.reporting.progress.Reporter.watch", Mock())  # so progress is at 0 %
    caplog.set_level("INFO", "prefect")
    monkeypatch.setenv("MLFLOW_PAGES_URI", "http://mlflow")
    with local_server(), get_client(sync_client=True) as client:
        refresh("local", 2.4)
        failed = refresh("ec2", return_state=True)
        APILogHandler().flush()
        names = {run.id: run.name for run in client.read_flow_runs()}
        lines = [(names[line.flow_run_id], line.message) for line in client.read_logs()]
        shown = {artifact.key: artifact for artifact in client.read_artifacts() if artifact.key}
        bought = len(machines.requested)
        again = refresh("local", 0.0)
    assert (
        machines.offers.call_count == machines.reap.call_count == 3
        and len(machines.requested) == bought
    )
    assert again["measured"]["launches"] == 0
    rows = pd.read_parquet(project / "state/published/recommendations.parquet")
    assert set(rows["publication_id"]) == {again["refresh_id"]}
    assert {name.partition(" ")[2] for name in names.values()} == {"local", "ec2"}
    pages = {name for name, line in lines if f" {machines.requested[0]}: " in line}
    assert pages == {"refresh local", "measure local"}
    assert shown["measuring"].data == 100.0 and '-02"' in shown["launches"].data
    for text in (
        f"{bought} launches",
        "http://mlflow/#/models/srift-step-time-local/",
        "Report page: http://mlflow/#/experiments/",
    ):
        assert text in shown["refresh"].data
    assert all(artifact.description for artifact in shown.values())
    assert "--max-usd" in failed.message and failed.message in lines[-1][1]
