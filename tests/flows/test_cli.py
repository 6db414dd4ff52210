"""The command `srift` as a person or a script meets it: exit codes, sentences, pure JSON, no escape codes."""

from __future__ import annotations

import fcntl
import json
import os
import re
import stat
import subprocess
import sys
from contextlib import nullcontext
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer.main
from click.testing import Result
from prefect.exceptions import CancelledRun
from typer.testing import CliRunner

from flows.cli import app
from tasks.workspace.credential import make_credential, serving
from tests.installed import NOON, DescribedMachines, furnished, write_project

README = Path(__file__).parents[2] / "README.md"
VERBS = (
    "refresh",
    "recommend",
    "size",
    "table",
    "import",
    "forget",
    "workloads",
    "backtest",
    "status",
    "reap",
)
ROWS = "workload,cluster,batch_per_device,step_s\nconv,2xs.small,16,0.5\nconv,1xs.large,16,0.25\n"


@pytest.fixture(autouse=True)
def a_shell_of_its_own(own_environment: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Machines are described, not started; what the command sets for Prefect does not outlive it."""
    monkeypatch.setattr(
        "tasks.providers.local.provider.LocalProvider", lambda *_, **__: DescribedMachines()
    )


@pytest.fixture
def new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project in which nothing has run yet."""
    write_project(tmp_path)
    return enter(tmp_path, monkeypatch)


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with a champion and a published table; read only."""
    return enter(furnished(), monkeypatch)


def enter(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("SRIFT_HOME", str(folder / "state"))
    return folder


def without_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """`srift refresh` as a plain function: Prefect's server has tests with real processes."""
    import flows.refresh

    monkeypatch.setattr(flows.refresh, "refresh", flows.refresh.refresh.fn)
    monkeypatch.setattr("tasks.workspace.prefect_server.own_server", nullcontext)


def files(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if path.is_file()}


def srift(*words: str) -> Result:
    return CliRunner().invoke(app, list(words))


def printed(*words: str) -> Any:
    """The JSON that a verb prints, which must be all of standard output and hold nothing that JSON lacks."""
    result = srift(*words, "--json")
    assert result.exit_code == 0, result.stderr

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    return json.loads(result.stdout, parse_constant=refuse)


def assert_fails(result: Result, code: int, *words: str) -> None:
    assert result.exit_code == code, (result.stdout, result.stderr, result.exception)
    assert isinstance(result.exception, SystemExit), "an exception reached the shell"
    for word in words:
        assert word in result.stderr
    assert "Traceback" not in result.output and result.stdout == ""


def test_every_verb_of_the_contract_is_there_has_help_and_stands_in_the_readme() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    assert set(VERBS) <= set(commands)
    assert srift("--version").stdout == f"srift {metadata.version('srift')}\n"
    assert {f"make {target}" for target in ("refresh", "test", "up")} <= {
        *re.findall(r"make \w+", README.read_text())
    }
    for verb, command in commands.items():
        assert f"srift {verb}" in README.read_text()
        assert command.help
        assert srift(verb, "--help").exit_code == 0
        assert "json" in {parameter.name.removeprefix("as_") for parameter in command.params}
        undescribed = [
            p.name for p in command.params if p.name != "help" and not getattr(p, "help", None)
        ]
        assert not undescribed, f"srift {verb}: {undescribed} have no help"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["recommend", "convv", "--deadline", "2h"], "did you mean 'conv'"),
        (["recommend", "conv"], "either --deadline or --budget"),
        (
            ["recommend", "conv", "--deadline", "2h", "--budget", "3"],
            "either --deadline or --budget",
        ),
        (["recommend", "conv", "--deadline", "soon"], "12h, 90m or 2d"),
        (["recommend", "conv", "--deadline", "0h"], "12h, 90m or 2d"),
        (["recommend", "conv", "--budget", "-1"], "--budget"),
        (
            ["recommend", "conv", "--deadline", "2h", "--market", "sport"],
            "did you mean 'spot'? known: any, on-demand, spot",
        ),
        (
            ["recommend", "conv", "--deadline", "2h", "--market", "onDemand"],
            "did you mean 'on-demand'?",
        ),
        (["recommend", "conv", "--deadline", "2h", "--provider", "loca"], "did you mean 'local'"),
        (["recommend", "conv", "--deadline", "2h", "--top", "0"], "--top"),
        (["recommend", "conv", "--deadline", "2h", "--samples", "0"], "--samples"),
        (["recommend"], "workload"),
        (["size", "convv"], "did you mean 'conv'"),
        (["size", "convv", "--provider", "local"], "did you mean 'conv'"),
        (["size", "conv", "--provider", "loca"], "did you mean 'local'"),
        (["size", "conv", "--batch", "0"], "--batch"),
        (["size"], "workload"),
        (["refresh", "--max-usd", "-1"], "--max-usd"),
        (["refresh", "--provider", "ec2"], "--max-usd"),
        (["refresh", "--provider", "ec2", "--max-usd", "5"], "bucket"),
        (["recommend", "conv", "--deadline", "2h", "--batch", "0"], "--batch"),
        (["refresh", "--dry-run", "--provider", "moon"], "known: ec2, local"),
        (["status", "--provider", "moon"], "known: ec2, local"),
        (["reap", "--provider", "moon"], "known: ec2, local"),
        (["import"], "file"),
        (["import", "--workloads", "facts.csv", "--provider", "loca"], "did you mean 'local'"),
        (["forget"], "--list"),
        (["forget", "abcd", "--list"], "--list"),
        (["backtest", "rows.csv"], "test"),
        (["refesh"], "refesh"),
        (["table", "--jso"], "--jso"),
    ],
)
def test_misuse_exits_2_and_says_what_is_right(
    used: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], says: str
) -> None:
    without_a_server(monkeypatch)
    assert_fails(srift(*words), 2, says)


