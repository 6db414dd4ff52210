"""What may be published, what the published copies hold, and who can read them meanwhile."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb
import pandas as pd
import pytest

from tests.warehouse.builders import (
    CONTRACT,
    NOON,
    TYPES,
    fresh,
    judgement,
    offered,
    recommendation,
    stamp,
    words,
)
from warehouse.append import append, note_instance_types
from warehouse.database import SQL_FOLDER, Warehouse
from warehouse.publication import PublicationRefused, append_publication, publish, run_checks

WITHOUT_A_CLUSTER = words("""
    cluster layout batch_per_device accumulation_steps step_s step_low_s step_high_s samples_per_s hours hours_p90
    usd usd_p90 usd_per_million_samples p_best
""")
INFEASIBLE = dict.fromkeys(WITHOUT_A_CLUSTER) | {"cluster_offers": [], "status": "infeasible"}


def test_a_sound_publication_is_read_back_and_twice_changes_nothing(warehouse: Warehouse) -> None:
    rows = [
        recommendation(),
        recommendation(rank=2, usd=0.03, usd_p90=0.04),
        recommendation(goal="fastest"),
    ]
    assert publish(warehouse, rows, stamp(1)) == 3
    assert publish(warehouse, rows, stamp(1)) == 0
    table = warehouse.select("recommendations")
    assert list(table.columns) == CONTRACT
    assert table[["goal", "rank", "usd"]].values.tolist() == [
        ["cheapest", 1, 0.02],
        ["cheapest", 2, 0.03],
        ["fastest", 1, 0.02],
    ]
    assert list(table.cluster_offers[0]) == [offered("small", 2, 0.01)]


UNSOUND: list[
    tuple[str, dict[str, Any]]
] = [  # the check that refuses, and what is wrong with the row
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
    ("prices_are_never_zero", {"usd": 0.02, "usd_machines": 0.0, "usd_other": 0.02}),
    ("dollars_add_up", {"usd": 0.03, "usd_machines": 0.02}),
    (
        "dollars_add_up",
        {"usd": 0.03, "usd_machines": 0.02, "usd_storage": 0.02, "usd_other": -0.01},
    ),
    (
        "dollars_add_up",
        {"usd": 0.03, "usd_machines": 0.02, "usd_storage": -0.01, "usd_other": 0.02},
    ),
    ("dollars_add_up", {"usd_storage": None}),
    ("parts_make_up_the_step", {"compute_s": 0.2}),
    ("parts_make_up_the_step", {"compute_s": None}),
    (
        "parts_make_up_the_step",
        {"compute_s": None, "exposed_communication_s": None, "input_s": None},
    ),
    ("parts_make_up_the_step", {"compute_s": 0.5, "exposed_communication_s": -0.125}),
    (
        "parts_make_up_the_step",
        {"compute_s": -0.125, "exposed_communication_s": 0.5, "communication_s": 0.5},
    ),
    ("parts_make_up_the_step", {"compute_s": 0.5, "input_s": -0.125}),
    ("parts_make_up_the_step", {"communication_s": 0.1}),
    ("probabilities_are_fractions", {"interruption_risk": 1.1}),
    ("probabilities_are_fractions", {"expected_interruptions": -0.1}),
    ("every_goal_has_a_first", {"rank": 2}),
    ("batches_add_up", {"global_batch": 17}),
    ("batches_add_up", {"accumulation_steps": 2}),
    ("batches_add_up", {"batch_per_device": "8+8+8"}),
    ("batches_add_up", {"layout": None}),
    ("providers_are_not_mixed", {"provider": "ec2"}),
    ("infeasible_says_why", INFEASIBLE | {"reason": " "}),
]


UNSOUND_JUDGEMENTS: list[tuple[str, dict[str, Any]]] = [
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
]


def test_a_refused_publication_leaves_nothing_and_names_the_check(warehouse: Warehouse) -> None:
    with pytest.raises(PublicationRefused) as caught:
        publish(warehouse, [recommendation(goal="fastest"), recommendation(hours=0.0)], stamp(1))
    assert {failure.split(":")[0] for failure in caught.value.failures} == {"times_are_positive"}
    assert (
        warehouse.select("recommendation_history").empty
        and warehouse.select("raw_publications").empty
    )


def test_a_refusal_tells_of_a_part_of_a_step_that_is_missing(warehouse: Warehouse) -> None:
    with pytest.raises(
        PublicationRefused, match=r"tiny cheapest rank 1: 0\.5 s a step, but unknown s of computing"
    ):
        publish(warehouse, [recommendation(compute_s=None)], stamp(1))


def test_an_unsound_judgement_stops_the_publication_and_a_sound_one_does_not(
    warehouse: Warehouse,
) -> None:
    for number, change in enumerate(({}, {"regret": -0.01})):
        with warehouse.transact() as connection:
            append(
                connection,
                "raw_ledger",
                [judgement(f"p{number}", **change)],
                refresh_id="r",
                judged_at=NOON,
            )
        if not change:
            publish(warehouse, [recommendation()], stamp(number))
    with pytest.raises(PublicationRefused, match="regret_is_never_negative"):
        publish(warehouse, [recommendation()], stamp(1))


def test_a_recommendation_that_lacks_a_column_is_refused(warehouse: Warehouse) -> None:
    row = recommendation()
    del row["hours"]
    with pytest.raises(ValueError, match="'tiny' lacks hours"):
        publish(warehouse, [row], stamp(1))


def test_the_current_publication_is_each_providers_newest(warehouse: Warehouse) -> None:
    publish(warehouse, [recommendation()], stamp(2))
    publish(warehouse, [recommendation()], stamp(1))
    publish(warehouse, [recommendation()], stamp(1, provider="ec2"))
    assert warehouse.select("recommendations").publication_id.tolist() == ["ec2-1", "local-2"]
    assert len(warehouse.select("recommendation_history")) == 3


LATER = NOON.replace(hour=13)
DEARER = {
    "cluster_offers": [offered("small", 2, 0.02)],
    "usd": 0.04,
    "usd_p90": 0.05,
    "price_as_of": LATER,
}


@pytest.mark.parametrize(
    ("change", "model_version", "cause"),
    [
        (DEARER, "1", "prices"),
        ({"newest_measurement_at": LATER, "hours": 0.9}, "1", "measurements"),
        ({"measured_runs": 3, "hours": 0.9}, "1", "measurements"),
        ({"hours": 0.9}, "2", "model"),
        (DEARER | {"newest_measurement_at": LATER}, "2", "prices, measurements, model"),
        (
            {"hours": 0.9, "price_as_of": LATER},
            "2",
            "model",
        ),  # prices were read anew, but are the same
        ({"hours": 0.9}, "1", "other"),
    ],
)
def test_a_change_names_its_cause(
    warehouse: Warehouse, change: dict[str, Any], model_version: str, cause: str
) -> None:
    publish(warehouse, [recommendation(), recommendation(goal="fastest")], stamp(1))
    assert warehouse.select("recommendation_changes").empty
    rows = [recommendation(**change), recommendation(goal="fastest")]
    publish(warehouse, rows, stamp(2, model_version=model_version))
    changes = warehouse.select("recommendation_changes")
    assert changes[
        ["goal", "previous_publication_id", "publication_id", "cause"]
    ].values.tolist() == [["cheapest", "local-1", "local-2", cause]]
    assert changes.previous_usd[0] == 0.02 and changes.usd[0] == rows[0]["usd"]


SPLIT = {"batch_per_device": "4", "accumulation_steps": 2}
ON_DEMAND = {
    "market": "on-demand",
    "cluster_offers": [offered("small", 2, 0.01) | {"market": "on-demand"}],
}


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (DEARER, "price"),
        ({"hours": 0.9, "usd": 0.018}, "time"),
        (DEARER | {"hours": 0.9}, "time"),
        (SPLIT, "split"),
        (SPLIT | {"hours": 0.9}, "split"),
        (ON_DEMAND, "choice"),
        (ON_DEMAND | DEARER | {"cluster_offers": ON_DEMAND["cluster_offers"]}, "choice"),
        ({"region": "there"}, "choice"),
        ({"cluster": "1xbig", "batch_per_device": "16"}, "choice"),
        (INFEASIBLE | {"reason": "nothing does"}, "choice"),
    ],
)
def test_another_choice_is_distinguished_from_another_price(
    warehouse: Warehouse, change: dict[str, Any], what: str
) -> None:
    publish(warehouse, [recommendation()], stamp(1))
    publish(warehouse, [recommendation(**change)], stamp(2))
    changes = warehouse.select("recommendation_changes")
    assert changes["change"].tolist() == [what]
    assert changes["previous_market"].tolist() == ["spot"]
    assert changes["market"].tolist() == (
        [None] if change.get("cluster", "") is None else [change.get("market", "spot")]
    )


def test_another_cluster_at_rank_one_is_a_change_and_so_is_a_goal_that_is_gone(
    warehouse: Warehouse,
) -> None:
    other = {"cluster": "1xbig", "batch_per_device": "16", "usd": 0.01, "usd_p90": 0.02}
    cheap, dear = [offered("big", 1, 0.01)], [offered("big", 1, 0.05)]
    rival = other | {"rank": 2, "usd": 0.05, "usd_p90": 0.06, "cluster_offers": dear}
    publish(
        warehouse,
        [recommendation(), recommendation(**rival), recommendation(goal="fastest")],
        stamp(1),
    )
    publish(warehouse, [recommendation(**other, cluster_offers=cheap, price_as_of=LATER)], stamp(2))
    changes = warehouse.select("recommendation_changes")
    assert changes[["goal", "previous_cluster", "cause"]].values.tolist() == [
        ["cheapest", "2xsmall", "prices"],
        ["fastest", "2xsmall", "goals"],
    ]
    assert changes["change"].tolist() == ["choice", "goal"]
    assert changes.cluster[0] == "1xbig" and pd.isna(changes.cluster[1])


def test_pareto_keeps_what_nothing_beats_in_both_and_only_what_is_priced(
    warehouse: Warehouse,
) -> None:
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

    rows = [
        row(1, "a", 4.0, 1.0),
        row(2, "b", 2.0, 2.0),
        row(3, "c", 3.0, 2.5),
        row(4, "d", 1.0, 9.0),
    ]
    rows += [row(5, "free", 0.5, None), *({**one, "goal": "fastest"} for one in rows[:1])]
    publish(warehouse, rows, stamp(1))
    assert warehouse.select("pareto").cluster.tolist() == ["2xa", "2xb", "2xd"]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A publication, and what the warehouse knew before."""

    rows: Sequence[dict[str, Any]]
    judgements: Sequence[dict[str, Any]] = ()
    types: Sequence[dict[str, Any]] = ()

    def refusals(self, connection: duckdb.DuckDBPyConnection, checks: Path) -> set[str]:
        """Names of the files in `checks` that refuse it. Leaves the warehouse as it was."""
        connection.begin()
        append(connection, "raw_ledger", self.judgements, refresh_id="r", judged_at=NOON)
        note_instance_types(connection, self.types, noted_at=NOON)
        append_publication(connection, self.rows, stamp(1))
        failures = run_checks(connection, "local-1", checks)
        connection.rollback()
        return {failure.split(":")[0] for failure in failures}


