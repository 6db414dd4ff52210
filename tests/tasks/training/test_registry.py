"""Versions, scoreboards, reasons, the alias; and a puller's program that has neither this project nor torch."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Mapping
from contextlib import closing
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import mlflow
import pandas as pd
import pytest
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from packaging.requirements import Requirement
from pandas.testing import assert_frame_equal

from models.step_time import serialization
from tasks.data_files.measurements import Measurement
from tasks.training import registry
from tasks.workspace.home import in_force
from tests.conftest import SmallDisk
from tests.installed import furnished, model, provenance, scores

SETUPS = pd.DataFrame(
    {
        "workload": ["conv", "lm", "conv"],
        "cluster": ["2xs.small", "1xs.large+2xs.small", "1xs.whole"],
        "batch_per_device": ["16", "12+6+6", "48"],
    }
)


def batch(*given: Any, **more: list[Any]) -> dict[str, list[Any]]:
    rows = {"workload": ["conv"] * len(given), "cluster": ["2xs.small"] * len(given)}
    return {**rows, "batch_per_device": [*given], **more}


BATCHES = {  # a batch may be a number, or text of one an instance
    "text": batch("48", "16"),
    "whole": batch(48, 16),
    "floats": batch(48.0, 16.0),
    "mixed": batch(48, "16+16"),
    "layouts": batch(48, 16, layout=[1, 1]),
    "half": batch(48.5, 16),
    "absent": batch(None, 16),
}
PULLER = """
import importlib.abc, json, sys
forbidden = set(json.loads(sys.argv[1])) - {name.partition(".")[0] for name in sys.modules}  # pip's own hooks

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in forbidden:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
import mlflow, pandas as pd
model = mlflow.pyfunc.load_model("models:/srift-step-time-local@champion")
answers = []
for rows in json.loads(sys.argv[2]):
    try:
        answers.append(model.predict(pd.DataFrame(rows)).to_dict("list"))
    except Exception as error:
        answers.append(f"{type(error).__name__}: {error}")
assert not forbidden & {name.partition(".")[0] for name in sys.modules}
print(json.dumps(answers))
"""


@pytest.fixture(scope="module")
def home() -> Path:
    return furnished() / "state"


@cache
def client(home: Path) -> MlflowClient:
    uri = f"sqlite:///{home / 'mlflow.db'}"
    return MlflowClient(uri, uri)


def logged(home: Path, provider: str, mean_error: float = 0.05) -> int:
    board = scores(mean_error)
    return registry.log_challenger(
        home, provider, model(), scoreboard=board, card="", provenance=provenance()
    )


def requirements(home: Path) -> list[str]:
    """What was logged with the champion."""
    (file,) = home.glob("mlartifacts/**/requirements.txt")
    return file.read_text().split()


def absent_from_a_clean_environment(wanted: list[str]) -> list[str]:
    """Top-level modules installed here that `wanted` and what it needs in turn do not bring, and this project's."""
    kept: set[str] = set()
    queue = [Requirement(text) for text in wanted]
    while queue:
        requirement = queue.pop()
        name = requirement.name.lower().replace("_", "-")
        if name in kept or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        kept.add(name)
        queue += [Requirement(text) for text in metadata.requires(name) or ()]
    installed = metadata.packages_distributions()
    strangers = {
        module
        for module, owners in installed.items()
        if not kept & {o.lower().replace("_", "-") for o in owners}
    }
    return sorted(strangers | {"models", "tasks", "flows", "warehouse", "tests"})


