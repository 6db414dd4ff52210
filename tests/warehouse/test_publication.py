"""What may be published, and what is said to have changed since the publication before."""

import json

import pytest

from tests.warehouse.builders import (
    CONTRACT,
    INFEASIBLE,
    NOON,
    TYPES,
    judgement,
    offered,
    recommendation,
    stamp,
    write,
)
from warehouse.append import append, note_instance_types
from warehouse.database import SQL_FOLDER
from warehouse.publication import PublicationRefused, publish

# A check, and the change of a sound row that it refuses. {} repeats a row.
UNSOUND = """
times_are_positive {"hours": 0.0}
times_are_positive {"hours": NaN}
times_are_positive {"hours_p90": null}
times_are_positive {"step_s": -1.0, "step_low_s": -2.0}
times_are_positive {"samples_per_s": Infinity}
intervals_bracket {"step_low_s": 0.55}
intervals_bracket {"step_high_s": 0.45}
probabilities_are_fractions {"p_best": 1.1}
probabilities_are_fractions {"p_meets_constraint": NaN}
probabilities_are_fractions {"p_required": 1.5}
probabilities_are_fractions {"interruption_risk": 1.1}
probabilities_are_fractions {"expected_interruptions": -0.1}
prices_are_never_zero {"usd": 0.0}
prices_are_never_zero {"usd": null}
prices_are_never_zero {"usd_p90": Infinity}
prices_are_never_zero {"cluster_offers": [{"instance_type": "small", "count": 2, "usd_per_hour": 0.0}]}
prices_are_never_zero {"cluster_offers": [{"instance_type": "small", "count": 2}]}
prices_are_never_zero {"usd_machines": 0.0, "usd_other": 0.02}
dollars_add_up {"usd": 0.03, "usd_machines": 0.02}
dollars_add_up {"usd": 0.03, "usd_machines": 0.02, "usd_storage": 0.02, "usd_other": -0.01}
dollars_add_up {"usd_storage": null}
parts_make_up_the_step {"compute_s": 0.2}
parts_make_up_the_step {"compute_s": null}
parts_make_up_the_step {"compute_s": 0.5, "input_s": -0.125}
parts_make_up_the_step {"communication_s": 0.1}
every_goal_has_a_first {"rank": 2}
batches_add_up {"global_batch": 17}
batches_add_up {"accumulation_steps": 2}
batches_add_up {"batch_per_device": "8+8+8"}
batches_add_up {"layout": null}
providers_are_not_mixed {"provider": "ec2"}
infeasible_says_why {"cluster": null, "reason": " "}
ranks_are_distinct {}
""".strip().splitlines()
JUDGEMENTS = """
regret_is_never_negative {"regret": -0.01}
regret_is_never_negative {"regret": null}
regret_is_never_negative {"met_constraint": false}
regret_is_never_negative {"rivals_measured": 0}
regret_is_never_negative {"rivals_measured": 3}
ledger_is_positive {"measured_step_s": 0.0}
ledger_is_positive {"measured_hours": null}
ledger_is_positive {"measured_usd": 0.0}
ledger_is_positive {"measured_p_meets": 1.1}
ledger_is_positive {"first_measured_at": "2026-11-20"}
ledger_is_positive {"runs": 0}
""".strip().splitlines()


def refused_by(warehouse, rows):
    with pytest.raises(PublicationRefused) as refused:
        publish(warehouse, rows, stamp(1))
    assert warehouse.select("raw_publications").empty
    return {failure.split(":")[0] for failure in refused.value.failures}


def test_unsound_rows_are_refused_and_nothing_is_stored(warehouse):
    for case in UNSOUND:
        check, text = case.split(" ", 1)
        rows = [recommendation(goal="fastest"), recommendation(**json.loads(text))]
        assert check in refused_by(warehouse, rows + rows[1:] * (text == "{}")), case


def test_unsound_judgements_stop_the_publication(warehouse):
    for number, case in enumerate(JUDGEMENTS):
        check, text = case.split(" ", 1)
        change = json.loads(text)
        if "first_measured_at" in change:
            change["first_measured_at"] = NOON
        row = judgement(evidence_runs=number, evidence=str(number), **change)
        write(warehouse, append, "raw_ledger", [row], refresh_id="r", judged_at=NOON)
        assert check in refused_by(warehouse, [recommendation()]), case


def test_every_check_has_a_case(warehouse):
    assert refused_by(warehouse, []) == {"something_is_published"}
    names = {file.stem for file in SQL_FOLDER.glob("checks/*.sql")}
    cases = {case.split(" ", 1)[0] for case in [*UNSOUND, *JUDGEMENTS]}
    assert names == cases | {"something_is_published"}


