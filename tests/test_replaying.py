"""Tutorial 7: in its picture each error of each method stands at its value; a busy machine is explained."""

from dataclasses import replace

import matplotlib.pyplot as plt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tutorials.replaying import DIFFER_AT_MOST, METHODS, TOO_BUSY, draw_residuals, mean_error, too_busy

from .explore import examples
from .validation_rows import row

ERRORS = st.fixed_dictionaries({field: st.floats(-1, 3) for field, _, _ in METHODS.values()})
ROWS = st.lists(ERRORS.map(lambda errors: replace(row(5, 100, 100), **errors)), min_size=1, max_size=4)


@examples(4)
@given(ROWS)
def test_each_error_of_each_method_is_a_marker_of_its_own(rows):
    figure, ax = plt.subplots()
    draw_residuals(rows, ax)
    places = set()
    for line in ax.lines[1:]:  # the first is the axis at zero
        field = METHODS[line.get_label()][0]
        assert line.get_ydata() == pytest.approx([100 * getattr(one, field) for one in rows])
        assert [round(x) for x in line.get_xdata()] == list(range(len(rows)))
        places.update(line.get_xdata())
    assert len(places) == len(METHODS) * len(rows)
    assert [label.get_text() for label in ax.get_xticklabels()] == ["5 MB"] * len(rows)
    plt.close(figure)
    for name, (field, _, _) in METHODS.items():
        assert mean_error(rows, name) == pytest.approx(sum(abs(getattr(one, field)) for one in rows) / len(rows))


@given(st.booleans(), st.floats(0, 10))
def test_a_busy_machine_is_explained_by_what_did_not_repeat(calm, differ):
    told = too_busy(calm=calm, differ=differ)
    assert bool(told) == (not calm or differ > DIFFER_AT_MOST)
    assert ("turns differ" in told) <= (differ > DIFFER_AT_MOST)
    assert (told == TOO_BUSY) == (not calm)
