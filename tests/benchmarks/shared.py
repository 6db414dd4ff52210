"""Whether homes that refresh one shared warehouse at once lose or double anything, and what it takes beside one alone.

`python -m tests.benchmarks.shared` starts a PostgreSQL of its own (Debian's package postgresql) and gives each home the
same srift.toml with [shared] and a file of made-up step times, most of them its own, some in every file. One home makes
the tables, one imports its file and refreshes alone (`--max-usd 0`: nothing is bought), eight do so at once, and one
more among them is killed (SIGKILL) in the middle of a transaction, reaped and refreshed again. A reader looks at the
warehouse and at the published copies meanwhile. Printed are seconds, what writers waited for each other, and whether
everything is there once; exits 1 where something is not.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import pandas as pd
import psycopg2  # type: ignore[import-untyped]
import pytest
import typer

from tasks.node.processes import die_with_parent
from tasks.reporting.tables import print_frame
from tasks.workspace.settings import load_settings
from tasks.workspace.shared import open_warehouse
from tests import postgres
from warehouse.database import Warehouse, WarehouseMissing
from warehouse.export import read_published

ROOT = Path(__file__).parents[2]
SRIFT = (sys.executable, "-c", "from flows.cli import main; main()")
WORKERS = 8
OWN, COMMON = 12, 3  # rows that a home alone has, and that all have
GOALS = 4  # of each workload: two of its own, the cheapest and the fastest
WORKLOADS = {"mill": (0.004, 0.05)}  # made-up seconds of a sample, and of a further machine
TYPES = {"lc.part": 0.4, "lc.whole": 1.0}  # cores; parts are offered to root alone
_TYPE = """
[local.instance_types."{name}"]
cores = {cores}
memory_gib = 3.0
bandwidth_gbps = 0.5
usd_per_hour = {usd}
spot_usd_per_hour = {spot}
spot_interruptions_per_hour = 0.2
"""
_WORKLOAD = """
[workloads.{name}]
samples = 500_000
global_batch = 48
goals = [{{ goal = "cheapest_within_deadline", hours = 4.0 }}, {{ goal = "fastest_within_budget", usd = 0.5 }}]
"""
_SHARED = """
[campaign]
max_hosts = 2

[shared]
host = "{server}"
user = "{user}"
data = "{data}"
"""
STARTED: list[subprocess.Popen[str]] = []
DATABASES = ("srift", "srift_prefect", "srift_mlflow")
_WAITED = re.compile(r"acquired \w+ on advisory lock \[\d+,\d+,(\d+),1\] after ([\d.]+) ms")
_TURNS = {
    "5112001": "write",
    "5112002": "open the warehouse",
    "5112003": "register a model",
}  # by the key of the lock
_SHORTEST_WAIT_MS = 10
_LOCKED = """
    select 1 from pg_locks join pg_stat_activity using (pid)
    where locktype = 'advisory' and granted and application_name like %s
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A home's import and refresh: seconds of each, the refresh, and what went wrong ("" nothing)."""

    home: str
    import_s: float
    refresh_s: float
    refresh_id: str = ""
    error: str = ""


@dataclass
class Looks:
    """What a reader saw: how often it looked, rows of each publication by look, and what was not whole."""

    many: int = 0
    rows: dict[str, set[int]] = field(default_factory=dict)
    torn: list[str] = field(default_factory=list)
    most_connections: int = 0

    def add(self, found: pd.DataFrame) -> None:
        """Columns publication_id, rows: of one moment."""
        self.many += 1
        for publication, rows in found.itertuples(index=False):
            self.rows.setdefault(str(publication), set()).add(int(rows))


def step_s(workload: str, instance_type: str, machines: int, batch: int) -> float:
    """A made-up step: the share of the batch by the cores, and what each further machine adds."""
    sample_s, exchange_s = WORKLOADS[workload]
    return sample_s * batch / TYPES[instance_type] + exchange_s * (machines - 1)