def pulled(home: Path, folder: Path, *asked: Mapping[str, list[Any]]) -> list[Any]:
    """Answers of the champion in an interpreter that lacks all but mlflow and the logged requirements."""
    absent = absent_from_a_clean_environment([*requirements(home)])
    assert {"torch", "prefect", "duckdb", "models", "tasks"} <= set(absent)
    environment = {
        name: os.environ[name]
        for name in ("PATH", "HOME", "MLFLOW_DISABLE_TELEMETRY")
        if name in os.environ
    }
    environment |= {"MLFLOW_TRACKING_URI": f"sqlite:///{home / 'mlflow.db'}", "PYTHONSAFEPATH": "1"}
    # sums differ in their last digit by how many threads add them up
    environment |= {
        name: value for name, value in os.environ.items() if name.endswith("_NUM_THREADS")
    }
    ended = subprocess.run(
        [sys.executable, "-c", PULLER, json.dumps(absent), json.dumps(asked)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr
    answers: list[Any] = json.loads(ended.stdout.splitlines()[-1])
    return answers


def test_the_champion_answers_in_a_program_without_this_project_and_without_torch(
    home: Path, tmp_path: Path
) -> None:
    whole = SETUPS.assign(
        layout="1",
        accumulation_steps=[1, 2, 1],
        strategy="ddp",
        precision="fp32",
        switches="none",
        provider="local",
    )
    unknown = SETUPS.assign(workload="convv")
    stranger = SETUPS.head(1).assign(cluster="2xs.smal")
    contract = whole.assign(
        accumulation_steps=[1, None, 2], parameters=[7, None, 7], flops_per_sample=1e6, market=None
    )
    contract = contract.assign(gradient_bytes=28, zone="a", run_id=["r", "s", "t"], source="mine")
    contract = contract.assign(measured_at="2026-11-20")
    frames = (frame.to_dict("list") for frame in (SETUPS, whole, unknown, stranger, contract))
    answers = pulled(home, tmp_path, *frames, *BATCHES.values())
    least, all_of_it, no_workload, no_type, partly = answers[:5]
    batches = dict(zip(BATCHES, answers[5:], strict=True))
    for answer, asked in ((least, SETUPS), (all_of_it, whole), (partly, contract)):
        assert_frame_equal(
            pd.DataFrame(answer), model().predict(asked), rtol=1e-12
        )  # another process, the last digit
    assert all_of_it["step_s"][1] > least["step_s"][1], "accumulation steps were not read"
    assert "unknown workload 'convv'; the nearest known: conv" in no_workload
    assert "s.smal" in no_type and "s.small" in no_type
    for name in ("whole", "floats", "mixed", "layouts"):
        assert batches[name]["step_s"] == batches["text"]["step_s"], name
    assert (
        "batch_per_device '48.5': every number must be a whole one of at least 1" in batches["half"]
    )
    assert "batch_per_device 'nan': not whole numbers" in batches["absent"]
    rooms = {path.name for path in home.glob("mlartifacts/**/srift_models/*/")} - {"__pycache__"}
    assert rooms == {"domain", "step_time"}


def test_the_example_that_a_version_carries_is_one_that_it_answers(home: Path) -> None:
    served = registry.load_served(home, "local")
    shown = served.input_example
    assert list(shown.columns[:3]) == ["workload", "cluster", "batch_per_device"]
    assert (served.predict(shown)["step_s"] > 0).all()


def test_a_version_carries_its_scoreboard_its_card_and_where_it_came_from(home: Path) -> None:
    found = client(home).get_model_version_by_alias("srift-step-time-local", "champion")
    assert found.description == "# a card"
    assert found.tags == provenance().tags() | {"promotion": "promoted: the first", "replaces": ""}
    run = client(home).get_run(str(found.run_id))
    assert run.data.metrics["workload/all/mean_error"] == 0.05
    artifacts = {one.path for one in client(home).list_artifacts(str(found.run_id))}
    assert artifacts >= {"card.md", "scoreboard.csv"}
    assert [one.path for one in client(home).list_artifacts(str(found.run_id), "plots")] == [
        "plots/calibration.png"
    ]
    assert {text.partition("==")[0] for text in requirements(home)} == {
        "mlflow",
        *registry.REQUIREMENTS,
    }
    assert not [text for text in requirements(home) if "+" in text or "@" in text], (
        "no puller could install them"
    )


def test_a_providers_champion_comes_back_bit_for_bit(home: Path, tmp_path: Path) -> None:
    champion = registry.load_champion(home, "local")
    assert champion is not None and champion.version == 1
    assert serialization.dump(champion.model) == serialization.dump(model())
    assert champion.scoreboard is not None and champion.scoreboard.equals(scores())
    for file in home.glob("mlartifacts/**/scoreboard.json"):
        shutil.move(file, file.with_name("moved"))  # as in a version that an older Srift registered
    older = registry.load_champion(home, "local")
    for file in home.glob("mlartifacts/**/moved"):
        shutil.move(file, file.with_name("scoreboard.json"))
    assert older is not None and older.scoreboard is None
    assert (
        registry.load_champion(home, "ec2") is None
        and registry.load_champion(tmp_path, "local") is None
    )
    assert list(tmp_path.iterdir()) == [], "asking for a champion made a store"


def test_a_server_that_is_away_is_told_from_a_machine_that_registers() -> None:
    with (
        pytest.raises(registry.RegistryError, match=r"did not answer: .*refused"),
        registry._turn("postgresql://me@127.0.0.1:1/x"),
    ):
        pass


def test_a_refused_challenger_is_kept_with_its_reason_and_the_champion_stays(home: Path) -> None:
    number = logged(home, "rehearsal")
    registry.promote(home, "rehearsal", number, "the first")
    worse = registry.log_challenger(
        home,
        "rehearsal",
        model(),
        scoreboard=scores(0.5),
        card="second",
        provenance=provenance("refresh-2"),
    )
    registry.refuse(home, "rehearsal", worse, "it is worse")
    assert (number, worse) == (1, 2)
    named = client(home).get_registered_model("srift-step-time-rehearsal").aliases
    assert named == {"champion": 1, "challenger": 2}
    champion = registry.load_champion(home, "rehearsal")
    assert champion is not None and champion.version == 1
    refused = client(home).get_model_version("srift-step-time-rehearsal", "2")
    assert (
        refused.tags["promotion"] == "refused: it is worse"
        and refused.tags["refresh_id"] == "refresh-2"
    )
    assert registry.promote(home, "rehearsal", worse, "judged against nothing") == number
    assert client(home).get_registered_model("srift-step-time-rehearsal").aliases == named
    assert registry.promote(home, "rehearsal", worse, "better after all", over=number) is None
    assert client(home).get_registered_model("srift-step-time-rehearsal").aliases == {"champion": 2}
    champion = registry.load_champion(home, "rehearsal")
    assert champion is not None and champion.version == 2
    client(home).delete_registered_model_alias("srift-step-time-rehearsal", "champion")
    assert (
        registry.promote(home, "rehearsal", worse, "none is in force any more", over=number) is None
    )
    assert client(home).get_registered_model("srift-step-time-rehearsal").aliases == {"champion": 2}
    client(home).create_registered_model("srift-step-time-unproven")
    assert registry.load_champion(home, "unproven") is None, "a model without an alias"


def test_every_column_that_a_measurement_row_may_have_is_an_input_of_the_model() -> None:
    known = {column.name for column in registry.signature().inputs}
    assert known == set(Measurement.model_fields) - {"step_s", "sync_s"}


@pytest.fixture
def elsewhere(home: Path, tmp_path: Path) -> Path:
    """A home whose store names files that are not there."""
    shutil.copy(home / "mlflow.db", tmp_path)
    with closing(sqlite3.connect(tmp_path / "mlflow.db")) as store, store:
        store.execute("update model_versions set storage_location = 'file:///nowhere'")
    return tmp_path


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """MLflow does not say which version is in force."""

    def fail(*_: Any) -> None:
        raise MlflowException("the server is down")

    monkeypatch.setattr(MlflowClient, "get_model_version_by_alias", fail)


def test_a_registry_that_does_not_answer_is_not_taken_for_one_without_a_champion(
    home: Path, elsewhere: Path, monkeypatch: pytest.MonkeyPatch, silent: None
) -> None:
    with pytest.raises(registry.RegistryError, match=r"could not be read.*the server is down"):
        registry.load_champion(elsewhere, "local")
    monkeypatch.setenv(
        "MLFLOW_TRACKING_URI", f"sqlite:///{home / 'mlflow.db'}"
    )  # an operator's own choice
    with pytest.raises(registry.RegistryError, match=r"could not be read.*the server is down"):
        registry.load_champion(home, "local")


def test_the_champion_of_our_own_store_is_found_without_waiting_for_mlflow_where_its_files_are(
    home: Path, elsewhere: Path, silent: None
) -> None:
    champion = registry.load_champion(home, "local")
    assert champion is not None and champion.version == 1
    by_mlflow = client(home).get_model_version("srift-step-time-local", "1")
    found = in_force(home / "mlflow.db", by_mlflow.name, "champion")
    assert found == (
        1,
        Path(mlflow.artifacts.download_artifacts("models:/srift-step-time-local/1")),
    )
    assert in_force(home / "mlflow.db", "srift-step-time-never", "champion") is None
    assert in_force(home / "mlflow.db", by_mlflow.name, "another") is None
    assert in_force(elsewhere / "mlflow.db", by_mlflow.name, "champion") is None


def test_the_environment_names_the_stores_that_it_named_before(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.delenv("MLFLOW_REGISTRY_URI", raising=False)
    registry.load_served(home, "local")
    assert not {"MLFLOW_TRACKING_URI", "MLFLOW_REGISTRY_URI"} & {*os.environ}
    monkeypatch.setenv("MLFLOW_REGISTRY_URI", "an operator's")
    registry.load_served(home, "local")
    assert os.environ["MLFLOW_REGISTRY_URI"] == "an operator's"


@pytest.mark.parametrize("start", [0, 8192])
def test_a_damaged_store_is_named_at_once_with_what_is_lost_and_what_to_type(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: int
) -> None:
    content = (home / "mlflow.db").read_bytes()
    (tmp_path / "mlflow.db").write_bytes(
        content[:start] + b"\xa5" * 200_000 + content[start + 200_000 :]
    )
    monkeypatch.setattr(
        mlflow, "set_tracking_uri", lambda _: pytest.fail("MLflow tries it again and again")
    )
    for ask in (
        lambda: registry.refuse_damaged(tmp_path),
        lambda: registry.load_champion(tmp_path, "local"),
        lambda: registry.promote(tmp_path, "local", 1, "why not"),
    ):
        with pytest.raises(
            registry.RegistryError,
            match=r"(?s)mlflow.db is damaged: .*lost.*\n  mv .*srift refresh",
        ):
            ask()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://elsewhere")
    registry.refuse_damaged(tmp_path)


def test_a_full_disk_or_a_read_only_one_is_a_sentence_and_the_champion_stays(
    home: Path, small_disk: SmallDisk, capfd: pytest.CaptureFixture[str]
) -> None:
    place = Path(shutil.copytree(home, small_disk.place / "state"))
    small_disk.fill()
    for change in (
        lambda: registry.promote(place, "local", 1, "once more", over=1),
        lambda: logged(place, "other"),
    ):
        with pytest.raises(registry.RegistryError, match=r"the disk is full.*in force stays"):
            change()
    assert registry.load_champion(place, "local") is not None
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("inner", "says"),
    [
        (sqlite3.OperationalError("database or disk is full"), "the disk is full"),
        (sqlite3.OperationalError("attempt to write a readonly database"), "cannot be written"),
        (sqlite3.DatabaseError("database disk image is malformed"), "is damaged"),
        (sqlite3.OperationalError("database is locked"), "did not answer"),
        (OSError(errno.ENOSPC, "No space left on device"), "the disk is full"),
        (shutil.Error([("a", "b", "[Errno 28] No space left on device")]), "the disk is full"),
        (OSError(errno.EROFS, "Read-only file system"), "cannot be written"),
    ],
)
def test_what_mlflow_makes_of_disk_and_file_is_distinguished(
    home: Path, monkeypatch: pytest.MonkeyPatch, inner: Exception, says: str
) -> None:
    def fail(*_: Any) -> None:
        raise MlflowException("400 lines of SQL") from inner

    monkeypatch.setattr(MlflowClient, "set_registered_model_alias", fail)
    with pytest.raises(registry.RegistryError, match=says):
        registry.promote(home, "local", 1, "the first", over=1)
    monkeypatch.setattr(MlflowClient, "set_registered_model_alias", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        registry.promote(home, "local", 1, "the first", over=1)
