"""Residual plots: a mark for each method at its error, and one line for each configuration."""

from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure

from tests.explore import examples
from validation.residual_plot import MARKS, OURS, Residual, draw_residuals

errors = st.floats(-1, 10)
residuals = st.builds(
    Residual,
    error=errors,
    baselines=st.dictionaries(st.sampled_from([name for name in MARKS if name != OURS]), errors),
    interval=st.none() | st.tuples(errors, errors).map(lambda pair: tuple(sorted(pair))),
)
some = st.lists(residuals, min_size=1, max_size=3)


@examples(15)
@given(
    st.dictionaries(st.text("ab", min_size=1), st.lists(residuals, min_size=1, max_size=3), min_size=1, max_size=3)
)
def test_every_error_is_a_mark_in_percent_on_the_line_of_its_configuration(groups):
    ax = draw_residuals(groups, Figure().add_subplot(), named=False)
    drawn: dict[float, list[float]] = {}
    for line in ax.lines:
        if line.get_marker() in {marker for marker, _ in MARKS.values()}:
            (x,), (y,) = line.get_data()
            drawn.setdefault(y, []).append(x)
    lines = [[*one.baselines.values(), one.error] for group in groups.values() for one in group]
    assert [drawn[y] for y in sorted(drawn)] == [[100 * error for error in line] for line in lines]
    assert [label.get_text() for label in ax.get_yticklabels()] == list(groups)
    assert ax.get_legend() is None


def test_the_legend_names_the_methods_that_were_drawn():
    one = Residual(error=0.1, baselines={"no overlap": 0.5})
    ax = draw_residuals({"a": [one], "b": [Residual(error=0.0)]}, Figure().add_subplot())
    assert [text.get_text() for text in ax.get_legend().get_texts()] == [OURS, "no overlap"]