def write_rows(file: Path, owner: str, many: int, kinds: Sequence[str]) -> None:
    """`many` rows of this owner on instance types `kinds`, with a tenth of noise from its name."""
    draw = random.Random(owner)
    rows = []
    for number in range(many):
        workload, kind = draw.choice(list(WORKLOADS)), draw.choice(kinds)
        machines, batch = draw.randint(1, 2), draw.choice((6, 8, 12, 16, 24, 48))
        seconds = step_s(workload, kind, machines, batch) * draw.uniform(0.95, 1.05)
        rows.append(
            {
                "workload": workload,
                "cluster": f"{machines}x{kind}",
                "batch_per_device": batch,
                "step_s": round(seconds, 6),
                "provider": "local",
                "gradient_bytes": 4_000_000,
                "run_id": f"{owner}-{number}",
            }
        )
    pd.DataFrame(rows).to_csv(file, mode="a", header=not file.exists(), index=False)


def make_home(folder: Path, server: str, kinds: Sequence[str] = tuple(TYPES)) -> Path:
    """A machine's folder: srift.toml and rows.csv; its state will lie in .srift."""
    folder.mkdir()
    text = _SHARED.format(server=server, user=postgres.USER, data=folder.parent / "files")
    for name, cores in TYPES.items():
        text += _TYPE.format(name=name, cores=cores, usd=0.1 * cores, spot=0.04 * cores)
    text += "".join(_WORKLOAD.format(name=name) for name in WORKLOADS)
    (folder / "srift.toml").write_text(text)
    write_rows(folder / "rows.csv", "everybody", COMMON, kinds[:1])
    write_rows(folder / "rows.csv", folder.name, OWN, kinds)
    return folder


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    """`srift` with these words, as typed in `folder`."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SRIFT_", "PREFECT_", "MLFLOW_"))
    }
    quiet = {
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }
    process = subprocess.Popen(
        [*SRIFT, *words],
        cwd=folder,
        env={**kept, **quiet, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=die_with_parent,
    )
    STARTED.append(process)
    return process


def end_all() -> None:
    """Every process that was started and is not over."""
    for process in STARTED:
        process.kill()


def work(
    folder: Path, started: Callable[[subprocess.Popen[str]], None] = lambda refresh: None
) -> Ended:
    """Import the rows of a home, then refresh it; `started` is told of the second process."""
    began = time.perf_counter()
    importing = start(folder, "import", "rows.csv")
    said = importing.communicate()[1]
    import_s, began = time.perf_counter() - began, time.perf_counter()
    if importing.returncode:
        return Ended(
            home=folder.name, import_s=import_s, refresh_s=0.0, error=f"import: {said[-500:]}"
        )
    refreshing = start(folder, "refresh", "--max-usd", "0", "--json")
    started(refreshing)
    told, said = refreshing.communicate()
    seconds = time.perf_counter() - began
    if refreshing.returncode:
        error = f"refresh ended with {refreshing.returncode}: {said[-500:]}"
        return Ended(home=folder.name, import_s=import_s, refresh_s=seconds, error=error)
    refresh_id = str(json.loads(told)["refresh_id"])
    return Ended(home=folder.name, import_s=import_s, refresh_s=seconds, refresh_id=refresh_id)


class Ground:
    """The databases, the homes and the shared warehouse as a reader of its own has it."""

    def __init__(self, folder: Path, server: str) -> None:
        self.folder, self.server = folder, server
        self.first = make_home(folder / "first", server)
        settings = load_settings(self.first / "srift.toml")
        settings.set_server_variables()
        self.warehouse: Warehouse = open_warehouse(settings)

    def ask(self, database: str, query: str, *given: object) -> list[tuple[Any, ...]]:
        """Rows of PostgreSQL's own."""
        with closing(
            psycopg2.connect(host=self.server, user=postgres.USER, dbname=database)
        ) as connection:
            connection.autocommit = True
            cursor = connection.cursor()
            cursor.execute(query, given or None)
            return cursor.fetchall() if cursor.description else []

    def write_down_waits(self) -> None:
        """From now on the server's log has a line for each lock that somebody waited for."""
        for setting, value in (
            ("log_lock_waits", "on"),
            ("deadlock_timeout", f"{_SHORTEST_WAIT_MS}ms"),
        ):
            self.ask("srift", f"alter system set {setting} = '{value}'")
        self.ask("srift", "select pg_reload_conf()")

    def waits(self) -> dict[str, list[float]]:
        """Seconds of each wait for a turn so far, by what the turn is for."""
        found = _WAITED.findall((Path(self.server) / "log").read_text())
        return {
            what: [float(ms) / 1000 for key, ms in found if key == of]
            for of, what in _TURNS.items()
        }

    @contextmanager
    def watched(self, looks: Looks) -> Iterator[None]:
        """Somebody reads, again and again, while the block runs."""
        over = threading.Event()

        def look() -> None:
            while not over.wait(0.2):
                try:
                    self.look(looks)
                except Exception as error:  # a reader never waits, and never fails
                    looks.torn.append(f"{type(error).__name__}: {error}")

        reader = threading.Thread(target=look)
        reader.start()
        try:
            yield
        finally:
            over.set()
            reader.join()

    def look(self, looks: Looks) -> None:
        """Once at the warehouse, and once at each home's published copy."""
        found = self.warehouse.select(
            """
            select publication_id, count(raw_recommendations.goal) as rows
            from raw_publications left join raw_recommendations using (publication_id)
            group by publication_id
            """
        )
        looks.add(found)
        for home in self.folder.glob("*/.srift/published"):
            with suppress(WarehouseMissing):  # not published yet
                copy = read_published(home)
                if copy["publication_id"].nunique() != 1 or not all_goals(copy):
                    looks.torn.append(f"copy of {home.parents[1].name}: {len(copy)} rows")
        connections = "select count(*) from pg_stat_activity where backend_type = 'client backend'"
        looks.most_connections = max(
            looks.most_connections, int(self.ask("srift", connections)[0][0])
        )

    def kill_while_it_writes(self, folder: Path, refreshing: subprocess.Popen[str]) -> None:
        """SIGKILL, once what it found on offer is stored, the next time that it holds the writers' turn."""
        who, stored = f"%, process {refreshing.pid}", False
        while refreshing.poll() is None:
            if not stored:
                with suppress(OSError, ValueError):
                    refresh_id = json.loads((folder / ".srift" / "refresh.json").read_text())[
                        "refresh_id"
                    ]
                    stored = bool(
                        len(self.warehouse.select("raw_offers", {"snapshot_id": refresh_id}))
                    )
            elif self.ask("srift", _LOCKED, who):
                refreshing.kill()
                return
            time.sleep(0.002)


