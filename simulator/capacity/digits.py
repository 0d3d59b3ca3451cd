"""Digits: numbers in words, with no more digits than their interval carries.

The rule is that of the Particle Data Group ("Review of Particle Physics", Introduction, section 5.3): two digits of
an error are shown if its first three digits are at most 354, else one. The error is half of the interval's width.
"""

from collections.abc import Callable
from math import ceil, floor, isfinite, log10

MOST_DIGITS = 3
"""Significant digits of a number whose interval is narrower than they show."""
TWO_DIGITS = 3.55
"""First digits of an error, as a number from 1 to 10, below which two digits of it are shown."""


def carried(value: float, low: float, high: float) -> str:
    """Return a number, rounded to the last digit that its interval carries."""
    return _written(value, _step(low, high, value), round)


def band(low: float, high: float, *, unit: str = "") -> str:
    """Return an interval in words, such as 9,300-12,900; its ends are rounded outwards, as `carried`.

    Args:
        low: Lower end, at least 0.
        high: Upper end.
        unit: Appended, such as " h".
    """
    first, last = _written(low, _step(low, high, low), floor), _written(high, _step(low, high, high), ceil)
    return (first if first == last else f"{first}-{last}") + unit


def percent(low: float, high: float) -> str:
    """Return an interval of fractions in percent."""
    return band(100 * low, 100 * high, unit=" %")


def _step(low: float, high: float, value: float) -> float:
    """Return the value of the last place to show of a number in this interval; it has one digit at least."""
    first = 10.0 ** floor(log10(value)) if value > 0 and isfinite(value) else 0.0
    width = (high - low) / 2
    place = 10.0 ** floor(log10(width)) if width > 0 and isfinite(width) else 0.0
    if width < TWO_DIGITS * place:
        place /= 10
    return min(first, max(place, first / 10 ** (MOST_DIGITS - 1))) or place or 1.0


def _written(value: float, step: float, rounded: Callable[[float], int]) -> str:
    if not isfinite(value):
        return "unlimited"
    whole = rounded(round(value / step, 6))  # a quotient such as 8.999999999 is 9
    return f"{whole * step:,.{max(0, -floor(log10(step) + 1e-9))}f}"
