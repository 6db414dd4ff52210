"""A stored model reads back exactly, or is refused: it must mean today what it meant when it was written."""

from __future__ import annotations

from dataclasses import replace

import pandas as pd
import pytest

from models.step_time import serialization
from models.step_time.model import fit
from models.step_time.serialization import NotAModel
from tests.models.step_time.test_imported_rows import FRESH, clean
from tests.models.step_time.test_model import known
from tests.models.synthetic import World


@pytest.mark.parametrize("text", ["[]", "{}", '{"model": 1}'])
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(NotAModel):
        serialization.load(text)


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
