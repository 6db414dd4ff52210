"""`examples/reading` as they stand there, on a published table: what each prints."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.installed import furnished

pytestmark = pytest.mark.slow
EXAMPLES = Path(__file__).parents[1] / "examples/reading"


def printed(*words):
    command = [sys.executable, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def published():
    return furnished() / "state/published"


def test_the_question_is_answered_by_duckdbs_shell_and_the_published_file_alone(published):
    shell = shutil.which("duckdb", path=Path(sys.executable).parent)
    query = (EXAMPLES / "question.sql").read_text().replace("transformer-lm", "conv")
    words = [shell, "-readonly", "-line", published / "recommendations.duckdb"]
    done = subprocess.run(words, input=query, capture_output=True, text=True, timeout=60)
    found = dict(line.strip().split(" = ") for line in done.stdout.splitlines() if " = " in line)
    assert found["workload"] == "conv" and found["cluster"].endswith("s.small"), done
    assert 0 < float(found["hours"]) <= float(found["hours_with_90_percent"]) <= 12
    assert float(found["usd"]) <= float(found["usd_with_90_percent"])


def test_the_table_is_joined_with_ones_own(published, tmp_path):
    (tmp_path / "own.csv").write_text("workload,team\nconv,vision\nnobody,none\n")
    lines = printed(EXAMPLES / "join.py", published, tmp_path / "own.csv").splitlines()
    assert lines and all(line.startswith("vision  conv  ") for line in lines)


@pytest.mark.enable_socket
def test_the_table_is_read_from_a_bucket(published, s3):
    s3.create_bucket(Bucket="company")
    for file in published.glob("*.parquet"):
        s3.upload_file(file, "company", f"srift/{file.name}")
    text = printed(EXAMPLES / "from_s3.py", "s3://company/srift")
    assert "conv" in text and "s.small" in text