def all_goals(rows: pd.DataFrame) -> bool:
    """Whether each workload has a first row for each of its goals, once."""
    firsts = rows[rows["rank"] == 1]
    counted = firsts.groupby("workload").size()
    return dict(counted) == dict.fromkeys(WORKLOADS, GOALS)


def together(ground: Ground, homes: list[Path], victim: Path) -> tuple[list[Ended], Ended, float]:
    """All at once, and how long until the last of `homes` was done; `victim` is killed."""
    began = time.perf_counter()
    with ThreadPoolExecutor(len(homes) + 1) as pool:
        killers: list[threading.Thread] = []

        def kill(refreshing: subprocess.Popen[str]) -> None:
            killers.append(
                threading.Thread(target=ground.kill_while_it_writes, args=(victim, refreshing))
            )
            killers[0].start()

        killed = pool.submit(work, victim, kill)
        working = [pool.submit(work, home) for home in homes]
        try:
            ended = [one.result() for one in working]
            seconds = time.perf_counter() - began
            return ended, killed.result(), seconds
        except BaseException:  # the pool would wait for them
            end_all()
            raise


def checks(
    ground: Ground, whole: list[Ended], killed: Ended, looks: Looks
) -> list[tuple[str, object, object]]:
    """What must hold of the warehouse, the registry and the history of runs: name, expected, found.

    `whole` are the refreshes that ended by themselves; the killed one may have stored some of it, never a part of a
    publication.
    """
    query = ground.warehouse.select
    ids = [one.refresh_id for one in whole]
    importing = (
        len(whole) - 1
    )  # the home that made the tables imported nothing, and the killed one did twice
    found: list[tuple[str, object, object]] = []

    def once(what: str, table: str, key: str, expected: int) -> None:
        rows = query(table)[key]
        found.append((f"{what}, and each once", (expected, expected), (len(rows), rows.nunique())))

    once("rows imported", "raw_imports", "row_digest", importing * OWN + COMMON)
    once("rows learned from", "runs", "run_id", importing * OWN + COMMON)
    per_import = query("""
        select count(*) as rows
        from (select import_id from raw_imports union all select import_id from raw_import_rows)
        group by import_id
    """)["rows"]
    found.append(("rows of each import", [OWN + COMMON] * importing, [*per_import]))
    publications, rows = query("raw_publications"), query("raw_recommendations")
    by_refresh = publications["refresh_id"].value_counts()
    found.append(
        (
            "publications of each refresh",
            [1] * len(ids),
            [int(by_refresh.get(one, 0)) for one in ids],
        )
    )
    found.append(
        (
            "order of publications, each place once",
            len(publications),
            publications["noted_order"].nunique(),
        )
    )
    goals = sum(all_goals(part) for _, part in rows.groupby("publication_id"))
    found.append(("publications with all goals of all workloads", len(publications), goals))
    twice = rows.duplicated(
        ["publication_id", "workload", "goal", "constraint_hours", "constraint_usd", "rank"]
    )
    found.append(("rows published twice", 0, int(twice.sum())))
    phases = query(
        "select refresh_id, count(*) as n, count(distinct phase) as d from raw_timings group by refresh_id"
    )
    noted = {str(one): (int(n), int(d)) for one, n, d in phases.itertuples(index=False)}
    found.append(
        (
            "refreshes noted, with each phase once",
            0,
            sum(noted.get(one, (0, 1))[0] == 0 for one in ids),
        )
    )
    found.append(("phases noted twice", 0, sum(n != d for n, d in noted.values())))
    offers = query("select distinct snapshot_id from raw_offers")["snapshot_id"]
    found.append(("refreshes with a snapshot of prices", len(ids), len(set(ids) & set(offers))))
    found += of_models(ground, ids[1:], killed)
    torn = [one for one, seen in looks.rows.items() if len(seen) > 1 or 0 in seen]
    found.append((f"publications seen in part, in {looks.many} looks", [], torn))
    found.append(("published copies seen in part, and readings that failed", [], looks.torn[:3]))
    history = ground.ask(
        "srift_prefect",
        "select state_type::text, count(*) from flow_run join flow on flow.id = flow_id where flow.name = 'refresh'"
        " group by 1 order by 1",
    )
    found.append(
        ("refreshes in Prefect's history", [("COMPLETED", len(ids)), ("CRASHED", 1)], history)
    )
    return found


