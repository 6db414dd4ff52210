"""Values as codes: distinct values in order of first appearance."""

from hypothesis import given
from hypothesis import strategies as st

from models.domain.categorical import numbered


@given(st.lists(st.sampled_from(["a", "b", "a|b", "", "c"]), max_size=12))
def test_codes_give_back_the_values(values):
    distinct, codes = numbered(values)
    assert [distinct[code] for code in codes.tolist()] == values
    assert distinct == tuple(dict.fromkeys(values))
