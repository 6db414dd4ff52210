"""The doctor of data: missing data are wrong, invisible data are a note with a policy."""

import json

import pytest

from tasks.doctor.aws import examine_ec2
from tasks.workspace.settings import load_settings
from tests.ec2_home import project
from tests.fake_ec2 import NOON, FakeAws
from tests.world.policy import allows


@pytest.fixture
def aws():
    made = FakeAws()
    made.s3.buckets.add("photos")
    made.s3.objects["cats/1.jpg"] = (b"x" * 2**20, NOON)
    return made


def having(folder, data):
    file = project(folder)
    file.write_text(file.read_text().replace("samples", f'data = "{data}"\nsamples'))
    return load_settings(file)


def of_data(aws, settings):
    found = [
        finding
        for finding in examine_ec2(settings, aws.clients)
        if finding.check.startswith("data of ")
    ]
    assert {finding.check for finding in found} == {"data of conv"}
    return [(finding.status, finding.says) for finding in found]


def test_an_address_that_can_be_listed_is_well_and_the_statement_for_the_machines_is_printed(
    aws, tmp_path
):
    well, note = of_data(aws, having(tmp_path, "s3://photos/cats"))
    assert well[0] == "ok" and "1.0 MiB" in well[1]
    assert note[0] == "note" and "s3:GetObject" in note[1]
    statements = json.loads(note[1][note[1].index("[") :])
    assert allows(statements, "s3:ListBucket", "arn:aws:s3:::photos", "u", "cats/")
    assert allows(statements, "s3:GetObject", "arn:aws:s3:::photos/cats/1.jpg", "u")
    assert not allows(statements, "s3:GetObject", "arn:aws:s3:::photos/dogs/1.jpg", "u")


@pytest.mark.parametrize(
    "data, says",
    [
        ("s3://nobody/cats", "NoSuchBucket"),
        ("images", "images"),
    ],
)
def test_what_is_not_there_is_wrong(aws, tmp_path, data, says):
    first = of_data(aws, having(tmp_path, data))[0]
    assert first[0] == "wrong" and says in first[1]


def test_data_that_this_identity_may_not_list_are_a_note(aws, tmp_path):
    settings = having(tmp_path, "s3://photos/cats")
    aws.fails("s3:ListBucket", "AccessDenied", times=9)
    assert of_data(aws, settings)[0][0] == "note"