FOREIGN = dict(TYPES[0]) | {"provider": "ec2"}
UNEQUAL = {
    "cluster": "1xbig+2xsmall",
    "layout": "4+1+1",
    "batch_per_device": "10+4+4",
    "accumulation_steps": 2,
}
UNEQUAL |= {"global_batch": 96}
SOUND = [
    Case(rows=[recommendation(), recommendation(rank=2), recommendation(goal="fastest")]),
    Case(rows=[recommendation()], types=[TYPES[0], FOREIGN], judgements=[judgement()]),
    Case(rows=[recommendation()], types=[FOREIGN | {"name": "large"}]),
    Case(
        rows=[
            recommendation(),
            recommendation(goal="fastest", **INFEASIBLE | {"batch_per_device": "8"}),
        ]
    ),
    Case(rows=[recommendation(usd=None, usd_p90=None, cluster_offers=[offered("small", 2, None)])]),
    Case(rows=[recommendation(p_meets_constraint=0.95)], judgements=[judgement(measured_usd=None)]),
    Case(
        rows=[recommendation()],
        judgements=[
            judgement(
                verdict="missed_constraint", met_constraint=False, regret=None, rivals_measured=0
            ),
            judgement("p2", regret=-0.1, runs=0, provider="ec2"),
        ],
    ),
    Case(rows=[recommendation(reason="")]),
    Case(rows=[recommendation(cluster="1xbig+2xsmall", layout="4+1+1", batch_per_device="2+4+4")]),
    Case(
        rows=[
            recommendation(
                **UNEQUAL, cluster_offers=[offered("big", 1, 1.0), offered("small", 2, 0.1)]
            )
        ]
    ),
]
INF = float("inf")
TIMES = ("step_s", "step_low_s", "step_high_s", "samples_per_s", "hours", "hours_p90")
DOLLARS = ("usd", "usd_p90", "usd_per_million_samples")


