"""One question put to the champion: what is known of the workload, and what is missing to answer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from models.learning import TrainingData
from models.planner import Plan, nothing
from models.step_time import fit
from models.workload import Workload
from tasks import prices
from tasks.answer import Question, answer
from tasks.imports import import_measurements
from tasks.providers.base import ProviderError
from tasks.settings import IMPORTED, SettingsError
from tests.installed import NOON, DescribedMachines, champion, install
from warehouse.reads import training_frames

ROWS = "workload,provider,cluster,batch_per_device,step_s\nforeign,ec2,2xs.small,16,0.5\nforeign,ec2,1xs.small,16,0.4\n"
FACTS = "workload,parameters,gradient_bytes{header}\nforeign,25000000,100000000{samples}\n"


class Asked:
    """An installation of EC2 in whose warehouse a workload was imported; the ranking only says what it was asked."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, *, samples: str = "") -> None:
        self.here = install(folder, "conv", provider=DescribedMachines(name="ec2"))
        (folder / "rows.csv").write_text(ROWS)
        header = ",samples" if samples else ""
        (folder / "facts.csv").write_text(FACTS.format(header=header, samples=f",{samples}" if samples else ""))
        import_measurements(self.here.warehouse, folder / "rows.csv", workloads=folder / "facts.csv", now=NOON)
        self.workloads: list[Workload] = []
        monkeypatch.setattr("tasks.answer.open_installation", lambda provider: self.here)
        monkeypatch.setattr("tasks.answer.load_champion", lambda home, provider: champion())
        monkeypatch.setattr("tasks.answer.plan_one", self.note)

    def note(self, here: Any, champion: Any, workload: Workload, *rest: Any, **more: Any) -> Plan:
        self.workloads.append(workload)
        return replace(nothing(workload), rows=[{"goal": goal.goal} for goal in workload.goals])

    def answer(self, workload: str, **words: int) -> Workload:
        question = Question(workload=workload, hours=12.0, usd=None, **words)
        assert len(answer("ec2", question, market="any", top=1)) == 1
        return self.workloads[-1]


def test_a_market_without_prices_is_named_and_not_taken_for_too_few_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Asked(tmp_path, monkeypatch)
    offers = asked.here.provider.offers(NOON)
    monkeypatch.setattr("tasks.answer.current_offers", lambda here: [o for o in offers if o.market == "on-demand"])
    with pytest.raises(ProviderError, match="no price on the spot market of ec2 is known: ask with --market any"):
        answer("ec2", Question(workload="conv", hours=12.0, usd=None), market="spot", top=1)


def test_an_imported_workload_is_answered_for_without_a_line_in_srift_toml(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Asked(tmp_path, monkeypatch).answer("foreign", samples=1_000_000, batch=64)
    assert (asked.samples, asked.global_batch_least, asked.global_batch_most) == (1_000_000, 64, 64)
    assert asked.digest == IMPORTED, "as the model has met it"


def test_samples_may_come_with_the_facts_of_the_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = Asked(tmp_path, monkeypatch, samples="5000")
    assert world.answer("foreign", batch=32).samples == 5000
    assert world.answer("foreign", batch=32, samples=7).samples == 7


def test_what_is_missing_of_an_imported_workload_is_said_with_where_to_state_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = Asked(tmp_path, monkeypatch)
    for words in ({}, {"samples": 10}, {"batch": 10}):
        with pytest.raises(SettingsError, match=r"--samples N --batch B.*\[workloads.foreign\]"):
            world.answer("foreign", **words)
    with pytest.raises(SettingsError, match="did you mean 'foreign'"):
        world.answer("foreigm")


def test_the_batch_of_the_question_comes_before_that_of_srift_toml(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = Asked(tmp_path, monkeypatch)
    assert world.answer("conv").global_batch_least == 48
    asked = world.answer("conv", batch=96)
    assert (asked.global_batch_least, asked.global_batch_most, asked.samples) == (96, 96, 200_000)


def test_a_workload_known_by_imports_alone_has_been_met_once_it_was_learned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = Asked(tmp_path, monkeypatch)
    prices.note_definitions.fn(world.here, NOON)
    model = fit(TrainingData(**training_frames(world.here.warehouse, "ec2")), seed=1)
    assert model.met_workload(world.answer("foreign", samples=1, batch=1))
    assert not model.met_workload(world.here.settings.workload("conv")), "noted, but nothing was measured of it"