def of_models(ground: Ground, ids: list[str], killed: Ended) -> list[tuple[str, object, object]]:
    """Versions by MLflow: numbered without a gap, one a refresh, each judged against the one in force, and noted."""
    import mlflow

    uri = os.environ["MLFLOW_TRACKING_URI"]
    client = mlflow.MlflowClient(uri, uri)
    versions = client.search_model_versions("name = 'srift-step-time-local'")
    numbers = sorted(int(one.version) for one in versions)
    makers = [str(one.tags.get("refresh_id")) for one in versions]
    noted = ground.warehouse.select("raw_models")
    promoted = {str(one) for one in noted[noted["promoted"]]["version"]}
    in_force = str(client.get_model_version_by_alias("srift-step-time-local", "champion").version)
    replaced = [one.tags["replaces"] for one in versions if "replaces" in one.tags]
    decided = [
        one.tags.get("promotion", "").partition(":")[0]
        for one in versions
        if one.tags["refresh_id"] in ids
    ]
    return [
        ("versions of the model, numbered without a gap", [*range(1, len(numbers) + 1)], numbers),
        ("versions of each refresh", [1] * len(ids), [makers.count(one) for one in ids]),
        ("versions of the killed refresh, at most 1", True, len(makers) - len(ids) <= 1),
        (
            "versions noted of each refresh",
            [1] * len(ids),
            [int((noted["refresh_id"] == one).sum()) for one in ids],
        ),
        (
            "versions with a decision",
            len(ids),
            sum(one in ("promoted", "refused") for one in decided),
        ),
        ("the version in force was promoted", True, in_force in promoted),
        ("versions that were replaced by two", 0, len(replaced) - len(set(replaced))),
    ]


