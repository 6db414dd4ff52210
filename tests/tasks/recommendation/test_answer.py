"""A question to the champion: known workloads and missing numbers."""

from dataclasses import replace

import pandas as pd
import pytest

from models.domain.transformer import transformer_facts
from models.domain.workload import Goal
from models.planner.planner import no_answer
from tasks.data_files.imports import import_measurements
from tasks.market.offers import with_facts
from tasks.recommendation.answer import Question, answer
from tasks.recommendation.case import Case
from tasks.workspace.settings import IMPORTED, SettingsError
from tests.installed import NOON, DescribedMachines, champion, install
from tests.models.planning import workload

ROWS = """workload,provider,cluster,batch_per_device,step_s
foreign,ec2,2xs.small,16,0.5
foreign,ec2,1xs.small,16,0.4
"""
FACTS = "workload,parameters,gradient_bytes,samples\nforeign,25000000,100000000,{}\n"


TWELVE = Goal(goal="cheapest_within_deadline", hours=12.0)


class QuestionLog:
    """An installation of EC2 with an imported workload; the planner notes its questions."""

    def __init__(self, folder, monkeypatch, *, samples=""):
        self.here = install(folder, "conv", provider=DescribedMachines(name="ec2"))
        (folder / "rows.csv").write_text(ROWS)
        (folder / "facts.csv").write_text(FACTS.format(samples))
        import_measurements(
            self.here.warehouse,
            NOON,
            measurements=folder / "rows.csv",
            workloads=folder / "facts.csv",
        )
        self.workloads = []
        module = "tasks.recommendation.answer"
        monkeypatch.setattr(f"{module}.open_workspace", lambda provider: self.here)
        monkeypatch.setattr(f"{module}.load_champion", lambda home, provider: champion())
        monkeypatch.setattr(Case, "plan", lambda case, top: self.note(case))

    def note(self, case):
        self.workloads.append(case.workload)
        return replace(
            no_answer(case.workload, ""), rows=[{"goal": goal.goal} for goal in case.workload.goals]
        )

    def answer(self, workload, **words):
        question = Question(workload=workload, goal=TWELVE, **words)
        assert len(answer("ec2", question, top=1)) == 1
        return self.workloads[-1]


def test_an_imported_workload_is_answered_for_and_the_question_comes_before_what_is_stated(
    tmp_path, monkeypatch
):
    log = QuestionLog(tmp_path, monkeypatch, samples="5000")
    job = log.answer("foreign", samples=1_000_000, batch=64)
    assert (job.samples, job.global_batch_least, job.global_batch_most) == (1_000_000, 64, 64)
    assert job.digest == IMPORTED
    assert log.answer("foreign", batch=32).samples == 5000
    assert log.answer("conv").global_batch_least == 48
    job = log.answer("conv", batch=96)
    assert (job.global_batch_least, job.global_batch_most, job.samples) == (96, 96, 200_000)


def test_what_is_missing_of_an_imported_workload_is_said_with_where_to_state_it(
    tmp_path, monkeypatch
):
    log = QuestionLog(tmp_path, monkeypatch)
    for words in ({}, {"samples": 10}, {"batch": 10}):
        with pytest.raises(SettingsError):
            log.answer("foreign", **words)


def test_a_transformer_is_asked_for_by_its_shape_and_its_tokens(tmp_path, monkeypatch):
    log = QuestionLog(tmp_path, monkeypatch)
    monkeypatch.setattr("tasks.data_files.imports.load_public", lambda workspace: 0)
    shape = transformer_facts({"layers": 32, "hidden": 4096, "sequence": 2048, "parameters": 7e9})
    job = log.answer("net", transformer=shape, tokens=20e9)
    assert (job.samples, job.global_batch_least) == (9_765_625, 512)
    assert {mode.precision for mode in job.modes} == {"bf16"} and len(job.modes) == 8
    assert {name: getattr(job, name) for name in shape} == shape
    with pytest.raises(SettingsError):  # no length of a sequence
        log.answer("conv", tokens=20e9)


def test_a_stated_shape_wins_over_a_stored_one():
    stated = replace(workload("net"), digest=IMPORTED, sequence=2048)
    stored = {"workload": "net", "digest": IMPORTED, "sequence": 4096, "layers": 2}
    found = with_facts(stated, pd.DataFrame([stored]))
    assert (found.sequence, found.layers) == (2048, 2)
