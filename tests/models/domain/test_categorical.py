"""Names as codes: every operation gives what the plain tuple of names would."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from models.domain.categorical import Keys

NAMES = st.lists(st.sampled_from(["a", "b", "a|b", "", "c"]), max_size=12)


@given(NAMES, NAMES)
def test_keys_are_the_names_that_they_were_made_of(left, right):
    ours, theirs = Keys.of(left), Keys.of(right)
    assert list(ours) == left and len(ours) == len(left) and Keys.of(ours) is ours
    both = ours + theirs
    assert list(both) == left + right and len(set(both.names)) == len(both.names)
    assert list(ours.take(np.arange(len(left))[::-1])) == left[::-1]
    assert [ours[at] for at in range(len(left))] == left and list(ours[1:]) == left[1:]


@given(NAMES, st.integers(0, 12))
def test_groups_and_values_are_of_used_names(names, first):
    kept, left = Keys.of(names).take(np.arange(len(names))[first:]), names[first:]
    groups = {name: rows.tolist() for name, rows in kept.groups().items()}
    assert groups == {name: [at for at, one in enumerate(left) if one == name] for name in left}
    assert set(kept.distinct) == set(left)
    assert kept.values(len).tolist() == [len(name) for name in left]
