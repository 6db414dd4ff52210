"""The model registry: versions, aliases, and a puller's program without this project."""

import json
import os
import shutil
import subprocess
import sys
from functools import cache, partial
from importlib import metadata

import pandas as pd
import pytest
from mlflow import MlflowClient
from packaging.requirements import Requirement
from pandas.testing import assert_frame_equal

from tasks.training import registry
from tasks.workspace.home import in_force
from tests.installed import furnished, log_challenger, model, scores

NAME = "srift-step-time-local"
SETUPS = pd.DataFrame(
    {
        "workload": ["conv", "lm", "conv"],
        "cluster": ["2xs.small", "1xs.large+2xs.small", "1xs.whole"],
        "batch_per_device": ["16", "12+6+6", "48"],
    }
)
PULLER = """
import importlib.abc, json, sys
forbidden = set(json.loads(sys.argv[1])) - {name.partition(".")[0] for name in sys.modules}

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
        frame = pd.DataFrame(rows).set_index(pd.Index([0]).repeat(len(rows["workload"])))
        answers.append(model.predict(frame).to_dict("list"))
    except Exception as error:
        answers.append(str(error))
assert not forbidden & {name.partition(".")[0] for name in sys.modules}
print(json.dumps(answers))
"""


@pytest.fixture(scope="module")
def home():
    return furnished() / "state"


@cache
def client(home):
    uri = f"sqlite:///{home / 'mlflow.db'}"
    return MlflowClient(uri, uri)


@pytest.fixture
def copy(home, tmp_path):
    """A copy of the registry whose artifacts are those of `home`."""
    shutil.copy(home / "mlflow.db", tmp_path)
    return tmp_path


def requirements(home):
    [file] = home.glob("mlartifacts/**/requirements.txt")
    return file.read_text().split()


def absent_from_a_clean_environment(wanted):
    """Return the installed modules that `wanted` and its dependencies do not bring."""
    kept = set()
    queue = [Requirement(text) for text in wanted]
    while queue:
        requirement = queue.pop()
        name = requirement.name.lower().replace("_", "-")
        if name in kept or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        kept.add(name)
        queue += [Requirement(text) for text in metadata.requires(name) or ()]
    strangers = {
        module
        for module, owners in metadata.packages_distributions().items()
        if not kept & {owner.lower().replace("_", "-") for owner in owners}
    }
    return sorted(strangers | {"models", "tasks", "flows", "warehouse", "tests"})


def pull(home, folder, *frames):
    """Ask the champion in a program that has only mlflow and the logged requirements."""
    absent = absent_from_a_clean_environment(requirements(home))
    assert {"torch", "prefect", "duckdb", "models", "tasks"} <= set(absent)
    kept = ("PATH", "HOME", "MLFLOW_DISABLE_TELEMETRY", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    env = {name: os.environ[name] for name in kept if name in os.environ}
    env |= {"MLFLOW_TRACKING_URI": f"sqlite:///{home / 'mlflow.db'}", "PYTHONSAFEPATH": "1"}
    line = [sys.executable, "-c", PULLER, json.dumps(absent), json.dumps(frames)]
    ended = subprocess.run(line, cwd=folder, env=env, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout.splitlines()[-1])


def test_the_champion_answers_a_puller(home, tmp_path):
    whole = SETUPS.assign(layout="1", accumulation_steps=[1, 2, 1], strategy="ddp", market=None)
    numbers = SETUPS.head(1).assign(batch_per_device=16, layout=1)
    unknown = SETUPS.assign(workload="convv")
    fraction = numbers.assign(batch_per_device=48.5)
    frames = [table.to_dict("list") for table in (SETUPS, whole, numbers, unknown, fraction)]
    plain, accumulated, number, no_workload, no_batch = pull(home, tmp_path, *frames)
    # Another process may differ in the last digit.
    ours = model().predict(SETUPS)
    terms = model().field_terms(SETUPS, ours["step_s"].to_numpy())
    assert_frame_equal(pd.DataFrame(plain), ours.join(terms), rtol=1e-12)
    assert accumulated["step_s"][1] > plain["step_s"][1]
    assert number["step_s"] == pytest.approx(plain["step_s"][:1], rel=1e-12)
    assert "convv" in no_workload and "48.5" in no_batch


def test_a_champion_comes_back_bit_for_bit(home, tmp_path):
    champion = registry.load_champion(home, "local")
    assert champion.version == 1
    setups = registry.example(model())
    assert_frame_equal(champion.model.predict(setups), model().predict(setups))
    assert champion.scoreboard.equals(scores())
    assert registry.load_champion(home, "ec2") is None
    assert registry.load_champion(tmp_path, "local") is None and not list(tmp_path.iterdir())


def test_the_quick_look_agrees_with_mlflow(home, copy):
    found = in_force(copy / "mlflow.db", NAME, "champion")
    assert found[0] == 1 and (found[1] / "artifacts/model.pickle").exists()
    assert in_force(copy / "mlflow.db", NAME, "other") is None
    (copy / "mlflow.db").write_bytes(b"no database")
    assert in_force(copy / "mlflow.db", NAME, "champion") is None


def test_a_challenger_is_promoted_or_refused_and_the_champion_keeps_the_report_for_a_server(
    tmp_path, capsys, monkeypatch
):
    first = log_challenger(tmp_path, "local")
    challenger = client(tmp_path).get_model_version_by_alias(NAME, "challenger")
    assert int(challenger.version) == first
    assert registry.load_champion(tmp_path, "local") is None
    registry.promote(tmp_path, "local", first, "better")
    second = log_challenger(tmp_path, "local")
    registry.refuse(tmp_path, "local", second, "worse")
    champion = registry.load_champion(tmp_path, "local")
    assert champion.version == first
    tags = client(tmp_path).get_model_version(NAME, str(second)).tags
    assert tags["promotion"] == "refused: worse"
    registry.promote(tmp_path, "local", second, "late", over=first)
    replaced = client(tmp_path).get_model_version_by_alias(NAME, "champion")
    assert (int(replaced.version), replaced.tags["replaces"]) == (second, str(first))
    page = tmp_path / "report.html"
    shown = partial(registry.show_report, tmp_path, "local", page)
    page.write_text("<main>")
    assert shown() == str(page)
    monkeypatch.setenv("MLFLOW_PAGES_URI", "http://host:1")
    assert shown().endswith(f"/runs/{replaced.run_id}/artifacts/report.html")
    page.unlink()
    assert shown() == str(page)
    [stored] = tmp_path.glob("mlartifacts/**/report.html")
    assert stored.read_text() == "<main>"
    assert "MLFLOW_TRACKING_URI" not in os.environ and NAME not in capsys.readouterr().err


def test_a_version_has_a_page_if_a_server_is_known_and_the_address_has_no_password(monkeypatch):
    assert registry.page_of("local", 3) == f"models:/{NAME}/3"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://me:secret@host:1/")
    assert registry.page_of("local", 3) == f"https://host:1/#/models/{NAME}/versions/3"


def test_a_damaged_or_moved_registry_is_an_error(home, copy, monkeypatch):
    monkeypatch.setattr(registry, "load", lambda text: json.loads("{"))
    with pytest.raises(registry.RegistryError):
        registry.load_champion(copy, "local")
    store = copy / "mlflow.db"
    store.write_bytes(b"\xa5" * 100 + store.read_bytes()[100:])
    with pytest.raises(registry.RegistryError):
        registry.load_champion(copy, "local")