def table(found: list[tuple[str, object, object]]) -> pd.DataFrame:
    """A line a check."""

    def short(value: object) -> str:
        if isinstance(value, list) and len(value) > 3 and len(set(map(str, value))) == 1:
            return f"{len(value)} x {value[0]}"
        return str(value)

    return pd.DataFrame(
        [
            {
                "what": what,
                "expected": short(wanted),
                "found": short(got),
                "holds": "yes" if wanted == got else "NO",
            }
            for what, wanted, got in found
        ]
    )


def print_times(
    alone: Ended, ended: list[Ended], seconds: float, waits: dict[str, list[float]], looks: Looks
) -> None:
    """What one home took alone and what all at once did, until the last, and what they waited for each other."""
    spent = [one.import_s + one.refresh_s for one in ended]
    times = pd.DataFrame(
        [
            ("import, alone", alone.import_s),
            ("refresh, alone", alone.refresh_s),
            (f"import and refresh of {len(ended)} at once and one killed: until the last", seconds),
            ("  the median of them", median(spent)),
            ("  the slowest of them", max(spent)),
            *(
                (f"{len(one)} waits for the turn to {what}, together", sum(one))
                for what, one in waits.items()
            ),
            (
                "  the longest of all waits",
                max((most for one in waits.values() for most in one), default=0.0),
            ),
        ],
        columns=["what", "seconds"],
    )
    print_frame(
        times,
        f"{len(ended)} homes, one PostgreSQL with at most {looks.most_connections} connections; waits of over"
        f" {_SHORTEST_WAIT_MS} ms",
    )


def run(folder: Path, server: str, workers: int) -> bool:
    """Do it all and print it; returns whether everything holds."""
    for database in DATABASES:
        postgres.create(server, database)
    ground = Ground(folder, server)
    tables = start(ground.first, "refresh", "--max-usd", "0", "--json")
    told, said = tables.communicate()
    if tables.returncode:
        raise RuntimeError(f"the first refresh failed: {said[-1000:]}")
    first = Ended(
        home="first", import_s=0.0, refresh_s=0.0, refresh_id=str(json.loads(told)["refresh_id"])
    )
    # what the others bring is news to the model of this one, so that theirs may all be put in force
    alone = work(make_home(folder / "alone", server, [*TYPES][:1]))
    ground.write_down_waits()
    looks = Looks()
    homes = [make_home(folder / f"machine-{number}", server) for number in range(1, workers + 1)]
    victim = make_home(folder / "killed", server)
    with ground.watched(looks):
        ended, killed, seconds = together(ground, homes, victim)
        print_times(alone, ended, seconds, ground.waits(), looks)
        reaped = start(victim, "reap")
        said = reaped.communicate()[1] if reaped.wait() else ""
        again = work(victim)
    for one in (alone, *ended, again):
        if one.error:
            typer.echo(f"{one.home}: {one.error}", err=True)
    whole = [first, alone, *(one for one in ended if not one.error), again]
    found: list[tuple[str, object, object]] = [
        ("refreshes at once that ended well", workers, sum(not one.error for one in ended)),
        ("the killed one was killed", True, "ended with -9" in killed.error),
        ("it was reaped, and refreshed then", "", said + again.error),
        *checks(ground, whole, killed, looks),
    ]
    shown = table(found)
    print_frame(shown, "what must hold of the shared warehouse, registry and history")
    return bool((shown["holds"] == "yes").all())


def main(
    workers: Annotated[int, typer.Option(min=1, help="Homes that refresh at once.")] = WORKERS,
) -> None:
    """Print times and checks; exit 1 where one does not hold."""
    signal.signal(
        signal.SIGTERM, signal.default_int_handler
    )  # the server and what was started end with it
    with tempfile.TemporaryDirectory(prefix="srift-shared-") as folder:
        try:
            with postgres.server() as server, ExitStack() as stack:
                stack.callback(end_all)
                holds = run(Path(folder), server, workers)
        except pytest.skip.Exception as missing:
            typer.echo(str(missing), err=True)
            raise typer.Exit(1) from None
    if not holds:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
