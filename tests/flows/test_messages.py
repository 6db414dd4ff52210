"""The wording of messages and tables: the one place that compares it, with a stored text.

Write it anew with `python -m tests.flows.test_messages`.
"""

import re
import shlex
import tempfile
from contextlib import redirect_stdout
from datetime import timedelta
from io import StringIO
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flows.cli import app
from tasks.reporting.tables import as_caution, print_recommendations, print_sizing
from tests.installed import NOON, DescribedMachines, write_project
from tests.warehouse.builders import INFEASIBLE, recommendation

STORED = Path(__file__).with_name("messages.txt")
COMMANDS = """
table
recommend conv --deadline 2h
recommend conv
recommend conv --deadline soon
recommend convv --deadline 2h --provider local
refresh --provider ec2
refresh --provider ec2 --max-usd 5
refresh --dry-run --provider moon
measure convv --dry-run
size conv
import
import none.csv
forget --list
reap
check lm2
restore
status
spend
recommend resnet50-imagenet --deadline 2h --provider local
export conv --to torchrun --output charts/file
"""


def answers():
    """Rows of two providers: first choices, rivals, unknown values, a frontier and pilots."""
    late = {"goal": "cheapest_within_deadline", "constraint_hours": 4.0}
    doubtful = "it costs least" + as_caution("the model is off by 60%")
    rows = [
        recommendation(**late, reason=doubtful),
        recommendation(**late, rank=2, cluster="1xbig+" * 20, usd=0.0000432, reason="it is dearer"),
        recommendation(goal="fastest", reason=doubtful, status="measure_first"),
        recommendation(rank=2, device="T4", **INFEASIBLE, reason="too slow"),
    ]
    run = {"kind": "train", "cluster": "2xs.large", "batch_per_device": "8", "usd": 0.004}
    run |= {"accumulation_steps": 2, "precision": "bf16", "regret_after": 0.1}
    pilots = {"settled": False, "regret": 0.2, "runs": [run], "reason": "open: why"}
    front = {"frontier": [recommendation(p_meets_constraint=0.83)], "candidates": 9}
    billed = recommendation(usd_storage=0.1) | front | {"pilots": pilots, "provider": "ec2"}
    return [*({"provider": "local"} | row for row in rows), billed]


def sizes():
    alike = {"instance_type": "small", "devices_each": 1, "global_batch": 64, "micro_batch": None}
    scaling = alike | {"largest_90": 3, "largest_80": 7, "needed_gbps": 2.5, "servers": 2}
    check = alike | {"size": 2, "step_s": 0.5, "efficiency": 0.9, "by_rule": 0.8}
    best = alike | {"batch": 32, "samples_per_s": 9.0, "largest_measured": 64}
    found = {"workload": "tiny", "provider": "local", "scaling": [scaling], "checks": [check]}
    return found | {"best_batch": [best], "notes": ["few runs"]}


def transcript(folder, patch):
    """Return each command with its exit code and all that it prints, in a new project."""
    machines = "tasks.providers.local.provider.LocalProvider"
    patch.setattr(machines, lambda *_, **__: DescribedMachines())
    patch.chdir(folder)
    patch.setenv("SRIFT_HOME", f"{folder}/state")
    write_project(folder)
    parts = []
    for command in COMMANDS.strip().splitlines():
        result = CliRunner().invoke(app, shlex.split(command))
        parts.append(f"$ srift {command}\n[{result.exit_code}] {result.output}")
    with redirect_stdout(StringIO()) as shown:
        print_recommendations(answers(), NOON + timedelta(days=630, minutes=1))
        print_sizing(sizes())
    text = "\n".join([*parts, shown.getvalue()]).replace(str(folder), "PROJECT")
    return re.sub(r"[ \t]+$", "", text, flags=re.MULTILINE)


def test_messages_are_those_that_are_stored(clean_environment, monkeypatch, tmp_path):
    assert transcript(tmp_path, monkeypatch) == STORED.read_text()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        STORED.write_text(transcript(Path(folder), patch))
