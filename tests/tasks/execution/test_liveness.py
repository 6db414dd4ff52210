"""What a launch does about machines that go: as little as the time that they leave allows, and
never for ever.
"""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from tasks.execution.liveness import RemainingWork, decide
from tasks.node.record import Item


def item(run_id: str, *nodes: int) -> Item:
    return Item(run_id=run_id, kind="train", nodes=list(nodes), batches=[1] * len(nodes))


BOTH, FIRST, SECOND = item("both", 0, 1), item("first", 0), item("second", 1)
GONE = frozenset({1})
LEFT = RemainingWork(items=[BOTH], under_way_s=10.0, host=None, seconds=600.0, start_up_s=100.0)


def how(leaving_s: float | None = None, **changes: object) -> str:
    return decide(GONE, replace(LEFT, **changes), leaving_s)[0]  # type: ignore[arg-type]


def test_a_machine_that_is_gone_is_replaced_while_there_is_time_to_start_and_use_another() -> None:
    assert how() == "replace"
    assert how(seconds=105.0) == "give up"
    assert how(no_replacement="none is to be had") == "give up"


def test_what_does_not_need_it_goes_on_where_none_is_to_be_had() -> None:
    assert how(items=[BOTH, FIRST], seconds=50.0) == "fewer"
    assert how(items=[FIRST]) == "go on"
    assert how(items=[FIRST], host=1) == "fewer"


def test_a_run_that_ends_before_its_machine_goes_is_let_end() -> None:
    assert how(120.0) == "go on"
    assert how(12.0) == "replace"
    assert how(12.0, no_replacement="no", items=[BOTH, FIRST]) == "fewer"


def test_a_run_that_does_not_need_the_leaving_machine_is_not_cut_short() -> None:
    assert how(2.0, items=[FIRST, BOTH]) == "go on"
    assert how(2.0, items=[SECOND, FIRST], no_replacement="no") == "fewer"
    assert how(2.0, no_replacement="no") == "go on"


@given(
    st.lists(st.sampled_from([BOTH, FIRST, SECOND]), max_size=4),
    st.floats(0, 1000),
    st.sampled_from([None, 0, 1]),
    st.sampled_from(["", "none"]),
)
def test_no_machine_is_asked_for_that_no_run_needs(
    items: list[Item], seconds: float, host: int | None, no: str
) -> None:
    decision = how(items=items, seconds=seconds, host=host, no_replacement=no)
    if decision == "replace":
        assert any(1 in one.nodes for one in items) and seconds > 100.0 and not no
    if decision == "give up":
        assert items and all(1 in one.nodes for one in items)
