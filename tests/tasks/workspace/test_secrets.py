"""Credentials go to AWS alone: not to a log, the home, the bucket, a machine or the table."""

import logging
from datetime import UTC, datetime

import pytest

from models.domain.cluster import Cluster
from tasks.doctor.checks import examine, refuse_unless_well
from tasks.doctor.findings import as_json, as_text
from tasks.execution.collect import collect
from tasks.market import offers as prices
from tasks.providers.base import ProviderError
from tasks.providers.ec2 import api as ec2_api
from tasks.recommendation import publication
from tasks.workspace.workspace import open_workspace
from tests.fake_ec2 import FakeAws

SECRETS = {
    "AWS_ACCESS_KEY_ID": "AKIACANARYCANARY0001",
    "AWS_SECRET_ACCESS_KEY": "canary/of-a-secret+key",
    "AWS_SESSION_TOKEN": "canary-of-a-session-token==",
}


def test_secrets_are_nowhere_after_prices_a_launch_a_refusal_and_a_publication(
    ec2_project, monkeypatch, caplog, capfd
):
    now = datetime.now(UTC)
    aws = FakeAws(now=now)
    monkeypatch.setattr(ec2_api, "spot_advisor", dict)
    monkeypatch.setattr(ec2_api, "boto_clients", lambda: aws.clients)
    monkeypatch.setattr(ec2_api, "AwsClock", lambda: aws.clock)
    with caplog.at_level(logging.INFO):
        for name, value in SECRETS.items():
            monkeypatch.setenv(name, value)
        here = open_workspace("ec2")
        here.warehouse.create()
        refuse_unless_well(here.settings, "ec2", 5.0)
        findings = examine(here.settings, "ec2")
        prices.note_definitions(here, now)
        outputs = [prices.snapshot_offers(here, "refresh-1", now)]
        packaged = here.provider.packaged_offers()  # type: ignore[attr-defined]
        offer = next(
            candidate for candidate in packaged if candidate.instance_type.name == "g4dn.xlarge"
        )
        with here.provider.acquire(
            Cluster.of((1, offer)),
            lease_id="refresh-1-00",
            deadline_s=600.0,
            seed=1,
            max_usd_per_hour=1.0,
        ):
            [machine] = aws.alive()
            stored = {key: f"{key} {content!r}" for key, (content, _) in aws.s3.objects.items()}
        collect(here, now)
        publication.export_copies(here)
        with pytest.raises(ProviderError) as refused:
            ec2_api.connect().ask("s3:GetObject", "us-east-1", Bucket="mailbox", Key="nothing")
        outputs += [str(refused.value), as_text(findings), repr(as_json(findings))]
        outputs += [repr(here), repr(vars(here.provider)), machine.user_data]
    files = [path for path in ec2_project.rglob("*") if path.is_file()]
    assert {"warehouse.duckdb", "recommendations.duckdb"} <= {path.name for path in files}
    texts = dict(enumerate([*outputs, *capfd.readouterr(), caplog.text])) | stored
    texts |= {path: path.read_bytes().decode(errors="replace") for path in files}
    assert stored
    for secret in SECRETS.values():
        assert [where for where, text in texts.items() if secret in text] == []