def test_outside_a_project_it_says_where_it_looked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SRIFT_HOME")
    assert_fails(srift("status"), 2, "no srift.toml in", str(tmp_path))


def test_a_home_that_cannot_be_written_exits_1_and_says_which(
    new: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SRIFT_HOME", str(new / "work.py" / "state"))
    for verb in ("refresh", "status", "table", "reap"):
        assert_fails(srift(verb), 1, "SRIFT_HOME cannot be used", "work.py")


def test_what_is_not_there_yet_exits_1_and_says_how_to_get_it(new: Path) -> None:
    assert_fails(srift("table"), 1, "nothing has been published", "srift refresh")
    assert_fails(srift("table", "--json"), 1, "nothing has been published")
    assert_fails(
        srift("recommend", "conv", "--budget", "1"),
        1,
        "no model of local machines",
        "srift refresh",
    )


def test_a_second_refresh_of_a_home_exits_1_and_names_the_first(
    new: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "tasks.workspace.prefect_server.own_server",
        lambda: pytest.fail("Prefect was started first"),
    )
    (new / "state").mkdir()
    with (new / "state" / "refresh.json").open("w") as file:
        json.dump({"refresh_id": "r-1", "pid": 77, "started_at": "noon"}, file)
        file.flush()
        fcntl.flock(file, fcntl.LOCK_EX)
        assert_fails(
            srift("refresh"),
            1,
            "refresh r-1 (process 77, since noon) is at work",
            "nothing was started",
        )


def test_one_that_comes_second_all_the_same_ends_cancelled_and_is_answered_so_too(
    new: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def second(*_: object) -> None:
        raise CancelledRun("refresh r-1 is at work in this home; nothing was started")

    without_a_server(monkeypatch)
    monkeypatch.setattr("flows.refresh.refresh", second)
    assert_fails(srift("refresh"), 1, "refresh r-1 is at work", "nothing was started")


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://127.0.0.1:4200/api", True),
        ("http://localhost:4200/api", False),
        ("http://127.0.0.1:4201/api", False),
        ("http://me@127.0.0.1:4200/api", False),
        ("https://api.prefect.cloud/api", False),
        ("http://127.0.0.1.evil.example/api", False),
        (None, False),
    ],
)
def test_the_credential_of_the_home_is_shown_to_a_server_on_this_machine_alone(
    new: Path, monkeypatch: pytest.MonkeyPatch, url: str | None, shown: bool
) -> None:
    made = make_credential(new / "state", print)
    if url is not None:
        monkeypatch.setenv("PREFECT_API_URL", url)
    assert srift("status").exit_code == 0
    assert "PREFECT_API_AUTH_STRING" not in os.environ, "`make up` serves nothing yet"
    with serving(new / "state", "127.0.0.1:4200"):
        assert srift("status").exit_code == 0
        assert os.environ.pop("PREFECT_API_AUTH_STRING", None) == (made if shown else None)
    assert srift("status").exit_code == 0 and "PREFECT_API_AUTH_STRING" not in os.environ
    assert stat.S_IMODE((new / "state").stat().st_mode) == 0o700
    assert stat.S_IMODE((new / "state" / "prefect-address").stat().st_mode) == 0o600
    monkeypatch.setenv("PREFECT_API_AUTH_STRING", "mine:own")
    srift("status")
    assert os.environ["PREFECT_API_AUTH_STRING"] == "mine:own"


