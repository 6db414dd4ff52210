"""The user-data script: complete, small enough, and safe from its values."""

import re
import subprocess

import pytest

from tasks.providers.base import NotSupported
from tasks.providers.ec2.userdata import user_data

GOOD = {
    "bucket": "srift-123",
    "prefix": "team/srift",
    "region": "us-east-1",
    "code_sha256": "ab" * 32,
    "lease": "20261120-abc",
    "role_id": "AROAEXAMPLEEXAMPLE",
    "python": "/opt/pytorch/bin/python3",
}


def script(deadline_s=3601.0, **changed):
    return user_data(deadline_s, **GOOD | changed)


def test_it_first_sets_its_own_end_and_goes_down_at_any_later_boot(tmp_path):
    """A reboot loses the timer."""
    first, *lines = script().splitlines()
    assert first == "#!/bin/bash"
    assert next(line for line in lines if not line.startswith("#")).startswith("shutdown -h +61 ")
    boots, words = tmp_path / "cloud/scripts/per-boot", tmp_path / "words"
    boots.mkdir(parents=True)
    (tmp_path / "shutdown").write_text(f'#!/bin/sh\necho "$@" >>{words}\n')
    (tmp_path / "shutdown").chmod(0o755)
    beginning = script(python="/no/such/python").partition("cat >")[0]  # as far as its folders
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SRIFT_BASE": str(tmp_path)}
    subprocess.run(["bash", "-c", beginning], env=environment, check=True)
    assert words.read_text().startswith("-h +61 ")
    subprocess.run([f"{boots}/srift"], env=environment, check=True)
    assert words.read_text().splitlines()[1:] == ["-h now"]


def test_it_is_a_script_for_bash_with_every_value_and_the_files_of_python_in_it():
    text = script(endpoint="http://10.0.0.1:5000", prefix="p" * 100)
    assert all(GOOD[name] in text for name in GOOD if name != "prefix")
    assert "--endpoint http://10.0.0.1:5000" in text and "--endpoint" not in script()
    assert re.search(r"@[a-z0-9_]+@", text) is None
    assert subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True).stderr == ""
    embedded = re.findall(r"<<'(\w+)'\n(.*?)\n\1\n", text, re.DOTALL)
    assert len(embedded) == 2
    for _, code in embedded:
        compile(code, "embedded", "exec")
    assert len(text.encode()) < 16_384 - 1000  # EC2's limit for user-data


@pytest.mark.parametrize(
    "changed",
    [
        *({"deadline_s": seconds} for seconds in (0.0, float("nan"), 1e9)),
        {"endpoint": "ftp://x"},
        {"endpoint": "http://user:secret@host"},
    ],
)
def test_no_end_and_a_password_are_refused(changed):
    with pytest.raises(NotSupported) as raised:
        script(**changed)
    assert "secret" not in str(raised.value)


def test_no_value_is_run_as_a_command(tmp_path):
    for name in GOOD:
        text = script(**{name: f"x; touch {tmp_path}/ran; $(touch {tmp_path}/ran)"})
        values = [line for line in text.splitlines() if "touch" in line]
        assert values and all("'x; touch" in line for line in values), name
