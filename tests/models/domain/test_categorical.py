"""Names as numbers: every operation says what the plain tuple of names would."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.domain.categorical import Keys, numbered

NAMES = st.lists(st.sampled_from(["a", "b", "a|b", "", "c"]), max_size=12)


@given(NAMES, NAMES)
def test_keys_are_the_names_that_they_were_made_of(left: list[str], right: list[str]) -> None:
    ours, theirs = Keys.of(left), Keys.of(right)
    assert list(ours) == left and len(ours) == len(left) and Keys.of(ours) is ours
    both = ours + theirs
    assert list(both) == left + right and len(set(both.names)) == len(both.names)
    assert list(ours.take(np.arange(len(left))[::-1])) == left[::-1]
    assert [ours[at] for at in range(len(left))] == left and list(ours[1:]) == left[1:]


@given(NAMES, NAMES)
def test_keys_of_two_tables_are_equal_where_their_names_are(
    left: list[str], right: list[str]
) -> None:
    ours, theirs = Keys.of(left), Keys.of(right)
    equal = ours.within(theirs)[:, None] == theirs.codes[None, :]
    assert equal.tolist() == [[one == other for other in right] for one in left]
    assert ours.within(ours) is ours.codes


PARTS = st.tuples(
    st.sampled_from(["a", "a|b"]), st.sampled_from(["c", "b|c"]), st.sampled_from("12")
)


@given(st.lists(PARTS, max_size=12))
def test_joined_keys_are_joined_row_by_row(rows: list[tuple[str, str, str]]) -> None:
    parts = [Keys.of(row[at] for row in rows) for at in range(3)]
    joined = Keys.joined(*parts)
    assert list(joined) == ["|".join(row) for row in rows]
    assert len(set(joined.names)) == len(joined.names)


def test_names_are_joined_row_by_row_or_not_at_all() -> None:
    with pytest.raises(ValueError, match="row by row"):
        Keys.joined(Keys.of("ab"), Keys.of("a"))


@given(NAMES, st.integers(0, 12))
def test_groups_and_values_are_of_the_names_that_some_row_has(names: list[str], first: int) -> None:
    kept = Keys.of(names).take(np.arange(len(names))[first:])
    groups, left = kept.groups(), names[first:]
    assert {name: rows.tolist() for name, rows in groups.items()} == {
        name: [at for at, one in enumerate(left) if one == name] for name in set(left)
    }
    assert set(kept.distinct) == set(left)
    asked: Counter[str] = Counter()

    def length(name: str) -> float:
        asked[name] += 1
        return float(len(name))

    assert kept.values(length).tolist() == [len(name) for name in left]
    assert asked == Counter(set(left))
    assert kept.places({"a": 7}).tolist() == [7 if name == "a" else -1 for name in left]


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), max_size=12))
def test_numbered_rows_come_in_the_order_in_which_they_first_appear(
    rows: list[tuple[int, int]],
) -> None:
    distinct, which = numbered(rows)
    assert distinct == tuple(dict.fromkeys(rows))
    assert [distinct[at] for at in which.tolist()] == rows
