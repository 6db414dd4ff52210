"""A stored model reads back exactly, or is refused: it must mean today what it meant when it was written."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache

import pandas as pd
import pytest

from models.step_time import serialization
from models.step_time.model import fit
from models.step_time.serialization import OtherFormat
from tests.models.step_time.test_imported_rows import FRESH, clean
from tests.models.step_time.test_model import known
from tests.models.synthetic import World


@cache
def stored() -> str:
    return serialization.dump(fit(World(3).data(20), seed=0))


@pytest.mark.parametrize("written", ["srift-step-time-7", "other"])
def test_a_model_of_another_format_is_distinguished(written: str) -> None:
    with pytest.raises(OtherFormat, match="not a step-time model of the format srift-step-time-10"):
        serialization.load(json.dumps({**json.loads(stored()), "format": written}))
    with pytest.raises(OtherFormat, match="not a step-time model"):
        serialization.load(json.dumps({"format": written}))


@pytest.mark.parametrize("which", ["profiles and probes", "imported runs"])
def test_reads_back_from_json_exactly(which: str) -> None:
    model, fresh = (
        (known()[2], known()[1]) if which == "profiles and probes" else (clean()[1], FRESH)
    )
    again = serialization.load(serialization.dump(model))
    pd.testing.assert_frame_equal(again.predict(fresh), model.predict(fresh), check_exact=True)
    assert serialization.dump(again) == serialization.dump(model)
    assert (
        again.draws(fresh[:9], count=7, seed=3) == model.draws(fresh[:9], count=7, seed=3)
    ).all()


def test_the_artifact_keeps_the_definitions_that_were_measured() -> None:
    data = World(5).data(20)
    data = replace(
        data,
        workloads=data.workloads.assign(digest=["d-" + one for one in data.workloads["workload"]]),
        instance_types=data.instance_types.assign(digest="t"),
    )
    text = serialization.dump(fit(data, seed=0))
    back = serialization.load(text)
    assert back.workload_digests["lm"] == "d-lm" and set(back.type_digests.values()) == {"t"}
    assert serialization.dump(back) == text