def test_the_table_in_json_and_in_plain_text(used: Path) -> None:
    rows = printed("table")
    assert {(row["workload"], row["goal"]) for row in rows if row["rank"] == 1} == {
        (workload, goal)
        for workload in ("conv", "lm")
        for goal in ("cheapest_within_deadline", "fastest_within_budget", "cheapest", "fastest")
    }
    assert isinstance(rows[0]["cluster_offers"], list)
    shown = srift("table")
    assert (
        shown.exit_code == 0
        and "\x1b" not in shown.output
        and "cheapest_within_deadline" in shown.stdout
    )


def test_looking_up_the_table_loads_no_pandas(used: Path) -> None:
    code = """
import sys
from flows.cli import main
sys.argv = ["srift", "table"]
try:
    main()
except SystemExit as ended:
    assert not ended.code
sys.stderr.write(str(sorted({"pandas", "scipy", "sklearn"} & sys.modules.keys())))
"""
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=used, capture_output=True, text=True, timeout=60
    )
    assert found.returncode == 0 and "cheapest" in found.stdout and found.stderr == "[]", found


def test_the_table_is_filtered_and_sorted(used: Path) -> None:
    rows = printed("table", "lm", "--sort", "-usd")
    assert {row["workload"] for row in rows} == {"lm"} and len({row["goal"] for row in rows}) == 4
    known = [row["usd"] for row in rows if row["usd"] is not None]
    assert known == sorted(known, reverse=True)
    assert {
        row["goal"] for row in printed("table", "--goal", "fastest", "--provider", "local")
    } == {"fastest"}
    every = srift("table", "lm", "--top", "3", "--sort", "hours").stdout
    assert every.count("cheapest_within_deadline") >= 1 and "conv" not in every
    assert_fails(srift("table", "ln"), 2, "no row is of workload 'ln'; did you mean 'lm'?")
    assert_fails(
        srift("table", "--sort", "cluster_offers"), 2, "no column 'cluster_offers' to sort by"
    )
    assert_fails(
        srift("table", "--sort", "usd_"), 2, "no column 'usd_' to sort by; did you mean 'usd'"
    )


def test_offers_are_listed_and_wrong_words_are_met_with_the_nearest(used: Path) -> None:
    rows = printed("offers", "--market", "spot", "--sort", "-usd_per_hour")
    assert rows and {row["market"] for row in rows} == {"spot"}
    assert [row["usd_per_hour"] for row in rows] == sorted(
        (row["usd_per_hour"] for row in rows), reverse=True
    )
    plain = srift("offers").stdout.splitlines()
    assert len({len(line.split()) for line in plain[1:]}) <= 2, (
        "a line an offer, and a word a column"
    )
    assert_fails(
        srift("offers", "--sort", "usd_hour"),
        2,
        "no column 'usd_hour' to sort by; did you mean 'usd_per_hour'",
    )
    assert_fails(
        srift("offers", "--market", "Spot"), 2, "unknown market 'Spot'; did you mean 'spot'?"
    )


