"""A launch that loses machines replaces or leaves out only what it must, within time and money."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.execution.liveness import decide
from tasks.node.record import Item

BOTH, FIRST, SECOND = (
    Item(run_id="run", kind="train", nodes=nodes) for nodes in ([0, 1], [0], [1])
)
LEFT = {"items": [BOTH], "host": None, "seconds": 600.0, "start_up_s": 100.0, "no_replacement": ""}
NONE = {"no_replacement": "none is to be had"}


def how(leaving_s=None, **changes):
    return decide(frozenset({1}), leaving_s=leaving_s, **LEFT | changes)[0]


@pytest.mark.parametrize(
    "leaving_s, changes, expected",
    [
        (None, {}, "replace"),
        (None, {"seconds": 105.0}, "give up"),
        (None, NONE, "give up"),
        (None, {"items": [BOTH, FIRST], "seconds": 50.0}, "fewer"),
        (None, {"items": [FIRST]}, "go on"),
        (None, {"items": [FIRST], "host": 1}, "fewer"),
        (120.0, {}, "go on"),  # the run ends before
        (12.0, {}, "replace"),
        (12.0, NONE | {"items": [BOTH, FIRST]}, "fewer"),
        (2.0, {"items": [FIRST, BOTH]}, "go on"),  # the run under way does not need it
        (2.0, NONE | {"items": [SECOND, FIRST]}, "fewer"),
        (2.0, NONE, "go on"),
    ],
)
def test_the_decision_depends_on_time_and_on_what_needs_the_machine(leaving_s, changes, expected):
    assert how(leaving_s, **changes) == expected


@given(
    st.lists(st.sampled_from([BOTH, FIRST, SECOND]), max_size=4),
    st.floats(0, 1000),
    st.sampled_from([None, 0, 1]),
    st.sampled_from(["", "none"]),
)
def test_no_machine_is_requested_that_no_run_needs(items, seconds, host, no):
    decision = how(items=items, seconds=seconds, host=host, no_replacement=no)
    if decision == "replace":
        assert any(1 in item.nodes for item in items) and seconds > 100.0 and not no
    if decision == "give up":
        assert items and all(1 in item.nodes for item in items)
