"""The formulas of other projects at the ends of what they describe."""

import pytest

from validation.published_formulas import BACKWARD, BLOCKS, PROCESSOR_USAGE, calculon_ns, primus_ns


@pytest.mark.parametrize("formula", [calculon_ns, primus_ns])
@pytest.mark.parametrize("all_reduces_ns", [0, 10, 300, 1000, 10**6])
def test_some_of_the_all_reduces_is_exposed(formula, all_reduces_ns):
    alone_ns = 900
    assert alone_ns <= formula(alone_ns, all_reduces_ns) <= alone_ns + all_reduces_ns
    assert formula(alone_ns, 0) == alone_ns


def test_all_reduces_that_take_longer_than_computation_are_exposed_beyond_it():
    assert primus_ns(900, 100) == 920
    assert primus_ns(900, 1800) == 1800
    hidden, window = 1600 * (1 - 1 / BLOCKS), BACKWARD * 900 * (1 - 1 / BLOCKS)
    assert calculon_ns(900, 1600) == pytest.approx(900 + 100 + hidden - window)
    assert calculon_ns(900, 160) == pytest.approx(900 + 10 + PROCESSOR_USAGE[0] * 150)