def test_what_was_spent_is_told_by_day_and_more(used: Path) -> None:
    by_day, by_workload = printed("spend"), printed("spend", "--by", "workload")
    assert by_day["total"] == by_workload["total"] and by_day["held"] == []
    assert_fails(srift("spend", "--by", "weekday"), 2, "--by 'weekday': did you mean 'day'")


def test_the_champion_is_asked(used: Path) -> None:
    rows = printed("recommend", "conv", "--deadline", "90m", "--top", "3")
    assert [row["rank"] for row in rows] == list(range(1, len(rows) + 1)) and len(rows) <= 3
    assert {(row["goal"], row["constraint_hours"]) for row in rows} == {
        ("cheapest_within_deadline", 1.5)
    }
    days = printed("recommend", "conv", "--deadline", "2d")[0]
    assert days["constraint_hours"] == 48.0 and days["usd"] <= rows[0]["usd"]
    budget = printed("recommend", "conv", "--budget", "0.5", "--market", "on-demand")
    assert {row["goal"] for row in budget} == {"fastest_within_budget"}
    assert {offer["market"] for row in budget for offer in row["cluster_offers"] or ()} == {
        "on-demand"
    }
    more = printed("recommend", "conv", "--deadline", "2d", "--samples", "400000")[0]
    assert more["samples"] == 400_000 and more["hours"] > days["hours"]
    shown = srift("recommend", "conv", "--deadline", "90m")
    assert (
        shown.exit_code == 0 and "\x1b" not in shown.output and rows[0]["cluster"] in shown.stdout
    )


def test_an_open_choice_names_its_pilots_and_a_settled_one_says_so(used: Path) -> None:
    first = printed("recommend", "conv", "--deadline", "90m", "--pilots", "2")[0]
    pilots = first["pilots"]
    assert pilots["regret"] >= 0 and len(pilots["runs"]) in (0, 2)
    assert all(
        one["usd"] > 0 and one["seconds"] > 0 and one["market"] == "spot" for one in pilots["runs"]
    )
    assert printed("recommend", "conv", "--deadline", "90m", "--pilots", "0")[0]["pilots"] is None
    on_demand = printed("recommend", "conv", "--budget", "0.5", "--market", "on-demand")[0]
    assert all(
        one["market"] == "spot" for one in on_demand["pilots"]["runs"]
    )  # where a campaign buys
    shown = srift("recommend", "conv", "--deadline", "90m").stdout
    assert ("settled: " in shown) == pilots["settled"] and ("runs tell most" in shown) != pilots[
        "settled"
    ]
    assert srift("recommend", "conv", "--deadline", "90m", "--pilots", "99").exit_code == 2


def test_the_answer_carries_the_frontier_of_hours_and_dollars(used: Path) -> None:
    first, *others = printed("recommend", "conv", "--deadline", "90m")
    front = first["frontier"]
    assert (
        len(front) > 1
        and first["candidates"] > len(front)
        and not any("frontier" in row for row in others)
    )
    assert [one["hours"] for one in front] == sorted(one["hours"] for one in front)
    assert [one["usd"] for one in front] == sorted((one["usd"] for one in front), reverse=True)
    assert any(one["hours"] <= first["hours"] and one["usd"] <= first["usd"] for one in front)
    shown = srift("recommend", "conv", "--deadline", "90m").stdout
    assert (
        "beaten by none in both" in shown
        and front[0]["cluster"] in shown.split("beaten by none")[1]
    )


def test_what_cannot_be_had_is_an_answer_and_no_failure(used: Path) -> None:
    asked = ("recommend", "conv", "--budget", "0.000001")
    (row,) = printed(*asked, "--p-required", "0.9")
    assert (
        row["status"] == "infeasible"
        and row["cluster"] is None
        and row["reason"]
        and row["p_required"] == 0.9
    )
    shown = srift(*asked, "--p-required", "0.9")
    assert shown.exit_code == 0 and "infeasible" in shown.stdout
    first, *_ = printed(*asked)
    assert (
        first["status"] == "recommended"
        and first["p_meets_constraint"] == 0.0
        and first["p_required"] is None
    )
    assert (
        "note: conv: the choice for $0.0000010 meets it with 0% probability only"
        in srift(*asked).stdout
    )
    assert srift(*asked, "--p-required", "90").exit_code == 2


