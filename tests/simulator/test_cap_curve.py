"""Cap curve: every mark and line is inside the axes, whatever the times, and the legend names them all."""

from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure

from simulator.results.cap_curve import draw_cap_curve

from ..explore import examples


@examples(20)
@given(
    st.dictionaries(st.floats(1e-4, 1e4), st.integers(0, 10**9), min_size=1, max_size=20),
    st.integers(0, 10**9),
    st.integers(1000, 10**9),
    st.booleans(),
)
def test_marks_and_lines_lie_within_the_axes(more_by_cap, default_more_ns, bound_ns, is_list):
    by_cap_ns = {cap: bound_ns + more for cap, more in more_by_cap.items()}
    best = min(by_cap_ns, key=by_cap_ns.__getitem__)
    times = {"default_ns": bound_ns + default_more_ns, "plan_ns": min(bound_ns + default_more_ns, by_cap_ns[best])}
    ax = Figure().add_subplot()
    draw_cap_curve(by_cap_ns, ax, best_cap_mb=best, lower_bound_ns=bound_ns, is_list=is_list, **times)
    low, high = ax.get_ylim()
    left, right = ax.get_xlim()
    for ns in (bound_ns, by_cap_ns[best], *times.values()):
        assert low <= ns / 1e6 <= high
    assert left < best < right
    assert left < 25 < right
    assert [label.get_text().partition(":")[0].partition(",")[0] for label in ax.get_legend().get_texts()] == [
        "one cap for all buckets", "best cap", "torch's default", "plan", "bound that no buckets beat",
    ]  # fmt: skip
