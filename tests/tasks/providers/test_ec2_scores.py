"""Placement scores order zones of equal price, and nobody depends on being told them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tasks.providers.base import ProviderError
from tasks.providers.ec2_api import Ec2Api
from tasks.providers.ec2_scores import scores_or_why, zone_scores
from tests.ec2_home import Home

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


def test_zones_of_equal_price_are_tried_by_score_and_who_may_not_ask_is_told_once(tmp_path: Path) -> None:
    home = Home(tmp_path)
    home.world.account.spot |= {"us-east-1b": 0.9, "us-east-1c": 0.9}
    zones = {zone: number for number, zone in enumerate(("us-east-1a", "us-east-1b", "us-east-1c"))}
    asked: list[str] = []

    def scored(api: Ec2Api, region: str, names: Sequence[str], count: int) -> dict[str, int]:
        asked.append(f"{count} {names[0]} in {region}")
        if len(asked) > 1:
            raise ProviderError("denied: ec2:GetSpotPlacementScores")
        return zones

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ec2Api, "placement_scores", scored)
        seen = [home.provider.prospect(home.two(), lease_id=f"r-{n}", deadline_s=600.0) for n in range(4)]
    assert asked == ["2 g4dn.12xlarge in us-east-1"] * 2
    assert [[rung.zone[-1] for rung in one.rungs[:3]] for one in seen] == [list("acb"), *[list("abc")] * 3]
    assert [any("GetSpotPlacementScores" in sentence for sentence in one.said) for one in seen] == [
        *(False, True, False, False)
    ]