def test_status_and_reap(used: Path, new: Path) -> None:
    assert printed("status")["leases"] == []
    assert "no refresh is at work" in srift("status").stdout
    assert printed("reap") == {"ended": [], "not_swept": {}}
    assert srift("reap").stdout == "nothing was left running\n"


def test_a_reaping_that_could_not_look_everywhere_exits_1_and_says_what_it_did(
    new: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blind = DescribedMachines(unswept={"us-east-1": "the AWS session has expired"})
    monkeypatch.setattr("tasks.providers.local.provider.LocalProvider", lambda *_, **__: blind)
    result = srift("reap")
    assert result.exit_code == 1 and result.stdout == "machine i-1: it was ended\n"
    assert (
        "us-east-1: the AWS session has expired" in result.stderr
        and "run `srift reap" in result.stderr
    )
    result = srift("reap", "--json")
    assert result.exit_code == 1 and json.loads(result.stdout) == {
        "ended": ["machine i-1: it was ended"],
        "not_swept": {"us-east-1": "the AWS session has expired"},
    }


def test_without_credentials_a_reaping_of_ec2_is_no_all_clear(
    new: Path, no_credentials: None
) -> None:
    with (new / "srift.toml").open("a") as file:
        file.write('\n[ec2]\nbucket = "mine-1"\nregions = ["us-east-1"]\n')
    assert_fails(
        srift("reap", "--provider", "ec2"),
        1,
        "us-east-1: no AWS credentials were found",
        "AWS_PROFILE",
    )


def test_a_reaping_looks_at_every_provider_that_was_used_from_here_and_status_names_the_other(
    new: Path, no_credentials: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (new / "srift.toml").open("a") as file:
        file.write('\n[ec2]\nbucket = "mine-1"\nregions = ["us-east-1"]\n')
    assert printed("reap") == {"ended": [], "not_swept": {}}, "EC2 was never used"
    folder = new / "state" / "leases-ec2"
    folder.mkdir(parents=True)
    (folder / ".swept.json").write_text(json.dumps({"us-east-1": NOON.isoformat()}))
    blind = DescribedMachines(unswept={"here": "a host cannot be looked at"})
    monkeypatch.setattr("tasks.providers.local.provider.LocalProvider", lambda *_, **__: blind)
    result = srift("reap")
    assert result.exit_code == 1 and result.stdout == "machine i-1: it was ended\n", (
        "the other one all the same"
    )
    assert (
        "no AWS credentials were found" in result.stderr
        and "a host cannot be looked at" in result.stderr
    )
    result = srift("reap", "--json")
    assert json.loads(result.stdout)["not_swept"].keys() == {"us-east-1", "here"}

    def broken(self: object, now: object) -> list[str]:
        raise OSError("the disk is full")

    monkeypatch.setattr("tasks.providers.ec2.provider.Ec2Provider.reap", broken)
    result = srift("reap")
    assert result.exit_code == 1 and "machine i-1: it was ended" in result.output, (
        "the other one even then"
    )
    held = [SimpleNamespace(lease_id="r-1")]
    monkeypatch.setattr("tasks.providers.ec2.provider.Ec2Provider.leases", lambda self: held)
    assert (
        "ec2 holds leases, too (1): `srift status --provider ec2` lists them"
        in printed("status")["stale"]
    )


@pytest.mark.parametrize(
    "words",
    [
        *(["refresh"], ["recommend", "conv", "--budget", "1"], ["table"], ["status"], ["reap"]),
        *(["import", "x"], ["backtest", "x", "y"]),
    ],
    ids=lambda words: str(words[0]),
)
def test_a_wrong_srift_toml_is_refused_by_every_verb(new: Path, words: list[str]) -> None:
    (new / "srift.toml").write_text("[campaign]\nmax_uds = 3\n")
    assert_fails(srift(*words), 2, "campaign.max_uds", "did you mean 'max_usd'")


def test_a_home_that_the_command_makes_is_its_owners_and_one_that_is_there_stays_and_is_noted(
    new: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    srift("status")
    assert stat.S_IMODE((new / "state").stat().st_mode) == 0o700
    assert "chmod 700" not in srift("doctor").output
    (new / "state").chmod(0o755)
    shown = srift("doctor")
    assert stat.S_IMODE((new / "state").stat().st_mode) == 0o755 and "chmod 700" in shown.output


def test_a_dry_run_starts_nothing_and_writes_nothing(new: Path) -> None:
    before = files(new)
    launches = printed("refresh", "--dry-run")
    assert launches and all(launch["items"] and launch["reason"] for launch in launches)
    shown = srift("refresh", "--dry-run")
    assert (
        shown.exit_code == 0
        and "nothing was started" in shown.stdout
        and "\x1b" not in shown.output
    )
    assert printed("refresh", "--dry-run", "--max-usd", "0") == []
    assert files(new) == before


SIZES = """workload,provider,cluster,batch_per_device,step_s,gradient_bytes
conv,local,1xs.small,48,1.0,1000000
conv,local,1xs.small,24,0.55,1000000
conv,local,1xs.small,12,0.3,1000000
conv,local,2xs.small,24,0.65,1000000
conv,local,4xs.small,12,0.45,1000000
conv,local,1xs.large,16,0.2,1000000
"""


def test_sizes_come_from_measured_runs(new: Path) -> None:
    (new / "rows.csv").write_text(SIZES)
    assert srift("size", "conv").exit_code == 1
    assert printed("import", "rows.csv")["new"] == 6
    found = printed("size", "conv", "--type", "s.small")
    (scaling,), (best,) = found["scaling"], found["best_batch"]
    assert (scaling["instance_type"], scaling["global_batch"]) == ("s.small", 48)
    assert scaling["overhead_s"] == pytest.approx(0.8 / 3)  # O = (4 * 0.45 - 1) / 3
    assert [one["size"] for one in found["checks"]] == [1, 2, 4]
    assert (best["batch"], best["samples_per_s"]) == (48, pytest.approx(48.0))
    shown = srift("size", "conv")
    assert shown.exit_code == 0 and "s.small" in shown.stdout and "\x1b" not in shown.output
    assert len(printed("size", "conv", "--batch", "36", "--type", "s.small")["notes"]) == 1
    for words, code in ((["lm"], 1), (["conv", "--type", "s.smal"], 2)):
        assert srift("size", *words).exit_code == code


def test_measurements_are_imported_once(new: Path) -> None:
    (new / "rows.csv").write_text(ROWS)
    loaded = printed("import", "rows.csv")
    assert (loaded["rows"], loaded["new"], loaded["workloads"]) == (2, 2, {"conv": 2})
    again = srift("import", "rows.csv")
    assert again.exit_code == 0 and "2 rows, 0 of them new" in again.stdout


def test_what_an_import_did_is_printed_listed_and_undone(new: Path) -> None:
    assert (
        printed("forget", "--list") == []
        and "nothing was ever imported" in srift("forget", "--list").stdout
    )
    assert "nothing is known yet of conv, lm" in srift("workloads").stdout
    (new / "rows.csv").write_text(ROWS)
    assert "dry run: nothing was loaded" in srift("import", "rows.csv", "--dry-run").stdout
    assert files(new) == {new / name for name in ("rows.csv", "srift.toml", "work.py")}
    shown = srift("import", "rows.csv").stdout
    (listed,) = printed("forget", "--list")
    assert (listed["file"], listed["rows"], listed["forgotten"]) == ("rows.csv", 2, False)
    assert f"srift forget {listed['import_id']}" in shown and "s.small" in shown
    (conv, lm) = (one for one in printed("workloads") if not one["public_rows"])
    assert (conv["workload"], conv["provider"], conv["imported_rows"], lm["provider"]) == (
        "conv",
        "ec2",
        2,
        "",
    )
    shown = srift("workloads")
    assert shown.exit_code == 0 and "\x1b" not in shown.output and "s.small" in shown.stdout
    assert_fails(srift("forget", "nonsense"), 2, "unknown import 'nonsense'")
    assert printed("forget", listed["import_id"])["rows"] == 2
    assert "forgotten" in srift("forget", "--list").stdout
    assert {one["provider"] for one in printed("workloads") if not one["public_rows"]} == {""}
    assert printed("import", "rows.csv")["new"] == 2


def test_facts_are_imported_alone_and_whoever_knows_a_workload_is_asked(new: Path) -> None:
    (new / "facts.csv").write_text("workload,parameters,gradient_bytes\nmine,10,40\n")
    assert printed("import", "--workloads", "facts.csv")["facts"] == {
        "new": 1,
        "changed": 0,
        "the same": 0,
    }
    assert "0 new, 0 changed, 1 the same" in srift("import", "--workloads", "facts.csv").stdout
    asked = ("recommend", "mine", "--deadline", "2h")
    assert_fails(srift(*asked), 2, "mine is known on ec2 alone", "--samples N --batch B")
    assert_fails(
        srift(*asked, "--provider", "local"), 2, "'mine' is not known on local; it is on ec2: add"
    )
    assert_fails(
        srift("recommend", "mien", "--deadline", "2h"),
        2,
        "unknown workload 'mien'; did you mean 'mine'?",
    )


def test_implausible_rows_are_refused_unless_forced(new: Path) -> None:
    (new / "rows.csv").write_text(ROWS + "conv,2xs.small,16,500\n")
    assert_fails(srift("import", "rows.csv"), 1, "line 4, column step_s", "1,000 times", "--force")
    assert printed("import", "rows.csv", "--force")["new"] == 3


def test_a_file_that_cannot_be_imported_exits_1_and_says_where_and_why(new: Path) -> None:
    (new / "bad.csv").write_text(ROWS + "conv,2xs.small,16,-1\n")
    assert_fails(srift("import", "bad.csv"), 1, "bad.csv was refused", "line 4, column step_s")
    assert_fails(srift("import", "none.csv", "--json"), 1, "none.csv", "cannot be read")
    (new / "bad.csv").write_text(ROWS)
    assert printed("import", "bad.csv")["new"] == 2, "the refused file had left rows behind"


def test_a_backtest_reports_and_leaves_the_home_as_it_was(new: Path) -> None:
    (new / "train.csv").write_text(ROWS)
    (new / "test.csv").write_text(ROWS.replace("2xs.small", "3xs.small") + "gpt,1xs.small,16,0.5\n")
    found = printed("backtest", "train.csv", "test.csv", "--predictions", "out.csv")
    assert (found["rows"], found["predicted"], found["provider"]) == (3, 2, "ec2")
    assert [row["group"] for row in found["summary"]] == ["conv", "1", "3", "all"]
    assert len((new / "out.csv").read_text().splitlines()) == 4
    shown = srift("backtest", "train.csv", "test.csv")
    assert (
        shown.exit_code == 0
        and "\x1b" not in shown.output
        and "2 of 3 rows predicted" in shown.stdout
    )
    assert "note: 1 of 3 rows are without prediction - workload gpt" in shown.stdout
    assert not [path for path in files(new) if path.suffix in (".duckdb", ".db")]
    assert_fails(srift("backtest", "none.csv", "test.csv"), 1, "none.csv", "cannot be read")
    assert_fails(
        srift("backtest", "train.csv", "test.csv", "--predictions", "no/out.csv"),
        1,
        "Nothing was fitted",
    )
    (new / "test.csv").write_text("workload\n")
    assert_fails(
        srift("backtest", "train.csv", "test.csv", "--json"), 1, "there is no column 'cluster'"
    )


def test_an_answer_imports_nothing_that_it_does_not_need() -> None:
    """Each of these takes a tenth of a second to two seconds to import."""
    heavy = (
        "scipy.stats",
        "scipy.optimize",
        "sklearn",
        "mlflow",
        "prefect",
        "boto3",
        "torch",
        "matplotlib",
    )
    ours = (
        "flows.cli, tasks.recommendation.ask, tasks.recommendation.sizing, tasks.reporting.tables"
    )
    code = f"import sys, {ours}; print([m for m in {heavy} if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
