"""What of a stored model is refused: it must mean today what it meant when it was written."""

from __future__ import annotations

import json
from functools import cache

import pytest

from models.artifact import OtherFormat
from models.step_time import StepTimeModel, fit
from tests.models.synthetic import World


@cache
def stored() -> str:
    return fit(World(3).data(20), seed=0).to_json()


@pytest.mark.parametrize("renamed", [{"two_exchange": "own_two"}, {"two_exchange": ""}])
def test_a_model_of_other_families_of_effects_is_of_another_format(renamed: dict[str, str]) -> None:
    body = json.loads(stored())
    variances = {renamed.get(name, name): one for name, one in body["measured"]["variances"].items()}
    body["measured"]["variances"] = {name: one for name, one in variances.items() if name}
    with pytest.raises(OtherFormat, match="families"):
        StepTimeModel.from_json(json.dumps(body))


def test_a_model_of_an_older_format_is_told_apart() -> None:
    body = {**json.loads(stored()), "format": "srift-step-time-2"}
    with pytest.raises(OtherFormat, match="srift-step-time-7"):
        StepTimeModel.from_json(json.dumps(body))
