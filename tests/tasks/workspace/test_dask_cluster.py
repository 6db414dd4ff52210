"""Fits and plans made by a Dask cluster of this machine are those made here, whatever becomes of its workers."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pandas as pd
import pytest

from models.monitoring import cross_validation as evaluate
from models.step_time.model import fit
from tasks.workspace import dask_cluster, parallel
from tasks.workspace.blas_threads import one_thread
from tasks.workspace.parallel import side_by_side, side_by_side_if_long
from tasks.workspace.settings import Settings, SettingsError, load_settings
from tests.benchmarks.spread import InSizes, in_sizes, rows_of
from tests.dask_cluster import cluster
from tests.installed import install
from tests.models.monitoring.test_cross_validation import data
from tests.tasks.workspace.sent_elsewhere import (
    fails_at,
    fails_elsewhere,
    killed_elsewhere,
    killed_once,
    whose,
)

pytest.importorskip("distributed")
HERE = os.getpid()
FEW, WORKERS = [str(number) for number in range(12)], 2


@pytest.fixture(scope="module")
def dask(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with cluster(tmp_path_factory.mktemp("dask")) as (address, _):
        yield address


@pytest.mark.local
def test_results_are_in_order_and_made_by_all_workers(
    dask: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert side_by_side(int, iter(FEW), scheduler=dask) == list(range(12))
    pids = set(side_by_side(partial(whose, seconds=0.1), FEW, scheduler=dask))
    assert len(pids) == WORKERS and HERE not in pids
    assert side_by_side(int, [], scheduler=dask) == []
    assert capsys.readouterr().err == "", "nothing was done here"


@pytest.mark.local
def test_errors_of_the_function_and_of_the_values_are_raised_here(dask: str) -> None:
    def values() -> Iterator[str]:
        yield from FEW
        raise OSError("the disk is gone")

    with pytest.raises(ValueError, match="7 is not wanted"):
        side_by_side(partial(fails_at, at=7), range(12), scheduler=dask)
    with pytest.raises(OSError, match="the disk is gone"):
        side_by_side(int, values(), scheduler=dask)


@pytest.mark.local
def test_what_a_dead_worker_left_undone_is_done_by_another_one(
    dask: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = side_by_side(
        partial(killed_once, mark=tmp_path / "killed", here=HERE), range(12), scheduler=dask
    )
    assert found == list(range(12)) and (tmp_path / "killed").exists()
    assert capsys.readouterr().err == "", "nothing was done here"


@pytest.mark.local
def test_what_kills_every_worker_is_done_here_and_said(
    dask: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert side_by_side(partial(killed_elsewhere, here=HERE), range(12), scheduler=dask) == list(
        range(12)
    )
    assert "this machine goes on with the rest" in capsys.readouterr().err


@pytest.mark.local
def test_held_out_groups_fitted_there_are_the_same_to_the_last_digit(
    dask: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with one_thread():
        fitted = partial(evaluate._fitted, seed=0, calibrated=fit(data(), seed=0))
        some = list(evaluate.held_out(data(), seed=0))[:3]
        for here, there in zip(
            map(fitted, some), side_by_side(fitted, some, scheduler=dask), strict=True
        ):
            assert here is not None
            pd.testing.assert_frame_equal(there, here, check_exact=True)
    assert capsys.readouterr().err == "", "nothing was done here"


@pytest.fixture
def here(tmp_path: Path) -> InSizes:
    return in_sizes(install(tmp_path), 4)


@pytest.mark.local
def test_a_table_planned_there_is_the_same_row_by_row(
    here: InSizes, dask: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []
    on_cluster = dask_cluster.on_cluster
    monkeypatch.setattr(
        parallel, "on_cluster", lambda *words: asked.append(words[2]) or on_cluster(*words)
    )
    for simulated in (True, False):  # of local machines this one alone says what fits on it
        one = replace(here, only_here=simulated)
        alone, spread = (rows_of(one, spread=spread, scheduler=dask) for spread in (False, True))
        assert len(alone) > 20 and spread == alone
        assert asked == ([] if simulated else [dask])
    assert capsys.readouterr().err == "", "nothing was done here"


@pytest.mark.local
def test_where_the_scheduler_is_away_or_goes_away_all_is_done_here_and_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dask_cluster, "ANSWER_S", 1.0)
    with cluster(tmp_path, workers=1) as (address, scheduler):

        def values() -> Iterator[str]:
            for text in FEW:
                if text == "9":
                    scheduler.kill()
                yield text

        assert side_by_side(int, values(), processes=1, scheduler=address) == list(range(12))
    assert f"the Dask cluster at {address} did" in capsys.readouterr().err
    assert side_by_side(int, iter(FEW), processes=1, scheduler=address) == list(range(12))
    assert f"the Dask cluster at {address} did 0" in capsys.readouterr().err


@pytest.mark.local
def test_a_scheduler_that_stops_and_a_cluster_without_workers_keep_nobody_waiting(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ANSWER_S", "WORKERS_S", "PATIENCE_S"):
        monkeypatch.setattr(dask_cluster, name, 3.0)
    with cluster(tmp_path, workers=0) as (address, scheduler):
        assert side_by_side(int, iter(FEW), processes=1, scheduler=address) == list(range(12))
        assert f"the Dask cluster at {address} did 0" in capsys.readouterr().err
    with cluster(tmp_path / "other", workers=1) as (address, scheduler):

        def values() -> Iterator[str]:
            for text in FEW:
                if text == "9":
                    scheduler.send_signal(signal.SIGSTOP)
                yield text

        try:
            assert side_by_side(int, values(), processes=1, scheduler=address) == list(range(12))
        finally:
            scheduler.send_signal(signal.SIGCONT)
        assert "this machine goes on with the rest" in capsys.readouterr().err


@pytest.mark.local
def test_what_fails_on_a_worker_alone_is_done_here_and_said(
    dask: str, capsys: pytest.CaptureFixture[str]
) -> None:
    fails = partial(fails_elsewhere, here=HERE)
    assert side_by_side(fails, range(12), processes=1, scheduler=dask) == list(range(12))
    assert "MemoryError on worker" in capsys.readouterr().err


@pytest.mark.local
def test_a_worker_with_other_versions_computes_nothing(
    dask: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here = dask_cluster.versions() | {"numpy": "1.0"}
    monkeypatch.setattr(dask_cluster, "versions", lambda: here)
    assert set(side_by_side(whose, FEW, processes=1, scheduler=dask)) == {HERE}
    assert "not 1.0; install there what is installed here" in capsys.readouterr().err


def test_only_what_takes_long_is_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    spread: list[int] = []

    def noted(function: object, values: Iterator[int], scheduler: str) -> list[int]:
        spread.extend(values)
        return [10 * value for value in spread]

    monkeypatch.setattr(parallel, "side_by_side", noted)
    seconds = iter([0.0, 3.0, 6.0, 9.0, 12.0])  # three a value, as the clock says after each
    monkeypatch.setattr("tasks.workspace.parallel.time.monotonic", lambda: next(seconds))
    assert (
        side_by_side_if_long(lambda value: 10 * value, range(4), 4) == [0, 10, 20, 30]
        and spread == []
    )
    seconds = iter([0.0, 3.0])
    assert side_by_side_if_long(lambda value: 10 * value, range(5), 5) == [0, 10, 20, 30, 40]
    assert spread == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("address", "installed", "refusal"),
    [
        ("scheduler:8786", True, "shared.dask: 'scheduler:8786' is no address of a scheduler"),
        ("tcp://scheduler", True, "no address of a scheduler"),
        ("tcp://me:secret@scheduler:8786", True, "no address of a scheduler"),
        ("tcp://scheduler:8786", False, r"pip install 'srift\[dask\]'"),
    ],
)
def test_an_address_that_is_none_and_a_package_that_is_missing_are_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str, installed: bool, refusal: str
) -> None:
    if not installed:
        monkeypatch.setattr("tasks.workspace.settings.find_spec", lambda name: None)
    (tmp_path / "srift.toml").write_text(f'[shared]\ndask = "{address}"\n')
    with pytest.raises(SettingsError, match=refusal):
        load_settings(tmp_path / "srift.toml")


def test_a_cluster_needs_no_shared_warehouse_and_a_variable_names_it_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "srift.toml").write_text('[shared]\ndask = "tls://scheduler.example.org:8786"\n')
    settings: Settings = load_settings(tmp_path / "srift.toml")
    assert settings.shared.dask and settings.server_variables() == {}
    monkeypatch.setenv("SRIFT_SHARED__DASK", "tcp://other:1")
    assert load_settings(tmp_path / "srift.toml").shared.dask == "tcp://other:1"
