"""A drifting machine's setups come first, known or not; measured since, they are known again."""

from __future__ import annotations

from datetime import timedelta

import pandas as pd

from models.campaign import Launch
from models.identity import row_key, rows_of
from tests.models.planning import AS_OF
from tests.models.test_campaign import lines, measured, shop
from tests.models.test_campaign_worth import SURE, buy, model

HOUR = timedelta(hours=1)


def touching(launches: list[Launch], name: str) -> float:
    """Part of the training runs that use machines called `name`."""
    uses = [name in members for _, members in lines(launches, "train")]
    return sum(uses) / len(uses)


def past(hours: float) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    runs, profiles, probes = measured(shop())
    return runs.assign(measured_at=AS_OF + hours * HOUR), profiles, probes


def test_setups_on_a_drifting_type_come_to_the_head_with_the_reason() -> None:
    plain, moved = shop(*past(-1.0)), shop(*past(-1.0), drifting={"medium": AS_OF})
    assert "medium" in {offer.instance_type.name for offer in moved[0].cluster.members}
    assert touching(moved, "medium") > 1.3 * touching(plain, "medium")
    for item, members in lines(moved, "train"):
        assert ("medium drifted" in item.reason) == ("medium" in members)
    assert not [item for item, _ in lines(plain, "train") if "drifted" in item.reason]


def test_what_was_settled_on_it_is_bought_again_until_it_was_measured_since() -> None:
    def again(launches: list[Launch], runs: pd.DataFrame) -> int:
        known = {row_key(row, {}) for row in rows_of(runs)}
        return sum(row_key(row, {}) in known for row in rows_of(measured(launches)[0]))

    frames = past(-1.0)
    assert again(shop(*frames, drifting={}), frames[0]) == 0
    assert again(shop(*frames, drifting={"medium": AS_OF}), frames[0]) > 0
    since = past(+1.0)
    assert again(shop(*since, drifting={"medium": AS_OF}), since[0]) == 0


def test_a_run_on_it_is_worth_more_than_one_that_was_never_tried_elsewhere() -> None:
    _, profiles, probes = past(-1.0)
    plain, moved = (shop(pd.DataFrame(), profiles, probes, drifting=one) for one in ({}, {"small": AS_OF}))
    assert touching(moved, "small") > 1.2 * touching(plain, "small")


def only_of(launches: list[Launch], name: str) -> bool:
    runs = list(lines(launches, "train"))
    return bool(runs) and all(name in members for _, members in runs)


def test_a_model_that_is_sure_of_everything_still_measures_what_drifted_or_went_stale() -> None:
    runs, profiles, probes = past(-1.0)
    frames = (runs, profiles, probes)
    assert buy(model(SURE), frames=frames) == []
    assert only_of(buy(model(SURE), frames=frames, drifting={"medium": AS_OF}), "medium")
    on_medium = runs["cluster"].str.contains("medium")
    aged = runs.assign(measured_at=runs["measured_at"].where(~on_medium, AS_OF - 1000 * HOUR))
    assert buy(model(SURE), frames=(aged, profiles, probes), stale_before=None) == []
    assert only_of(buy(model(SURE), frames=(aged, profiles, probes), stale_before=AS_OF - 10 * HOUR), "medium")
