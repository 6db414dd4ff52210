"""Placement scores order zones of equal price, and nobody depends on being told them."""

from __future__ import annotations

from typing import Any

import pytest

from tasks.providers.base import ProviderError
from tasks.providers.ec2_api import Ec2Api
from tasks.providers.ec2_scores import likelier_first, scores_or_why, zone_scores
from tests.models.planning import offer

ZONES = [{"ZoneId": f"use1-az{n}", "ZoneName": f"us-east-1{name}"} for n, name in enumerate("abc", start=1)]


class Scored:
    """EC2's two answers; a page of scores at a time."""

    def __init__(self, pages: list[list[dict[str, Any]]]) -> None:
        self.pages, self.asked = pages, list[dict[str, Any]]()

    def get_spot_placement_scores(self, **words: Any) -> dict[str, Any]:
        self.asked.append(words)
        rest = self.pages[len(self.asked) :]
        return {"SpotPlacementScores": self.pages[len(self.asked) - 1], "NextToken": "more" if rest else ""}

    def describe_availability_zones(self) -> dict[str, Any]:
        return {"AvailabilityZones": ZONES}


def test_scores_are_by_zone_name_whatever_page_they_stand_on() -> None:
    pages = [[{"AvailabilityZoneId": "use1-az2", "Score": 9}], [{"AvailabilityZoneId": "use1-az1", "Score": 3}]]
    ec2 = Scored(pages)
    found = Ec2Api(lambda service, region: ec2).placement_scores("us-east-1", ["g5.xlarge"], 4)
    assert found == {"us-east-1b": 9, "us-east-1a": 3}
    assert ec2.asked[0]["TargetCapacity"] == 4 and ec2.asked[0]["SingleAvailabilityZone"] is True


def test_a_zone_that_is_not_known_by_name_has_no_score() -> None:
    assert zone_scores([{"AvailabilityZoneId": "use1-az9", "Score": 9}, {"Region": "us-east-1"}], ZONES) == {}


def test_equal_prices_are_ordered_by_score_and_a_lower_price_comes_first_all_the_same() -> None:
    sold = [
        offer("small", "spot", zone=zone, usd_per_hour=usd)
        for zone, usd in (("a", 1.0), ("b", 1.0), ("c", 0.9), ("d", None), ("e", 1.0))
    ]
    assert [one.zone for one in likelier_first(sold, {"b": 9, "c": 1, "d": 10})] == ["c", "b", "a", "e", "d"]
    assert [one.zone for one in likelier_first(sold, {})] == ["c", "a", "b", "e", "d"]


def test_whoever_may_not_ask_is_told_why_and_goes_on_without() -> None:
    def denied() -> dict[str, int]:
        raise ProviderError("this AWS identity may not call ec2:GetSpotPlacementScores")

    scores, why = scores_or_why(denied)
    assert scores == {} and "ec2:GetSpotPlacementScores" in why
    assert scores_or_why(lambda: {"a": 1}) == ({"a": 1}, "")


def test_a_denied_question_names_the_action() -> None:
    from botocore.exceptions import ClientError

    class Denied(Scored):
        def get_spot_placement_scores(self, **words: Any) -> dict[str, Any]:
            raise ClientError({"Error": {"Code": "UnauthorizedOperation"}}, "GetSpotPlacementScores")

    with pytest.raises(ProviderError, match="ec2:GetSpotPlacementScores in us-east-1"):
        Ec2Api(lambda service, region: Denied([])).placement_scores("us-east-1", ["g5.xlarge"], 4)
