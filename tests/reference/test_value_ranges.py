"""Ranges of values: numbers become 64-bit integers or are refused."""

from hypothesis import given
from hypothesis import strategies as st

from ddplab.reference.files.value_ranges import as_int64


@given(st.lists(st.floats() | st.integers(-(2**80), 2**80)))
def test_numbers_become_64_bit_integers_or_are_refused(numbers):
    try:
        found = as_int64(numbers)
    except ValueError:
        assert not all(abs(number) < 2**62 for number in numbers)
        return
    assert found.tolist() == [round(float(number)) for number in numbers]