def judged(**change: Any) -> Case:
    return Case(rows=[recommendation()], judgements=[judgement(**change)])


MORE_UNSOUND: dict[str, list[Case]] = {  # some of them are refused by other checks too
    "ranks_are_distinct": [Case(rows=[recommendation(), recommendation()])],
    "something_is_published": [Case(rows=[])],
    "providers_are_not_mixed": [
        Case(rows=[recommendation()], types=[FOREIGN]),
        Case(rows=[recommendation()], types=[FOREIGN, TYPES[0] | {"name": "large"}]),
    ],
    "probabilities_are_fractions": [Case(rows=[recommendation(p_required=1.5)])],
    "batches_add_up": [
        Case(rows=[recommendation(layout="1+1+1")]),
        Case(
            rows=[
                recommendation(
                    **INFEASIBLE | {"cluster": "2xsmall", "layout": "1", "batch_per_device": "9"}
                )
            ]
        ),
    ],
    "times_are_positive": [
        Case(rows=[recommendation(**{name: bad})]) for name in TIMES for bad in (0.0, INF, None)
    ],
    "prices_are_never_zero": [
        *(Case(rows=[recommendation(**{name: bad})]) for name in DOLLARS for bad in (0.0, INF)),
        Case(rows=[recommendation(cluster_offers=[offered("small", 2, INF)])]),
    ],
    "ledger_is_positive": [
        *(
            judged(**{name: 0.0})
            for name in ("promised_step_s", "promised_hours", "measured_hours")
        ),
        *(
            judged(**{name: None})
            for name in ("promised_step_s", "promised_hours", "measured_step_s")
        ),
        *(judged(**{name: INF}) for name in ("measured_step_s", "measured_hours", "measured_usd")),
        judged(runs=0),
    ],
    "regret_is_never_negative": [judged(regret=INF), judged(rivals_measured=3)],
}


