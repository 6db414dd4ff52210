"""What may be published, what the published copies hold, and who can read them meanwhile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from tests.warehouse.builders import CONTRACT, NOON, TYPES, judgement, offered, recommendation, stamp
from warehouse.append import append_ledger, note_instance_types
from warehouse.database import SQL_FOLDER, Warehouse
from warehouse.publication import PublicationRefused, publish

INFEASIBLE = dict.fromkeys(
    [
        "cluster",
        "layout",
        "batch_per_device",
        "accumulation_steps",
        "step_s",
        "step_low_s",
        "step_high_s",
        "samples_per_s",
        "hours",
        "hours_p90",
        "usd",
        "usd_p90",
        "usd_per_million_samples",
        "p_best",
    ]
) | {"cluster_offers": [], "status": "infeasible"}


def refused(warehouse: Warehouse, *rows: dict[str, Any]) -> list[str]:
    """Names of the checks that refuse the rows; nothing may have been published then."""
    with pytest.raises(PublicationRefused) as caught:
        publish(warehouse, rows, **stamp(1))
    assert warehouse.select("recommendation_history").empty
    assert warehouse.select("raw_publications").empty
    return sorted({failure.split(":")[0] for failure in caught.value.failures})


def test_a_sound_publication_is_read_back_and_twice_changes_nothing(warehouse: Warehouse) -> None:
    rows = [recommendation(), recommendation(rank=2, usd=0.03, usd_p90=0.04), recommendation(goal="fastest")]
    assert publish(warehouse, rows, **stamp(1)) == 3
    assert publish(warehouse, rows, **stamp(1)) == 0
    table = warehouse.select("recommendations")
    assert list(table.columns) == CONTRACT
    assert table[["goal", "rank", "usd"]].values.tolist() == [
        ["cheapest", 1, 0.02],
        ["cheapest", 2, 0.03],
        ["fastest", 1, 0.02],
    ]
    assert list(table.cluster_offers[0]) == [offered("small", 2, 0.01)]


@pytest.mark.parametrize(
    ("check", "change"),
    [
        ("times_are_positive", {"hours": 0.0}),
        ("times_are_positive", {"hours": float("nan")}),
        ("times_are_positive", {"hours_p90": None}),
        ("times_are_positive", {"step_s": -1.0, "step_low_s": -2.0}),
        ("times_are_positive", {"samples_per_s": float("inf")}),
        ("intervals_bracket", {"step_low_s": 0.55}),
        ("intervals_bracket", {"step_high_s": 0.45}),
        ("probabilities_are_fractions", {"p_best": 1.1}),
        ("probabilities_are_fractions", {"p_meets_constraint": float("nan")}),
        ("prices_are_never_zero", {"usd": 0.0}),
        ("prices_are_never_zero", {"usd": None}),
        ("prices_are_never_zero", {"cluster_offers": [offered("small", 2, 0.0)]}),
        ("prices_are_never_zero", {"cluster_offers": [offered("small", 2, None)]}),
        ("every_goal_has_a_first", {"rank": 2}),
        ("batches_add_up", {"global_batch": 17}),
        ("batches_add_up", {"accumulation_steps": 2}),
        ("batches_add_up", {"batch_per_device": "8+8+8"}),
        ("batches_add_up", {"layout": None}),
        ("providers_are_not_mixed", {"provider": "ec2"}),
        ("infeasible_says_why", INFEASIBLE | {"reason": " "}),
    ],
)
def test_an_unsound_row_stops_the_publication(warehouse: Warehouse, check: str, change: dict[str, Any]) -> None:
    sound = recommendation(goal="fastest")
    assert refused(warehouse, sound, recommendation(**change)) == [check]


def test_duplicate_ranks_and_empty_publications_are_refused(warehouse: Warehouse) -> None:
    assert refused(warehouse, recommendation(), recommendation()) == ["ranks_are_distinct"]
    assert refused(warehouse) == ["something_is_published"]


@pytest.mark.parametrize(
    ("check", "change"),
    [
        ("regret_is_never_negative", {"regret": -0.01}),
        ("regret_is_never_negative", {"regret": None}),
        ("regret_is_never_negative", {"met_constraint": False}),
        ("regret_is_never_negative", {"verdict": "missed_constraint", "met_constraint": False}),
        ("regret_is_never_negative", {"rivals_measured": 0}),
        ("ledger_is_positive", {"measured_step_s": 0.0}),
        ("ledger_is_positive", {"measured_hours": None}),
        ("ledger_is_positive", {"measured_usd": 0.0}),
        ("ledger_is_positive", {"measured_p_meets": 1.1}),
        ("ledger_is_positive", {"first_measured_at": NOON}),
    ],
)
def test_an_unsound_judgement_stops_the_publication(warehouse: Warehouse, check: str, change: dict[str, Any]) -> None:
    with warehouse.transact() as connection:
        append_ledger(connection, [judgement()], refresh_id="r", judged_at=NOON)
    publish(warehouse, [recommendation()], **stamp(0))  # a sound one does not
    with warehouse.transact() as connection:
        append_ledger(connection, [judgement("p2", **change)], refresh_id="r", judged_at=NOON)
    with pytest.raises(PublicationRefused) as caught:
        publish(warehouse, [recommendation()], **stamp(1))
    assert {failure.split(":")[0] for failure in caught.value.failures} == {check}


def test_a_machine_of_another_provider_is_refused(warehouse: Warehouse) -> None:
    with warehouse.transact() as connection:
        note_instance_types(connection, [dict(TYPES[0]) | {"provider": "ec2"}], noted_at=NOON)
    assert refused(warehouse, recommendation()) == ["providers_are_not_mixed"]


def test_unequal_batches_an_unpriced_cluster_and_an_infeasible_goal_may_be_published(warehouse: Warehouse) -> None:
    mixed = recommendation(
        cluster="1xbig+2xsmall", layout="4+1+1", batch_per_device="10+4+4", global_batch=96, accumulation_steps=2
    ) | {"cluster_offers": [offered("big", 1, 1.0), offered("small", 2, 0.1)]}
    unpriced = recommendation(goal="fastest", usd=None, usd_p90=None, usd_per_million_samples=None) | {
        "cluster_offers": [offered("small", 2, None)]
    }
    hopeless = recommendation(goal="cheapest_within_deadline", constraint_hours=0.1, **INFEASIBLE)
    assert publish(warehouse, [mixed, unpriced, hopeless], **stamp(1)) == 3
    assert warehouse.select("recommendations").usd.isna().tolist() == [False, True, True]


def test_a_recommendation_that_lacks_a_column_is_refused(warehouse: Warehouse) -> None:
    row = recommendation()
    del row["hours"]
    with pytest.raises(ValueError, match="'tiny' lacks hours"):
        publish(warehouse, [row], **stamp(1))


def test_the_current_publication_is_each_providers_newest(warehouse: Warehouse) -> None:
    publish(warehouse, [recommendation()], **stamp(2))
    publish(warehouse, [recommendation()], **stamp(1))
    publish(warehouse, [recommendation()], **stamp(1, provider="ec2"))
    assert warehouse.select("recommendations").publication_id.tolist() == ["ec2-1", "local-2"]
    assert len(warehouse.select("recommendation_history")) == 3


LATER = NOON.replace(hour=13)
DEARER = {"cluster_offers": [offered("small", 2, 0.02)], "usd": 0.04, "usd_p90": 0.05, "price_as_of": LATER}


@pytest.mark.parametrize(
    ("change", "model_version", "cause"),
    [
        (DEARER, "1", "prices"),
        ({"newest_measurement_at": LATER, "hours": 0.9}, "1", "measurements"),
        ({"measured_runs": 3, "hours": 0.9}, "1", "measurements"),
        ({"hours": 0.9}, "2", "model"),
        (DEARER | {"newest_measurement_at": LATER}, "2", "prices, measurements, model"),
        ({"hours": 0.9, "price_as_of": LATER}, "2", "model"),  # prices were read anew, but are the same
        ({"hours": 0.9}, "1", "other"),
    ],
)
def test_a_change_names_its_cause(warehouse: Warehouse, change: dict[str, Any], model_version: str, cause: str) -> None:
    publish(warehouse, [recommendation(), recommendation(goal="fastest")], **stamp(1))
    assert warehouse.select("recommendation_changes").empty
    rows = [recommendation(**change), recommendation(goal="fastest")]
    publish(warehouse, rows, **stamp(2, model_version=model_version))
    changes = warehouse.select("recommendation_changes")
    assert changes[["goal", "previous_publication_id", "publication_id", "cause"]].values.tolist() == [
        ["cheapest", "local-1", "local-2", cause]
    ]
    assert changes.previous_usd[0] == 0.02 and changes.usd[0] == rows[0]["usd"]


def test_another_cluster_at_rank_one_is_a_change_and_so_is_a_goal_that_is_gone(warehouse: Warehouse) -> None:
    other = {"cluster": "1xbig", "batch_per_device": "16", "usd": 0.01, "usd_p90": 0.02}
    cheap, dear = [offered("big", 1, 0.01)], [offered("big", 1, 0.05)]
    rival = other | {"rank": 2, "usd": 0.05, "usd_p90": 0.06, "cluster_offers": dear}
    publish(warehouse, [recommendation(), recommendation(**rival), recommendation(goal="fastest")], **stamp(1))
    publish(warehouse, [recommendation(**other, cluster_offers=cheap, price_as_of=LATER)], **stamp(2))
    changes = warehouse.select("recommendation_changes")
    assert changes[["goal", "previous_cluster", "cause"]].values.tolist() == [
        ["cheapest", "2xsmall", "prices"],
        ["fastest", "2xsmall", "goals"],
    ]
    assert changes.cluster[0] == "1xbig" and pd.isna(changes.cluster[1])


def test_pareto_keeps_what_nothing_beats_in_both_and_only_what_is_priced(warehouse: Warehouse) -> None:
    def row(rank: int, cluster: str, hours: float, usd: float | None) -> dict[str, Any]:
        return recommendation(
            rank=rank,
            cluster=f"2x{cluster}",
            hours=hours,
            hours_p90=hours,
            usd=usd,
            usd_p90=usd,
            usd_per_million_samples=usd,
            cluster_offers=[offered(cluster, 2, usd)],
        )

    rows = [row(1, "a", 4.0, 1.0), row(2, "b", 2.0, 2.0), row(3, "c", 3.0, 2.5), row(4, "d", 1.0, 9.0)]
    rows += [row(5, "free", 0.5, None), *({**one, "goal": "fastest"} for one in rows[:1])]
    publish(warehouse, rows, **stamp(1))
    assert warehouse.select("pareto").cluster.tolist() == ["2xa", "2xb", "2xd"]


def test_each_check_is_proven_by_a_row_that_it_refuses() -> None:
    proven = Path(__file__).read_text()
    for file in SQL_FOLDER.glob("checks/*.sql"):
        assert f'"{file.stem}"' in proven, f"no test shows what {file.stem} refuses"


READ = """
import duckdb, sys
with duckdb.connect(sys.argv[1], read_only=True) as connection:
    print(connection.execute("select publication_id from recommendations").fetchone()[0], flush=True)
    sys.stdin.readline()
    print(connection.execute("select any_value(publication_id) from recommendation_history").fetchone()[0])
"""
