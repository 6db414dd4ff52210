"""Which of a node's ranks was hit, when torchrun tells of all that ended."""

import pytest

from tasks.node.processes import exit_reason, worker_exit_code

FIRST = (
    "E1120 11:06 api.py:1002] failed (exitcode: {}) local_rank: 0 (pid: 7931) of binary: python\n"
)
ALSO = "  rank      : 1 (local_rank: 1)\n  exitcode  : {} (pid: 7932)\n"


def log(first, *others):
    return FIRST.format(first) + "".join(ALSO.format(code) for code in others)


@pytest.mark.parametrize(
    ("codes", "hit"),
    [
        ((-9,), -9),
        ((4, 3), 3),  # the neighbour of a rank that failed is listed first, and only lost its peer
        ((3, -15), 3),  # torchrun ended the others itself
        ((-15,), -15),
    ],
)
def test_the_rank_that_was_hit_is_distinguished_from_those_that_lost_it(codes, hit):
    assert worker_exit_code(log(*codes), 1) == hit


def test_the_reason_is_that_ranks_last_word():
    text = "noise\nsrift[3]: out of memory\nsrift[4]: its peer is gone\n" + log(4, 3)
    assert exit_reason(text, 3) == "out of memory"
    assert exit_reason(text, 4) == "its peer is gone"
    assert exit_reason("srift: node 1 could not write x\n", 5) == "node 1 could not write x"
    assert exit_reason(log(-9), -9) == ""
    assert worker_exit_code("", 6) == 6