def unsound(check: str) -> list[Case]:
    """Every publication of this file that `check` refuses."""
    rows = [Case(rows=[recommendation(**change)]) for name, change in UNSOUND if name == check]
    judgements = [judged(**change) for name, change in UNSOUND_JUDGEMENTS if name == check]
    return rows + judgements + MORE_UNSOUND.get(check, [])


CHECKS = {file.stem: file for file in sorted(SQL_FOLDER.glob("checks/*.sql"))}


def without_a_condition(text: str) -> Iterator[str]:
    """`text`, a check, again and again, each time with one condition taken out, the last time with all of them."""
    tree = json.loads(
        duckdb.execute("select json_serialize_sql($1::varchar)", [text]).fetchone()[0]
    )  # type: ignore[index]

    def written() -> str:
        row = duckdb.execute("select json_deserialize_sql($1::json)", [json.dumps(tree)]).fetchone()
        assert row is not None
        return str(row[0])

    for node in list(_conjunctions(tree)):
        for at in range(len(node["children"])):
            taken = node["children"].pop(at)
            yield written()
            node["children"].insert(at, taken)
    yield (
        f"select 'never' as problem where false and $provider = '{len(text)}'"
        if "$provider" in text
        else NEVER
    )


NEVER = "select 'never' as problem where false"


def _conjunctions(tree: Any) -> Iterator[dict[str, Any]]:
    if isinstance(tree, dict):
        if tree.get("class") == "CONJUNCTION" or tree.get("function_name") == "least":
            yield tree
        for value in tree.values():
            yield from _conjunctions(value)
    elif isinstance(tree, list):
        for value in tree:
            yield from _conjunctions(value)


@pytest.mark.parametrize("check", CHECKS)
def test_each_check_refuses_what_is_unsound_and_needs_each_of_its_conditions(
    check: str, tmp_path: Path
) -> None:
    checks = tmp_path / "checks"
    checks.mkdir()
    (checks / "whole.sql").write_text(CHECKS[check].read_text())
    texts = dict(enumerate(without_a_condition(CHECKS[check].read_text())))
    for number, text in texts.items():
        (checks / f"{number}.sql").write_text(text)
    with duckdb.connect(fresh(tmp_path).path) as connection:
        for case, refused in [
            *((one, True) for one in unsound(check)),
            *((one, False) for one in SOUND),
        ]:
            refusals = case.refusals(connection, checks)
            assert ("whole" in refusals) == refused, case
            for number in list(texts):
                if (str(number) in refusals) != refused:  # proven: it need not be asked again
                    del texts[number]
                    (checks / f"{number}.sql").unlink()
    assert list(texts.values()) == []
