"""Digits: a printed interval contains the interval, and shows no digit below the first two of half of its width."""

import re

from hypothesis import given
from hypothesis import strategies as st

from ddplab.simulator.capacity.judgement import band, carried, duration, percent


def number(text):
    return float(text.replace(",", ""))


def place(text):
    """The value of the last digit that is not a zero before the decimal point, or of the last decimal."""
    digits = text.replace(",", "")
    if "." in digits:
        return 10.0 ** -len(digits.partition(".")[2])
    return 10.0 ** len(re.search(r"0*$", digits)[0]) if number(text) else 0.0


@given(st.floats(1e-3, 1e12), st.floats(1.001, 1e4))
def test_a_printed_interval_contains_the_interval_and_shows_no_more_than_it_carries(low, ratio):
    high = low * ratio
    first, _, last = band(low, high).partition("-")
    assert number(first) <= low * (1 + 1e-5)
    assert number(last or first) >= high * (1 - 1e-5)
    assert place(last or first) >= (high - low) / 2 / 100
    middle = (low + high) / 2
    assert abs(number(carried(middle, low, high)) - middle) <= (high - low) / 2 + 0.005 * middle


@given(st.floats(1e-3, 1e9), st.floats(1.001, 1e3), st.floats(0.5, 2), st.booleans())
def test_no_end_is_printed_on_the_other_side_of_what_it_is_compared_with(low, ratio, beside, of_high):
    """A deadline of 0.59 h was answered "no: 0.59-0.90 h"."""
    high = low * ratio
    limit = float(f"{(high if of_high else low) * beside:.4g}")
    first, _, last = band(low, high, limit=limit).partition("-")
    for end, shown in ((low, number(first)), (high, number(last or first))):
        if abs(end - limit) > 1e-4 * limit:
            assert (shown > limit) == (end > limit)
            assert (shown < limit) == (end < limit)


@given(st.floats(1e-6, 1e6), st.floats(1.001, 1e3), st.none() | st.floats(0.01, 100))
def test_a_duration_has_a_unit_in_which_its_end_has_no_zeros_and_contains_the_interval(low, ratio, beside):
    """A step of a run of one sample took 0.000019-0.000030 h, for a deadline of 0.0002778 h."""
    first, last, unit = re.fullmatch(
        r"([\d.,]+)-?([\d.,]*) (h|min|s)", duration(low, low * ratio, limit=beside and beside * low)
    ).groups()
    hour = {"h": 1, "min": 60, "s": 3600}[unit]
    assert number(first) <= low * hour * (1 + 1e-5)
    assert number(last or first) >= low * ratio * hour * (1 - 1e-5)
    assert number(last or first) >= 0.1 or unit == "s"
    assert number(last or first) < 10 or unit == "h" or number(last or first) / hour <= 0.2


def test_known_intervals():
    assert band(9312, 12877) == "9,300-12,900"
    assert band(300, 9100) == "300-10,000"
    assert band(37.3, 219) == "30-220"
    assert band(0.0034, 0.0041) == "0.00340-0.00410"
    assert (band(0, 0), band(5, 5)) == ("0", "5.00")
    assert band(1.0, float("inf"), unit=" h").endswith("unlimited h")
    assert percent(0.714, 0.829) == "71-83 %"