def test_a_machine_of_another_provider_alone_is_refused(warehouse):
    write(warehouse, note_instance_types, [TYPES[0] | {"provider": "ec2"}], noted_at=NOON)
    assert refused_by(warehouse, [recommendation()]) == {"providers_are_not_mixed"}


def test_sound_rows_are_published_and_twice_changes_nothing(warehouse):
    unequal = {
        "goal": "large",
        "cluster": "1xbig+2xsmall",
        "layout": "4+1+1",
        "batch_per_device": "10+4+4",
        "accumulation_steps": 2,
        "global_batch": 96,
        "cluster_offers": [offered("big", 1, 1.0), offered("small", 2, 0.1)],
    }
    unpriced = {
        "goal": "unpriced",
        "usd": None,
        "usd_p90": None,
        "cluster_offers": [offered("small", 2, None)],
    }
    rows = [
        recommendation(),
        recommendation(rank=2, usd=0.03, usd_p90=0.04),
        recommendation(**unequal),
        recommendation(**unpriced),
        recommendation(goal="nothing", **INFEASIBLE),
    ]
    write(warehouse, append, "raw_ledger", [judgement()], refresh_id="r", judged_at=NOON)
    assert publish(warehouse, rows, stamp(1)) == 5
    assert publish(warehouse, rows, stamp(1)) == 0
    table = warehouse.select("recommendations")
    assert list(table.columns) == CONTRACT
    assert table["goal"].tolist() == ["cheapest", "cheapest", "large", "nothing", "unpriced"]
    assert list(table.cluster_offers[0]) == [offered("small", 2, 0.01)]


def test_the_current_publication_is_each_providers_newest(warehouse):
    for publication in (stamp(2), stamp(1), stamp(1, provider="ec2")):
        publish(warehouse, [recommendation()], publication)
    assert warehouse.select("recommendations").publication_id.tolist() == ["ec2-1", "local-2"]
    assert len(warehouse.select("recommendation_history")) == 3


LATER = NOON.replace(hour=13)
DEARER = {
    "cluster_offers": [offered("small", 2, 0.02)],
    "usd": 0.04,
    "usd_p90": 0.05,
    "price_as_of": LATER,
}
ON_DEMAND = {
    "market": "on-demand",
    "cluster_offers": [offered("small", 2, 0.01) | {"market": "on-demand"}],
}


@pytest.mark.parametrize(
    ("change", "model_version", "cause", "kind"),
    [
        (DEARER, "1", "prices", "price"),
        ({"measured_runs": 3, "hours": 0.9}, "1", "measurements", "time"),
        ({"hours": 0.9, "price_as_of": LATER}, "2", "model", "time"),
        (
            DEARER | {"newest_measurement_at": LATER},
            "2",
            "prices, measurements, model",
            "price",
        ),
        ({"batch_per_device": "4", "accumulation_steps": 2}, "1", "other", "split"),
        (ON_DEMAND, "1", "other", "choice"),
        ({"region": "there"}, "1", "other", "choice"),
        (INFEASIBLE | {"reason": "nothing does"}, "1", "other", "choice"),
    ],
)
def test_a_change_has_a_cause_and_a_kind(warehouse, change, model_version, cause, kind):
    same = recommendation(goal="fastest")
    publish(warehouse, [recommendation(), same], stamp(1))
    assert warehouse.select("recommendation_changes").empty
    publish(warehouse, [recommendation(**change), same], stamp(2, model_version=model_version))
    [row] = warehouse.select("recommendation_changes").to_dict("records")
    assert (row["goal"], row["cause"], row["change"]) == ("cheapest", cause, kind)
    assert (row["previous_publication_id"], row["previous_usd"]) == ("local-1", 0.02)


def test_a_goal_that_is_gone_is_a_change(warehouse):
    publish(warehouse, [recommendation(), recommendation(goal="fastest")], stamp(1))
    publish(warehouse, [recommendation()], stamp(2))
    changes = warehouse.select("recommendation_changes")
    assert changes[["goal", "cause", "change"]].values.tolist() == [["fastest", "goals", "goal"]]


def test_pareto_keeps_priced_setups_that_nothing_beats_in_both(warehouse):
    setups = [("a", 4.0, 1.0), ("b", 2.0, 2.0), ("c", 3.0, 2.5), ("d", 1.0, 9.0), ("e", 0.5, None)]
    rows = [
        recommendation(
            rank=rank,
            cluster=f"2x{name}",
            hours=hours,
            hours_p90=hours,
            usd=usd,
            usd_p90=usd,
            usd_per_million_samples=usd,
            cluster_offers=[offered(name, 2, usd)],
        )
        for rank, (name, hours, usd) in enumerate(setups, 1)
    ]
    publish(warehouse, rows, stamp(1))
    assert warehouse.select("pareto").cluster.tolist() == ["2xa", "2xb", "2xd"]
