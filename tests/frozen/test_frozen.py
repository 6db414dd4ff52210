"""A change that is meant to change no figure changes none; and a home of 23 November 2026 still opens.

`python -m tests.frozen --write` renews the expectation, where a change of figures is meant.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import duckdb
import pytest

from flows.retrain import retrain
from tests.frozen.answers import (
    ANSWERS,
    DATA,
    FOLDER,
    asked,
    differences,
    plain,
    said,
    standing_in,
    unpack,
)

FILLED = (
    "offers",
    "runs",
    "profiles",
    "workloads",
    "machines",
    "model_versions",
    "recommendations",
    "promises",
)
PULLER = """
import json, sys
import mlflow, pandas as pd
mlflow.set_tracking_uri("sqlite:///" + sys.argv[1])
model = mlflow.pyfunc.load_model("models:/srift-step-time-local@champion")
setups = [{"workload": "mine", "cluster": "2xe.most", "batch_per_device": 16},
          {"workload": "broader", "cluster": "1xe.part+1xe.whole", "batch_per_device": "8+56"}]
print(json.dumps([[one["step_low_s"], one["step_s"], one["step_high_s"], one["bottleneck"]]
                  for one in model.predict(pd.DataFrame(setups)).to_dict("records")]))
"""
PULLED = [
    [0.00214686844935515, 0.00362384214361087, 0.006116924344272107, "communication between nodes"],
    [
        0.005986220398654017,
        0.00861073853504561,
        0.012385915182072254,
        "communication between nodes",
    ],
]


@pytest.mark.parametrize("name", ANSWERS)
def test_every_answer_is_the_stored_one(name: str, tmp_path: Path) -> None:
    if name == "ec2" and not DATA.is_dir():
        pytest.skip("the measured rows are not here")
    if name == "local" and (os.geteuid() != 0 or len(os.sched_getaffinity(0)) < 2):
        pytest.skip("as another user or on one core fewer instance types are on offer")
    stored = json.loads((FOLDER / f"{name}.json").read_text())
    found = list(differences(stored, plain(ANSWERS[name](tmp_path))))
    assert not found, f"{len(found)} differences, the first:\n" + "\n".join(found[:20])


def test_a_warehouse_and_a_table_of_that_day_still_answer(tmp_path: Path) -> None:
    unpack(tmp_path)
    with standing_in(tmp_path) as home:
        assert (
            asked("forget", "--list") == []
        )  # the command that brings the warehouse's views up to date
        for file in ("warehouse.duckdb", "published/recommendations.duckdb"):
            with duckdb.connect(str(home / file), read_only=True) as connection:
                names = [
                    row[0]
                    for row in connection.execute(
                        "select table_name from information_schema.tables"
                    ).fetchall()
                ]
                rows = {
                    one: len(connection.execute(f'select * from "{one}"').fetchall())
                    for one in names
                }
            if file == "warehouse.duckdb":
                assert [one for one in FILLED if not rows[one]] == []
            assert rows["recommendations"] > 0
        assert {row["workload"] for row in asked("table")} == {"mine", "broader"}
        assert asked("status")
        assert "mine" in said("table") and said("status")
        with pytest.raises(AssertionError, match="written by an older Srift: run `srift refresh`"):
            asked("recommend", "mine", "--deadline", "3h")
        retrain.fn("anew", "local")  # what a refresh ends with
        assert asked("recommend", "mine", "--deadline", "3h")[0]["model_version"] == "3", (
            "the second was refused"
        )


def test_a_puller_still_loads_the_champion_of_that_day(tmp_path: Path) -> None:
    """In a program that has neither this project nor its folder."""
    unpack(tmp_path)
    (tmp_path / "puller.py").write_text(PULLER)
    shutil.rmtree(tmp_path / "jobs")
    words = [sys.executable, "puller.py", str(tmp_path / "state" / "mlflow.db")]
    alone = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("MLFLOW", "_MLFLOW"))
    }
    ended = subprocess.run(
        words, cwd=tmp_path, env=alone, capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 0, ended.stderr
    assert list(differences(PULLED, json.loads(ended.stdout.splitlines()[-1]))) == []
