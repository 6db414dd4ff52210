"""Rows that can be read and cannot be true."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.data_files.measurements import Measurement, one_edit_apart
from tasks.data_files.plausibility import Device, Known, implausible, impossible, setup_of

NOON = datetime(2026, 11, 20, 12, 0, tzinfo=UTC)
TYPES = {
    "ec2": {
        "g5.xlarge": Device(count=1, kind="A10G"),
        "g4dn.12xlarge": Device(count=4, kind="T4"),
        "p4d.24xlarge": Device(count=8, kind="A100"),
        "g6.2xlarge": Device(count=1, kind="L4"),
    }
}
TEXT = st.text("ab", max_size=5)


def row(**changes: Any) -> Measurement:
    least = {
        "workload": "vit",
        "cluster": "1xg4dn.12xlarge",
        "batch_per_device": "32",
        "step_s": 0.5,
    }
    return Measurement(**(least | changes))


def judged(*rows: Measurement, **known: Any) -> list[str]:
    return implausible(
        [(f"line {at}", one) for at, one in enumerate(rows, 2)], Known(types=TYPES, **known)
    )


def edits(word: str) -> set[str]:
    """Every word one edit from `word`, by the definition."""
    found = {word[:at] + word[at + 1 :] for at in range(len(word))}
    found |= {word[:at] + c + word[at:] for at in range(len(word) + 1) for c in "ab"}
    found |= {word[:at] + c + word[at + 1 :] for at in range(len(word)) for c in "ab"}
    found |= {word[:at] + word[at : at + 2][::-1] + word[at + 2 :] for at in range(len(word) - 1)}
    return found - {word}


@given(TEXT, TEXT)
def test_one_edit_apart_is_what_its_definition_says(one: str, other: str) -> None:
    assert one_edit_apart(one, other) == (other in edits(one))


@given(st.floats(1e-3, 1e3), st.floats(1.0, 1e5))
def test_a_step_a_hundred_times_its_twins_is_refused_and_a_nearer_one_is_not(
    step_s: float, times: float
) -> None:
    problems = judged(row(step_s=step_s), row(step_s=step_s * times, layout="4"))
    assert bool(problems) == (step_s * times / step_s >= 100)
    assert judged(row(step_s=step_s), row(step_s=step_s * times, batch_per_device="16")) == [], (
        "another setup"
    )


def test_a_twin_is_looked_for_in_the_file_and_among_rows_that_are_known() -> None:
    (problem,) = judged(row(step_s=110.0), row(step_s=0.11))
    assert problem.startswith(
        "line 3, column step_s: 0.11 is 1,000 times less than the 110 of the same setup in line 2"
    )
    before = {setup_of(row().model_dump(), {"g4dn.12xlarge": 4}): (0.1, 0.2)}
    (problem,) = judged(row(step_s=110.0), setups=before)
    assert (
        "line 2" in problem
        and "imported or measured before" in problem
        and "milliseconds" in problem
    )
    assert judged(row(step_s=0.3), setups=before) == []
    (problem,) = judged(row(step_s=50.0), row(step_s=1.0), row(step_s=100.0))
    assert "line 4" in problem and "100 times the 1 of the same setup in line 3" in problem


@pytest.mark.parametrize(
    ("cluster", "near"),
    [
        ("1xg5.xlrge", "g5.xlarge"),
        ("1xg5.xlarge+1xg4nd.12xlarge", "g4dn.12xlarge"),
        ("1xG5.xlargee", "g5.xlarge"),
        ("1xG5.XLARGE", "g5.xlarge"),
        ("2xp4.24xlarge", "p4d.24xlarge"),
        (
            "1xg6.4xlarge",
            "",
        ),  # a digit tells sizes and families apart, and new ones come every year
        ("1xg7.2xlarge", ""),
        ("1xonprem.8x2080ti", ""),
        ("1xg5.xlarge", ""),
    ],
)
def test_a_type_one_letter_from_one_that_is_known_is_refused_and_a_strange_one_is_not(
    cluster: str, near: str
) -> None:
    problems = judged(row(cluster=cluster))
    assert [f"did you mean {near!r}?" in one for one in problems] == [True] * bool(near)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"step_s": 0.245}, "13.7 TFLOP/s; a T4 has at most 8.1 in fp32"),
        ({"step_s": 0.3}, ""),  # within what convolutions save on multiplications that are counted
        ({"step_s": 0.245, "precision": "fp16"}, ""),
        ({"step_s": 0.02, "precision": "fp16"}, "a T4 has at most 65 in fp16"),
        ({"step_s": 0.245, "accumulation_steps": 4}, "128 samples of 1.05e+11 FLOPs"),
        (
            {"step_s": 0.05, "cluster": "1xp4d.24xlarge"},
            "",
        ),  # TF32, which PyTorch's convolutions use
        ({"step_s": 0.01, "cluster": "1xp4d.24xlarge"}, "a A100 has at most 156 in fp32"),
        ({"step_s": 0.245, "cluster": "1xp4d.24xlarge+1xg4dn.12xlarge"}, "a T4"),
        ({"step_s": 1e-4, "cluster": "1xsomething.else"}, ""),
    ],
)
def test_what_no_device_can_do_is_refused_with_the_numbers(
    changes: dict[str, Any], says: str
) -> None:
    problems = judged(row(**changes), flops={("ec2", "vit"): 1.05e11})
    assert len(problems) == bool(says) and all(says in one for one in problems)
    assert judged(row(**changes)) == [], "nothing is known of the FLOPs"
    assert len(judged(row(**changes, flops_per_sample=1.05e11))) == bool(says), (
        "the row itself tells"
    )


def test_names_that_srift_toml_refuses_and_dates_to_come_are_never_let_in() -> None:
    rows = [
        row(workload="wörk"),
        row(workload="a/b"),
        row(measured_at="2031-01-01"),
        row(measured_at="2026-11-21T11:59:00"),
        row(measured_at="2020-01-01", workload="a.b-c_1"),
    ]
    problems = impossible([(f"line {at}", one) for at, one in enumerate(rows, 2)], NOON)
    assert [one.partition(":")[0] for one in problems] == [
        "line 2, column workload",
        "line 3, column workload",
        "line 4, column measured_at",
    ]
    assert "letters, digits" in problems[0] and "2031-01-01" in problems[2]
