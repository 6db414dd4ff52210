"""The command `srift`: exit codes, JSON, and what each command reads and writes."""

import json
import os
import stat
import subprocess
import sys
from contextlib import nullcontext

import pytest
import typer.main
from typer.testing import CliRunner

from flows.cli import app
from tasks.workspace.locking import refresh_lock
from tests.installed import NOON, DescribedMachines, furnished, write_project

ROWS = "workload,cluster,batch_per_device,step_s\nconv,2xs.small,16,0.5\nconv,1xs.large,16,0.25\n"
pytestmark = pytest.mark.usefixtures("described_machines")
ASK = ("recommend", "conv", "--deadline", "90m")


@pytest.fixture
def new(tmp_path, monkeypatch):
    """A project in which nothing has run."""
    write_project(tmp_path)
    return enter(tmp_path, monkeypatch)


@pytest.fixture
def used(monkeypatch):
    """A project with a champion and a published table; read only."""
    return enter(furnished(), monkeypatch)


def enter(folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("SRIFT_HOME", f"{folder}/state")
    return folder


def without_a_server(monkeypatch):
    """Run `srift refresh` as a plain function."""
    import flows.refresh

    monkeypatch.setattr(flows.refresh, "refresh", flows.refresh.refresh.fn)
    monkeypatch.setattr("tasks.workspace.prefect_server.local_server", nullcontext)


def srift(*words):
    return CliRunner().invoke(app, list(words))


def printed(*words):
    """Return the command's JSON, which must be all of standard output."""
    result = srift(*words, "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout, parse_constant=lambda word: pytest.fail(word))


def assert_fails(result, code, *words):
    assert result.exit_code == code, (result.stdout, result.stderr, result.exception)
    assert isinstance(result.exception, SystemExit) and result.stdout == ""
    for word in words:
        assert word in result.stderr


def test_every_command_and_option_has_help_and_json():
    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        assert command.help and srift(name, "--help").exit_code == 0
        assert "--json" in {option for param in command.params for option in param.opts}
        assert all(param.name == "help" or param.help for param in command.params), name


MISUSE = """
recommend convv --deadline 2h
recommend conv --deadline 2h --budget 3
recommend conv --deadline 0h
recommend --deadline 2h
recommend --deadline 2h --transformer missing.json
recommend conv --deadline 2h --transformer missing.json
recommend conv --deadline 2h --tokens few
recommend conv --deadline 2h --tokens 2B
recommend conv --deadline 2h --tokens 2B --samples 3
recommend conv --budget 0
recommend conv --budget inf
recommend conv --budget nan
recommend conv --deadline 2h --p-required 90
size convv
size conv --batch 0
refresh --max-usd -1
forget
forget abcd --list
backtest rows.csv
table ln
"""


@pytest.mark.parametrize("words", MISUSE.strip().splitlines())
def test_misuse_exits_2(used, monkeypatch, words):
    without_a_server(monkeypatch)
    assert_fails(srift(*words.split()), 2)


def test_outside_a_project_and_with_wrong_settings_it_exits_2(new, monkeypatch):
    (new / "srift.toml").write_text("[campaign]\nmax_uds = 3\n")
    for words in ("refresh", "table", "status", "reap", "import x", "backtest x y"):
        assert_fails(srift(*words.split()), 2, "campaign.max_uds")
    (new / "srift.toml").unlink()
    assert_fails(srift("status"), 2, str(new))


def test_a_second_refresh_of_a_home_exits_1(new):
    with refresh_lock(new / "state", "r-1"):
        assert_fails(srift("refresh"), 1, "r-1")


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_ctrl_c_exits_1_and_a_bug_keeps_its_traceback(new, monkeypatch, error):
    def stumble(*_):
        raise error

    without_a_server(monkeypatch)
    monkeypatch.setattr("flows.refresh.refresh", stumble)
    found = srift("refresh")
    if error is ValueError:
        assert isinstance(found.exception, ValueError)
    else:
        assert_fails(found, 1, "interrupted")


def test_the_home_is_its_owners_and_the_credential_is_shown_to_nobody(new, monkeypatch):
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:4200/api")
    assert srift("status").exit_code == 0
    assert stat.S_IMODE((new / "state").stat().st_mode) == 0o700
    assert "PREFECT_API_AUTH_STRING" not in os.environ


def test_the_table_is_filtered(used):
    firsts = {(row["workload"], row["goal"]) for row in printed("table") if row["rank"] == 1}
    assert len(firsts) == 8
    assert {row["workload"] for row in printed("table", "lm")} == {"lm"}
    assert {row["goal"] for row in printed("table", "--goal", "fastest")} == {"fastest"}
    shown = srift("table", "lm", "--top", "3").stdout
    assert "\x1b" not in shown and "conv" not in shown


def test_offers_are_filtered(used):
    assert {row["market"] for row in printed("offers", "small", "--market", "spot")} == {"spot"}
    assert_fails(srift("offers", "nowhere"), 1, "nowhere")


def test_recommend_answers_for_a_deadline_and_a_budget(used):
    rows = printed(*ASK, "--top", "3", "--pilots", "2")
    assert [row["rank"] for row in rows] == list(range(1, len(rows) + 1)) and len(rows) <= 3
    assert {row["constraint_hours"] for row in rows} == {1.5}
    assert len(rows[0]["pilots"]["runs"]) in (0, 2)
    assert len(rows[0]["frontier"]) > 1 and rows[0]["cluster"] in srift(*ASK).stdout
    days = printed("recommend", "conv", "--deadline", "2d", "--samples", "400000")[0]
    assert (days["constraint_hours"], days["samples"]) == (48.0, 400_000)
    budget = printed("recommend", "conv", "--budget", "0.5", "--market", "on-demand")
    assert {row["constraint_usd"] for row in budget} == {0.5}
    assert {row["market"] for row in budget} == {"on-demand"}


def test_a_reaping_that_could_not_look_exits_1_and_prints_what_it_ended(new, monkeypatch):
    blind = DescribedMachines(unswept={"us-east-1": "expired"})
    monkeypatch.setattr("tasks.providers.local.provider.LocalProvider", lambda *_, **__: blind)
    result = srift("reap", "--json")
    assert result.exit_code == 1 and json.loads(result.stdout) == {
        "ended": ["machine i-1: it was ended"],
        "not_swept": {"us-east-1": "expired"},
    }


def test_a_reaping_looks_at_every_provider_that_was_used(new, no_credentials):
    with (new / "srift.toml").open("a") as file:
        file.write('\n[ec2]\nbucket = "mine-1"\nregions = ["us-east-1"]\n')
    assert printed("reap") == {"ended": [], "not_swept": {}}
    folder = new / "state/leases-ec2"
    folder.mkdir(parents=True)
    (folder / ".swept.json").write_text(json.dumps({"us-east-1": NOON.isoformat()}))
    result = srift("reap", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["not_swept"].keys() == {"us-east-1"}


def test_a_dry_run_starts_nothing_and_writes_nothing(new):
    before = sorted(new.rglob("*"))
    launches = printed("refresh", "--dry-run")
    assert launches and all(launch["items"] and launch["reason"] for launch in launches)
    assert printed("refresh", "--dry-run", "--max-usd", "0") == []
    assert sorted(new.rglob("*")) == before


def test_an_import_is_loaded_once_listed_and_undone(new):
    assert printed("forget", "--list") == []
    (new / "rows.csv").write_text(ROWS)
    found = [printed("import", "rows.csv", *more)["new"] for more in (("--dry-run",), (), ())]
    assert found == [2, 2, 0]
    [listed] = printed("forget", "--list")
    assert srift("forget", listed["import_id"]).exit_code == 0
    assert printed("import", "rows.csv")["rows"] == 2


def test_a_backtest_reports_and_writes_its_predictions_alone(new):
    (new / "train.csv").write_text(ROWS)
    (new / "test.csv").write_text(ROWS.replace("2xs.small", "3xs.small") + "gpt,1xs.small,16,0.5\n")
    found = printed("backtest", "train.csv", "test.csv", "--predictions", "out.csv")
    assert (found["rows"], found["predicted"]) == (3, 2)
    assert (new / "out.csv").exists() and not list(new.rglob("*.duckdb"))
    assert_fails(srift("backtest", "none.csv", "test.csv"), 1, "none.csv")


@pytest.mark.parametrize(
    "command, heavy",
    [
        ("import flows.cli", "pandas numpy pydantic prefect mlflow boto3 torch"),
        (
            "import flows.cli, warehouse.export, tasks.workspace.settings, tasks.reporting.tables",
            "numpy pandas scipy asyncio",
        ),
        (
            "import flows.cli, tasks.recommendation.answer, tasks.recommendation.sizing",
            "sklearn mlflow prefect boto3 torch matplotlib",
        ),
    ],
)
def test_commands_import_only_what_they_need(command, heavy):
    code = f"import sys; {command}; print([m for m in {heavy.split()} if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
